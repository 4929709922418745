"""The figure: a bar a contender, and for each the least time that its bytes allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_qopt.bench.measure import OURS, PARAMETER, PEER, ROOFLINE, Row, peak

if TYPE_CHECKING:
    from tvm_qopt.bench.scaling import Point

COLOURS = {OURS: "#1b6ca8", PEER: "#d95f02"}
LABELS = {OURS: "tvm_qopt", PEER: "others"}
LINES = ("#444444", "#1b6ca8", "#2a9d4a", "#d95f02", "#7b3294")
BAR = 0.27  # inches


def plot_rows(rows: Sequence[Row], facts: dict[str, str], path: Path) -> None:
    """Write a PNG: nanoseconds a parameter, the fastest on top, on a logarithmic scale."""
    figure, axes = new_figure(max(3.2, 1.7 + BAR * len(rows)))
    most = peak(rows)
    shown = sorted((r for r in rows if r.kind != ROOFLINE and r.unit == PARAMETER), key=_ns)
    for kind, colour in COLOURS.items():
        places = [i for i, row in enumerate(shown) if row.kind == kind]
        if places:
            widths = [shown[i].ns for i in places]
            axes.barh(places, widths, height=0.7, color=colour, label=LABELS[kind])
    for i, row in enumerate(shown):
        axes.annotate(f" {row.ns:.2f}", (row.ns, i), va="center", fontsize=8)
    bounds = [row.bytes / most for row in shown]
    edges = [i + side for i in range(len(shown)) for side in (-0.5, 0.5)]
    label = f"roofline: its bytes at {most:.0f} GB/s"
    axes.plot([b for b in bounds for _ in range(2)], edges, color="black", lw=1.4, label=label)
    axes.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xscale="log", xlabel="nanoseconds a parameter (median; less is better)")
    axes.set_xlim(0.5 * min(bounds), 1.6 * max(row.ns for row in shown))
    axes.legend(frameon=False, loc="upper right")
    size, where = int(facts["parameters"]), f"{facts['processor']}, {facts['date']}"
    title = f"One optimizer step of {size:,} parameters, {facts['threads']} threads\n{where}"
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def plot_points(points: Sequence[Point], facts: dict[str, str], path: Path) -> None:
    """Write a PNG: the cost of a parameter over the size, a line a spec and number of threads."""
    figure, axes = new_figure(4.8)
    axes.grid(alpha=0.25, axis="y")
    specs = list(dict.fromkeys(point.spec for point in points))
    for spec, threads in dict.fromkeys((p.spec, p.threads) for p in points):
        its = [p for p in points if (p.spec, p.threads) == (spec, threads)]
        colour = LINES[specs.index(spec) % len(LINES)]
        style = {"color": colour, "marker": "o", "markersize": 4, "lw": 1.6}
        dashes = "--" if threads == 1 else "-"
        label = f"{spec}, {threads} thread{'s' if threads > 1 else ''}"
        axes.plot([p.size for p in its], [p.ns for p in its], dashes, label=label, **style)
        axes.fill_between(
            [p.size for p in its],
            [p.low for p in its],
            [p.high for p in its],
            alpha=0.15,
            color=colour,
        )
    axes.set(xscale="log", xlabel="parameters", ylabel="nanoseconds a parameter (median)")
    axes.set_ylim(0, None)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(
        f"A flat line is linear growth. {facts['processor']}, {facts['date']}", fontsize=10
    )
    figure.savefig(path, dpi=150)


def new_figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.25, axis="x", which="both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _ns(row: Row) -> float:
    return row.ns
