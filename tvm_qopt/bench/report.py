"""The results as texts and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tvm_qopt.bench.measure import PARAMETER, Row, Skipped, peak

COLUMNS = ("update", "ns a parameter", "middle half", "bytes", "GB/s", "of the roofline")


def title(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line of the table for each row that is given by the parameter."""
    most = peak(rows)
    return [
        [
            row.name,
            f"{row.ns:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.bytes:.2f}",
            f"{row.gigabytes_per_second:.1f}",
            f"{row.gigabytes_per_second / most:.0%}",
        ]
        for row in rows
        if row.unit == PARAMETER
    ]


def notes(rows: Sequence[Row], skipped: Sequence[Skipped]) -> list[str]:
    """What has no place in the table: times of a whole step, and what was left out."""
    steps = [
        f"{row.name}: {row.ns / 1e3:.2f} us a planned step, Python included "
        f"({row.low / 1e3:.2f} to {row.high / 1e3:.2f})"
        for row in rows
        if row.unit != PARAMETER
    ]
    return steps + [f"left out: {each.name}: {each.reason}" for each in skipped]


def as_json(
    facts: dict[str, str], rows: Sequence[Row], skipped: Sequence[Skipped]
) -> dict[str, Any]:
    return {
        "machine": facts,
        "rows": [dataclasses.asdict(row) for row in rows],
        "skipped": [dataclasses.asdict(each) for each in skipped],
    }
