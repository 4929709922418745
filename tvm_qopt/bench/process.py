"""The processes of peers: each has the weights and gradients, and a step for each of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tvm_qopt.bench import worker
from tvm_qopt.bench.asked import AskedProcess
from tvm_qopt.bench.machine import check_free
from tvm_qopt.bench.measure import PEER, Contender, LeftOut, Skipped
from tvm_qopt.bench.peers import Peer, environ, find_python

START, BUILD, STEP = 300.0, 900.0, 120.0  # seconds after which a peer counts as stuck
TENSORS = 16  # bytes a parameter at most: weights and gradients, each made from another array
STATE, SCRATCH = 8, 24  # bytes at most: of state a parameter, and a parameter of the largest tensor


class Peers:
    """The processes of all peers, ended together."""

    def __init__(self, folder: Path, named: Mapping[str, Path], threads: int) -> None:
        self._folder, self._named, self._threads = folder, named, threads
        self._processes: list[AskedProcess] = []
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

    def _start(self, peer: Peer, sizes: Sequence[int]) -> tuple[AskedProcess, list[str]]:
        python = find_python(peer, self._folder, self._named)
        environment = environ(peer, python, self._folder, self._threads)
        process = AskedProcess([str(python), worker.__file__], environment)
        self._processes.append(process)
        request = {"peer": peer.name, "sizes": list(sizes), "threads": self._threads}
        answer = process.ask(request, START)
        self.versions |= answer["versions"]
        return process, answer["rows"]

    def _build(
        self,
        process: AskedProcess,
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


def _step(process: AskedProcess, row: str) -> float:
    return float(process.ask({"step": row}, STEP)["seconds"])
