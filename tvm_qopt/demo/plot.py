"""The figures: loss curves of both optimizers, of four states on each task, and of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.demo.compare import BASELINE, TASKS, Runs
from tvm_qopt.demo.train import Run

WINDOW = 25  # steps of the running mean: about an epoch
COLOURS = ("#d95f02", "#1b6ca8")
DASHES = ("-", (0, (5, 2)))  # the second does not hide the first
PEER_COLOURS = {"torch": "#444444", "bitsandbytes": "#d95f02", "torchao": "#2a9d4a"}
PEER_DASHES = {"8bit": "--", "4bit": "-.", "Fp8": ":"}  # float32: a line
STATE_STYLES = (("#444444", "-"), ("#d95f02", "--"), ("#1b6ca8", "-."), ("#2a9d4a", ":"))


def plot_losses(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG: the loss of each batch, faint, and its running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run, colour, dashes in zip(runs, COLOURS, DASHES, strict=True):
        steps = np.arange(1, len(run.losses) + 1)
        axes.plot(steps, run.losses, color=colour, alpha=0.18, linewidth=0.8)
        label = f"{run.name}: {run.state_bytes / run.parameters:.2f} bytes of state a parameter"
        mean = running_mean(run.losses)
        axes.plot(steps, mean, color=colour, linestyle=dashes, linewidth=2, label=label)
    axes.set(yscale="log", xlabel="step", ylabel="training loss (cross-entropy)")
    axes.set_xlim(1, max(2, len(runs[0].losses)))
    axes.set_title("Handwritten digits: AdamW with 8-bit and with float32 state")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title=f"mean of {WINDOW} steps (faint: each batch)")
    figure.savefig(path, dpi=150)


def plot_comparison(tasks: Mapping[str, Runs], path: Path) -> None:
    """Write a PNG: a column a task; the loss of the batches above, its gap to float32 below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(tasks), 6.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(tasks), squeeze=False, sharex="col", height_ratios=(2, 1))
    for (name, runs), above, below in zip(tasks.items(), *grid, strict=True):
        seeds = len(runs[BASELINE])
        _plot_task(runs, above, below)
        above.set_title(f"AdamW: {TASKS[name].title}")
        above.legend(frameon=False, title=f"state (mean of {seeds} seeds and {WINDOW} steps)")
    grid[0][0].set_ylabel("training loss (cross-entropy)")
    grid[1][0].set_ylabel("gap to float32 state, %")
    figure.savefig(path, dpi=150)


def plot_peers(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG: the loss of the batches; on the right its gap to the first run's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    base = running_mean(runs[0].losses)
    steps = np.arange(1, len(base) + 1)
    for run in runs:
        colour = PEER_COLOURS.get(run.name.split()[0], "#1b6ca8")
        dashes = [dash for state, dash in PEER_DASHES.items() if run.name.endswith(state)]
        style = {"color": colour, "linestyle": [*dashes, "-"][0], "linewidth": 1.2}
        curve = running_mean(run.losses)
        per = run.state_bytes / run.parameters
        left.plot(steps, curve, label=f"{run.name} ({per:.2f} bytes)", **style)
        right.plot(steps, 100 * (curve / base - 1), **style)
    left.set(xlabel="step", ylabel="training loss (cross-entropy)")
    right.set(xlabel="step", ylabel=f"gap to {runs[0].name}, %")
    left.legend(frameon=False, fontsize="x-small", title="AdamW (state a parameter)")
    for axes in (left, right):
        axes.set_xlim(1, max(2, len(steps)))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def _plot_task(runs: Runs, above: Any, below: Any) -> None:
    curves = {s: running_mean(np.mean([r.losses for r in of], axis=0)) for s, of in runs.items()}
    base = curves[BASELINE]
    steps = np.arange(1, len(base) + 1)
    for (state, curve), (colour, dashes) in zip(curves.items(), STATE_STYLES, strict=True):
        style = {"color": colour, "linestyle": dashes, "linewidth": 1.8}
        above.plot(steps, curve, label=state, **style)
        below.plot(steps, 100 * (curve / base - 1), **style)
    above.set_yscale("log" if base.max() > 10 * base.min() else "linear")
    below.set(xlabel="step", xlim=(1, max(2, len(steps))))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def running_mean(losses: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean of WINDOW values around each, of fewer at both ends."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    middle = np.arange(len(losses))
    starts = np.maximum(middle - WINDOW // 2, 0)
    ends = np.minimum(middle + WINDOW // 2 + 1, len(losses))
    return np.asarray((total[ends] - total[starts]) / (ends - starts))
