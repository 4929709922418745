"""Plays CuPy for tests: the part of its interface that tvm_qopt and tests call, on libcudart.so.13,
which is the device of this folder.

Names, arguments and what is missing are CuPy's (no bfloat16, no array API, no `device=`).
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import types
from typing import Any

import numpy as np

_cudart = ctypes.CDLL("libcudart.so.13")
_cudart.cudaGetErrorString.restype = ctypes.c_char_p
_state = threading.local()


class CUDARuntimeError(RuntimeError):
    """Of cupy.cuda.runtime."""


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_cudart, name)(*arguments)
    if error:
        raise CUDARuntimeError(f"{name}: {_cudart.cudaGetErrorString(error).decode()}")


def _made(name: str, *arguments: Any) -> int:
    handle = ctypes.c_void_p()
    _call(name, ctypes.byref(handle), *arguments)
    return handle.value or 0


def _size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def _handle(number: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(number)


# --- cupy.cuda ---


class Stream:
    """A stream; inside `with` the current one."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptr: int = 0) -> None:
        flags = ctypes.c_uint(int(non_blocking))
        self.ptr = ptr if null or ptr else _made("cudaStreamCreateWithFlags", flags)
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(get_current_stream())
        _state.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _state.stream = self._before.pop()

    def synchronize(self) -> None:
        _call("cudaStreamSynchronize", _handle(self.ptr))

    def wait_event(self, event: Event) -> None:
        _call("cudaStreamWaitEvent", _handle(self.ptr), _handle(event.ptr), ctypes.c_uint(0))

    def begin_capture(self) -> None:
        _call("cudaStreamBeginCapture", _handle(self.ptr), 0)

    def end_capture(self) -> Graph:
        graph = ctypes.c_void_p()
        _call("cudaStreamEndCapture", _handle(self.ptr), ctypes.byref(graph))
        return Graph(_made("cudaGraphInstantiate", graph, ctypes.c_ulonglong(0)))


def ExternalStream(ptr: int) -> Stream:
    """A stream that somebody else made."""
    return Stream(ptr=ptr, null=not ptr)


Stream.null = Stream(null=True)


class Graph:
    """What a capture recorded; made by `Stream.end_capture`."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def launch(self, stream: Stream | None = None) -> None:
        _call("cudaGraphLaunch", _handle(self.ptr), _handle((stream or get_current_stream()).ptr))


class Event:
    """A point in a stream's work, and its time."""

    def __init__(self) -> None:
        self.ptr = _made("cudaEventCreate")

    def record(self, stream: Stream | None = None) -> None:
        _call("cudaEventRecord", _handle(self.ptr), _handle((stream or get_current_stream()).ptr))

    def synchronize(self) -> None:
        _call("cudaEventSynchronize", _handle(self.ptr))


class Device:
    """The one that there is."""

    id = 0

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        value, parts = ctypes.c_int(), []
        for attribute in (75, 76):
            _call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, 0)
            parts.append(str(value.value))
        return "".join(parts)

    def synchronize(self) -> None:
        _call("cudaDeviceSynchronize")


def get_current_stream() -> Stream:
    return getattr(_state, "stream", Stream.null)


def get_elapsed_time(start: Event, end: Event) -> float:
    milliseconds = ctypes.c_float()
    _call("cudaEventElapsedTime", ctypes.byref(milliseconds), _handle(start.ptr), _handle(end.ptr))
    return milliseconds.value


cuda: Any = types.SimpleNamespace(
    Device=Device, Event=Event, ExternalStream=ExternalStream, Stream=Stream,
    get_current_stream=get_current_stream, get_elapsed_time=get_elapsed_time,
)  # fmt: skip


# --- arrays ---


class _Memory:
    """An allocation, freed with the last array that lies in it."""

    def __init__(self, size: int) -> None:
        self.ptr = 0
        self.ptr = _made("cudaMalloc", _size(size)) if size else 0

    def __del__(self) -> None:
        if self.ptr and not sys.is_finalizing():
            _cudart.cudaFree(_handle(self.ptr))


class ndarray:
    """A contiguous array, or a view of one."""

    def __init__(self, shape: Any, dtype: Any = float, memory: Any = None, offset: int = 0) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype, self.device = np.dtype(dtype), Device()
        self._memory, self._offset = memory or _Memory(self.nbytes), offset

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def _address(self) -> ctypes.c_void_p:
        return _handle(self._memory.ptr + self._offset)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address, kind = self._address.value or 0, self.dtype.str
        return {"shape": self.shape, "typestr": kind, "data": (address, False), "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        from tvm_qopt.runtime.arrays import ArrayView, window

        address, name = self._address.value or 0, self.dtype.name
        view = ArrayView(self, address, self.shape, name, (2, 0), contiguous=True, writable=True)
        return window(view, offset=0, shape=self.shape, dtype=name).__dlpack__()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> ndarray:
        if key is Ellipsis:
            return self
        start, stop, step = key.indices(self.shape[0])
        assert step == 1, "this CuPy knows slices without steps"
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        shape = (max(stop - start, 0), *self.shape[1:])
        return ndarray(shape, self.dtype, self._memory, self._offset + start * row)

    def __setitem__(self, key: Any, value: ndarray) -> None:
        to, stream = self[key], _handle(get_current_stream().ptr)
        assert (to.shape, to.dtype) == (value.shape, value.dtype)
        _call("cudaMemcpyAsync", to._address, value._address, _size(to.nbytes), 3, stream)

    def reshape(self, *shape: Any) -> ndarray:
        sizes = shape[0] if isinstance(shape[0], tuple) else shape
        return ndarray(
            np.empty(self.shape, "V0").reshape(sizes).shape, self.dtype, self._memory, self._offset
        )

    def view(self, dtype: Any) -> ndarray:
        assert np.dtype(dtype).itemsize == self.dtype.itemsize
        return ndarray(self.shape, dtype, self._memory, self._offset)

    def set(self, x: np.ndarray[Any, Any]) -> None:
        x = np.ascontiguousarray(x, self.dtype)
        assert x.shape == self.shape
        stream = _handle(get_current_stream().ptr)
        if x.size:
            _call(
                "cudaMemcpyAsync", self._address, _handle(x.ctypes.data), _size(x.nbytes), 1, stream
            )

    def get(self) -> np.ndarray[Any, Any]:
        x = np.empty(self.shape, self.dtype)
        stream = _handle(get_current_stream().ptr)
        if x.size:
            _call(
                "cudaMemcpyAsync", _handle(x.ctypes.data), self._address, _size(x.nbytes), 2, stream
            )
        return x

    def fill(self, value: Any) -> None:
        self.set(np.full(self.shape, value, self.dtype))

    def copy(self) -> ndarray:
        other = ndarray(self.shape, self.dtype)
        other[...] = self
        return other

    def item(self) -> Any:
        return self.get().item()


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    x = ndarray(shape, np.array(fill_value).dtype if dtype is None else dtype)
    x.fill(fill_value)
    return x


def asarray(a: Any, dtype: Any = None) -> ndarray:
    if isinstance(a, ndarray):
        return a
    host = np.asarray(a, dtype)
    x = ndarray(host.shape, host.dtype)
    x.set(host)
    return x


def get_default_memory_pool() -> Any:
    """A pool that keeps nothing."""
    return types.SimpleNamespace(free_all_blocks=lambda: None)
