"""What this machine can run, found without TVM: for `list`, `doctor` and `build --store`."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence

from tvm_qopt.errors import ToolMissing
from tvm_qopt.targets import PRESETS, TargetPreset, cuda_code, host_features, runs_on

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def needs(preset: TargetPreset) -> str:
    """What a machine must have to run the preset's artifacts."""
    if preset.kind == "cuda":
        return "an NVIDIA GPU: " + ", ".join(preset.archs)
    if preset.on_cpu:
        return " ".join((preset.machine, *(f"+{name}" for name in preset.features)))
    return f"a device and driver of {preset.kind}"


def why_not_here(preset: TargetPreset) -> str | None:
    """Why this machine does not run the preset's artifacts; None where it does."""
    if preset.kind == "cuda":
        return _why_not_cuda(preset.archs)
    if preset.kind == "opencl":
        return _why_not_opencl()
    if not preset.on_cpu:
        return "for other programs: the Python runtime does not call it"
    if preset.machine != platform.machine():
        return f"this machine is {platform.machine()}"
    missing = sorted(set(preset.features) - host_features())
    return f"this CPU lacks {', '.join(missing)}" if missing else None


def _why_not_opencl() -> str | None:
    from tvm_qopt.runtime.opencl import check_pyopencl

    try:
        check_pyopencl()
    except ToolMissing as error:
        return str(error)
    import pyopencl

    try:
        platforms = pyopencl.get_platforms()
    except pyopencl.Error:  # the loader knows of no driver
        platforms = []
    return None if platforms else "no OpenCL driver here"


def _why_not_cuda(archs: Sequence[str]) -> str | None:
    found = gpu_archs()
    if not found:
        return "no NVIDIA GPU or driver here"
    if any(runs_on(code, gpu) for code in cuda_code(archs) for gpu in found):
        return None
    return f"the GPU here is {', '.join(sorted(set(found)))}"


def gpu_archs() -> tuple[str, ...]:
    """The architectures ("sm_90") of the NVIDIA GPUs that the driver offers this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_arch(driver, index) for index in range(count.value))


def _arch(driver: ctypes.CDLL, index: int) -> str:
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        number = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, index)
        numbers.append(number.value)
    return "sm_{}{}".format(*numbers)


def cpu_level() -> str | None:
    """The preset of the highest level whose features this CPU has."""
    levels = [p for p in PRESETS.values() if p.on_cpu and why_not_here(p) is None]
    return max(levels, key=lambda p: len(p.features)).name if levels else None


def debian_package(linker: str) -> str:
    """gcc-aarch64-linux-gnu for aarch64-linux-gnu-gcc."""
    return f"gcc-{linker.removesuffix('-gcc')}"
