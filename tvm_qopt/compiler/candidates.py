"""What is tuned, and the kernels of its space, each once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir

from tvm_qopt.compiler.build import SERIAL_BELOW, lower, select
from tvm_qopt.compiler.crew import last_line
from tvm_qopt.compiler.measure import kernel_module
from tvm_qopt.compiler.record import record_preset, workload_hash
from tvm_qopt.compiler.schedule import MAIN, SERIAL
from tvm_qopt.compiler.trials import Decisions, Space, Trial
from tvm_qopt.errors import StaleRecord
from tvm_qopt.measure import Step
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import TargetPreset
from tvm_qopt.verify import timed_step


@dataclass(frozen=True)
class Subject:
    """A spec on a kind of machine, and the tensor that a step is timed on.

    elements: whole blocks.  name: under which records lie.
    """

    spec: KernelSpec
    preset: TargetPreset
    elements: int
    space: Space
    name: str
    workload: str

    @classmethod
    def of(cls, spec: KernelSpec, preset: TargetPreset, elements: int) -> Subject:
        whole = -(-elements // spec.block_size) * spec.block_size
        space = Space.of(lower(spec, preset, MAIN).choices)
        return cls(
            spec, preset, whole, space, record_preset(preset), workload_hash(spec, preset.kind)
        )

    @property
    def header(self) -> dict[str, Any]:
        """What a log of trials, or a pack, is of."""
        return {
            "spec": self.spec.name,
            "preset": self.name,
            "workload": self.workload,
            "elements": self.elements,
            "space": {name: list(values) for name, values in self.space.candidates.items()},
        }

    @property
    def step(self) -> Step:
        """The entry points that a step of the tensor calls, with arguments."""
        alone = self.preset.on_cpu and self.elements < SERIAL_BELOW
        blocks = self.elements // self.spec.block_size
        return timed_step(self.spec, blocks, SERIAL if alone else MAIN)


class Candidates:
    """The kernels of a space that were not tried yet, in the order of a seed."""

    def __init__(self, subject: Subject, seed: int, tried: Iterable[Trial]) -> None:
        self._subject, self._entries = subject, subject.step.entries
        done = list(tried)
        points = {key(trial.decisions) for trial in done}
        self._kernels = {trial.kernel for trial in done}
        self._points = (p for p in subject.space.in_order(seed) if key(p) not in points)

    def take(self, count: int) -> list[Trial]:
        """The next kernels, whatever decisions they come from, as trials without a time.  What
        cannot be scheduled is a failed trial, and does not count."""
        taken: list[Trial] = []
        while count and (point := next(self._points, None)):
            trial = self.of(point)
            if trial.error is None:
                if trial.kernel in self._kernels:
                    continue
                self._kernels.add(trial.kernel)
                count -= 1
            taken.append(trial)
        return taken

    def of(self, point: Decisions) -> Trial:
        """The kernel of a point, whether it was tried or not."""
        spec, preset = self._subject.spec, self._subject.preset
        try:
            return Trial(point, _hash(kernel_module(spec, preset, point, self._entries)))
        except (tvm.error.InternalError, s_tir.ScheduleError, AssertionError) as error:
            return Trial(point, "", error=f"cannot be scheduled: {last_line(error)}")

    def at_end(self) -> bool:
        """Whether there is no point left, of those one is passed over."""
        return next(self._points, None) is None


def todays(subject: Subject) -> Decisions:
    """What a build takes today."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleRecord)  # what is about to be replaced
        taken = select(subject.spec, subject.preset).decisions
    return subject.space.default | dict(taken)


def key(decisions: Decisions) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(decisions.items()))


def _hash(module: tvm.IRModule) -> str:
    return f"{tvm_ffi.structural_hash(module):016x}"
