"""`tvm-qopt doctor`: whether this installation works, and what mends it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.text import Text

from tvm_qopt.cli.report import paragraphs, print_json, print_table, waiting

HELP = paragraphs(
    """Check this installation: versions, CPU, compilers, GPU, store, one tiny build and run.

Each check is ok, a warning (something optional is missing) or failed, with what mends it. It works
where TVM is missing, broken or of another version: that is what it is for.

[bold]Example[/bold]: [cyan]tvm-qopt doctor --json > doctor.json[/cyan] for a report.

Exit codes: 0 when no check failed; 1 when one did.
"""
)

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    from tvm_qopt.cli.checks import FAILED, all_checks

    with waiting("checking"):
        checks = list(all_checks())
    failed = any(check.status == FAILED for check in checks)
    if json:
        print_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        rows = [(c.name, Text(c.status, STYLES[c.status]), c.found, c.mend) for c in checks]
        print_table("doctor", ("check", "status", "found", "mend"), rows)
    if failed:
        raise typer.Exit(1)
