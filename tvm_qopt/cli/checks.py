"""The checks of `doctor`.  What may be broken (TVM, its libraries) is tried in a child process, so
that a crash there is a line here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tvm_qopt
from tvm_qopt.cli.machine import cpu_level, gpu_archs
from tvm_qopt.errors import HyperOutOfRange, StoreError, ToolMissing
from tvm_qopt.targets import find_linker, host_features, native
from tvm_qopt.version import FFI_RANGE, FFI_VERSION, TVM_VERSION

OK, WARNING, FAILED = "ok", "warning", "failed"
MACHINES = ("x86_64", "aarch64")
PYTHONS = ((3, 10), (3, 13))
INSTALL_TVM = f"pip install 'apache-tvm=={TVM_VERSION}' '{FFI_RANGE}'"
MIN_FREE = 100 << 20  # bytes: some hundred artifacts
CHILD_SECONDS = 120.0


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what mends it where it is not ok."""

    name: str
    status: str
    found: str
    mend: str = ""


def all_checks() -> Iterator[Check]:
    """Each check as it is made; the trial last, and only where nothing before it failed."""
    failed = False
    for check in (
        check_platform,
        check_tvm,
        check_ffi,
        check_compiler,
        check_runtime,
        check_cpu,
        check_threads,
        check_linker,
        check_cuda_compiler,
        check_gpu,
        check_store,
    ):
        result = check()
        failed |= result.status == FAILED
        yield result
    if failed:
        yield Check("trial", WARNING, "not tried", "mend what failed above first")
    else:
        yield check_trial()


def check_platform() -> Check:
    version = platform.python_version()
    found = f"{platform.system()} {platform.machine()}, Python {version}"
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return Check(
            "platform", FAILED, found, f"tvm_qopt is for Linux on {' and '.join(MACHINES)}"
        )
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return Check("platform", FAILED, found, "use Python 3.10 to 3.13")
    return Check("platform", OK, found)


def check_tvm() -> Check:
    return _version("apache-tvm", re.escape(TVM_VERSION), TVM_VERSION)


def check_ffi() -> Check:
    wanted = f"{FFI_VERSION}.post0 or a later post of it"
    return _version("apache-tvm-ffi", re.escape(FFI_VERSION) + r"\.post\d+", wanted)


def _version(package: str, pattern: str, wanted: str) -> Check:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Check(package, FAILED, "not installed", INSTALL_TVM)
    if not re.fullmatch(pattern, found):
        return Check(package, FAILED, f"{found}, not {wanted}", INSTALL_TVM)
    return Check(package, OK, found)


def check_compiler() -> Check:
    works, said = _in_child("import tvm; print(tvm.__version__)")
    if not works:
        return Check("TVM compiler", FAILED, said, INSTALL_TVM)
    if said != TVM_VERSION:
        return Check("TVM compiler", FAILED, f"`import tvm` gives {said}", INSTALL_TVM)
    return Check("TVM compiler", OK, f"`import tvm` gives {said}")


def check_runtime() -> Check:
    works, said = _in_child(
        "from tvm_qopt.runtime.library import runtime_libraries\nruntime_libraries('llvm', None)"
    )
    if not works:
        return Check("TVM runtime", FAILED, said, INSTALL_TVM)
    return Check("TVM runtime", OK, "libtvm_runtime loads")


def check_cpu() -> Check:
    features = sorted(host_features())
    level = cpu_level()
    if level is None:
        return Check(
            "CPU", WARNING, "of no known level", "build for llvm-native, which asks for no level"
        )
    return Check("CPU", OK, f"{level}: {', '.join(features)}")


def check_threads() -> Check:
    from tvm_qopt.runtime.threads import ENVIRONMENT, get_num_threads

    allowed = len(os.sched_getaffinity(0))
    try:
        threads = get_num_threads()
    except HyperOutOfRange as error:
        return Check("threads", FAILED, f"{ENVIRONMENT} is no number of threads", str(error))
    found = f"{threads} in a step; {allowed} of {os.cpu_count()} processors may be used"
    if threads > allowed:
        return Check("threads", WARNING, found, f"set {ENVIRONMENT} to {allowed} at most")
    return Check("threads", OK, found)


def check_linker() -> Check:
    try:
        found = find_linker(native())
    except ToolMissing as error:
        return Check("C compiler", FAILED, "none", str(error))
    return Check("C compiler", OK, str(found))


def check_cuda_compiler() -> Check:
    works, said = _in_child(
        "from tvm_qopt.compiler.cuda import installed_compilers\n"
        "print(', '.join(installed_compilers()))"
    )
    if works and said:
        return Check("CUDA compiler", OK, said)
    mend = "only for cuda targets: install a CUDA toolkit, or pip install 'tvm_qopt[cuda]'"
    return Check("CUDA compiler", WARNING, "no nvcc, no NVRTC" if works else said, mend)


def check_gpu() -> Check:
    archs = gpu_archs()
    if not archs:
        return Check("GPU", OK, "no NVIDIA GPU or driver; kernels for CPUs need none")
    works, said = _in_child(
        "from tvm_qopt.runtime.library import runtime_libraries\nruntime_libraries('cuda', None)"
    )
    found = ", ".join(archs)
    if not works:
        return Check("GPU", WARNING, f"{found}; {said}", "without it cuda kernels do not load")
    return Check("GPU", OK, f"{found}; libtvm_runtime_cuda loads")


def check_store() -> Check:
    from tvm_qopt.runtime.store import store_folder

    mend = "set TVM_QOPT_STORE to a folder of your own"
    try:
        folder = store_folder()
    except StoreError as error:
        return Check("store", FAILED, str(error), mend)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Check("store", FAILED, f"{folder} is not writable: {error}", mend)
    free = shutil.disk_usage(folder).free
    found = f"{folder} (private, writable, {free / 2**30:.1f} GiB free)"
    if free < MIN_FREE:
        return Check("store", WARNING, found, f"make room, or {mend}")
    return Check("store", OK, found)


def check_trial() -> Check:
    """The real path, in a store that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-doctor-") as store:
        works, said = _in_child(
            "import sys\nfrom tvm_qopt.cli.trial import main\nsys.exit(main())",
            TVM_QOPT_STORE=store,
            TVM_QOPT_POLICY="build",
        )
    if not works:
        return Check("trial", FAILED, said, "please report it, with `tvm-qopt doctor --json`")
    result = json.loads(said)
    found = "built adamw-dynamic8 in {build_seconds} s; a step of {elements} elements is right"
    return Check("trial", OK, found.format(**result))


def _in_child(code: str, **environment: str) -> tuple[bool, str]:
    """Whether a Python process runs `code`, and the last line that it said."""
    package = str(Path(tvm_qopt.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package)))
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-doctor-") as empty:
        try:
            run = subprocess.run(
                [sys.executable, "-c", code],
                cwd=empty,  # `-c` looks there first for modules
                env={**os.environ, "PYTHONPATH": path, **environment},
                capture_output=True,
                text=True,
                timeout=CHILD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"no answer in {CHILD_SECONDS:.0f} s"
    lines = (run.stdout.strip() or run.stderr.strip() if run.returncode else run.stdout).split("\n")
    said = [line for line in lines if line.strip()]
    if run.returncode < 0:
        return False, f"the process died of signal {-run.returncode}"
    return run.returncode == 0, said[-1].strip() if said else ""
