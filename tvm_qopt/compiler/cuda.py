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

PTX goes in for the newest architecture alone, for cards later than this package, whose driver
compiles it at load. No known card takes it: a driver older than the compiler refuses PTX, and takes
the cubins of its own major version.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import tvm_ffi

from tvm_qopt.compiler.cuda_text import edit
from tvm_qopt.compiler.fatbin import list_cubins as list_cubins
from tvm_qopt.compiler.gate import leave_if_gated
from tvm_qopt.compiler.many import with_bodies
from tvm_qopt.compiler.nvrtc import compile_program, join_code, load_wheels
from tvm_qopt.compiler.nvrtc import find_wheels as _find_wheels
from tvm_qopt.errors import BuildError, ToolMissing, UnsupportedSpec
from tvm_qopt.targets import cuda_code

Compiler = Literal["nvcc", "nvrtc"]

# Understood by nvcc and NVRTC alike. The first three are both compilers' defaults, said aloud
# because they win over a --use_fast_math that NVCC_APPEND_FLAGS brings in. -w: the preamble that
# TVM emits warns for pages, which would bury an error.
OPTIONS = ("--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17", "-w")
VERBOSE = "--ptxas-options=-v"


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
    """A fatbin with one cubin of `source` for each of `archs` ("sm_75" ... "sm_120"), and PTX of
    the newest architecture where it is among them.

    Division and root are IEEE, denormals are kept, multiply-adds are fused. The same compiler gives
    the same bytes. `timeout` (seconds) binds nvcc only; NVRTC runs in this process.
    Raises ToolMissing without a compiler, BuildError with what the compiler said.
    """
    names = cuda_code([f"sm_{number}" for number in _arch_numbers(archs)])
    source = _finished(source)
    if choose_compiler(compiler) == "nvcc":
        code = [f"-gencode=arch=compute_{name.rpartition('_')[2]},code={name}" for name in names]
        return _run_nvcc(source, ["--fatbin", *code], timeout=timeout)[0]
    wheels = load_wheels()
    return join_code(
        wheels, {name: compile_program(wheels, source, name, OPTIONS)[0] for name in names}
    )


def compile_cubin(
    source: str, arch: str, *, compiler: Compiler | None = None, timeout: float = 600.0
) -> tuple[bytes, str]:
    """The cubin of one architecture, and what ptxas says of its kernels (registers, spills ...)."""
    (number,), source = _arch_numbers([arch]), _finished(source)
    if choose_compiler(compiler) == "nvcc":
        options = ["--cubin", f"--gpu-architecture=sm_{number}", VERBOSE]
        return _run_nvcc(source, options, timeout=timeout)
    return compile_program(load_wheels(), source, f"sm_{number}", (*OPTIONS, VERBOSE))


def compile_ptx(
    source: str, arch: str, *, compiler: Compiler | None = None, timeout: float = 600.0
) -> str:
    """The PTX of `source` under the very options of `compile_cuda`: evidence, not an artifact."""
    (number,), source = _arch_numbers([arch]), _finished(source)
    virtual = f"compute_{number}"
    if choose_compiler(compiler) == "nvcc":
        options = ["--ptx", f"--gpu-architecture={virtual}"]
        return _run_nvcc(source, options, timeout=timeout)[0].decode()
    ptx, _ = compile_program(load_wheels(), source, virtual, OPTIONS)
    return ptx.rstrip(b"\0").decode()


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


def choose_compiler(compiler: Compiler | None = None) -> Compiler:
    chosen = compiler or find_cuda_compiler()
    if chosen is None:
        raise ToolMissing(
            "no CUDA compiler found. Install a CUDA toolkit, so that nvcc is on PATH, "
            "or NVIDIA's compiler library from PyPI: pip install 'tvm_qopt[cuda]'"
        )
    return chosen


def _find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


# --- nvcc ---


def _run_nvcc(source: str, options: Sequence[str], *, timeout: float) -> tuple[bytes, str]:
    """What nvcc writes for `source`, and what it says.

    nvcc needs the host compiler too, for its preprocessor.
    """
    nvcc = _find_nvcc()
    if nvcc is None:
        raise ToolMissing("nvcc was asked for and is not on PATH; install a CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-nvcc-") as folder:
        (Path(folder) / "kernel.cu").write_text(source)
        command = [nvcc, *OPTIONS, *options, "--output-file=kernel.out", "kernel.cu"]
        said = _run(command, folder=folder, timeout=timeout)
        return (Path(folder) / "kernel.out").read_bytes(), said


def _run(command: Sequence[str], *, folder: str, timeout: float) -> str:
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
    return output


# --- TVM's packed modules, and fatbins ---


def _finished(source: str) -> str:
    """What is compiled, from the source that TVM made."""
    return with_bodies(leave_if_gated(edit(source)))


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
