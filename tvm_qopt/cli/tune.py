"""`tvm-qopt tune`: search a schedule's choices for the fastest kernels, here, on a fleet, or on a
machine without a compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_qopt.cli.bench import others_meanwhile, warn_if_busy
from tvm_qopt.cli.build import compiler
from tvm_qopt.cli.machine import why_not_here
from tvm_qopt.cli.report import messages, paragraphs, print_json, print_note, print_table, waiting
from tvm_qopt.cli.specs import TARGET_HELP, SpecOptions, resolve
from tvm_qopt.errors import RecordInvalid, StoreError, ToolMissing, UnknownName, UnsupportedSpec
from tvm_qopt.targets import NATIVE, TargetPreset, get_target

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from tvm_qopt.compiler.trials import Trial
    from tvm_qopt.compiler.tune import Found, Options, Progress
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
TRIALS = 64  # where no budget is given
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
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which to try.")] = 0,
    size: Annotated[int, typer.Option(min=1, help="Parameters of the one tensor.")] = 1 << 24,
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
    if elsewhere and (minutes is not None or resume):
        raise typer.BadParameter(f"--minutes and --resume do not go with {elsewhere}")
    here = rpc is None and not elsewhere
    _check(preset, plot, here=here, rpc=rpc is not None, packs=pack is not None)
    compiler()
    if pack:
        _pack(wanted, preset, pack, python, size, trials or TRIALS, seed, json=json)
        return
    folder = out or _own_folder()
    print_note(f"records go to {folder}")
    if measured:
        found = _take(wanted, preset, folder, measured)
    else:
        options = _options(size, trials, minutes, seed, resume, _machine(preset, rpc, key))
        found = _search(wanted, preset, folder, options, here=here)
    if plot:
        from tvm_qopt.cli.tune_plot import plot_trials

        plot_trials(found, plot)
    if json:
        print_json({"tuned": [_as_data(each) for each in found]})
    else:
        _print(found)


def _check_ways(ways: dict[str, Any]) -> None:
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give one of {', '.join(given)}")


def _check(preset: TargetPreset, plot: Path | None, *, here: bool, rpc: bool, packs: bool) -> None:
    """Raise now what would otherwise come after the search."""
    needs = (*NEEDS, "matplotlib") if plot else NEEDS
    missing = [package for package in needs if not importlib.util.find_spec(package)]
    if missing:
        extra = "tune,demo" if plot else "tune"
        raise ToolMissing(f"tune needs {', '.join(missing)}: pip install 'tvm_qopt[{extra}]'")
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
        with _view() as view:
            found.append(tune(spec, preset, folder, mine, view.show))
    if here:
        others_meanwhile(watch)
    return found


# --- for a machine without a compiler ---


def _pack(
    specs: Sequence[KernelSpec],
    preset: TargetPreset,
    folder: Path,
    python: str | None,
    size: int,
    trials: int,
    seed: int,
    *,
    json: bool,
) -> None:
    from tvm_qopt.compiler.elsewhere import pack_search
    from tvm_qopt.devices import surroundings
    from tvm_qopt.packed import Pack, write_json
    from tvm_qopt.runtime.store import defining_modules

    for spec in specs:
        if modules := defining_modules(spec):
            raise UnsupportedSpec(
                f"--pack: {spec.name} is defined in {', '.join(modules)}, which is not packed"
            )
    surroundings.new_folder(folder)
    searches = {}
    for spec in specs:
        with waiting(f"building the kernels of {spec.name}"):
            searches[spec.name] = pack_search(
                spec, preset, folder, elements=size, trials=trials, seed=seed
            )
    surroundings.add_surroundings(folder, preset.kind, python or surroundings.THIS_PYTHON)
    surroundings.write_script(folder)
    write_json(Pack(preset.name, preset.kind, searches), folder)
    packed = surroundings.check_size(folder)
    for name, search in searches.items():
        for each in search.candidates:
            if each.error:
                print_note(f"failed: {name}: {_words(each.decisions)}: {each.error}")
    if json:
        counts = {name: len(search.candidates) for name, search in searches.items()}
        print_json({"packed": str(folder.resolve()), "bytes": packed, "kernels": counts})
        return
    rows = [[name, str(len(search.candidates))] for name, search in searches.items()]
    print_table(f"packed in {folder}, {packed / (1 << 20):.1f} MiB", ["spec", "kernels"], rows)
    print_note(
        f"on the machine: python {folder}/measure.py; then here: tvm-qopt tune "
        f"{' '.join(searches)} --target {preset.name} --measured {folder}"
    )


def _take(
    specs: Sequence[KernelSpec], preset: TargetPreset, folder: Path, measured: Path
) -> list[Found]:
    """Records of what was measured of a pack."""
    from tvm_qopt.compiler.elsewhere import MeasuredElsewhere
    from tvm_qopt.compiler.tune import take_measured
    from tvm_qopt.packed import read_measured, read_pack

    pack = read_pack(measured)
    if pack.target != preset.name:
        raise RecordInvalid(
            f"--measured: {measured} was packed for {pack.target}, and --target is {preset.name}"
        )
    for spec in specs:
        if spec.name not in pack.searches:
            raise UnknownName(f"spec in --measured {measured}", spec.name, pack.searches)
    got, found = read_measured(measured), []
    for spec in specs:
        search = pack.searches[spec.name]
        laboratory = MeasuredElsewhere(search, got.results[spec.name], got.device)
        with _view() as view:
            found.append(take_measured(spec, preset, folder, search, laboratory, view.show))
    return found


# --- while it runs ---


class _View:
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
            said = f"{_ns(best, now)} ns a parameter: {_words(best.decisions)}"
            print_note(f"{now.spec.name}: trial {self.count}{_of(now)}: {said}")


@contextmanager
def _view() -> Iterator[_View]:
    """What shows a search; says where it stopped, if it was not its end."""
    from rich.live import Live

    console, ended = messages(), False
    live = Live(console=console, transient=True) if console.is_terminal else None
    view = _View(live)
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
            words = _words(trial.decisions)
            table.add_row(name, number, _ns(trial, now), f"{gain:.2f}", words)
    failed = sum(trial.error is not None for trial in now.trials)
    left = "" if now.left is None else f", about {max(now.left, 0):.0f} s left"
    table.caption = f"{now.doing}: {len(now.trials)}{_of(now)} tried, {failed} failed{left}"
    table.caption_justify = "left"
    return table


def _of(now: Progress) -> str:
    return "" if now.expected is None else f" of {now.expected}"


def _ns(trial: Trial, now: Progress) -> str:
    return f"{trial.median / now.elements * 1e9:.3f}"


def _words(decisions: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in decisions.items())


# --- at its end ---


def _print(found: Sequence[Found]) -> None:
    rows = []
    for each in found:
        low, middle, high = each.speedup
        trials = f"{len(each.trials)}{' (all)' if each.exhausted else ''}"
        gain = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        spec, ns = each.record.spec, f"{each.record.ns:.3f}"
        rows.append([spec, trials, ns, gain, _words(each.record.decisions), str(each.path)])
    title = "tuned (times as fast as the default: median and middle half of the rounds)"
    columns = ["spec", "trials", "ns a parameter", "times as fast", "choices", "record"]
    print_table(title, columns, rows)
    for each in found:
        for trial in each.trials:
            if trial.error:
                print_note(f"failed: {each.record.spec}: {_words(trial.decisions)}: {trial.error}")
        for wrong in each.rejected:
            print_note(f"fast and wrong: {each.record.spec}: {wrong}")


def _as_data(found: Found) -> dict[str, Any]:
    return {
        "record": dataclasses.asdict(found.record),
        "path": str(found.path.resolve()),
        "speedup": list(found.speedup),
        "trials": [dataclasses.asdict(trial) for trial in found.trials],
        "rejected": list(found.rejected),
        "exhausted": found.exhausted,
    }
