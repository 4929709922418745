"""How the command starts: what it loads, what it says of itself and where a package is missing, and
modules of a user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import error_of, invoke, python, tvm_qopt_in_process

import tvm_qopt
from tvm_qopt import __main__

MAIN = "import sys\nfrom tvm_qopt.__main__ import main\nsys.argv = ['tvm-qopt', *sys.argv[1:]]\n"
RULE = (
    "from tvm_qopt.rules import LR, rule\n"
    "@rule(slots=(), hyper=(LR,), scalars=('lr',), derive=lambda h, step, s: {'lr': h['lr']})\n"
    "def halve(xp, h, p, g, s, settings):\n"
    '    """Half of plain descent."""\n'
    "    return p - 0.5 * h.lr * g, {}\n"
)


def test_help_loads_neither_tvm_nor_numpy() -> None:
    code = MAIN + (
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'tvm', 'tvm_ffi', 'numpy'} & set(sys.modules), 'heavy modules'\n"
    )
    run = python("-c", code, "--help")
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in ("build", "list", "show", "doctor", "demo", "tune"))


@pytest.mark.parametrize("command", ["build", "list", "show", "doctor", "demo", "tune"])
def test_each_command_explains_itself(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Exit codes" in result.stdout
    assert "--json" in result.stdout
    assert "Example" in result.stdout


def test_version() -> None:
    assert tvm_qopt.__version__ in invoke("--version").stdout


@pytest.mark.parametrize("package", ["typer", "rich", "numpy"])
def test_a_package_that_is_not_installed_is_named(package: str) -> None:
    """numpy is imported by the command, the others ahead of it."""
    run = python("-c", f"{MAIN}sys.modules[{package!r}] = None\nmain()", "list")
    message = error_of(run, 2)
    assert message.startswith(f"error: {package} is not installed: pip install tvm_qopt")
    assert run.stderr.count("\n") == 1


def test_a_module_of_the_package_that_is_missing_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tvm_qopt.cli.app", None)
    with pytest.raises(ModuleNotFoundError, match=r"tvm_qopt\.cli\.app"):
        __main__.main()


def test_a_rule_of_the_users_own(tmp_path: Path) -> None:
    """--import makes it known to every command; the module lies in the current folder."""
    (tmp_path / "mine.py").write_text(RULE)
    for arguments in (["list", "--json"], ["build", "halve", "-o", "out"]):
        run = tvm_qopt_in_process("--import", "mine", *arguments, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert "halve" in run.stdout
    assert (tmp_path / "out" / "kernel.so").is_file()


def test_a_rule_whose_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RULE.replace("halve", "lion"))
    run = tvm_qopt_in_process("--import", "mine", "list", cwd=tmp_path)
    assert "rule 'lion' is registered twice" in error_of(run, 2)
    assert run.stderr.count("\n") == 1
