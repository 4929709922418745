"""The array namespace that rules and formats are written against, and its NumPy form.

The same text runs on NumPy (`NUMPY`, for the reference and for state initialisation) and on tensor
expressions (`compiler.xp_te`).  May import numpy and the standard library only.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]
WHOLE = 2.0**23
"""A float32 from here to twice this is a whole number, and ends in its bits."""
WHOLE_BITS = 0x4B000000
"""The bits of WHOLE."""
Value = Any
"""A float32, integer or boolean array (NumPy) or lazily indexed tensor expression (te)."""


class ArrayNamespace(Protocol):
    """What a rule or a format may call; everything else is Python's operators on values.

    There is no round: `cast` truncates, so cast(x + 0.5) rounds what is not negative.
    Another function is added here, to NumpyNamespace and to compiler.xp_te.
    """

    permutes: bool
    """Whether `permute` is one instruction."""
    predicates: bool
    """Whether an operation under a condition is one instruction: an element is one thread's."""

    def bind(self, x: Value, name: str) -> Value:
        """Name a value.  In te it becomes a stage, computed once however often it is used."""

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        """Choose by element; both sides have one dtype."""

    def sqrt(self, x: Value) -> Value: ...

    def abs(self, x: Value) -> Value: ...

    def ceil(self, x: Value) -> Value:
        """The least whole number that is not below x, a float32.  Not for CPUs, whose vectors may
        lack it."""

    def minimum(self, x: Value, y: Value) -> Value: ...

    def maximum(self, x: Value, y: Value) -> Value: ...

    def all_of(self, *conditions: Value) -> Value:
        """Logical and."""

    def cast(self, x: Value, dtype: str) -> Value:
        """Convert by value; float to integer truncates towards zero."""

    def reinterpret(self, x: Value, dtype: str) -> Value:
        """The same bits as another dtype of the same width."""

    def unpack4(self, packed: Value) -> Value:
        """The 4-bit codes (int32) of bytes that hold two each, the even one in the high half."""

    def pack4(self, codes: Value) -> Value:
        """The inverse: two bound uint8 codes a byte; an odd last one has 0 beside it."""

    def element_index(self) -> Value:
        """The number (int32) of each element within its block."""

    def constant(self, value: int, dtype: str) -> Value:
        """An integer of a stated dtype."""

    def take(self, table: Value, index: Value) -> Value:
        """Look up a one-dimensional table by an int32 index."""

    def permute(self, table: Table, index: Value) -> Value:
        """Look up one of 16 float32 numbers by the low 4 bits of an int32.

        Not in a branch of `where` (bind it first): on CUDA all threads of a warp must make it.
        """

    def whole(self, code: Value) -> Value:
        """WHOLE plus a code (int32, below 256), a float32: the code is the last bits of it."""

    def block_max(self, x: Value, name: str) -> Value:
        """Largest element of each block of a non-negative int32 value; a value per block."""

    def block_sum(self, x: Value, name: str) -> Value:
        """Sum of an int32 or float32 value over each block; a value per block."""


def clip(xp: ArrayNamespace, x: Value, bound: Value) -> Value:
    """x within +-bound; a NaN stays one.  x should be bound: it is used often."""
    return xp.where(x > bound, bound, xp.where(x < -bound, -bound, x))


def code_of(xp: ArrayNamespace, whole: Value) -> Value:
    """The code (uint8) in the last bits of a float32 from WHOLE on: the inverse of `xp.whole`."""
    return xp.cast(xp.reinterpret(whole, "int32"), "uint8")


class NumpyNamespace:
    """Arrays of shape (blocks, block size); values per block have shape (blocks, 1).

    block_size: needed where 4-bit codes are read and where elements are numbered.
    """

    def __init__(
        self, block_size: int | None = None, *, permutes: bool = False, predicates: bool = False
    ) -> None:
        self.block_size, self.permutes, self.predicates = block_size, permutes, predicates

    def bind(self, x: Value, name: str) -> Value:
        return x

    def where(self, condition: Value, x: Value, y: Value) -> Value:
        return np.where(condition, _typed(x), _typed(y))

    def sqrt(self, x: Value) -> Value:
        return np.sqrt(x)

    def abs(self, x: Value) -> Value:
        return np.abs(x)

    def ceil(self, x: Value) -> Value:
        return np.ceil(x)

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

    def unpack4(self, packed: Value) -> Value:
        both = np.stack([packed >> 4, packed & 15], axis=-1)
        codes = both.reshape(*packed.shape[:-1], -1).astype(np.int32)
        return codes[..., : self.block_size]

    def pack4(self, codes: Value) -> Value:
        codes = np.pad(codes, ((0, 0), (0, codes.shape[-1] % 2)))
        return ((codes[..., ::2] << 4) | codes[..., 1::2]).astype(np.uint8)

    def element_index(self) -> Value:
        assert self.block_size is not None
        return np.arange(self.block_size, dtype=np.int32)

    def constant(self, value: int, dtype: str) -> Value:
        return np.dtype(dtype).type(value)

    def take(self, table: Value, index: Value) -> Value:
        return table[index]

    def permute(self, table: Table, index: Value) -> Value:
        return table[index & 15]

    def whole(self, code: Value) -> Value:
        return (code | WHOLE_BITS).view(np.float32)

    def block_max(self, x: Value, name: str) -> Value:
        return x.max(axis=-1, keepdims=True)

    def block_sum(self, x: Value, name: str) -> Value:
        return x.sum(axis=-1, keepdims=True, dtype=x.dtype)


def _typed(x: Value) -> Value:
    """Python's scalars as the 32-bit kinds that kernels use: np.where would make them 64-bit."""
    if isinstance(x, float):
        return np.float32(x)
    return np.int32(x) if isinstance(x, int) else x


NUMPY: ArrayNamespace = NumpyNamespace()
