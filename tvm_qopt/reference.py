"""Run a KernelSpec with NumPy: the same rules and formats as the kernels, in the same text.

It checks the code generator, not the mathematics: for that tests have an oracle of their own.
May import layer 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.rules import CLIP_SCALAR
from tvm_qopt.spec import (
    CONST,
    COUNTER,
    GRADIENT_SCALAR,
    SCALARS,
    WORKSPACE,
    KernelSpec,
    TensorSpec,
)
from tvm_qopt.update import blockwise, namespace_of, partial_norms
from tvm_qopt.xp import NumpyNamespace

Array = npt.NDArray[Any]
LOW_BITS = "param_low"
EPS = float(np.finfo(np.float32).eps)
NOWHERE = np.empty(0, np.int64)
ULPS = 8  # by which a value may differ
RELATIVE = 1e-5  # by which a sum of a block may
FAR = 2e-6  # of the largest value: by which none may


def hyper(spec: KernelSpec, step: int, **values: float) -> npt.NDArray[np.float32]:
    """The argument `hyper` of update number `step` from the rule's hyper-parameters.

    Gradient scales are 1 and an element-wise clip is off; norms are not formed.
    """
    derived = spec.rule_.derive(values, step, spec.all_settings)
    scalars = {GRADIENT_SCALAR: 1.0, CLIP_SCALAR: math.inf, **derived}
    return np.array([scalars.get(name, 0.0) for name in spec.scalars], np.float32)


def step(
    spec: KernelSpec, arrays: Mapping[str, Array], norms: int | None = None
) -> dict[str, Array]:
    """One step: argument name -> new value, for each output of the spec; the inputs stay.

    norms: the number of a norm pass in place of the update; then the outputs are partial sums.
    Arrays are flat, in storage dtypes, of any number of elements; the last block may be short.
    `hyper` makes the array of that name.  A kernel may contract a b + c to one rounding where NumPy
    has two: values then differ by a few ulp of their terms, codes within that of a midpoint.
    """
    blocks, rest = divmod(arrays["param"].size, spec.block_size)
    outputs = {t.name: arrays[t.name].copy() for t in spec.outputs(norms)}
    windows = [(0, blocks, spec.block_size)] * (blocks > 0) + [(blocks, 1, rest)] * (rest > 0)
    for first, count, size in windows:
        results = _step_blocks(spec, arrays, first, count, size, norms)
        for t in spec.outputs(norms):
            values = results[t.name].reshape(-1)
            start = t.start(first, spec.block_size)
            outputs[t.name][start : start + values.size] = values
    return outputs


def _step_blocks(
    spec: KernelSpec,
    arrays: Mapping[str, Array],
    first: int,
    count: int,
    size: int,
    norms: int | None,
) -> dict[str, Array]:
    """One step of `count` blocks of `size` elements from block number `first` on."""
    values: dict[str, Any] = {}
    for t in spec.tensors:
        if t.role == WORKSPACE:
            continue
        array = arrays[t.name]
        if t.name in SCALARS:
            values[t.name] = namespace_of(spec, t, array.__getitem__)
        elif t.role == CONST:
            values[t.name] = array
        else:
            shape, start = t.sizes(count, size), t.start(first, spec.block_size)
            window = array.reshape(-1)[start : start + math.prod(shape)]
            values[t.name] = window.reshape(shape if len(shape) == 2 else (*shape, 1))
    with np.errstate(all="ignore"):
        if norms is not None:
            return partial_norms(NumpyNamespace(size), spec, values, norms)
        return blockwise(NumpyNamespace(size), spec, values)


def disagreement(
    spec: KernelSpec,
    before: Mapping[str, Array],
    want: Mapping[str, Array],
    got: Mapping[str, Array],
) -> str | None:
    """What is wrong with the outputs of a kernel, beside those of `step`; None if nothing is.

    Contraction moves a float32 by a few ulp of the largest of its terms; one in five hundred may
    have larger terms that cancelled, or lie next to a midpoint where it is stored in fewer bits.
    (A fault of one lane would be more.)  Sums of a block depend on their order.
    """
    tensors = {t.name: t for t in spec.tensors}
    for name, expected in want.items():
        wrong, far = _differing(tensors[name], before[name], expected, got[name])
        if tensors[name].role == COUNTER or wrong.size > 2 + expected.size // 500:
            far = wrong
        if far.size:
            at = int(far[0])
            pair = f"{got[name].reshape(-1)[at]} for {expected.reshape(-1)[at]}"
            return f"{name}: {far.size} of {expected.size} differ, the first at {at}: {pair}"
    return None


Indices = npt.NDArray[np.int64]


def _differing(t: TensorSpec, before: Array, want: Array, got: Array) -> tuple[Indices, Indices]:
    """The flat indices where an output is not what it should be, and where it is far from it."""
    before, want, got = (x.reshape(-1) for x in (before, want, got))
    if t.name == LOW_BITS:  # of a float32: a few ulp, and the step from one half to the other
        apart = np.abs(got.astype(np.int32) - want.astype(np.int32))
        return np.flatnonzero(np.minimum(apart, (1 << 16) - apart) > ULPS), NOWHERE
    if want.dtype != np.float32:
        return np.flatnonzero(got != want), NOWHERE
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, np.abs(got - want))
        terms = np.where(same, 0, np.abs([before, want, want - before]).max(axis=0))
    if t.role == WORKSPACE:
        return np.flatnonzero(~(apart <= RELATIVE * terms)), NOWHERE
    most = FAR * np.abs(want[np.isfinite(want)]).max(initial=0)
    return np.flatnonzero(~(apart <= ULPS * EPS * terms)), np.flatnonzero(~(apart <= most))
