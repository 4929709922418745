"""The demo, end to end; its network's gradients against differences."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tvm_qopt
from tvm_qopt.cli import demo
from tvm_qopt.cli.app import app
from tvm_qopt.demo import compare, network, peers
from tvm_qopt.demo.train import Run

missing = [module for module in demo.NEEDS if importlib.util.find_spec(module) is None]
needs_extra = pytest.mark.skipif(
    bool(missing), reason=f"{' and '.join(missing)}: not installed (pip install 'tvm_qopt[demo]')"
)
PNG = b"\x89PNG\r\n\x1a\n"


@needs_extra
def test_demo_end_to_end(tmp_path: Path) -> None:
    root = str(Path(tvm_qopt.__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, "-m", "tvm_qopt", "demo", "--steps", "60", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    data = json.loads(run.stdout)
    figure = tmp_path / "tvm_qopt_demo" / "loss.png"
    assert data["figure"] == str(figure)
    assert figure.read_bytes().startswith(PNG)
    low_bit, full = data["runs"]
    assert low_bit["losses"][0] == full["losses"][0]  # the same weights and batch
    assert len(low_bit["losses"]) == len(full["losses"]) == 60
    assert low_bit["state_bytes"] < 0.27 * full["state_bytes"]  # (2 + 12 / 256) / 8, and rests
    for each in (low_bit, full):
        assert each["accuracy"] > 0.85
        assert each["final_loss"] < 0.4
        assert each["step_us"] > 0
    # 60 steps of 8-bit and of float32 state: the same course within a third
    assert abs(low_bit["final_loss"] / full["final_loss"] - 1) < 1 / 3


@needs_extra
def test_demo_table_says_where_the_figure_is(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = CliRunner().invoke(app, ["demo", "--steps", "2", "--seed", "1", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert str(out / "loss.png") in result.stdout
    assert "8-bit AdamW, compiled" in result.stdout


@needs_extra
def test_compare_with_json(tmp_path: Path) -> None:
    arguments = ["demo", "--compare", "--steps", "30", "--seed", "4", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["figure"] == str(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)
    tasks = {name for name, task in compare.TASKS.items() if not task.missing}
    assert set(data["summary"]) == tasks
    assert set(data["left_out"]) == compare.TASKS.keys() - tasks
    runs = {(run["task"], run["state"], run["seed"]): run for run in data["runs"]}
    assert set(runs) == set(product(tasks, compare.STATES, (4, 5, 6)))
    for (task, _, seed), run in runs.items():
        float32 = runs[task, compare.BASELINE, seed]
        assert len(run["losses"]) == 30
        assert run["losses"][0] == float32["losses"][0]  # the same weights and batch
        assert run["losses"][-1] < 0.9 * run["losses"][0]
        # 30 steps in 4 bits or more: the same course within a half
        assert abs(run["final_loss"] / float32["final_loss"] - 1) < 0.5
    for task, rows in data["summary"].items():
        float32, *others = rows
        assert float32["state"] == compare.BASELINE
        assert float32["gap"] == {"mean": 0, "low": 0, "high": 0}
        for row in others:
            assert row["bytes_per_parameter"] < 0.3 * float32["bytes_per_parameter"]
            final = [runs[task, row["state"], seed]["final_loss"] for seed in (4, 5, 6)]
            assert row["final_loss"]["low"] == min(final)
            assert row["final_loss"]["high"] == max(final)


@needs_extra
def test_the_transformer_beside_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing and one that fails are left out; the rest begins with one loss."""
    pytest.importorskip("torch")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("")
    (tmp_path / "broken" / "optim.py").write_text("raise OSError('no library here')")
    monkeypatch.syspath_prepend(tmp_path)
    gone = peers.Contender("gone AdamW", "no_such_module", "AdamW")
    broken = peers.Contender("broken AdamW", "broken", "AdamW")
    monkeypatch.setitem(peers.PEERS, "torchao", (gone, broken))
    arguments = ["demo", "--peers", "torchao", "--steps", "3", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert Path(data["figure"]).read_bytes().startswith(PNG)
    assert list(data["left_out"]) == ["gone AdamW", "broken AdamW"]
    assert "tvm_qopt[peers]" in data["left_out"]["gone AdamW"]
    assert data["left_out"]["broken AdamW"] == "OSError: no library here"
    runs = {run["name"]: run for run in data["runs"]}
    assert list(runs) == [each.title for each in peers.ALWAYS]
    assert {run["losses"][0] for run in runs.values()} == {runs[peers.BASELINE]["losses"][0]}
    assert all(run["whole_us"] > run["step_us"] > 0 for run in runs.values())
    plain, ours, low = (runs[name] for name in list(runs)[:3])
    assert plain["state_bytes"] == 8 * plain["parameters"]
    assert ours["final_loss"] == pytest.approx(plain["final_loss"], rel=1e-5)
    assert low["state_bytes"] < 0.27 * plain["state_bytes"]


@needs_extra
def test_compare_without_torch_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = replace(compare.TASKS["text"], needs="no_such_module")
    monkeypatch.setitem(compare.TASKS, "text", text)
    result = CliRunner().invoke(app, ["demo", "--compare", "--steps", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    for state in compare.STATES:
        assert state in result.stdout
    assert "seeds 0 to 2" in result.stdout
    assert f"The {text.title} was left out: no_such_module is not installed" in result.stdout
    assert str(tmp_path / "comparison.png") in result.stdout


def test_summary_pairs_runs_by_seed() -> None:
    def run(loss: float, size: int) -> Run:
        return Run(
            "", [loss], loss, 0.5, parameters=10, state_bytes=size, step_us=1.0, whole_us=2.0
        )

    runs = {compare.BASELINE: [run(1.0, 80), run(2.0, 80)], "low": [run(1.5, 20), run(2.0, 20)]}
    base, low = compare.summarise(runs)
    assert base.gap == compare.Spread(0.0, 0.0, 0.0)
    assert low.gap == compare.Spread(0.25, 0.0, 0.5)
    assert low.final_loss == compare.Spread(1.75, 1.5, 2.0)
    assert low.bytes_per_parameter == 2.0


def test_demo_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "NEEDS", {"no_such_module": "scikit-learn"})
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr == ("error: the demo needs scikit-learn: pip install 'tvm_qopt[demo]'\n")
    assert not list(tmp_path.iterdir())


@needs_extra
def test_demo_into_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file" / "x")])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: --out {tmp_path}/file/x: cannot be written")


def test_gradients_are_the_differences_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    weights = {name: w.astype(np.float64) for name, w in network.init_weights(rng).items()}
    x, labels = rng.random((8, network.SIZES[0])), rng.integers(0, 10, 8)
    grads = {name: np.zeros_like(w) for name, w in weights.items()}
    network.backward(weights, x, labels, grads)  # type: ignore[arg-type]
    for name, w in weights.items():
        direction = rng.standard_normal(w.shape)
        losses = []
        for h in (1e-6, -1e-6):
            moved = {**weights, name: w + h * direction}
            logits = network.forward(moved, x)[-1]  # type: ignore[arg-type]
            losses.append(network.loss_of(logits, labels)[0])
        slope = (losses[0] - losses[1]) / 2e-6
        np.testing.assert_allclose((grads[name] * direction).sum(), slope, rtol=1e-5, atol=1e-8)
