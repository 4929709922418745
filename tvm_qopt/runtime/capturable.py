"""A step whose number, hyper-parameters and found_inf live on the device: for CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tvm_qopt.errors import (
    DeviceMismatch,
    DtypeMismatch,
    ShapeMismatch,
    UnknownName,
    UnsupportedSpec,
)
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.runtime.arrays import copy_from_host, full_like, is_torch, view_of, window
from tvm_qopt.runtime.calls import Call, run
from tvm_qopt.runtime.scalars import Scalars, check_flag
from tvm_qopt.runtime.state import to_numpy
from tvm_qopt.spec import ADVANCE, GATE, GNORM_SCALE, GRAD_SCALE

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel


class Planned(Protocol):
    """What a capturable step is made of: a Plan or a PlanMany.  own: what its calls read beside the
    user's arrays."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def device(self) -> tuple[int, int]: ...

    @property
    def own(self) -> dict[str, Any]: ...

    def update_calls(self) -> Sequence[Call]: ...

    def check_that_memory_stays(self) -> None: ...

    def mark_written(self) -> object: ...


def clock_values(
    scalars: Scalars,
    hyper: dict[str, float],
    *,
    step: int,
    grad_scale: float,
    gnorm_scale: float,
    maximize: bool,
) -> dict[str, float]:
    """What the device counts from, by name; raises what a step would raise."""
    check_flag("maximize", maximize)
    scalars.of(step + 1, grad_scale, gnorm_scale, hyper)
    factor = -gnorm_scale if maximize else gnorm_scale
    return {**scalars.values, "step": step, "grad_scale": grad_scale, "gnorm_scale": factor}


def step_call(kernel: Kernel, entry: str, arrays: Mapping[str, Any]) -> Call:
    """The call of `gate` or `advance` on whole arrays."""
    names = kernel.spec.step_arguments(entry)
    views = [view_of(name, arrays[name]) for name in names]
    windows = tuple(window(v, offset=0, shape=(v.size,), dtype=v.dtype) for v in views)
    return Call.of(entry, None, kernel.entries[entry], Part(0, 1, 1), windows, names)


def check_found_inf(found_inf: Any, device: tuple[int, int]) -> None:
    """Raise unless it is one float32 on the device."""
    view = view_of("found_inf", found_inf)
    if view.dtype != "float32":
        raise DtypeMismatch("found_inf", expected="float32", got=view.dtype)
    if view.size != 1:
        raise ShapeMismatch("found_inf", expected="one element", got=f"shape {view.shape}")
    if view.device != device:
        wanted = "an array on the device of param"
        raise DeviceMismatch("found_inf", expected=wanted, got=view.device_name)


class CapturableStep:
    """The steps of a plan with nothing left to the host, made by `Plan.capturable` and
    `PlanMany.capturable`.

    `step` queues two or three kernels and no copy, so what a CUDA graph captured of it can be
    replayed for as many steps as one likes.  Where found_inf is not 0, and where a scalar is out of
    range, a step changes nothing and does not count.  It holds memory that those kernels read: keep
    it as long as their graph.
    """

    def __init__(
        self, plan: Planned, values: dict[str, float], random: Any, found_inf: Any
    ) -> None:
        self._plan, self._kernel, spec = plan, plan.kernel, plan.kernel.spec
        if ADVANCE not in self._kernel.entries:
            raise UnsupportedSpec(
                f"{spec.name}: a capturable step needs a GPU kernel of a rule whose scalars can be "
                "formed there: one without norms, with scalars in float64 (see README)"
            )
        like = plan.own["hyper"]
        self._values = np.array([values[name] for name in spec.clock])
        self._clock = full_like(like, (len(spec.clock),), "float64", 0)
        copy_from_host(self._clock, self._values)
        if random is not None:
            copy_from_host(plan.own["rng"], random)
        if found_inf is None:
            found_inf = full_like(like, (1,), "float32", 0)
        check_found_inf(found_inf, plan.device)
        self._found_inf = found_inf  # calls keep no array alive
        self._call = self._advance(found_inf)
        # Ahead of a capture every kernel has to be loaded; held back, this step changes nothing.
        held_back = full_like(like, (1,), "float32", 1)
        self._run(self._advance(held_back), None)

    def step(self, *, stream: Any = None) -> None:
        """Queue one update on a stream as `Plan.step` does; it neither waits nor copies."""
        self._plan.check_that_memory_stays()
        self._run(self._call, stream)
        self._plan.mark_written()

    def set(self, **values: Any) -> None:
        """Give hyper-parameters, grad_scale or gnorm_scale new values from the next step on.

        A number is checked and copied, on the stream that the arrays' library uses now.  A torch
        tensor of one element on the device is copied there, unchecked; that can be captured too.
        """
        spec = self._kernel.spec
        known = {h.name: h for h in (*spec.hyper, GRAD_SCALE, GNORM_SCALE)}
        for name, value in values.items():
            if name not in known:
                raise UnknownName(f"hyper-parameter of {spec.rule}", name, known)
            at = spec.clock.index(name)
            if is_torch(value) and is_torch(self._clock):
                self._clock[at : at + 1].copy_(value.detach().reshape(1), non_blocking=True)
            else:
                copy_from_host(self._clock[at : at + 1], np.array([known[name].check(value)]))

    def steps(self) -> int:
        """The number of updates made so far; waits for the device."""
        return int(to_numpy(self._clock)[0])

    def _advance(self, found_inf: Any) -> Call:
        arrays = {**self._plan.own, "clock": self._clock, "found_inf": found_inf}
        return step_call(self._kernel, ADVANCE, arrays)

    def _run(self, advance: Call, stream: Any) -> None:
        plan = self._plan
        calls = [advance, *plan.update_calls()]
        run(self._kernel, calls, plan.device, like=plan.own["hyper"], stream=stream)


def gate_call(kernel: Kernel, hyper: Any, found_inf: Any) -> Call:
    """Holds the update back, on the device, where found_inf says so."""
    return step_call(kernel, GATE, {"hyper": hyper, "found_inf": found_inf})
