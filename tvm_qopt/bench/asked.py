"""A process, seen from here, that is asked for one thing at a time and sleeps in between."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_qopt.bench.measure import LeftOut


class AskedProcess:
    """A process that answers questions.

    Raises LeftOut, with the last thing the process said, where it ends or is stuck.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self._child = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LeftOut(str(error)) from error
        self._rest = b""

    def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a question, each one line of JSON."""
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise self._end() from None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._child.stdout], [], [], left)[0]:
                raise LeftOut(f"its process gave no answer in {timeout:.0f} s")
            part = self._child.stdout.read(1 << 16)
            if not part:
                raise self._end()
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (TypeError, ValueError):
            raise LeftOut(f"its process answered {line[:80]!r}") from None

    def close(self) -> None:
        """End it with all that it has started: some peers compile in processes of their own."""
        assert self._child.stdin and self._child.stdout
        if self._child.returncode is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._said):
            stream.close()

    def _end(self) -> LeftOut:
        """Why the process is no more: the last line of its traceback, or a signal."""
        code = self._child.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            return LeftOut(f"its process died of {signal.Signals(-code).name}")
        return LeftOut(lines[-1] if lines else f"its process ended with exit code {code}")
