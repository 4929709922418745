"""A map of 256 levels given at run time, searched: slow on CPUs, but any map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm_qopt.formats import StateFormat, register
from tvm_qopt.xp import ArrayNamespace, Value

LEVELS = 256


@dataclass(frozen=True)
class Codebook(StateFormat):
    """256 ascending levels given at run time; nearest level by search, ties to the lower code.

    sign_repair: as the reference of the Ascend operator, a code whose level has the opposite sign
    of x moves by one towards the sign of x (only in a map that has a negative level).
    """

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        return xp.take(qmap, codes)

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        low = 0  # the last level below x, or 0
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            below = x > xp.take(qmap, low + step)
            low = xp.bind(xp.where(below, low + step, low), f"{name}_search{step}")
        high = xp.minimum(low + 1, LEVELS - 1)
        nearer_low = xp.abs(x - xp.take(qmap, low)) <= xp.abs(x - xp.take(qmap, high))
        code = xp.bind(xp.where(nearer_low, low, high), f"{name}_nearest")
        return self._repair(xp, x, qmap, code) if settings["sign_repair"] else code

    @staticmethod
    def _repair(xp: ArrayNamespace, x: Value, qmap: Value | None, code: Value) -> Value:
        level, has_negative = xp.take(qmap, code), xp.take(qmap, code * 0) < 0.0
        up = xp.all_of(x > 0.0, level < 0.0)
        down = xp.all_of(x < 0.0, level > 0.0, has_negative)
        moved = xp.where(up, code + 1, xp.where(down, code - 1, code))
        return xp.minimum(xp.maximum(moved, 0), LEVELS - 1)


register(
    Codebook(
        name="codebook8",
        bits=8,
        signed=True,
        runtime_map=True,
        true_division=True,
        settings={"sign_repair": (False, True)},
    )
)
