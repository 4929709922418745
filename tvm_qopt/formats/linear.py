"""Evenly spaced levels: a multiplication and a rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.formats import StateFormat, register, register_family
from tvm_qopt.xp import ArrayNamespace, Value


@dataclass(frozen=True)
class Linear8(StateFormat):
    """Signed: k/127, k = -127..127, code k + 127 (255 unused, decodes as 1).  Unsigned: k/255."""

    @property
    def qmap(self) -> npt.NDArray[np.float32]:
        codes = np.arange(256)
        if self.signed:
            return (np.minimum(codes - 127, 127) / 127).astype(np.float32)
        return (codes / 255).astype(np.float32)

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        if not self.signed:
            return xp.cast(codes, "float32") * (1 / 255)
        return xp.cast(xp.minimum(codes - 127, 127), "float32") * (1 / 127)

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        """Truncating the magnitude plus 0.5 rounds to nearest, within an ulp of a midpoint."""
        steps = 127 if self.signed else 255
        magnitude = xp.abs(x) if self.signed else x
        k = xp.minimum(xp.cast(magnitude * float(steps) + 0.5, "int32"), steps)
        if not self.signed:
            return k
        k = xp.bind(k, f"{name}_magnitude")
        return xp.where(x < 0.0, 127 - k, 127 + k)


@dataclass(frozen=True)
class Linear4NoZero(StateFormat):
    """(k + 1)/16, k = 0..15: no zero, so that a second moment never vanishes (torchao, 4 bits)."""

    @property
    def qmap(self) -> npt.NDArray[np.float32]:
        return ((np.arange(16) + 1) / 16).astype(np.float32)

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        if xp.permutes and xp.predicates:  # a warp's, by one instruction
            return xp.permute(self.qmap, codes)
        return xp.cast(codes + 1, "float32") * (1 / 16)

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        """Exact, ties too: 16 x and what is left of it above a whole number are float32 numbers."""
        if xp.predicates:
            k = xp.cast(xp.ceil(x * 16.0 - 0.5), "int32")
            return xp.maximum(xp.minimum(k - 1, 15), 0)
        y = xp.bind(x * 16.0, f"{name}_scaled")
        k = xp.bind(xp.cast(y, "int32"), f"{name}_floor")
        code = xp.where(y - xp.cast(k, "float32") > 0.5, k, k - 1)
        return xp.maximum(xp.minimum(code, 15), 0)


register(
    Linear8(name="linear8s", bits=8, signed=True),
    Linear8(name="linear8u", bits=8, signed=False),
    Linear8(name="sqrt8u", bits=8, signed=False, root=True),
    Linear4NoZero(name="linear4u", bits=4, signed=False),
)
register_family("4bit", signed="dynamic4s", nonnegative="linear4u")
