"""The blockwise update: one text that is the kernel (on tensor expressions) and the reference (on
NumPy): load, decode, the rule, the non-finite policy, the new scales, encode, store.

May import layer 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

from tvm_qopt.errors import UnsupportedSpec
from tvm_qopt.formats import StateFormat
from tvm_qopt.params import STORAGE, get_param_format, load, nan, store
from tvm_qopt.rules import CLIP_SCALAR
from tvm_qopt.spec import (
    GRADIENT_SCALAR,
    HYPER,
    RNG_SCALARS,
    KernelSpec,
    TensorSpec,
    norm_tensor,
)
from tvm_qopt.xp import ArrayNamespace, Value, clip

MAGNITUDE = 0x7FFFFFFF  # the bits of |x|: as integers they order as the absolute values do
INFINITY = 0x7F800000
SIGN = -(2**31)
ROUNDS_TO_INFINITY = {"float16": 0x477FF000, "bfloat16": 0x7F7F8000}
"""The least magnitude that a 16-bit state would store as infinite: 65520, and half a unit above the
largest bfloat16."""


def partial_norms(
    xp: ArrayNamespace, spec: KernelSpec, a: Mapping[str, Value], number: int
) -> dict[str, Value]:
    """The sum of squares over each block for the norms of pass `number`: argument name -> value."""
    norms = spec.rule_.norms[number]
    p, g, old = _inputs(xp, spec, a)
    state = _zero_rule(xp, spec, old)
    terms, new = norms.terms(xp, a["hyper"], p, g, state, spec.all_settings)
    counts = _finite(xp, spec, a, [g] if spec.rule_.reads_grad else [], new)
    sums = {}
    for name in norms.names:
        term = terms[name]
        if norms.masked:
            finite = xp.all_of(counts, _magnitude(xp, term) < INFINITY)
            term = xp.bind(xp.where(finite, term, 0.0), f"{name}_term")
        sums[norm_tensor(number, name)] = xp.block_sum(term * term, f"{name}_squares")
    return sums


def blockwise(xp: ArrayNamespace, spec: KernelSpec, a: Mapping[str, Value]) -> dict[str, Value]:
    """One step of every element: argument name -> value, for each output of the spec.

    `a` holds a value for each argument name, and for "hyper" a namespace of the scalars.  The
    result is ordered as a kernel must write it: the parameter last, since a rule may read it.
    """
    h, settings, rule = a["hyper"], spec.all_settings, spec.rule_
    p, g, old = _inputs(xp, spec, a)
    p_new, new = rule.update(xp, h, p, g, _zero_rule(xp, spec, old), settings)
    if rule.writes_state and set(new) != set(old):
        raise UnsupportedSpec(f"rule {rule.name}: returned {sorted(new)}, has slots {sorted(old)}")

    finite = _finite(xp, spec, a, ([g] if rule.reads_grad else []), new)
    skip = settings["nonfinite"] == "skip"
    out: dict[str, Value] = {}
    for slot, format_ in spec.slots if rule.writes_state else ():
        instead = old[slot.name] if skip else 0.0
        kept = xp.bind(xp.where(finite, new[slot.name], instead), f"{slot.name}_kept")
        out.update(_encode(xp, spec, a, slot.name, format_, kept))
    bad = xp.block_sum(xp.where(finite, 0, 1), "nonfinite_sum")
    out["nonfinite_count"] = a["nonfinite_count"] + bad
    if rule.result is not None:
        out.update(_store(xp, spec, a, finite, p_new))
    return out


def _finite(
    xp: ArrayNamespace,
    spec: KernelSpec,
    a: Mapping[str, Value],
    grads: list[Value],
    new: dict[str, Value],
) -> Value:
    """Whether the gradient and the new state are finite, and stay so when stored; by element.

    Zero times what is not finite is NaN: one fused operation a value and a single comparison,
    where one of bits each took a fifth of the sweep.  The zero is the sign of a scalar, since
    TVM folds products with a constant one.
    """
    sign = xp.reinterpret(getattr(a["hyper"], GRADIENT_SCALAR), "int32") & SIGN
    zero, narrow = xp.reinterpret(sign, "float32"), []
    values = [*grads, *new.values()]
    # as CPUs have it, or without the zero to begin with, which would lie in a register of its own
    total: Value = values.pop(0) * zero if values and xp.predicates else zero
    for value in values:
        total = value * zero + total
    for slot, format_ in spec.slots if new else ():
        if format_.dtype in ROUNDS_TO_INFINITY:
            limit = ROUNDS_TO_INFINITY[format_.dtype]
            narrow.append(_magnitude(xp, new[slot.name]) < limit)
    return xp.all_of(xp.bind(total, "finite_zero") == 0.0, *narrow)


def _store(
    xp: ArrayNamespace, spec: KernelSpec, a: Mapping[str, Value], finite: Value, value: Value
) -> dict[str, Value]:
    """The rule's result in stored form: the parameter, or a tensor of its own."""
    value, skip = xp.bind(value, "param_new"), spec.all_settings["nonfinite"] == "skip"
    name = str(spec.rule_.result)
    if name != "param":
        instead = xp.constant(0, STORAGE[spec.param]) if skip else nan(xp, spec.param)
        return {name: xp.where(finite, store(xp, value, spec.param), instead)}
    weights = get_param_format(spec.param_format)
    spoiled = weights.nan(xp, spec.param)
    return {
        name: xp.where(finite, stored, a[name] if skip else spoiled[name])
        for name, stored in weights.store(xp, value, a, spec.param).items()
    }


def _inputs(
    xp: ArrayNamespace, spec: KernelSpec, a: Mapping[str, Value]
) -> tuple[Value, Value, dict[str, Value]]:
    """Weights, scaled gradient and the old value of each slot, as float32."""
    weights = get_param_format(spec.param_format)
    p = xp.bind(weights.load(xp, a, spec.param), "param_old")
    old = {slot.name: _decode(xp, a, slot.name, format_) for slot, format_ in spec.slots}
    if not spec.rule_.reads_grad:
        return p, None, old
    factor = getattr(a["hyper"], GRADIENT_SCALAR)
    g = load(xp, a["grad"], spec.grad) * factor
    if spec.all_settings["clip_gradient"] and not spec.rule_.clips_itself:
        g = clip(xp, xp.bind(g, "grad_unclipped"), getattr(a["hyper"], CLIP_SCALAR))
    return p, xp.bind(g, "grad_scaled"), old


def _decode(xp: ArrayNamespace, a: Mapping[str, Value], slot: str, format_: StateFormat) -> Value:
    if format_.dtype is not None:
        return xp.bind(load(xp, a[slot], format_.dtype), f"{slot}_old")
    stored, qmap = a[f"{slot}_codes"], a.get(f"{slot}_qmap")
    codes = xp.unpack4(stored) if format_.bits == 4 else xp.cast(stored, "int32")
    level = format_.decode(xp, codes, qmap, f"{slot}_decode")
    value = level * a[f"{slot}_scale"]
    if format_.root:
        value = xp.bind(value, f"{slot}_decode_root")
        value = value * value
    return xp.bind(value, f"{slot}_old")


def _zero_rule(xp: ArrayNamespace, spec: KernelSpec, old: dict[str, Value]) -> dict[str, Value]:
    settings = spec.all_settings
    if spec.rule_.zeroes is None or not settings["zero_rule"]:
        return old
    root, divided = spec.rule_.zeroes(settings)
    # of the bits on a CPU, where a denormal slows a comparison of floats
    zero = old[root] == 0.0 if xp.predicates else _magnitude(xp, old[root]) == 0
    return old | {name: xp.where(zero, 0.0, old[name]) for name in divided}


def _encode(
    xp: ArrayNamespace,
    spec: KernelSpec,
    a: Mapping[str, Value],
    slot: str,
    format_: StateFormat,
    kept: Value,
) -> dict[str, Value]:
    if format_.dtype is not None:
        return {slot: store(xp, kept, format_.dtype)}
    stored = xp.bind(xp.sqrt(kept), f"{slot}_root") if format_.root else kept
    bits = xp.block_max(_magnitude(xp, stored), f"{slot}_absmax")
    absmax = xp.reinterpret(bits, "float32")
    unit = xp.bind(_unit(xp, absmax, stored, slot, format_), f"{slot}_unit")
    qmap, name = a.get(f"{slot}_qmap"), f"{slot}_encode"
    codes = format_.encode(xp, unit, qmap, spec.all_settings, name)
    scale = absmax if format_.peak == 1.0 else absmax * (1 / format_.peak)
    if format_.bits == 4:
        packed = xp.pack4(xp.bind(xp.cast(codes, "uint8"), f"{name}_code"))
        return {f"{slot}_codes": packed, f"{slot}_scale": scale}
    return {f"{slot}_codes": xp.cast(codes, "uint8"), f"{slot}_scale": scale}


def _magnitude(xp: ArrayNamespace, x: Value) -> Value:
    """|x| as ordered integers, since targets differ in how min and max of floats treat a NaN."""
    return xp.reinterpret(x, "int32") & MAGNITUDE


def _unit(xp: ArrayNamespace, absmax: Value, kept: Value, slot: str, format_: StateFormat) -> Value:
    """value / absmax * peak; zeros where the scale is 0.

    The reciprocal is formed once a block, and near the ends of the float32 range, where it would
    overflow or lose digits, of the absmax moved by a power of two: then no scale is special.
    """
    if format_.true_division:
        divisor = xp.bind(xp.where(absmax == 0.0, 1.0, absmax), f"{slot}_divisor")
        return kept / divisor
    up = xp.where(absmax < 2.0**-60, 2.0**80, 1.0)
    shift = xp.bind(xp.where(absmax > 2.0**60, 2.0**-80, up), f"{slot}_shift")
    scale = absmax * (1 / format_.peak)
    inverse = xp.where(scale == 0.0, 0.0, format_.peak / (absmax * shift))
    return (kept * shift) * xp.bind(inverse, f"{slot}_inverse")


def namespace_of(spec: KernelSpec, t: TensorSpec, at: Callable[[int], Value]) -> SimpleNamespace:
    """The elements of `hyper` or `rng` as the attributes that rules and formats read."""
    names = spec.scalars if t.role == HYPER else RNG_SCALARS
    return SimpleNamespace(**{name: at(i) for i, name in enumerate(names)})
