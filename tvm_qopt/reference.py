"""Run a KernelSpec with NumPy: the same rules and formats as the kernels, in the same text.

It checks the code generator, not the mathematics: for that tests have an oracle of their own.
May import layer 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.spec import CONST, HYPER, KernelSpec
from tvm_qopt.update import blockwise, scalars_namespace
from tvm_qopt.xp import NUMPY

Array = npt.NDArray[Any]


def step(spec: KernelSpec, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """One step: argument name -> new value, for each output of the spec; the inputs stay.

    Arrays are flat, in storage dtypes, of any number of elements; the last block may be short.
    """
    blocks, rest = divmod(arrays["param"].size, spec.block_size)
    outputs = {t.name: arrays[t.name].copy() for t in spec.tensors if t.output}
    windows = [(0, blocks, spec.block_size)] * (blocks > 0) + [(blocks, 1, rest)] * (rest > 0)
    for first, count, size in windows:
        results = _step_blocks(spec, arrays, first, count, size)
        for t in spec.tensors:
            if t.output:
                values = results[t.name].reshape(-1)
                start = first * (spec.block_size if t.per_element else 1)
                outputs[t.name][start : start + values.size] = values
    return outputs


def _step_blocks(
    spec: KernelSpec, arrays: Mapping[str, Array], first: int, count: int, size: int
) -> dict[str, Array]:
    """One step of `count` blocks of `size` elements from block number `first` on."""
    values: dict[str, Any] = {}
    for t in spec.tensors:
        array = arrays[t.name]
        if t.role == HYPER:
            values[t.name] = scalars_namespace(spec, dict(zip(spec.scalars, array, strict=True)))
        elif t.role == CONST:
            values[t.name] = array
        elif t.per_element:
            start = first * spec.block_size
            values[t.name] = array[start : start + count * size].reshape(count, size)
        else:
            values[t.name] = array[first : first + count].reshape(count, 1)
    with np.errstate(all="ignore"):
        return blockwise(NUMPY, spec, values)
