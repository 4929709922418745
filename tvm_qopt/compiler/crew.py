"""Processes that do what may crash or hang."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.support.popen_pool import PopenWorker

FAILURES = (RuntimeError, ValueError, TypeError, OSError, LookupError, AttributeError, MemoryError,
            AssertionError, ImportError)  # fmt: skip
"""What a function in another process may raise, which is raised here again."""


@dataclass(frozen=True)
class Outcome:
    """What a function returned, or in a line why it did not."""

    value: Any = None
    error: str | None = None


class Crew:
    """Processes that run functions, one each at a time; one that dies or hangs is replaced.

    All is done on the calling thread, so that Ctrl-C leaves nothing behind that `close` misses.
    """

    def __init__(self, count: int, prepare: Callable[[], None] | None = None) -> None:
        quiet = subprocess.DEVNULL
        self._workers = [
            PopenWorker(initializer=prepare, stdout=quiet, stderr=quiet) for _ in range(count)
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], seconds: float
    ) -> list[Outcome]:
        """The function of each task's arguments, each within some seconds."""
        outcomes = []
        for start in range(0, len(tasks), len(self._workers)):
            now = list(zip(self._workers, tasks[start:], strict=False))
            for worker, arguments in now:
                worker.send(function, arguments, timeout=seconds)
            outcomes += [_received(worker, seconds) for worker, _ in now]
        return outcomes


def _received(worker: PopenWorker, seconds: float) -> Outcome:
    try:
        return Outcome(worker.recv())
    except ChildProcessError:
        return Outcome(error="it ended the process that it ran in")
    except TimeoutError:
        return Outcome(error=f"no answer within {seconds:g} s")
    except FAILURES as error:
        return Outcome(error=last_line(error))


def last_line(text: object) -> str:
    """What a traceback ends with."""
    lines = [line for line in str(text).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
