"""`tvm-qopt tune` for GPUs: OpenCL on this machine (PoCL) and by a packed folder, CUDA packed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import opencl_runner
import pytest
from typer.testing import CliRunner

import tvm_qopt
from tvm_qopt import reference, sample
from tvm_qopt.cli.app import app
from tvm_qopt.compiler.build import select
from tvm_qopt.compiler.cuda import find_cuda_compiler
from tvm_qopt.devices import surroundings
from tvm_qopt.errors import BuildError
from tvm_qopt.manifest import MANIFEST, OPENCL_SOURCE, Manifest, sha256_of
from tvm_qopt.packed import MEASURED, PACK
from tvm_qopt.records import read_log
from tvm_qopt.runtime.cuda import check_cubins
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

SPEC = KernelSpec.parse("sgd-float32-b256")
OTHER = "sgd-float32-b512"
SIZE = ["--size", "10000"]


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def pocl() -> None:
    if why := opencl_runner.why_missing(oclgrind=False):
        pytest.skip(why)


def check_selected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is what a build takes, and what `show` prints; the kernel is right with it."""
    record = read_log(path)[0]
    assert (record.preset, record.threads) == ("opencl", 0) and record.device
    monkeypatch.setenv("TVM_QOPT_RECORDS", str(path.parent.parent))
    assert select(SPEC, get_target("opencl")).record == record
    shown = invoke("show", SPEC.name, "--target", "opencl")
    assert f"# schedule: record {record.hash} of opencl: " in shown.stdout
    kernel = tvm_qopt.load(SPEC, target="opencl")
    assert kernel.manifest.schedule == {"kind": "tuned", "record": record.hash}
    import pyopencl as cl
    import pyopencl.array as arrays

    queue = cl.CommandQueue(cl.create_some_context(interactive=False))
    before = sample.arguments(SPEC, 5000, 7)
    names = ("param", "grad", "momentum_buffer", "nonfinite_count")
    held = {name: arrays.to_device(queue, before[name]) for name in names}
    given = {name: held.pop(name) for name in ("param", "grad")}
    step = sample.STEPS + 1
    kernel.plan(**given, state=held).step(step=step, **sample.hyper_values(SPEC))
    got = {name: x.get() for name, x in {**given, **held}.items()}
    assert reference.disagreement(SPEC, before, reference.step(SPEC, before), got) is None


# --- on this machine ---


@pytest.mark.usefixtures("pocl")
def test_opencl_is_tuned_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = ["tune", SPEC.name, "--target", "opencl", *SIZE, "-o", tmp_path, "--json"]
    result = invoke(*tune, "--trials", "1")
    assert result.exit_code == 0, result.stderr
    result = invoke(*tune, "--resume")
    assert result.exit_code == 0, result.stderr
    (tuned,) = json.loads(result.stdout)["tuned"]
    assert tuned["exhausted"] and 1 < len(tuned["trials"]) < 12 and not tuned["rejected"]
    assert not any(trial["error"] for trial in tuned["trials"])
    check_selected(Path(tuned["path"]), monkeypatch)


# --- where there is no compiler ---


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack for OpenCL, measured in an environment and a folder without our sources."""
    if why := opencl_runner.why_missing(oclgrind=False):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("away") / "packed"
    result = invoke("tune", SPEC.name, "--target", "opencl", *SIZE, "--pack", folder)
    assert result.exit_code == 0, result.stderr
    assert f"{SPEC.name} --target opencl --measured {folder}" in result.stderr
    done = run_script(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels are right" in done.stdout
    return folder


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """Away from this clone, and without a compiler: TVM cannot be imported there."""
    blocked = folder.parent / "blocked"
    (blocked / "tvm").mkdir(parents=True, exist_ok=True)
    (blocked / "tvm" / "__init__.py").write_text("raise ImportError('no compiler here')")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TVM"))}
    env["PYTHONPATH"] = str(blocked)
    command = [sys.executable, "-P", str(folder / "measure.py")]
    if sys.version_info < (3, 11):
        command.remove("-P")
    return subprocess.run(
        command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(packed, tmp_path / "copy")


def test_what_was_measured_elsewhere_becomes_a_record(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = json.loads((packed / MEASURED).read_text())
    results = said["results"][SPEC.name]
    assert len(results) > 1 and all(len(each["seconds"]) == 15 for each in results)
    take = ["tune", SPEC.name, "--target", "opencl", "--measured", packed, "-o", tmp_path, "--json"]
    result = invoke(*take)
    assert result.exit_code == 0, result.stderr
    (tuned,) = json.loads(result.stdout)["tuned"]
    assert tuned["exhausted"] and len(tuned["trials"]) == len(results)
    assert tuned["record"]["device"] == said["device"]["name"]
    best = min(np.median(each["seconds"]) for each in results)
    assert tuned["record"]["seconds"] == best
    check_selected(Path(tuned["path"]), monkeypatch)


def take(folder: Path, out: Path, spec: str = SPEC.name, target: str = "opencl") -> str:
    """What taking a folder that does not fit says, in one line."""
    result = invoke("tune", spec, "--target", target, "--measured", folder, "-o", out)
    assert result.exit_code in (1, 2), result.output
    assert not list(out.glob("*/*.jsonl"))
    return " ".join(result.stderr.split())


def test_a_folder_of_another_search_is_refused(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--measured" in take(copy, out, spec=OTHER) and OTHER in take(copy, out, spec=OTHER)
    said = take(copy, out, target="cuda-sm90")
    assert f"--measured: {copy} was packed for opencl, and --target is cuda-sm90" in said
    assert "not a folder that tvm-qopt tune --pack made" in take(tmp_path, out)
    (copy / MEASURED).unlink()
    assert "run python measure.py of that folder on the machine first" in take(copy, out)


def edit(path: Path, change: Any) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_folder_that_is_out_of_date_is_refused(copy: Path, tmp_path: Path) -> None:
    def age(data: Any) -> None:
        data["searches"][SPEC.name]["header"]["workload"] = "00"

    edit(copy / PACK, age)
    assert "measured with another pack.json" in take(copy, tmp_path / "out")
    edit(copy / MEASURED, lambda data: data.update(pack=sha256_of(copy / PACK)))
    assert "was packed for another workload" in take(copy, tmp_path / "out")
    edit(copy / MEASURED, lambda data: data["results"].update({SPEC.name: []}))
    assert "lacks candidates of pack.json" in take(copy, tmp_path / "out")


def test_altered_artifacts_are_not_measured(copy: Path) -> None:
    source = next(copy.glob(f"artifacts/*/*/{OPENCL_SOURCE}"))
    source.write_text(source.read_text() + "\n")
    done = run_script(copy)
    assert done.returncode == 1 and f"{source}: truncated or altered" in done.stderr
    edit(
        source.parent / MANIFEST, lambda data: data["files"].update({source.name: "0"})
    )  # and its hash with it
    done = run_script(copy)
    assert done.returncode == 1 and "not the one that was packed" in done.stderr


def test_wrong_and_broken_kernels_are_left_out(copy: Path, tmp_path: Path) -> None:
    """The second candidate computes something else, the third is no OpenCL C."""
    candidates = json.loads((copy / PACK).read_text())["searches"][SPEC.name]["candidates"]
    assert len(candidates) > 2
    changes = {1: lambda text: text.replace("_ptr[", "_ptr[0 * "), 2: lambda text: text + "}"}
    for number, change in changes.items():
        folder = copy / candidates[number]["artifact"]
        source = folder / OPENCL_SOURCE
        source.write_text(change(source.read_text()))
        new = sha256_of(source)
        edit(folder / MANIFEST, lambda data, new=new: data["files"].update({OPENCL_SOURCE: new}))
        candidates[number]["manifest"] = sha256_of(folder / MANIFEST)
    edit(copy / PACK, lambda data: data["searches"][SPEC.name].update(candidates=candidates))
    done = run_script(copy)
    assert done.returncode == 0, done.stderr
    results = json.loads((copy / MEASURED).read_text())["results"][SPEC.name]
    assert results[0]["seconds"] and results[0]["error"] is None
    assert results[1]["error"].startswith("wrong: ") and not results[1]["seconds"]
    assert "the OpenCL compiler of" in results[2]["error"]
    out = ["-o", tmp_path / "out"]
    taken = invoke("tune", SPEC.name, "--target", "opencl", "--measured", copy, *out)
    assert taken.exit_code == 0, taken.stderr
    assert taken.stderr.count(f"failed: {SPEC.name}: ") == 2


# --- CUDA ---


def test_cuda_is_packed_with_all_that_it_needs(tmp_path: Path) -> None:
    if find_cuda_compiler() is None:
        pytest.skip("no nvcc and no NVRTC: pip install 'tvm_qopt[cuda]'")
    folder = tmp_path / "packed"
    tune = ["tune", SPEC.name, "--target", "cuda-sm90", "--trials", "2", "--pack", folder, "--json"]
    result = invoke(*tune)
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["kernels"] == {SPEC.name: 2} and said["bytes"] < 64 << 20
    manifests = [Manifest.from_json(p.read_text(), where="") for p in folder.rglob(MANIFEST)]
    assert len(manifests) == 2 and len({m.files["kernel.so"] for m in manifests}) == 2
    for manifest in manifests:
        assert manifest.schedule["kind"] == "tried" and "main_any" in manifest.entries
        check_cubins(manifest.archs, "sm_90")
    assert {path.name for path in (folder / "lib").iterdir()} == {
        "libtvm_runtime.so",
        "libtvm_runtime_cuda.so",
    }
    assert (folder / "site" / "tvm_ffi" / "lib" / "libtvm_ffi.so").is_file()
    assert not (folder / "site" / "tvm_qopt" / "compiler").exists()
    done = run_script(folder)  # no GPU here
    if done.returncode:
        assert "error: " in done.stderr and "Traceback" not in done.stderr
    result = invoke(*tune)
    assert result.exit_code == 1 and f"{folder}: is not empty" in result.stderr


def test_a_pack_must_be_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(2000))
    assert surroundings.check_size(tmp_path) == 2000
    monkeypatch.setattr(surroundings, "MOST_BYTES", 1000)
    with pytest.raises(BuildError, match="fewer specs, fewer --trials or one architecture"):
        surroundings.check_size(tmp_path)
