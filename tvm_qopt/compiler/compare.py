"""The end of a search: a few kernels are checked, and timed beside the default in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tvm_qopt.compiler.build import PATTERN, entry_points
from tvm_qopt.compiler.crew import Outcome
from tvm_qopt.compiler.schedule import get_schedule
from tvm_qopt.compiler.trials import Decisions
from tvm_qopt.errors import BuildError
from tvm_qopt.measure import ROUNDS, Device
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import TargetPreset


class Laboratory(Protocol):
    """What builds and runs kernels: `measure.Laboratory`, or what was measured elsewhere."""

    servers: int

    def build(self, points: Sequence[Decisions], entries: Sequence[str]) -> list[Outcome]: ...

    def time(self, paths: Sequence[str]) -> list[Outcome]: ...

    def fault(self, spec: KernelSpec, parts: Sequence[str], path: str) -> str | None: ...

    def interleave(self, paths: Sequence[str], rounds: int) -> npt.NDArray[np.float64]: ...

    def describe(self) -> Device: ...


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


def compare(
    spec: KernelSpec, preset: TargetPreset, laboratory: Laboratory, points: Sequence[Decisions]
) -> Comparison:
    """The best of some points, of which the first is the default.

    Raises BuildError where the default does not do what the reference does.
    """
    parts = get_schedule(preset.kind, PATTERN).entries
    built = laboratory.build(points, entry_points(spec, preset.kind))
    faults = [each.error or laboratory.fault(spec, parts, each.value) for each in built]
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
