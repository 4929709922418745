"""Interleaved rounds: every contender once a round, so that a busy moment falls on all alike."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_qopt.bench.contenders import Contender

WARM_UP = 2  # rounds that are not counted: page tables, pools, clocks


@dataclass(frozen=True)
class Row:
    """ns: median nanoseconds a parameter; low, high: of the middle half of the rounds."""

    name: str
    ns: float
    low: float
    high: float
    bytes: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.ns


def measure(contenders: Sequence[Contender], size: int, rounds: int) -> list[Row]:
    """The rows, in the order of the contenders."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(WARM_UP + rounds):
        for contender, its_times in zip(contenders, times, strict=True):
            start = time.perf_counter()
            contender.step()
            taken = time.perf_counter() - start
            if number >= WARM_UP:
                its_times.append(taken / size * 1e9)
    return [_row(c, its_times) for c, its_times in zip(contenders, times, strict=True)]


def _row(contender: Contender, times: list[float]) -> Row:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Row(contender.name, statistics.median(times), low, high, contender.bytes)


def machine() -> dict[str, str]:
    """What the numbers were taken on, and how busy it was."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.*)$", text, flags=re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "processors": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.2f} in the last minute",
        "date": time.strftime("%Y-%m-%d"),
    }
