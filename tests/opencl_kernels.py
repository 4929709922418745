"""The kernels of a spec as OpenCL C, and its steps run with them: for tests without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import opencl_runner
import tvm
from gpu_jobs import faults
from opencl_runner import Array, Job

from tvm_qopt.compiler.build import entry_points, lower, tvm_target
from tvm_qopt.compiler.gate import mask_if_gated
from tvm_qopt.compiler.launches import launches_of, with_offsets
from tvm_qopt.compiler.opencl import opencl_source, register_barrier_fence
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.manifest import OPENCL_SOURCE, Launch
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

Decisions = tuple[tuple[str, int], ...]


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


def run_steps(
    kernels: Kernels, sizes: Sequence[int], *, oclgrind: bool = False
) -> tuple[list[str], str]:
    """Run every step of a spec on tensors of some sizes: what is wrong, and the reports."""
    reports = []

    def run(jobs: Sequence[Job]) -> list[dict[str, Array]]:
        outcome = opencl_runner.run(kernels.source, kernels.launches, jobs, oclgrind=oclgrind)
        reports.append(outcome.reports)
        return outcome.arrays

    return faults(kernels.spec, sizes, run), "".join(reports)
