"""`tvm-qopt tune`: search a schedule's choices for the fastest kernels, here, on a fleet, or on a
machine without a compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_qopt.cli.bench import others_meanwhile, warn_if_busy
from tvm_qopt.cli.build import compiler
from tvm_qopt.cli.machine import why_not_here
from tvm_qopt.cli.report import paragraphs, print_json, print_note
from tvm_qopt.cli.specs import TARGET_HELP, SpecOptions, resolve
from tvm_qopt.cli.tune_elsewhere import pack as pack_into
from tvm_qopt.cli.tune_elsewhere import take
from tvm_qopt.cli.tune_view import as_data, print_found, view_of_search
from tvm_qopt.errors import StoreError, ToolMissing, UnsupportedSpec
from tvm_qopt.targets import NATIVE, TargetPreset, get_target

if TYPE_CHECKING:
    from tvm_qopt.compiler.tune import Found, Options
    from tvm_qopt.measure import Machine
    from tvm_qopt.spec import KernelSpec

HELP = paragraphs(
    """Search for the fastest schedule of each SPEC, on this machine or on others.

Kernels are built, timed and logged one after the other until the budget is used up, or every choice
was tried; then the fastest meet the default in one interleaved run. The best one becomes a record,
if it does what the reference does, and every later build for such a machine takes it;
`tvm-qopt show` says which. Records go to your own folder (TVM_QOPT_RECORDS, else the user's data
folder) or to -o.

Ctrl-C and crashes lose nothing that was tried: --resume goes on.

Where there is no compiler: --pack builds all kernels into a folder, `python FOLDER/measure.py` on
the machine with the GPU (NumPy, and torch for CUDA or pyopencl for OpenCL) times them, and
--measured takes the folder back and writes the records.

[bold]Examples[/bold]

[cyan]tvm-qopt tune adamw lion --trials 32[/cyan]

[cyan]tvm-qopt tune adamw-fp8 --target llvm-x86-64-v3 --minutes 5 --plot tuned.png[/cyan]

[cyan]tvm-qopt tune adamw --target cuda-sm90 --rpc tracker:9190 --key h100[/cyan]

[cyan]tvm-qopt tune adamw --target cuda-sm90 --pack FOLDER --python 3.12[/cyan], then
[cyan]tvm-qopt tune adamw --target cuda-sm90 --measured FOLDER[/cyan]

Exit codes: 0 tuned; 1 failed (a package, server or measurement is missing or does not fit); 2 wrong
usage, an unknown name or a target that cannot be tuned there; 130 interrupted.
"""
)
TRIALS, SEED, SIZE = 64, 0, 1 << 24  # by default
NEEDS = ("cloudpickle", "psutil")  # of TVM's worker processes
TUNED = ("llvm", "cuda", "opencl")  # kinds whose kernels are called from here
BOTH = "--rpc, or --pack"


def tune(
    specs: Annotated[
        list[str],
        typer.Argument(metavar="SPEC...", help="Full names, or rules for their defaults."),
    ],
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = NATIVE,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Kernels to try for each spec.", show_default=str(TRIALS)),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time for each spec, in place of --trials.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was tried.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the order in which to try.", show_default=str(SEED)),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Parameters of the one tensor.", show_default=str(SIZE)),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the records.", show_default="your own"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="A PNG to write: the best time over the trials.")
    ] = None,
    rpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Run kernels on a tracker's servers.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The servers' key, with --rpc.")] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="A folder to build all kernels into, for a machine without a compiler."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Its version of Python, with --pack.", show_default="this one's"),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A folder that was packed and measured there.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    wanted, preset = resolve(specs, SpecOptions()), get_target(target)
    if trials is not None and minutes is not None:
        raise typer.BadParameter("give either --trials or --minutes")
    if (rpc is None) != (key is None):
        raise typer.BadParameter("--rpc and --key go together")
    _check_ways({"--rpc": rpc, "--pack": pack, "--measured": measured})
    if python and not pack:
        raise typer.BadParameter("--python goes with --pack")
    elsewhere = "--pack" if pack else "--measured" if measured else ""
    unused: dict[str, Any] = {"--minutes": minutes, "--resume": resume or None}
    if pack:
        unused |= {"--plot": plot, "--out": out}
    else:
        unused |= {"--trials": trials, "--size": size, "--seed": seed}
    _check_alone(elsewhere, unused)
    here = rpc is None and not elsewhere
    _check(preset, plot, here=here, rpc=rpc is not None, packs=pack is not None)
    compiler()
    if pack:
        budget = {"size": size or SIZE, "trials": trials or TRIALS, "seed": seed or SEED}
        pack_into(wanted, preset, pack, python=python, json=json, **budget)
        return
    folder = out or _own_folder()
    print_note(f"records go to {folder}")
    if measured:
        found = take(wanted, preset, folder, measured)
    else:
        machine = _machine(preset, rpc, key)
        options = _options(size or SIZE, trials, minutes, seed or SEED, resume, machine)
        found = _search(wanted, preset, folder, options, here=here)
    if plot:
        from tvm_qopt.cli.tune_plot import plot_trials

        plot_trials(found, plot)
    if json:
        print_json({"tuned": [as_data(each) for each in found]})
    else:
        print_found(found)


def _check_ways(ways: dict[str, Any]) -> None:
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give one of {', '.join(given)}")


def _check_alone(way: str, others: Mapping[str, Any]) -> None:
    """What does nothing beside --pack or --measured is refused."""
    given = [name for name, value in others.items() if value is not None]
    if way and given:
        raise typer.BadParameter(f"{', '.join(given)} with {way}: it has no use for that")


def _check(preset: TargetPreset, plot: Path | None, *, here: bool, rpc: bool, packs: bool) -> None:
    """Raise now what would otherwise come after the search."""
    needs = (*NEEDS, "matplotlib") if plot else NEEDS
    missing = [package for package in needs if not importlib.util.find_spec(package)]
    if missing:
        wanted = "tvm_qopt[tune,demo]" if plot else "tvm_qopt[tune]"
        raise ToolMissing(f"tune needs {', '.join(missing)}: pip install '{wanted}'")
    if plot and not plot.absolute().parent.is_dir():
        raise StoreError(f"--plot {plot}: there is no folder {plot.parent}")
    if preset.kind not in TUNED:
        raise UnsupportedSpec(
            f"--target: {preset.name} is text for other programs and cannot be tuned; "
            f"{', '.join(TUNED)} can"
        )
    if packs and preset.on_cpu:
        raise UnsupportedSpec(f"--pack: for GPUs; {preset.name} is tuned on the CPU or by --rpc")
    if rpc and preset.kind == "opencl":
        raise UnsupportedSpec("--rpc: TVM's servers run no OpenCL; tune on the machine, or --pack")
    reason = why_not_here(preset) if here else None
    if reason:
        ways = "--rpc" if preset.on_cpu else "--pack" if preset.kind == "opencl" else BOTH
        raise UnsupportedSpec(f"--target: {preset.name} does not run here ({reason}); use {ways}")


def _machine(preset: TargetPreset, rpc: str | None, key: str | None) -> Machine:
    """Where kernels run."""
    from tvm_qopt.compiler.measure import Here, Remote
    from tvm_qopt.devices.session import DeviceMachine

    device = "cpu" if preset.on_cpu else preset.kind
    if rpc is not None and key is not None:
        host, _, port = rpc.rpartition(":")
        if not host or not port.isdecimal():
            raise typer.BadParameter(f"--rpc takes HOST:PORT, got {rpc!r}")
        return Remote(host, int(port), key, device)
    return DeviceMachine(device) if preset.kind == "opencl" else Here(device)


def _options(
    size: int,
    trials: int | None,
    minutes: float | None,
    seed: int,
    resume: bool,
    machine: Machine,
) -> Options:
    from tvm_qopt.compiler.tune import Options
    from tvm_qopt.runtime.threads import get_num_threads

    return Options(
        elements=size,
        trials=TRIALS if trials is None and minutes is None else trials,
        seconds=None if minutes is None else 60 * minutes,
        seed=seed,
        resume=resume,
        threads=get_num_threads(),
        machine=machine,
    )


def _own_folder() -> Path:
    from tvm_qopt.records import ENVIRONMENT, user_folder

    folder = user_folder()
    if folder is None:
        raise StoreError(f"there is no home folder for records; set {ENVIRONMENT}, or give -o")
    return folder


def _search(
    specs: Sequence[KernelSpec],
    preset: TargetPreset,
    folder: Path,
    options: Options,
    *,
    here: bool,
) -> list[Found]:
    from tvm_qopt.bench.machine import Watch
    from tvm_qopt.compiler.tune import tune
    from tvm_qopt.runtime.store import defining_modules

    if here:
        warn_if_busy()
    watch, found = Watch(), []
    for spec in specs:
        mine = dataclasses.replace(options, modules=tuple(defining_modules(spec)))
        with view_of_search() as view:
            found.append(tune(spec, preset, folder, mine, view.show))
    if here:
        others_meanwhile(watch)
    return found
