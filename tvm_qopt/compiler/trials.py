"""What a search may try, in which order, and the log of what it tried.

The log is a file of one JSON object a line: a header, then a trial a line, each on disk before the
next begins, so that Ctrl-C or a crash loses the trial that was running and no other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_qopt.compiler.schedule import Choice
from tvm_qopt.errors import RecordInvalid, StoreError

Decisions = dict[str, int]


@dataclass(frozen=True)
class Space:
    """The product of what a schedule chooses from, by name, and its default."""

    candidates: Mapping[str, tuple[int, ...]]
    default: Decisions

    @classmethod
    def of(cls, choices: Mapping[str, Choice]) -> Space:
        """From the choices that the schedule makes by default."""
        candidates = {name: choice.candidates for name, choice in choices.items()}
        return cls(candidates, {name: choice.value for name, choice in choices.items()})

    @property
    def size(self) -> int:
        return math.prod(map(len, self.candidates.values()))

    def in_order(self, seed: int) -> Iterator[Decisions]:
        """Every point once: the default, then the others in an order that the seed decides."""
        yield self.default
        for number in np.random.default_rng(seed).permutation(self.size):
            point = self._point(int(number))
            if point != self.default:
                yield point

    def _point(self, number: int) -> Decisions:
        point = {}
        for name, values in self.candidates.items():
            number, index = divmod(number, len(values))
            point[name] = values[index]
        return point


@dataclass(frozen=True)
class Trial:
    """A kernel that was tried.

    kernel: a hash of its scheduled functions.  seconds: of each timed run of a step; empty where it
    failed, which `error` tells in a line.
    """

    decisions: Decisions
    kernel: str
    seconds: tuple[float, ...] = ()
    error: str | None = None

    @property
    def median(self) -> float:
        """Seconds of a step; infinite where it failed."""
        return statistics.median(self.seconds) if self.seconds else math.inf


class TrialLog:
    """The trials of a search, in memory and on disk.

    header: what the search is of; a log with another one is not gone on with.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.trials: list[Trial] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume and path.is_file():
                self.trials = _read(path, header)
            elif path.is_file():
                path.replace(path.with_suffix(".old"))
            lines = [json.dumps(header), *(_line(trial) for trial in self.trials)]
            written = path.with_suffix(".new")  # without a line that a crash cut short
            written.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            written.replace(path)
        except OSError as error:
            raise StoreError(f"{path}: the log of trials cannot be written: {error}") from error

    def append(self, trial: Trial) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{_line(trial)}\n")
        self.trials.append(trial)

    def best(self, count: int) -> list[Trial]:
        """The fastest, at most `count` of them."""
        timed = [trial for trial in self.trials if trial.seconds]
        return sorted(timed, key=lambda trial: trial.median)[:count]


def _line(trial: Trial) -> str:
    return json.dumps(dataclasses.asdict(trial))


def _read(path: Path, header: Mapping[str, Any]) -> list[Trial]:
    """The trials of a log with this header; a last line that a crash cut short does not count."""
    first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
    before = _parsed(first)
    if before != header:
        names = [name for name in header if not before or before.get(name) != header[name]]
        raise RecordInvalid(
            f"{path}: a search with another {' and '.join(names)}; without --resume a new one is "
            "begun"
        )
    return [_trial(data) for data in map(_parsed, rest) if data]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _trial(data: dict[str, Any]) -> Trial:
    return Trial(**{**data, "seconds": tuple(data["seconds"])})
