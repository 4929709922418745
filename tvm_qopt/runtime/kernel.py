"""A loaded kernel: an artifact that was checked, and its entry points."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_qopt.errors import ArtifactInvalid, DtypeMismatch, ShapeMismatch
from tvm_qopt.manifest import LIBRARY, MANIFEST, Manifest, sha256_of
from tvm_qopt.runtime.arguments import DEVICES, as_list
from tvm_qopt.runtime.arrays import CUDA, float32_copy, new_arrays, view_of
from tvm_qopt.runtime.library import load_module
from tvm_qopt.runtime.opencl import SourceModule
from tvm_qopt.runtime.plan import Plan
from tvm_qopt.runtime.plan_many import PlanMany
from tvm_qopt.runtime.state import check_qmaps, decode, initial_parts
from tvm_qopt.spec import BESIDE, COUNTER, MANY, STATE, STEP_ENTRIES, KernelSpec, norms_of
from tvm_qopt.targets import NATIVE, host_features
from tvm_qopt.version import TVM_VERSION

BUNDLE = "lib"


class Kernel:
    """A compiled update: the entry points of an artifact and its manifest.

    Made by `tvm_qopt.load`.  Safe to share between threads; a Plan is not.
    """

    def __init__(self, folder: Path, manifest: Manifest, module: Any) -> None:
        self.folder = folder
        self.manifest = manifest
        self.spec = KernelSpec.parse(manifest.spec)
        try:
            self.entries = {name: module[name] for name in manifest.entries}
        except AttributeError as error:
            raise ArtifactInvalid(f"{folder}: the module lacks an entry point: {error}") from None
        self.parts = tuple(
            name
            for name in manifest.entries
            if name not in STEP_ENTRIES and not name.endswith(MANY) and norms_of(name)[0] is None
        )
        lacking = {"main", "tail"} - set(self.parts)
        if lacking:
            raise ArtifactInvalid(f"{folder}: the manifest lacks the entry points {lacking}")

    @classmethod
    def open(cls, folder: Path) -> Kernel:
        """Check an artifact folder and load it.  Loading runs its code: see `tvm_qopt.load`."""
        manifest = read_manifest(folder)
        check_host(folder, manifest)
        return cls(folder, manifest, _module_of(folder, manifest))

    def __repr__(self) -> str:
        return f"<Kernel {self.manifest.spec} for {self.manifest.target}>"

    def check_runs_on(self, device: tuple[int, int]) -> None:
        """Raise ArtifactInvalid where a GPU (type and number, as DLPack has them) cannot run it."""
        if device[0] == CUDA:
            from tvm_qopt.runtime.cuda import check_cubins, device_arch

            check_cubins(self.manifest.archs, device_arch(device[1]))

    def init_state(self, param: Any, initial: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The state before the first step, beside `param` (its library and device).

        initial: slot -> the value of all its elements, 0 by default (Adagrad's
        initial_accumulator_value is that of `sum`).

        A dict by argument name: for a slot stored in codes `<slot>_codes` (uint8, the shape of the
        parameter) and `<slot>_scale` (float32, one a block), else `<slot>`; and
        `nonfinite_count` (int32, one a block), which counts elements met with a gradient or state
        that is not finite.  With a parameter format also what it keeps beside
        the weights: `param_master` (float32) or `param_low` (uint16), made from `param`.
        """
        return self.init_states([param], initial)[0]

    def init_states(
        self, params: Sequence[Any], initial: Mapping[str, float] | None = None
    ) -> list[dict[str, Any]]:
        """`init_state` of many parameters of one device.

        What begins with one value is a slice of one array for all of them: on a GPU fewer
        allocations, and on OpenCL what `plan_many` needs to make one launch.
        """
        params = as_list("params", params)
        views = [view_of("param", param) for param in params]
        states: list[dict[str, Any]] = [{} for _ in params]
        start = initial_parts(self.spec, initial or {})
        for t in self.spec.tensors if params else ():
            if t.name == "param_master":
                arrays = [
                    float32_copy(p, view.dtype) for p, view in zip(params, views, strict=True)
                ]
            elif t.role in (STATE, BESIDE, COUNTER):
                held = [t.held(view.size, self.spec.block_size) for view in views]
                shapes = [h or view.shape for h, view in zip(held, views, strict=True)]
                arrays = new_arrays(params[0], shapes, t.dtype, start.get(t.name, 0))
            else:
                continue
            for state, array in zip(states, arrays, strict=True):
                state[t.name] = array
        return states

    def decode_state(
        self, state: Mapping[str, Any], qmap: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The float32 values of each slot, as NumPy arrays (copies on the host).

        qmap as for `plan`.  4-bit codes of an odd number of elements give one more.
        """
        maps = check_qmaps(self.spec, qmap)
        return decode(self.spec, _state_dict(state), maps)

    def plan(
        self,
        *,
        param: Any,
        grad: Any = None,
        state: Mapping[str, Any],
        qmap: Mapping[str, Any] | None = None,
        result: Any = None,
    ) -> Plan:
        """Check all arguments once and return a call that can be made at every step.

        param: the weights, updated in place.  grad: of the same shape; may be read-only.  state:
        as `init_state` makes it, updated in place.  qmap: slot name -> 256 float32 levels, for
        formats whose map is given at run time.  result: for a rule that writes a tensor of its own
        in place of the parameter, like `param`.  NumPy arrays, torch tensors, anything that
        exports DLPack, or for OpenCL pyopencl arrays; contiguous, at any element-aligned address,
        none overlapping another that is written.  A bfloat16 array of NumPy may be ml_dtypes' or
        its bits as uint16.

        The plan keeps these very buffers.  Where torch makes a new gradient each time (its
        zero_grad frees the old one), give it to `Plan.step`.

        Raises ShapeMismatch, DtypeMismatch or DeviceMismatch, each naming the argument.
        """
        return Plan(self, self._arguments(param, grad, state, qmap, result))

    def plan_many(self, tensors: Iterable[Mapping[str, Any]]) -> PlanMany:
        """Check the arguments of many tensors once and return a call that steps them together.

        tensors: for each the arguments of `plan`, by name.  To the bit what one plan each does.  On
        a CPU the threads take blocks of all of them in turn.  On a GPU their full blocks are one
        launch and their short last ones another; on CUDA those at addresses that 16 bytes do not
        divide are a third, on OpenCL tensors have to share a memory object for each argument
        (slices of one array; `init_states` makes such states).
        """
        names, tensors = ("param", "grad", "state", "qmap", "result"), as_list("tensors", tensors)
        for i, given in enumerate(tensors):
            if not isinstance(given, Mapping):
                wanted = "a dict of arguments"
                raise DtypeMismatch(f"tensor {i}", expected=wanted, got=type(given).__name__)
            for name in given.keys() - set(names):
                wanted = f"one of {', '.join(names)}"
                raise ShapeMismatch(f"tensor {i}", expected=wanted, got=f"an argument {name}")
        return PlanMany(self, [self._arguments(*map(given.get, names)) for given in tensors])

    def _arguments(
        self, param: Any, grad: Any, state: Any, qmap: Any, result: Any
    ) -> dict[str, Any]:
        """The arguments of a plan, by the names of tensors."""
        state, given = _state_dict(state), {"param": param}
        if grad is not None or self.spec.rule_.reads_grad:
            given["grad"] = grad
        if result is not None:
            given[self.spec.rule_.result or "result"] = result
        maps = check_qmaps(self.spec, qmap)
        given |= {f"{slot}_qmap": levels for slot, levels in maps.items()}
        for name in state.keys() & given.keys():
            raise ShapeMismatch(name, expected="no entry of this name in state", got="one")
        return {**given, **state}


def _state_dict(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise DtypeMismatch("state", expected="a dict of arrays", got=type(state).__name__)
    return state


def _module_of(folder: Path, manifest: Manifest) -> Any:
    if manifest.kind == "opencl":
        files = {launch.source for launch in manifest.launches.values()} & set(manifest.files)
        sources = {name: (folder / name).read_text(encoding="utf-8") for name in files}
        return SourceModule(sources, manifest.launches, str(folder))
    bundled = folder / BUNDLE
    return load_module(
        folder / LIBRARY, kind=manifest.kind, bundled=bundled if bundled.is_dir() else None
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact whose files are what it says they are.

    Raises ArtifactInvalid: not an artifact, of another schema, truncated or altered.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactInvalid(f"{folder}: not an artifact: {error}") from None
    manifest = Manifest.from_json(text, where=str(path))
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ArtifactInvalid(f"{file}: missing; build the artifact again")
        if sha256_of(file) != expected:
            raise ArtifactInvalid(f"{file}: truncated or altered; build the artifact again")
    return manifest


def check_host(folder: Path, manifest: Manifest) -> None:
    """Raise ArtifactInvalid where this machine cannot run the artifact."""
    built = manifest.versions.get("tvm")
    if built != TVM_VERSION:
        raise ArtifactInvalid(
            f"{folder}: built by TVM {built}, this tvm_qopt is for {TVM_VERSION}; build it again"
        )
    try:
        check_machine(manifest.target, manifest.kind, manifest.machine, manifest.features)
    except ArtifactInvalid as error:
        raise ArtifactInvalid(f"{folder}: {error}") from None
    if LIBRARY not in manifest.files:
        raise ArtifactInvalid(
            f"{folder}: holds an object file only: no linker for {manifest.target} was installed "
            "where it was built"
        )


def check_machine(target: str, kind: str, machine: str, features: Sequence[str]) -> None:
    """Raise ArtifactInvalid where kernels for a target cannot run on this machine."""
    host = platform.machine()
    if kind not in DEVICES:
        raise ArtifactInvalid(f"built for {target}, which the Python runtime does not call")
    if machine != host:
        raise ArtifactInvalid(f"built for {target} ({machine}), this machine is {host}")
    missing = sorted(set(features) - host_features())
    if missing:
        raise ArtifactInvalid(
            f"built for {target}, this CPU lacks {', '.join(missing)}; build it with --target "
            f"{NATIVE} here, or for a lower level such as llvm-x86-64-v2"
        )
