"""The application: its commands, and how an error becomes one line and an exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tvm_qopt.cli import bench, build, demo, doctor, listing, show, tune
from tvm_qopt.cli.report import paragraphs, print_error
from tvm_qopt.errors import NameTaken, QoptError, UnknownName, UnsupportedSpec

INTERRUPTED = 130

HELP = paragraphs(
    """Compile optimizer updates with low-bit state, and look at what was compiled.

[bold]First steps[/bold]: [cyan]tvm-qopt doctor[/cyan] says whether this machine has what it takes,
[cyan]tvm-qopt demo[/cyan] trains a small network, [cyan]tvm-qopt list[/cyan] shows what can be
built.

Exit codes: 0 done; 1 it failed; 2 wrong usage, or a name that does not exist or is taken;
130 interrupted.
"""
)


class Commands(TyperGroup):
    """The group of commands: every error that tvm_qopt raises on purpose is reported here."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with interruptible():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            print_error("interrupted; nothing was left half-written")
            raise typer.Exit(INTERRUPTED) from None
        except QoptError as error:
            print_error(str(error))
            raise typer.Exit(exit_code(error)) from error
        except BrokenPipeError:
            raise  # the reader of a pipe has gone: typer ends quietly
        except OSError as error:
            print_error(str(error))
            raise typer.Exit(1) from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be a KeyboardInterrupt also where it comes while TVM calls back into Python:
    there it surfaces as some other error of TVM's."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or another program's
        yield
        return
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def exit_code(error: QoptError) -> int:
    return 2 if isinstance(error, (NameTaken, UnknownName, UnsupportedSpec)) else 1


def _print_version(wanted: bool) -> None:
    if wanted:
        from tvm_qopt.version import TVM_VERSION, __version__

        print(f"tvm_qopt {__version__} (for apache-tvm {TVM_VERSION})")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions."),
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module of yours first, which defines rules or formats; may be repeated.",
        ),
    ] = None,
) -> None:
    if modules:
        sys.path.insert(0, os.getcwd())
    for module in modules or ():
        _import(module)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"--import {module}: {error}") from error


app.command("build", help=build.HELP)(build.build)
app.command("list", help=listing.HELP)(listing.list_)
app.command("show", help=show.HELP)(show.show)
app.command("doctor", help=doctor.HELP)(doctor.doctor)
app.command("demo", help=demo.HELP)(demo.demo)
app.command("bench", help=bench.HELP)(bench.bench)
app.command("tune", help=tune.HELP)(tune.tune)
