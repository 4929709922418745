"""Check the arguments of a call, driven by the spec, and cut them for its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_qopt.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch
from tvm_qopt.runtime.arrays import (
    CPU,
    CUDA,
    CUDA_HOST,
    OPENCL,
    ArrayView,
    check_layout,
    copy_from_host,
    new_arrays,
    view_of,
    window,
)
from tvm_qopt.runtime.state import check_qmap
from tvm_qopt.spec import CONST, OF_PLAN, RNG, RNG_SCALARS, WORKSPACE, KernelSpec, TensorSpec

DEVICES = {"llvm": (CPU, CUDA_HOST), "cuda": (CUDA,), "opencl": (OPENCL,)}
"""Target kind -> the devices whose arrays its kernels take."""


def check_arguments(spec: KernelSpec, kind: str, given: Mapping[str, Any]) -> dict[str, ArrayView]:
    """The views of all arguments but `hyper`, each of the right kind and none in another's way."""
    wanted = {t.name: t for t in spec.tensors if t.role not in OF_PLAN}
    for name in given.keys() - wanted.keys():
        raise ShapeMismatch(name, expected=f"one of {', '.join(wanted)}", got="an unknown argument")
    for name in wanted:
        if given.get(name) is None:
            raise ShapeMismatch(name, expected="an array", got="nothing")
    views = {name: view_of(name, given[name]) for name in wanted}
    param = views["param"]
    for name, t in wanted.items():
        _check_argument(spec, kind, t, views[name], param)
    check_overlap((view, name, wanted[name].output) for name, view in views.items())
    for name, t in wanted.items():
        if t.role == CONST:
            check_qmap(name, given[name], levels=int(t.shape[0]))
    return views


def own_arrays(
    spec: KernelSpec, params: Sequence[Any], views: Sequence[ArrayView]
) -> list[dict[str, Any]]:
    """What calls on parameters of one device need beside what the user has: the scalars they read
    and scratch memory; those of all parameters are slices of one array each.

    NumPy's for memory of the host, else of the library and device of the parameters.
    """
    like = np.empty(0) if views[0].device[0] in (CPU, CUDA_HOST) else params[0]
    blocks = [-(-view.size // spec.block_size) for view in views]
    kinds = {"hyper": ("float32", [len(spec.scalars)] * len(views))}
    kinds |= {t.name: (t.dtype, blocks) for t in spec.tensors if t.role == WORKSPACE}
    if any(t.role == RNG for t in spec.tensors):
        kinds["rng"] = ("int32", [len(RNG_SCALARS)] * len(views))
        kinds["block_number"] = ("int32", blocks)
    made = {
        name: new_arrays(like, [(size,) for size in sizes], dtype, 0)
        for name, (dtype, sizes) in kinds.items()
    }
    for count, numbers in zip(blocks, made.get("block_number", ()), strict=False):
        copy_from_host(numbers, np.arange(count, dtype=np.int32))
    return [dict(zip(made, arrays, strict=True)) for arrays in zip(*made.values(), strict=True)]


def check_argument(
    spec: KernelSpec, kind: str, name: str, given: Any, views: Mapping[str, ArrayView]
) -> ArrayView:
    """The view of one argument in place of the one in `views`, checked as all were."""
    wanted = {t.name: t for t in spec.tensors}
    view = view_of(name, given)
    _check_argument(spec, kind, wanted[name], view, views["param"])
    others = {**views, name: view}
    check_overlap((other, name, wanted[name].output) for name, other in others.items())
    return view


def _check_argument(
    spec: KernelSpec, kind: str, t: TensorSpec, view: ArrayView, param: ArrayView
) -> None:
    if view.dtype not in (t.dtype, "uint16" if t.dtype == "bfloat16" else t.dtype):
        raise DtypeMismatch(t.name, expected=t.dtype, got=view.dtype)
    held = t.held(param.size, spec.block_size)
    shape = param.shape if held is None else held
    if view.shape != shape:
        raise ShapeMismatch(t.name, expected=f"shape {shape}", got=f"{view.shape}")
    if view.device[0] not in DEVICES[kind] or view.device != param.device:
        device = "cpu" if kind == "llvm" else kind
        where = f"a tensor on {device}" if view is param else f"{param.device_name}, as param"
        raise DeviceMismatch(t.name, expected=where, got=view.device_name)
    check_layout(t.name, view, output=t.output)


def as_list(name: str, given: Any) -> list[Any]:
    """What an argument holds one by one; raises where it is no sequence."""
    try:
        return list(given)
    except TypeError:
        wanted = "a sequence, one for each tensor"
        raise DtypeMismatch(name, expected=wanted, got=type(given).__name__) from None


def check_stays(name: str, tensor: Any, address: int) -> None:
    """Raise where torch has moved or freed the storage of a tensor that was planned."""
    if tensor.data_ptr() != address:
        wanted = "the memory that was planned (make a new plan where a tensor moves)"
        raise ShapeMismatch(name, expected=wanted, got=f"other: {tensor.data_ptr():#x}")


def check_overlap(arrays: Iterable[tuple[ArrayView, str, bool]]) -> None:
    """Raise unless nothing that is written is reachable through another argument.

    arrays: the view of each argument, its name in errors, and whether it is written.
    """
    spans = sorted(
        (v.address, v.address + v.size * v.itemsize, n, out) for v, n, out in arrays if v.size
    )
    reach, written = (0, ""), (0, "")  # how far any span so far goes, and any that is written
    for start, end, name, output in spans:
        other_end, other = reach if output else written
        if start < other_end:
            got = f"memory shared with {other}"
            raise ShapeMismatch(name, expected="an array with memory of its own", got=got)
        reach = max(reach, (end, name))
        if output:
            written = max(written, (end, name))


@dataclass(frozen=True)
class Part:
    """What one call handles: `blocks` blocks of `size` elements from block number `first` on."""

    first: int
    blocks: int
    size: int


def window_of(spec: KernelSpec, t: TensorSpec, view: ArrayView, part: Part) -> Any:
    """The argument of a call for a part of a tensor."""
    shape, offset = t.sizes(part.blocks, part.size), t.start(part.first, spec.block_size)
    return window(view, offset=offset, shape=shape, dtype=t.storage)


def windows(spec: KernelSpec, views: Mapping[str, ArrayView], part: Part) -> tuple[Any, ...]:
    """All arguments of a call, in order."""
    return tuple(window_of(spec, t, views[t.name], part) for t in spec.tensors)
