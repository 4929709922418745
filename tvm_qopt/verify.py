"""What a kernel is timed on, and whether it does what the reference does.

May import layer 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from tvm_qopt import reference, sample
from tvm_qopt.measure import Arguments, Call, Step
from tvm_qopt.sample import Array
from tvm_qopt.spec import TAIL, KernelSpec, norms_entry

SAMPLE = 1 << 14  # elements that differ from each other: a large tensor repeats them
TIMED_SEED, CHECKED_SEED = 0, 1
CHECK_BLOCKS = 40  # enough for every thread to have some

Run = Callable[[Sequence[Call]], list[list[Array]]]
"""Makes calls of a kernel; the arguments of each after it."""


def timed_step(spec: KernelSpec, blocks: int, part: str) -> Step:
    """A step of a number of full blocks, in mid-training: the norm passes, then the update."""
    few = min(blocks, max(SAMPLE // spec.block_size, 1))
    arrays = sample.arguments(spec, few * spec.block_size, TIMED_SEED)
    arguments = Arguments(
        tuple(arrays[t.name] for t in spec.tensors),
        tuple(t.sizes(blocks, spec.block_size) for t in spec.tensors),
    )
    norms = (norms_entry(number, part) for number in range(len(spec.rule_.norms)))
    return Step((*norms, part), arguments)


def fault(spec: KernelSpec, parts: Sequence[str], run: Run) -> str | None:
    """How a kernel differs from the reference on random input, in words; None where it does not:
    the update and each norm pass, by each of `parts` (the entry points of the kind)."""
    rest = spec.block_size // 2 + 1
    before = sample.arguments(
        spec, CHECK_BLOCKS * spec.block_size + rest, CHECKED_SEED, spoiled=True
    )
    for norms in (None, *range(len(spec.rule_.norms))):
        want = reference.step(spec, before, norms)
        for got in _results(spec, parts, run, before, norms, rest):
            if wrong := reference.disagreement(spec, before, want, got):
                return wrong
    return None


def _results(
    spec: KernelSpec,
    parts: Sequence[str],
    run: Run,
    before: Mapping[str, Array],
    norms: int | None,
    rest: int,
) -> Iterator[dict[str, Array]]:
    """What the kernel makes of whole tensors, which end in a block of `rest` elements."""
    full, last = (0, CHECK_BLOCKS, spec.block_size), (CHECK_BLOCKS, 1, rest)
    windows = [(part, full) for part in parts if part != TAIL] + [(TAIL, last)]
    calls = [
        Call(part if norms is None else norms_entry(norms, part), _windows(spec, before, *window))
        for part, window in windows
    ]
    *wholes, tail = run(calls)
    for results in wholes:
        yield {
            t.name: np.concatenate([results[i].reshape(-1), tail[i].reshape(-1)])
            for i, t in enumerate(spec.tensors)
        }


def _windows(
    spec: KernelSpec, arrays: Mapping[str, Array], first: int, count: int, size: int
) -> tuple[Array, ...]:
    """The arguments for `count` blocks of `size` elements from block number `first` on."""
    windows = []
    for t in spec.tensors:
        shape, start = t.sizes(count, size), t.start(first, spec.block_size)
        part = arrays[t.name][start : start + math.prod(shape)]
        windows.append(np.ascontiguousarray(part).reshape(shape))
    return tuple(windows)
