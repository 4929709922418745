"""What rules share."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_qopt.errors import UnsupportedSpec
from tvm_qopt.rules import TAKEN, Slot, root_beside
from tvm_qopt.spec import KernelSpec
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


@pytest.mark.parametrize("name", TAKEN)
def test_a_slot_has_no_name_that_kernels_give_to_other_arguments(name: str) -> None:
    assert Slot.parse("+mean_sq") == Slot("mean_sq", nonnegative=True)
    with pytest.raises(UnsupportedSpec, match=f"slot {name}: "):
        Slot.parse(f"+{name}")


def test_the_taken_names_are_those_of_specs() -> None:
    specs = ("adamw", "adamw-dynamic8-b256-p_bf16_stochastic", "lamb-fp8-b256-p_f16_master")
    specs += ("adamw-dynamic8-b256-p_bf16_split",)
    slots = ("exp_avg", "norm")
    named = {t.name for text in specs for t in KernelSpec.parse(text).tensors}
    assert {name for name in named if not name.startswith(slots)} <= set(TAKEN)
