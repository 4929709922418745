"""States in mid-training, what a step makes of them, and the bytes that it moves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import oracles

from tvm_qopt import reference
from tvm_qopt.formats.dynamic import dynamic_map
from tvm_qopt.runtime.scalars import Scalars
from tvm_qopt.spec import CONST, GRAD, HYPER, WORKSPACE, KernelSpec, TensorSpec, norm_tensor

Array = npt.NDArray[Any]
OF_PLAN = (HYPER, WORKSPACE)


def random_arrays(spec: KernelSpec, n: int) -> dict[str, Array]:
    """A state in mid-training, with gradients over four decades and three that are not finite."""
    rng = np.random.default_rng(n)
    return {t.name: _random(rng, spec, t, n) for t in spec.tensors if t.role not in OF_PLAN}


def _random(rng: np.random.Generator, spec: KernelSpec, t: TensorSpec, n: int) -> Array:
    held = t.held(n, spec.block_size)
    size = n if held is None else held[0]
    if t.role == CONST:
        return dynamic_map(signed="sq" not in t.name)
    if t.dtype in ("int32", "uint8"):
        return rng.integers(0, 200 if t.dtype == "uint8" else 9, size).astype(t.dtype)
    if t.name.endswith("_scale"):
        return (10 ** rng.uniform(-6, 0, size)).astype(np.float32)
    x = rng.normal(size=size)
    if t.role == GRAD:
        x *= 10 ** rng.uniform(-5, -1, size)
        x[rng.integers(size, size=min(3, size // 8))] = np.nan
    x = (np.abs(x) if "_sq" in t.name else x).astype(np.float32)
    return oracles.narrow(x, t.dtype)  # type: ignore[arg-type]


def expected(spec: KernelSpec, arrays: dict[str, Array], hyper: dict[str, float]) -> Any:
    """The step by NumPy, norms included."""
    scalars = Scalars(spec)
    values = scalars.of(2, 1.0, 1.0, hyper)
    given = {**arrays, "hyper": np.array(values, np.float32)}
    blocks = -(-arrays["param"].size // spec.block_size)
    for number, norms in enumerate(spec.rule_.norms):
        names = {name: norm_tensor(number, name) for name in norms.names}
        given |= {partial: np.zeros(blocks, np.float32) for partial in names.values()}
        sums = reference.step(spec, given, norms=number)
        found = {n: math.sqrt(sums[each].astype(np.float64).sum()) for n, each in names.items()}
        if norms.scalars:
            scalars.finish(number, found, values)
        given["hyper"] = np.array(values, np.float32)
    return reference.step(spec, given)


def moved(spec: KernelSpec, n: int) -> float:
    """Bytes that a step of n elements moves: arguments read once, outputs written once."""
    total = 0.0
    for t in spec.tensors:
        if t.role in (*OF_PLAN, CONST):
            continue
        held = t.held(n, spec.block_size)
        size = n if held is None else held[0]
        total += size * np.dtype(t.storage).itemsize * (2 if t.output else 1)
    return total
