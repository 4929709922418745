"""`tvm-qopt build`: specs to artifact folders, or into the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_qopt.cli.machine import debian_package, why_not_here
from tvm_qopt.cli.report import each, paragraphs, print_json, print_table
from tvm_qopt.cli.specs import SPEC_HELP, TARGET_HELP, SpecOptions, resolve
from tvm_qopt.errors import ToolMissing, UnsupportedSpec
from tvm_qopt.targets import NATIVE, TargetPreset, get_target

if TYPE_CHECKING:
    from tvm_qopt.manifest import Manifest
    from tvm_qopt.spec import KernelSpec

HELP = paragraphs(
    """Compile kernels, each to a folder with kernel.so and manifest.json.

With one spec OUT is the artifact; with several, OUT holds a folder for each, by its name. A folder
is written whole or not at all. `tvm_qopt.load(folder)` takes it from there.

Other machines: a target whose linker is missing gives kernel.o alone, and the table names the
Debian package. CUDA needs nvcc or NVRTC (pip install 'tvm_qopt\\[cuda]') and no GPU.

[bold]Examples[/bold]

[cyan]tvm-qopt build adamw --state dynamic8 --param float32 -o adamw8[/cyan]

[cyan]tvm-qopt build adamw --param bfloat16 --grad float32 --target cuda-sm90 -o OUT --bundle[/cyan]

[cyan]tvm-qopt build adamw --set nonfinite=propagate --store[/cyan]

Exit codes: 0 built; 1 failed (a compiler is missing, OUT cannot be written); 2 wrong usage, or a
rule, format, setting or target that does not exist; 130 interrupted, with nothing half-written.
"""
)


@dataclass(frozen=True)
class Built:
    """An artifact and where it lies."""

    folder: Path
    manifest: Manifest


def build(
    specs: Annotated[list[str], typer.Argument(metavar="RULE_OR_SPEC...", help=SPEC_HELP)],
    state: Annotated[
        str | None,
        typer.Option(
            help="How state is stored: a family (dynamic8: signed first moment, unsigned second), "
            "a format for all slots, or one a slot joined by +.",
            show_default="dynamic8",
        ),
    ] = None,
    param: Annotated[
        str | None,
        typer.Option(help="The weights: float32, float16 or bfloat16.", show_default="float32"),
    ] = None,
    grad: Annotated[
        str | None, typer.Option(help="The gradient's dtype.", show_default="that of the weights")
    ] = None,
    param_format: Annotated[
        str | None,
        typer.Option(help="plain, master, split or stochastic.", show_default="plain"),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Elements that share a scale: a power of 2 from 64 to 4096.", show_default="256"
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variant; may be repeated."),
    ] = None,
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = NATIVE,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write.", show_default=False)
    ] = None,
    bundle: Annotated[
        bool,
        typer.Option("--bundle", help="Put TVM's runtime beside the module, to run without TVM."),
    ] = False,
    store: Annotated[
        bool, typer.Option("--store", help="Build into the store, where `load` looks first.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    if (out is None) == (not store):
        raise typer.BadParameter("give either -o OUT or --store")
    if bundle and store:
        raise typer.BadParameter("--bundle goes with -o OUT: the store is for this installation")
    options = SpecOptions(state, param, grad, param_format, block_size, tuple(settings or ()))
    wanted, preset = resolve(specs, options), get_target(target)
    built = _to_folders(wanted, preset, out, bundle=bundle) if out else _to_store(wanted, preset)
    if json:
        print_json({"artifacts": [_as_data(each_, preset) for each_ in built]})
    else:
        columns = ("spec", "target", "folder", "holds", "GPU code")
        print_table("built", columns, [_as_row(each_, preset) for each_ in built])


def compiler() -> Any:
    """tvm_qopt.compiler.build: this process becomes the compiler.  Raises ToolMissing."""
    try:
        from tvm_qopt.compiler import build
    except ModuleNotFoundError as error:
        if str(error.name).startswith("tvm_qopt"):
            raise
        raise ToolMissing(
            f"the compiler is not installed ({error}); `tvm-qopt doctor` says what to install"
        ) from error
    return build


def _to_folders(
    specs: Sequence[KernelSpec], preset: TargetPreset, out: Path, *, bundle: bool
) -> list[Built]:
    write = compiler().build
    folders = {spec.name: out if len(specs) == 1 else out / spec.name for spec in specs}
    by_name = {spec.name: spec for spec in specs}
    return [
        Built(folders[name], write(by_name[name], preset, folders[name], bundle=bundle))
        for name in each(list(by_name), "building")
    ]


def _to_store(specs: Sequence[KernelSpec], preset: TargetPreset) -> list[Built]:
    """What runs here only: the store checks what it keeps by loading it."""
    reason = why_not_here(preset)
    if reason is not None:
        raise UnsupportedSpec(f"--store: {preset.name} does not run here ({reason}); use -o OUT")
    from tvm_qopt.runtime.store import load_many

    kernels = load_many(list(specs), target=preset.name)
    return [Built(kernel.folder, kernel.manifest) for kernel in kernels]


def _holds(built: Built, preset: TargetPreset) -> str:
    files = ", ".join(sorted({name.partition("/")[0] for name in built.manifest.files}))
    linker = _missing_linker(built, preset)
    if linker is None:
        return files
    return f"{files} only: no {linker} to link it (apt install {debian_package(linker)})"


def _missing_linker(built: Built, preset: TargetPreset) -> str | None:
    from tvm_qopt.manifest import LIBRARY

    return None if LIBRARY in built.manifest.files else preset.linker


def _as_row(built: Built, preset: TargetPreset) -> tuple[str, ...]:
    manifest = built.manifest
    code = ", ".join(manifest.archs) or "-"
    return manifest.spec, manifest.target, str(built.folder), _holds(built, preset), code


def _as_data(built: Built, preset: TargetPreset) -> dict[str, Any]:
    linker = _missing_linker(built, preset)
    return {
        "spec": built.manifest.spec,
        "target": built.manifest.target,
        "folder": str(built.folder.resolve()),
        "files": sorted(built.manifest.files),
        "gpu_code": list(built.manifest.archs),
        "missing_linker": linker,
        "missing_package": debian_package(linker) if linker else None,
    }
