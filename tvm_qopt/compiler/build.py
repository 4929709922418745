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

from tvm_qopt.compiler.advance import step_functions
from tvm_qopt.compiler.checks import check_in_place, check_stages
from tvm_qopt.compiler.cuda import export_cuda, source_only
from tvm_qopt.compiler.define import OUT, define
from tvm_qopt.compiler.fatbin import list_cubins, list_ptx
from tvm_qopt.compiler.gate import mask_if_gated
from tvm_qopt.compiler.intrinsics import PERMUTES, PERMUTING
from tvm_qopt.compiler.launch import threads_of
from tvm_qopt.compiler.launches import launches_of, with_offsets
from tvm_qopt.compiler.many import many_function, many_of
from tvm_qopt.compiler.opencl import opencl_source, register_barrier_fence
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.compiler.realign import element_align, exact_constants, in_place
from tvm_qopt.compiler.record import Selection, find
from tvm_qopt.compiler.schedule import MAIN, TAIL, Choice, apply_schedule, get_schedule
from tvm_qopt.compiler.shaders import SUFFIX, check_storage, shaders
from tvm_qopt.compiler.stages import order_by_pass
from tvm_qopt.errors import (
    ArtifactInvalid,
    BuildError,
    DecisionMismatch,
    StoreError,
    ToolMissing,
)
from tvm_qopt.manifest import (
    LIBRARY,
    MANIFEST,
    OBJECT,
    OPENCL_DOUBLES,
    OPENCL_MANY,
    OPENCL_SOURCE,
    Launch,
    Manifest,
    artifact_key,
    sha256_of,
)
from tvm_qopt.spec import ADVANCE, STEP_ENTRIES, KernelSpec, many_entry, norms_entry, norms_of
from tvm_qopt.targets import NATIVE, TargetPreset, find_linker

PATTERN = "blockwise"
BUNDLE = "lib"
POOL = Path(__file__).with_name("pool.c")
BUNDLED = {"llvm": ("tvm_runtime",), "cuda": ("tvm_runtime", "tvm_runtime_cuda")}
SERIAL_BELOW = 1 << 16
"""Elements of a step for which one thread does not wake the others, which sleep between steps.  On
a virtual machine waking one took 50 us, and it began 50 to 100 later; dynamic8 takes 80 us for
65536 by one thread, 63 by two of which the other was awake a moment ago."""
STEPS_ALONE = ("cuda", "opencl")  # kinds whose artifacts can form the scalars of a step themselves
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
    kind, permutes = preset.kind, preset.kind in PERMUTING or PERMUTES in preset.features
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
    if kind not in ("llvm", "cuda"):
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
    with _build_errors(spec, preset):
        return _compile(_lower_all(spec, preset, names, decisions), preset)


def shaders_of(
    spec: KernelSpec,
    preset: TargetPreset,
    entries: Sequence[str] | None = None,
    decisions: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """File name -> source, of the same for metal or webgpu."""
    names = entries or entry_points(spec, preset.kind)
    with _build_errors(spec, preset):
        return _shaders(_lower_all(spec, preset, names, decisions), preset)


def _lower_all(
    spec: KernelSpec,
    preset: TargetPreset,
    names: Sequence[str],
    decisions: Mapping[str, int] | None,
) -> dict[str, tirx.PrimFunc]:
    if preset.kind == "webgpu":
        check_storage(spec)
    return {name: lower(spec, preset, name, decisions).final for name in names}


@contextmanager
def _build_errors(spec: KernelSpec, preset: TargetPreset) -> Iterator[None]:
    try:
        yield
    except (tvm.error.InternalError, s_tir.ScheduleError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BuildError(f"TVM cannot compile {spec.name} for {preset.name}: {reason}") from error


def _compile(functions: Mapping[str, tirx.PrimFunc], preset: TargetPreset) -> Any:
    module = tvm.IRModule(dict(functions))
    if preset.kind == "opencl":
        register_barrier_fence()
    with source_only() if preset.kind == "cuda" else nullcontext():
        return compile_module(module, tvm_target(preset))


def _shaders(functions: Mapping[str, tirx.PrimFunc], preset: TargetPreset) -> dict[str, str]:
    threads = {name: threads_of(func) for name, func in functions.items()}
    texts = shaders(_compile(functions, preset), preset.kind, threads)
    return {kernel + SUFFIX[preset.kind]: text for kernel, text in texts.items()}


def tvm_target(preset: TargetPreset) -> tvm.target.Target:
    """TVM's target; device kinds get this machine's host code."""
    attributes = {"kind": preset.kind, **preset.attributes}
    if preset.name == NATIVE:  # scheduling models and tuning flags; the features are given
        attributes["mcpu"] = tvm.target.codegen.llvm_get_system_cpu()
    if preset.on_cpu:
        return tvm.target.Target(attributes)
    host = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"}
    return tvm.target.Target(attributes, host=host)


def build(
    spec: KernelSpec,
    preset: TargetPreset,
    out: Path,
    *,
    bundle: bool = False,
    decisions: Mapping[str, int] | None = None,
) -> Manifest:
    """Write the artifact of a spec for a target to the folder `out`, whole or not at all.

    The schedule is that of a tuning record where one fits (`select`), or of `decisions`.
    `out` may not exist, be empty, or hold an artifact, which is replaced.  bundle: put TVM's
    runtime libraries beside the module.  Raises BuildError, ToolMissing, StoreError.
    """
    with _new_folder(out.resolve()) as folder:
        if decisions is None:
            selection = select(spec, preset)
        else:
            selection = Selection(None, "to be tried", decisions)
        names = entry_points(spec, preset.kind)
        with _build_errors(spec, preset):
            functions = _lower_all(spec, preset, names, selection.decisions)
            if preset.kind == "cuda":
                functions |= {
                    many_entry(name): many_function(func, many_entry(name))
                    for name, func in functions.items()
                }
            functions |= step_functions(spec) if preset.kind in STEPS_ALONE else {}
            launches = _compile_and_export(functions, preset, folder)
        if bundle:
            _bundle(preset, folder)
        manifest = _manifest(
            spec, preset, selection, folder, tuple({**functions, **launches}), launches
        )
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


def _compile_and_export(
    functions: Mapping[str, tirx.PrimFunc], preset: TargetPreset, folder: Path
) -> dict[str, Launch]:
    """kernel.so, or kernel.o where the target's linker is missing; OpenCL C beside it as text,
    whose launches are returned; Metal and WGSL as texts alone.

    What needs float64 is a text of its own for OpenCL: few devices have none, but those compile no
    text that speaks of it.
    """
    if preset.kind in SUFFIX:
        for file, text in _shaders(functions, preset).items():
            (folder / file).write_text(text, encoding="utf-8")
        return {}
    apart = {ADVANCE} & set(functions) if preset.kind == "opencl" else set()
    executable = _compile({n: f for n, f in functions.items() if n not in apart}, preset)
    _export(executable, preset, folder)
    if preset.kind != "opencl":
        return {}
    texts = {OPENCL_SOURCE: opencl_source(executable)}
    for name in apart:
        texts[OPENCL_DOUBLES] = opencl_source(_compile({name: functions[name]}, preset))
    launches = launches_of(functions, texts)
    texts = {file: with_offsets(mask_if_gated(text)) for file, text in texts.items()}
    of_tensors = {name: each for name, each in launches.items() if name not in STEP_ENTRIES}
    texts[OPENCL_MANY], many = many_of(texts[OPENCL_SOURCE], of_tensors)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return launches | many


def _export(executable: Any, preset: TargetPreset, folder: Path) -> None:
    linker = find_linker(preset)
    if linker is None:
        executable.mod.write_to_file(str(folder / OBJECT), "o")
        return
    link = linked_by(linker, with_pool=preset.on_cpu)
    if preset.kind == "cuda":
        export_cuda(executable, folder / LIBRARY, preset.archs, fcompile=link)
        return
    executable.export_library(str(folder / LIBRARY), fcompile=link)


def linked_by(linker: str, *, with_pool: bool = False) -> Callable[..., None]:
    """A linking function for TVM's export; with_pool: the runtime's threads (pool.c) go in too.

    It links in a temporary folder and copies: a linker says in its own words that a disk is full,
    a copy raises OSError.
    """
    added = ["-O2", "-pthread", str(POOL), "-lm"] if with_pool else []

    def link(output: str, objects: Sequence[str], **_: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            linked = str(Path(folder) / LIBRARY)
            command = [linker, "-shared", "-fPIC", "-o", linked, *objects, *added]
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
    spec: KernelSpec,
    preset: TargetPreset,
    selection: Selection,
    folder: Path,
    entries: tuple[str, ...],
    launches: Mapping[str, Launch],
) -> Manifest:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    library = folder / LIBRARY
    archs = (*list_cubins(library), *list_ptx(library)) if preset.kind == "cuda" else ()
    return Manifest(
        spec=spec.name,
        target=preset.name,
        kind=preset.kind,
        machine=preset.machine,
        features=preset.features,
        archs=archs,
        scalars=spec.scalars,
        tensors=spec.tensors,
        entries=entries,
        files={path.relative_to(folder).as_posix(): sha256_of(path) for path in files},
        key=artifact_key(spec, preset),
        serial_below=SERIAL_BELOW if preset.on_cpu else 0,
        launches=launches,
        schedule=selection.as_manifest(),
    )
