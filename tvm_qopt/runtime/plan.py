"""A call of a kernel that was checked once and can be made at every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import HyperOutOfRange, ShapeMismatch, UnknownName
from tvm_qopt.rules import CLIP_SCALAR
from tvm_qopt.runtime.arguments import (
    Part,
    check_argument,
    check_arguments,
    window_of,
    windows,
)
from tvm_qopt.runtime.arrays import (
    CUDA,
    ArrayView,
    copy_from_host,
    current_stream,
    full_like,
    is_torch,
    version_counter,
    view_of,
)
from tvm_qopt.runtime.state import read_number, to_numpy
from tvm_qopt.runtime.threads import call_parallel, get_num_threads
from tvm_qopt.spec import (
    CLIP_GRADIENT,
    GNORM_SCALE,
    GRAD_SCALE,
    RNG,
    RNG_SCALARS,
    WORKSPACE,
    norm_tensor,
    norms_entry,
)

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel

FLOAT32_MAX = float(np.finfo(np.float32).max)
NO_CLIP = math.inf
VECTOR_BYTES = 16  # what `main` needs of every address on a GPU, where there is a `main_any`


class Plan:
    """A validated call: arguments bound to a kernel.  Make one a parameter, step it every time.

    It keeps the arrays alive.  When an array moves (a new storage), make a new plan.
    workspace: bytes of scratch memory that it holds beside its arguments, for partial norms.
    """

    def __init__(self, kernel: Kernel, given: Mapping[str, Any]) -> None:
        self.kernel = kernel
        spec = kernel.spec
        self._rule, self._settings = spec.rule_, spec.all_settings
        self._hyper_given: dict[str, float] | None = None
        self._hyper_values: dict[str, float] = {}
        self._hyper_ranges = spec.hyper
        self._first_step = self._rule.first_step(self._settings)
        views = check_arguments(spec, kernel.manifest.kind, given)
        self.size = views["param"].size
        self._device = views["param"].device
        self._host_hyper = np.zeros(len(spec.scalars), np.float32)
        self._hyper = full_like(given["param"], self._host_hyper.shape, "float32", 0)
        if isinstance(self._hyper, np.ndarray):
            self._host_hyper = self._hyper
        blocks = -(-self.size // spec.block_size)
        self._partials = {
            t.name: full_like(given["param"], (blocks,), t.dtype, 0)
            for t in spec.tensors
            if t.role == WORKSPACE
        }
        self.workspace = 4 * blocks * len(self._partials)
        own = {"hyper": self._hyper, **self._partials}
        if any(t.role == RNG for t in spec.tensors):
            own["rng"] = full_like(given["param"], (len(RNG_SCALARS),), "int32", 0)
            own["block_number"] = full_like(given["param"], (blocks,), "int32", 0)
            copy_from_host(own["block_number"], np.arange(blocks, dtype=np.int32))
        self._rng = own.get("rng")
        views |= {name: view_of(name, array) for name, array in own.items()}
        self._views = views  # keeps the arrays alive
        self._watched = [
            (n, array, views[n].address) for n, array in given.items() if is_torch(array)
        ]
        self._bind()
        self._mark_written = version_counter(given["param"])

    def _bind(self) -> None:
        kernel, passes = self.kernel, range(len(self._rule.norms))
        self._calls = _calls(kernel, self._views, None)
        self._norm_calls = [_calls(kernel, self._views, i) for i in passes]

    def step(
        self,
        *,
        step: int,
        grad: Any = None,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        maximize: bool = False,
        seed: int | None = None,
        found_inf: Any = None,
        stream: int | None = None,
        **hyper: float,
    ) -> bool:
        """Run the update once; the arrays of the plan change in place.

        step: the number of this update (the first is 1).  hyper: every hyper-parameter of the
        rule (`tvm_qopt.rules`), for adamw lr, beta1, beta2, eps, weight_decay.  grad: a gradient in
        place of the planned one from now on, where its memory has moved (torch's zero_grad frees
        it).  grad_scale: the
        gradient is divided by it (a loss scale); gnorm_scale: and multiplied by it; maximize: and
        its sign is changed.  seed: of stochastic weights (0 by default), with `step` and the place
        of an element all that its rounding depends on.  found_inf: a number or one-element array;
        non-zero leaves everything as it is.  stream: the handle of a CUDA stream, the caller's
        current one by default; the step is queued there, and found_inf is read on the host.

        Returns whether the update ran.  It does not, and nothing changes, where found_inf says so
        and where a norm that the rule needs is beyond float32.  A rule with norms waits for them
        on the host.  Raises HyperOutOfRange or UnknownName before anything is written.
        """
        scalars = self._scalars(step, grad_scale, gnorm_scale, hyper)
        if maximize:
            scalars[0] = -scalars[0]
        random = self._random(seed, step)
        if grad is not None:
            self._take_grad(grad)
        if found_inf is not None and read_number("found_inf", found_inf) != 0.0:
            return False
        self._check_that_memory_stays()
        self._write(scalars)
        if random is not None:
            copy_from_host(self._rng, random)
        for number, norms in enumerate(self._rule.norms):
            found = self.norms(number, stream=stream)
            if not all(map(math.isfinite, found.values())):
                return False
            made = norms.finish(found, self._hyper_values, self._settings)
            if not all(abs(x) <= FLOAT32_MAX for x in made.values()):
                return False
            for name, value in made.items():
                scalars[self.kernel.spec.scalars.index(name)] = value
            self._write(scalars)
        self._run(self._calls, stream)
        self._mark_written()
        return True

    def _check_that_memory_stays(self) -> None:
        """Raise where torch has moved or freed the storage of a tensor that was planned."""
        for name, tensor, address in self._watched:
            if tensor.data_ptr() != address and self._views[name].size:
                wanted = "the memory that was planned (make a new plan where a tensor moves)"
                raise ShapeMismatch(name, expected=wanted, got=f"other: {tensor.data_ptr():#x}")

    def _take_grad(self, grad: Any) -> None:
        """Read the gradient here from now on."""
        spec, kind = self.kernel.spec, self.kernel.manifest.kind
        if "grad" not in self._views:
            what = f"none: {self._rule.name} reads no gradient"
            raise ShapeMismatch("grad", expected=what, got="one")
        before = self._views["grad"]
        after = check_argument(spec, kind, "grad", grad, self._views)
        self._views["grad"] = after
        self._watched = [w for w in self._watched if w[0] != "grad"]
        if is_torch(grad):
            self._watched.append(("grad", grad, after.address))
        if after.address != before.address:
            self._bind_grad()

    def _bind_grad(self) -> None:
        """Put the gradient's windows in the place of the old ones."""
        spec = self.kernel.spec
        if "main_any" in self.kernel.parts:  # its alignment decides the entry point
            self._bind()
            return
        index = [t.name for t in spec.tensors].index("grad")
        for calls in (self._calls, *self._norm_calls):
            for i, call in enumerate(calls):
                argument = window_of(spec, spec.tensors[index], self._views["grad"], call.part)
                calls[i] = call.with_argument(index, argument)

    def check(
        self, *, step: int, grad_scale: float = 1.0, gnorm_scale: float = 1.0, **hyper: float
    ) -> None:
        """Raise what `step` would raise for these scalars; run nothing."""
        self._scalars(step, grad_scale, gnorm_scale, hyper)

    def norms(self, number: int = 0, *, stream: int | None = None) -> Mapping[str, float]:
        """Run norm pass `number` alone, with the scalars of the last step: name -> Euclidean norm.

        Sums of a block in float32, of the blocks in float64, in one order whatever the threads.
        """
        self._run(self._norm_calls[number], stream)
        values = {}
        for name in self._rule.norms[number].names:
            partial = to_numpy(self._partials[norm_tensor(number, name)])
            values[name] = math.sqrt(float(partial.sum(dtype=np.float64)))
        return values

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
        scalars = [factor, *(derived.get(name, 0.0) for name in self._rule.scalars)]
        if CLIP_SCALAR in self.kernel.spec.scalars:
            clip = values[CLIP_GRADIENT.name]
            scalars.insert(1, clip if clip >= 0 else NO_CLIP)
        held = [abs(x) <= FLOAT32_MAX or x == NO_CLIP for x in scalars]
        if not all(held):
            where = held.index(False)
            given = {"grad_scale": grad_scale, "gnorm_scale": gnorm_scale, **values, "step": step}
            got = ", ".join(f"{name}={value!r}" for name, value in given.items())
            name = self.kernel.spec.scalars[where]
            raise HyperOutOfRange(name, expected="a scalar that float32 can hold", got=got)
        return scalars

    def _random(self, seed: int | None, step: int) -> npt.NDArray[np.int32] | None:
        """What the generator starts from; a seed is for specs that have one."""
        if self._rng is None:
            if seed is not None:
                what = f"no seed: {self.kernel.spec.param_format} weights are not random"
                raise HyperOutOfRange("seed", expected=what, got=repr(seed))
            return None
        seed = 0 if seed is None else seed
        if (
            isinstance(seed, bool)
            or not isinstance(seed, (int, np.integer))
            or not 0 <= seed < 2**64
        ):
            raise HyperOutOfRange("seed", expected="an integer in [0, 2^64)", got=repr(seed))
        words = np.array([seed & 0xFFFFFFFF, seed >> 32, step & 0xFFFFFFFF], np.uint32)
        return words.view(np.int32)

    def _check_step(self, step: object) -> None:
        valid = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        if not valid or not self._first_step <= step < 2**53:  # type: ignore[operator]
            wanted = f"an integer from {self._first_step} to 2^53 - 1"
            raise HyperOutOfRange("step", expected=wanted, got=repr(step))

    def _check(self, hyper: Mapping[str, float]) -> dict[str, float]:
        names = {h.name for h in self._hyper_ranges}
        for name in hyper.keys() - names:
            raise UnknownName(f"hyper-parameter of {self._rule.name}", name, names)
        defaults = {h.name: h.default for h in self._hyper_ranges if h.default is not None}
        given = {**defaults, **hyper}
        for name in sorted(names - given.keys()):
            raise HyperOutOfRange(name, expected="a number", got="nothing")
        return {h.name: h.check(given[h.name]) for h in self._hyper_ranges}

    def _write(self, scalars: list[float]) -> None:
        self._host_hyper[:] = scalars
        if self._host_hyper is not self._hyper:
            copy_from_host(self._hyper, self._host_hyper)

    def _run(self, calls: list[_Call], stream: int | None) -> None:
        if not calls:  # an empty tensor
            return
        if self._device[0] == CUDA:
            _run_on_stream(self._device, self._hyper, calls, stream)
            return
        if get_num_threads() == 1 or all(call.parallel is None for call in calls):
            _call_in_turn([(call.serial, call.arguments) for call in calls])
        else:
            call_parallel([(call.parallel or call.serial, call.arguments) for call in calls], self)


def _call_in_turn(calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
    """Make the calls on this thread; Ctrl-C, which comes when one returns, waits for the rest."""
    function, arguments = calls[0]
    try:
        function(*arguments)
    finally:
        if len(calls) > 1:
            _call_in_turn(calls[1:])


@dataclass(frozen=True)
class _Call:
    """The function for many threads (None where one thread is sooner), that for one, and what they
    are called with."""

    parallel: Any
    serial: Any
    part: Part
    arguments: tuple[Any, ...]

    def with_argument(self, index: int, argument: Any) -> _Call:
        arguments = (*self.arguments[:index], argument, *self.arguments[index + 1 :])
        return dataclasses.replace(self, arguments=arguments)


def _calls(kernel: Kernel, views: Mapping[str, ArrayView], norms: int | None) -> list[_Call]:
    """The full blocks by one entry point, a short last block by `tail`; of a norm pass or of the
    update."""
    size, block = views["param"].size, kernel.spec.block_size
    blocks, rest = divmod(size, block)
    entries = {part: kernel.entries[_entry(part, norms)] for part in kernel.parts}
    calls: list[_Call] = []
    if blocks:
        part = Part(0, blocks, block)
        parallel, serial = _choose(entries, views, small=size < kernel.manifest.serial_below)
        calls.append(_Call(parallel, serial, part, windows(kernel.spec, views, part)))
    if rest:
        part = Part(blocks, 1, rest)
        calls.append(_Call(None, entries["tail"], part, windows(kernel.spec, views, part)))
    return calls


def _entry(part: str, norms: int | None) -> str:
    return part if norms is None else norms_entry(norms, part)


def _choose(
    entries: Mapping[str, Any], views: Mapping[str, ArrayView], *, small: bool
) -> tuple[Any, Any]:
    """The functions for the full blocks: for many threads, and for one (or for a GPU)."""
    if "main_any" in entries:
        aligned = all(view.address % VECTOR_BYTES == 0 for view in views.values())
        return None, entries["main" if aligned else "main_any"]
    return None if small else entries["main"], entries["main_serial"]


def _run_on_stream(
    device: tuple[int, int], hyper: Any, calls: list[_Call], stream: int | None
) -> None:
    """Queue the calls on a stream, by default the one that the caller's library uses now."""
    import tvm_ffi

    handle = current_stream(hyper, device[1]) if stream is None else stream
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", device[1]), handle):
        for call in calls:
            call.serial(*call.arguments)
