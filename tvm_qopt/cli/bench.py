"""`tvm-qopt bench`: nanoseconds a parameter, side by side in one run."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from tvm_qopt.cli.report import paragraphs, print_json, print_note, print_table, waiting

HELP = paragraphs(
    """Time steps of updates on this machine, interleaved in one run.

Each SPEC is a full name such as adamw-dynamic8-b256-p_f32-g_f32; without any the usual ones. Beside
them: an in-place addition, which moves the most bytes a second that such a kernel can (the
roofline), and torch's fused float32 AdamW where torch is installed. One flat tensor; medians, with
the middle half of the rounds. Compare within one run only: other work on the machine moves all
numbers, and a warning says when there is some.

[bold]Example[/bold]: [cyan]tvm-qopt bench --threads 2 --size 16777216[/cyan]

Exit codes: 0 done; 1 failed; 2 an unknown name; 130 interrupted.
"""
)

USUAL = (
    "adamw-float32-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_bf16-g_bf16",
    "adamw-dynamic8-b256-p_bf16_split-g_bf16",
    "adamw-fp8-b256-p_f32-g_f32",
    "adamw-4bit-b128-p_f32-g_f32",
    "lion-dynamic8-b256-p_f32-g_f32",
    "lamb-dynamic8-b256-p_f32-g_f32",
)
BUSY = 0.5  # processors taken by others


def bench(
    specs: Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...")] = None,
    size: Annotated[int, typer.Option(min=1, help="Parameters of the one tensor.")] = 1 << 24,
    threads: Annotated[int | None, typer.Option(min=1, help="All by default.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    from tvm_qopt.bench.contenders import ours, roofline, torch_fused
    from tvm_qopt.bench.measure import machine, measure
    from tvm_qopt.runtime.threads import get_num_threads, set_num_threads
    from tvm_qopt.spec import KernelSpec

    wanted = [KernelSpec.parse(name) for name in specs or USUAL]
    if threads is not None:
        set_num_threads(threads)
    used, facts = get_num_threads(), machine()
    if float(facts["load"].split()[0]) > BUSY:
        print_note(f"warning: this machine is busy (load {facts['load']}); the numbers will be off")
    peer = torch_fused(size, used)
    contenders = [roofline(size, used), *([peer] if peer else []), *ours(wanted, size)]
    with waiting(f"{rounds} rounds of {len(contenders)} contenders"):
        rows = measure(contenders, size, rounds)
    facts |= {"threads": str(used), "parameters": str(size), "rounds": str(rounds)}
    if json:
        print_json({"machine": facts, "rows": [dataclasses.asdict(row) for row in rows]})
        return
    _print(facts, rows)


def _print(facts: dict[str, str], rows: list[Any]) -> None:
    peak = rows[0].gigabytes_per_second
    print_table(
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        ["update", "ns a parameter", "middle half", "bytes", "GB/s", "of the roofline"],
        [
            [
                row.name,
                f"{row.ns:.3f}",
                f"{row.low:.3f} to {row.high:.3f}",
                f"{row.bytes:.2f}",
                f"{row.gigabytes_per_second:.1f}",
                f"{row.gigabytes_per_second / peak:.0%}",
            ]
            for row in rows
        ],
    )
