"""Arguments of a kernel in mid-training: what the tuner times kernels on and checks them with.

May import layer 0 only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt import reference
from tvm_qopt.rules import Hyper
from tvm_qopt.spec import (
    CONST,
    COUNTER,
    GRAD,
    HYPER,
    PER_BLOCK,
    RNG,
    RNG_SCALARS,
    STATE,
    WORKSPACE,
    KernelSpec,
    TensorSpec,
)

Array = npt.NDArray[Any]

USUAL = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "beta3": 0.999, "eps": 1e-8, "eta": 0.5,
         "weight_decay": 0.01, "momentum": 0.8, "dampening": 0.1, "alpha": 2.0, "lr_decay": 0.1,
         "t_alpha": 1e4, "t_beta3": 1e4}  # fmt: skip
"""Hyper-parameters by name; where a rule's range excludes it, and for others, a value inside."""
STEPS = 3  # of the reference, from a state of zeros
NOT_FINITE = (np.nan, np.inf, -np.inf)


def hyper_values(spec: KernelSpec) -> dict[str, float]:
    """A usual value of every hyper-parameter of a spec."""
    return {hyper.name: _usual(hyper) for hyper in spec.hyper}


def _usual(hyper: Hyper) -> float:
    if hyper.default is not None:
        return hyper.default
    value = USUAL.get(hyper.name, 0.5)
    return value if hyper.low < value < hyper.high else 0.9 * min(hyper.high, 1.0)


def scalars(spec: KernelSpec, step: int) -> npt.NDArray[np.float32]:
    """The argument `hyper`; the scalars that norms make are 0.5, since a 0 could hide a fault."""
    made = reference.hyper(spec, step, **hyper_values(spec))
    for norms in spec.rule_.norms:
        for name in norms.scalars:
            made[spec.scalars.index(name)] = 0.5
    return np.where(np.isinf(made), np.float32(1.0), made)


def arguments(
    spec: KernelSpec, elements: int, seed: int, *, spoiled: bool = False
) -> dict[str, Array]:
    """Every argument by name, flat and in storage dtypes, after a few steps of the reference.

    spoiled: a few gradients are not finite.  Codes of run-time maps are for evenly spaced levels.
    """
    rng = np.random.default_rng(seed)
    arrays = {t.name: _start(rng, spec, t, elements) for t in spec.tensors}
    for step in range(1, STEPS + 1):
        arrays["hyper"] = scalars(spec, step)
        _new_gradient(rng, spec, arrays)
        arrays |= reference.step(spec, arrays)
    arrays["hyper"] = scalars(spec, STEPS + 1)
    _new_gradient(rng, spec, arrays, NOT_FINITE if spoiled else ())
    return arrays


def _start(rng: np.random.Generator, spec: KernelSpec, t: TensorSpec, elements: int) -> Array:
    """An argument before the first step: zeros but for weights, maps and random numbers."""
    blocks = -(-elements // spec.block_size)
    if t.role == CONST:
        signed = {slot.name: not slot.nonnegative for slot, _ in spec.slots}
        low = -1.0 if signed[t.name.removesuffix("_qmap")] else 0.0
        return np.linspace(low, 1, 256, dtype=np.float32)
    if t.role == RNG:
        count = blocks if t.shape == PER_BLOCK else len(RNG_SCALARS)
        return np.arange(count, dtype=np.int32)
    if t.role in (STATE, COUNTER, WORKSPACE, HYPER):
        shape = t.held(elements, spec.block_size) or (elements,)
        return np.zeros(shape, t.storage)
    if t.dtype == "uint16":  # the low bits of split weights
        return rng.integers(1 << 16, size=elements, dtype=np.uint16)
    return _stored(rng.standard_normal(elements), t.dtype)


def _new_gradient(
    rng: np.random.Generator,
    spec: KernelSpec,
    arrays: dict[str, Array],
    bad: tuple[float, ...] = (),
) -> None:
    """Gradients over four decades, as layers of a network have them."""
    for t in spec.tensors:
        if t.role == GRAD:
            size = arrays[t.name].size
            grad = rng.standard_normal(size) * 10 ** rng.uniform(-4, 0, size)
            places = rng.integers(size, size=len(bad))
            grad[places] = bad
            arrays[t.name] = _stored(grad, t.dtype)


def _stored(x: Array, dtype: str) -> Array:
    """As a kernel takes it: 16-bit types as their bits (bfloat16 truncated, which will do here)."""
    x = x.astype(np.float32)
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(np.float16).view(np.uint16) if dtype == "float16" else x.astype(dtype)
