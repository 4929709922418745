"""The blockwise update: one text that is the kernel (on tensor expressions) and the reference (on
NumPy): load, decode, the rule, the non-finite policy, the new scales, encode, store.

May import layer 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.formats import StateFormat
from tvm_qopt.params import load, nan, store
from tvm_qopt.spec import GRADIENT_SCALAR, KernelSpec
from tvm_qopt.xp import ArrayNamespace, Value

MAGNITUDE = 0x7FFFFFFF  # the bits of |x|: as integers they order as the absolute values do
INFINITY = 0x7F800000


def blockwise(xp: ArrayNamespace, spec: KernelSpec, a: Mapping[str, Value]) -> dict[str, Value]:
    """One step of every element: argument name -> value, for each output of the spec.

    `a` holds a value for each argument name, and for "hyper" a namespace of the scalars.  The
    result is ordered as a kernel must write it: the parameter last, since a rule may read it.
    """
    h, settings = a["hyper"], spec.all_settings
    p = xp.bind(load(xp, a["param"], spec.param), "param_old")
    g = xp.bind(load(xp, a["grad"], spec.grad) * getattr(h, GRADIENT_SCALAR), "grad_scaled")
    old = {slot.name: _decode(xp, a, slot.name, format_) for slot, format_ in spec.slots}
    p_new, new = spec.rule_.update(xp, h, p, g, _zero_rule(xp, spec, old), settings)
    new = {name: xp.bind(value, f"{name}_new") for name, value in new.items()}

    largest = _magnitude(xp, g)
    for value in new.values():
        largest = xp.maximum(largest, _magnitude(xp, value))
    finite = largest < INFINITY
    skip = settings["nonfinite"] == "skip"
    out: dict[str, Value] = {}
    for slot, format_ in spec.slots:
        instead = old[slot.name] if skip else 0.0
        kept = xp.bind(xp.where(finite, new[slot.name], instead), f"{slot.name}_kept")
        out.update(_encode(xp, spec, a, slot.name, format_, kept))
    bad = xp.block_sum(xp.where(finite, 0, 1), "nonfinite_sum")
    out["nonfinite_count"] = a["nonfinite_count"] + bad
    instead = a["param"] if skip else nan(xp, spec.param)
    out["param"] = xp.where(finite, store(xp, p_new, spec.param), instead)
    return out


def _decode(xp: ArrayNamespace, a: Mapping[str, Value], slot: str, format_: StateFormat) -> Value:
    if not format_.scaled:
        return xp.bind(a[slot], f"{slot}_old")
    codes, qmap = xp.cast(a[f"{slot}_codes"], "int32"), a.get(f"{slot}_qmap")
    level = format_.decode(xp, codes, qmap, f"{slot}_decode")
    return xp.bind(level * a[f"{slot}_scale"], f"{slot}_old")


def _zero_rule(xp: ArrayNamespace, spec: KernelSpec, old: dict[str, Value]) -> dict[str, Value]:
    root = spec.rule_.root
    if root is None or not spec.all_settings["zero_rule"]:
        return old
    return {
        name: value if name == root else xp.where(old[root] == 0.0, 0.0, value)
        for name, value in old.items()
    }


def _encode(
    xp: ArrayNamespace,
    spec: KernelSpec,
    a: Mapping[str, Value],
    slot: str,
    format_: StateFormat,
    kept: Value,
) -> dict[str, Value]:
    if not format_.scaled:
        return {slot: kept}
    bits = xp.block_max(_magnitude(xp, kept), f"{slot}_absmax")
    absmax = xp.reinterpret(bits, "float32")
    unit = xp.bind(_unit(xp, absmax, kept, slot, format_), f"{slot}_unit")
    qmap, name = a.get(f"{slot}_qmap"), f"{slot}_encode"
    codes = format_.encode(xp, unit, qmap, spec.all_settings, name)
    return {f"{slot}_codes": xp.cast(codes, "uint8"), f"{slot}_scale": absmax}


def _magnitude(xp: ArrayNamespace, x: Value) -> Value:
    """|x| as ordered integers, since targets differ in how min and max of floats treat a NaN."""
    return xp.reinterpret(x, "int32") & MAGNITUDE


def _unit(xp: ArrayNamespace, absmax: Value, kept: Value, slot: str, format_: StateFormat) -> Value:
    """value / absmax; a block of zeros gives zeros.

    The reciprocal is formed once a block, and near the ends of the float32 range, where it would
    overflow or lose digits, of the absmax moved by a power of two: then no scale is special.
    """
    if format_.true_division:
        divisor = xp.bind(xp.where(absmax == 0.0, 1.0, absmax), f"{slot}_divisor")
        return kept / divisor
    up = xp.where(absmax < 2.0**-60, 2.0**80, 1.0)
    shift = xp.bind(xp.where(absmax > 2.0**60, 2.0**-80, up), f"{slot}_shift")
    inverse = xp.where(absmax == 0.0, 0.0, 1.0 / (absmax * shift))
    return (kept * shift) * xp.bind(inverse, f"{slot}_inverse")


def scalars_namespace(spec: KernelSpec, values: Mapping[str, Value]) -> SimpleNamespace:
    """The scalars as the attributes that rules read."""
    return SimpleNamespace(**{name: values[name] for name in spec.scalars})
