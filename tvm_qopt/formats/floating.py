"""State kept as it is: no codes, no scale."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_qopt.formats import StateFormat, register


@dataclass(frozen=True)
class Direct(StateFormat):
    """The value itself, rounded to the dtype (to nearest even)."""


register(
    Direct(name="float32", bits=32, signed=True, dtype="float32"),
    Direct(name="bfloat16", bits=16, signed=True, dtype="bfloat16"),
    Direct(name="float16", bits=16, signed=True, dtype="float16"),
)
