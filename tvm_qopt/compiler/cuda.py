"""CUDA artifacts whose kernels are machine code, built without a GPU and loaded without a compiler.

TVM by itself offers two bad choices. With no CUDA driver it stores the CUDA *source* in kernel.so,
and loading that asks for a compiler. With a driver it compiles for the GPU at hand only, and with
`--use_fast_math`: approximate division and root, denormals to zero, so wrong codes. So here TVM
writes source only (`source_only`), `compile_cuda` turns it into one fatbin with a cubin for each
architecture, and `export_cuda` puts the fatbin where the source was, through `fpack_imports`, the
hook that TVM's export has for packing device code. kernel.so is then all that a GPU machine needs:
`tvm_ffi.load_module(path)` after libtvm_runtime_cuda, no callback, no second file.

Dropped: a callback registered at load that hands out a fatbin lying beside kernel.so (a global
function that `import tvm` registers too and then fails on, in the user's process), and a stub
libcuda at build (needs gcc, the CUDA runtime, and TVM's C++ compile path). The price of this way is
`_replace_source`, which knows the outer form of TVM's packed modules and refuses any other.

There is no PTX in the fatbin: of the same major version a driver older than the compiler takes
cubins and refuses PTX. Imports tvm_ffi, layer 0 and, for the libraries in NVIDIA's wheels, ctypes
(cuda-bindings wants a newer Python than this package, and 8 MB for sixteen functions).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm_ffi

from tvm_qopt.compiler.gate import leave_if_gated
from tvm_qopt.errors import BuildError, ToolMissing, UnsupportedSpec

Compiler = Literal["nvcc", "nvrtc"]

# Understood by nvcc and NVRTC alike. The first three are both compilers' defaults, said aloud
# because they win over a --use_fast_math that NVCC_APPEND_FLAGS brings in. -w: the preamble that
# TVM emits warns for pages, which would bury an error.
OPTIONS = ("--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17", "-w")

_CONSTANT_BITS = re.compile(r"\(\*\(float \*\)\(&\((\d+)\)\)\)")

_WHEEL_PARTS = (
    "lib/libnvrtc.so.13",
    "lib/libnvfatbin.so.13",
    "include/cuda_fp16.h",
    "include/cccl/cuda/std/cstdint",
)


def installed_compilers() -> list[Compiler]:
    """The compilers at hand, the preferred one first: nvcc of a toolkit, NVRTC of PyPI's wheels."""
    found: dict[Compiler, object] = {"nvcc": _find_nvcc(), "nvrtc": _find_wheels()}
    return [name for name, place in found.items() if place]


def find_cuda_compiler() -> Compiler | None:
    """The compiler that `compile_cuda` uses unless told otherwise; None if there is none."""
    return next(iter(installed_compilers()), None)


def compile_cuda(
    source: str, archs: Sequence[str], *, compiler: Compiler | None = None, timeout: float = 600.0
) -> bytes:
    """A fatbin with one cubin of `source` for each of `archs` ("sm_75" ... "sm_120").

    Division and root are IEEE, denormals are kept, multiply-adds are fused. The same compiler gives
    the same bytes. `timeout` (seconds) binds nvcc only; NVRTC runs in this process.
    Raises ToolMissing without a compiler, BuildError with what the compiler said.
    """
    numbers, source = _arch_numbers(archs), leave_if_gated(_with_whole_warps(source))
    if _choose(compiler) == "nvcc":
        code = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
        return _run_nvcc(source, ["--fatbin", *code], timeout=timeout)
    wheels = _load_wheels()
    cubins = {n: _run_nvrtc(wheels, source, f"sm_{n}") for n in numbers}
    return _join_cubins(wheels.nvfatbin, cubins)


def compile_ptx(
    source: str, arch: str, *, compiler: Compiler | None = None, timeout: float = 600.0
) -> str:
    """The PTX of `source` under the very options of `compile_cuda`: evidence, not an artifact."""
    (number,), source = _arch_numbers([arch]), leave_if_gated(_with_whole_warps(source))
    virtual = f"compute_{number}"
    if _choose(compiler) == "nvcc":
        options = ["--ptx", f"--gpu-architecture={virtual}"]
        return _run_nvcc(source, options, timeout=timeout).decode()
    return _run_nvrtc(_load_wheels(), source, virtual).rstrip(b"\0").decode()


def _with_whole_warps(source: str) -> str:
    """Shuffles that name all lanes of a warp: every schedule launches whole warps.

    TVM names the lanes that happen to run together, which after a divergent loop need not be all.
    It also reads the bits of a constant (a NaN) from its address, which C++ does not allow.
    """
    source = source.replace("__activemask()", "0xffffffffu")
    return _CONSTANT_BITS.sub(r"__int_as_float(\1)", source)


@contextmanager
def source_only() -> Iterator[None]:
    """Make `tvm.compile` inside store CUDA source, also where a CUDA driver is installed.

    There TVM would compile at once by its own callback (fast-math, this GPU only). It reads this
    switch from the environment at each compile, which is why this is no option of the target.
    """
    name = "TVM_COMPILE_FORCE_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def device_source(executable: Any) -> str:
    """The CUDA source that `tvm.compile(..., target cuda)` made under `source_only`."""
    imports = list(executable.mod.imports)
    kinds = [module.kind for module in imports]
    if kinds != ["cuda"]:
        raise BuildError(f"expected one CUDA module below the host module, got {kinds or 'none'}")
    return str(imports[0].inspect_source())


def export_cuda(
    executable: Any,
    path: Path,
    archs: Sequence[str],
    *,
    compiler: Compiler | None = None,
    fcompile: Any = None,
) -> None:
    """Write `executable` to `path` (kernel.so) with cubins for `archs` in place of CUDA source.

    `executable` is what `tvm.compile` returned under `source_only`; `fcompile` links, as in TVM's
    `export_library` (a cross compiler, for another host). Exceptions: `compile_cuda`'s, and
    BuildError when TVM's packed form is not the one known here.
    """
    source = device_source(executable)
    fatbin = compile_cuda(source, archs, compiler=compiler)

    def pack(module: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
        packed = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(module)
        blob = _replace_source(packed.numpy().tobytes(), source.encode(), fatbin)
        host = module.get_function("_get_target_string")()
        make = tvm_ffi.get_global_func("codegen.codegen_blob")
        path_object = os.path.join(folder, f"{prefix}device.o")
        make(blob, is_system_lib, host, prefix).write_to_file(path_object)
        return path_object

    executable.export_library(str(path), fcompile=fcompile, fpack_imports=pack)


def list_cubins(path: Path) -> list[str]:
    """The architectures with a cubin in `path`: a kernel.so or a bare fatbin; [] if there is none.

    Reads the entries' headers, which stay plain when the code is compressed, so neither a CUDA
    toolkit nor TVM is asked. PTX entries do not count.
    """
    data = Path(path).read_bytes()
    found: set[int] = set()
    start = data.find(_FATBIN_MAGIC)
    while start >= 0:
        found |= _cubins_at(data, start)
        start = data.find(_FATBIN_MAGIC, start + 1)
    return [f"sm_{number}" for number in sorted(found)]


# --- choice of the compiler ---


def _arch_numbers(archs: Sequence[str]) -> list[int]:
    """[75, 120] of ["sm_120", "sm_75"]: sorted, so that the same set gives the same bytes.

    Names with a suffix (sm_90a) are refused: their cubins run on that one chip, and the generated
    kernels use nothing that only they have.
    """
    wrong = [arch for arch in archs if not re.fullmatch(r"sm_[1-9]\d{1,2}", arch)]
    if wrong or not archs:
        raise UnsupportedSpec(f"CUDA architectures are given as 'sm_80', got {wrong or 'none'}")
    return sorted({int(arch.removeprefix("sm_")) for arch in archs})


def _choose(compiler: Compiler | None) -> Compiler:
    chosen = compiler or find_cuda_compiler()
    if chosen is None:
        raise ToolMissing(
            "no CUDA compiler found. Install a CUDA toolkit, so that nvcc is on PATH, "
            "or NVIDIA's compiler library from PyPI: pip install 'tvm_qopt[cuda]'"
        )
    return chosen


def _find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _find_wheels() -> Path | None:
    """Folder nvidia/cu13 of NVIDIA's wheels if it has NVRTC, nvFatbin and the headers."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        root = Path(folder) / "cu13"
        if all((root / part).exists() for part in _WHEEL_PARTS):
            return root
    return None


# --- nvcc ---


def _run_nvcc(source: str, options: Sequence[str], *, timeout: float) -> bytes:
    """What nvcc writes for `source`; nvcc needs the host compiler too, for its preprocessor."""
    nvcc = _find_nvcc()
    if nvcc is None:
        raise ToolMissing("nvcc was asked for and is not on PATH; install a CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-nvcc-") as folder:
        (Path(folder) / "kernel.cu").write_text(source)
        command = [nvcc, *OPTIONS, *options, "--output-file=kernel.out", "kernel.cu"]
        _run(command, folder=folder, timeout=timeout)
        return (Path(folder) / "kernel.out").read_bytes()


def _run(command: Sequence[str], *, folder: str, timeout: float) -> None:
    """Run nvcc and, when it takes too long, end it with the compilers that it has started."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise BuildError(f"nvcc took more than {timeout:g} s and was ended") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise BuildError(f"nvcc failed ({process.returncode}): {' '.join(command)}\n{output}")


# --- NVRTC and nvFatbin, from PyPI ---


@dataclass(frozen=True)
class _Wheels:
    nvrtc: ctypes.CDLL
    nvfatbin: ctypes.CDLL
    includes: tuple[Path, ...]


def _load_wheels() -> _Wheels:
    root = _find_wheels()
    if root is None:
        raise ToolMissing("NVRTC was asked for and is not installed: pip install 'tvm_qopt[cuda]'")
    # NVRTC opens its builtins by name, and 13.0 does not look for them beside itself.
    for builtins in sorted((root / "lib").glob("libnvrtc-builtins.so.13*")):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(root / "lib" / "libnvrtc.so.13"))
    nvfatbin = ctypes.CDLL(str(root / "lib" / "libnvfatbin.so.13"))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    nvfatbin.nvFatbinGetErrorString.restype = ctypes.c_char_p
    return _Wheels(nvrtc, nvfatbin, (root / "include", root / "include" / "cccl"))


def _run_nvrtc(wheels: _Wheels, source: str, arch: str) -> bytes:
    """The cubin of `source` for "sm_NN", its PTX for "compute_NN"."""
    nvrtc, program = wheels.nvrtc, ctypes.c_void_p()
    includes = [f"-I{folder}" for folder in wheels.includes]
    options = [option.encode() for option in (f"-arch={arch}", *OPTIONS, *includes)]
    create = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _check(create, "nvrtcCreateProgram", nvrtc.nvrtcGetErrorString)
    try:
        array = (ctypes.c_char_p * len(options))(*options)
        if nvrtc.nvrtcCompileProgram(program, len(options), array) != 0:
            log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise BuildError(f"NVRTC failed for {arch}:\n{log.decode(errors='replace')}")
        if arch.startswith("compute_"):
            return _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        return _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _join_cubins(nvfatbin: ctypes.CDLL, cubins: dict[int, bytes]) -> bytes:
    """One fatbin of the cubins, given by architecture number."""
    handle, message = ctypes.c_void_p(), nvfatbin.nvFatbinGetErrorString
    created = nvfatbin.nvFatbinCreate(ctypes.byref(handle), None, ctypes.c_size_t(0))
    _check(created, "nvFatbinCreate", message)
    try:
        for number, cubin in cubins.items():
            name, size = str(number).encode(), ctypes.c_size_t(len(cubin))
            added = nvfatbin.nvFatbinAddCubin(handle, cubin, size, name, b"kernel.cubin")
            _check(added, f"nvFatbinAddCubin for sm_{number}", message)
        return _fetch(nvfatbin.nvFatbinSize, nvfatbin.nvFatbinGet, handle)
    finally:
        nvfatbin.nvFatbinDestroy(ctypes.byref(handle))


def _fetch(ask_size: Any, get: Any, handle: ctypes.c_void_p) -> bytes:
    """The pattern of both libraries: ask for the size, then have a buffer filled."""
    size = ctypes.c_size_t()
    if ask_size(handle, ctypes.byref(size)) != 0:
        raise BuildError(f"{ask_size.__name__} failed")
    buffer = ctypes.create_string_buffer(size.value)
    if get(handle, buffer) != 0:
        raise BuildError(f"{get.__name__} failed")
    return buffer.raw


def _check(result: int, what: str, message: Any) -> None:
    if result != 0:
        raise BuildError(f"{what} failed: {message(result).decode()}")


# --- TVM's packed modules, and fatbins ---


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


# The tree of modules (child lists in compressed row form: three offsets, one child), then the kind
# of each: the host library itself, whose bytes are the .so, and the CUDA module below it.
_PACKED_HEAD = struct.pack("<6Q", 3, 0, 1, 1, 1, 1) + _sized(b"_lib") + _sized(b"cuda")


def _replace_source(blob: bytes, source: bytes, fatbin: bytes) -> bytes:
    """`blob`, TVM's packed modules, with its CUDA source replaced by `fatbin`.

    The bytes of a CUDA module are its format, the launch parameters of its kernels and its code;
    texts carry a 64-bit length. The launch parameters are copied unread; every other byte is
    compared, so a TVM that packs in another way ends the build and not a user's process.
    """
    source_format, code = _sized(b"cuda"), _sized(source)
    size = len(blob) - len(_PACKED_HEAD) - 16
    expected_head = struct.pack("<Q", len(blob) - 8) + _PACKED_HEAD + struct.pack("<Q", size)
    module = blob[len(expected_head) :]
    is_known = blob.startswith(expected_head) and module.startswith(source_format)
    if not (is_known and module.endswith(code)):
        raise BuildError(
            "TVM packs CUDA modules in a form unknown here; compile under source_only() "
            "with the apache-tvm version that tvm_qopt asks for"
        )
    launch = module[len(source_format) : len(module) - len(code)]
    return _sized(_PACKED_HEAD + _sized(_sized(b"fatbin") + launch + _sized(fatbin)))


# NVIDIA documents no fatbin header. These fields were read off files written by nvcc 13.0 and
# nvFatbin 13.0 and 13.5: magic, version, header size, size of the entries; then for each entry its
# kind, version, header size, size, four words on compression and the toolkit, architecture.
_FATBIN = struct.Struct("<IHHQ")
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_ENTRY = struct.Struct("<HHIQ12xI")
_KIND_CUBIN = 2


def _cubins_at(data: bytes, start: int) -> set[int]:
    """Architecture numbers of the cubins in the fatbin at `start`; empty if it is none."""
    if start + _FATBIN.size > len(data):
        return set()
    _, version, header, size = _FATBIN.unpack_from(data, start)
    position, end = start + header, start + header + size
    if (version, header) != (1, _FATBIN.size) or end > len(data):
        return set()
    found = set()
    while position + _ENTRY.size <= end:
        kind, _, entry_header, entry_size, number = _ENTRY.unpack_from(data, position)
        if kind == _KIND_CUBIN:
            found.add(number)
        position += entry_header + entry_size
    return found
