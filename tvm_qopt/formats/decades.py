"""The dynamic maps where a look-up among 16 numbers is one instruction: a permutation (AVX-512), a
shuffle (CUDA).

The same levels and roundings as the closed forms of `dynamic`, with what depends on the decade
looked up by its number: 8 operations to decode and 13 to encode a non-negative value, where the
closed forms take 16 and 26.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from tvm_qopt.xp import WHOLE, ArrayNamespace, Table, Value

ENTRIES = 16
TOP = 8
"""The class of 1, whatever the number of decades: the decades below it are classes 7, 6, ..."""
LEAST = 1e-7
"""Every smaller value is stored as 0."""
SLOPE = 0.98217 * np.log10(2) / 2**23
FIRST = 2
"""What makes the top's class TOP, modulo 16: 0.98217 * 127 * log10(2) is nearest 38."""
BELOW = -0.3
"""A midpoint between decades lies 0.2 steps above the upper one's edge, which is at -0.5."""


@dataclass(frozen=True)
class Decoding:
    """By the exponent of 2 w + 1, modulo 16: |level| = (18 w + 9 + offset) * unit."""

    offset: Table
    unit: Table


@dataclass(frozen=True)
class Encoding:
    """By class (0, the decades, 1): the code counted from 0's is base + round(factor y + shift).

    above: a class's values lie above it.
    """

    above: Table
    factor: Table
    shift: Table
    base: Table


@cache
def decoding(decades: int, signed: bool) -> Decoding:
    """Of w = 0 (level 0), w = n + k (decade i, n = 2^i or 2^(i+1)) and the next power of 2 (1)."""
    offset, unit = np.zeros(ENTRIES), np.zeros(ENTRIES)
    first = 0 if signed else 1
    for i in range(decades):
        n = 2 ** (i + first)
        at = _exponent(n)
        offset[at], unit[at] = -16 * n, 10.0 ** (i - decades + 1) / (20 * n)
    n = 2 ** (decades + first)
    at = _exponent(n)
    offset[at] = 2 ** np.ceil(np.log2(18 * n)) - 18 * n - 9
    unit[at] = 1 / (18 * n + 9 + offset[at])
    if not signed:  # w = 1 is 0
        unit[_exponent(1)] = 0.0
    return Decoding(offset.astype(np.float32), unit.astype(np.float32))


def _exponent(w: int) -> int:
    """The index of w: the exponent field of w + 1/2 (that of w itself but for 0), modulo 16."""
    return int(np.float32(w + 0.5).view(np.int32) >> 23) % ENTRIES


def decode(xp: ArrayNamespace, middle: Value, tables: Decoding, name: str) -> Value:
    """The magnitude of level w, from w + 1/2 as a float32.  One rounding beside that of `unit`."""
    middle = xp.bind(middle, f"{name}_middle")
    decade = xp.bind(xp.reinterpret(middle, "int32") >> 23, f"{name}_decade")
    level = middle * 18.0 + xp.permute(tables.offset, decade)
    return level * xp.permute(tables.unit, decade)


@cache
def encoding(decades: int, signed: bool, zero_midpoint: float, top_midpoint: float) -> Encoding:
    above = np.full(ENTRIES, -1.0)
    factor, shift, base = np.zeros(ENTRIES), np.zeros(ENTRIES), np.full(ENTRIES, WHOLE)
    first = 0 if signed else 1
    for i in range(decades):
        of, scale, n = TOP - decades + i, 10.0 ** (i - decades + 1), 2 ** (i + first)
        above[of] = scale * 0.1 * (1 - 1e-7) if i else zero_midpoint
        factor[of], shift[of] = n / (0.9 * scale), -n / 9 - 0.5
        base[of] = WHOLE + n - first
        if i == 0:  # no decade below, whose last level it would share a step with
            factor[of], shift[of] = _lowest(scale, n)
    above[TOP], base[TOP] = top_midpoint, WHOLE + 2 ** (decades + first) - first
    return Encoding(*(table.astype(np.float32) for table in (above, factor, shift, base)))


def _lowest(scale: float, n: int) -> tuple[float, float]:
    """The lowest decade's line: flat through its one level, or less steep between its two."""
    if n == 1:
        return 0.0, 0.0
    middle, factor = 0.55 * scale, 1.8 / scale
    return factor, 0.5 - factor * middle


def encode(xp: ArrayNamespace, y: Value, tables: Encoding, name: str) -> Value:
    """WHOLE plus the code of magnitude y in [0, 1], counted from that of 0.

    The bits of a float32 are about the logarithm, whose whole part is the class or one more; one
    comparison tells.  Adding a large whole number rounds, and leaves the code in the last bits.
    """
    y = xp.bind(xp.maximum(y, LEAST), f"{name}_y")
    bits = xp.cast(xp.reinterpret(y, "int32"), "float32")
    guess = xp.bind(bits * float(SLOPE) + (WHOLE + FIRST), f"{name}_guess")
    least = xp.permute(tables.above, xp.reinterpret(guess, "int32"))
    if xp.predicates:  # where a comparison gives the number 1
        of = guess - xp.where(y <= least, 1.0, 0.0)
    else:
        of = xp.where(y <= least, guess - 1.0, guess)
    of = xp.bind(xp.reinterpret(of, "int32"), f"{name}_class")
    step = y * xp.permute(tables.factor, of) + xp.permute(tables.shift, of)
    step = xp.bind(step, f"{name}_step")
    step = xp.where(step < BELOW, -1.0, step)
    return step + xp.permute(tables.base, of)
