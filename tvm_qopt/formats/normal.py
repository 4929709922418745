"""NormalFloat: levels that normal values fill evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.formats import StateFormat, register, sixteen
from tvm_qopt.xp import ArrayNamespace, Value

OFFSET = 0.9677083  # the quantile of the outermost levels


@cache
def nf4_levels() -> npt.NDArray[np.float32]:
    """The 16 levels: 8 above 0, 0 itself and 7 below, quantiles of the normal distribution."""
    from scipy.special import ndtri

    above = ndtri(np.linspace(OFFSET, 0.5, 9)[:-1])
    below = -ndtri(np.linspace(OFFSET, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, [0.0], below]))
    return np.asarray(levels / levels.max(), np.float32)


@dataclass(frozen=True)
class NormalFloat4(StateFormat):
    """NF4 (Dettmers et al. 2023, QLoRA): the 16 normal-quantile levels."""

    @property
    def qmap(self) -> npt.NDArray[np.float32]:
        return nf4_levels()

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        """Four rounds of choosing a half, the last bit first: no look-up."""
        if xp.permutes:
            return xp.permute(self.qmap, codes)
        codes = xp.bind(codes, f"{name}_code")
        levels: list[Value] = [float(level) for level in self.qmap]
        for bit in range(4):
            high = (codes & (1 << bit)) != 0
            pairs = zip(levels[::2], levels[1::2], strict=True)
            levels = [xp.where(high, upper, lower) for lower, upper in pairs]
        return levels[0]

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        """How many midpoints lie below x; a tie takes the lower code."""
        if xp.permutes:
            return sixteen.encode(xp, x, self.qmap, name)
        levels = self.qmap.astype(np.float64)
        code: Value = 0
        for midpoint in (levels[1:] + levels[:-1]) / 2:
            code = xp.where(x > float(midpoint), 1, 0) + code
        return code


register(NormalFloat4(name="nf4", bits=4, signed=True))
