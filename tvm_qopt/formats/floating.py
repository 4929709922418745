"""State kept as it is: no codes, no scale."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_qopt.formats import StateFormat, register


@dataclass(frozen=True)
class Float32(StateFormat):
    """The float32 value itself."""


register(Float32(name="float32", bits=32, signed=True))
