"""State formats: how a slot is stored, one file a family, and their registry.

May import layer 0 only.  To add a format: write its file with `register` and name it at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import NameTaken, UnknownName, UnsupportedSpec
from tvm_qopt.xp import ArrayNamespace, Value


@dataclass(frozen=True)
class StateFormat:
    """Codes of `bits` bits (8 or 4) and one float32 scale a block; value = decode(codes) * scale.

    A subclass defines decode, encode and, where the levels ascend with the code, qmap: from it come
    the zero code and the tests' laws.  The largest level is `peak`.

    The scale is absmax / peak, peak the largest level.  root: what is so stored is the square root
    of the value.  dtype: that of a state kept as it is, without codes and scale.
    runtime_map: the map from code to level is an argument of the kernel.
    true_division: encode sees value / scale rounded once, not value * (1 / scale) (1.5 ulp).
    settings: name -> choices, the default first.
    """

    name: str
    bits: int
    signed: bool
    peak: float = 1.0
    root: bool = False
    dtype: str | None = None
    runtime_map: bool = False
    true_division: bool = False
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)

    @property
    def scaled(self) -> bool:
        """Whether the state is codes and a scale (else it is the value itself)."""
        return self.dtype is None

    @property
    def summary(self) -> str:
        levels = (type(self).__doc__ or self.name).strip().splitlines()[0]
        return f"The square root is what is stored.  {levels}" if self.root else levels

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
        """The code (int32 or uint8) of the level nearest x, for float32 x in [-peak, peak]."""
        raise NotImplementedError


FORMATS: dict[str, StateFormat] = {}
FAMILIES: dict[str, tuple[str, str]] = {}
"""A state by one name: the format of its signed slots and that of its nonnegative ones."""


def register(*formats: StateFormat) -> None:
    for each in formats:
        if each.name in FORMATS:
            raise NameTaken("state format", each.name)
        FORMATS[each.name] = each


def register_family(name: str, *, signed: str, nonnegative: str) -> None:
    if name in FAMILIES or name in FORMATS:
        raise NameTaken("state", name)
    FAMILIES[name] = (signed, nonnegative)


def get_format(name: str) -> StateFormat:
    """Raises UnknownName, and UnsupportedSpec for a family, which is a format for each slot."""
    if name in FAMILIES:
        signed, nonnegative = FAMILIES[name]
        raise UnsupportedSpec(
            f"state: {name!r} stands alone, for all slots at once; in a list of one a slot "
            f"write {signed} (or {nonnegative} for a slot that is never negative)"
        )
    if name not in FORMATS:
        raise UnknownName("state", name, {**FORMATS, **FAMILIES})
    return FORMATS[name]


from tvm_qopt.formats import codebook as codebook  # noqa: E402
from tvm_qopt.formats import dynamic as dynamic  # noqa: E402
from tvm_qopt.formats import floating as floating  # noqa: E402
from tvm_qopt.formats import fp8 as fp8  # noqa: E402
from tvm_qopt.formats import linear as linear  # noqa: E402
from tvm_qopt.formats import normal as normal  # noqa: E402
