"""Searches the choices of a schedule for the fastest kernel of a spec on a kind of machine.

The spaces are small, so points are tried once each, in an order that a seed decides, until the
budget or the space is at its end.  The fastest few then meet the default in one interleaved run,
and only a kernel that does what the reference does may win.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tvm_qopt.compiler.candidates import Candidates, Subject, key, todays
from tvm_qopt.compiler.compare import Comparison, Laboratory, compare
from tvm_qopt.compiler.crew import Outcome
from tvm_qopt.compiler.elsewhere import Listed, MeasuredElsewhere
from tvm_qopt.compiler.measure import Here
from tvm_qopt.compiler.measure import Laboratory as OwnLaboratory
from tvm_qopt.compiler.trials import Decisions, Trial, TrialLog
from tvm_qopt.errors import BuildError, RecordInvalid, UnsupportedSpec
from tvm_qopt.measure import Device, Machine, check_code
from tvm_qopt.packed import Search
from tvm_qopt.records import TuningRecord, log_path, save
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, TargetPreset
from tvm_qopt.version import TVM_VERSION

TRIALS = "trials"  # the folder of logs, beside those of presets
BATCH = 16  # kernels that are built before they are timed
FINALISTS = 3


@dataclass(frozen=True)
class Options:
    """How to search.

    elements: of the one tensor (made whole blocks).  trials, seconds: the budget, whichever is used
    up first; None for no limit.  threads: of a step, here.  limit: seconds that a trial may take.
    machine: where kernels run.  modules: what defines rules and formats outside this package.
    """

    elements: int = 1 << 24
    trials: int | None = 64
    seconds: float | None = None
    seed: int = 0
    resume: bool = False
    threads: int = 1
    limit: float = 60.0
    machine: Machine = field(default_factory=Here)
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """How far a search is.

    expected: trials that it will have at its end, None where time decides that.  left: seconds that
    it will take yet, None where that is not known.
    """

    spec: KernelSpec
    trials: Sequence[Trial]
    elements: int
    expected: int | None
    left: float | None
    doing: str


@dataclass(frozen=True)
class Found:
    """The end of a search.

    speedup: quartiles of the default's time over that of the record, by round.  rejected: what was
    fast and wrong, and how.  exhausted: every point of the space was tried.
    """

    record: TuningRecord
    path: Path
    speedup: tuple[float, float, float]
    trials: Sequence[Trial]
    rejected: Sequence[str]
    exhausted: bool


Report = Callable[[Progress], None]


def tune(
    spec: KernelSpec, preset: TargetPreset, folder: Path, options: Options, report: Report
) -> Found:
    """Search, and write a record to `folder`; the log of trials goes to its folder `trials`.

    Raises UnsupportedSpec where the machine does not run the target, RecordInvalid for a log of
    another search and BuildError where no kernel runs or the default one is wrong.
    """
    subject = Subject.of(spec, preset, options.elements)
    laboratory = OwnLaboratory(
        spec,
        preset,
        subject.step,
        options.machine,
        threads=options.threads,
        seconds=options.limit,
        modules=options.modules,
    )
    with closing(laboratory):
        search = _Search(subject, folder, options, laboratory, report)
        candidates = Candidates(subject, options.seed, search.log.trials)
        return search.finish(exhausted=search.run(candidates))


def take_measured(
    spec: KernelSpec,
    preset: TargetPreset,
    folder: Path,
    packed: Search,
    laboratory: MeasuredElsewhere,
    report: Report,
) -> Found:
    """`tune`, of what was packed and measured elsewhere.

    Raises RecordInvalid where it was packed for another definition, schedule or target.
    """
    subject = Subject.of(spec, preset, int(packed.header["elements"]))
    if wrong := [
        name for name in subject.header if packed.header.get(name) != subject.header[name]
    ]:
        raise RecordInvalid(
            f"--measured: {spec.name} was packed for another {' and '.join(wrong)} than "
            f"{preset.name} has here now; pack it again"
        )
    options = Options(subject.elements, trials=len(packed.candidates), seed=packed.seed)
    search = _Search(subject, folder, options, laboratory, report)
    return search.finish(exhausted=search.run(Listed(packed)))


class _Search:
    """One search, on what a laboratory runs kernels on."""

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        options: Options,
        laboratory: Laboratory,
        report: Report,
    ) -> None:
        self.subject, self.folder, self.options = subject, folder, options
        self.laboratory, self.report = laboratory, report
        self.device = self._device()
        path = log_path(folder / TRIALS, subject.name, subject.spec.name)
        self.log = TrialLog(path, subject.header, resume=options.resume)
        self.began, self.tried_before = time.monotonic(), len(self.log.trials)

    def _device(self) -> Device:
        preset, found = self.subject.preset, self.laboratory.describe()
        here = self.subject.name.partition("-")[2]
        if preset.name == NATIVE and found.code != here:
            raise UnsupportedSpec(
                f"target: {NATIVE} is this machine ({here}) and the server is a {found.code}; give "
                "a level, such as llvm-x86-64-v3"
            )
        check_code(preset, found)
        return found

    # --- the search ---

    def run(self, candidates: Candidates | Listed) -> bool:
        """Try kernels until the budget is used up; whether every one was tried."""
        self._say("searching")
        while (room := self._room()) > 0:
            batch = candidates.take(min(room, BATCH))
            if not batch:
                break
            self._try(batch)
        return candidates.at_end()

    def _room(self) -> int:
        """How many trials the budget allows yet: one, the default, at least."""
        trials, done = self.options.trials, len(self.log.trials)
        room = BATCH if trials is None else trials - done
        return max(room if self._seconds_left() > 0 else 0, 0 if done else 1)

    def _seconds_left(self) -> float:
        allowed = self.options.seconds
        return math.inf if allowed is None else allowed - (time.monotonic() - self.began)

    def _try(self, batch: Sequence[Trial]) -> None:
        """Build all, then time as many at once as there are servers; each is on disk when it is
        done."""
        for trial in batch:
            if trial.error:
                self._done(trial)
        trials = [trial for trial in batch if not trial.error]
        points = [trial.decisions for trial in trials]
        built = self.laboratory.build(points, self.subject.step.entries)
        for trial, outcome in zip(trials, built, strict=True):
            if outcome.error:
                self._done(_ended(trial, outcome))
        runnable = [(t, o.value) for t, o in zip(trials, built, strict=True) if not o.error]
        share = self.laboratory.servers
        for start in range(0, len(runnable), share):
            if start and self._seconds_left() <= 0:
                return
            part = runnable[start : start + share]
            timings = self.laboratory.time([path for _, path in part])
            for (trial, _), timing in zip(part, timings, strict=True):
                self._done(_ended(trial, timing))

    def _done(self, trial: Trial) -> None:
        self.log.append(trial)
        self._say("searching")

    def _say(self, doing: str) -> None:
        left, expected = self._seconds_left(), self.options.trials
        done = len(self.log.trials)
        if expected is not None:
            expected = max(min(expected, self.subject.space.size), done)
            if new := done - self.tried_before:
                each = (time.monotonic() - self.began) / new
                left = min(left, each * (expected - done))
        self.report(
            Progress(
                self.subject.spec,
                self.log.trials,
                self.subject.elements,
                expected,
                None if math.isinf(left) else left,
                doing,
            )
        )

    # --- the end ---

    def finish(self, *, exhausted: bool) -> Found:
        """Compare the fastest with the default and write the record of the best."""
        points = self._contenders()
        self._say("comparing")
        best = compare(self.subject.spec, self.subject.preset, self.laboratory, points)
        record = self._record(best)
        return Found(
            record,
            save(record, self.folder),
            best.speedup,
            self.log.trials,
            best.rejected,
            exhausted,
        )

    def _contenders(self) -> list[Decisions]:
        """The default, the fastest, and what a build takes today; each once."""
        best = self.log.best(FINALISTS)
        if not best:
            first = self.log.trials[0].error
            raise BuildError(
                f"{self.subject.spec.name}: none of the kernels ran; the default: {first}"
            )
        default = self.subject.space.default
        points = [default, *(trial.decisions for trial in best), todays(self.subject)]
        return list({key(point): point for point in points}.values())

    def _record(self, best: Comparison) -> TuningRecord:
        return TuningRecord(
            spec=self.subject.spec.name,
            preset=self.subject.name,
            device=self.device.name,
            tvm=TVM_VERSION,
            workload=self.subject.workload,
            decisions=best.decisions,
            elements=self.subject.elements,
            threads=self.device.threads,
            seconds=best.seconds,
            default_seconds=best.default_seconds,
            trials=len(self.log.trials),
            seed=self.options.seed,
            date=time.strftime("%Y-%m-%d"),
        )


def _ended(trial: Trial, outcome: Outcome) -> Trial:
    """The trial with what came of it."""
    if outcome.error:
        return Trial(trial.decisions, trial.kernel, error=outcome.error)
    return Trial(trial.decisions, trial.kernel, seconds=tuple(outcome.value))
