"""State formats: how a slot is stored, one file a family, and their registry.

May import layer 0 only.  To add a format: write its file with `register` and name it at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import UnknownName
from tvm_qopt.xp import ArrayNamespace, Value


@dataclass(frozen=True)
class StateFormat:
    """Codes of `bits` bits and one float32 scale (absmax) a block; value = decode(codes) * scale.

    levels: the map from code to level where it is known at build time (ascending, in [-1, 1]).
    runtime_map: the map is an argument of the kernel instead.
    true_division: encode sees value / scale rounded once, not value * (1 / scale) (1.5 ulp).
    settings: name -> choices, the default first.
    """

    name: str
    bits: int
    signed: bool
    runtime_map: bool = False
    true_division: bool = False
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    @property
    def scaled(self) -> bool:
        """Whether the state is codes and a scale (else it is the float32 value itself)."""
        return self.bits < 16

    @property
    def summary(self) -> str:
        return (type(self).__doc__ or self.name).strip().splitlines()[0]

    @property
    def qmap(self) -> npt.NDArray[np.float32] | None:
        """The levels by code, float32, ascending; None where there is no map at build time."""
        return None

    @property
    def zero_code(self) -> int:
        """The code nearest 0 (the lower on a tie): what a block of zeros stores."""
        if self.qmap is None:
            return 0
        return int(np.argmin(np.abs(self.qmap)))

    def decode(self, xp: ArrayNamespace, codes: Value, qmap: Value | None, name: str) -> Value:
        """The level of each code (int32 in, float32 out); `name` prefixes the stages it binds."""
        raise NotImplementedError

    def encode(
        self,
        xp: ArrayNamespace,
        x: Value,
        qmap: Value | None,
        settings: Mapping[str, Any],
        name: str,
    ) -> Value:
        """The code (int32) of the level nearest x, for float32 x in [-1, 1]."""
        raise NotImplementedError


FORMATS: dict[str, StateFormat] = {}
FAMILIES: dict[str, tuple[str, str]] = {}
"""A state by one name: the format of its signed slots and that of its nonnegative ones."""


def register(*formats: StateFormat) -> None:
    for each in formats:
        if each.name in FORMATS:
            raise ValueError(f"state format {each.name!r} is registered twice")
        FORMATS[each.name] = each


def register_family(name: str, *, signed: str, nonnegative: str) -> None:
    if name in FAMILIES or name in FORMATS:
        raise ValueError(f"state {name!r} is registered twice")
    FAMILIES[name] = (signed, nonnegative)


def get_format(name: str) -> StateFormat:
    if name not in FORMATS:
        raise UnknownName("state format", name, {**FORMATS, **FAMILIES})
    return FORMATS[name]


from tvm_qopt.formats import codebook as codebook  # noqa: E402
from tvm_qopt.formats import dynamic as dynamic  # noqa: E402
from tvm_qopt.formats import floating as floating  # noqa: E402
