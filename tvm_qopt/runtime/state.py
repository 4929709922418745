"""The values behind a state, and the maps given at run time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import DtypeMismatch, HyperOutOfRange, ShapeMismatch, UnknownName
from tvm_qopt.formats import StateFormat
from tvm_qopt.params import load
from tvm_qopt.rules import Hyper
from tvm_qopt.runtime.opencl import is_opencl
from tvm_qopt.spec import KernelSpec
from tvm_qopt.xp import NUMPY

LARGEST = {
    "float32": float.fromhex("0x1.fffffep127"),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65504.0,
}
"""The largest finite value of each dtype of a state."""


def to_numpy(x: Any) -> npt.NDArray[Any]:
    """A host copy, or the array itself where it is NumPy's."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):
        return np.asarray(x.detach().cpu().numpy())
    return np.asarray(x.get() if hasattr(x, "get") else np.from_dlpack(x))


def sums_of(arrays: Sequence[Any]) -> npt.NDArray[np.float64]:
    """The sum of each one-dimensional array, in float64 and in one order whatever stands beside."""
    values = [to_numpy(x) for x in arrays]
    sizes = np.array([x.size for x in values], np.intp)
    sums = np.zeros(len(values))
    if sizes.any():
        starts = np.cumsum(sizes) - sizes
        whole = np.concatenate(values).astype(np.float64)
        sums[sizes > 0] = np.add.reduceat(whole, starts[sizes > 0])
    return sums


def read_number(name: str, x: Any) -> float:
    """A number, or the one element of an array (read on the host)."""
    try:
        x = x.get() if is_opencl(x) else x
        return float(x.item() if hasattr(x, "item") else x + 0.0)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        got = f"{type(x).__name__} of shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)
        raise ShapeMismatch(name, expected="a number or a one-element array", got=got) from None


def initial_parts(spec: KernelSpec, initial: Mapping[str, float]) -> dict[str, float]:
    """Argument name -> what fills it, for slots whose elements all have one value.

    A value but 0 is the block's largest, so its code is that of the peak and it is exact.
    """
    slots = {slot.name: (slot, format_) for slot, format_ in spec.slots}
    for name in initial.keys() - slots.keys():
        raise UnknownName(f"slot of {spec.rule}", name, slots)
    parts: dict[str, float] = {}
    for name, (slot, format_) in slots.items():
        high = LARGEST.get(format_.dtype or "float32", LARGEST["float32"])
        low = 0.0 if slot.nonnegative else -high
        bounds = Hyper(name, low=low, high=high, high_open=False)
        value = bounds.check(initial.get(name, 0.0))
        if format_.dtype is not None:
            parts[name] = value
            continue
        if value < 0 or (value and format_.runtime_map):
            wanted = "0, or a positive value in a format whose map is built in"
            raise HyperOutOfRange(name, expected=wanted, got=repr(value))
        code = _code_of(format_, format_.peak) if value else format_.zero_code
        parts[f"{name}_codes"] = code * (17 if format_.bits == 4 else 1)
        parts[f"{name}_scale"] = (math.sqrt(value) if format_.root else value) / format_.peak
    return parts


def _code_of(format_: StateFormat, level: float) -> int:
    x = np.full((1, 1), level, np.float32)
    return int(format_.encode(NUMPY, x, None, {}, format_.name).reshape(-1)[0])


def decode(
    spec: KernelSpec, state: Mapping[str, Any], qmap: Mapping[str, Any] | None = None
) -> dict[str, npt.NDArray[np.float32]]:
    """The float32 values of each slot, in the shape of its codes."""
    values = {}
    for slot, format_ in spec.slots:
        if format_.dtype is not None:
            values[slot.name] = _direct(_entry(state, slot.name), format_.dtype)
            continue
        codes, scale = (
            to_numpy(_entry(state, f"{slot.name}_{part}")) for part in ("codes", "scale")
        )
        levels = to_numpy((qmap or {})[slot.name]) if format_.runtime_map else None
        whole = codes.reshape(1, -1)
        whole = NUMPY.unpack4(whole) if format_.bits == 4 else whole.astype(np.int32)
        level = format_.decode(NUMPY, whole.reshape(-1), levels, slot.name)
        stored = level * np.repeat(scale, spec.block_size)[: level.size]
        shape = (level.size,) if format_.bits == 4 else codes.shape
        values[slot.name] = (stored * stored if format_.root else stored).reshape(shape)
    return values


def _entry(state: Mapping[str, Any], name: str) -> Any:
    if state.get(name) is None:
        raise ShapeMismatch(name, expected="an array in state", got="nothing")
    return state[name]


def _direct(x: Any, dtype: str) -> npt.NDArray[np.float32]:
    """A state kept as it is, as float32; NumPy's bfloat16 is ml_dtypes' or bits."""
    if hasattr(x, "detach"):
        return np.array(x.detach().float().cpu().numpy())
    values = to_numpy(x)
    bits = values if dtype == "float32" else values.view(np.uint16)
    return np.array(load(NUMPY, bits, dtype), np.float32)


def check_qmaps(spec: KernelSpec, qmap: Any) -> Mapping[str, Any]:
    """The maps by slot: one for each slot whose format takes its map at run time, and no other."""
    wanted = [slot.name for slot, format_ in spec.slots if format_.runtime_map]
    given = qmap if isinstance(qmap, Mapping) else {} if qmap is None else None
    if given is None or set(given) != set(wanted):
        form = ", ".join(f"{name!r}: levels" for name in wanted)
        got = "nothing" if qmap is None else repr(list(given)) if given else type(qmap).__name__
        raise ShapeMismatch("qmap", expected=f"{{{form}}}" if wanted else "no maps", got=got)
    return given


def check_qmap(name: str, qmap: Any, *, levels: int) -> None:
    """Raise unless a map is float32, one-dimensional, finite and ascending, with two levels."""
    values = to_numpy(qmap)
    if values.dtype != np.float32:
        raise DtypeMismatch(name, expected="float32", got=str(values.dtype))
    if values.shape != (levels,):
        raise ShapeMismatch(name, expected=f"shape ({levels},)", got=f"{values.shape}")
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ShapeMismatch(name, expected="finite levels", got=f"{values[where]} at {where}")
    if (np.diff(values) < 0).any():
        where = int(np.flatnonzero(np.diff(values) < 0)[0])
        got = f"{values[where]} before {values[where + 1]} at {where}"
        raise ShapeMismatch(name, expected="levels in ascending order", got=got)
    if values[0] == values[-1]:
        got = f"{values[0]} throughout"
        raise ShapeMismatch(name, expected="two different levels or more", got=got)
