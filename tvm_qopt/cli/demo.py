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
    print_note,
    print_table,
    progress,
    results,
    waiting,
)
from tvm_qopt.errors import StoreError, ToolMissing

if TYPE_CHECKING:
    from tvm_qopt.demo.compare import Runs, Spread, Summary
    from tvm_qopt.demo.train import Run

HELP = paragraphs(
    """Train a network on handwritten digits with 8-bit AdamW and with float32 AdamW.

Both start from the same weights and see the same batches. The 8-bit update is the compiled kernel
(built at first use, then kept in the store), with every tensor's state in 8 bits; float32 AdamW is
plain NumPy. Prints a table and writes OUT/loss.png. Takes well under a minute.

--compare trains it with float32, 8-bit, fp8 and 4-bit state, all by compiled kernels, and from
three seeds (SEED and the next two); where torch is installed also a small character-level
transformer on Python's own documentation. Prints the final losses and their gap to float32, and
writes OUT/comparison.png. Takes two or three minutes on two processors.

--peers NAMES trains the transformer with torch's fused AdamW, with our float32, 8-bit, fp8 and
4-bit classes, and with those of bitsandbytes, torchao or all. One that is not installed, or fails,
is left out with a reason. Prints final loss, state and times, and writes OUT/peers.png. Takes
some five minutes with --steps 1000, half of them torchao's compiler.

Needs scikit-learn (the data) and matplotlib: pip install 'tvm_qopt\\[demo]'

[bold]Example[/bold]: [cyan]tvm-qopt demo --steps 300 --out /tmp/demo[/cyan]

[cyan]tvm-qopt demo --compare[/cyan]

[cyan]tvm-qopt demo --peers all --steps 1000[/cyan]

Exit codes: 0 done; 1 failed (a package is missing, OUT cannot be written); 130 interrupted.
"""
)

NEEDS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
FIGURE = "loss.png"
COMPARISON = "comparison.png"
PEERS_FIGURE = "peers.png"
SPEC = "adamw-dynamic8-b256-p_f32-g_f32"


def demo(
    out: Annotated[Path, typer.Option(help="The folder of the figure.")] = Path("tvm_qopt_demo"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, split and batches.")] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Four states, three seeds.")] = False,
    peers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Optimizers: bitsandbytes,torchao or all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    _check_needs()
    if compare and peers is not None:
        raise typer.BadParameter("--compare and --peers are two commands")
    if peers is not None:
        _beside_peers(peers, out, steps=steps, seed=seed, json=json)
        return
    if compare:
        _compare(_place_of_figure(out, COMPARISON), steps=steps, seed=seed, json=json)
        return
    figure = _place_of_figure(out, FIGURE)
    runs = _train(steps, seed)
    from tvm_qopt.demo.plot import plot_losses

    with waiting("drawing"):
        plot_losses(runs, figure)
    if json:
        print_json({"figure": str(figure), "runs": [dataclasses.asdict(run) for run in runs]})
        return
    columns = ("optimizer", "test accuracy", "final loss", "state", "optimizer time a step")
    print_table(f"digits, {steps} steps, seed {seed}", columns, [_row(run) for run in runs])
    _say(
        "The time is that of the updates alone; float32 is plain NumPy, so it compares the state,\n"
        f"not the speed of kernels. Loss curves: {figure}"
    )


def _check_needs() -> None:
    missing = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ToolMissing(f"the demo needs {' and '.join(missing)}: pip install 'tvm_qopt[demo]'")


def _say(text: str) -> None:
    results().print(text, highlight=False, markup=False, soft_wrap=True)


def _place_of_figure(out: Path, name: str) -> Path:
    """Make the folder before the work, so that a bad one costs nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    except OSError as error:
        raise StoreError(f"--out {out}: cannot be written: {error}") from error
    return (out / name).resolve()


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


def _compare(figure: Path, *, steps: int, seed: int, json: bool) -> None:
    from tvm_qopt.demo.compare import SEEDS, TASKS, summarise
    from tvm_qopt.demo.plot import plot_comparison

    left_out = {
        name: f"The {task.title} was left out: {task.needs} is not installed "
        f"(pip install 'tvm_qopt[{task.needs}]')."
        for name, task in TASKS.items()
        if task.missing
    }
    for note in left_out.values() if json else ():
        print_note(note)
    seeds = range(seed, seed + SEEDS)
    tasks = {name: _runs_of(name, steps, seeds) for name in TASKS if name not in left_out}
    with waiting("drawing"):
        plot_comparison(tasks, figure)
    if json:
        runs = [
            {"task": name, "state": state, "seed": each, **dataclasses.asdict(run)}
            for name, of_task in tasks.items()
            for state, of_state in of_task.items()
            for each, run in zip(seeds, of_state, strict=True)
        ]
        found = {n: [dataclasses.asdict(s) for s in summarise(r)] for n, r in tasks.items()}
        print_json({"figure": str(figure), "left_out": left_out, "summary": found, "runs": runs})
        return
    for name, of_task in tasks.items():
        task = TASKS[name]
        columns = ("state", "bytes a parameter", f"loss, {task.loss}", "gap to float32", "accuracy")
        title = f"{task.title}: {steps} steps, seeds {seeds[0]} to {seeds[-1]}"
        print_table(title, columns, [_summary_row(s) for s in summarise(of_task)])
    _say(
        "Mean (least to largest) over the seeds; a gap is to the float32 run of the same seed.\n"
        "Accuracy is on held-out data."
    )
    for note in left_out.values():
        _say(note)
    _say(f"Loss curves: {figure}")


def _beside_peers(names: str, out: Path, *, steps: int, seed: int, json: bool) -> None:
    from tvm_qopt.demo.peers import chosen, train_each
    from tvm_qopt.demo.plot import plot_peers

    if importlib.util.find_spec("torch") is None:
        raise ToolMissing("demo --peers needs torch: pip install 'tvm_qopt[torch]'")
    contenders, figure = chosen(names), _place_of_figure(out, PEERS_FIGURE)
    with progress() as bar:
        runs, left_out = train_each(
            contenders,
            steps=steps,
            seed=seed,
            tick=lambda title: partial(bar.advance, bar.add_task(title, total=steps)),
        )
    with waiting("drawing"):
        plot_peers(runs, figure)
    if json:
        found = [dataclasses.asdict(run) for run in runs]
        print_json({"figure": str(figure), "left_out": left_out, "runs": found})
        return
    columns = ("optimizer", "loss, held-out text", "gap", "state", "optimizer", "training step")
    title = f"transformer of {runs[0].parameters:,} parameters: {steps} steps, seed {seed}"
    print_table(title, columns, [_peer_row(run, runs[0]) for run in runs])
    _say("Medians of one step, in milliseconds, with one thread of torch's.")
    for title, reason in left_out.items():
        _say(f"{title} was left out: {reason}.")
    _say(f"Loss curves: {figure}")


def _peer_row(run: Run, base: Run) -> tuple[str, ...]:
    return (
        run.name,
        f"{run.final_loss:.4f}",
        "" if run is base else f"{run.final_loss / base.final_loss - 1:+.1%}",
        f"{run.state_bytes / run.parameters:.2f} bytes a parameter",
        f"{run.step_us / 1e3:.2f} ms",
        f"{run.whole_us / 1e3:.1f} ms",
    )


def _runs_of(task: str, steps: int, seeds: range) -> Runs:
    from tvm_qopt.demo.compare import STATES, TASKS
    from tvm_qopt.runtime.store import load

    with waiting("loading the kernels (built at first use)"):
        kernels = {state: load(spec.name) for state, spec in STATES.items()}
    runs: dict[str, list[Run]] = {}
    with progress() as bar:
        for state, kernel in kernels.items():
            tick = partial(bar.advance, bar.add_task(f"{task}, {state}", total=steps * len(seeds)))
            run = TASKS[task].run
            runs[state] = [run(state, kernel, steps, seed, tick) for seed in seeds]
    return runs


def _summary_row(summary: Summary) -> tuple[str, ...]:
    def text(spread: Spread, form: str) -> str:
        mean, low, high = (format(x, form) for x in (spread.mean, spread.low, spread.high))
        return f"{mean} ({low} to {high})"

    from tvm_qopt.demo.compare import BASELINE

    return (
        summary.state,
        f"{summary.bytes_per_parameter:.2f}",
        text(summary.final_loss, ".4g"),
        "" if summary.state == BASELINE else text(summary.gap, "+.1%"),
        text(summary.accuracy, ".2%"),
    )
