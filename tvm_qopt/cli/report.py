"""What commands share: where text goes (results on stdout, all else on stderr), and its form."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160
"""Columns where the output is no terminal."""

Item = TypeVar("Item")


def results() -> Console:
    """stdout, as it is now (tests replace it)."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def messages() -> Console:
    """stderr."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def paragraphs(text: str) -> str:
    """The text with one line a paragraph, as typer's help wants it."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text).strip()


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


def print_error(message: str) -> None:
    """`error: ` and the message, its first line red; more lines are what a compiler said."""
    first, _, rest = f"error: {message}".partition("\n")
    text = Text(first, style="bold red")
    messages().print(text.append(f"\n{rest}" if rest else "", style="default"), soft_wrap=True)


def print_note(message: str) -> None:
    messages().print(Text(message), soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A table of plain texts: brackets in them are no markup, and nothing is cut off."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold cyan")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    results().print(table)


def progress() -> Progress:
    """A bar on stderr that goes when it is done; nothing where stderr is no terminal."""
    console = messages()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def each(items: Sequence[Item], verb: str) -> Iterator[Item]:
    """The items, with a bar that says what is worked on, or a line each where there is no bar."""
    with progress() as bar:
        task = bar.add_task(verb, total=len(items))
        for item in items:
            bar.update(task, description=f"{verb} {item}")
            if not bar.console.is_terminal:
                print_note(f"{verb} {item}")
            yield item
            bar.advance(task)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr while the body runs; nothing where stderr is no terminal."""
    console = messages()
    if not console.is_terminal:
        yield
        return
    with console.status(Text(what)):
        yield
