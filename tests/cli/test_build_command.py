"""`tvm-qopt build`, and what every command does with wrong names and with Ctrl-C."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ROOT, SPEC, error_of, invoke, python, tvm_qopt_in_process

import tvm_qopt
from tvm_qopt.cli import report


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "adamw8"
    result = invoke("build", "adamw", "--state", "dynamic8", "--param", "float32", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert "kernel.so" in result.stdout
    return out


def test_a_built_folder_is_loaded_elsewhere(artifact: Path, tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, tvm_qopt\n"
        "kernel = tvm_qopt.load(sys.argv[1])\n"
        "p = np.ones(1000, np.float32); g = np.ones_like(p)\n"
        "state = kernel.init_state(p)\n"
        "plan = kernel.plan(param=p, grad=g, state=state)\n"
        "plan.step(step=1, lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)\n"
        "print(p.min(), p.max())\n"
    )
    run = python("-c", code, str(artifact), cwd=tmp_path, TVM_QOPT_POLICY="cached")
    assert run.returncode == 0, run.stderr
    # the first step of Adam has the length lr
    np.testing.assert_allclose([float(x) for x in run.stdout.split()], 0.5, rtol=1e-6)


def test_several_specs_and_json(tmp_path: Path) -> None:
    names = [f"adamw-{state}-b128-p_f32-g_f32" for state in ("dynamic8", "float32")]
    run = tvm_qopt_in_process("build", *names, "--json", "-o", "both", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    artifacts = json.loads(run.stdout)["artifacts"]
    assert [each["spec"] for each in artifacts] == names
    for each, name in zip(artifacts, names, strict=True):
        assert Path(each["folder"]) == tmp_path / "both" / name
        assert tvm_qopt.load(Path(each["folder"])).spec.name == name


def test_rule_options_and_settings(tmp_path: Path) -> None:
    options = ["--param", "bfloat16", "--grad", "float32", "--block-size", "64"]
    settings = ["--set", "nonfinite=propagate", "--set", "zero_rule=off"]
    result = invoke("build", "adamw", *options, *settings, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    expected = tvm_qopt.KernelSpec.of(
        "adamw",
        param="bfloat16",
        grad="float32",
        block_size=64,
        nonfinite="propagate",
        zero_rule=False,
    )
    assert json.loads(result.stdout)["artifacts"][0]["spec"] == expected.name


def test_building_into_the_store() -> None:
    name = "adamw-dynamic8-b512-p_f32-g_f32"
    result = invoke("build", name, "--store", "--json")
    assert result.exit_code == 0, result.stderr
    assert tvm_qopt.load(name, policy="cached").spec.name == name
    held = json.loads(invoke("list", "--json").stdout)["store"]
    assert name in [each["spec"] for each in held["artifacts"]]


def test_the_store_takes_only_what_runs_here() -> None:
    other = "llvm-riscv64" if platform.machine() != "riscv64" else "llvm-aarch64"
    assert other in error_of(invoke("build", "adamw", "--store", "--target", other), 2)


@pytest.mark.skipif(platform.machine() == "aarch64", reason="aarch64 is no cross target here")
def test_a_missing_linker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(report, "PIPE_WIDTH", 1000)  # no cell is folded
    build: list[str | Path] = ["build", "adamw", "--target", "llvm-aarch64", "-o", tmp_path / "out"]
    result = invoke(*build)
    assert result.exit_code == 0, result.stderr
    package = "gcc-aarch64-linux-gnu"
    assert f"kernel.o only: no aarch64-linux-gnu-gcc to link it (apt install {package})" in (
        result.stdout
    )
    (data,) = json.loads(invoke(*build, "--json").stdout)["artifacts"]
    assert data["files"] == ["kernel.o"]
    assert data["missing_linker"] == "aarch64-linux-gnu-gcc"
    assert data["missing_package"] == package


def test_a_missing_cuda_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_qopt.compiler import cuda

    monkeypatch.setattr(cuda, "installed_compilers", list)
    out = tmp_path / "out"
    message = error_of(invoke("build", "adamw", "--target", "cuda-sm90", "-o", out), 1)
    assert "nvcc" in message
    assert "pip install 'tvm_qopt[cuda]'" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["build", "adamx", "-o", "x"], "unknown rule 'adamx'; known: adagrad, adam, adam_fp16"),
        (
            ["build", "adamx-dynamic8", "-o", "x"],
            "unknown rule 'adamx'; known: adagrad, adam, adam_fp16",
        ),
        (["build", "adamw", "--state", "int3", "-o", "x"], "unknown state 'int3'; known: "),
        (
            ["build", "adamw", "--target", "vax", "-o", "x"],
            "unknown target 'vax'; known: cuda-all, cuda-sm",
        ),
        (["build", "adamw", "--param", "int8", "-o", "x"], "param: one of ('float32'"),
        (["build", "adamw", "--block-size", "100", "-o", "x"], "block_size: one of (64,"),
        (["build", "adamw", "--set", "decay=never", "-o", "x"], "value of the setting decay"),
        (["build", "adamw", "--set", "colour=red", "-o", "x"], "unknown setting of adamw 'colour'"),
        (["build", "adamw-dynamic8-b256-p_f99", "-o", "x"], "unknown dtype 'f99'; known: bf16"),
        (["show", "adamw", "--entry", "middle"], "unknown entry point of llvm 'middle'; known: "),
        (["show", "adamw", "--target", "vax"], "unknown target 'vax'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_unknown_names_list_what_exists(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in error_of(invoke(*arguments), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "adamw"],
        ["build", "-o", "x"],
        ["build", "adamw", "-o", "x", "--store"],
        ["build", "adamw", "--store", "--bundle"],
        ["build", SPEC, "--state", "float32", "-o", "x"],
        ["build", "adamw", "--set", "decay", "-o", "x"],
        ["show", "adamw", "--what", "soul"],
        ["demo", "--steps", "0"],
        ["frobnicate"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr
    assert not list(tmp_path.iterdir())


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert "holds other files" in error_of(invoke("build", "adamw", "-o", tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("place", ["a file", "below a file", "a system folder"])
def test_a_folder_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    out = {"a file": file, "below a file": file / "x" / "y", "a system folder": Path("/proc/x/y")}
    assert str(out[place]) in error_of(invoke("build", "adamw", "-o", out[place]), 1)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("when", ["starting", "compiling", "storing"])
def test_interrupt_leaves_nothing(when: str, tmp_path: Path) -> None:
    where = ["--store"] if when == "storing" else ["-o", "out"]
    child = subprocess.Popen(
        [sys.executable, "-m", "tvm_qopt", "build", "adamw", *where],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "TVM_QOPT_STORE": str(tmp_path / "store")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell without job control lets background processes ignore it, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stderr is not None
    if when == "starting":
        time.sleep(0.5)
    else:
        assert "building" in child.stderr.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    # Python ends itself by the signal where it came inside exec(); a shell shows 130 for both
    assert child.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert not out
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not left


def test_an_error_of_tvm_after_ctrl_c_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ctrl-C comes in Python that TVM has called, TVM raises an error of its own kind."""

    def interrupted(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("packed function failed") from None

    from tvm_qopt.compiler import build

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(build, "build", interrupted)
    try:
        result = invoke("build", "adamw", "-o", "x")
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted" in error_of(result, 130)


def test_weights_with_a_master(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--param", "bfloat16", "--param-format", "split", "--state", "8bit"]
    result = invoke("build", "adamw", *options, "-o", str(out))
    assert result.exit_code == 0
    assert json.loads((out / "manifest.json").read_text())["spec"] == (
        "adamw-dynamic8-b256-p_bf16_split-g_bf16"
    )
