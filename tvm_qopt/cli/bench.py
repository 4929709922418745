"""`tvm-qopt bench`: nanoseconds a parameter, side by side in one run."""

from __future__ import annotations

import importlib.util
import json as jsons
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_qopt.cli.report import each, paragraphs, print_json, print_note, print_table, waiting
from tvm_qopt.errors import StoreError, ToolMissing, UnknownName

if TYPE_CHECKING:
    from tvm_qopt.bench.machine import Watch
    from tvm_qopt.bench.measure import Contender, Row, Skipped
    from tvm_qopt.bench.process import Peers
    from tvm_qopt.spec import KernelSpec

ALL_PEERS = "torch,bitsandbytes,bitsandbytes-cpu-fork,torchao,deepspeed,optax"
HELP = paragraphs(
    f"""Time steps of updates on this machine, interleaved in one run.

Each SPEC is a full name such as adamw-dynamic8-b256-p_f32-g_f32; without any the usual ones. Beside
them: in-place additions, which move the most bytes a second that such a kernel can (the
roofline), and the optimizers of others ({ALL_PEERS.replace(",", ", ")}), each in a process of its
own. A peer is taken from this environment, from the one that --peer-python names, or from where
--setup-peers has installed it; one that is missing or fails is left out, with the reason.

Every contender makes a step in every round; medians, with the middle half of the rounds. Compare
within one run only: other work on the machine moves all numbers, and a warning says when there is
some.

[bold]Examples[/bold]: [cyan]tvm-qopt bench --peers torch --plot bench.png[/cyan]

[cyan]tvm-qopt bench --setup-peers --peers bitsandbytes,torchao[/cyan] (installs them; needs 2 GB)

[cyan]tvm-qopt bench --scaling --plot scaling.png[/cyan]

Exit codes: 0 done; 1 failed; 2 an unknown name; 130 interrupted.
"""
)

USUAL = (
    "adamw-float32-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_f32-g_f32",
    "adamw-linear8s+sqrt8u-b256-p_f32-g_f32",
    "adamw-fp8-b256-p_f32-g_f32",
    "adamw-4bit-b128-p_f32-g_f32",
    "adamw-dynamic8-b256-p_bf16-g_bf16",
    "adamw-dynamic8-b256-p_bf16_split-g_bf16",
    "lion-float32-b256-p_f32-g_f32",
    "lion-dynamic8-b256-p_f32-g_f32",
    "lamb-dynamic8-b256-p_f32-g_f32",
    "quantize-dynamic8s-b256-p_f32-g_f32",
    "dequantize-dynamic8s-b256-p_f32-g_f32",
)
USUAL_IN_LISTS = (
    "adamw-float32-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_f32-g_f32",
    "adamw-fp8-b256-p_f32-g_f32",
    "adamw-4bit-b128-p_f32-g_f32",
    "lion-dynamic8-b256-p_f32-g_f32",
)
SIZE = 1 << 24
STDOUT = "-"


def bench(
    specs: Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...")] = None,
    peers: Annotated[str, typer.Option(help='Peers to compare with; "" for none.')] = ALL_PEERS,
    size: Annotated[
        int | None, typer.Option(min=1, help=f"Parameters of the one tensor, {SIZE} by default.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="single, or gpt2: the 148 tensors of GPT-2 small.")
    ] = "single",
    threads: Annotated[int | None, typer.Option(min=1, help="All by default.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds.")] = 15,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Sizes, threads, memory and a training loop instead.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the figure (PNG).")] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help='Write JSON; "-" is stdout.')
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A peer's own interpreter; may be repeated."),
    ] = None,
    setup_peers: Annotated[
        bool, typer.Option("--setup-peers", help="Only install the peers that are asked for.")
    ] = False,
    peers_folder: Annotated[
        Path | None, typer.Option(help="Where they are installed: the user's cache by default.")
    ] = None,
) -> None:
    from tvm_qopt.bench.layouts import GPT2, LAYOUTS, sizes_of
    from tvm_qopt.bench.peers import default_folder, parse
    from tvm_qopt.runtime.threads import get_num_threads, set_num_threads
    from tvm_qopt.spec import KernelSpec

    folder, chosen, named = peers_folder or default_folder(), parse(peers), _named(peer_python)
    if layout not in LAYOUTS:
        raise UnknownName("layout", layout, LAYOUTS)
    if layout == GPT2 and size is not None:
        raise typer.BadParameter("--size is of the layout `single`; gpt2 has sizes of its own")
    if setup_peers:
        _set_up(chosen, folder)
        return
    _check_writable(plot, json)
    if threads is not None:
        set_num_threads(threads)
    if scaling:
        from tvm_qopt.cli.scaling import report_scaling

        report_scaling([KernelSpec.parse(name) for name in specs or ()], size, plot, json)
        return
    sizes = sizes_of(layout, size or SIZE)
    usual = USUAL if len(sizes) == 1 else USUAL_IN_LISTS
    wanted = [KernelSpec.parse(name) for name in specs or usual]
    from tvm_qopt.bench.process import Peers

    facts = facts_now()
    with Peers(folder, named, get_num_threads()) as running:
        contenders, skipped = _gather(wanted, sizes, chosen, running)
        rows, others, failed = _measure(contenders, rounds)
        facts |= {
            "threads": str(get_num_threads()),
            "layout": layout,
            "parameters": str(sum(sizes)),
            "rounds": str(rounds),
            "others": others,
            "with": ", ".join(f"{name} {v}" for name, v in running.versions.items()) or "no peers",
        }
    _report(facts, rows, [*skipped, *failed], plot, json)


def facts_now() -> dict[str, str]:
    """The machine, printed first, with a warning where it is busy."""
    from tvm_qopt.bench.machine import machine

    facts = machine()
    print_note(", ".join(f"{name} {value}" for name, value in facts.items()))
    warn_if_busy()
    return facts


def warn_if_busy() -> None:
    from tvm_qopt.bench.machine import BUSY, busy_now

    busy = busy_now()
    if busy > BUSY:
        print_note(f"warning: others use {busy:.1f} processors now; the numbers will be off")


def others_meanwhile(watch: Watch) -> str:
    """What others took since the watch was made, with a warning where that matters."""
    from tvm_qopt.bench.machine import BUSY

    others, stolen = watch.others()
    said = f"{others:.2f} processors used by other processes and {stolen:.2f} by the host meanwhile"
    if others + stolen > BUSY:
        print_note(f"warning: this machine was busy: {said}")
    return said


def _gather(
    specs: Sequence[KernelSpec], sizes: Sequence[int], peers: Sequence[Any], running: Peers
) -> tuple[list[Contender], list[Skipped]]:
    """The rooflines, the peers, and ours."""
    from tvm_qopt.bench.contenders import ours, rooflines
    from tvm_qopt.runtime.threads import get_num_threads

    bounds = rooflines(sum(sizes), get_num_threads())
    own, skipped = ours(specs, sizes)
    others: list[Contender] = []
    for peer in peers:
        with waiting(f"starting {peer.name} (some compile first)"):
            found, lacking = running.contenders(peer, sizes)
        others += found
        skipped += lacking
    return [*bounds, *others, *own], skipped


def _measure(contenders: Sequence[Contender], rounds: int) -> tuple[list[Row], str, list[Skipped]]:
    from tvm_qopt.bench.machine import Watch
    from tvm_qopt.bench.measure import measure

    watch = Watch()
    with waiting(f"{rounds} rounds of {len(contenders)} contenders"):
        rows, failed = measure(contenders, rounds)
    return rows, others_meanwhile(watch), failed


def _report(
    facts: dict[str, str],
    rows: Sequence[Row],
    skipped: Sequence[Skipped],
    plot: Path | None,
    json: str | None,
) -> None:
    from tvm_qopt.bench.plot import plot_rows
    from tvm_qopt.bench.report import COLUMNS, as_json, cells, notes, title

    if plot:
        plot_rows(rows, facts, plot)
    if write_json(as_json(facts, rows, skipped), json):
        return
    print_table(title(facts), COLUMNS, cells(rows))
    for note in notes(rows, skipped):
        print_note(note)


def write_json(data: Mapping[str, Any], where: str | None) -> bool:
    """Write results where they are wanted as JSON; whether that was stdout."""
    if where == STDOUT:
        print_json(data)
    elif where:
        Path(where).write_text(jsons.dumps(data, indent=1) + "\n", encoding="utf-8")
    return where == STDOUT


def _set_up(peers: Sequence[Any], folder: Path) -> None:
    from tvm_qopt.bench.peers import check_compiler, set_up

    check_compiler(peers)
    names = {peer.name: peer for peer in peers}
    for name in each(list(names), "installing"):
        set_up(names[name], folder)
    print_note(f"installed in {folder}: {', '.join(names)}")


def _named(texts: Sequence[str] | None) -> dict[str, Path]:
    """Interpreters by the peer's name."""
    from tvm_qopt.bench.peers import PEERS

    named = {}
    for text in texts or ():
        name, equals, path = text.partition("=")
        if not (equals and path):
            raise typer.BadParameter(f"--peer-python takes NAME=PATH, got {text!r}")
        if name not in PEERS:
            raise UnknownName("peer", name, PEERS)
        named[name] = Path(path).expanduser().absolute()
    return named


def _check_writable(plot: Path | None, json: str | None) -> None:
    """Fail before the work and not after it."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ToolMissing("--plot needs matplotlib: pip install 'tvm_qopt[bench]'")
    for option, path in (("--plot", plot), ("--json", json if json != STDOUT else None)):
        try:
            if path:
                Path(path).touch()
        except OSError as error:
            raise StoreError(f"{option} {path}: cannot be written: {error}") from error
