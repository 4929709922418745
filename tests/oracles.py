"""Independent oracles: block-quantised AdamW written from the semantics document alone.

Imports NumPy and the standard library only, never the package under test, and prefers the plain
form of a formula to a fast one. Section numbers are those of the semantics document.
A bfloat16 array is its bit patterns in uint16; blocks run over the row-major flattened array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

Dtype = Literal["float32", "float16", "bfloat16"]
Decay = Literal["before", "after"]
Semantics = Literal["documented", "ascend"]
Nonfinite = Literal["skip", "propagate"]


# Storage types


def bf16_to_f32(bits: Bits) -> F32:
    """Widen bfloat16 bit patterns; exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: F32) -> Bits:
    """Round float32 to bfloat16 bits, to nearest even; NaN keeps its sign and becomes quiet."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    kept, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (kept % 2 == 1))
    return np.where(np.isnan(x), kept | 0x0040, kept + up).astype(np.uint16)


def widen(x: Array, dtype: Dtype) -> F32:
    """Stored weights or gradients as float32; exact."""
    if dtype == "bfloat16":
        return bf16_to_f32(x)
    assert x.dtype == dtype, f"array is {x.dtype}, dtype says {dtype}"
    return x.astype(np.float32)


def narrow(x: F32, dtype: Dtype) -> Array:
    """Float32 rounded once to the stored type, to nearest even."""
    return f32_to_bf16(x) if dtype == "bfloat16" else x.astype(dtype)


# Maps (section 4.1)


def _boundaries(intervals: int) -> F32:
    """linspace(0.1, 1) in float32 from both ends, one rounding per value (section 4.1).

    Float64 holds ``start + step * i`` exactly: 24 bits times 8 bits, then a sum of near exponents.
    """
    start, end = np.float32(0.1), np.float32(1)
    step = np.float64((end - start) / np.float32(intervals))
    i = np.arange(intervals + 1)
    from_start = np.float64(start) + step * i
    from_end = np.float64(end) - step * (intervals - i)
    return np.where(i < (intervals + 1) // 2, from_start, from_end).astype(np.float32)


def dynamic_map(signed: bool) -> F32:
    """The 256 levels of the 8-bit dynamic map, ascending (section 4.1)."""
    values = [np.array([0, 1], np.float32)]
    for i in range(7):
        bounds = _boundaries(2**i if signed else 2 ** (i + 1))
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2)
        decade = np.float32(10.0 ** (i - 6)) * middles
        values += [decade, -decade] if signed else [decade]
    return np.sort(np.concatenate(values))


def midpoints(qmap: F32) -> F64:
    """Midpoints of neighbouring levels, in float64: exact unless they lie 2**29 apart."""
    levels = qmap.astype(np.float64)
    return (levels[:-1] + levels[1:]) / 2


def ulps_from_midpoint(x: F32, qmap: F32) -> F64:
    """Distance of each float32 x to the nearest midpoint, in units in the last place of x.

    Small where another correct rounding of x may get the neighbouring code. NaN for a non-finite x.
    """
    middle = midpoints(qmap)
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):
        above = np.searchsorted(middle, x.astype(np.float64)).clip(0, len(middle) - 1)
        below = (above - 1).clip(0)
        to_above, to_below = np.abs(x - middle[above]), np.abs(x - middle[below])
        ulp: F64 = np.spacing(np.abs(x)).astype(np.float64)
        distance: F64 = np.minimum(to_above, to_below) / ulp
    return distance


# Block quantisation (section 1.7)


def nearest_code(x: Array, qmap: F32) -> U8:
    """Index of the level nearest to x, by |x - q| in float64 (section 1.7, search).

    Tie, and equal levels: the lower index. Outside the map: the end level. NaN: 0.
    """
    levels = qmap.astype(np.float64)
    x = np.asarray(x, np.float64).clip(levels[0], levels[-1])  # clip keeps NaN
    high = np.searchsorted(levels, x).clip(0, len(levels) - 1)  # first level >= x
    low = (high - 1).clip(0)
    nearest = np.where(np.abs(x - levels[low]) <= np.abs(x - levels[high]), low, high)
    first_of_equals = np.searchsorted(levels, levels)
    return np.where(np.isnan(x), 0, first_of_equals[nearest]).astype(np.uint8)


def _per_element(absmax: F32, shape: tuple[int, ...], block_size: int) -> F32:
    """The scale of the block that each element belongs to."""
    size = int(np.prod(shape))
    assert absmax.shape == (-(-size // block_size),), "one scale per block, the last may be short"
    return np.repeat(absmax, block_size)[:size].reshape(shape)


def _block_absmax(x: F32, block_size: int) -> F32:
    """max |x| of each block; NaN anywhere makes the block's NaN (section 7)."""
    flat = np.abs(x.reshape(-1))
    return np.maximum.reduceat(flat, np.arange(0, flat.size, block_size)).astype(np.float32)


def _repair_sign(codes: U8, x: F32, qmap: F32) -> U8:
    """One code toward the sign of x where the level's sign is strictly opposite (section 1.7)."""
    level = qmap[codes]
    up, down = (x > 0) & (level < 0), (x < 0) & (level > 0)
    return (codes.astype(np.int64) + up - down).clip(0, len(qmap) - 1).astype(np.uint8)


def quantize(x: F32, qmap: F32, block_size: int, *, repair: bool = False) -> tuple[U8, F32]:
    """Codes and block scales of float32 values (section 1.7, golden).

    The division is a true one in float32; a zero block divides by 1. `repair` is golden's sign
    repair, which does nothing under a map without a negative level.
    """
    assert x.dtype == np.float32
    with np.errstate(all="ignore"):
        absmax = _block_absmax(x, block_size)
        divisor = np.where(absmax == 0, np.float32(1), absmax)
        ratio = x / _per_element(divisor, x.shape, block_size)
    codes = nearest_code(ratio, qmap)
    if repair and qmap.min() < 0:
        codes = _repair_sign(codes, ratio, qmap)
    return codes, absmax


def dequantize(codes: U8, absmax: F32, qmap: F32, block_size: int) -> F32:
    """Level times block scale, one float32 multiply (section 1.5, line 2)."""
    with np.errstate(all="ignore"):
        return qmap[codes] * _per_element(absmax, codes.shape, block_size)


# AdamW without quantisation


@dataclass(frozen=True)
class Hyper:
    """What the caller of a step gives; each semantics rounds it in its own way."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    gnorm_scale: float
    step: int


def _weight(p: F64, m: Array, v: Array, hyper: Hyper, decay: Decay) -> F64:
    """The new weight from the new moments, in float64 (section 8, adamw; 'after': section 1.5)."""
    h = hyper
    assert h.step >= 1 and decay in ("before", "after")
    m_hat = m.astype(np.float64) / (1 - h.beta1**h.step)
    v_hat = v.astype(np.float64) / (1 - h.beta2**h.step)
    move = h.lr * m_hat / (np.sqrt(v_hat) + h.eps)
    keep = 1 - h.lr * h.weight_decay
    return p * keep - move if decay == "before" else (p - move) * keep


def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decay: Decay = "before",
) -> tuple[F64, F64, F64]:
    """One AdamW step in float64: new p, m, v. The first update has step = 1 (section 8)."""
    p, g, m, v = (np.asarray(a, np.float64) for a in (p, g, m, v))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    hyper = Hyper(lr, beta1, beta2, weight_decay, eps, 1.0, step)
    return _weight(p, m, v, hyper, decay), m, v


def adamw_steps_reference(
    p: Array,
    gradients: Iterable[Array],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Decay = "before",
) -> F64:
    """The path of AdamW whose moments are not quantised, from zero moments, in float64.

    Row 0 is p itself, row k the weights after k gradients.
    """
    weight = np.asarray(p, np.float64)
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    path = [weight]
    take_step = partial(
        adamw, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decay=decay
    )
    for step, g in enumerate(gradients, start=1):
        weight, m, v = take_step(weight, g, m, v, step=step)
        path.append(weight)
    return np.stack(path)


# AdamW with quantised moments


@dataclass(frozen=True)
class AscendScalars:
    """The scalars of section 1.4 under its names, each a float32."""

    lr: np.float32
    b1: np.float32
    b2: np.float32
    wd: np.float32
    eps: np.float32
    gs: np.float32
    t: np.float32
    c1: np.float32
    c2: np.float32
    ss: np.float32
    ec: np.float32
    o1: np.float32
    o2: np.float32
    df: np.float32


def _powf(base: np.float32, exponent: np.float32) -> np.float32:
    """Correctly rounded powf: the same on every platform's C library."""
    return np.float32(np.float64(base) ** np.float64(exponent))


def ascend_scalars(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    gnorm_scale: float,
    step: int,
) -> AscendScalars:
    """Section 1.4: all in float32, t = step + 1, where step counts the updates already done."""
    f, one = np.float32, np.float32(1)
    eta, b1, b2, wd, e = f(lr), f(beta1), f(beta2), f(weight_decay), f(eps)
    with np.errstate(all="ignore"):
        t = f(step) + one
        c1 = one - _powf(b1, t)
        c2 = np.sqrt(one - _powf(b2, t))
        return AscendScalars(
            lr=eta,
            b1=b1,
            b2=b2,
            wd=wd,
            eps=e,
            gs=f(gnorm_scale),
            t=t,
            c1=c1,
            c2=c2,
            ss=(-eta * c2) / c1,
            ec=e * c2,
            o1=one - b1,
            o2=one - b2,
            df=one - eta * wd,
        )


@dataclass(frozen=True)
class QuantStep:
    """One quantised step's outputs.

    var is var_exact rounded to float32 and then to the stored type; m_value and v_value are the
    float32 moments that the codes stand for; skipped marks what the nonfinite policy caught.
    """

    var_exact: F64
    var: Array
    m: U8
    v: U8
    absmax_m: F32
    absmax_v: F32
    m_value: F32
    v_value: F32
    skipped: Mask


def _ascend_step(
    theta: F32, grad: F32, m0: F32, v0: F32, hyper: Hyper
) -> tuple[Array, Array, Array, Array]:
    """Scaled gradient, new m, new v and new weight: section 1.5 line by line, in float32."""
    s = ascend_scalars(**vars(hyper))
    g = grad * s.gs
    m = m0 * s.b1 + g * s.o1
    v = v0 * s.b2 + (g * g) * s.o2
    d = np.sqrt(v) + s.ec
    weight = theta + (m * s.ss) / d
    if s.wd > 0:
        weight = weight * s.df
    return g, m, v, weight.astype(np.float64)


def _documented_step(
    theta: F32, grad: F32, m0: F32, v0: F32, hyper: Hyper
) -> tuple[Array, Array, Array, Array]:
    """As `_ascend_step`: float32 moments with 1 - beta formed in float64, weight in float64."""
    f, h = np.float32, hyper
    g = grad * f(h.gnorm_scale)
    m = m0 * f(h.beta1) + g * f(1 - h.beta1)
    v = v0 * f(h.beta2) + (g * g) * f(1 - h.beta2)
    weight = _weight(theta.astype(np.float64), m, v, h, "before")
    return g, m, v, weight


def adamw_quant(
    var: Array,
    grad: Array,
    m: U8,
    v: U8,
    qmap_m: F32,
    qmap_v: F32,
    absmax_m: F32,
    absmax_v: F32,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    gnorm_scale: float,
    block_size: int = 256,
    semantics: Semantics = "documented",
    zero_rule: bool = False,
    nonfinite: Nonfinite | None = None,
    dtype: Dtype = "float32",
    grad_dtype: Dtype | None = None,
) -> QuantStep:
    """One AdamW step on 8-bit moments; the arguments are left as they are.

    'ascend': sections 1.4 to 1.7 with golden's sign repair, decay after, t = step + 1.
    'documented': the formula as documented: decay before, t = step >= 1, no sign repair.
    zero_rule (section 8): where the stored v decodes to exactly 0 the stored m counts as 0.
    nonfinite acts where the scaled gradient, the new m or the new v is not finite. None lets it
    spread; 'skip' keeps the weight to the bit and re-encodes the moments as they were stored;
    'propagate' makes the weight NaN and the moments 0. Neither lets it reach the block's scale.
    """
    assert nonfinite in (None, "skip", "propagate")
    take_step = {"ascend": _ascend_step, "documented": _documented_step}[semantics]
    hyper = Hyper(lr, beta1, beta2, weight_decay, eps, gnorm_scale, step)
    theta, g = widen(var, dtype), widen(grad, grad_dtype or dtype)
    m_old = dequantize(m, absmax_m, qmap_m, block_size)
    v_old = dequantize(v, absmax_v, qmap_v, block_size)
    m_used = np.where((v_old == 0) & zero_rule, np.float32(0), m_old)
    with np.errstate(all="ignore"):
        g, m_new, v_new, weight = take_step(theta, g, m_used, v_old, hyper)
        caught = ~(np.isfinite(g) & np.isfinite(m_new) & np.isfinite(v_new))
        skip, spoil = caught & (nonfinite == "skip"), caught & (nonfinite == "propagate")
        m_new = np.where(skip, m_old, np.where(spoil, np.float32(0), m_new))
        v_new = np.where(skip, v_old, np.where(spoil, np.float32(0), v_new))
        weight = np.where(skip, theta, np.where(spoil, np.nan, weight))
        stored = np.where(skip, var, narrow(weight.astype(np.float32), dtype))
    repair = semantics == "ascend"
    codes_m, scale_m = quantize(m_new, qmap_m, block_size, repair=repair)
    codes_v, scale_v = quantize(v_new, qmap_v, block_size, repair=repair)
    return QuantStep(weight, stored, codes_m, codes_v, scale_m, scale_v, m_new, v_new, skip | spoil)
