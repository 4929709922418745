"""CUDA artifacts are built and loaded here with no GPU, and loaded with no compiler.

The driver and the CUDA runtime that libtvm_runtime_cuda links are played by two small C libraries,
which record what would reach a GPU: the image that is loaded and the grids that are launched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import te, tirx

from tvm_qopt.compiler import cuda
from tvm_qopt.compiler.build import compile_spec
from tvm_qopt.errors import ArtifactInvalid, BuildError, ToolMissing, UnsupportedSpec
from tvm_qopt.runtime.cuda import check_cubins
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

ARCHS = ["sm_80", "sm_90"]
WHY_SKIPPED = {
    "nvcc": "nvcc is not installed: no CUDA toolkit on PATH",
    "nvrtc": "NVRTC, nvFatbin or the CUDA headers are not installed: pip install 'tvm_qopt[cuda]'",
}


def compile_stand_in() -> Any:
    """An AdamW-like step with root, division, float16, uint8, vector loads and two kernels."""
    nb = te.var("nb", "int64")
    shape = (nb, 256)
    p = te.placeholder(shape, "float32", name="p")
    g = te.placeholder(shape, "float16", name="g")
    codes = te.placeholder(shape, "uint8", name="codes")

    def number(value: float) -> Any:
        return tirx.const(value, "float32")

    def moment(b: Any, i: Any) -> Any:
        return codes[b, i].astype("float32") * number(0.9 / 255) + g[b, i].astype("float32")

    def step(b: Any, i: Any) -> Any:
        m = moment(b, i)
        return p[b, i] - m / (te.sqrt(m * m * number(0.001)) + number(1e-8))

    p_out = te.compute(shape, step, name="p_out")
    codes_out = te.compute(
        shape, lambda b, i: te.round(moment(b, i) * number(255)).astype("uint8"), name="codes_out"
    )
    tensors = [p, g, codes, codes_out, p_out]
    sch = tvm.s_tir.Schedule(te.create_prim_func(tensors, index_dtype_override="int64"))
    for stage in ("codes_out", "p_out"):
        block, element = sch.get_loops(sch.get_sblock(stage))
        thread, lane = sch.split(element, [None, 4])
        sch.bind(block, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.vectorize(lane)
    target = tvm.target.Target({"kind": "cuda", "arch": ARCHS[0]}, host={"kind": "llvm"})
    with cuda.source_only():
        return tvm.compile(sch.mod, target=target)


@pytest.fixture(scope="module")
def executable() -> Any:
    return compile_stand_in()


@pytest.fixture(scope="module", params=["nvcc", "nvrtc"])
def compiler(request: pytest.FixtureRequest) -> cuda.Compiler:
    name: cuda.Compiler = request.param
    if name not in cuda.installed_compilers():
        pytest.skip(WHY_SKIPPED[name])
    return name


@pytest.fixture(scope="module")
def artifact(
    executable: Any, compiler: cuda.Compiler, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp(compiler) / "kernel.so"
    cuda.export_cuda(executable, path, ARCHS, compiler=compiler)
    return path


# --- what is in the artifact ---


def test_artifact_has_a_cubin_for_every_architecture(artifact: Path) -> None:
    assert cuda.list_cubins(artifact) == ARCHS


def test_artifact_holds_no_source(artifact: Path) -> None:
    assert b"__launch_bounds__" not in artifact.read_bytes()


def test_division_and_root_are_exact_and_denormals_kept(
    executable: Any, compiler: cuda.Compiler
) -> None:
    ptx = cuda.compile_ptx(cuda.device_source(executable), "sm_80", compiler=compiler)
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx
    assert ".approx" not in ptx and ".ftz" not in ptx


def test_same_compiler_gives_the_same_bytes_in_any_order_of_architectures(
    executable: Any, compiler: cuda.Compiler
) -> None:
    source = cuda.device_source(executable)
    first = cuda.compile_cuda(source, ARCHS, compiler=compiler)
    assert first == cuda.compile_cuda(source, [*reversed(ARCHS), "sm_80"], compiler=compiler)


def test_source_is_in_an_artifact_that_tvm_exports_alone(executable: Any, tmp_path: Path) -> None:
    executable.export_library(str(tmp_path / "kernel.so"))
    assert cuda.list_cubins(tmp_path / "kernel.so") == []


def test_list_cubins_takes_no_other_bytes_for_a_fatbin(tmp_path: Path) -> None:
    magic = bytes.fromhex("50ed55ba")
    (tmp_path / "junk").write_bytes(magic + bytes(30) + magic + b"\x01\x00\x10\x00" + b"\xff" * 60)
    assert cuda.list_cubins(tmp_path / "junk") == []


# --- what a kernel reads and writes ---

SCALARS_IN, SCALARS_OUT = {"ld.global.b32": 3}, {"st.global.b32": 3}
"""A thread's of AdamW in 8 or 4 bits: two scales and a counter."""
HYPER_IN = {
    "main": {"ld.global.nc.v4.b32": 2, "ld.global.nc.b32": 1},
    "main_any": {"ld.global.nc.b32": 8},
}
"""The scalars of the step, and by itself the one that holds a step back."""
DYNAMIC8, FOUR_BITS = 2 * 6, 2 + 3
"""Entries of tables that a lane holds.  Of each moment: offset and unit; where a class begins, its
factor, shift and base.  The levels of each, and midpoints for three rounds of halving.  Where codes
come four at a time also the bits of 2^23, into which they are moved."""
ACCESSES = [  # an access of p (and of g), how many; one of the two codes, how many: of 8 elements
    ("adamw-dynamic8-b256-p_f32-g_f32", "main", ("v4.b32", 2), ("b32", 4), DYNAMIC8 + 1),
    ("adamw-dynamic8-b256-p_bf16-g_bf16", "main", ("v4.b16", 2), ("b32", 4), DYNAMIC8 + 1),
    ("adamw-fp8-b256-p_f16-g_f16", "main", ("v4.b16", 2), ("b32", 4), 0),
    ("adamw-4bit-b256-p_f32-g_f32", "main", ("v4.b32", 2), ("v2.b8", 4), FOUR_BITS),
    ("adamw-4bit-b256-p_f32-g_f32", "main_any", ("b32", 8), ("b8", 8), FOUR_BITS),
    ("adamw-dynamic8-b256-p_f32-g_f32", "main_any", ("b32", 8), ("b8", 16), DYNAMIC8),
]


@pytest.mark.parametrize(("name", "entry", "weights", "codes", "tables"), ACCESSES)
def test_kernel_moves_each_byte_once(
    compiler: cuda.Compiler, name: str, entry: str, weights: Any, codes: Any, tables: int
) -> None:
    ptx = _ptx(compiler, name, entry)
    access = r"(?:ld|st)\.global(?:\.nc)?(?:\.v\d)?\.[a-z]\d+"
    found = Counter(re.sub(r"\.[fus](\d+)$", r".b\1", text) for text in re.findall(access, ptx))
    wanted = Counter(SCALARS_IN) + Counter(SCALARS_OUT) + Counter(HYPER_IN[entry])
    wanted["ld.global.nc.b32"] += tables
    for operation, (width, times) in [("ld.global", codes), ("st.global", codes)]:
        wanted[f"{operation}.{width}"] += times
    for operation in ("ld.global", "ld.global.nc", "st.global"):
        wanted[f"{operation}.{weights[0]}"] += weights[1]
    assert found == wanted


def test_kernel_divides_and_takes_roots_exactly(compiler: cuda.Compiler) -> None:
    ptx = _ptx(compiler, ACCESSES[0][0], "main")
    assert ".approx" not in ptx and ".ftz" not in ptx and "sqrt.rn.f32" in ptx


@cache
def _ptx(compiler: cuda.Compiler, name: str, entry: str) -> str:
    target = get_target("cuda-sm80")
    source = cuda.device_source(compile_spec(KernelSpec.parse(name), target, [entry]))
    return cuda.compile_ptx(source, "sm_80", compiler=compiler)


# --- what ends a build ---


def test_no_compiler_names_both_ways_of_getting_one(
    executable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_find_nvcc", lambda: None)
    monkeypatch.setattr(cuda, "_find_wheels", lambda: None)
    assert cuda.find_cuda_compiler() is None
    with pytest.raises(ToolMissing, match=r"nvcc .*pip install 'tvm_qopt\[cuda\]'"):
        cuda.export_cuda(executable, tmp_path / "kernel.so", ARCHS)
    assert not (tmp_path / "kernel.so").exists()


def test_what_the_compiler_said_is_in_the_error(compiler: cuda.Compiler) -> None:
    with pytest.raises(BuildError, match=r"kernel\.cu.*no_such_name"):
        cuda.compile_cuda("__global__ void k() { no_such_name(); }", ARCHS, compiler=compiler)


def test_slow_nvcc_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cuda, "_find_nvcc", lambda: str(nvcc))
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"more than 0\.2 s"):
        cuda.compile_cuda("", ARCHS, compiler="nvcc", timeout=0.2)
    assert time.monotonic() - started < 30  # the child holds the pipe open for 60 s


@pytest.mark.parametrize("archs", [[], ["90"], ["sm_90a"], ["compute_80"], ["sm_80", "native"]])
def test_other_names_than_architectures_are_refused(archs: list[str]) -> None:
    with pytest.raises(UnsupportedSpec, match="sm_80"):
        cuda.compile_cuda("", archs)


@pytest.mark.parametrize("edit", ["shorter", "other_format", "other_source", "two_modules"])
def test_another_packed_form_is_refused(executable: Any, edit: str) -> None:
    pack = tvm.get_global_func("runtime.ModulePackImportsToTensor")
    blob, source = pack(executable.mod).numpy().tobytes(), cuda.device_source(executable).encode()
    assert cuda._replace_source(blob, source, b"fatbin").endswith(b"fatbin")
    edited = {
        "shorter": blob[:-1],
        "other_format": blob.replace(b"cuda\x02", b"cubi\x02", 1),
        "other_source": blob[:-1] + b"#",
        "two_modules": blob[:8] + b"\x04" + blob[9:],
    }[edit]
    assert edited != blob
    with pytest.raises(BuildError, match="form unknown"):
        cuda._replace_source(edited, source, b"fatbin")


# --- loading, with a driver and a CUDA runtime that only take notes ---

FAKE_DRIVER = """
#include <string.h>
const void *fake_image; char fake_names[256]; unsigned fake_launches, fake_dims[6];
int cuModuleLoadData(void **module, const void *image) {
  fake_image = image; *module = &fake_image; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  strcat(strcat(fake_names, name), " "); *function = module; return 0; }
int cuLaunchKernelEx(const unsigned *config, void *function, void **args, void **extra) {
  memcpy(fake_dims, config, sizeof fake_dims); ++fake_launches; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "fake"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "fake"; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuDeviceGetName(char *name, int size, int d) { *name = 0; return 0; }
int cuTensorMapEncodeTiled(void *map) { return 1; }
"""

FAKE_RUNTIME = """
#include <stdlib.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaMalloc(void **p, size_t n) { *p = aligned_alloc(256, (n + 255) / 256 * 256); return 0; }
int cudaFree(void *p) { free(p); return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {  /* compute capability 8.9 */
  *value = attribute == 75 ? 8 : attribute == 76 ? 9 : 0; return 0; }
const char *cudaGetErrorName(int error) { return "fake"; }
const char *cudaGetErrorString(int error) { return "fake"; }
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cudaEventCreate) NOTHING(cudaEventDestroy) NOTHING(cudaEventElapsedTime)
NOTHING(cudaEventRecord) NOTHING(cudaEventSynchronize) NOTHING(cudaFreeHost)
NOTHING(cudaGetDeviceProperties) NOTHING(cudaGetLastError) NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy) NOTHING(cudaGraphInstantiate) NOTHING(cudaGraphLaunch)
NOTHING(cudaMallocHost) NOTHING(cudaMemGetInfo) NOTHING(cudaMemcpyAsync)
NOTHING(cudaMemcpyPeerAsync) NOTHING(cudaPeekAtLastError) NOTHING(cudaSetDevice)
NOTHING(cudaStreamBeginCapture) NOTHING(cudaStreamCreate) NOTHING(cudaStreamCreateWithFlags)
NOTHING(cudaStreamDestroy) NOTHING(cudaStreamEndCapture) NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)
"""

# What runtime/library.py does for CUDA, and nothing more: tvm_ffi and two libraries.
LOAD = """
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
ctypes.CDLL(sys.argv[2])
import tvm_ffi
from tvm_ffi.libinfo import load_lib_ctypes
from tvm_qopt.runtime.cuda import check_cubins, device_arch, load_cuda_libraries
load_cuda_libraries()
for name in ("tvm_runtime", "tvm_runtime_cuda"):
    load_lib_ctypes(package="apache-tvm", target_name=name, mode="RTLD_GLOBAL")
"""

LOAD_AND_CALL = (
    LOAD
    + """
assert tvm_ffi.get_global_func("tvm_callback_cuda_compile", allow_missing=True) is None
main = tvm_ffi.load_module(sys.argv[3])["main"]

allocate = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
def tensor(dtype):
    gpu = tvm_ffi.device("cuda", 0)
    return allocate(tvm_ffi.Shape((3, 256)), tvm_ffi.dtype(dtype), gpu, None)
main(*map(tensor, ["float32", "float16", "uint8", "uint8", "float32"]))

image = ctypes.c_void_p.in_dll(driver, "fake_image").value
assert ctypes.string_at(image, 4) == bytes.fromhex("50ed55ba")   # a fatbin, where the driver
assert image % 8 == 0                                            # can read its 64-bit fields
assert ctypes.c_uint.in_dll(driver, "fake_launches").value == 2
assert list((ctypes.c_uint * 6).in_dll(driver, "fake_dims")) == [3, 1, 1, 64, 1, 1]
names = (ctypes.c_char * 256).in_dll(driver, "fake_names").value
assert sorted(names.split()) == [b"main_kernel", b"main_kernel_1"]
assert device_arch(0) == "sm_89"
check_cubins(["sm_80", "sm_90"], device_arch(0))
assert "tvm" not in sys.modules
"""
)

COMPILE_BESIDE_A_DRIVER = (
    LOAD
    + """
import tvm, test_cuda_build
assert tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None
@tvm_ffi.register_global_func("tvm_callback_cuda_compile", override=True)
def compile_source(source):
    raise AssertionError("TVM asked for its own compiler")
executable = test_cuda_build.compile_stand_in()
test_cuda_build.cuda.export_cuda(
    executable, sys.argv[3], test_cuda_build.ARCHS, compiler=sys.argv[4])
"""
)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths of a libcuda.so.1 and a libcudart.so.13 that a child process loads before TVM's."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is not installed, and the fake driver is C")
    folder = tmp_path_factory.mktemp("fakes")
    (folder / "versions").write_text("libcudart.so.13 { global: *; };\n")
    versions = f"-Wl,--version-script={folder / 'versions'}"
    build = [gcc, "-shared", "-fPIC", "-w", "-x", "c", "-"]
    paths = []
    for soname, text, extra in (
        ("libcuda.so.1", FAKE_DRIVER, []),
        ("libcudart.so.13", FAKE_RUNTIME, [versions]),
    ):
        paths.append(str(folder / soname))
        command = [*build, "-o", paths[-1], f"-Wl,-soname,{soname}", *extra]
        subprocess.run(command, input=text, text=True, check=True)
    return paths


def run_child(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", script, *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout + child.stderr


def import_paths() -> str:
    here = Path(__file__).resolve()
    return f"{here.parents[2]}:{here.parent}"


def test_artifact_loads_and_launches_without_compiler(artifact: Path, fakes: list[str]) -> None:
    nothing_on_path = {"PYTHONPATH": import_paths(), "PATH": ""}
    run_child(LOAD_AND_CALL, [*fakes, str(artifact)], nothing_on_path)


def test_tvm_compiles_nothing_itself_where_there_is_a_driver(
    compiler: cuda.Compiler, fakes: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": import_paths()}
    run_child(COMPILE_BESIDE_A_DRIVER, [*fakes, str(tmp_path / "kernel.so"), compiler], environment)
    assert cuda.list_cubins(tmp_path / "kernel.so") == ARCHS


@pytest.mark.parametrize(
    ("archs", "device", "runs"),
    [
        (["sm_80", "sm_90"], "sm_80", True),
        (["sm_80"], "sm_89", True),
        (["sm_89"], "sm_80", False),
        (["sm_80", "sm_90"], "sm_75", False),
        (["sm_90"], "sm_100", False),
        (["sm_120"], "sm_121", True),
    ],
)
def test_cubins_run_from_their_minor_version_upwards(
    archs: list[str], device: str, *, runs: bool
) -> None:
    if runs:
        check_cubins(archs, device)
        return
    with pytest.raises(ArtifactInvalid, match=f"build it again with {device}"):
        check_cubins(archs, device)
