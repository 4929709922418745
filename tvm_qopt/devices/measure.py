"""What a packed folder's measure.py does: checks and times its kernels, and writes measured.json.

Each kernel is first compared with the reference and stepped once, in a process that is replaced
where it dies; then those that are right run in turn, round by round.  Needs NumPy, and torch for
CUDA or pyopencl for OpenCL; no compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_qopt.bench.asked import AskedProcess
from tvm_qopt.bench.measure import LeftOut
from tvm_qopt.bench.worker import Answer, run
from tvm_qopt.devices.arrays import DEVICES
from tvm_qopt.devices.session import DeviceMachine
from tvm_qopt.errors import QoptError
from tvm_qopt.manifest import sha256_of
from tvm_qopt.measure import ROUNDS, Call, Device, check_code, describe, interleave, make_calls
from tvm_qopt.packed import (
    MEASURED,
    PACK,
    SCRIPT,
    Candidate,
    Measured,
    Pack,
    Result,
    Search,
    check_candidate,
    read_pack,
    write_json,
)
from tvm_qopt.runtime.kernel import read_manifest
from tvm_qopt.spec import MAIN, KernelSpec
from tvm_qopt.targets import get_target
from tvm_qopt.verify import fault, timed_step

LIBRARIES = "lib"
SECONDS = 120.0  # that a question may take


def main(folder: Path) -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels of this folder.")
    parser.add_argument("--arrays", choices=DEVICES, help="cupy: CuPy's in place of torch's")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        run(lambda answer: serve(folder, given.arrays, answer))
        return 0
    try:
        write_json(measure(folder, given.arrays), folder)
    except QoptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{folder / MEASURED}: take it to where the folder was packed")
    return 0


def measure(folder: Path, arrays: str | None = None) -> Measured:
    """arrays: of which library, None for the usual one of the kind.

    Raises ArtifactInvalid for what is not as it was packed, UnsupportedSpec for another GPU, and
    LeftOut where the device does not work."""
    pack = read_pack(folder)
    for search in pack.searches.values():
        for candidate in search.candidates:
            if candidate.artifact:
                read_manifest(check_candidate(folder, candidate))
    worker = _Worker(folder, arrays or pack.kind)
    try:
        device = Device(**worker.ask({"device": True}))
        check_code(get_target(pack.target), device)
        print(f"{pack.target} on {device.name}", flush=True)
        results = {
            name: tuple(_results(worker, name, search)) for name, search in pack.searches.items()
        }
    finally:
        worker.close()
    return Measured(sha256_of(folder / PACK), device, results)


class _Worker:
    """The process that runs kernels; after a failure a new one."""

    def __init__(self, folder: Path, arrays: str) -> None:
        script = str(folder / SCRIPT)
        self._command = [sys.executable, script, "--worker", "--arrays", arrays]
        self._process: AskedProcess | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._process = self._process or AskedProcess(self._command, os.environ)
        try:
            return self._process.ask(question, SECONDS)
        except LeftOut:
            self.close()
            raise

    def close(self) -> None:
        if self._process:
            self._process.close()
        self._process = None


def _results(worker: _Worker, spec: str, search: Search) -> list[Result]:
    """Of the candidates of a search, in their order."""
    whys = [_why_wrong(worker, spec, i, each) for i, each in enumerate(search.candidates)]
    right = [i for i, why in enumerate(whys) if why is None]
    print(f"{spec}: {len(right)} of {len(whys)} kernels are right", flush=True)
    times: list[list[float]] = []
    if right:
        times = worker.ask({"spec": spec, "interleave": right, "rounds": ROUNDS})["seconds"]
    columns = dict(zip(right, zip(*times, strict=True), strict=True))
    return [Result(tuple(columns.get(i, ())), why) for i, why in enumerate(whys)]


def _why_wrong(worker: _Worker, spec: str, number: int, candidate: Candidate) -> str | None:
    if candidate.error:
        return candidate.error
    try:
        wrong = worker.ask({"spec": spec, "check": number})["wrong"]
    except LeftOut as error:
        return str(error)
    return f"wrong: {wrong}" if wrong else None


# --- in the other process ---


def serve(folder: Path, arrays: str, answer: Answer) -> None:
    """Answer questions until there are none."""
    pack = read_pack(folder)
    libraries = folder / LIBRARIES
    machine = DeviceMachine(arrays, str(libraries) if libraries.is_dir() else None)
    for line in sys.stdin:
        asked = json.loads(line)
        if "device" in asked:
            found = describe(machine, SECONDS)
            answer(dataclasses.asdict(found) if found else {})
        else:
            answer(_answer(folder, pack, machine, asked))


def _answer(
    folder: Path, pack: Pack, machine: DeviceMachine, asked: dict[str, Any]
) -> dict[str, Any]:
    spec, search = KernelSpec.parse(asked["spec"]), pack.searches[asked["spec"]]
    paths = [str(folder / str(each.artifact)) for each in search.candidates]
    blocks = int(search.header["elements"]) // spec.block_size
    step = timed_step(spec, blocks, MAIN)
    if "check" not in asked:
        chosen = [paths[i] for i in asked["interleave"]]
        return {"seconds": interleave(machine, chosen, step, asked["rounds"], SECONDS)}
    path = paths[asked["check"]]

    def calls(given: Sequence[Call]) -> Any:
        return make_calls(machine, path, given, SECONDS)

    parts = machine.open(SECONDS).load(path).parts
    wrong = fault(spec, parts, calls)
    if wrong is None:
        interleave(machine, [path], step, 1, SECONDS)
    return {"wrong": wrong}
