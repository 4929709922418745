"""Interleaved rounds: every contender once a round, so that a busy moment falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_qopt.errors import QoptError

WARM_UP = 2  # rounds that are not counted: page tables, pools, clocks
SETTLE = 0.02  # seconds after a peer's turn: OpenMP's threads spin for up to 8 ms before they sleep

OURS, PEER, ROOFLINE = "ours", "peer", "roofline"
PARAMETER, STEP = "parameter", "step"


class LeftOut(QoptError, RuntimeError):
    """A contender that cannot be used; the message says why."""


@dataclass(frozen=True)
class Contender:
    """run: one turn, whose seconds it returns.  size: what they are divided by.

    bytes: that a step must move for each parameter.  unit: what the time is given for.
    """

    name: str
    kind: str
    bytes: float
    size: int
    run: Callable[[], float]
    unit: str = PARAMETER


@dataclass(frozen=True)
class Row:
    """ns: median nanoseconds a unit; low, high: of the middle half of the rounds."""

    name: str
    kind: str
    unit: str
    ns: float
    low: float
    high: float
    bytes: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.ns


@dataclass(frozen=True)
class Skipped:
    """A contender without a time."""

    name: str
    reason: str


def peak(rows: Sequence[Row]) -> float:
    """The most gigabytes a second that an in-place addition moved."""
    return max(row.gigabytes_per_second for row in rows if row.kind == ROOFLINE)


def timed(step: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """What runs a step and returns its seconds, of several calls in a row their mean."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - start) / calls

    return run


def measure(contenders: Sequence[Contender], rounds: int) -> tuple[list[Row], list[Skipped]]:
    """The rows in the order of the contenders, and those that failed on the way."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    failed: dict[str, str] = {}
    for number in range(WARM_UP + rounds):
        for each in contenders:
            if each.name in failed:
                continue
            try:
                seconds = each.run()
            except LeftOut as error:
                failed[each.name] = str(error)
                continue
            if each.kind == PEER:
                time.sleep(SETTLE)
            if number >= WARM_UP:
                times[each.name].append(seconds / each.size * 1e9)
    rows = [_row(each, times[each.name]) for each in contenders if each.name not in failed]
    return rows, [Skipped(name, reason) for name, reason in failed.items()]


def _row(contender: Contender, times: list[float]) -> Row:
    low, high = middle_half(times)
    name, kind, unit = contender.name, contender.kind, contender.unit
    return Row(name, kind, unit, statistics.median(times), low, high, contender.bytes)


def middle_half(times: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return low, high
