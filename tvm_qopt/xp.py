"""The array namespace that rules and formats are written against, and its NumPy form.

The same text runs on NumPy (`NUMPY`, for the reference and for state initialisation) and on tensor
expressions (`compiler.xp_te`).  May import numpy and the standard library only.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Value = Any
"""A float32, integer or boolean array (NumPy) or lazily indexed tensor expression (te)."""


class ArrayNamespace(Protocol):
    """What a rule or a format may call; everything else is Python's operators on values."""

    def bind(self, x: Value, name: str) -> Value:
        """Name a value.  In te it becomes a stage, computed once however often it is used."""

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        """Choose by element; both sides have one dtype."""

    def sqrt(self, x: Value) -> Value: ...

    def abs(self, x: Value) -> Value: ...

    def minimum(self, x: Value, y: Value) -> Value: ...

    def maximum(self, x: Value, y: Value) -> Value: ...

    def all_of(self, *conditions: Value) -> Value:
        """Logical and."""

    def cast(self, x: Value, dtype: str) -> Value:
        """Convert by value; float to integer truncates towards zero."""

    def reinterpret(self, x: Value, dtype: str) -> Value:
        """The same bits as another dtype of the same width."""

    def constant(self, value: int, dtype: str) -> Value:
        """An integer of a stated dtype."""

    def take(self, table: Value, index: Value) -> Value:
        """Look up a one-dimensional table by an int32 index."""

    def block_max(self, x: Value, name: str) -> Value:
        """Largest element of each block of a non-negative int32 value; a value per block."""

    def block_sum(self, x: Value, name: str) -> Value:
        """Sum of an int32 value over each block; a value per block."""


class NumpyNamespace:
    """Arrays of shape (blocks, block size); values per block have shape (blocks, 1)."""

    def bind(self, x: Value, name: str) -> Value:
        return x

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        return np.where(condition, _typed(x), _typed(y))

    def sqrt(self, x: Value) -> Value:
        return np.sqrt(x)

    def abs(self, x: Value) -> Value:
        return np.abs(x)

    def minimum(self, x: Value, y: Value) -> Value:
        return np.minimum(x, y)

    def maximum(self, x: Value, y: Value) -> Value:
        return np.maximum(x, y)

    def all_of(self, *conditions: Value) -> Value:
        return np.logical_and.reduce(conditions)

    def cast(self, x: Value, dtype: str) -> Value:
        return np.asarray(x).astype(dtype)

    def reinterpret(self, x: Value, dtype: str) -> Value:
        return np.asarray(x).view(dtype)

    def constant(self, value: int, dtype: str) -> Value:
        return np.dtype(dtype).type(value)

    def take(self, table: Value, index: Value) -> Value:
        return table[index]

    def block_max(self, x: Value, name: str) -> Value:
        return x.max(axis=-1, keepdims=True)

    def block_sum(self, x: Value, name: str) -> Value:
        return x.sum(axis=-1, keepdims=True, dtype=np.int32)


def _typed(x: Value) -> Value:
    """Python's scalars as the 32-bit kinds that kernels use: np.where would make them 64-bit."""
    if isinstance(x, float):
        return np.float32(x)
    return np.int32(x) if isinstance(x, int) else x


NUMPY: ArrayNamespace = NumpyNamespace()
