"""What artifacts need on a machine that has Python, NumPy and torch and nothing of ours: this
package without its compiler, TVM's runtime and its Python interface."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tvm_qopt.errors import BuildError, StoreError, ToolMissing
from tvm_qopt.packed import SCRIPT
from tvm_qopt.version import FFI_RANGE

SITE, LIBRARIES = "site", "lib"
RUNTIMES = {"cuda": ("tvm_runtime", "tvm_runtime_cuda")}  # OpenCL is driven by pyopencl alone
INTERFACE = "apache-tvm-ffi"
LEFT_OUT = ("__pycache__", "compiler", "schedules", "tuning_logs", "optim", "ops", "cli", "demo")
MOST_BYTES = 64 << 20
THIS_PYTHON = "{}.{}".format(*sys.version_info)
_SCRIPT = f'''"""Measures the kernels of this folder: run it on the machine that they are for."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "{SITE}"))

from tvm_qopt.devices.measure import main

raise SystemExit(main(HERE))
'''


def write_script(folder: Path) -> None:
    (folder / SCRIPT).write_text(_SCRIPT, encoding="utf-8")


def add_surroundings(folder: Path, kind: str, python: str) -> None:
    """Fill a folder for artifacts of a kind and a version of Python ("3.12").

    Raises ToolMissing where the interface is not to be had for it.
    """
    package = Path(__file__).parent.parent
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(package, folder / SITE / package.name, ignore=ignore)
    if kind not in RUNTIMES:
        return
    tvm = importlib.util.find_spec("tvm")
    if tvm is None or tvm.origin is None:
        raise ToolMissing("apache-tvm is not installed: pip install apache-tvm")
    (folder / LIBRARIES).mkdir()
    for name in RUNTIMES[kind]:
        shutil.copy2(Path(tvm.origin).parent / "lib" / f"lib{name}.so", folder / LIBRARIES)
    if python == THIS_PYTHON:
        _copy_interface(folder / SITE)
    else:
        _download_interface(folder / SITE, python)


def _copy_interface(site: Path) -> None:
    """The files of the one that is installed here."""
    for file in importlib.metadata.files(INTERFACE) or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            to = site / file
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), to)


def _download_interface(site: Path, python: str) -> None:
    with tempfile.TemporaryDirectory() as wheels:
        wanted = ["--no-deps", "--only-binary=:all:", "--python-version", python, FFI_RANGE]
        command = [sys.executable, "-m", "pip", "download", "-q", "-d", wheels, *wanted]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            said = (run.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ToolMissing(
                f"Python {python}: pip finds no {INTERFACE} for it on {platform.machine()} "
                f"({said}); {THIS_PYTHON} needs no download"
            )
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)


def check_size(folder: Path) -> int:
    """Bytes that a folder takes; raises BuildError where they are too many to be carried along."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise BuildError(
            f"{folder}: {size / (1 << 20):.1f} MiB, and {MOST_BYTES >> 20} are the most that is "
            "packed: give fewer specs, fewer --trials or one architecture"
        )
    return size


def new_folder(folder: Path) -> None:
    """Make a folder to pack into; raises StoreError where there is one that is not empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filled = next(folder.iterdir(), None) is not None
    except OSError as error:
        raise StoreError(f"{folder}: cannot be made: {error}") from error
    if filled:
        raise StoreError(f"{folder}: is not empty; give a new folder")
