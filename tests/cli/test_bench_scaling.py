"""`tvm-qopt bench --scaling`: sizes, threads, memory beside the tensors, a training loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import tvm_qopt
from tvm_qopt.bench import contenders, loop, machine, scaling

DYNAMIC8 = "adamw-dynamic8-b256-p_f32-g_f32"
LAMB = "lamb-dynamic8-b256-p_f32-g_f32"
MIDDLE = 1 << 22


def child(*arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [DYNAMIC8, "adamw-float32-b256-p_bf16_split-g_bf16"])
def test_a_step_needs_less_than_a_mebibyte_beside_its_tensors(name: str) -> None:
    assert memory_above(name) < 1 << 20


def test_what_a_plan_holds_is_seen() -> None:
    """Two partial norms a block: what the measurement would miss, it would miss elsewhere too."""
    workspace = MIDDLE // 256 * 2 * 4
    assert workspace <= memory_above(LAMB) < workspace + (1 << 20)


def memory_above(name: str) -> int:
    """In a process of its own, whose peak is nobody else's."""
    code = f"""
import tvm_qopt
from tvm_qopt.bench.scaling import memory_above
print(memory_above(tvm_qopt.load({name!r}), {MIDDLE}))
"""
    return int(child("-c", code).splitlines()[-1])


def test_sizes_grow_to_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes held for each parameter: 4 + 4 + 2, and 12 for a block."""
    kernel, before = tvm_qopt.load(DYNAMIC8), tvm_qopt.get_num_threads()
    assert contenders.bytes_held(kernel) == pytest.approx(10 + 12 / 256)
    free = SimpleNamespace(available=machine.RESERVE + 11 * 3000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    *points, last = scaling.growth(kernel, [1000, 3000, 9000, 27000], threads=[1, 2])
    assert [(p.size, p.threads) for p in points if isinstance(p, scaling.Point)] == [
        (1000, 1), (1000, 2), (3000, 1), (3000, 2),
    ]  # fmt: skip
    assert isinstance(last, scaling.Skipped) and "9,000 parameters" in last.name
    assert tvm_qopt.get_num_threads() == before


def test_a_denormal_second_moment_is_one() -> None:
    kernel = tvm_qopt.load("adamw-float32-b256-p_f32-g_f32")
    arrays = scaling.tensors(kernel, 1000, scaling.DENORMAL)
    scaling.step_of(kernel, arrays)()
    second = arrays["exp_avg_sq"]
    assert 0 < second.max() < 1.2e-38
    assert scaling.denormal_cost(kernel, 1000).value > 0


def test_loops_of_torch_and_ours_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(loop, "WIDTH", 32)
    torch_row, our_row = loop.loops([tvm_qopt.load(DYNAMIC8)])
    assert (torch_row.name, our_row.name) == (loop.TORCH, DYNAMIC8)
    for row in (torch_row, our_row):
        assert 0 < row.products < row.whole and 0 < row.update < row.whole


def test_the_command(tmp_path: Path) -> None:
    figure, data = tmp_path / "scaling.png", tmp_path / "scaling.json"
    command = ("-m", "tvm_qopt", "bench", "--scaling", DYNAMIC8, "--size", "100000")
    table = child(*command, "--threads", "2", "--plot", str(figure), "--json", str(data))
    assert "100,000" in table and "KiB at the peak" in table
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    found: dict[str, Any] = json.loads(data.read_text())
    assert [(p["size"], p["threads"]) for p in found["points"]] == [(100_000, 1), (100_000, 2)]
    assert found["memory"][DYNAMIC8] < 1 << 20
    assert [ratio["spec"] for ratio in found["denormal"]] == [DYNAMIC8]
