"""A search whose kernels run where the compiler is not: packed here, taken over when measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tvm_qopt.compiler.candidates import Candidates, Subject, key, todays
from tvm_qopt.compiler.crew import Outcome
from tvm_qopt.compiler.measure import Builders
from tvm_qopt.compiler.trials import Decisions, Trial
from tvm_qopt.manifest import MANIFEST, sha256_of
from tvm_qopt.measure import Device
from tvm_qopt.packed import Candidate, Result, Search
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import TargetPreset

ARTIFACTS = "artifacts"


def pack_search(
    spec: KernelSpec, preset: TargetPreset, folder: Path, *, elements: int, trials: int, seed: int
) -> Search:
    """Build the kernels of a spec into a pack's folder: `trials` at most, and today's."""
    subject = Subject.of(spec, preset, elements)
    candidates = Candidates(subject, seed, ())
    taken = candidates.take(trials)
    exhausted, today = candidates.at_end(), candidates.of(todays(subject))
    if today.kernel not in {trial.kernel for trial in taken}:
        taken.append(today)
    at = Path(ARTIFACTS) / spec.name
    (folder / at).mkdir(parents=True)
    buildable = [trial for trial in taken if trial.error is None]
    with closing(Builders(spec, preset, ())) as builders:
        paths = [folder / at / trial.kernel for trial in buildable]
        points = [trial.decisions for trial in buildable]
        built = builders.build(points, subject.step.entries, paths)
    outcomes = {t.kernel: outcome for t, outcome in zip(buildable, built, strict=True)}
    packed = tuple(_candidate(folder, at, trial, outcomes.get(trial.kernel)) for trial in taken)
    return Search(subject.header, seed, exhausted, packed)


def _candidate(folder: Path, at: Path, trial: Trial, built: Outcome | None) -> Candidate:
    error = trial.error if built is None else built.error
    if error:
        return Candidate(trial.decisions, trial.kernel, error=error)
    artifact = at / trial.kernel
    return Candidate(
        trial.decisions, trial.kernel, artifact.as_posix(), sha256_of(folder / artifact / MANIFEST)
    )


class Listed:
    """The kernels of a pack, in place of `Candidates`."""

    def __init__(self, packed: Search) -> None:
        self._left, self._exhausted = list(packed.candidates), packed.exhausted

    def take(self, count: int) -> list[Trial]:
        taken, self._left = self._left[:count], self._left[count:]
        return [Trial(each.decisions, each.kernel) for each in taken]

    def at_end(self) -> bool:
        return self._exhausted and not self._left


class MeasuredElsewhere:
    """A laboratory whose answers were measured before; a path is the number of a candidate."""

    servers = 1

    def __init__(self, packed: Search, results: Sequence[Result], device: Device) -> None:
        self._results, self._device = results, device
        self._numbers = {key(each.decisions): i for i, each in enumerate(packed.candidates)}

    def build(self, points: Sequence[Decisions], entries: Sequence[str]) -> list[Outcome]:
        return [self._built(self._numbers.get(key(point))) for point in points]

    def _built(self, number: int | None) -> Outcome:
        if number is None:
            return Outcome(error="not among the kernels that were packed")
        error = self._results[number].error
        return Outcome(error=error) if error else Outcome(str(number))

    def time(self, paths: Sequence[str]) -> list[Outcome]:
        return [Outcome(self._results[int(path)].seconds) for path in paths]

    def fault(self, spec: KernelSpec, parts: Sequence[str], path: str) -> str | None:
        """What is wrong was left out where it was measured, with the reason as its error."""
        return None

    def interleave(self, paths: Sequence[str], rounds: int) -> npt.NDArray[np.float64]:
        """All rounds that there were."""
        return np.array([self._results[int(path)].seconds for path in paths]).T

    def describe(self) -> Device:
        return self._device
