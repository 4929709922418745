"""A loaded kernel, and a call of it that was checked once."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvm_qopt.errors import (
    ArtifactInvalid,
    DeviceMismatch,
    DtypeMismatch,
    HyperOutOfRange,
    ShapeMismatch,
    UnknownName,
)
from tvm_qopt.manifest import LIBRARY, MANIFEST, Manifest, sha256_of
from tvm_qopt.runtime.arrays import (
    CPU,
    CUDA,
    CUDA_HOST,
    ArrayView,
    check_layout,
    copy_from_host,
    current_stream,
    full_like,
    view_of,
    window,
)
from tvm_qopt.runtime.library import load_module
from tvm_qopt.runtime.state import check_qmap, decode, read_number
from tvm_qopt.runtime.threads import call_parallel, get_num_threads
from tvm_qopt.spec import (
    CONST,
    GNORM_SCALE,
    GRAD_SCALE,
    HYPER,
    PARAM,
    PER_BLOCK,
    KernelSpec,
    TensorSpec,
)
from tvm_qopt.targets import NATIVE, host_features

BUNDLE = "lib"
FLOAT32_MAX = float(np.finfo(np.float32).max)
DEVICES = {"llvm": (CPU, CUDA_HOST), "cuda": (CUDA,)}
VECTOR_BYTES = 16  # what `main` needs of every address on a GPU, where there is a `main_any`


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

    @classmethod
    def open(cls, folder: Path) -> Kernel:
        """Check an artifact folder and load it.  Loading runs its code: see `tvm_qopt.load`."""
        manifest = read_manifest(folder)
        check_host(folder, manifest)
        bundled = folder / BUNDLE
        path = folder / LIBRARY
        module = load_module(
            path, kind=manifest.kind, bundled=bundled if bundled.is_dir() else None
        )
        return cls(folder, manifest, module)

    def __repr__(self) -> str:
        return f"<Kernel {self.manifest.spec} for {self.manifest.target}>"

    def init_state(self, param: Any) -> dict[str, Any]:
        """The state before the first step, beside `param` (its library and device).

        A dict by argument name: for a slot stored in codes `<slot>_codes` (uint8, the shape of the
        parameter) and `<slot>_scale` (float32, one a block), else `<slot>`; and
        `nonfinite_count` (int32, one a block), which counts elements met with a gradient or state
        that is not finite.  All decode to 0.
        """
        view = view_of("param", param)
        blocks = -(-view.size // self.spec.block_size)
        return {
            t.name: full_like(
                param, view.shape if t.per_element else (blocks,), t.storage, self._initial(t)
            )
            for t in self.spec.tensors
            if t.output and t.role != PARAM
        }

    def decode_state(self, state: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The float32 values of each slot, as NumPy arrays (copies on the host)."""
        return decode(self.spec, state)

    def _initial(self, t: TensorSpec) -> int:
        codes = {f"{slot.name}_codes": format_.zero_code for slot, format_ in self.spec.slots}
        return codes.get(t.name, 0)

    def plan(
        self,
        *,
        param: Any,
        grad: Any,
        state: Mapping[str, Any],
        qmap: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Check all arguments once and return a call that can be made at every step.

        param: the weights, updated in place.  grad: of the same shape; may be read-only.  state:
        as `init_state` makes it, updated in place.  qmap: slot name -> 256 float32 levels, for
        formats whose map is given at run time.  NumPy arrays, torch tensors or anything that
        exports DLPack; contiguous, at any element-aligned address, none overlapping another that
        is written.  A bfloat16 array of NumPy may be ml_dtypes' or its bits as uint16.

        Raises ShapeMismatch, DtypeMismatch or DeviceMismatch, each naming the argument.
        """
        given = {"param": param, "grad": grad}
        given |= {f"{slot}_qmap": levels for slot, levels in (qmap or {}).items()}
        for name in state.keys() & given.keys():
            raise ShapeMismatch(name, expected="no entry of this name in state", got="one")
        return Plan(self, {**given, **state})


class Plan:
    """A validated call: arguments bound to a kernel.  Make one a parameter, step it every time.

    It keeps the arrays alive.  When an array moves (a new storage), make a new plan.
    workspace: bytes of scratch memory that a step needs beside its arguments: none.
    """

    workspace = 0

    def __init__(self, kernel: Kernel, given: Mapping[str, Any]) -> None:
        self.kernel = kernel
        spec = kernel.spec
        self._rule, self._settings = spec.rule_, spec.all_settings
        self._hyper_given: dict[str, float] = {}
        self._hyper_values: dict[str, float] = {}
        self._first_step = self._rule.first_step(self._settings)
        views = _check_arguments(kernel, given)
        self.size = views["param"].size
        self._host_hyper = np.zeros(len(spec.scalars), np.float32)
        self._hyper = full_like(given["param"], self._host_hyper.shape, "float32", 0)
        if isinstance(self._hyper, np.ndarray):
            self._host_hyper = self._hyper
        views["hyper"] = view_of("hyper", self._hyper)
        self._device = views["param"].device
        self._views = views  # keeps the arrays alive
        self._calls = _calls(kernel, views)

    def step(
        self,
        *,
        step: int,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        found_inf: Any = None,
        stream: int | None = None,
        **hyper: float,
    ) -> bool:
        """Run the update once; the arrays of the plan change in place.

        step: the number of this update (the first is 1).  hyper: every hyper-parameter of the
        rule (`tvm_qopt.rules`), for adamw lr, beta1, beta2, eps, weight_decay.  grad_scale: the
        gradient is divided by it (a loss scale); gnorm_scale: and multiplied by it.  found_inf: a
        number or one-element array; non-zero leaves everything as it is.  stream: the handle of a
        CUDA stream, the caller's current one by default; the step is queued there, and found_inf
        is read on the host.

        Returns whether the update ran (False: skipped by found_inf).  Raises HyperOutOfRange or
        UnknownName before anything is written.
        """
        scalars = self._scalars(step, grad_scale, gnorm_scale, hyper)
        if found_inf is not None and read_number("found_inf", found_inf) != 0.0:
            return False
        self._host_hyper[:] = scalars
        if self._host_hyper is not self._hyper:
            copy_from_host(self._hyper, self._host_hyper)
        self._run(stream)
        return True

    def check(
        self, *, step: int, grad_scale: float = 1.0, gnorm_scale: float = 1.0, **hyper: float
    ) -> None:
        """Raise what `step` would raise for these scalars; run nothing."""
        self._scalars(step, grad_scale, gnorm_scale, hyper)

    def _scalars(
        self, step: int, grad_scale: float, gnorm_scale: float, hyper: dict[str, float]
    ) -> list[float]:
        """What the kernel reads, in the order of spec.scalars."""
        self._check_step(step)
        # Often the same from step to step.  (Only numbers compare without a surprise.)
        if any(type(x) is not float for x in hyper.values()) or hyper != self._hyper_given:
            self._hyper_values = self._check(hyper)
            self._hyper_given = hyper
        values = self._hyper_values
        factor = GNORM_SCALE.check(gnorm_scale) / GRAD_SCALE.check(grad_scale)
        derived = self._rule.derive(values, step, self._settings)
        scalars = [factor, *(derived[name] for name in self._rule.scalars)]
        if not all(abs(x) <= FLOAT32_MAX for x in scalars):
            where = [abs(x) <= FLOAT32_MAX for x in scalars].index(False)
            given = {"grad_scale": grad_scale, "gnorm_scale": gnorm_scale, **values, "step": step}
            got = ", ".join(f"{name}={value!r}" for name, value in given.items())
            name = self.kernel.spec.scalars[where]
            raise HyperOutOfRange(name, expected="a scalar that float32 can hold", got=got)
        return scalars

    def _check_step(self, step: object) -> None:
        valid = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        if not valid or not self._first_step <= step < 2**53:  # type: ignore[operator]
            wanted = f"an integer of at least {self._first_step}"
            raise HyperOutOfRange("step", expected=wanted, got=repr(step))

    def _check(self, hyper: Mapping[str, float]) -> dict[str, float]:
        names = {h.name for h in self._rule.hyper}
        for name in hyper.keys() - names:
            raise UnknownName(f"hyper-parameter of {self._rule.name}", name, names)
        for name in sorted(names - hyper.keys()):
            raise HyperOutOfRange(name, expected="a number", got="nothing")
        return {h.name: h.check(hyper[h.name]) for h in self._rule.hyper}

    def _run(self, stream: int | None) -> None:
        if self._device[0] == CUDA:
            _run_on_stream(self._device, self._hyper, self._calls, stream)
            return
        threads = get_num_threads()
        for function, serial, arguments in self._calls:
            if serial is None:
                function(*arguments)
            elif threads == 1:
                serial(*arguments)
            else:
                call_parallel(function, arguments)


_Call = tuple[Any, Any, tuple[Any, ...]]
"""A function, the serial function for one thread (None: the function is serial), its arguments."""


def _calls(kernel: Kernel, views: Mapping[str, ArrayView]) -> list[_Call]:
    """The full blocks by one entry point, a short last block by `tail`."""
    size, block = views["param"].size, kernel.spec.block_size
    blocks, rest = divmod(size, block)
    calls: list[_Call] = []
    if blocks:
        arguments = _arguments(kernel.spec, views, first=0, blocks=blocks, block=block)
        calls.append((*_entry(kernel, views, size), arguments))
    if rest:
        arguments = _arguments(kernel.spec, views, first=blocks, blocks=1, block=rest)
        calls.append((kernel.entries["tail"], None, arguments))
    return calls


def _entry(kernel: Kernel, views: Mapping[str, ArrayView], size: int) -> tuple[Any, Any]:
    entries = kernel.entries
    if "main_any" in entries:
        aligned = all(view.address % VECTOR_BYTES == 0 for view in views.values())
        return entries["main" if aligned else "main_any"], None
    if size < kernel.manifest.serial_below:
        return entries["main_serial"], None
    return entries["main"], entries["main_serial"]


def _arguments(
    spec: KernelSpec, views: Mapping[str, ArrayView], *, first: int, blocks: int, block: int
) -> tuple[Any, ...]:
    """The windows of `blocks` blocks of `block` elements from block number `first` on."""
    tensors = []
    for t in spec.tensors:
        shape, offset = t.shape, 0
        if t.per_element:
            shape, offset = (blocks, block), first * spec.block_size
        elif t.shape == PER_BLOCK:
            shape, offset = (blocks,), first
        sizes = [int(size) for size in shape]
        tensors.append(window(views[t.name], offset=offset, shape=sizes, dtype=t.storage))
    return tuple(tensors)


def _run_on_stream(
    device: tuple[int, int], hyper: Any, calls: list[_Call], stream: int | None
) -> None:
    """Queue the calls on a stream, by default the one that the caller's library uses now."""
    import tvm_ffi

    handle = current_stream(hyper, device[1]) if stream is None else stream
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", device[1]), handle):
        for function, _, arguments in calls:
            function(*arguments)


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
    host = platform.machine()
    if manifest.kind not in DEVICES:
        raise ArtifactInvalid(
            f"{folder}: built for {manifest.target}, which the Python runtime does not call"
        )
    if manifest.machine != host:
        raise ArtifactInvalid(
            f"{folder}: built for {manifest.target} ({manifest.machine}), this machine is {host}"
        )
    if LIBRARY not in manifest.files:
        raise ArtifactInvalid(
            f"{folder}: holds an object file only: no linker for {manifest.target} was installed "
            "where it was built"
        )
    missing = sorted(set(manifest.features) - host_features())
    if missing:
        raise ArtifactInvalid(
            f"{folder}: built for {manifest.target}, this CPU lacks {', '.join(missing)}; build it "
            f"with --target {NATIVE} here, or for a lower level such as llvm-x86-64-v2"
        )


def _check_arguments(kernel: Kernel, given: Mapping[str, Any]) -> dict[str, ArrayView]:
    """The views of all arguments but `hyper`, each of the right kind and none in another's way."""
    wanted = {t.name: t for t in kernel.spec.tensors if t.role != HYPER}
    for name in given.keys() - wanted.keys():
        raise ShapeMismatch(name, expected=f"one of {', '.join(wanted)}", got="an unknown argument")
    for name in wanted:
        if given.get(name) is None:
            raise ShapeMismatch(name, expected="an array", got="nothing")
    views = {name: view_of(name, given[name]) for name in wanted}
    param = views["param"]
    for name, t in wanted.items():
        _check_argument(kernel, t, views[name], param)
    _check_overlap(wanted, views)
    for name, t in wanted.items():
        if t.role == CONST:
            check_qmap(name, given[name], levels=int(t.shape[0]))
    return views


def _check_argument(kernel: Kernel, t: TensorSpec, view: ArrayView, param: ArrayView) -> None:
    if view.dtype not in (t.dtype, "uint16" if t.dtype == "bfloat16" else t.dtype):
        raise DtypeMismatch(t.name, expected=t.dtype, got=view.dtype)
    blocks = -(-param.size // kernel.spec.block_size)
    if t.per_element:
        shapes = [param.shape]
    else:
        shapes = [(blocks,) if t.shape == PER_BLOCK else tuple(int(s) for s in t.shape)]
    if view.shape not in shapes:
        raise ShapeMismatch(t.name, expected=f"shape {shapes[0]}", got=f"{view.shape}")
    if view.device[0] not in DEVICES[kernel.manifest.kind] or view.device != param.device:
        device = "cpu" if kernel.manifest.kind == "llvm" else kernel.manifest.kind
        where = f"a tensor on {device}" if view is param else f"{param.device_name}, as param"
        raise DeviceMismatch(t.name, expected=where, got=view.device_name)
    check_layout(t.name, view, output=t.output)


def _check_overlap(wanted: Mapping[str, TensorSpec], views: Mapping[str, ArrayView]) -> None:
    """Kernels assume that nothing they write is reachable through another argument."""
    spans = sorted(
        (v.address, v.address + v.size * v.itemsize, n) for n, v in views.items() if v.size
    )
    reach, written = (0, ""), (0, "")  # how far any span so far goes, and any that is written
    for start, end, name in spans:
        other_end, other = reach if wanted[name].output else written
        if start < other_end:
            got = f"memory shared with {other}"
            raise ShapeMismatch(name, expected="an array with memory of its own", got=got)
        reach = max(reach, (end, name))
        if wanted[name].output:
            written = max(written, (end, name))
