"""Arrays of any library, as kernels see them: an address, a shape, a dtype, a device.

NumPy arrays are read directly (NumPy exports no read-only array and no bfloat16 by DLPack),
pyopencl's too, all others through DLPack; nothing is copied.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tvm_qopt.errors import ArgumentMismatch, DeviceMismatch, DtypeMismatch, ShapeMismatch
from tvm_qopt.params import load, store
from tvm_qopt.runtime import opencl
from tvm_qopt.targets import NATIVE, cuda_target
from tvm_qopt.xp import NUMPY

CPU, CUDA, CUDA_HOST, OPENCL = 1, 2, 3, 4  # DLDeviceType
EXPORT_ERRORS = (BufferError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_CODES = {"int": 0, "uint": 1, "float": 2}  # DLDataTypeCode
_NO_STREAM = nullcontext()
DEVICE_NAMES = {CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cuda_host", OPENCL: "opencl", 10: "rocm"}


@dataclass(frozen=True)
class ArrayView:
    """What an array is, and the array, which it keeps alive.

    device: DLPack's type and index; for OpenCL in place of the index the handle of the context.
    """

    owner: Any
    address: int
    shape: tuple[int, ...]
    dtype: str
    device: tuple[int, int]
    contiguous: bool
    writable: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return int("".join(filter(str.isdigit, self.dtype)) or 8) // 8

    @property
    def device_name(self) -> str:
        kind, index = self.device
        if kind == OPENCL:
            return f"the OpenCL context {index:#x}"
        return f"{DEVICE_NAMES.get(kind, f'device type {kind}')}:{index}"


def view_of(name: str, x: Any) -> ArrayView:
    """The view of an argument; raises an ArgumentMismatch that names it."""
    if isinstance(x, np.ndarray):
        return _view_of_numpy(name, x)
    if opencl.is_opencl(x):
        return _view_of_opencl(name, x)
    if not hasattr(x, "__dlpack__"):
        raise DtypeMismatch(
            name, expected="an array (NumPy, torch, pyopencl or DLPack)", got=type(x).__name__
        )
    if is_torch(x):
        _check_torch(name, x)
    view = _view_of_dlpack(name, x)
    if view.size and not view.address:
        raise ShapeMismatch(name, expected="a tensor with memory", got="one without")
    return view


def is_torch(x: Any) -> bool:
    """Whether x is a torch tensor, of any subclass; torch is not imported for it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_cupy(x: Any) -> bool:
    """Whether x is an array of CuPy's: NumPy's interface, on a GPU."""
    return type(x).__module__.partition(".")[0] == "cupy"


def _check_torch(name: str, x: Any) -> None:
    """Refuse what DLPack does not say: sparse layouts, lazy signs, storage that is too short."""
    if x.is_sparse or "sparse" in str(x.layout):
        raise DeviceMismatch(name, expected="a dense tensor", got="a sparse one")
    if x.is_neg() or x.is_conj():
        raise ShapeMismatch(name, expected="values as stored", got="a lazy sign: resolve_neg() it")
    if x.device.type in ("cpu", "cuda") and x.is_contiguous():
        held = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
        if x.numel() * x.element_size() > held:
            got = f"a storage of {max(held, 0)}"
            raise ShapeMismatch(name, expected=f"{x.numel() * x.element_size()} bytes", got=got)


def _view_of_numpy(name: str, x: np.ndarray[Any, Any]) -> ArrayView:
    if not x.dtype.isnative:
        raise DtypeMismatch(name, expected="native byte order", got=x.dtype.str)
    return ArrayView(
        owner=x,
        address=x.ctypes.data,
        shape=x.shape,
        dtype=x.dtype.name,
        device=(CPU, 0),
        contiguous=x.flags.c_contiguous,
        writable=x.flags.writeable,
    )


def _view_of_opencl(name: str, x: Any) -> ArrayView:
    return ArrayView(
        owner=x,
        address=opencl.address_of(name, x),
        shape=x.shape,
        dtype=x.dtype.name,
        device=(OPENCL, x.context.int_ptr),
        contiguous=x.flags.c_contiguous,
        writable=True,
    )


def _view_of_dlpack(name: str, x: Any) -> ArrayView:
    import tvm_ffi

    try:
        exported = x.detach() if hasattr(x, "detach") else x
        tensor = tvm_ffi.from_dlpack(exported)
        dtype = str(tensor.dtype)
    except EXPORT_ERRORS as error:
        dtype = getattr(x, "dtype", "unknown dtype")
        why = (str(error) or type(error).__name__).splitlines()[0]
        what = f"{type(x).__name__} of {dtype} ({why})"
        raise DtypeMismatch(name, expected="an array that exports DLPack", got=what) from error
    shape = tuple(tensor.shape)
    device = (int(tensor.device.dlpack_device_type()), int(tensor.device.index))
    return ArrayView(
        owner=(x, tensor),
        address=tensor.data_ptr(),
        shape=shape,
        dtype=dtype,
        device=device,
        contiguous=tensor.is_contiguous(),
        writable=True,
    )


def check_layout(name: str, view: ArrayView, *, output: bool) -> None:
    """A kernel takes contiguous, element-aligned arrays, and writes outputs."""
    if not view.contiguous:
        raise ShapeMismatch(name, expected="a contiguous (row-major) array", got="strides")
    if view.address % view.itemsize:
        wanted = f"an address that is a multiple of {view.itemsize}"
        raise ShapeMismatch(name, expected=wanted, got=hex(view.address))
    if output and not view.writable:
        raise ArgumentReadOnly(name, expected="a writable array", got="a read-only one")


class ArgumentReadOnly(ArgumentMismatch, ValueError):
    """An output that may not be written."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    return libc


class _Window:
    """The DLPack export of part of an array's memory under a shape and dtype of its own.

    The structure and its shape are one allocation whose deleter is C's free: it can be freed in
    any order and at any time, the end of the interpreter included.
    """

    def __init__(self, view: ArrayView, offset: int, shape: Sequence[int], dtype: str) -> None:
        kind, bits = dtype.rstrip("0123456789"), int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz"))
        libc = _libc()
        struct_size = ctypes.sizeof(_Managed)
        self._address = libc.malloc(struct_size + 8 * len(shape))
        if not self._address:
            raise MemoryError("no memory for the description of an array")
        sizes = (ctypes.c_int64 * len(shape)).from_address(self._address + struct_size)
        sizes[:] = list(shape)
        managed = _Managed.from_address(self._address)
        managed.tensor = _Tensor(
            view.address + offset * (bits // 8),
            _Device(*view.device),
            len(shape),
            _DataType(_CODES[kind], bits, 1),
            ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)),
            None,
            0,
        )
        managed.context = None
        managed.deleter = ctypes.cast(libc.free, ctypes.c_void_p)
        self._device = view.device

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(self._address, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def window(view: ArrayView, *, offset: int, shape: Sequence[int], dtype: str) -> Any:
    """What a kernel takes for an array's memory from element `offset` on: a tvm_ffi.Tensor, or an
    `opencl.Region`.

    It does not keep the array alive: whoever calls a kernel with it does.
    """
    if view.device[0] == OPENCL:
        return opencl.Region(view.owner, offset)
    import tvm_ffi

    return tvm_ffi.from_dlpack(_Window(view, offset, shape, dtype))


def first_element(argument: Any) -> Any:
    """A window of the first element of another, which stays where that is now."""
    device = (int(argument.device.dlpack_device_type()), int(argument.device.index))
    dtype = str(argument.dtype)
    view = ArrayView(None, argument.data_ptr(), (1,), dtype, device, contiguous=True, writable=True)
    return window(view, offset=0, shape=(1,), dtype=dtype)


_DATA = 24  # bytes from a tvm_ffi.Tensor's object to its DLTensor, whose first field is the address


def address_cell(window: Any) -> ctypes.c_uint64:
    """Where a window keeps the address that kernels read; written, the window has moved.

    It lives as long as the window.
    """
    cell = ctypes.c_uint64.from_address(window.__chandle__() + _DATA)
    assert cell.value == window.data_ptr(), "another layout of tvm_ffi.Tensor"
    return cell


def full_like(like: Any, shape: Sequence[int], dtype: str, value: float | None) -> Any:
    """A new array on the device of `like`, filled with a number: of its library, or of NumPy
    where that has no more than DLPack and memory on the CPU.  None: not filled.

    NumPy and CuPy have no bfloat16: there it is bit patterns, uint16 (in which 0 is 0).
    """
    if isinstance(like, np.ndarray):
        if value is None:
            return np.empty(shape, "uint16" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":
            bits = store(NUMPY, np.full(shape, value, np.float32), dtype)
            return np.asarray(bits, np.uint16)
        return np.full(shape, value, dtype)
    if opencl.is_opencl(like):
        pattern = full_like(np.empty(0), (1,), dtype, 0 if value is None else value)
        return opencl.new_array(like, pattern, shape, fill=value is not None)
    if is_cupy(like):
        import cupy

        with like.device:
            pattern = full_like(np.empty(0), (1,), dtype, 0 if value is None else value)
            if value is None:
                return cupy.empty(tuple(shape), pattern.dtype)
            return cupy.full(tuple(shape), pattern[0], pattern.dtype)
    if is_torch(like):
        import torch

        kind, where = getattr(torch, dtype), like.device
        if value is None:
            return torch.empty(tuple(shape), dtype=kind, device=where)
        return torch.full(tuple(shape), value, dtype=kind, device=where)
    if hasattr(like, "__array_namespace__"):
        xp = like.__array_namespace__()
        kind, where = getattr(xp, dtype), like.device
        if value is None:
            return xp.empty(tuple(shape), dtype=kind, device=where)
        return xp.full(tuple(shape), value, dtype=kind, device=where)
    if view_of("param", like).device[0] in (CPU, CUDA_HOST):
        return full_like(np.empty(0), shape, dtype, value)
    wanted = "on a GPU an array of torch, CuPy or the array API"
    raise DtypeMismatch("param", expected=wanted, got=type(like).__name__)


SLICE = 16  # elements: a slice of whatever dtype begins where a vector of 16 bytes may


def new_arrays(like: Any, shapes: Sequence[Sequence[int]], dtype: str, value: float) -> list[Any]:
    """Arrays as `full_like` makes them; more than one are slices of one array."""
    if len(shapes) == 1:
        return [full_like(like, shapes[0], dtype, value)]
    sizes = [math.prod(shape) for shape in shapes]
    starts = np.cumsum([0, *(-(-size // SLICE) * SLICE for size in sizes)]).tolist()
    whole = full_like(like, (starts[-1],), dtype, value)
    return [
        whole[start : start + size].reshape(tuple(shape))
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


def float32_copy(x: Any, dtype: str) -> Any:
    """A float32 copy of a 16-bit array, of its library and on its device."""
    if isinstance(x, np.ndarray):
        bits = x.view(np.uint16)
        return load(NUMPY, bits, "bfloat16" if dtype != "float16" else dtype)
    if opencl.is_opencl(x) or is_cupy(x):
        copy = full_like(x, x.shape, "float32", None)
        copy_from_host(copy, float32_copy(x.get(), dtype))
        return copy
    if hasattr(x, "detach"):
        return x.detach().float().contiguous()
    xp = x.__array_namespace__()
    return xp.astype(x, xp.float32)


def version_counter(x: Any) -> Callable[[], object]:
    """What tells torch's autograd that a tensor was written; nothing for other libraries.

    Without it a graph recorded before a step and run after it would be wrong and silent.
    """
    if not is_torch(x):
        return lambda: None
    import torch

    return lambda: torch.autograd.graph.increment_version(x)


def copy_from_host(target: Any, values: np.ndarray[Any, Any]) -> None:
    """Overwrite a small device array made by `full_like` with values from the host."""
    if isinstance(target, np.ndarray):
        target[...] = values
    elif opencl.is_opencl(target):
        opencl.write(target, values)
    elif is_cupy(target):
        target.set(values)
    elif hasattr(target, "copy_"):
        import torch

        target.copy_(torch.from_numpy(values), non_blocking=True)
    else:
        target[...] = target.__array_namespace__().asarray(values)


def on_stream(like: Any, stream: Any) -> AbstractContextManager[Any]:
    """Inside, the library of an array like this one copies on a CUDA stream given by its handle."""
    made: AbstractContextManager[Any] = _NO_STREAM
    if stream is None:
        return made
    if is_cupy(like):
        import cupy

        made = cupy.cuda.ExternalStream(stream)
    elif is_torch(like) and like.is_cuda:
        import torch

        made = torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device))
    return made


def current_stream(like: Any, device: int) -> int:
    """The handle of the CUDA stream on which the library of `like` queues work now."""
    if is_torch(like):
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)
    if is_cupy(like):
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    return 0  # the default stream


def target_of(view: ArrayView) -> str:
    """The preset that kernels for an array are built for: of its device."""
    kind, index = view.device
    if kind in (CPU, CUDA_HOST):
        return NATIVE
    if kind == CUDA:
        from tvm_qopt.runtime.cuda import device_arch
        from tvm_qopt.runtime.library import runtime_libraries

        runtime_libraries("cuda", None)
        return cuda_target(device_arch(index))
    if kind == OPENCL:
        return "opencl"
    raise DeviceMismatch("param", expected="an array on cpu, cuda or opencl", got=view.device_name)
