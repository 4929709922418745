"""What `tvm-qopt tune` shows while it runs and at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tvm_qopt.cli.report import messages, print_note, print_table

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from tvm_qopt.compiler.trials import Trial
    from tvm_qopt.compiler.tune import Found, Progress


class View:
    """A table that stays in place on a terminal; elsewhere a line for each new best."""

    def __init__(self, live: Live | None) -> None:
        self.live, self.best, self.count = live, float("inf"), 0

    def show(self, now: Progress) -> None:
        self.count = len(now.trials)
        if self.live:
            self.live.update(_table(now))
            return
        best = min(now.trials, key=lambda trial: trial.median, default=None)
        if best and best.median < self.best:
            self.best = best.median
            said = f"{_ns(best, now)} ns a parameter: {words(best.decisions)}"
            print_note(f"{now.spec.name}: trial {self.count}{_of(now)}: {said}")


@contextmanager
def view_of_search() -> Iterator[View]:
    """What shows a search; says where it stopped, if it was not its end."""
    from rich.live import Live

    console, ended = messages(), False
    live = Live(console=console, transient=True) if console.is_terminal else None
    view = View(live)
    try:
        if live:
            with live:
                yield view
        else:
            yield view
        ended = True
    finally:
        if not ended and view.count:
            print_note(f"{view.count} trials are kept: --resume goes on with them")


def _table(now: Progress) -> Table:
    from rich.table import Table

    table = Table(title=now.spec.name, title_justify="left", title_style="bold")
    for column in ("", "trial", "ns a parameter", "times as fast", "choices"):
        table.add_column(column)
    default = now.trials[0] if now.trials else None
    best = min(now.trials, key=lambda trial: trial.median, default=None)
    for name, trial in (("default", default), ("best so far", best)):
        if trial and default and trial.seconds:
            gain = default.median / trial.median
            number = str(list(now.trials).index(trial) + 1)
            choices = words(trial.decisions)
            table.add_row(name, number, _ns(trial, now), f"{gain:.2f}", choices)
    failed = sum(trial.error is not None for trial in now.trials)
    left = "" if now.left is None else f", about {max(now.left, 0):.0f} s left"
    table.caption = f"{now.doing}: {len(now.trials)}{_of(now)} tried, {failed} failed{left}"
    table.caption_justify = "left"
    return table


def _of(now: Progress) -> str:
    return "" if now.expected is None else f" of {now.expected}"


def _ns(trial: Trial, now: Progress) -> str:
    return f"{trial.median / now.elements * 1e9:.3f}"


def words(decisions: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in decisions.items())


# --- at its end ---


def print_found(found: Sequence[Found]) -> None:
    rows = []
    for each in found:
        low, middle, high = each.speedup
        trials = f"{len(each.trials)}{' (all)' if each.exhausted else ''}"
        gain = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        spec, ns = each.record.spec, f"{each.record.ns:.3f}"
        rows.append([spec, trials, ns, gain, words(each.record.decisions), str(each.path)])
    title = "tuned (times as fast as the default: median and middle half of the rounds)"
    columns = ["spec", "trials", "ns a parameter", "times as fast", "choices", "record"]
    print_table(title, columns, rows)
    for each in found:
        for trial in each.trials:
            if trial.error:
                print_note(f"failed: {each.record.spec}: {words(trial.decisions)}: {trial.error}")
        for wrong in each.rejected:
            print_note(f"fast and wrong: {each.record.spec}: {wrong}")


def as_data(found: Found) -> dict[str, Any]:
    return {
        "record": dataclasses.asdict(found.record),
        "path": str(found.path.resolve()),
        "speedup": list(found.speedup),
        "trials": [dataclasses.asdict(trial) for trial in found.trials],
        "rejected": list(found.rejected),
        "exhausted": found.exhausted,
    }
