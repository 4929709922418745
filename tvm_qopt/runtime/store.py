"""The store of built artifacts: find, else build in a child process under a lock, then load.

It reads TVM_QOPT_STORE (the folder) and TVM_QOPT_POLICY ("build", "cached", "rebuild").
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm_qopt
from tvm_qopt import errors
from tvm_qopt.errors import (
    ArtifactInvalid,
    ArtifactMissing,
    BuildError,
    DtypeMismatch,
    StaleRecord,
    StoreError,
    ToolMissing,
    UnknownName,
)
from tvm_qopt.manifest import MANIFEST, SCHEMA, artifact_key
from tvm_qopt.records import ENVIRONMENT as RECORDS
from tvm_qopt.records import user_folder
from tvm_qopt.rules import RULES
from tvm_qopt.runtime.kernel import Kernel, check_machine
from tvm_qopt.runtime.library import runtime_libraries
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, TargetPreset, cuda_target, get_target

POLICIES = ("build", "cached", "rebuild")
SAY_AFTER = 0.7  # seconds of building before a line on stderr says so
STALE_AFTER = 24 * 3600  # seconds after which the folder of a killed build is swept away
BUILDING = ".building-"
THIS_GPU = "cuda"

_kernels: dict[tuple[Path, str], Kernel] = {}
"""By folder and the text of its manifest: a folder may be built anew."""


def load(
    spec: KernelSpec | str | os.PathLike[str], *, target: str = NATIVE, policy: str | None = None
) -> Kernel:
    """The kernel of a spec for a target, or of an artifact folder.

    spec: a KernelSpec, its name (such as "adamw-dynamic8-b256-p_f32-g_f32"), or the path of a
    folder that `tvm-qopt build` wrote; a text that begins with a rule's name and has no separator
    is a name, whatever lies in this folder.  target: a preset, or "cuda" for this machine's GPU.
    policy: "build" (the default: what the store lacks is built in a child process and kept),
    "cached" (never build), "rebuild"; also by TVM_QOPT_POLICY.

    Loading runs the code of the artifact, and the hashes beside it are no signature: load only
    folders you trust.  Raises ArtifactMissing, ArtifactInvalid, BuildError, ToolMissing or
    StoreError, and UnknownName or UnsupportedSpec for the spec.
    """
    if not isinstance(spec, (KernelSpec, str, os.PathLike)):
        raise DtypeMismatch("spec", expected="a KernelSpec, its name or a path", got=repr(spec))
    if isinstance(spec, os.PathLike) or (isinstance(spec, str) and _is_folder(spec)):
        return _open(Path(spec).resolve())
    if isinstance(spec, str) and spec.partition("-")[0] not in RULES:
        raise UnknownName("rule, and no folder here,", spec, RULES)
    return load_many([spec], target=target, policy=policy)[0]


def load_many(
    specs: Sequence[KernelSpec | str], *, target: str = NATIVE, policy: str | None = None
) -> list[Kernel]:
    """The kernels of many specs; what the store lacks is built in one child process."""
    wanted = [KernelSpec.parse(spec) if isinstance(spec, str) else spec for spec in specs]
    preset = get_target(_this_gpu() if target == THIS_GPU else target)
    policy = policy or os.environ.get("TVM_QOPT_POLICY") or "build"
    if policy not in POLICIES:
        raise UnknownName("policy", policy, POLICIES)
    check_machine(preset.name, preset.kind, preset.machine, preset.features)
    root = store_folder()
    folders = [root / artifact_key(spec, preset) for spec in wanted]
    missing = {
        folder: spec
        for folder, spec in zip(folders, wanted, strict=True)
        if policy == "rebuild" or not _usable(folder, rebuild=policy == "build")
    }
    if missing and policy == "cached":
        raise ArtifactMissing(
            f"not in the store ({root}), and the policy is not to build; "
            f"run: {_command(missing, preset)}"
        )
    if missing:
        try:
            _build_under_locks(root, missing, preset, rebuild=policy == "rebuild")
        except ToolMissing as error:
            raise ToolMissing(
                f"{error} (where there is a compiler run: {_command(missing, preset)}; then set "
                f"TVM_QOPT_STORE here to a copy of that store, in place of {root})"
            ) from error
    return [_open(folder) for folder in folders]


def _command(missing: dict[Path, KernelSpec], preset: TargetPreset) -> str:
    names = " ".join(spec.name for spec in missing.values())
    return f"tvm-qopt build {names} --target {preset.name} --store"


def _this_gpu() -> str:
    """The preset for the first GPU of this machine."""
    runtime_libraries("cuda", None)
    from tvm_qopt.runtime.cuda import device_arch

    return cuda_target(device_arch(0))


def store_folder() -> Path:
    """The folder of the store, made private to the user; raises StoreError where that cannot be."""
    given = os.environ.get("TVM_QOPT_STORE")
    try:
        if not given:
            given = _needed_for_the_store("platformdirs").user_cache_dir("tvm_qopt")
        root = Path(str(given)).expanduser().absolute() / str(SCHEMA)
    except RuntimeError as error:
        raise StoreError(f"no home folder for the store ({error}); set TVM_QOPT_STORE") from error
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = root.stat()
    except OSError as error:
        raise StoreError(f"the store folder {root} cannot be made: {error}") from error
    if found.st_uid not in (os.getuid(), 0):
        raise StoreError(
            f"the store folder {root} belongs to another user, and loading runs what lies in it; "
            "set TVM_QOPT_STORE to a folder of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise StoreError(
            f"the store folder {root} may be written by other users, and loading runs what lies in "
            "it; chmod go-w it, or set TVM_QOPT_STORE to a folder of your own"
        )
    return root


def stored() -> list[Path]:
    """The artifact folders in the store."""
    return sorted(path.parent for path in store_folder().glob("*/manifest.json"))


def _needed_for_the_store(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ToolMissing(
            f"the store needs {package}, which is not installed: install tvm_qopt with its "
            "dependencies, or load an artifact by the path of its folder"
        ) from error


def _is_folder(text: str) -> bool:
    return os.sep in text or (text.partition("-")[0] not in RULES and os.path.isdir(text))


def _usable(folder: Path, *, rebuild: bool) -> bool:
    """Whether the store has a whole artifact there; a damaged one may be rebuilt."""
    if not folder.is_dir():
        return False
    try:
        _open(folder)
    except ArtifactInvalid as error:
        if not rebuild:
            raise
        warnings.warn(f"{error} (building it again)", stacklevel=4)
        return False
    return True


def _open(folder: Path) -> Kernel:
    """Load an artifact once a process."""
    try:
        key = folder, (folder / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactInvalid(f"{folder}: not an artifact: {error}") from None
    if key not in _kernels:
        _kernels[key] = Kernel.open(folder)
    return _kernels[key]


def _build_under_locks(
    root: Path, missing: dict[Path, KernelSpec], preset: TargetPreset, *, rebuild: bool
) -> None:
    """Build what is still missing once all locks are held (in one order: no two wait in a ring)."""
    filelock = _needed_for_the_store("filelock")
    locks = [filelock.FileLock(folder.with_suffix(".lock")) for folder in sorted(missing)]
    try:
        for lock in locks:
            lock.acquire()
        late = {f: s for f, s in missing.items() if rebuild or not _usable(f, rebuild=True)}
        if late:
            _build(root, late, preset)
    except OSError as error:
        raise StoreError(f"the store folder {root} cannot be used: {error}") from error
    finally:
        for lock in locks:
            lock.release()


def _build(root: Path, missing: dict[Path, KernelSpec], preset: TargetPreset) -> None:
    """Build in a child process into a folder beside, then move each artifact to its place."""
    _sweep(root)
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=root) as temporary:
        jobs = [
            {"spec": spec.name, "out": str(Path(temporary) / folder.name)}
            for folder, spec in missing.items()
        ]
        modules = sorted({name for spec in missing.values() for name in defining_modules(spec)})
        run_compiler(jobs, preset.name, cwd=temporary, modules=modules)
        for folder in missing:
            if folder.exists():
                shutil.rmtree(folder)
            (Path(temporary) / folder.name).rename(folder)
            for key in [key for key in _kernels if key[0] == folder]:
                del _kernels[key]


def defining_modules(spec: KernelSpec) -> list[str]:
    """The modules that define a spec's rule and formats and come with no import of these."""
    names = {spec.rule_.update.__module__, *(type(format_).__module__ for _, format_ in spec.slots)}
    own = ("tvm_qopt.rules", "tvm_qopt.formats")
    foreign = sorted(name for name in names if not name.startswith(own))
    if "__main__" in foreign:
        raise BuildError(
            f"{spec.name}: its rule or a format is defined in the script that runs; put it into a "
            "module of its own, which the compiler's process can import"
        )
    return foreign


def _sweep(root: Path) -> None:
    """Remove what killed builds left behind."""
    for path in root.glob(f"{BUILDING}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_AFTER:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # another process swept it


def run_compiler(
    jobs: Sequence[dict[str, Any]], target: str, *, cwd: str, modules: Sequence[str] = ()
) -> None:
    """Run `python -m tvm_qopt.compiler` on jobs; raises its errors here.

    modules: what defines rules and formats outside this package, imported there by name.
    A compiler that crashes is a BuildError.  Ctrl-C ends the child before it is raised on.  Tuning
    records that it did not take, since they are of an older definition, are warnings here.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "tvm_qopt.compiler"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=_environment_of_child(),
    )
    try:
        path_here = [os.path.abspath(folder) for folder in sys.path]  # the child has another folder
        request = {"target": target, "jobs": list(jobs), "modules": modules, "path": path_here}
        out, err = _communicate(child, json.dumps(request), jobs)
    except BaseException:
        child.kill()
        child.wait()
        raise
    said = _last_line(out)
    if child.returncode:
        _raise_from_child(child.returncode, said, err)
    for text in said.get("stale", ()):
        warnings.warn(text, StaleRecord, stacklevel=6)


def _environment_of_child() -> dict[str, str]:
    """This package is found, and so are the user's records, from another working folder."""
    package = str(Path(tvm_qopt.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if records := user_folder():
        environment[RECORDS] = str(records.absolute())
    return environment


def _communicate(
    child: subprocess.Popen[str], request: str, jobs: Sequence[dict[str, Any]]
) -> tuple[str, str]:
    try:
        return child.communicate(request, timeout=SAY_AFTER)
    except subprocess.TimeoutExpired:
        names = ", ".join(str(job["spec"]) for job in jobs)
        print(f"tvm_qopt: building {names} (once; it is kept)", file=sys.stderr, flush=True)
        return child.communicate()


def _last_line(out: str) -> dict[str, Any]:
    """What the child said at its end; nothing where it died before."""
    lines = out.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _raise_from_child(code: int, said: dict[str, Any], err: str) -> None:
    kind = getattr(errors, str(said.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, errors.QoptError):
        raise errors.rebuilt(kind, said["message"])
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    raise BuildError(f"the compiler process {how}:\n{err[-4000:]}")
