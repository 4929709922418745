"""`tvm-qopt list`: what can be built and what runs here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import invoke, tvm_qopt_in_process

from tvm_qopt.cli.machine import why_not_here
from tvm_qopt.runtime.store import store_folder
from tvm_qopt.targets import PRESETS, get_target


def test_list_json() -> None:
    data = json.loads(tvm_qopt_in_process("list", "--json").stdout)
    assert [each["rule"] for each in data["rules"]] == sorted(
        each["rule"] for each in data["rules"]
    )
    adamw = next(each for each in data["rules"] if each["rule"] == "adamw")
    assert adamw["slots"] == ["exp_avg", "exp_avg_sq"]
    operators = {each["rule"] for each in data["rules"] if each["kind"] == "operator"}
    assert operators == {"quantize", "dequantize", "sum_sq", "lamb_phase1"}
    states = {each["state"]: each["summary"] for each in data["states"]}
    assert {"dynamic8", "dynamic8s", "float32"} <= set(states)
    rooted = {name for name, summary in states.items() if "square root" in summary}
    assert rooted == {"sqrt8u", "sqrt_dynamic8u"}
    here = {each["target"]: each["runs here"] for each in data["targets"]}
    assert here["llvm-native"] == "yes"
    assert set(PRESETS) < set(here)
    assert data["store"]["folder"] == str(store_folder())


def test_list_is_for_people_too() -> None:
    result = invoke("list")
    assert result.exit_code == 0
    for word in ("adamw", "operator", "dynamic8", "dynamic8u", "cuda-sm90", "llvm-native"):
        assert word in result.stdout
    assert result.stdout.count("even") == 2  # once of three floating-point types, once of fp8


def test_list_survives_a_bad_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = tvm_qopt_in_process("list", TVM_QOPT_STORE=str(tmp_path / "file"))
    assert run.returncode == 0
    assert "adamw" in run.stdout
    assert "cannot be made" in run.stderr


def test_list_shows_a_damaged_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_QOPT_STORE", str(tmp_path / "store"))
    folder = store_folder() / "0123"
    folder.mkdir()
    (folder / "manifest.json").write_text("{")
    (row,) = json.loads(invoke("list", "--json").stdout)["store"]["artifacts"]
    assert row["spec"].startswith("damaged")


def test_why_not_here_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_qopt.cli import machine

    monkeypatch.setattr(machine, "gpu_archs", lambda: ("sm_89",))
    assert why_not_here(get_target("cuda-sm86")) is None
    assert why_not_here(get_target("cuda-sm80+sm90")) is None
    assert "sm_89" in str(why_not_here(get_target("cuda-sm90")))
    monkeypatch.setattr(machine, "gpu_archs", lambda: ())
    assert "no NVIDIA GPU" in str(why_not_here(get_target("cuda-sm90")))


def test_opencl_runs_where_its_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    why = why_not_here(get_target("opencl"))
    assert why is not None and "pip install 'tvm_qopt[opencl]'" in why
