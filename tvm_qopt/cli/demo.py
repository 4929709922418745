"""`tvm-qopt demo`: a small network on real data, by the compiled update and by plain float32."""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_qopt.cli.report import (
    paragraphs,
    print_json,
    print_table,
    progress,
    results,
    waiting,
)
from tvm_qopt.errors import StoreError, ToolMissing

if TYPE_CHECKING:
    from tvm_qopt.demo.train import Run

HELP = paragraphs(
    """Train a network on handwritten digits with 8-bit AdamW and with float32 AdamW.

Both start from the same weights and see the same batches. The 8-bit update is the compiled kernel
(built at first use, then kept in the store), with every tensor's state in 8 bits; float32 AdamW is
plain NumPy. Prints a table and writes OUT/loss.png. Takes well under a minute.

Needs scikit-learn (the data) and matplotlib: pip install 'tvm_qopt\\[demo]'

[bold]Example[/bold]: [cyan]tvm-qopt demo --steps 300 --out /tmp/demo[/cyan]

Exit codes: 0 done; 1 failed (a package is missing, OUT cannot be written); 130 interrupted.
"""
)

NEEDS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
FIGURE = "loss.png"
SPEC = "adamw-dynamic8-b256-p_f32-g_f32"


def demo(
    out: Annotated[Path, typer.Option(help="The folder of the figure.")] = Path("tvm_qopt_demo"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, split and batches.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    _check_needs()
    figure = _place_of_figure(out)
    runs = _train(steps, seed)
    from tvm_qopt.demo.plot import plot_losses

    with waiting("drawing"):
        plot_losses(runs, figure)
    if json:
        print_json({"figure": str(figure), "runs": [dataclasses.asdict(run) for run in runs]})
        return
    columns = ("optimizer", "test accuracy", "final loss", "state", "optimizer time a step")
    print_table(f"digits, {steps} steps, seed {seed}", columns, [_row(run) for run in runs])
    results().print(
        "The time is that of the updates alone; float32 is plain NumPy, so it compares the state,\n"
        f"not the speed of kernels. Loss curves: {figure}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _check_needs() -> None:
    missing = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ToolMissing(f"the demo needs {' and '.join(missing)}: pip install 'tvm_qopt[demo]'")


def _place_of_figure(out: Path) -> Path:
    """Make the folder before the work, so that a bad one costs nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / FIGURE).touch()
    except OSError as error:
        raise StoreError(f"--out {out}: cannot be written: {error}") from error
    return (out / FIGURE).resolve()


def _train(steps: int, seed: int) -> list[Run]:
    from tvm_qopt.demo.train import OPTIMIZERS, train
    from tvm_qopt.runtime.store import load

    with waiting("loading the kernel (built at first use)"):
        kernel = load(SPEC)
    runs = []
    with progress() as bar:
        for name, make in OPTIMIZERS.items():
            task = bar.add_task(name, total=steps)
            tick = partial(bar.advance, task)
            runs.append(train(name, make, kernel, steps=steps, seed=seed, tick=tick))
    return runs


def _row(run: Run) -> tuple[str, ...]:
    return (
        run.name,
        f"{run.accuracy:.2%}",
        f"{run.final_loss:.2e}",
        f"{run.state_bytes:,} bytes ({run.state_bytes / run.parameters:.2f} a parameter)",
        f"{run.step_us:,.0f} us",
    )
