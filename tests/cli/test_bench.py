"""`tvm-qopt bench`: its rows and bytes, on a tensor small enough to be quick; no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tvm_qopt", "bench", "--size", "10000", "--rounds", "3"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    specs = ["adamw-dynamic8-b256-p_f32-g_f32", "lamb-float32-b256-p_bf16_split-g_bf16"]
    ran = bench(*specs, "--threads", "1", "--json")
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["machine"]["threads"] == "1" and "load" in said["machine"]
    return {row["name"]: row for row in said["rows"]}


def test_each_contender_has_a_row_with_a_time(rows: dict[str, dict[str, float]]) -> None:
    assert all(row["low"] <= row["ns"] <= row["high"] for row in rows.values())
    assert all(row["ns"] > 0 for row in rows.values())
    assert next(iter(rows)).startswith("in-place")


def test_bytes_are_those_that_a_step_must_move(rows: dict[str, dict[str, float]]) -> None:
    """p, g: 4 + 4 + 4; two codes read and written: 4; 2 scales and a counter a block of 256."""
    assert rows["adamw-dynamic8-b256-p_f32-g_f32"]["bytes"] == pytest.approx(16.09, abs=0.01)
    # p and its low bits 2 + 2, g 2, m and v 4 + 4, all read twice; p, low, m, v written; a counter
    assert rows["lamb-float32-b256-p_bf16_split-g_bf16"]["bytes"] == pytest.approx(40.05, abs=0.01)


def test_an_unknown_spec_is_wrong_usage() -> None:
    ran = bench("adamv-dynamic8")
    assert ran.returncode == 2 and "adamv" in ran.stderr and "adamw" in ran.stderr
