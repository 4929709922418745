"""How tests run the commands: through typer's runner, or in a process of their own where that is
what is tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import tvm_qopt
from tvm_qopt.cli.app import app

SPEC = "adamw-dynamic8-b256-p_f32-g_f32"
ROOT = str(Path(tvm_qopt.__file__).parent.parent)


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def tvm_qopt_in_process(
    *arguments: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return python("-m", "tvm_qopt", *map(str, arguments), cwd=cwd, **environment)


def python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (environment.pop("PYTHONPATH", ""), ROOT)))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def error_of(result: Any, code: int) -> str:
    """The message of a command that failed as it should: one error line, no traceback."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert (result.exit_code if hasattr(result, "exit_code") else result.returncode) == code
    return str(errors[0])
