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
from tvm_qopt.spec import CONST, GRADIENT_SCALAR, SCALARS, WORKSPACE, KernelSpec
from tvm_qopt.update import blockwise, namespace_of
from tvm_qopt.xp import NumpyNamespace

Array = npt.NDArray[Any]


def hyper(spec: KernelSpec, step: int, **values: float) -> npt.NDArray[np.float32]:
    """The argument `hyper` of update number `step` from the rule's hyper-parameters.

    Gradient scales are 1 and an element-wise clip is off; norms are not formed.
    """
    derived = spec.rule_.derive(values, step, spec.all_settings)
    scalars = {GRADIENT_SCALAR: 1.0, CLIP_SCALAR: math.inf, **derived}
    return np.array([scalars.get(name, 0.0) for name in spec.scalars], np.float32)


def step(spec: KernelSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """One step: argument name -> new value, for each output of the spec; the inputs stay.

    Arrays are flat, in storage dtypes, of any number of elements; the last block may be short.
    `hyper` makes the array of that name.  A kernel may contract a b + c to one rounding where NumPy
    has two: values then differ by a few ulp of their terms, codes within that of a midpoint.
    """
    blocks, rest = divmod(arrays["param"].size, spec.block_size)
    outputs = {t.name: arrays[t.name].copy() for t in spec.outputs()}
    windows = [(0, blocks, spec.block_size)] * (blocks > 0) + [(blocks, 1, rest)] * (rest > 0)
    for first, count, size in windows:
        results = _step_blocks(spec, arrays, first, count, size)
        for t in spec.outputs():
            values = results[t.name].reshape(-1)
            start = t.start(first, spec.block_size)
            outputs[t.name][start : start + values.size] = values
    return outputs


def _step_blocks(
    spec: KernelSpec, arrays: Mapping[str, Array], first: int, count: int, size: int
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
        return blockwise(NumpyNamespace(size), spec, values)
