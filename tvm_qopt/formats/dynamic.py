"""The dynamic maps of bitsandbytes and torchao, by closed forms in place of tables.

D decades i = 0..D-1 up to s = 10^(i-D+1); decade i has n levels, evenly spaced,
s (0.1 + 0.9 (k + 1/2) / n) with k = 0..n-1; then 0 and 1.  n = 2^i in the signed map (and the same
levels negated), 2^(i+1) in the unsigned one.  So with w = n + k the exponent of w is the decade and
its fraction is k/n, and the code is z + w or z - w (signed, z = 2^D - 1), w - 1 (unsigned).
D is 7 in the 8-bit maps, 3 in the signed one of 4 bits.
Map: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, dynamic tree quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.formats import StateFormat, conditional, register, register_family, sixteen
from tvm_qopt.formats.decades import decode, decoding, encode, encoding
from tvm_qopt.xp import WHOLE, ArrayNamespace, Value, code_of

EXPONENT = 0x7F800000  # of a float32
SIGN = -(2**31)


def dynamic_map(*, signed: bool, decades: int = 7) -> npt.NDArray[np.float32]:
    """The levels bit for bit as torch on a CPU makes them (one rounding per boundary)."""
    tops = []
    for i in range(decades):
        n = 2**i if signed else 2 ** (i + 1)
        boundaries = _linspace(np.float32(0.1), np.float32(1.0), n + 1)
        middles = (boundaries[:-1] + boundaries[1:]) / np.float32(2)
        tops.append(np.float32(10.0 ** (i - decades + 1)) * middles)
    positive = np.concatenate(tops)
    ends = np.array([0.0, 1.0], np.float32)
    return np.sort(np.concatenate([ends, positive, -positive] if signed else [ends, positive]))


def _linspace(start: np.float32, stop: np.float32, n: int) -> npt.NDArray[np.float32]:
    """torch.linspace in float32: from the nearer end, each value by one fused multiply-add.

    The product of two float32 is exact in float64, so rounding the float64 sum is the fused form.
    """
    step = float((stop - start) / np.float32(n - 1))
    i = np.arange(n, dtype=np.float64)
    from_start, from_stop = float(start) + step * i, float(stop) - step * (n - 1 - i)
    return np.where(i < n // 2, from_start, from_stop).astype(np.float32)


@dataclass(frozen=True)
class Dynamic(StateFormat):
    """Dynamic map: more levels near 1, over decades, in closed form; as bitsandbytes has it."""

    decades: int = 7

    @property
    def qmap(self) -> npt.NDArray[np.float32]:
        return dynamic_map(signed=self.signed, decades=self.decades)

    @property
    def _zero(self) -> int:
        """The code of 0 in the signed map."""
        return int(2**self.decades) - 1

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        """|level| = (18 w + 9 - 16 n) 5^(i-D+1) / (20 2^(D-1)) for n = 2^i; half of it for twice n.

        The bracket and its product with powers of 5 up to 5^3 are integers (or halves) that float32
        holds exactly, with or without fused multiply-add, so the result is rounded once.
        """
        if xp.permutes:
            return self._decode_by_tables(xp, codes, name)
        if xp.predicates and not self.signed:
            return conditional.decode(xp, codes, self.decades, name)
        offset = xp.cast(codes + (-self._zero if self.signed else 1), "float32")
        offset = xp.bind(offset, f"{name}_offset")
        # twice w in the signed map, so that the low three bits of the exponent are i in both
        w = xp.bind(xp.abs(offset) * 2.0 if self.signed else offset, f"{name}_w")
        bits = xp.reinterpret(w, "int32")
        power = xp.reinterpret(bits & EXPONENT, "float32")  # the decade's 2n (signed), n (unsigned)
        level = w * 9.0 + (9.0 if self.signed else 4.5) - power * 8.0
        for bit, factor in ((23, 5.0), (24, 25.0)):
            level = xp.bind(level, f"{name}_times{factor:g}")
            level = xp.where((bits & (1 << bit)) == 0, level, level * factor)
        unit = 1.0 / (20 * 10 ** (self.decades - 1))
        if self.decades > 4:
            level = level * xp.where((bits & (1 << 25)) == 0, unit, unit * 5**4)
        else:
            level = level * unit
        zero = w == (0.0 if self.signed else 1.0)
        level = xp.where(zero, 0.0, xp.minimum(level, 1.0))
        if not self.signed:
            return level
        level = xp.bind(level, f"{name}_magnitude")
        return xp.where(offset < 0.0, -level, level)

    def _decode_by_tables(self, xp: ArrayNamespace, codes: Value, name: str) -> Value:
        if self.bits == 4:
            return xp.permute(self.qmap, codes)
        tables = decoding(self.decades, self.signed)
        if not self.signed:
            if xp.predicates:
                middle = xp.whole(codes) - (WHOLE - 1.5)
            else:
                middle = xp.cast(codes, "float32") + 1.5
            return decode(xp, middle, tables, name)
        if xp.predicates:
            offset = xp.whole(codes) - (WHOLE + self._zero)
        else:
            offset = xp.cast(codes - self._zero, "float32")
        offset = xp.bind(offset, f"{name}_offset")
        level = decode(xp, xp.abs(offset) + 0.5, tables, name)
        level, sign = xp.bind(level, f"{name}_magnitude"), xp.reinterpret(offset, "int32") & SIGN
        return xp.reinterpret(xp.reinterpret(level, "int32") | sign, "float32")

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        """Scale |x| into the top decade by comparisons, then round in that decade.

        The midpoint between two decades lies 0.2 steps above the lower end of the upper one.
        Thresholds are a hair below the powers of ten, so that a value scaled with rounding never
        reaches the next decade: at worst it lies just below its own, where the 0.2 puts it right.
        """
        if xp.permutes:
            return self._encode_by_tables(xp, x, name)
        if xp.predicates and not self.signed:
            ends = self._zero_midpoint, self._top_midpoint
            return conditional.encode(xp, x, self.decades, ends, name)
        y = xp.abs(x) if self.signed else x
        magnitude = y
        most = 2**self.decades if self.signed else 2 ** (self.decades + 1)
        least = 1 if self.signed else 2
        n: Value = most / 2
        for decades in (4, 2, 1) if self.decades > 4 else (2, 1):
            small = y < 10.0**-decades * (1 - 1e-6)
            n = xp.where(small, n * 0.5**decades, n)
            y = xp.where(small, y * 10.0**decades, y)
            n, y = xp.bind(n, f"{name}_n{decades}"), xp.bind(y, f"{name}_y{decades}")
        k = xp.bind((y * 10.0 - 1.0) * n * (1 / 9), f"{name}_k")
        w = xp.cast(k, "int32") + xp.cast(n, "int32")
        w = xp.bind(xp.where(k < 0.2, w - 1, w), f"{name}_w")
        w = xp.where(magnitude > self._top_midpoint, most, xp.maximum(w, least))
        w = xp.where(magnitude <= self._zero_midpoint, least - 1, w)
        if not self.signed:
            return w - 1
        w = xp.bind(w, f"{name}_magnitude")
        return xp.where(x < 0.0, self._zero - xp.minimum(w, self._zero), self._zero + w)

    def _encode_by_tables(self, xp: ArrayNamespace, x: Value, name: str) -> Value:
        if self.bits == 4:
            return sixteen.encode(xp, x, self.qmap, name)
        ends = self._zero_midpoint, self._top_midpoint
        tables = encoding(self.decades, self.signed, *ends)
        coded = encode(xp, xp.abs(x) if self.signed else x, tables, name)
        if not self.signed:
            return code_of(xp, coded)
        if xp.predicates:
            bits = xp.reinterpret(coded - WHOLE, "int32") | (xp.reinterpret(x, "int32") & SIGN)
            signed = xp.maximum(xp.reinterpret(bits, "float32"), -float(self._zero))
            return code_of(xp, signed + (WHOLE + self._zero))
        code = xp.bind(code_of(xp, coded), f"{name}_magnitude")
        return xp.where(x < 0.0, self._zero - xp.minimum(code, self._zero), code + self._zero)

    @property
    def _top_midpoint(self) -> float:
        """Between the last level of the top decade and 1."""
        return float(1 - 0.45 / 2 ** (self.decades if self.signed else self.decades + 1))

    @property
    def _zero_midpoint(self) -> float:
        """Between 0 and the lowest level, s (0.1 + 0.45 / n) of the lowest decade."""
        lowest = 10.0 ** (1 - self.decades) * (0.1 + 0.45 / (1 if self.signed else 2))
        return float(lowest / 2)


register(
    Dynamic(name="dynamic8s", bits=8, signed=True),
    Dynamic(name="dynamic8u", bits=8, signed=False),
    Dynamic(name="sqrt_dynamic8u", bits=8, signed=False, root=True),
    Dynamic(name="dynamic4s", bits=4, signed=True, decades=3),
)
register_family("dynamic8", signed="dynamic8s", nonnegative="dynamic8u")
# What new training should take: the best of the pairs measured (README), today the same pair.
register_family("8bit", signed="dynamic8s", nonnegative="dynamic8u")
