"""`tvm-qopt list`: what can be built, and what the store holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_qopt.cli.machine import needs, why_not_here
from tvm_qopt.cli.report import paragraphs, print_json, print_note, print_table
from tvm_qopt.errors import ArtifactInvalid, StoreError
from tvm_qopt.targets import get_target, known_targets

HELP = paragraphs(
    """List rules, state formats, targets, and the artifacts in the store.

A rule of the kind operator is no update: functions of tvm_qopt.ops call it.

For a target: what a machine must have, and whether this one runs it. Any target can be built here;
cuda architectures may be joined (cuda-sm80+sm90).

[bold]Example[/bold]: [cyan]tvm-qopt list --json | python -m json.tool[/cyan]

Exit codes: 0, also where the store cannot be read (it says so).
"""
)


def list_(
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    data: dict[str, Any] = {
        "rules": rules(),
        "states": states(),
        "targets": targets(),
        "store": store(),
    }
    if json:
        print_json(data)
        return
    _print_table("rules", data["rules"])
    _print_table("states (--state)", _folded(data["states"]))
    _print_table("targets (--target)", data["targets"])
    held = data["store"]
    if held["error"]:
        print_note(f"warning: {held['error']}")
        return
    _print_table(f"store: {held['folder']}", held["artifacts"])


def rules() -> list[dict[str, Any]]:
    from tvm_qopt.rules import RULES
    from tvm_qopt.spec import rule_choices

    return [
        {
            "rule": rule.name,
            "kind": "update" if rule.is_update else "operator",
            "slots": [slot.name for slot in rule.slots(rule.defaults)],
            "hyper": [hyper.name for hyper in rule.hyper(rule.defaults)],
            "settings": {
                name: [str(c) for c in choices] for name, choices in rule_choices(rule).items()
            },
            "summary": rule.summary,
        }
        for _, rule in sorted(RULES.items())
    ]


def states() -> list[dict[str, Any]]:
    """The formats, and the families that give a slot the format of its sign."""
    from tvm_qopt.formats import FAMILIES, FORMATS

    families = [
        {
            "state": name,
            "bits": FORMATS[signed].bits,
            "sign": "by slot",
            "summary": f"{signed} for signed slots, {nonnegative} for those never negative"
            if signed != nonnegative
            else f"{signed} for every slot",
        }
        for name, (signed, nonnegative) in FAMILIES.items()
    ]
    formats = [
        {
            "state": format_.name,
            "bits": format_.bits,
            "sign": "signed" if format_.signed else "unsigned",
            "summary": format_.summary,
        }
        for format_ in FORMATS.values()
    ]
    return [*families, *formats]


def targets() -> list[dict[str, Any]]:
    rows = []
    for name in known_targets():
        preset = get_target(name)
        reason = why_not_here(preset)
        rows.append(
            {
                "target": name,
                "kind": preset.kind,
                "runs here": "yes" if reason is None else f"no: {reason}",
                "needs": needs(preset),
            }
        )
    return rows


def store() -> dict[str, Any]:
    """The store's folder and artifacts, or the reason why it cannot be read."""
    from tvm_qopt.runtime.store import store_folder, stored

    try:
        folder, held = store_folder(), stored()
    except StoreError as error:
        return {"folder": None, "artifacts": [], "error": str(error)}
    return {"folder": str(folder), "artifacts": [_artifact(each) for each in held], "error": None}


def _artifact(folder: Path) -> dict[str, Any]:
    """One artifact, by its manifest alone: the files are checked when it is loaded."""
    from tvm_qopt.manifest import MANIFEST, Manifest

    path = folder / MANIFEST
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    row = {"spec": "?", "target": "?", "bytes": size, "built": date, "key": folder.name}
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"), where=str(path))
    except (ArtifactInvalid, UnicodeDecodeError):
        return {**row, "spec": "damaged, or of another schema: is built again when needed"}
    return {**row, "spec": manifest.spec, "target": manifest.target}


def _folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one summary as one row: a line each, beside the summary."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault(row["summary"], []).append(row)
    return [
        {name: "\n".join(str(row[name]) for row in same) for name in same[0]} | {"summary": summary}
        for summary, same in alike.items()
    ]


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        print_note(f"{title}: nothing yet")
        return
    print_table(title, list(rows[0]), [[_text(cell) for cell in row.values()] for row in rows])


def _text(cell: Any) -> str:
    if isinstance(cell, dict):
        return "\n".join(f"{name}={'|'.join(choices)}" for name, choices in cell.items())
    if isinstance(cell, int):
        return f"{cell:,}"
    return ", ".join(cell) if isinstance(cell, list) else str(cell)
