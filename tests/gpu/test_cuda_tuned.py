"""`tvm-qopt tune` for CUDA on the device of tests/cuda_on_cpu: where the compiler is, through a
server, and by a packed folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cuda_runner
import pytest

from tvm_qopt.compiler.measure import Remote
from tvm_qopt.errors import ToolMissing
from tvm_qopt.records import read_log

SPEC = "sgd-float32-b256-p_f32-g_f32"
KEY = "gpu"


@pytest.fixture(scope="module")
def server(device: Path) -> Iterator[str]:
    """The address of a tracker with one server, whose GPU is an sm_90."""
    pytest.importorskip("tornado")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    at = ["--host", "127.0.0.1"]
    tracker = ["rpc_tracker", *at, "--port", str(port), "--port-end", str(port + 1)]
    served = ["rpc_server", *at, "--tracker", f"127.0.0.1:{port}", "--key", KEY]
    log = device.parent / "servers.log"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tvm.exec.{words[0]}", *words[1:]],
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            env=cuda_runner.environment(device),
            start_new_session=True,
        )
        for words in (tracker, served)
    ]
    try:
        _wait(Remote("127.0.0.1", port, KEY), log)
        yield f"127.0.0.1:{port}"
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(remote: Remote, log: Path) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            remote.count()
            return
        except ToolMissing:
            assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)


def tune(device: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "tvm_qopt", "tune", SPEC, *map(str, arguments)]
    return cuda_runner.run(device, *words)


def tuned(done: subprocess.CompletedProcess[str]) -> Any:
    """What was found, where all went well."""
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)["tuned"]
    assert not found["rejected"] and not any(trial["error"] for trial in found["trials"])
    assert read_log(Path(found["path"]))[0].to_json() == json.dumps(found["record"])
    return found


def test_cuda_is_tuned_on_this_machine(device: Path, tmp_path: Path) -> None:
    here = ["--trials", "2", "--size", "4096", "-o", tmp_path, "--json"]
    record = tuned(tune(device, "--target", "cuda-sm90", *here))["record"]
    assert (record["preset"], record["device"]) == ("cuda-sm90", "this CPU")
    refused = tune(device, "--target", "cuda-sm80", *here)
    assert refused.returncode == 2
    assert "cuda-sm80 does not run here (the GPU here is sm_90); use --rpc" in refused.stderr


def test_cuda_is_tuned_on_a_server(device: Path, server: str, tmp_path: Path) -> None:
    rpc = ["--rpc", server, "--key", KEY, "--size", "4096"]
    cuda = ["--target", "cuda-sm90", "--trials", "3", "-o", tmp_path, "--json"]
    found = tuned(tune(device, *cuda, *rpc))
    record = found["record"]
    assert (record["preset"], record["trials"], record["threads"]) == ("cuda-sm90", 3, 0)
    assert record["device"].endswith(" (RPC)")
    refused = tune(device, "--target", "cuda-sm80", *rpc)
    assert refused.returncode == 2
    assert "cuda-sm80 is code for sm_80, and the GPU is" in refused.stderr


def test_cuda_is_measured_where_there_is_no_compiler(device: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    sizes = ["--trials", "3", "--size", "4096"]
    done = tune(device, "--target", "cuda-sm90", *sizes, "--pack", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    script = [str(folder / "measure.py"), "--arrays", "cupy"]
    other = cuda_runner.run(device, *script, arch="80")
    assert other.returncode == 1
    assert "cuda-sm90 is code for sm_90, and the GPU is sm_80" in other.stderr
    measured = cuda_runner.run(device, *script)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert f"{SPEC}: 3 of 3 kernels are right" in measured.stdout
    take = ["--target", "cuda-sm90", "--measured", folder, "-o", tmp_path / "out", "--json"]
    found = tuned(tune(device, *take))
    assert found["record"]["device"] == "sm_90, by CuPy" and len(found["trials"]) == 3
