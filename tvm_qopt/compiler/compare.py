"""The end of a search: a few kernels are checked, and timed beside the default in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm

from tvm_qopt.compiler.build import entry_points, lower
from tvm_qopt.compiler.crew import Outcome
from tvm_qopt.compiler.measure import Laboratory
from tvm_qopt.compiler.trials import Decisions
from tvm_qopt.compiler.verify import fault
from tvm_qopt.errors import BuildError
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import TargetPreset

ROUNDS = 15


@dataclass(frozen=True)
class Comparison:
    """The fastest of those that are right.

    seconds: medians of a step.  speedup: quartiles of the default's time over its own, by round.
    rejected: what is wrong, and how.
    """

    decisions: Decisions
    seconds: float
    default_seconds: float
    speedup: tuple[float, float, float]
    rejected: Sequence[str]


def kernel_module(
    spec: KernelSpec, preset: TargetPreset, decisions: Mapping[str, int], entries: Sequence[str]
) -> tvm.IRModule:
    """The scheduled functions of some entry points."""
    return tvm.IRModule({entry: lower(spec, preset, entry, decisions).final for entry in entries})


def compare(
    spec: KernelSpec, preset: TargetPreset, laboratory: Laboratory, points: Sequence[Decisions]
) -> Comparison:
    """The best of some points, of which the first is the default.

    Raises BuildError where the default does not do what the reference does.
    """
    entries = entry_points(spec, preset.kind)
    built = laboratory.build([kernel_module(spec, preset, point, entries) for point in points])
    faults = [_fault(spec, laboratory, outcome) for outcome in built]
    if faults[0]:
        raise BuildError(f"{spec.name}: its default kernel is wrong: {faults[0]}")
    right = [i for i, wrong in enumerate(faults) if wrong is None]
    times = laboratory.interleave([built[i].value for i in right], ROUNDS)
    medians = np.median(times, axis=0)
    best = int(np.argmin(medians))
    low, middle, high = np.quantile(times[:, 0] / times[:, best], (0.25, 0.5, 0.75))
    return Comparison(
        points[right[best]],
        float(medians[best]),
        float(medians[0]),
        (float(low), float(middle), float(high)),
        [f"{points[i]}: {wrong}" for i, wrong in enumerate(faults) if wrong],
    )


def _fault(spec: KernelSpec, laboratory: Laboratory, built: Outcome) -> str | None:
    """What is wrong with a kernel; None if nothing is."""
    if built.error:
        return built.error
    try:
        return fault(spec, lambda calls: laboratory.call(built.value, calls))
    except BuildError as error:
        return str(error)
