"""`tvm-qopt tune` from the command to the kernel that a later build takes; and on RPC servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from typer.testing import CliRunner

from tvm_qopt.cli import tune as command
from tvm_qopt.cli.app import app
from tvm_qopt.cli.tune_view import print_found
from tvm_qopt.compiler.build import lower, select, tvm_target
from tvm_qopt.compiler.measure import Laboratory, Remote, build_library
from tvm_qopt.compiler.record import record_preset
from tvm_qopt.errors import ToolMissing
from tvm_qopt.measure import Arguments, Device, Step
from tvm_qopt.records import read_log
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, get_target

SPEC = KernelSpec.parse("sgd-float32-b64")
KEY = "test"


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


# --- wrong usage ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trials", "3", "--minutes", "1"], "either --trials or --minutes"),
        (["--rpc", "localhost:9190"], "--rpc and --key go together"),
        (["--rpc", "localhost", "--key", "k"], "HOST:PORT"),
        (["--target", "cuda-sm90"], "cuda-sm90 does not run here"),
        (["--target", "webgpu"], "webgpu is text for other programs"),
        (["--target", "opencl", "--rpc", "localhost:9190", "--key", "k"], "run no OpenCL"),
        (["--pack", "x"], f"--pack: for GPUs; {NATIVE} is tuned"),
        (["--pack", "x", "--measured", "y"], "give one of --pack, --measured"),
        (
            ["--pack", "x", "--target", "opencl", "--minutes", "1"],
            "--minutes with --pack",
        ),
        (["--measured", "x", "--size", "9"], "--size with --measured: it has no use"),
        (["--python", "3.12"], "--python goes with --pack"),
        (["--target", "llvm-aarch64"], "does not run here"),
    ],
)
def test_wrong_usage_is_said_at_once(arguments: list[str], said: str) -> None:
    result = invoke("adamw", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_what_is_missing_is_named_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = invoke("adamw", "--plot", tmp_path / "no" / "such.png")
    assert result.exit_code == 1 and "there is no folder" in result.stderr
    monkeypatch.setattr(command, "NEEDS", ("no_such_package",))
    result = invoke("adamw")
    assert result.exit_code == 1
    assert "tune needs no_such_package: pip install 'tvm_qopt[tune]'" in result.stderr


# --- a search ---


def test_a_search_makes_a_record_that_builds_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TVM_QOPT_RECORDS", str(tmp_path))
    plot = tmp_path / "trials.png"
    arguments = [SPEC.name, "--trials", "3", "--size", "100000", "--plot", plot, "--json"]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    assert f"{SPEC.name}: trial 1 of 3: " in result.stderr
    assert f"records go to {tmp_path}" in result.stderr
    (tuned,) = json.loads(result.stdout)["tuned"]
    path = Path(tuned["path"])
    assert path == tmp_path / record_preset(get_target(NATIVE)) / f"{SPEC.name}.jsonl"
    (record,) = read_log(path)
    assert record.to_json() == json.dumps(tuned["record"])
    assert (record.elements, record.trials) == (100032, 3)
    assert len(tuned["trials"]) == 3 and not any(trial["error"] for trial in tuned["trials"])
    low, middle, high = tuned["speedup"]
    assert 0 < low <= middle <= high
    assert select(SPEC, get_target(NATIVE)).record == record
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_result_is_for_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    from tvm_qopt.compiler.trials import Trial
    from tvm_qopt.compiler.tune import Found
    from tvm_qopt.records import TuningRecord

    record = TuningRecord(
        spec=SPEC.name, preset="llvm-x", device="a CPU", tvm="0", workload="0",
        decisions={"lanes": 32}, elements=10**6, threads=2, seconds=1e-3, default_seconds=2e-3,
        trials=2, seed=0, date="2026-01-01",
    )  # fmt: skip
    trials = [Trial({"lanes": 32}, "0", (1e-3,)), Trial({"lanes": 64}, "1", error="it ended")]
    found = Found(record, Path("x.jsonl"), (1.5, 2.0, 2.5), trials, ["{}: param: 3 differ"], True)
    print_found([found])
    out, err = capsys.readouterr()
    for word in (SPEC.name, "2 (all)", "1.000", "2.00 (1.50 to 2.50)", "lanes 32", "x.jsonl"):
        assert word in out
    assert f"failed: {SPEC.name}: lanes 64: it ended" in err
    assert f"fast and wrong: {SPEC.name}: {{}}: param: 3 differ" in err


# --- servers ---


class Fleet:
    """A tracker and two servers on loopback, in their own process groups."""

    def __init__(self, folder: Path) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        tracker = f"127.0.0.1:{self.port}"
        ports = ["--port", str(self.port), "--port-end", str(self.port + 1)]
        server = ["rpc_server", "--host", "127.0.0.1", "--tracker", tracker, "--key", KEY]
        self.logs = [folder / f"server{i}.log" for i in range(2)]
        self.processes = [
            self._start(folder / "tracker.log", "rpc_tracker", "--host", "127.0.0.1", *ports),
            *(self._start(log, *server) for log in self.logs),
        ]

    def _start(self, log: Path, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", f"tvm.exec.{module}", *arguments],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "TVM_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def wait(self) -> Remote:
        """When both servers are known to the tracker."""
        remote, until = Remote("127.0.0.1", self.port, KEY), time.monotonic() + 60
        while True:
            try:
                if remote.count() == len(self.logs):
                    return remote
            except ToolMissing:
                assert time.monotonic() < until, [log.read_text() for log in self.logs]
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_busy_machine_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_qopt.bench.machine.busy_now", lambda: 1.5)
    monkeypatch.setattr("tvm_qopt.bench.machine.Watch.others", lambda watch: (1.2, 0.3))
    command._search([], get_target(NATIVE), Path("x"), None, here=True)  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert "others use 1.5 processors now" in err
    assert "this machine was busy: 1.20 processors used by other processes and 0.30" in err
    command._search([], get_target(NATIVE), Path("x"), None, here=False)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    pytest.importorskip("tornado")
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_kernels_run_on_every_server_of_a_key(fleet: Fleet, tmp_path: Path) -> None:
    """What a search asks of a laboratory, there."""
    preset, target = get_target(NATIVE), tvm_target(get_target(NATIVE))
    blocks = 64
    shapes = tuple(t.sizes(blocks, SPEC.block_size) for t in SPEC.tensors)
    arrays = tuple(np.ones(shape, t.storage) for t, shape in zip(SPEC.tensors, shapes, strict=True))
    step = Step(("main",), Arguments(arrays, shapes))
    module = tvm.IRModule({"main": lower(SPEC, get_target("llvm-x86-64-v3"), "main").final})
    path = build_library("gcc", tmp_path / "one.so", target, module)
    remote = fleet.wait()
    with pytest.raises(ToolMissing, match="no server 'other'; on each machine"):
        Remote(remote.host, remote.port, "other").count()
    laboratory = Laboratory(SPEC, preset, step, remote, threads=1, seconds=20.0)
    with closing(laboratory):
        assert laboratory.servers == 2
        timed = laboratory.time([path] * 2)
        assert [outcome.error for outcome in timed] == [None] * 2
        assert all(second > 0 for outcome in timed for second in outcome.value)
        cpu = record_preset(preset).removeprefix("llvm-")
        assert laboratory.describe() == Device(f"{cpu} (RPC)", cpu, 1)
        other = shutil.copy(path, tmp_path / "other.so")
        assert laboratory.interleave([path, str(other)], rounds=2).shape == (2, 2)
    gpu = Remote(remote.host, remote.port, remote.key, "cuda")
    lost = Laboratory(SPEC, get_target("cuda-sm90"), step, gpu, threads=1, seconds=20.0)
    with closing(lost), pytest.raises(ToolMissing, match="needs a device of cuda, and there is no"):
        lost.describe()
    for log in fleet.logs:
        assert "connected from" in log.read_text()
