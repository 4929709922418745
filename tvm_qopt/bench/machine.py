"""What the numbers were taken on, and who else was at work."""

from __future__ import annotations

import os
import time

import psutil

from tvm_qopt.bench.measure import LeftOut
from tvm_qopt.targets import cpu_model

RESERVE = 1 << 30  # bytes left to others
LOOK = 0.3  # seconds
BUSY = 0.2  # processors taken by others, from which on numbers are off


def machine() -> dict[str, str]:
    return {
        "processor": cpu_model(),
        "processors": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().available / 2**30:.1f} GiB free",
        "load": f"{os.getloadavg()[0]:.2f} in the last minute",
        "date": time.strftime("%Y-%m-%d"),
    }


def check_free(needed: float) -> None:
    """Raise LeftOut where so many bytes are not to be had: the system would end some process."""
    free = psutil.virtual_memory().available - RESERVE
    if needed > free:
        raise LeftOut(f"{needed / 2**30:.2f} GiB needed, {max(0, free) / 2**30:.2f} free")


class Watch:
    """Counts, from when it is made, the processors that others use: other processes, and where
    this machine is a virtual one its host."""

    def __init__(self) -> None:
        self._start = self._counts()

    def others(self) -> tuple[float, float]:
        """Processors taken by other processes and by the host, on average so far."""
        seconds, all_, own, stolen = (
            now - then for now, then in zip(self._counts(), self._start, strict=True)
        )
        return max(0.0, (all_ - own) / seconds), stolen / seconds

    @staticmethod
    def _counts() -> tuple[float, float, float, float]:
        """Seconds: of the clock, of all processes, of this one and its children, of the host."""
        cpu = psutil.cpu_times()
        busy = cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq
        return time.monotonic(), busy, _own_seconds(), cpu.steal


def busy_now() -> float:
    """Processors that others take at this moment."""
    watch = Watch()
    time.sleep(LOOK)
    return sum(watch.others())


def _own_seconds() -> float:
    this = psutil.Process()
    ended = this.cpu_times()
    total = ended.children_user + ended.children_system
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return float(total)
