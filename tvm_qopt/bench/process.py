"""A peer's process, seen from here: it is asked for one thing at a time and sleeps in between."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tvm_qopt.bench import worker
from tvm_qopt.bench.machine import check_free
from tvm_qopt.bench.measure import PEER, Contender, LeftOut, Skipped
from tvm_qopt.bench.peers import Peer, environ, find_python

START, BUILD, STEP = 300.0, 900.0, 120.0  # seconds after which a peer counts as stuck
TENSORS = 16  # bytes a parameter at most: weights and gradients, each made from another array
STATE, SCRATCH = 8, 24  # bytes at most: of state a parameter, and a parameter of the largest tensor


class PeerProcess:
    """Weights and gradients of some sizes, with a step for each row of the peer.

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


class Peers:
    """The processes of all peers, ended together."""

    def __init__(self, folder: Path, named: Mapping[str, Path], threads: int) -> None:
        self._folder, self._named, self._threads = folder, named, threads
        self._processes: list[PeerProcess] = []
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def contenders(self, peer: Peer, sizes: Sequence[int]) -> tuple[list[Contender], list[Skipped]]:
        """Those of a peer that work, and why others do not."""
        skipped: dict[str, str] = {}
        try:
            check_free(TENSORS * sum(sizes))
            while True:
                process, rows = self._start(peer, sizes)
                left = [row for row in rows if row not in skipped]
                built = self._build(process, left, sizes, skipped)
                if built is not None:
                    break
        except LeftOut as error:
            return [], [Skipped(peer.name, str(error))]
        contenders = [
            Contender(row, PEER, moved / sum(sizes), sum(sizes), partial(_step, process, row))
            for row, moved in built.items()
        ]
        return contenders, [Skipped(row, reason) for row, reason in skipped.items()]

    def _start(self, peer: Peer, sizes: Sequence[int]) -> tuple[PeerProcess, list[str]]:
        python = find_python(peer, self._folder, self._named)
        environment = environ(peer, python, self._folder, self._threads)
        process = PeerProcess([str(python), worker.__file__], environment)
        self._processes.append(process)
        request = {"peer": peer.name, "sizes": list(sizes), "threads": self._threads}
        answer = process.ask(request, START)
        self.versions |= answer["versions"]
        return process, answer["rows"]

    def _build(
        self,
        process: PeerProcess,
        rows: Sequence[str],
        sizes: Sequence[int],
        skipped: dict[str, str],
    ) -> dict[str, float] | None:
        """Bytes a step by row; what does not work goes to `skipped`.  None where that was the end
        of the process."""
        built = {}
        for row in rows:
            try:
                check_free(STATE * sum(sizes) + SCRATCH * max(sizes))
            except LeftOut as error:
                skipped[row] = str(error)
                continue
            try:
                built[row] = process.ask({"build": row}, BUILD)["bytes"]
            except LeftOut as error:
                skipped[row] = str(error)
                process.close()
                self._processes.remove(process)
                return None
        return built


def _step(process: PeerProcess, row: str) -> float:
    return float(process.ask({"step": row}, STEP)["seconds"])
