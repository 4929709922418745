"""Folders that were measured elsewhere: what is not as it was written is refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tvm_qopt.errors import RecordInvalid
from tvm_qopt.manifest import sha256_of
from tvm_qopt.measure import Device
from tvm_qopt.packed import (
    MEASURED,
    PACK,
    Candidate,
    Measured,
    Pack,
    Result,
    Search,
    read_measured,
    read_pack,
    write_json,
)

SPEC = "adamw-dynamic8-b256-p_f32-g_f32"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    candidates = (Candidate({"elements": 8}, "one", "a", "b"), Candidate({"elements": 4}, "two"))
    search = Search({"spec": SPEC, "elements": 1024}, 0, exhausted=True, candidates=candidates)
    write_json(Pack("cuda-sm90", "cuda", {SPEC: search}), tmp_path)
    results = (Result((1e-3, 2e-3)), Result((3e-3, 1e-3)))
    pack = sha256_of(tmp_path / PACK)
    write_json(Measured(pack, Device("a GPU", "sm_90"), {SPEC: results}), tmp_path)
    return tmp_path


def spoil(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_was_written_is_read(folder: Path) -> None:
    assert read_pack(folder).searches[SPEC].candidates[1].decisions == {"elements": 4}
    assert read_measured(folder).results[SPEC][0].seconds == (1e-3, 2e-3)


@pytest.mark.parametrize(
    "seconds",
    [[float("nan"), 1.0], [float("inf")], [-1.0], [0.0], "12345", [], [1.0], ["1.0"], None],
    ids=str,
)
def test_seconds_that_no_clock_says(folder: Path, seconds: Any) -> None:
    spoil(folder / MEASURED, lambda data: data["results"][SPEC][1].update(seconds=seconds))
    with pytest.raises(RecordInvalid, match=MEASURED):
        read_measured(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["results"].update({SPEC: []}),
        lambda data: data["results"][SPEC][0].update(error="both"),
        lambda data: data["device"].update(name=None),
        lambda data: data.update(device=None),
    ],
)
def test_measurements_of_another_form(folder: Path, change: Callable[[Any], None]) -> None:
    spoil(folder / MEASURED, change)
    with pytest.raises(RecordInvalid, match=MEASURED):
        read_measured(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda search: search.update(header=None),
        lambda search: search["header"].update(elements="abc"),
        lambda search: search["header"].update(elements=-64),
        lambda search: search["header"].pop("elements"),
        lambda search: search.update(seed="x"),
        lambda search: search.update(candidates=[]),
        lambda search: search["candidates"][0].update(decisions=None),
        lambda search: search["candidates"][0]["decisions"].update(elements="8"),
    ],
)
def test_packs_of_another_form(folder: Path, change: Callable[[Any], None]) -> None:
    spoil(folder / PACK, lambda data: change(data["searches"][SPEC]))
    with pytest.raises(RecordInvalid, match=PACK):
        read_pack(folder)
