"""`tvm-qopt doctor`: what is in place, and what to do where it is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from commands import tvm_qopt_in_process

from tvm_qopt.manifest import SCHEMA


def checks_of(run: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in json.loads(run.stdout)["checks"]}


def test_doctor_of_a_sound_installation() -> None:
    run = tvm_qopt_in_process("doctor", "--json")
    checks = checks_of(run)
    failed = [each for each in checks.values() if each["status"] == "failed"]
    assert not failed
    assert run.returncode == 0, run.stderr
    assert "is right" in checks["trial"]["found"]


def test_doctor_without_tvm(tmp_path: Path) -> None:
    for name in ("tvm", "tvm_ffi"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libtvm.so: no such file')")
    run = tvm_qopt_in_process("doctor", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert not run.stderr
    assert "no such file" in run.stdout
    assert "pip install 'apache-tvm==" in run.stdout
    assert "not tried" in run.stdout


def test_doctor_of_another_version(tmp_path: Path) -> None:
    info = tmp_path / "apache_tvm_ffi-0.1.15.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.15\n")
    run = tvm_qopt_in_process("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    check = checks_of(run)["apache-tvm-ffi"]
    assert check["status"] == "failed"
    assert check["found"].startswith("0.1.15, not ")
    assert "apache-tvm-ffi>=" in check["mend"]


def test_doctor_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / "tvm.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    run = tvm_qopt_in_process("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert "died of signal 11" in checks_of(run)["TVM compiler"]["found"]


def test_doctor_of_missing_tools_and_a_bad_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / str(SCHEMA)).mkdir(mode=0o777)
    (store / str(SCHEMA)).chmod(0o777)
    environment: Any = {"PATH": str(tmp_path), "CC": "", "TVM_QOPT_STORE": str(store)}
    checks = checks_of(
        tvm_qopt_in_process("doctor", "--json", TVM_NUM_THREADS="many", **environment)
    )
    assert checks["C compiler"]["status"] == "failed"
    assert "apt install gcc" in checks["C compiler"]["mend"]
    assert checks["store"]["status"] == "failed"
    assert "TVM_QOPT_STORE" in checks["store"]["mend"]
    assert checks["threads"]["status"] == "failed"
    assert "'many'" in checks["threads"]["mend"]
