"""What CUDA needs at load and a CPU does not: two libraries, and code for the GPU at hand.

Artifacts hold machine code (tvm_qopt.compiler.cuda says which), so nothing here compiles; the three
functions turn the two ways in which loading can fail into sentences.
May import tvm_ffi and layer 0.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import tvm_ffi

from tvm_qopt.errors import ArtifactInvalid, ToolMissing
from tvm_qopt.targets import runs_on

_KDL_CUDA = 2  # DLDeviceType
_COMPUTE_VERSION = 4  # TVM's DeviceAttrKind


def load_cuda_libraries() -> None:
    """Load libcuda.so.1 and libcudart.so.13, to be called before libtvm_runtime_cuda is loaded.

    That library links both and looks for them only beside itself and where the system's loader
    does; a wheel's copy it does not find, unless torch has loaded it before. Raises ToolMissing.
    """
    if not _load(["libcuda.so.1"]):
        raise ToolMissing("no NVIDIA driver (libcuda.so.1) found; CUDA needs driver 580 or newer")
    if not _load(["libcudart.so.13", *_wheel_copies("libcudart.so.13")]):
        raise ToolMissing(
            "the CUDA 13 runtime (libcudart.so.13) was not found: pip install nvidia-cuda-runtime"
        )


def device_arch(index: int) -> str:
    """The architecture of GPU `index`, such as "sm_90"; libtvm_runtime_cuda must be loaded."""
    ask = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    version = ask(_KDL_CUDA, index, _COMPUTE_VERSION)
    return "sm_" + str(version).replace(".", "")


def check_cubins(archs: Sequence[str], device: str) -> None:
    """Raise ArtifactInvalid unless one of `archs`, an artifact's code, runs on a `device` GPU.

    Without this check TVM says CUDA_ERROR_NO_BINARY_FOR_GPU, and only when the kernel is first
    called.
    """
    if not any(runs_on(arch, device) for arch in archs):
        raise ArtifactInvalid(
            f"the artifact has code for {', '.join(archs)} and this GPU is {device}; "
            f"build it again with {device} among its architectures"
        )


def _load(names: Sequence[str]) -> bool:
    """Load the first of `names` that the system's loader can open; it stays loaded."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _wheel_copies(name: str) -> list[str]:
    """Paths of library `name` inside NVIDIA's wheels for CUDA 13."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder) / "cu13" / "lib" / name for folder in folders or ()]
    return [str(path) for path in paths if path.exists()]
