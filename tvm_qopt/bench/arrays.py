"""Memory of the bench's own arrays: placed as torch places a large tensor, and filled.

That is 64 bytes into a page, with no advice to use huge pages.  NumPy's own large arrays begin 16
bytes into one, so that vectors straddle cache lines, and ask for huge pages.  Pages never written
read at the speed of a cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.params import STORAGE, store
from tvm_qopt.xp import NUMPY

ALIGNMENT = 64  # bytes: torch's, and a cache line
PIECE = 1 << 20  # elements made at random, then repeated

Array = npt.NDArray[Any]


def empty(size: int, dtype: npt.DTypeLike) -> Array:
    """A flat array of its own pages."""
    length = ALIGNMENT + size * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype, size, ALIGNMENT)


def filled(size: int, dtype: str, scale: float = 1.0) -> Array:
    """Normal numbers of a deviation, in the form that kernels take: 16-bit types as their bits."""
    numbers = np.random.default_rng(0).standard_normal(min(size, PIECE), dtype=np.float32)
    piece = np.asarray(store(NUMPY, numbers * np.float32(scale), dtype), STORAGE[dtype])
    array = empty(size, piece.dtype)
    for start in range(0, size, PIECE):
        part = array[start : start + PIECE]
        part[:] = piece[: part.size]
    return array


def placed(arrays: Sequence[Array]) -> list[Array]:
    """Copies in one piece of memory, each on a boundary of 64 bytes."""
    starts, length = [], 0
    for array in arrays:
        starts.append(length)
        length += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    memory = empty(length, np.uint8)
    copies = []
    for array, start in zip(arrays, starts, strict=True):
        copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies.append(copy)
    return copies


def split(array: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive parts of a flat array."""
    return np.split(array, np.cumsum(sizes)[:-1])
