"""The check for machines with a GPU, tried where there is none: its device is PoCL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import opencl_runner
import pytest

from tvm_qopt.manifest import MANIFEST, OPENCL_SOURCE, sha256_of

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := opencl_runner.why_missing(oclgrind=False):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("check") / "packed"
    made = run("pack.py", str(folder), "--target", "opencl", "--few")
    assert made.returncode == 0, made.stderr
    return folder


def test_the_check_finds_all_right_and_measures(packed: Path) -> None:
    done = run("check.py", "--device", "opencl", "--folder", str(packed), "--size", "60000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" right ") == 6 and "WRONG" not in done.stdout
    assert done.stdout.count("of the copy") == 2


def test_the_check_finds_what_is_wrong(packed: Path) -> None:
    """The last one here: it spoils the kernel."""
    folder = packed / "artifacts" / "quantize-dynamic8s-b256-p_f32-g_f32"
    source = folder / OPENCL_SOURCE
    spoiled = source.read_text().replace("2147483647", "2139095039")  # of |x|: a bit is lost
    source.write_text(spoiled)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][OPENCL_SOURCE] = sha256_of(source)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    command = ("--device", "opencl", "--folder", str(packed), "--only", "race")
    done = run("check.py", *command)
    assert (done.returncode, done.stderr) == (1, "")
