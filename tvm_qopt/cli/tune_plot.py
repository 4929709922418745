"""The figure of `tvm-qopt tune`: the best time over the trials."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_qopt.compiler.tune import Found


def plot_trials(found: Sequence[Found], path: Path) -> None:
    """Write a PNG: for each spec every trial as a dot and the best so far as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, each in enumerate(found):
        record, colour = each.record, f"C{number}"
        ns = [trial.median / record.elements * 1e9 for trial in each.trials]
        best = list(itertools.accumulate(ns, min))
        tried = range(1, len(ns) + 1)
        axes.scatter(tried, ns, s=12, color=colour, alpha=0.4, linewidths=0)
        label = f"{record.spec}: {each.speedup[1]:.2f} times as fast as its default"
        axes.step(tried, best, where="post", color=colour, label=label)
    axes.set(xlabel="trial (the first is the default)", ylabel="nanoseconds a parameter")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"Schedules tried on {found[0].record.device}, {found[0].record.preset}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
