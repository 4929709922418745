"""The figure: both loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tvm_qopt.demo.train import Run

WINDOW = 25  # steps of the running mean: about an epoch
COLOURS = ("#d95f02", "#1b6ca8")
DASHES = ("-", (0, (5, 2)))  # the second does not hide the first


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


def running_mean(losses: Sequence[float]) -> npt.NDArray[np.float64]:
    """The mean of WINDOW values around each, of fewer at both ends."""
    total = np.concatenate([[0.0], np.cumsum(losses)])
    middle = np.arange(len(losses))
    starts = np.maximum(middle - WINDOW // 2, 0)
    ends = np.minimum(middle + WINDOW // 2 + 1, len(losses))
    return np.asarray((total[ends] - total[starts]) / (ends - starts))
