"""The wheel, and a bundled artifact, in environments of their own and away from the sources."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tvm_qopt.compiler.build import build
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, get_target

ROOT = Path(__file__).parent.parent.parent
LEFT_BEHIND = (".*", "__pycache__", "*.egg-info", "build", "dist", "tests")
SPEC = "adamw-dynamic8-b256-p_f32-g_f32"
SIZE = 1000  # full blocks and a tail

STEP = """
import sys
import numpy as np
import tvm_qopt

what, inputs, outputs = sys.argv[1:]
given = np.load(inputs)
kernel = tvm_qopt.load(what)
param, grad = given["param"], given["grad"]
state = kernel.init_state(param)
plan = kernel.plan(param=param, grad=grad, state=state)
for step in (1, 2, 3):
    plan.step(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step)
np.savez(outputs, param=param, **state)
"""


def run(command: Sequence[str | Path], cwd: Path, **env: str) -> str:
    """The output of a command that must succeed, in an environment without our own paths."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=clean | env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a copy of the sources, which it leaves as they are."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(*LEFT_BEHIND)
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignore)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        folder,
        source,
    ]
    if setuptools_is_new_enough():  # else pip fetches one
        command.insert(4, "--no-build-isolation")
    run(command, folder)
    (made,) = folder.glob("*.whl")
    return made


def setuptools_is_new_enough() -> bool:
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return False
    return int(version.partition(".")[0]) >= 77


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    param, grad = (rng.normal(size=SIZE).astype(np.float32) for _ in range(2))
    path = tmp_path / "inputs.npz"
    np.savez(path, param=param, grad=grad)
    return path


def new_environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of a virtual environment that holds the wheel and nothing else."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--no-deps", "--no-index", wheel], folder)
    return python


def site_packages(python: Path) -> Path:
    (found,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return found


def link_distribution(name: str, into: Path) -> None:
    """Make a package of this environment, alone, importable in another."""
    files = importlib.metadata.distribution(name).files or []
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        (into / top).symlink_to(Path(sysconfig.get_path("platlib")) / top)


def assert_same_step_here(what: str, inputs: Path, outputs: Path, folder: Path) -> None:
    """Three steps there left what three steps here leave, bit for bit."""
    here = folder / "here.npz"
    run([sys.executable, "-c", STEP, what, inputs, here], folder, PYTHONPATH=str(ROOT))
    with np.load(here) as mine, np.load(outputs) as theirs, np.load(inputs) as given:
        assert sorted(mine) == sorted(theirs)
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
        assert not np.array_equal(mine["param"], given["param"])


def test_the_wheel_holds_every_module_and_no_test(wheel: Path) -> None:
    package = ROOT / "tvm_qopt"
    modules = {
        path.relative_to(ROOT).as_posix()
        for folder in (package, *(p for p in package.rglob("*") if p.is_dir()), *linked(package))
        for path in folder.glob("*.py")
    }
    assert "tvm_qopt/schedules/llvm/blockwise.py" in modules
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert not [i.filename for i in archive.infolist() if (i.external_attr >> 28) == 0o12]
    assert modules - names == set()
    assert {n for n in names if n.endswith(".py")} - modules == set()
    assert {"tvm_qopt/py.typed", "tvm_qopt/tuning_logs/README.md"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def linked(package: Path) -> list[Path]:
    """The folders behind the package's symbolic links, as they are named inside it."""
    links = [path for path in package.iterdir() if path.is_symlink()]
    inside = [
        link / p.relative_to(link.resolve()) for link in links for p in link.resolve().rglob("*")
    ]
    return [*links, *(path for path in inside if path.is_dir())]


def test_the_wheel_works_away_from_the_sources(wheel: Path, inputs: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "environment", wheel)
    site = site_packages(python)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run([python, "-c", "import tvm_qopt; print(tvm_qopt.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(site)
    store, outputs = str(tmp_path / "store"), tmp_path / "outputs.npz"
    run([python, "-c", STEP, SPEC, inputs, outputs], tmp_path, TVM_QOPT_STORE=store)
    assert_same_step_here(SPEC, inputs, outputs, tmp_path)
    listed = run([python.parent / "tvm-qopt", "list"], tmp_path, TVM_QOPT_STORE=store)
    for name in ("adamw", "dynamic8", NATIVE):
        assert name in listed


def test_a_bundle_needs_numpy_and_the_interface_alone(
    wheel: Path, inputs: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    manifest = build(KernelSpec.parse(SPEC), get_target(NATIVE), artifact, bundle=True)
    assert "lib/libtvm_runtime.so" in manifest.files
    python = new_environment(tmp_path / "environment", wheel)
    for name in ("numpy", "apache-tvm-ffi", "typing_extensions"):
        link_distribution(name, site_packages(python))
    absent = ["tvm", "filelock", "platformdirs", "psutil", "rich", "typer"]
    script = f"import importlib.util as i; print([n for n in {absent} if i.find_spec(n)])"
    assert run([python, "-c", script], tmp_path) == "[]\n"

    outputs = tmp_path / "outputs.npz"
    run([python, "-c", STEP, artifact, inputs, outputs], tmp_path)
    assert_same_step_here(str(artifact), inputs, outputs, tmp_path)


def test_without_a_bundle_the_missing_runtime_is_named(wheel: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    build(KernelSpec.parse(SPEC), get_target(NATIVE), artifact)
    python = new_environment(tmp_path / "environment", wheel)
    for name in ("numpy", "apache-tvm-ffi", "typing_extensions"):
        link_distribution(name, site_packages(python))
    script = (
        "import sys, tvm_qopt\n"
        "from tvm_qopt.errors import ToolMissing\n"
        "try: tvm_qopt.load(sys.argv[1])\n"
        "except ToolMissing as error: print(error)\n"
    )
    said = run([python, "-c", script, artifact], tmp_path)
    assert "libtvm_runtime.so cannot be loaded" in said
    assert "install apache-tvm, or build the artifact with --bundle" in said


def test_a_bundle_changes_nothing_else(tmp_path: Path) -> None:
    plain, bundled = (
        build(KernelSpec.parse(SPEC), get_target(NATIVE), tmp_path / str(bundle), bundle=bundle)
        for bundle in (False, True)
    )
    assert plain.key == bundled.key
    assert set(bundled.files) - set(plain.files) == {"lib/libtvm_runtime.so"}


@pytest.mark.parametrize("loaded", ["tvm", "tvm_qopt.compiler.build"])
def test_a_bundle_is_loaded_beside_a_runtime_that_is_there(
    loaded: str, inputs: Path, tmp_path: Path
) -> None:
    """Two copies of the runtime in one process would end it: the one that is there is used."""
    artifact, outputs = tmp_path / "artifact", tmp_path / "outputs.npz"
    build(KernelSpec.parse(SPEC), get_target(NATIVE), artifact, bundle=True)
    script = f"import {loaded}\n{STEP}"
    run([sys.executable, "-c", script, artifact, inputs, outputs], tmp_path, PYTHONPATH=str(ROOT))
    assert_same_step_here(str(artifact), inputs, outputs, tmp_path)
