"""The pipeline from a spec to an artifact folder, as one list of named steps."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir, tirx

from tvm_qopt.compiler.checks import check_in_place, check_stages
from tvm_qopt.compiler.cuda import export_cuda, list_cubins, source_only
from tvm_qopt.compiler.define import OUT, define
from tvm_qopt.compiler.intrinsics import PERMUTES
from tvm_qopt.compiler.opencl import opencl_source, register_barrier_fence
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.compiler.realign import element_align, exact_constants, in_place
from tvm_qopt.compiler.record import Selection, find
from tvm_qopt.compiler.schedule import MAIN, TAIL, Choice, apply_schedule, get_schedule
from tvm_qopt.compiler.stages import order_by_pass
from tvm_qopt.errors import (
    ArtifactInvalid,
    BuildError,
    DecisionMismatch,
    StoreError,
    ToolMissing,
)
from tvm_qopt.manifest import LIBRARY, MANIFEST, OBJECT, Manifest, artifact_key, sha256_of
from tvm_qopt.spec import KernelSpec, norms_entry, norms_of
from tvm_qopt.targets import NATIVE, TargetPreset, find_linker

PATTERN = "blockwise"
BUNDLE = "lib"
OPENCL_SOURCE = "kernel.cl"
BUNDLED = {"llvm": ("tvm_runtime",), "cuda": ("tvm_runtime", "tvm_runtime_cuda")}
SERIAL_BELOW = 1 << 17
"""Elements that one thread does sooner than it wakes the others, which sleep between calls: waking
one took 100 to 300 us on a virtual machine, and one thread does 131072 in 55 (float32 state) to
165 us (dynamic8)."""
VECTOR_BYTES = 16  # alignment that `main` may assume on GPUs


@dataclass(frozen=True)
class Lowered:
    """One entry point after each step: what `tvm-qopt show` prints.

    choices: what the schedule chose, by name.
    """

    definition: tirx.PrimFunc
    scheduled: s_tir.Schedule
    final: tirx.PrimFunc
    choices: Mapping[str, Choice]


def lower(
    spec: KernelSpec, preset: TargetPreset, entry: str, decisions: Mapping[str, int] | None = None
) -> Lowered:
    """define -> order -> check -> align -> schedule -> check -> in place.

    decisions: choices of the schedule that are not to be the default.  Raises DecisionMismatch for
    a value that the schedule does not allow and, at `main`, for a name that it does not know.
    """
    norms, part = norms_of(entry)
    short = {"blocks": 1, "block_size": 0} if part == TAIL else {}
    kind, permutes = preset.kind, PERMUTES in preset.features
    cpu = preset.on_cpu
    func = define(spec, norms=norms, permutes=permutes, pairs=cpu, predicates=not cpu, **short)
    func = order_by_pass(func)
    check_stages(func, spec, norms)
    func = element_align(func, lambda itemsize: _alignment(kind, part, itemsize))
    decisions = {**preset.decisions, **(decisions or {})}
    placement = apply_schedule(func, kind, PATTERN, part, decisions)
    unknown = sorted(decisions.keys() - placement.choices)
    if unknown and entry == MAIN:  # other entry points have less to choose
        known = ", ".join(placement.choices) or "none"
        raise DecisionMismatch(f"{unknown[0]}: no choice of this schedule; there are: {known}")
    scheduled = placement.sch.mod["main"]
    check_in_place(scheduled)
    final = in_place(scheduled, OUT).with_attr("global_symbol", entry)
    if kind == "opencl":
        final = exact_constants(final)
    return Lowered(func, placement.sch, final, placement.choices)


def select(spec: KernelSpec, preset: TargetPreset) -> Selection:
    """The schedule that a build takes: of the best tuning record that fits, or the default."""
    return find(spec, preset, lambda decisions: lower(spec, preset, MAIN, decisions))


def entry_points(spec: KernelSpec, kind: str) -> tuple[str, ...]:
    """Those of the update, then those of each norm pass."""
    parts = get_schedule(kind, PATTERN).entries
    passes = range(len(spec.rule_.norms))
    return (*parts, *(norms_entry(number, part) for number in passes for part in parts))


def _alignment(kind: str, entry: str, itemsize: int) -> int:
    return VECTOR_BYTES if entry == MAIN and kind != "llvm" else itemsize


def compile_spec(
    spec: KernelSpec,
    preset: TargetPreset,
    entries: Sequence[str] | None = None,
    decisions: Mapping[str, int] | None = None,
) -> Any:
    """The TVM executable with every entry point of the kind's schedule, or with `entries`."""
    names = entries or entry_points(spec, preset.kind)
    try:
        module = tvm.IRModule({name: lower(spec, preset, name, decisions).final for name in names})
        if preset.kind == "opencl":
            register_barrier_fence()
        with source_only() if preset.kind == "cuda" else nullcontext():
            return compile_module(module, tvm_target(preset))
    except (tvm.error.InternalError, s_tir.ScheduleError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BuildError(f"TVM cannot compile {spec.name} for {preset.name}: {reason}") from error


def tvm_target(preset: TargetPreset) -> tvm.target.Target:
    """TVM's target; device kinds get this machine's host code."""
    attributes = {"kind": preset.kind, **preset.attributes}
    if preset.name == NATIVE:  # scheduling models and tuning flags; the features are given
        attributes["mcpu"] = tvm.target.codegen.llvm_get_system_cpu()
    if preset.on_cpu:
        return tvm.target.Target(attributes)
    host = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"}
    return tvm.target.Target(attributes, host=host)


def build(spec: KernelSpec, preset: TargetPreset, out: Path, *, bundle: bool = False) -> Manifest:
    """Write the artifact of a spec for a target to the folder `out`, whole or not at all.

    The schedule is that of a tuning record where one fits (`select`).
    `out` may not exist, be empty, or hold an artifact, which is replaced.  bundle: put TVM's
    runtime libraries beside the module.  Raises BuildError, ToolMissing, StoreError.
    """
    with _new_folder(out.resolve()) as folder:
        selection = select(spec, preset)
        executable = compile_spec(spec, preset, decisions=selection.decisions)
        _export(executable, preset, folder)
        if bundle:
            _bundle(preset, folder)
        manifest = _manifest(spec, preset, selection, folder)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out` at the end, or vanishes on an error."""
    _check_replaceable(out)
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=out.parent) as temporary:
            folder = Path(temporary) / out.name
            folder.mkdir(mode=0o700)
            yield folder
            if out.exists():
                out.rename(Path(temporary) / "replaced")
            folder.rename(out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error}") from error
    finally:
        for parent in made:  # innermost first
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _check_replaceable(out: Path) -> None:
    """Raise StoreError unless `out` is new, empty, or an artifact and nothing else."""
    if not out.exists():
        return
    if not out.is_dir():
        raise StoreError(f"{out}: a file is in the way of the artifact folder")
    held = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    try:
        text = (out / MANIFEST).read_text(encoding="utf-8") if held else ""
        ours = {MANIFEST, *Manifest.from_json(text, where=str(out)).files} if held else set()
    except (OSError, UnicodeDecodeError, ArtifactInvalid):
        ours = set()
    if held - ours or any(path.is_dir() and path.name != BUNDLE for path in out.iterdir()):
        raise StoreError(f"{out}: holds other files; give an empty or a new folder")


def _export(executable: Any, preset: TargetPreset, folder: Path) -> None:
    """kernel.so, or kernel.o where the target's linker is missing; OpenCL C beside it as text."""
    linker = find_linker(preset)
    if linker is None:
        executable.mod.write_to_file(str(folder / OBJECT), "o")
        return
    link = linked_by(linker)
    if preset.kind == "cuda":
        export_cuda(executable, folder / LIBRARY, preset.archs, fcompile=link)
        return
    executable.export_library(str(folder / LIBRARY), fcompile=link)
    if preset.kind == "opencl":
        (folder / OPENCL_SOURCE).write_text(opencl_source(executable), encoding="utf-8")


def linked_by(linker: str) -> Callable[..., None]:
    """A linking function for TVM's export.  It links in a temporary folder and copies: a linker
    says in its own words that a disk is full, a copy raises OSError."""

    def link(output: str, objects: Sequence[str], **_: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            linked = str(Path(folder) / LIBRARY)
            command = [linker, "-shared", "-fPIC", "-o", linked, *objects]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                raise BuildError(f"{linker} failed to link the module:\n{run.stderr[-2000:]}")
            shutil.copyfile(linked, output)

    return link


def _bundle(preset: TargetPreset, folder: Path) -> None:
    if preset.kind not in BUNDLED or preset.machine != platform.machine():
        raise ToolMissing(
            f"--bundle: this installation has no TVM runtime for {preset.name}; build without it"
        )
    source = Path(tvm.__file__).parent / "lib"
    (folder / BUNDLE).mkdir()
    for name in BUNDLED[preset.kind]:
        shutil.copy2(source / f"lib{name}.so", folder / BUNDLE)


def _manifest(
    spec: KernelSpec, preset: TargetPreset, selection: Selection, folder: Path
) -> Manifest:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    cubins = tuple(list_cubins(folder / LIBRARY)) if preset.kind == "cuda" else ()
    return Manifest(
        spec=spec.name,
        target=preset.name,
        kind=preset.kind,
        machine=preset.machine,
        features=preset.features,
        archs=cubins,
        scalars=spec.scalars,
        tensors=spec.tensors,
        entries=entry_points(spec, preset.kind),
        files={path.relative_to(folder).as_posix(): sha256_of(path) for path in files},
        key=artifact_key(spec, preset),
        serial_below=SERIAL_BELOW if preset.on_cpu else 0,
        schedule=selection.as_manifest(),
    )
