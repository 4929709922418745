"""What rules share."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_qopt.rules import root_beside
from tvm_qopt.xp import NumpyNamespace


@pytest.mark.parametrize("eps", [2.0**-126, 1e-30, 1e-16, 3.1e-12, 1e-8, 7e-4, 1.0, 1e30])
def test_a_root_too_small_to_be_taken_would_have_added_nothing(eps: float) -> None:
    """Bit for bit: denormals, values around the least that a root is taken of, and large ones."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F800000, 200_000, dtype=np.uint32)
    least = np.float32(min(eps * 2.0**-26, 1e19) ** 2)
    near = np.abs(np.int64(least.view(np.int32)) + np.arange(-5000, 5000)).astype(np.uint32)
    v = np.concatenate([bits, rng.integers(0, 1 << 23, 10_000, dtype=np.uint32), near])
    v, beside = v.view(np.float32), np.float32(eps)
    found = root_beside(NumpyNamespace(), v, beside)
    np.testing.assert_array_equal(found, np.sqrt(v) + beside)
