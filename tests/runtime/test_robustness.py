"""What must not end a process, lose a file or be believed: forks, Ctrl-C, odd tensors, folders."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_qopt
from tvm_qopt import errors
from tvm_qopt.errors import ArtifactInvalid, QoptError, ShapeMismatch, StoreError
from tvm_qopt.manifest import SCHEMA
from tvm_qopt.runtime import cuda
from tvm_qopt.runtime import store as stores
from tvm_qopt.runtime.arrays import CUDA

NAME = "adamw-dynamic8-b256-p_f32-g_f32"
HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
PRELUDE = f"""
import os, signal, sys, threading, time
import numpy as np, tvm_qopt
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
def make(n=200_037):
    kernel = tvm_qopt.load({NAME!r}, policy="cached")
    p, g = np.ones(n, np.float32), np.ones(n, np.float32)
    return kernel.plan(param=p, grad=g, state=kernel.init_state(p)), p
"""


@pytest.fixture(scope="module", autouse=True)
def kernel() -> tvm_qopt.Kernel:
    return tvm_qopt.load(NAME)


def run(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PRELUDE + script]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, **options
    )


@pytest.mark.parametrize("steps_in_child", [0, 1])
def test_a_forked_child_ends_as_it_should(steps_in_child: int) -> None:
    """With a pool that the child's main thread owned it would wait for workers it has not got."""
    script = f"""
plan, p = make()
plan.step(step=1, **HYPER)
child = os.fork()
if not child:
    for step in range({steps_in_child}):
        plan.step(step=step + 2, **HYPER)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr


def test_ctrl_c_in_a_step_waits_for_it_and_harms_nothing() -> None:
    """Full blocks and tail have made the same number of steps, and the arrays may go at once."""
    script = """
signal.signal(signal.SIGINT, signal.default_int_handler)
for turn in range(20):
    plan, p = make(2_000_037)
    timer = threading.Timer(0.01 + 0.001 * turn, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        for step in range(1, 10_000):
            plan.step(step=step, **HYPER)
    except KeyboardInterrupt:
        assert np.ptp(p) < 1e-5, (turn, step, p[0], p[-1])
    del plan, p
print("alive")
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_a_process_ends_while_threads_of_it_step() -> None:
    """Python unwinds a daemon thread that comes back from C++ after it, which would abort; and who
    steps in the last moments, from an exit handler, can."""
    script = """
import atexit
atexit.register(lambda: [last.step(step=1, **HYPER), print("stepped", flush=True)])
last, _ = make()
def work(plan):
    for step in range(1, 1_000_000):
        plan.step(step=step, **HYPER)
for n in (1000, 2_000_037):
    threading.Thread(target=work, args=(make(n)[0],), daemon=True).start()
time.sleep(0.1)
"""
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "stepped"), done.stderr


def test_errors_and_specs_travel_between_processes() -> None:
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, QoptError)]
    for kind in kinds:
        if issubclass(kind, errors.ArgumentMismatch):
            error: QoptError = kind("lr", expected="a number", got="a tree")
        elif kind is errors.UnknownName:
            error = errors.UnknownName("rule", "adamv", ["adamw"])
        elif kind is errors.NameTaken:
            error = errors.NameTaken("rule", "adamw")
        else:
            error = kind("what was wrong")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back)) == (kind, str(error))
    spec = tvm_qopt.load(NAME).spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    from tvm_qopt.compiler.build import build
    from tvm_qopt.targets import get_target

    spec, target = tvm_qopt.KernelSpec.of("adamw"), get_target("llvm-native")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "somebody else\'s"}')
    artifact = tmp_path / "artifact"
    shutil.copytree(tvm_qopt.load(NAME).folder, artifact)
    (artifact / "notes.txt").write_text("precious")
    for folder in (tmp_path / "app", artifact):
        before = sorted(path.name for path in folder.iterdir())
        with pytest.raises(StoreError, match="holds other files"):
            build(spec, target, folder)
        assert sorted(path.name for path in folder.iterdir()) == before


def test_a_name_is_a_name_whatever_lies_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert tvm_qopt.load(NAME).folder.parent == stores.store_folder()
    with pytest.raises(ArtifactInvalid, match="not an artifact"):
        tvm_qopt.load(f"./{NAME}")


def test_a_folder_that_was_built_anew_is_read_anew(tmp_path: Path) -> None:
    other = tvm_qopt.load("adamw-float32-b256-p_f32-g_f32")
    folder = tmp_path / "artifact"
    shutil.copytree(tvm_qopt.load(NAME).folder, folder)
    assert tvm_qopt.load(folder).spec.name == NAME
    shutil.rmtree(folder)
    shutil.copytree(other.folder, folder)
    assert tvm_qopt.load(folder).spec == other.spec


def test_another_version_of_tvm_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(tvm_qopt.load(NAME).folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["tvm"] = "0.99.0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactInvalid, match=r"built by TVM 0\.99\.0, this tvm_qopt is for 0\.27"):
        tvm_qopt.load(folder)


def test_a_foreign_target_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "run_compiler", lambda *_, **__: pytest.fail("it was built"))
    with pytest.raises(ArtifactInvalid, match="riscv64"):
        tvm_qopt.load(NAME, target="llvm-riscv64")


def test_a_relative_store_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVM_QOPT_STORE", "here")
    assert stores.store_folder() == tmp_path / "here" / str(SCHEMA)
    monkeypatch.setenv("TVM_QOPT_STORE", "~no-such-user/store")
    with pytest.raises(StoreError, match="TVM_QOPT_STORE"):
        stores.store_folder()


class OnlyDlpack:
    """An array of a library that has no more than DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_dlpack_is_enough(kernel: tvm_qopt.Kernel) -> None:
    p, g = np.ones(300, np.float32), np.ones(300, np.float32)
    state = kernel.init_state(OnlyDlpack(p))
    kernel.plan(param=OnlyDlpack(p), grad=OnlyDlpack(g), state=state).step(step=1, lr=1e-3, **HYPER)
    np.testing.assert_allclose(p, 0.999, rtol=1e-6)


class TestTorch:
    """Tensors whose storage is not what their shape says."""

    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch", reason="torch is not installed")

    def plan(self, kernel: tvm_qopt.Kernel, p: Any, g: Any) -> tvm_qopt.Plan:
        return kernel.plan(param=p, grad=g, state=kernel.init_state(p))

    def test_a_lazy_sign_is_refused(self, torch: Any, kernel: tvm_qopt.Kernel) -> None:
        p, g = torch.ones(300), torch._neg_view(torch.ones(300))
        with pytest.raises(ShapeMismatch, match=r"grad: .*resolve_neg"):
            self.plan(kernel, p, g)

    def test_a_short_storage_is_refused(self, torch: Any, kernel: tvm_qopt.Kernel) -> None:
        p, g = torch.ones(300), torch.ones(300)
        g.untyped_storage().resize_(64)
        with pytest.raises(ShapeMismatch, match="grad: expected 1200 bytes"):
            self.plan(kernel, p, g)

    @pytest.mark.parametrize("moved", ["param", "exp_avg_codes", "grad"])
    def test_memory_that_moved_is_refused(
        self, torch: Any, kernel: tvm_qopt.Kernel, moved: str
    ) -> None:
        given = {"param": torch.ones(300), "grad": torch.ones(300)}
        state = kernel.init_state(given["param"])
        plan = kernel.plan(**given, state=state)
        {**given, **state}[moved].untyped_storage().resize_(0)
        with pytest.raises(ShapeMismatch, match=f"^{moved}: expected the memory that was planned"):
            plan.step(step=1, lr=1e-3, **HYPER)

    def test_a_subclass_is_a_tensor(self, torch: Any, kernel: tvm_qopt.Kernel) -> None:
        class Mine(torch.Tensor):  # type: ignore[misc]
            pass

        p = torch.ones(300).as_subclass(Mine)
        self.plan(kernel, p, torch.ones(300)).step(step=1, lr=1e-3, **HYPER)
        assert torch.allclose(p, torch.full((300,), 0.999))


def test_a_gpu_that_an_artifact_has_no_code_for_is_named(
    kernel: tvm_qopt.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked when tensors are bound; by itself TVM says CUDA_ERROR_NO_BINARY_FOR_GPU, at a step."""
    manifest = dataclasses.replace(kernel.manifest, archs=("sm_80", "sm_90"))
    kernel = tvm_qopt.Kernel(kernel.folder, manifest, kernel.entries)
    monkeypatch.setattr(cuda, "device_arch", lambda index: ("sm_86", "sm_75")[index])
    kernel.check_runs_on((CUDA, 0))
    with pytest.raises(ArtifactInvalid, match="code for sm_80, sm_90 and this GPU is sm_75"):
        kernel.check_runs_on((CUDA, 1))
