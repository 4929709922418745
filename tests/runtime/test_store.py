"""The store of artifacts: one build for all who ask, nothing half-made taken, a clear word when it
cannot be used.

Most tests let a copy of one ready artifact stand for the compiler's work, so that locks, moves and
checks are real and fast; those of the compiler's process itself run it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import tvm_qopt
from tvm_qopt import manifest as manifests
from tvm_qopt.errors import (
    ArtifactInvalid,
    ArtifactMissing,
    BuildError,
    StoreError,
    ToolMissing,
    UnknownName,
    UnsupportedSpec,
)
from tvm_qopt.manifest import LIBRARY, MANIFEST, SCHEMA, artifact_key
from tvm_qopt.runtime import store as stores
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, get_target

SPEC = KernelSpec.of("adamw")
OTHER = KernelSpec.of("adamw", "float32")
HYPERS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
}
WAIT = 60.0  # seconds within which a child process must have done what is waited for

Job = dict[str, Any]


@pytest.fixture(scope="module")
def ready(store: Path) -> dict[str, Path]:
    """Spec name -> the folder of its artifact, built once for all tests."""
    kernels = tvm_qopt.load_many([SPEC, OTHER])
    return {kernel.spec.name: kernel.folder for kernel in kernels}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty store of one's own."""
    monkeypatch.setenv("TVM_QOPT_STORE", str(tmp_path / "store"))
    return tmp_path / "store" / str(SCHEMA)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, ready: dict[str, Path]) -> list[Sequence[Job]]:
    """The runs of the compiler, each of which copies ready artifacts."""
    runs: list[Sequence[Job]] = []

    def run_compiler(
        jobs: Sequence[Job], target: str, *, cwd: str, modules: Sequence[str] = ()
    ) -> None:
        runs.append(jobs)
        for job in jobs:
            shutil.copytree(ready[job["spec"]], job["out"])

    monkeypatch.setattr(stores, "run_compiler", run_compiler)
    return runs


@pytest.fixture
def artifact(tmp_path: Path, ready: dict[str, Path]) -> Path:
    """A copy of a ready artifact, to be damaged."""
    return Path(shutil.copytree(ready[SPEC.name], tmp_path / "artifact"))


def assert_works(kernel: Kernel) -> None:
    """A step moves every weight by about lr against its gradient."""
    param, grad = np.zeros(1000, np.float32), np.ones(1000, np.float32)
    plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
    assert plan.step(step=1, **HYPERS)
    np.testing.assert_allclose(param, -HYPERS["lr"], rtol=1e-5)


def leftovers(root: Path) -> list[str]:
    """What lies in a store beside artifacts and locks."""
    return [p.name for p in root.iterdir() if p.suffix != ".lock" and not (p / MANIFEST).is_file()]


def edit(folder: Path, **fields: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# --- finding, building, policies -----------------------------------------------------------------


def test_what_is_built_is_kept(root: Path, builds: list[Sequence[Job]]) -> None:
    kernel = tvm_qopt.load(SPEC)
    assert tvm_qopt.load(SPEC.name) is kernel
    assert len(builds) == 1 and stores.stored() == [kernel.folder]
    assert kernel.folder == root / artifact_key(SPEC, get_target(NATIVE))
    assert leftovers(root) == []
    assert_works(kernel)


def test_many_are_built_in_one_process(root: Path, builds: list[Sequence[Job]]) -> None:
    first = tvm_qopt.load(OTHER)
    kernels = tvm_qopt.load_many([SPEC, OTHER.name, SPEC])
    assert [kernel.spec for kernel in kernels] == [SPEC, OTHER, SPEC]
    assert kernels[0] is kernels[2] and kernels[1] is first
    assert [[job["spec"] for job in run] for run in builds] == [[OTHER.name], [SPEC.name]]


def test_the_compiler_builds_many_in_one_process(root: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    done = run_script(LOAD_COUNTED, env=spying_on_children(tmp_path, started))
    assert done.returncode == 0, done.stderr
    assert len(started.read_text().splitlines()) == 1
    assert len(stores.stored()) == 2 and leftovers(root) == []


def test_cached_never_builds_and_says_the_command(root: Path, builds: list[Sequence[Job]]) -> None:
    with pytest.raises(ArtifactMissing) as caught:
        tvm_qopt.load_many([SPEC, OTHER], policy="cached")
    command = f"tvm-qopt build {SPEC.name} {OTHER.name} --target {NATIVE} --store"
    assert command in str(caught.value) and str(root) in str(caught.value)
    assert not builds
    tvm_qopt.load(SPEC)
    assert_works(tvm_qopt.load(SPEC, policy="cached"))


def test_the_policy_may_come_from_the_environment(
    root: Path, builds: list[Sequence[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_QOPT_POLICY", "cached")
    with pytest.raises(ArtifactMissing):
        tvm_qopt.load(SPEC)
    assert_works(tvm_qopt.load(SPEC, policy="build"))


def test_rebuild_builds_again(root: Path, builds: list[Sequence[Job]]) -> None:
    old = tvm_qopt.load(SPEC)
    inode = (old.folder / LIBRARY).stat().st_ino
    new = tvm_qopt.load(SPEC, policy="rebuild")
    assert len(builds) == 2 and new is not old and new.folder == old.folder
    assert (new.folder / LIBRARY).stat().st_ino != inode
    for kernel in (old, new):  # what was loaded before goes on working
        assert_works(kernel)


def test_an_unknown_policy_names_those_there_are(root: Path) -> None:
    with pytest.raises(UnknownName, match="policy 'never'; known: build, cached, rebuild"):
        tvm_qopt.load(SPEC, policy="never")


@pytest.mark.parametrize("name", ["nosuchrule-dynamic8", "adamw-nosuchformat", "adamw-dynamic8-b7"])
def test_a_spec_that_does_not_exist_builds_nothing(
    name: str, root: Path, builds: list[Sequence[Job]]
) -> None:
    with pytest.raises((UnknownName, UnsupportedSpec)):
        tvm_qopt.load(name)
    assert not builds


# --- the key -------------------------------------------------------------------------------------


def test_the_key_is_of_spec_and_target() -> None:
    specs = [
        SPEC,
        OTHER,
        KernelSpec.of("adamw", nonfinite="propagate"),
        KernelSpec.of("adamw", block_size=64),
    ]
    targets = [get_target(name) for name in ("llvm-x86-64-v2", "llvm-x86-64-v3", "cuda-sm90")]
    keys = {artifact_key(spec, target) for spec in specs for target in targets}
    assert len(keys) == len(specs) * len(targets)
    assert artifact_key(SPEC, targets[0]) == artifact_key(KernelSpec.parse(SPEC.name), targets[0])


def test_the_key_is_of_the_sources_that_make_kernels(tmp_path: Path) -> None:
    package = Path(tvm_qopt.__file__).parent
    copy = Path(shutil.copytree(package, tmp_path / "tvm_qopt"))
    script = (
        "from tvm_qopt.manifest import artifact_key; from tvm_qopt.spec import KernelSpec\n"
        "from tvm_qopt.targets import get_target\n"
        "print(artifact_key(KernelSpec.of('adamw'), get_target('llvm-x86-64-v2')))"
    )

    def key() -> str:
        done = run_script(script, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = key()
    assert first == key()
    seen = {first}
    for changed in (
        "rules/adamw.py",
        "formats/dynamic.py",
        "compiler/build.py",
        "schedules/common.py",
        "schedules/llvm/blockwise.py",
        "update.py",
        "version.py",
    ):
        with (copy / changed).open("a") as file:
            file.write("# changed\n")
        assert key() not in seen, changed
        seen.add(key())
    with (copy / "runtime/threads.py").open("a") as file:
        file.write("# changed\n")
    assert key() in seen


# --- processes -----------------------------------------------------------------------------------

LOAD = f"""
import tvm_qopt
kernel = tvm_qopt.load({SPEC.name!r})
print((kernel.folder / "kernel.so").stat().st_ino)
"""
LOAD_COUNTED = f"import tvm_qopt; tvm_qopt.load_many([{SPEC.name!r}, {OTHER.name!r}])"


def run_script(
    script: str, *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=2 * WAIT
    )


def start_script(script: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a job in the background of a shell inherits an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def with_site(folder: Path, text: str) -> dict[str, str]:
    """An environment in which each compiler process runs a text before anything else."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    body = "".join(f"    {line}\n" for line in text.strip().splitlines())
    is_compiler = "import os, signal, sys, time\nif 'tvm_qopt.compiler' in sys.orig_argv:\n"
    (site / "sitecustomize.py").write_text(is_compiler + body)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(site), inherited)))}


def spying_on_children(folder: Path, log: Path) -> dict[str, str]:
    """An environment in which each compiler process writes a line."""
    return with_site(folder, f"open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n')")


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs: not gone, and not a zombie that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_processes_build_once(root: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    env = spying_on_children(tmp_path, started)
    processes = [start_script(LOAD, env) for _ in range(3)]
    outcomes = [process.communicate(timeout=2 * WAIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outcomes
    assert len(started.read_text().splitlines()) == 1
    assert len({out for out, _ in outcomes}) == 1
    assert leftovers(root) == []


def test_a_long_build_is_announced_once(root: Path, tmp_path: Path) -> None:
    done = run_script(LOAD, env=with_site(tmp_path, "time.sleep(1)"))
    assert done.stderr == f"tvm_qopt: building {SPEC.name} (once; it is kept)\n"
    assert run_script(LOAD).stderr == ""


KILLED = f"""
import os, pathlib, shutil, signal, sys, threading
import tvm_qopt
from tvm_qopt.runtime import store
ready, at = dict(pair.split("=") for pair in sys.argv[1].split(",")), sys.argv[2]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def run_compiler(jobs, target, *, cwd, modules=()):
    if at == "started":
        die()
    shutil.copytree(ready[jobs[0]["spec"]], jobs[0]["out"])
    if at == "half built":
        die()
    shutil.copytree(ready[jobs[1]["spec"]], jobs[1]["out"])
    if at == "without a manifest":
        os.unlink(os.path.join(jobs[0]["out"], "manifest.json"))
        die()
    if at == "built":
        die()

store.run_compiler = run_compiler
rename, rmtree = pathlib.Path.rename, shutil.rmtree
if at == "one moved":
    pathlib.Path.rename = lambda path, to: (rename(path, to), die())
policy = "build"
if at in ("one removed", "one half removed"):
    at = ""
    tvm_qopt.load_many([{SPEC.name!r}, {OTHER.name!r}])
    policy, at = "rebuild", sys.argv[2]
    def remove(folder, **_):
        if at == "one removed":
            rmtree(folder)
        else:
            os.unlink(os.path.join(folder, "kernel.so"))
        die()
    store.shutil.rmtree = remove
tvm_qopt.load_many([{SPEC.name!r}, {OTHER.name!r}], policy=policy)
"""
WHOLE_AFTER = {"one moved": 1, "one removed": 1}  # artifacts that may be taken; 0 where not named


@pytest.mark.parametrize(
    "moment",
    [
        "started",
        "half built",
        "without a manifest",
        "built",
        "one moved",
        "one removed",
        "one half removed",
    ],
)
def test_a_build_killed_at_any_moment_leaves_nothing_to_take(
    moment: str, root: Path, ready: dict[str, Path], builds: list[Sequence[Job]]
) -> None:
    known = ",".join(f"{name}={folder}" for name, folder in ready.items())
    command = [sys.executable, "-c", KILLED, known, moment]
    died = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT)
    assert died.returncode == -signal.SIGKILL, died.stderr
    whole = 0
    for spec in (SPEC, OTHER):
        try:
            assert_works(tvm_qopt.load(spec, policy="cached"))
            whole += 1
        except ArtifactMissing:
            pass
        except ArtifactInvalid as error:
            assert moment == "one half removed" and "missing" in str(error)
            whole += 2 * (spec == OTHER) - 1  # the other one is whole
    assert whole == WHOLE_AFTER.get(moment, 0)
    if moment == "one half removed":
        with pytest.warns(UserWarning, match="building it again"):
            kernels = tvm_qopt.load_many([SPEC, OTHER])
    else:
        kernels = tvm_qopt.load_many([SPEC, OTHER])
    for kernel in kernels:
        assert_works(kernel)


def test_a_process_killed_while_its_compiler_runs_leaves_nothing(
    root: Path, tmp_path: Path, builds: list[Sequence[Job]]
) -> None:
    started = tmp_path / "started"
    parent = start_script(LOAD, spying_on_children(tmp_path, started))
    wait_for(lambda: started.exists() and started.read_text())
    parent.kill()
    parent.communicate()
    assert stores.stored() == []
    with pytest.raises(ArtifactMissing):
        tvm_qopt.load(SPEC, policy="cached")
    assert_works(tvm_qopt.load(SPEC))  # the lock went with its owner
    child = int(started.read_text())
    wait_for(lambda: not alive(child))
    assert stores.stored() == [tvm_qopt.load(SPEC).folder]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_compiler_that_dies_is_a_build_error(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = with_site(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    with pytest.raises(BuildError, match=f"the compiler process died of {name}"):
        tvm_qopt.load(SPEC)
    assert leftovers(root) == [] and stores.stored() == []


@pytest.mark.parametrize("after", [0.3, 1.2])
def test_a_compiler_killed_at_work_is_a_build_error(
    after: float, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import threading\n"
        f"threading.Timer({after}, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "import tvm_qopt.compiler.build as b\n"
        "b._manifest = lambda *_: time.sleep(60)"  # all is written but the manifest
    )
    env = with_site(tmp_path, text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((env["PYTHONPATH"], package_folder())))
    with pytest.raises(BuildError, match="died of SIGKILL"):
        tvm_qopt.load(SPEC)
    assert leftovers(root) == [] and stores.stored() == []


def package_folder() -> str:
    return str(Path(tvm_qopt.__file__).parent.parent)


def test_what_a_compiler_says_last_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = with_site(tmp_path, "print('not JSON'); sys.stderr.write('the reason'); os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    with pytest.raises(BuildError, match=r"failed with exit code 3:\nthe reason"):
        tvm_qopt.load(SPEC)


def test_an_error_of_the_compiler_keeps_its_kind(root: Path, tmp_path: Path) -> None:
    job = {"spec": "nosuchrule-dynamic8", "out": str(tmp_path / "out")}
    with pytest.raises(UnknownName, match=r"unknown rule 'nosuchrule'; known: .*adamw"):
        stores.run_compiler([job], NATIVE, cwd=str(tmp_path))


def test_without_a_compiler_the_command_for_another_machine_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = with_site(tmp_path, "sys.modules['tvm'] = None")
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    with pytest.raises(ToolMissing, match="the compiler is not installed") as caught:
        tvm_qopt.load_many([SPEC, OTHER])
    command = f"tvm-qopt build {SPEC.name} {OTHER.name} --target {NATIVE} --store"
    assert command in str(caught.value) and str(root) in str(caught.value)


@pytest.mark.parametrize("whole_group", [True, False])
def test_ctrl_c_ends_a_build_and_leaves_nothing(
    whole_group: bool, root: Path, tmp_path: Path, builds: list[Sequence[Job]]
) -> None:
    started = tmp_path / "started"
    env = with_site(
        tmp_path, f"open({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    parent = start_script(LOAD, env)
    wait_for(lambda: started.exists() and started.read_text())
    if whole_group:  # as a terminal does
        os.killpg(parent.pid, signal.SIGINT)
    else:
        parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=WAIT)
    assert parent.returncode == -signal.SIGINT and "KeyboardInterrupt" in said
    child = int(started.read_text())
    wait_for(lambda: not alive(child))
    assert leftovers(root) == [] and stores.stored() == []
    assert_works(tvm_qopt.load(SPEC))


def test_what_killed_builds_left_is_swept_a_day_later(
    root: Path, builds: list[Sequence[Job]]
) -> None:
    tvm_qopt.load(OTHER)
    old, new = root / f"{stores.BUILDING}old", root / f"{stores.BUILDING}new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "part").write_text("")
    long_ago = time.time() - stores.STALE_AFTER - 60
    os.utime(old, (long_ago, long_ago))
    tvm_qopt.load(SPEC)
    assert not old.exists() and new.exists()


# --- a folder that cannot be used ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_store_that_others_may_write_is_refused(
    mode: int, root: Path, builds: list[Sequence[Job]]
) -> None:
    tvm_qopt.load(SPEC)
    root.chmod(mode)
    with pytest.raises(StoreError, match=r"may be written by other users.*chmod go-w"):
        tvm_qopt.load(SPEC)


def test_a_new_store_is_private(root: Path, builds: list[Sequence[Job]]) -> None:
    before = os.umask(0)
    try:
        tvm_qopt.load(SPEC)
    finally:
        os.umask(before)
    assert root.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
def test_a_store_of_another_user_is_refused(root: Path, builds: list[Sequence[Job]]) -> None:
    tvm_qopt.load(SPEC)
    os.chown(root, 65534, -1)
    with pytest.raises(StoreError, match="belongs to another user"):
        tvm_qopt.load(SPEC)


@pytest.mark.parametrize("place", ["/proc/store", "a file"])
def test_a_store_that_cannot_be_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    folder = tmp_path / place  # an absolute path stays as it is
    monkeypatch.setenv("TVM_QOPT_STORE", str(folder))
    with pytest.raises(StoreError, match=f"{folder}/{SCHEMA} cannot be made"):
        tvm_qopt.load(SPEC)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory, with options; skips where that is not allowed."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"mounting is not allowed: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def test_a_full_store(mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mounted("size=32k")
    monkeypatch.setenv("TVM_QOPT_STORE", str(folder))
    with pytest.raises(StoreError, match=f"{folder}.*No space left on device"):
        tvm_qopt.load(SPEC)
    assert stores.stored() == [] and leftovers(folder / str(SCHEMA)) == []


def test_a_read_only_store(mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mounted("size=1m")
    (folder / str(SCHEMA)).mkdir(mode=0o700)
    remount = ["mount", "-o", "remount,ro", str(folder)]
    subprocess.run(remount, check=True, capture_output=True)
    monkeypatch.setenv("TVM_QOPT_STORE", str(folder))
    with pytest.raises(StoreError, match=f"{folder}.*Read-only file system"):
        tvm_qopt.load(SPEC)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_a_store_error(
    code: int, root: Path, builds: list[Sequence[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(path: Path, target: Path) -> Path:
        raise OSError(code, os.strerror(code), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(StoreError, match=f"{root} cannot be used.*{os.strerror(code)}"):
            tvm_qopt.load(SPEC)
    assert leftovers(root) == [] and stores.stored() == []
    assert_works(tvm_qopt.load(SPEC))


# --- artifacts that must not be loaded -----------------------------------------------------------


def truncate(folder: Path) -> None:
    os.truncate(folder / LIBRARY, (folder / LIBRARY).stat().st_size // 2)


def alter(folder: Path) -> None:
    data = bytearray((folder / LIBRARY).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / LIBRARY).write_bytes(data)


def empty(folder: Path) -> None:
    (folder / LIBRARY).write_bytes(b"")


def remove(folder: Path) -> None:
    (folder / LIBRARY).unlink()


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "altered",
    alter: "altered",
    empty: "altered",
    remove: "missing",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_refused_by_path(
    damage: Callable[[Path], None], artifact: Path
) -> None:
    damage(artifact)
    with pytest.raises(ArtifactInvalid, match=f"{LIBRARY}: .*{DAMAGES[damage]}; build .* again"):
        tvm_qopt.load(artifact)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_in_the_store_is_built_again(
    damage: Callable[[Path], None], root: Path, ready: dict[str, Path], builds: list[Sequence[Job]]
) -> None:
    folder = root / artifact_key(SPEC, get_target(NATIVE))
    root.mkdir(parents=True, mode=0o700)
    shutil.copytree(ready[SPEC.name], folder)
    damage(folder)
    with pytest.raises(ArtifactInvalid):
        tvm_qopt.load(SPEC, policy="cached")
    with pytest.warns(UserWarning, match=f"{folder}.*{DAMAGES[damage]}.*building it again"):
        kernel = tvm_qopt.load(SPEC)
    assert len(builds) == 1
    assert_works(kernel)


def test_a_whole_artifact_loads_by_path(artifact: Path) -> None:
    for path in (artifact, str(artifact)):
        assert_works(tvm_qopt.load(path))


def test_a_folder_that_is_no_artifact(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ArtifactInvalid, match="not an artifact"):
            tvm_qopt.load(path)


def test_a_manifest_of_a_later_schema(artifact: Path) -> None:
    edit(artifact, schema=SCHEMA + 1)
    words = f"manifest of schema {SCHEMA + 1}, tvm_qopt .* reads {SCHEMA}; build it again"
    with pytest.raises(ArtifactInvalid, match=words):
        tvm_qopt.load(artifact)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"null", b"[]", b"42", b'"text"', b"{}", b"\xff\xfe\x00", b'{"schema": 1}']
)
def test_a_manifest_that_is_garbage(text: bytes, artifact: Path) -> None:
    (artifact / MANIFEST).write_bytes(text)
    with pytest.raises(ArtifactInvalid, match=str(artifact)):
        tvm_qopt.load(artifact)


@pytest.mark.parametrize("value", [None, 5, "text", ["nothing"], [[]], {"a": 1}])
@pytest.mark.parametrize(
    "field",
    ["entries", "features", "files", "kind", "machine", "scalars", "spec", "tensors"],
)
def test_a_manifest_with_a_wrong_field(field: str, value: Any, artifact: Path) -> None:
    edit(artifact, **{field: value})
    with pytest.raises(ArtifactInvalid, match=str(artifact)):
        tvm_qopt.load(artifact)


def test_a_manifest_that_lacks_a_field_or_has_one_more(artifact: Path) -> None:
    edit(artifact, surprise=1)
    with pytest.raises(ArtifactInvalid, match=r"unknown fields .*surprise"):
        tvm_qopt.load(artifact)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/hostname", "lib/../../elsewhere"])
def test_a_manifest_that_names_files_outside(name: str, artifact: Path) -> None:
    (artifact.parent / "elsewhere").write_text("")
    files = json.loads((artifact / MANIFEST).read_text())["files"]
    edit(artifact, files={**files, name: manifests.sha256_of(artifact.parent / "elsewhere")})
    with pytest.raises(ArtifactInvalid, match="outside the artifact"):
        tvm_qopt.load(artifact)


def test_a_module_for_features_that_this_cpu_lacks(artifact: Path) -> None:
    edit(artifact, features=["avx1024"], target="llvm-x86-64-v9")
    words = "built for llvm-x86-64-v9, this CPU lacks avx1024; build it with --target llvm-native"
    with pytest.raises(ArtifactInvalid, match=words):
        tvm_qopt.load(artifact)


def test_a_module_for_another_machine(artifact: Path) -> None:
    edit(artifact, machine="sparc64")
    with pytest.raises(ArtifactInvalid, match=r"built for .* \(sparc64\), this machine is"):
        tvm_qopt.load(artifact)


def test_a_module_of_a_kernel_with_other_arguments(artifact: Path) -> None:
    edit(artifact, spec=OTHER.name)
    with pytest.raises(ArtifactInvalid, match="takes other arguments"):
        tvm_qopt.load(artifact)


def test_another_version_of_the_interface(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_ffi, "__version__", "0.1.15")
    with pytest.raises(
        ArtifactInvalid, match=r"0\.1\.15 is installed; pip install 'apache-tvm-ffi"
    ):
        tvm_qopt.load(artifact)
