"""The OCP 8-bit floating-point formats, by rounding the bits of a float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.formats import StateFormat, register, register_family
from tvm_qopt.xp import ArrayNamespace, Value


@dataclass(frozen=True)
class Float8(StateFormat):
    """OCP FP8 (Micikevicius et al. 2022): sign, exponent, mantissa; nearest even, saturating.

    mantissa: its bits.  bias: of the exponent.  The code is the bit pattern, so levels do not
    ascend with it; the scale is absmax / peak, so a finite block never holds a NaN or Inf.
    """

    mantissa: int = 0
    bias: int = 0

    @property
    def zero_code(self) -> int:
        return 0

    @property
    def levels(self) -> npt.NDArray[np.float32]:
        """The level of each code, NaN and Inf where the format has them."""
        code = np.arange(256)
        sign = np.where(code & 0x80, -1.0, 1.0)
        exponent, fraction = (code & 0x7F) >> self.mantissa, code & ((1 << self.mantissa) - 1)
        unit = 2.0**-self.mantissa
        normal = (1 + fraction * unit) * 2.0 ** (exponent - self.bias)
        value = np.where(exponent == 0, fraction * unit * 2.0 ** (1 - self.bias), normal)
        if self.mantissa == 3:  # E4M3 has no Inf and one NaN
            value = np.where((code & 0x7F) == 0x7F, np.nan, value)
        else:
            top = exponent == 31
            value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
        return (sign * value).astype(np.float32)

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        """The bits moved to those of a float32, whose exponent is then put right by a product.

        A subnormal code becomes a subnormal float32, which the product makes normal: exact.
        """
        bits = ((codes & 0x7F) << (23 - self.mantissa)) | ((codes & 0x80) << 24)
        return xp.reinterpret(bits, "float32") * 2.0 ** (127 - self.bias)

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        """Normal values by adding half a unit, less one where the kept bit is even, to the bits;
        subnormal ones by adding a number whose last bit is their unit, which rounds in hardware."""
        bits = xp.bind(xp.reinterpret(x, "int32"), f"{name}_bits")
        magnitude = bits & 0x7FFFFFFF
        dropped = 23 - self.mantissa
        odd = (magnitude >> dropped) & 1
        rounded = magnitude + ((1 << (dropped - 1)) - 1) + odd
        normal = (rounded >> dropped) - ((127 - self.bias) << self.mantissa)
        least = 2.0 ** (1 - self.bias)  # the least normal level
        shifted = xp.reinterpret(magnitude, "float32") + least * 2.0 ** (23 - self.mantissa)
        subnormal = xp.reinterpret(shifted, "int32") & 0xFF
        small = magnitude < ((128 - self.bias) << 23)
        code = xp.bind(xp.where(small, subnormal, normal), f"{name}_magnitude")
        most = ((self._top_exponent) << self.mantissa) | self._top_fraction
        return xp.minimum(code, most) | ((bits >> 24) & 0x80)

    @property
    def _top_exponent(self) -> int:
        return 15 if self.mantissa == 3 else 30

    @property
    def _top_fraction(self) -> int:
        return 6 if self.mantissa == 3 else 3


register(
    Float8(name="fp8_e4m3", bits=8, signed=True, peak=448.0, mantissa=3, bias=7),
    Float8(name="fp8_e5m2", bits=8, signed=True, peak=57344.0, mantissa=2, bias=15),
)
register_family("fp8", signed="fp8_e4m3", nonnegative="fp8_e4m3")
