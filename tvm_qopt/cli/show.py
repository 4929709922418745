"""`tvm-qopt show`: a kernel at each step of its making."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_qopt.cli import resources
from tvm_qopt.cli.build import compiler
from tvm_qopt.cli.report import paragraphs, print_json, results, waiting
from tvm_qopt.cli.specs import TARGET_HELP, SpecOptions, resolve
from tvm_qopt.errors import UnknownName, UnsupportedSpec
from tvm_qopt.targets import NATIVE, TargetPreset, get_target

if TYPE_CHECKING:
    from tvm_qopt.compiler.schedule import Choice
    from tvm_qopt.spec import KernelSpec

HELP = paragraphs(
    """Print a kernel's definition, schedule, generated source, assembly or what it takes of a GPU.

definition: the unscheduled function (TVMScript). schedule: the tuning record that a build takes, or
why none; the trace as schedule source, which can be taken over by hand; then the scheduled
function. source: CUDA, OpenCL C, Metal or WGSL, or LLVM IR for CPUs.
asm: assembly, or for cuda the PTX of its first architecture.
resources: for cuda, of each entry point and architecture the registers, spills, shared memory,
instructions by kind and occupancy that the compiler's output says, and a model of the time on known
GPUs.

[bold]Examples[/bold]

[cyan]tvm-qopt show adamw --what schedule[/cyan]

[cyan]tvm-qopt show adamw-dynamic8-b256-p_bf16-g_bf16 --target cuda-sm90 --what source[/cyan]

[cyan]tvm-qopt show adamw --target cuda-sm80+sm89+sm90 --what resources[/cyan]

Exit codes: 0 printed; 1 failed (a compiler is missing); 2 wrong usage or an unknown name.
"""
)


MAIN = "main"
HELP_OF_SPEC = "A full spec name, or the name of a rule for its defaults."


class What(str, Enum):
    """The steps that can be shown."""

    DEFINITION = "definition"
    SCHEDULE = "schedule"
    SOURCE = "source"
    ASM = "asm"
    RESOURCES = "resources"


def show(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help=HELP_OF_SPEC)],
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = NATIVE,
    what: Annotated[What, typer.Option(help="The step to show.")] = What.SCHEDULE,
    entry: Annotated[
        str | None,
        typer.Option(
            help="The entry point: main (full blocks), tail (the short last block) ...",
            show_default="main; all for resources",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    (wanted,), preset = resolve([spec], SpecOptions()), get_target(target)
    names = {"spec": wanted.name, "target": preset.name, "entry": entry, "what": what.value}
    if what is What.RESOURCES:
        _show_resources(wanted, preset, entry, names if json else None)
        return
    entry = names["entry"] = entry or MAIN
    with waiting(f"compiling {wanted.name} for {preset.name}"):
        parts = _parts(wanted, preset, entry, what)
    if json:
        print_json({**names, **{name: text for name, (text, _) in parts.items()}})
        return
    for text, language in parts.values():
        _print_code(text, language)


def _show_resources(
    spec: KernelSpec, preset: TargetPreset, entry: str | None, names: dict[str, Any] | None
) -> None:
    """As tables, or as JSON beside `names`."""
    build = compiler()
    _check_entry(build.entry_points(spec, preset.kind), preset, entry or MAIN)
    with waiting(f"compiling {spec.name} for {preset.name}"):
        found = resources.find(spec, preset, entry, build.select(spec, preset))
    if names is None:
        resources.print_tables(spec, found)
    else:
        print_json({**names, **resources.as_data(spec, found)})


def _check_entry(entries: Sequence[str], preset: TargetPreset, entry: str) -> None:
    if entry not in entries:
        raise UnknownName(f"entry point of {preset.kind}", entry, entries)


def _parts(
    spec: KernelSpec, preset: TargetPreset, entry: str, what: What
) -> dict[str, tuple[str, str]]:
    """Name -> text and its language."""
    build = compiler()
    _check_entry(build.entry_points(spec, preset.kind), preset, entry)
    selection = build.select(spec, preset)
    lowered = build.lower(spec, preset, entry, selection.decisions)
    if what is What.DEFINITION:
        return {"definition": (lowered.definition.script(), "python")}
    if what is What.SCHEDULE:
        texts = {
            "chosen": _chosen(selection.why, lowered.choices),
            "trace": str(lowered.scheduled.trace),
            "script": lowered.scheduled.mod.script(),
        }
        return {name: (text, "python") for name, text in texts.items()}
    if what is What.ASM and preset.kind in ("opencl", "metal", "webgpu"):
        raise UnsupportedSpec("asm: a driver compiles the source where it runs; see --what source")
    if preset.kind in ("metal", "webgpu"):
        (text,) = build.shaders_of(spec, preset, [entry], selection.decisions).values()
        return {what.value: (text, "metal" if preset.kind == "metal" else "wgsl")}
    executable = build.compile_spec(spec, preset, [entry], selection.decisions)
    return {what.value: _generated(executable, preset, what)}


def _chosen(why: str, choices: Mapping[str, Choice]) -> str:
    """Where the schedule comes from, and what it chose of what, as comments."""
    taken = [
        f"#   {name} = {choice.value} (of {', '.join(map(str, choice.candidates))})"
        for name, choice in choices.items()
    ]
    return "\n".join((f"# schedule: {why}", *taken))


def _generated(executable: Any, preset: TargetPreset, what: What) -> tuple[str, str]:
    from tvm_qopt.compiler.cuda import compile_ptx, device_source
    from tvm_qopt.compiler.opencl import opencl_source

    if preset.on_cpu:
        form, language = ("ll", "llvm") if what is What.SOURCE else ("s", "gas")
        return str(executable.mod.inspect_source(form)), language
    if preset.kind == "cuda":
        source = device_source(executable)
        if what is What.SOURCE:
            return source, "cuda"
        return compile_ptx(source, preset.archs[0]), "ptx"
    return opencl_source(executable), "c"


def _print_code(text: str, language: str) -> None:
    """In colours on a terminal, as it is elsewhere."""
    console = results()
    if not console.is_terminal:
        print(text)
        return
    from rich.syntax import Syntax

    console.print(Syntax(text, language, background_color="default"), soft_wrap=True)
