"""Searches the choices of a schedule for the fastest kernel of a spec on a kind of CPU.

The spaces are small, so points are tried once each, in an order that a seed decides, until the
budget or the space is at its end.  The fastest few then meet the default in one interleaved run,
and only a kernel that does what the reference does may win.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from tvm import s_tir

from tvm_qopt.compiler.build import SERIAL_BELOW, lower, select
from tvm_qopt.compiler.compare import Comparison, compare, kernel_module
from tvm_qopt.compiler.crew import Outcome, last_line
from tvm_qopt.compiler.measure import Laboratory, Remote, Step
from tvm_qopt.compiler.record import record_preset, workload_hash
from tvm_qopt.compiler.schedule import MAIN, SERIAL
from tvm_qopt.compiler.trials import Decisions, Space, Trial, TrialLog
from tvm_qopt.compiler.verify import timed_arguments
from tvm_qopt.errors import BuildError, StaleRecord, UnsupportedSpec
from tvm_qopt.records import TuningRecord, log_path, save
from tvm_qopt.spec import KernelSpec, norms_entry
from tvm_qopt.targets import NATIVE, TargetPreset, cpu_model
from tvm_qopt.version import TVM_VERSION

TRIALS = "trials"  # the folder of logs, beside those of presets
BATCH = 16  # kernels that are built before they are timed
FINALISTS = 3


@dataclass(frozen=True)
class Options:
    """How to search.

    elements: of the one tensor (made whole blocks).  trials, seconds: the budget, whichever is used
    up first; None for no limit.  threads: of a step, here.  limit: seconds that a trial may take.
    """

    elements: int = 1 << 24
    trials: int | None = 64
    seconds: float | None = None
    seed: int = 0
    resume: bool = False
    threads: int = 1
    limit: float = 60.0
    remote: Remote | None = None


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

    Raises UnsupportedSpec for a target that is not a CPU, RecordInvalid for a log of another search
    and BuildError where no kernel runs or the default one is wrong.
    """
    if not preset.on_cpu:
        raise UnsupportedSpec(f"target: {preset.name} cannot be tuned yet; CPUs can")
    blocks = -(-options.elements // spec.block_size)
    laboratory = Laboratory(
        preset,
        Step(_timed_entries(spec, blocks * spec.block_size), timed_arguments(spec, blocks)),
        threads=options.threads,
        seconds=options.limit,
        remote=options.remote,
    )
    with closing(laboratory):
        search = _Search(spec, preset, folder, options, laboratory, report)
        return search.finish(exhausted=search.run())


def _timed_entries(spec: KernelSpec, elements: int) -> tuple[str, ...]:
    """The entry points that a step of a tensor of this size calls."""
    part = SERIAL if elements < SERIAL_BELOW else MAIN
    return (*(norms_entry(number, part) for number in range(len(spec.rule_.norms))), part)


class _Search:
    """One search: of a spec, on what a laboratory runs kernels on."""

    def __init__(
        self,
        spec: KernelSpec,
        preset: TargetPreset,
        folder: Path,
        options: Options,
        laboratory: Laboratory,
        report: Report,
    ) -> None:
        self.spec, self.preset, self.folder, self.options = spec, preset, folder, options
        self.laboratory, self.report = laboratory, report
        self.elements = -(-options.elements // spec.block_size) * spec.block_size
        self.space = Space.of(lower(spec, preset, MAIN).choices)
        self.device, self.threads = self._machine()
        self.name, self.workload = record_preset(preset), workload_hash(spec)
        header = {
            "spec": spec.name,
            "preset": self.name,
            "workload": self.workload,
            "elements": self.elements,
            "space": {name: list(values) for name, values in self.space.candidates.items()},
        }
        path = log_path(folder / TRIALS, self.name, spec.name)
        self.log = TrialLog(path, header, resume=options.resume)
        self.began, self.tried_before = time.monotonic(), len(self.log.trials)

    def _machine(self) -> tuple[str, int]:
        """The device, and the threads of a step on it."""
        if self.options.remote is None:
            return cpu_model(), self.options.threads
        cpu, threads = self.laboratory.describe()
        here = record_preset(self.preset).partition("-")[2]
        if self.preset.name == NATIVE and cpu != here:
            raise UnsupportedSpec(
                f"target: {NATIVE} is this machine ({here}) and the server is a {cpu}; give a "
                "level, such as llvm-x86-64-v3"
            )
        return f"{cpu} (RPC)", threads

    # --- the search ---

    def run(self) -> bool:
        """Try points until the budget is used up; whether every point was tried."""
        tried = {_key(trial.decisions) for trial in self.log.trials}
        kernels = {trial.kernel for trial in self.log.trials}
        points = (p for p in self.space.in_order(self.options.seed) if _key(p) not in tried)
        self._say("searching")
        while (room := self._room()) > 0:
            batch = list(self._next(points, kernels, min(room, BATCH)))
            if not batch:
                return True
            self._try(batch)
        return next(points, None) is None

    def _room(self) -> int:
        """How many trials the budget allows yet: one, the default, at least."""
        trials, done = self.options.trials, len(self.log.trials)
        room = BATCH if trials is None else trials - done
        return max(room if self._seconds_left() > 0 else 0, 0 if done else 1)

    def _seconds_left(self) -> float:
        allowed = self.options.seconds
        return math.inf if allowed is None else allowed - (time.monotonic() - self.began)

    def _next(
        self, points: Iterator[Decisions], kernels: set[str], count: int
    ) -> Iterator[tuple[Trial, tvm.IRModule]]:
        """Kernels that were not tried yet, whatever decisions they come from.  What cannot be
        scheduled is a failed trial."""
        for point in points:
            try:
                module = kernel_module(self.spec, self.preset, point, self.laboratory.step.entries)
            except (tvm.error.InternalError, s_tir.ScheduleError, AssertionError) as error:
                self._done(Trial(point, "", error=f"cannot be scheduled: {last_line(error)}"))
                continue
            kernel = _hash(module)
            if kernel in kernels:
                continue
            kernels.add(kernel)
            yield Trial(point, kernel), module
            count -= 1
            if not count:
                return

    def _try(self, batch: Sequence[tuple[Trial, tvm.IRModule]]) -> None:
        """Build all, then time as many at once as there are servers; each is on disk when it is
        done."""
        trials = [trial for trial, _ in batch]
        built = self.laboratory.build([module for _, module in batch])
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
            expected = max(min(expected, self.space.size), done)
            if new := done - self.tried_before:
                each = (time.monotonic() - self.began) / new
                left = min(left, each * (expected - done))
        self.report(
            Progress(
                self.spec,
                self.log.trials,
                self.elements,
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
        best = compare(self.spec, self.preset, self.laboratory, points)
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
            raise BuildError(f"{self.spec.name}: none of the kernels ran; the default: {first}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StaleRecord)  # what is about to be replaced
            today = self.space.default | dict(select(self.spec, self.preset).decisions)
        points = [self.space.default, *(trial.decisions for trial in best), today]
        return list({_key(point): point for point in points}.values())

    def _record(self, best: Comparison) -> TuningRecord:
        return TuningRecord(
            spec=self.spec.name,
            preset=self.name,
            device=self.device,
            tvm=TVM_VERSION,
            workload=self.workload,
            decisions=best.decisions,
            elements=self.elements,
            threads=self.threads,
            seconds=best.seconds,
            default_seconds=best.default_seconds,
            trials=len(self.log.trials),
            seed=self.options.seed,
            date=time.strftime("%Y-%m-%d"),
        )


def _key(decisions: Decisions) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(decisions.items()))


def _hash(module: tvm.IRModule) -> str:
    return f"{tvm_ffi.structural_hash(module):016x}"


def _ended(trial: Trial, outcome: Outcome) -> Trial:
    """The trial with what came of it."""
    if outcome.error:
        return Trial(trial.decisions, trial.kernel, error=outcome.error)
    return Trial(trial.decisions, trial.kernel, seconds=outcome.value)
