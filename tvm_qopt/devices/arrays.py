"""Arrays on a GPU, and the time of work there: CUDA by torch or by CuPy, OpenCL by pyopencl."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ENOUGH = 1.0  # seconds of rounds: a device that takes longer is not one to measure


class _OfCuda(ABC):
    """Times by events of a CUDA stream."""

    target = "cuda"

    @abstractmethod
    def event(self) -> Any: ...

    @abstractmethod
    def milliseconds(self, start: Any, end: Any) -> float: ...

    def elapsed(self, work: Callable[[], object], number: int) -> float:
        """Seconds of some calls of `work` on the device."""
        start, end = self.event(), self.event()
        start.record()
        for _ in range(number):
            work()
        end.record()
        end.synchronize()
        return self.milliseconds(start, end) / 1e3

    def seconds(self, work: Callable[[], object], *, rounds: int = 9) -> float:
        """The median time of one call of `work`, after three that warm up; of fewer rounds where
        they are long."""
        for _ in range(3):
            work()
        times: list[float] = []
        while len(times) < rounds and sum(times) <= ENOUGH:
            times.append(self.elapsed(work, 1))
        return statistics.median(times)


class Cuda(_OfCuda):
    """The first GPU, by torch."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.name = str(torch.cuda.get_device_name(0))
        self.arch = "sm_{}{}".format(*torch.cuda.get_device_capability(0))

    def put(self, x: Array, dtype: str) -> Any:
        """A copy on the device; bfloat16 is given as its bits."""
        bits = x.view(np.int16) if dtype == "bfloat16" else x
        held = self.torch.from_numpy(bits).cuda()
        return held.view(self.torch.bfloat16) if dtype == "bfloat16" else held

    def get(self, x: Any) -> Array:
        bits = x.view(self.torch.int16) if x.dtype == self.torch.bfloat16 else x
        host: Array = bits.cpu().numpy()
        return host.view(np.uint16) if x.dtype == self.torch.bfloat16 else host

    def fill(self, x: Any, value: float) -> None:
        x.fill_(value)

    def full(self, size: int, dtype: str, value: float) -> Any:
        return self.torch.full((size,), value, dtype=getattr(self.torch, dtype), device="cuda")

    def event(self) -> Any:
        return self.torch.cuda.Event(enable_timing=True)

    def milliseconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def copy_speed(self, size: int) -> float:
        """Bytes a second, read and written, of a copy of float32 from one tensor to another."""
        one, other = self.full(size, "float32", 1.0), self.full(size, "float32", 0.0)
        return 8 * size / self.seconds(lambda: other.copy_(one))

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph of `work`, to be called."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            work()
        replay: Callable[[], object] = graph.replay
        return replay

    def free(self) -> None:
        self.torch.cuda.empty_cache()


class CuPy(_OfCuda):
    """The first GPU, by CuPy, which has no bfloat16: its arrays hold the bits."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.arch = f"sm_{cupy.cuda.Device().compute_capability}"
        self.name = f"{self.arch}, by CuPy"

    def put(self, x: Array, dtype: str) -> Any:
        return self.cupy.asarray(x)

    def get(self, x: Any) -> Array:
        host: Array = x.get()
        return host

    def fill(self, x: Any, value: float) -> None:
        x.fill(value)

    def full(self, size: int, dtype: str, value: float) -> Any:
        return self.cupy.full(size, *_bits(dtype, value))

    def event(self) -> Any:
        return self.cupy.cuda.Event()

    def milliseconds(self, start: Any, end: Any) -> float:
        return float(self.cupy.cuda.get_elapsed_time(start, end))

    def copy_speed(self, size: int) -> float:
        one, other = self.full(size, "float32", 1.0), self.full(size, "float32", 0.0)

        def copy() -> None:
            other[...] = one

        return 8 * size / self.seconds(copy)

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph of `work`, to be called; the current stream replays it."""
        stream = self.cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            work()
            graph = stream.end_capture()
        return lambda: graph.launch()

    def free(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()


def _bits(dtype: str, value: float) -> tuple[Any, str]:
    """A value, and the dtype of NumPy's, for a number of a dtype: bfloat16 is its bits."""
    if dtype != "bfloat16":
        return value, dtype
    return np.array([value], np.float32).view(np.uint32)[0] >> 16, "uint16"


class OpenCl:
    """The first OpenCL device, by pyopencl."""

    target = "opencl"

    def __init__(self) -> None:
        import pyopencl as cl
        import pyopencl.array as arrays

        device = next(d for platform in cl.get_platforms() for d in platform.get_devices())
        self.arrays, self.queue = arrays, cl.CommandQueue(cl.Context([device]))
        self.name, self.arch = str(device.name.strip()), ""

    def put(self, x: Array, dtype: str) -> Any:
        return self.arrays.to_device(self.queue, x)

    def get(self, x: Any) -> Array:
        host: Array = x.get()
        return host

    def fill(self, x: Any, value: float) -> None:
        x.fill(np.float32(value))

    def full(self, size: int, dtype: str, value: float) -> Any:
        return self.put(np.full(size, *_bits(dtype, value)), dtype)

    def elapsed(self, work: Callable[[], object], number: int) -> float:
        """Seconds of some calls of `work`, until the queue is done."""
        self.queue.finish()
        start = time.perf_counter()
        for _ in range(number):
            work()
        self.queue.finish()
        return time.perf_counter() - start

    def seconds(self, work: Callable[[], object], *, rounds: int = 3) -> float:
        """The median time of one call of `work`."""
        work()
        return statistics.median(self.elapsed(work, 1) for _ in range(rounds))

    def copy_speed(self, size: int) -> float:
        import pyopencl as cl

        one, other = self.full(size, "float32", 1.0), self.full(size, "float32", 0.0)
        data = (other.base_data, one.base_data)
        return 8 * size / self.seconds(lambda: cl.enqueue_copy(self.queue, *data))

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def free(self) -> None:
        self.queue.finish()


DEVICES: dict[str, Callable[[], Any]] = {"cuda": Cuda, "cupy": CuPy, "opencl": OpenCl}
