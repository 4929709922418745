"""Load TVM's runtime library, once a process, and modules that need it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import threading
from pathlib import Path
from typing import Any

from tvm_qopt.errors import ArtifactInvalid, ToolMissing
from tvm_qopt.runtime.threads import attach
from tvm_qopt.version import FFI_RANGE, FFI_VERSION, TVM_VERSION

_loaded: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def load_module(path: Path, *, kind: str, bundled: Path | None) -> Any:
    """The module at `path`; `bundled` is a folder that holds the runtime libraries, if any does.

    Raises ArtifactInvalid where it cannot be loaded.  A library that is loaded already is used,
    whichever folder it came from: two copies in one process would register everything twice, and
    TVM aborts on that.
    """
    import tvm_ffi

    if not tvm_ffi.__version__.startswith(FFI_VERSION):
        raise ArtifactInvalid(
            f"{path}: made for apache-tvm-ffi {FFI_VERSION}, {tvm_ffi.__version__} is installed; "
            f"pip install '{FFI_RANGE}'"
        )
    runtime_libraries(kind, bundled)
    try:
        module = tvm_ffi.load_module(path)
    except (RuntimeError, OSError, ValueError) as error:
        raise ArtifactInvalid(f"{path}: cannot be loaded: {error}") from error
    if kind == "llvm":
        attach(path)
    return module


def runtime_libraries(kind: str, bundled: Path | None) -> None:
    """Load what modules of a kind need."""
    _load("tvm_runtime", bundled)
    if kind == "cuda":
        from tvm_qopt.runtime.cuda import load_cuda_libraries

        load_cuda_libraries()
        _load("tvm_runtime_cuda", bundled)


def _load(name: str, bundled: Path | None) -> None:
    """Load a library unless this process has it, whoever loaded it.

    Where apache-tvm is installed its own copy goes before a bundle's: a later `import tvm` would
    load that one too.
    """
    from tvm_ffi import libinfo

    with _lock:
        if name in _loaded:
            return
        file = f"lib{name}.so"
        try:
            if _is_loaded(file):
                _loaded[name] = ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
            elif bundled is not None and (bundled / file).is_file() and not _tvm_is_installed():
                _loaded[name] = ctypes.CDLL(str(bundled / file), ctypes.RTLD_GLOBAL)
            else:
                _loaded[name] = libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")
        except (OSError, RuntimeError) as error:
            raise ToolMissing(
                f"{file} cannot be loaded ({str(error).splitlines()[0]}); install "
                "apache-tvm, or build the artifact with --bundle"
            ) from error


def _is_loaded(file: str) -> bool:
    try:
        ctypes.CDLL(file, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _tvm_is_installed() -> bool:
    try:
        return importlib.metadata.version("apache-tvm") == TVM_VERSION
    except importlib.metadata.PackageNotFoundError:
        return False
