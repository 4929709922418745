"""Devices that the runtime drives, as the tuner sees them (`tvm_qopt.measure`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tvm_qopt.devices.arrays import DEVICES, Array
from tvm_qopt.measure import REPEAT_SECONDS, Device
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.runtime.arrays import ArrayView, view_of, window
from tvm_qopt.runtime.calls import Call, run
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.runtime.library import runtime_libraries
from tvm_qopt.runtime.store import load


@dataclass(frozen=True)
class DeviceMachine:
    """The first device here whose arrays are of a library: "cuda" (torch), "cupy" or "opencl".

    libraries: a folder that has TVM's runtime, for CUDA where TVM is not installed.
    """

    arrays: str
    libraries: str | None = None

    def count(self) -> int:
        return 1

    def open(self, seconds: float) -> DeviceSession:
        device = _first_device(self.arrays)
        if device.target == "cuda":
            runtime_libraries("cuda", Path(self.libraries) if self.libraries else None)
        return DeviceSession(device)


@cache
def _first_device(arrays: str) -> Any:
    """One context a process, for which a driver compiles a kernel once."""
    return DEVICES[arrays]()


@dataclass(frozen=True)
class DeviceSession:
    """A device; kernels are artifacts."""

    device: Any

    def load(self, path: str) -> Kernel:
        return load(Path(path))

    def put(self, array: Array) -> Any:
        """Bits of 16-bit types as int16, which torch has always had."""
        bits = array.view(np.int16) if array.dtype == np.uint16 else array
        return self.device.put(bits, str(bits.dtype))

    def get(self, tensor: Any) -> Array:
        array: Array = self.device.get(tensor)
        return array.view(np.uint16) if array.dtype == np.int16 else array

    def call(self, kernel: Kernel, entry: str, tensors: Sequence[Any]) -> None:
        calls, device = _bound(kernel, [entry], tensors)
        run(kernel, calls, device, like=tensors[0])

    def seconds(
        self, kernel: Kernel, entries: Sequence[str], tensors: Sequence[Any], repeat: int
    ) -> list[float]:
        calls, device = _bound(kernel, entries, tensors)

        def work() -> None:
            run(kernel, calls, device, like=tensors[0])

        self.device.elapsed(work, 1)  # the driver compiles OpenCL C
        number = math.ceil(REPEAT_SECONDS / self.device.elapsed(work, 1))
        return [self.device.elapsed(work, number) / number for _ in range(repeat)]

    def describe(self) -> Device:
        return Device(self.device.name, self.device.arch)


def _bound(
    kernel: Kernel, entries: Sequence[str], tensors: Sequence[Any]
) -> tuple[list[Call], tuple[int, int]]:
    """The calls of entry points, one after the other, and the device that they are for."""
    views: dict[str, ArrayView] = {
        t.name: view_of(t.name, x) for t, x in zip(kernel.spec.tensors, tensors, strict=True)
    }
    kernel.check_runs_on(views["param"].device)
    blocks, size = views["param"].shape
    arguments = tuple(
        window(views[t.name], offset=0, shape=views[t.name].shape, dtype=t.storage)
        for t in kernel.spec.tensors
    )
    part, names = Part(0, blocks, size), list(views)
    calls = [Call.of(e, None, kernel.entries[e], part, arguments, names) for e in entries]
    return calls, views["param"].device
