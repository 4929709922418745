"""What a step of a spec launches on a GPU, as jobs for a runner, and what is wrong with their
results: for tests that run GPU kernels without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from opencl_runner import Array, Job

from tvm_qopt import reference, sample
from tvm_qopt.compiler.schedule import ANY, MAIN, TAIL
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.spec import KernelSpec, norms_entry

Arrays = Mapping[str, Array]
Run = Callable[[Sequence[Job]], Sequence[Arrays]]


def launches(
    spec: KernelSpec, arrays: Arrays, main: str = MAIN, norms: int | None = None
) -> list[Job]:
    """Full blocks by `main`, the rest by the tail, as a Plan launches them."""
    full, rest = divmod(arrays["param"].size, spec.block_size)
    parts = []
    if full:
        parts.append((main, Part(0, full, spec.block_size)))
    if rest:
        parts.append((TAIL, Part(full, 1, rest)))
    return [
        _job(spec, entry if norms is None else norms_entry(norms, entry), part, arrays)
        for entry, part in parts
    ]


def _job(spec: KernelSpec, entry: str, part: Part, arrays: Arrays) -> Job:
    views = {}
    for t in spec.tensors:
        start = t.start(part.first, spec.block_size)
        views[t.name] = arrays[t.name][start : start + math.prod(t.sizes(part.blocks, part.size))]
    return Job(entry, part, views)


def steps(spec: KernelSpec, arrays: Arrays) -> Iterator[tuple[int | None, list[Job]]]:
    """What a step of a spec may launch: the update by `main` and by `main_any`, each norm pass."""
    aligned = (MAIN, ANY) if arrays["param"].size >= spec.block_size else (MAIN,)
    for main in aligned:
        yield None, launches(spec, arrays, main)
    for number in range(len(spec.rule_.norms)):
        yield number, launches(spec, arrays, MAIN, number)


def fault(
    spec: KernelSpec, before: Arrays, parts: Sequence[Arrays], norms: int | None = None
) -> str | None:
    """How the results of launches differ from the reference, in words; None where they do not."""
    want = reference.step(spec, before, norms)
    got = {name: np.concatenate([part[name] for part in parts]) for name in want}
    return reference.disagreement(spec, before, want, got)


def faults(spec: KernelSpec, sizes: Sequence[int], run: Run, *, spoil: bool = True) -> list[str]:
    """Run every step of a spec on tensors of some sizes: what is wrong.

    spoil: where there is a full block, a few gradients are not finite.
    """
    cases = []
    for n in sizes:
        before = sample.arguments(spec, n, seed=n, spoiled=spoil and n > spec.block_size)
        cases += [(before, norms, jobs) for norms, jobs in steps(spec, before)]
    results = iter(run([job for _, _, jobs in cases for job in jobs]))
    found = []
    for before, norms, jobs in cases:
        if wrong := fault(spec, before, [next(results) for _ in jobs], norms):
            found.append(f"{[job.entry for job in jobs]}: {wrong}")
    return found
