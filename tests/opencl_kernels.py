"""The kernels of a spec as OpenCL C, the launches that make a step of them, and what is wrong with
their results: for tests that run GPU kernels without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import opencl_runner
import tvm
from opencl_runner import Array, Job

from tvm_qopt import reference, sample
from tvm_qopt.compiler.build import entry_points, lower, tvm_target
from tvm_qopt.compiler.gate import mask_if_gated
from tvm_qopt.compiler.launches import launches_of, with_offsets
from tvm_qopt.compiler.opencl import opencl_source, register_barrier_fence
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.compiler.schedule import ANY, MAIN, TAIL
from tvm_qopt.manifest import OPENCL_SOURCE, Launch
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.spec import KernelSpec, norms_entry
from tvm_qopt.targets import get_target

Decisions = tuple[tuple[str, int], ...]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Kernels:
    """Entry points of a spec, as an artifact has them."""

    spec: KernelSpec
    source: str
    launches: Mapping[str, Launch]


@cache
def build(name: str, decisions: Decisions = (), entries: tuple[str, ...] = ()) -> Kernels:
    """The kernels of a spec, or only those of some entry points."""
    spec, preset = KernelSpec.parse(name), get_target("opencl")
    entries = entries or entry_points(spec, preset.kind)
    functions = {entry: lower(spec, preset, entry, dict(decisions)).final for entry in entries}
    register_barrier_fence()
    executable = compile_module(tvm.IRModule(functions), tvm_target(preset))
    source = opencl_source(executable)
    found = launches_of(functions, {OPENCL_SOURCE: source})
    return Kernels(spec, with_offsets(mask_if_gated(source)), found)


def launches(
    kernels: Kernels, arrays: Arrays, main: str = MAIN, norms: int | None = None
) -> list[Job]:
    """Full blocks by `main`, the rest by the tail, as a Plan launches them."""
    full, rest = divmod(arrays["param"].size, kernels.spec.block_size)
    parts = []
    if full:
        parts.append((main, Part(0, full, kernels.spec.block_size)))
    if rest:
        parts.append((TAIL, Part(full, 1, rest)))
    return [
        _job(kernels, entry if norms is None else norms_entry(norms, entry), part, arrays)
        for entry, part in parts
    ]


def _job(kernels: Kernels, entry: str, part: Part, arrays: Arrays) -> Job:
    views = {}
    for t in kernels.spec.tensors:
        start = t.start(part.first, kernels.spec.block_size)
        views[t.name] = arrays[t.name][start : start + math.prod(t.sizes(part.blocks, part.size))]
    return Job(entry, part, views)


def steps(kernels: Kernels, arrays: Arrays) -> Iterator[tuple[int | None, list[Job]]]:
    """What a step of a spec may launch: the update by `main` and by `main_any`, each norm pass."""
    aligned = (MAIN, ANY) if arrays["param"].size >= kernels.spec.block_size else (MAIN,)
    for main in aligned:
        yield None, launches(kernels, arrays, main)
    for number in range(len(kernels.spec.rule_.norms)):
        yield number, launches(kernels, arrays, MAIN, number)


def fault(
    spec: KernelSpec, before: Arrays, parts: Sequence[Arrays], norms: int | None = None
) -> str | None:
    """How the results of launches differ from the reference, in words; None where they do not."""
    want = reference.step(spec, before, norms)
    got = {name: np.concatenate([part[name] for part in parts]) for name in want}
    return reference.disagreement(spec, before, want, got)


def run_steps(
    kernels: Kernels, sizes: Sequence[int], *, oclgrind: bool = False
) -> tuple[list[str], str]:
    """Run every step of a spec on tensors of some sizes: what is wrong, and the reports."""
    cases = []
    for n in sizes:
        before = sample.arguments(kernels.spec, n, seed=n, spoiled=n > kernels.spec.block_size)
        cases += [(before, norms, job) for norms, job in steps(kernels, before)]
    flat = [each for _, _, job in cases for each in job]
    outcome = opencl_runner.run(kernels.source, kernels.launches, flat, oclgrind=oclgrind)
    results = iter(outcome.arrays)
    faults = []
    for before, norms, job in cases:
        parts = [next(results) for _ in job]
        if wrong := fault(kernels.spec, before, parts, norms):
            faults.append(f"{[each.entry for each in job]}: {wrong}")
    return faults, outcome.reports
