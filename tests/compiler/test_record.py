"""Which schedule a build takes, and that every shipped record still fits."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tvm_qopt
from tvm_qopt import records
from tvm_qopt.cli.app import app
from tvm_qopt.compiler import record as compiler_record
from tvm_qopt.compiler.build import build, entry_points, lower, select
from tvm_qopt.compiler.record import record_preset, workload_hash
from tvm_qopt.errors import DecisionMismatch, StaleRecord
from tvm_qopt.manifest import Manifest
from tvm_qopt.records import TuningRecord, log_path, read_log, save
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, PRESETS, get_target, native

SPEC = KernelSpec.of("adamw", block_size=512)  # no shipped record is of this one
CPU = "testcpu"  # what LLVM calls this machine
V3, V4 = get_target("llvm-x86-64-v3"), get_target("llvm-x86-64-v4")
HERE = dataclasses.replace(V4, name=NATIVE)
CHOICES = lower(SPEC, get_target("llvm-x86-64-v3"), "main").choices
NAME, OTHER_NAME = list(CHOICES)[:2]
LAST = {name: choice.candidates[-1] for name, choice in CHOICES.items()}
HYPER = {"lr": 0.5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def record(preset: str, spec: KernelSpec = SPEC, **changes: Any) -> TuningRecord:
    workload = workload_hash(spec, "llvm")
    made = TuningRecord(
        spec=spec.name, preset=preset, device="a CPU", tvm="0", workload=workload,
        decisions={NAME: LAST[NAME]}, elements=1 << 20, threads=2, seconds=1e-3,
        default_seconds=2e-3, trials=9, seed=0, date="2026-01-01",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, empty; nothing is shipped; LLVM knows this CPU."""
    monkeypatch.setenv("TVM_QOPT_RECORDS", str(tmp_path / "own"))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(compiler_record.tvm.target.codegen, "llvm_get_system_cpu", lambda: CPU)
    return tmp_path / "own"


@pytest.fixture(autouse=True)
def no_surprise() -> Iterator[None]:
    """A record that is not taken fails the test unless that is what it expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleRecord)
        yield


# --- the shipped ones ---


def stale_records(folder: Path) -> list[str]:
    """What is wrong with the records of a folder: each must lie where its own fields say, be of
    today's definition, and be a schedule of every entry point."""
    faults = []
    for path in sorted(folder.glob("*/*.jsonl")):
        for each in read_log(path):
            spec = KernelSpec.parse(each.spec)
            preset = PRESETS.get(each.preset, native())  # a CPU's own name is no target
            if path != log_path(folder, each.preset, spec.name):
                faults.append(f"{path} holds a record of {each.preset}, {each.spec}")
            if each.workload != workload_hash(spec, "llvm"):
                faults.append(f"{path}: of another definition; tune it again")
            try:
                lower(spec, preset, "main", each.decisions)
                for entry in entry_points(spec, preset.kind):
                    lower(spec, preset, entry, each.decisions)
            except DecisionMismatch as error:
                faults.append(f"{path}: {error}; tune it again")
    return faults


def test_every_shipped_record_replays() -> None:
    assert stale_records(records.SHIPPED) == []


def test_a_stale_record_would_be_seen(tmp_path: Path) -> None:
    save(record(V3.name), tmp_path)
    assert stale_records(tmp_path) == []
    sgd = KernelSpec.of("sgd", "float32")
    save(record(V3.name, sgd, decisions={NAME: 48}), tmp_path)
    save(record(V4.name, workload="0"), tmp_path)
    elsewhere = log_path(tmp_path, "llvm-x86-64-v2", SPEC.name)
    elsewhere.parent.mkdir()
    elsewhere.write_text(record(V3.name).to_json())
    said = " ".join(stale_records(tmp_path))
    for fault in (f"{NAME}: one of", "of another definition", "holds a record of llvm-x86-64-v3"):
        assert fault in said


# --- the hash of a definition ---


def test_the_hash_is_the_same_in_another_process_and_of_the_definition() -> None:
    script = (
        "from tvm_qopt.compiler.record import workload_hash; from tvm_qopt.spec import KernelSpec\n"
        "print(workload_hash(KernelSpec.of('lamb'), 'llvm'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == workload_hash(KernelSpec.of("lamb"), "llvm"), done.stderr
    names = (
        "adamw",
        "adamw-dynamic8-b64",
        "adamw-fp8",
        "lion",
        "lamb",
        "adamw-dynamic8-zero_rule_off",
    )
    assert len({workload_hash(KernelSpec.parse(name), "llvm") for name in names}) == len(names)


# --- which is taken ---


def test_this_machines_name_is_that_of_its_cpu(own: Path) -> None:
    assert record_preset(get_target(NATIVE)) == f"llvm-{CPU}"
    assert record_preset(V3) == V3.name


def test_the_closest_preset_then_the_users_then_the_fastest(own: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    none = select(SPEC, HERE)
    assert none.record is None and none.as_manifest() == {"kind": "default"}
    assert f"no record of llvm-{CPU}, {V4.name}, {V3.name}" in none.why
    added = [
        (shipped, record("llvm-x86-64-v2")),
        (shipped, record(V3.name)),
        (own, record(V3.name, seconds=1.5e-3)),  # slower, but measured by the user
        (shipped, record(V4.name, seconds=1.9e-3)),
        (own, record(f"llvm-{CPU}", seconds=1.99e-3)),
        (own, record(f"llvm-{CPU}", seconds=1.8e-3, decisions={OTHER_NAME: LAST[OTHER_NAME]})),
    ]
    for folder, each in added:
        save(each, folder)
        selection = select(SPEC, HERE)
        assert selection.record == each
        assert each.hash in selection.why and str(folder) in selection.why
    assert select(SPEC, V4).record == added[3][1]
    assert select(SPEC, V3).record == added[2][1]
    assert select(KernelSpec.of("lion"), HERE).record is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload": "00"}, "of another definition"),
        ({"decisions": {NAME: 48}}, f"of another schedule .{NAME}: one of"),
        ({"decisions": {"lines": 16}}, "of another schedule .lines: no choice"),
    ],
)
def test_a_record_that_does_not_fit_is_named_and_passed_over(
    own: Path, changes: dict[str, Any], said: str
) -> None:
    save(record(V4.name, **changes), own)
    with pytest.warns(StaleRecord, match=rf"{SPEC.name}.jsonl: a record {said}.*; run: tvm-qopt"):
        assert select(SPEC, V4).record is None
    save(record(V3.name), own)
    with pytest.warns(StaleRecord):
        assert select(SPEC, V4).record == record(V3.name)


def test_a_damaged_log_is_named_and_passed_over(own: Path) -> None:
    path = save(record(V4.name), own)
    path.write_text("{")
    with pytest.warns(StaleRecord, match=r"jsonl:1: not a tuning record .*; it is not used"):
        assert select(SPEC, V4).record is None


# --- what is built ---


def test_a_build_takes_the_record_and_says_so(own: Path, tmp_path: Path) -> None:
    default = build(SPEC, V3, tmp_path / "default")
    made = record(V3.name, decisions=LAST)
    save(made, own)
    tuned = build(SPEC, V3, tmp_path / "tuned")
    assert (default.schedule, tuned.schedule) == (
        {"kind": "default"},
        {"kind": "tuned", "record": made.hash},
    )
    assert tuned.key != default.key and tuned.files != default.files
    text = tuned.to_json()
    assert Manifest.from_json(text, where="here").schedule == tuned.schedule


def test_show_says_which_record_and_why(own: Path) -> None:
    made = record(V3.name)
    save(made, own)
    shown = CliRunner().invoke(app, ["show", SPEC.name, "--target", V4.name])
    first, *rest = shown.stdout.splitlines()
    assert first.startswith(f"# schedule: record {made.hash} of {V3.name}: ")
    assert "2.00 times as fast as the default" in first
    candidates = CHOICES[NAME].candidates
    assert f"{NAME} = {LAST[NAME]} (of {', '.join(map(str, candidates))})" in rest[0]
    assert f"decision={len(candidates) - 1}" in shown.stdout


def test_the_store_builds_anew_for_a_record_and_warns_of_a_stale_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the child process, for this machine as it is."""
    monkeypatch.setenv("TVM_QOPT_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVM_QOPT_RECORDS", "own")
    made = record(record_preset(get_target(NATIVE)), decisions=LAST)
    path = save(made, tmp_path / "own")
    kernel = tvm_qopt.load(SPEC)
    assert kernel.manifest.schedule == {"kind": "tuned", "record": made.hash}
    param, grad = np.zeros(5000, np.float32), np.ones(5000, np.float32)
    kernel.plan(param=param, grad=grad, state=kernel.init_state(param)).step(step=1, **HYPER)
    np.testing.assert_allclose(param, -HYPER["lr"], rtol=1e-6)

    path.write_text(dataclasses.replace(made, workload="00").to_json())
    with pytest.warns(StaleRecord, match="of another definition"):
        assert tvm_qopt.load(SPEC).manifest.schedule == {"kind": "default"}
