"""Every pair of a rule, a state, a way to keep weights, a gradient dtype and a block size.

The specs are a covering of all pairs, not the full product: rules x states, rules x weights, and
so on each occur together at least once.  The kernel is compared with the reference, which is the
same text on NumPy: each axis alone has an oracle elsewhere, here it is their combination in one
kernel that could go wrong.  Three steps, each from the kernel's own state.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt import reference
from tvm_qopt.rules import RULES

Array = npt.NDArray[Any]

AXES: dict[str, list[Any]] = {
    "rule": sorted(n for n, r in RULES.items() if r.is_update),
    "state": ["float32", "dynamic8", "fp8", "4bit", "bfloat16"],
    "weights": [
        ("float32", "plain"), ("float16", "plain"), ("bfloat16", "plain"), ("float16", "master"),
        ("bfloat16", "master"), ("bfloat16", "split"), ("bfloat16", "stochastic"),
    ],
    "grad": ["float32", "float16", "bfloat16"],
    "block_size": [64, 256, 4096],
}  # fmt: skip
HYPER = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "beta3": 0.999, "alpha": 0.9, "eps": 1e-6,
    "weight_decay": 0.1, "momentum": 0.8, "dampening": 0.1, "eta": 0.5, "lr_decay": 0.1,
}  # fmt: skip
SIZES = (1, 255, 257, 4113)


def covering() -> list[tuple[Any, ...]]:
    """Rows of one value an axis in which every pair of values of two axes occurs: greedily, the
    first pair that is missing and the values beside it that cover the most others."""
    names, axes = list(AXES), list(AXES.values())
    missing = {
        (i, x, j, y)
        for (i, xs), (j, ys) in itertools.combinations(enumerate(map(tuple, axes)), 2)
        for x in xs
        for y in ys
    }
    rows = []
    while missing:
        i, x, j, y = min(missing, key=repr)
        row: list[Any] = [None] * len(names)
        row[i], row[j] = x, y
        for k in (k for k in range(len(names)) if k not in (i, j)):
            row[k] = max(axes[k], key=lambda value: _covers(missing, row, k, value))
        rows.append(tuple(row))
        missing -= _pairs(row)
    return rows


def _pairs(row: list[Any]) -> set[tuple[Any, ...]]:
    known = [(k, value) for k, value in enumerate(row) if value is not None]
    return {(i, x, j, y) for (i, x), (j, y) in itertools.combinations(known, 2)}


def _covers(missing: set[tuple[Any, ...]], row: list[Any], k: int, value: Any) -> int:
    return len(missing & _pairs([*row[:k], value, *row[k + 1 :]]))


def spec_of(row: tuple[Any, ...]) -> tvm_qopt.KernelSpec:
    rule, state, (param, how), grad, block_size = row
    return tvm_qopt.KernelSpec.of(
        rule, state, param=param, param_format=how, grad=grad, block_size=block_size
    )


SPECS = [spec_of(row) for row in covering()]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    tvm_qopt.load_many(SPECS)


def test_every_pair_occurs() -> None:
    seen = {pair for row in covering() for pair in _pairs(list(row))}
    wanted = sum(len(a) * len(b) for a, b in itertools.combinations(AXES.values(), 2))
    assert len(seen) == wanted and len(SPECS) < 100


def stored(x: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_kernel_does_what_the_reference_does(spec: tvm_qopt.KernelSpec) -> None:
    kernel, rng = tvm_qopt.load(spec), np.random.default_rng(11)
    names = [h.name for h in spec.hyper if h.default is None]
    for n in SIZES:
        param = stored(rng.standard_normal(n).astype(np.float32), spec.param)
        grad = stored(rng.standard_normal(n).astype(np.float32), spec.grad)
        state = kernel.init_state(param)
        plan = kernel.plan(param=param, grad=grad, state=state)
        for step in (1, 2, 3):
            arrays = {"param": param, "grad": grad, **state}
            before = {name: _raw(array).copy() for name, array in arrays.items()}
            assert plan.step(step=step, **{name: HYPER[name] for name in names})
            before["hyper"] = plan._host_hyper.copy()  # with what the norm passes made
            before["rng"] = np.array([0, 0, step], np.int32)
            before["block_number"] = np.arange(-(-n // spec.block_size), dtype=np.int32)
            for name, expected in reference.step(spec, before).items():
                _near(name, _raw(arrays[name]), expected)


def _raw(x: Array) -> Array:
    """Flat, 16-bit floats as their bits."""
    return (x.view(np.uint16) if x.dtype == np.float16 else x).reshape(-1)


def _near(name: str, got: Array, expected: Array) -> None:
    if name == "nonfinite_count":
        assert (got == expected).all()
    elif got.dtype == np.float32:
        # contraction: a few ulp of the largest term, which no element exceeds here by a factor
        scale = max(1e-3, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6 * scale, err_msg=name)
    else:
        # bits and codes: equal but beside a midpoint, where contraction decides and where values of
        # few bits lie more often; low bits of a split weight are those of a float32
        differ = np.flatnonzero(got != expected)
        loose = name == "param_low"
        assert loose or differ.size <= 2 + got.size // 50, f"{name}: {differ.size} differ"
