"""NVIDIA's compiler and linker libraries as PyPI has them, called through ctypes.

cuda-bindings wants a newer Python than this package, and 8 MB for the sixteen functions used here.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_qopt.errors import BuildError, ToolMissing

_PARTS = (
    "lib/libnvrtc.so.13",
    "lib/libnvfatbin.so.13",
    "include/cuda_fp16.h",
    "include/cccl/cuda/std/cstdint",
)


@dataclass(frozen=True)
class Wheels:
    """The libraries, loaded, and the folders of the headers."""

    nvrtc: ctypes.CDLL
    nvfatbin: ctypes.CDLL
    includes: tuple[Path, ...]


def wheel_folders() -> list[Path]:
    """The folders nvidia/cu13 of NVIDIA's wheels for CUDA 13."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    return [Path(folder) / "cu13" for folder in folders or ()]


def find_wheels() -> Path | None:
    """The folder that has NVRTC, nvFatbin and the headers."""
    for root in wheel_folders():
        if all((root / part).exists() for part in _PARTS):
            return root
    return None


def load_wheels() -> Wheels:
    """Raises ToolMissing where they are not installed."""
    root = find_wheels()
    if root is None:
        raise ToolMissing("NVRTC was asked for and is not installed: pip install 'tvm_qopt[cuda]'")
    # NVRTC opens its builtins by name, and 13.0 does not look for them beside itself.
    for builtins in sorted((root / "lib").glob("libnvrtc-builtins.so.13*")):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(root / "lib" / "libnvrtc.so.13"))
    nvfatbin = ctypes.CDLL(str(root / "lib" / "libnvfatbin.so.13"))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    nvfatbin.nvFatbinGetErrorString.restype = ctypes.c_char_p
    return Wheels(nvrtc, nvfatbin, (root / "include", root / "include" / "cccl"))


def compile_program(
    wheels: Wheels, source: str, arch: str, options: Sequence[str]
) -> tuple[bytes, str]:
    """The cubin of `source` for "sm_NN", its PTX for "compute_NN"; and the compiler's log.

    Raises BuildError with the log.
    """
    nvrtc, program = wheels.nvrtc, ctypes.c_void_p()
    includes = [f"-I{folder}" for folder in wheels.includes]
    encoded = [option.encode() for option in (f"-arch={arch}", *options, *includes)]
    create = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _check(create, "nvrtcCreateProgram", nvrtc.nvrtcGetErrorString)
    try:
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        failed = nvrtc.nvrtcCompileProgram(program, len(encoded), array) != 0
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace")
        if failed:
            raise BuildError(f"NVRTC failed for {arch}:\n{text}")
        if arch.startswith("compute_"):
            return _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), text
        return _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), text
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def join_code(wheels: Wheels, code: Mapping[str, bytes]) -> bytes:
    """One fatbin of cubins ("sm_90") and PTX ("compute_120"), given by architecture."""
    nvfatbin, handle = wheels.nvfatbin, ctypes.c_void_p()
    message = nvfatbin.nvFatbinGetErrorString
    created = nvfatbin.nvFatbinCreate(ctypes.byref(handle), None, ctypes.c_size_t(0))
    _check(created, "nvFatbinCreate", message)
    try:
        for name, data in code.items():
            kind, number = name.split("_")
            arch, size = number.encode(), ctypes.c_size_t(len(data))
            if kind == "sm":
                added = nvfatbin.nvFatbinAddCubin(handle, data, size, arch, b"kernel.cubin")
            else:
                added = nvfatbin.nvFatbinAddPTX(handle, data, size, arch, b"kernel.ptx", None)
            _check(added, f"nvFatbin for {name}", message)
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
