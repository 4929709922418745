"""Tuning records as files: their form, where they are looked for, and the artifact key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tvm_qopt import records
from tvm_qopt.errors import RecordInvalid, StoreError
from tvm_qopt.manifest import artifact_key
from tvm_qopt.records import TuningRecord, log_path, presets_for, read_log, save
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, get_target

SPEC = KernelSpec.of("adamw")
V3, V4 = get_target("llvm-x86-64-v3"), get_target("llvm-x86-64-v4")


def record(**changes: Any) -> TuningRecord:
    made = TuningRecord(
        spec=SPEC.name, preset=V3.name, device="a CPU", tvm="0", workload="00ff",
        decisions={"lanes": 32, "unroll": 2}, elements=1 << 20, threads=2, seconds=1e-3,
        default_seconds=2e-3, trials=9, seed=0, date="2026-01-01",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, empty; nothing is shipped."""
    monkeypatch.setenv("TVM_QOPT_RECORDS", str(tmp_path / "own"))
    monkeypatch.setattr(records, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "own"


def test_a_record_is_one_readable_line() -> None:
    line = record().to_json()
    assert "\n" not in line and '"decisions": {"lanes": 32, "unroll": 2}' in line
    again = TuningRecord.from_json(line, where="here")
    assert again == record() and again.hash == record().hash
    assert record(seed=1).hash != again.hash


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "schema 1"),
        ({"decisions": {"lanes": "32"}}, "decisions: lanes: expected int, got '32'"),
        ({"decisions": [32]}, "decisions: expected dict"),
        ({"seconds": 1}, "seconds: expected float, got 1"),
        ({"elements": 0}, "elements: expected at least 1"),
        ({"more": 1}, r"unknown fields \['more'\]"),
    ],
)
def test_what_is_no_record_is_named_by_file_and_line(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    bad = json.dumps({**dataclasses.asdict(record()), **changes})
    path.write_text(f"{record().to_json()}\n\n{bad}\n")
    with pytest.raises(RecordInvalid, match=rf"log.jsonl:3: not a tuning record .*{said}"):
        read_log(path)


@pytest.mark.parametrize("text", ["{", "[]", "null", "7", "[" * 100_000])
def test_any_text_may_stand_in_a_log(text: str) -> None:
    with pytest.raises(RecordInvalid, match="here: not a tuning record"):
        TuningRecord.from_json(text, where="here")


def test_a_log_has_the_best_first_and_nothing_stale(tmp_path: Path) -> None:
    slow = record(decisions={"lanes": 16}, seconds=3e-3)
    lucky = record(decisions={"lanes": 64}, seconds=1e-9)
    stale = record(workload="other")
    for each in (stale, lucky, slow, record(seconds=2e-3), record()):
        path = save(each, tmp_path)
    assert path == tmp_path / V3.name / f"{SPEC.name}.jsonl"
    assert read_log(path) == [record(), slow]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / V3.name).write_text("a file in the way")
    with pytest.raises(StoreError, match=r"the tuning record cannot be written"):
        save(record(), tmp_path)


def test_the_closest_preset_goes_first() -> None:
    below = ("llvm-x86-64-v3", "llvm-x86-64-v2")
    assert presets_for(V4) == (V4.name, *below)
    assert presets_for(V3) == below
    assert presets_for(get_target("llvm-aarch64-sve")) == ("llvm-aarch64-sve", "llvm-aarch64")
    assert presets_for(get_target("cuda-sm90")) == ("cuda-sm90",)
    native = dataclasses.replace(V4, name=NATIVE, attributes={})
    assert presets_for(native) == (V4.name, *below)


def test_without_a_variable_they_lie_in_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_QOPT_RECORDS")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert records.user_folder() == Path("/data/tvm_qopt/tuning_logs")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert records.user_folder() == Path("/home/someone/.local/share/tvm_qopt/tuning_logs")
    assert records.record_folders() == (records.user_folder(), records.SHIPPED)


def test_the_key_is_of_the_records_that_a_build_may_take(own: Path, tmp_path: Path) -> None:
    native = dataclasses.replace(V4, name=NATIVE)
    targets = (V3, V4, native)

    def keys() -> list[str]:
        return [artifact_key(SPEC, target) for target in targets]

    def write(folder: Path, preset: str, spec: str = SPEC.name) -> None:
        path = log_path(folder, preset, spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record(preset=preset).to_json())

    seen = [keys()]
    for folder, preset, changed in (
        (own, V3.name, (0, 1, 2)),
        (tmp_path / "shipped", V3.name, (0, 1, 2)),
        (own, V4.name, (1, 2)),
        (own, "llvm-znver4", (2,)),  # perhaps this CPU: only LLVM knows its name
        (own, "llvm-aarch64", ()),
        (own, "cuda-sm90", ()),
    ):
        write(folder, preset)
        seen.append(keys())
        differ = tuple(i for i in range(len(targets)) if seen[-1][i] != seen[-2][i])
        assert differ == changed, preset
    write(own, V4.name, "adamw-float32-b256-p_f32-g_f32")
    assert keys() == seen[-1]
