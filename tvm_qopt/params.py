"""How parameters and gradients are stored, and their way to float32 and back.

The 16-bit types travel as their bit patterns (uint16), so that a kernel needs no 16-bit arithmetic,
NumPy can carry bfloat16, and a weight that a step leaves alone keeps every bit, NaN payloads too.
May import layer 0 only.
"""

from __future__ import annotations

from tvm_qopt.xp import ArrayNamespace, Value

STORAGE = {"float32": "float32", "float16": "uint16", "bfloat16": "uint16"}
"""dtype of a parameter or gradient -> dtype of the kernel's argument."""

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""dtype -> its form in spec names."""


def load(xp: ArrayNamespace, raw: Value, dtype: str) -> Value:
    """The stored value as float32, exactly."""
    if dtype == "float32":
        return raw
    if dtype == "float16":
        return xp.cast(xp.reinterpret(raw, "float16"), "float32")
    return xp.reinterpret(xp.cast(raw, "int32") << 16, "float32")


def store(xp: ArrayNamespace, x: Value, dtype: str) -> Value:
    """A float32 value in its stored form: one rounding, to nearest even; a NaN stays a NaN."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        return xp.reinterpret(xp.cast(x, "float16"), "uint16")
    bits = xp.reinterpret(x, "int32")
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return xp.cast((xp.where(is_nan, bits | 0x400000, rounded) >> 16) & 0xFFFF, "uint16")


def nan(xp: ArrayNamespace, dtype: str) -> Value:
    """A quiet NaN in stored form."""
    if dtype == "float32":
        return xp.reinterpret(xp.constant(0x7FC00000, "int32"), "float32")
    return xp.constant({"float16": 0x7E00, "bfloat16": 0x7FC0}[dtype], "uint16")
