"""A call of a kernel on many tensors that was checked once and can be made at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvm_qopt.errors import HyperOutOfRange, ShapeMismatch, UnsupportedSpec
from tvm_qopt.runtime.arguments import as_list, check_overlap, check_stays
from tvm_qopt.runtime.arrays import is_torch, version_counter, view_of
from tvm_qopt.runtime.batch import Batch
from tvm_qopt.runtime.calls import Call
from tvm_qopt.runtime.capturable import CapturableStep, clock_values
from tvm_qopt.runtime.scalars import Scalars, check_flag
from tvm_qopt.runtime.state import read_number

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel


class PlanMany:
    """Tensors that step together, made by `Kernel.plan_many`: the bits of one `Plan` each.

    It keeps their arrays alive.  Not to be stepped by two threads at once.
    """

    def __init__(self, kernel: Kernel, tensors: Sequence[Mapping[str, Any]]) -> None:
        self.kernel = kernel
        self._given = [dict(given) for given in tensors]
        self._batch = Batch(kernel)
        self._members = self._batch.add_all(self._given)
        self._check_apart(self._given)
        self._marks = [version_counter(given["param"]) for given in self._given]

    def __len__(self) -> int:
        return len(self._members)

    def step(
        self,
        *,
        step: int,
        grads: Sequence[Any] | None = None,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        maximize: bool = False,
        seed: int | None = None,
        found_inf: Any = None,
        stream: Any = None,
        **hyper: float,
    ) -> list[bool]:
        """Update every tensor once; arguments as for `Plan.step`.

        grads: gradients in place of the planned ones from now on, one a tensor.  found_inf is read
        on the host.  Returns which updates ran.  Raises before anything is written.
        """
        check_flag("maximize", maximize)
        scalars = self._batch.scalars(
            hyper, step=step, grad_scale=grad_scale, gnorm_scale=gnorm_scale, maximize=maximize
        )
        random = any("rng" in member.own for member in self._members)
        if seed is not None and not random:
            what = f"no seed: {self.kernel.spec.param_format} weights are not random"
            raise HyperOutOfRange("seed", expected=what, got=repr(seed))
        self._follow(self._given if grads is None else self._with_grads(grads))
        if found_inf is not None and read_number("found_inf", found_inf) != 0.0:
            return [False] * len(self)
        for member in self._members if random else ():
            member.seed(0 if seed is None else seed, step)
        ran = self._batch.step(self._members, scalars, stream=stream)
        for mark, runs in zip(self._marks, ran, strict=True):
            if runs:
                mark()
        return ran

    def capturable(
        self,
        *,
        step: int = 0,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        maximize: bool = False,
        found_inf: Any = None,
        **hyper: float,
    ) -> CapturableStep:
        """The steps of these tensors with step, hyper-parameters and found_inf on the device;
        arguments as for `Plan.capturable`.

        Raises UnsupportedSpec also for stochastic weights: their generator is a tensor's own.
        """
        if not self._members:
            raise ShapeMismatch("tensors", expected="one at least", got="none")
        if "rng" in self.own:
            raise UnsupportedSpec(
                f"{self.kernel.spec.name}: one kernel cannot form the random numbers of several "
                "tensors; make a plan and a capturable step of each"
            )
        scales = {"grad_scale": grad_scale, "gnorm_scale": gnorm_scale}
        scalars = Scalars(self.kernel.spec)
        values = clock_values(scalars, hyper, step=step, maximize=maximize, **scales)
        return CapturableStep(self, values, None, found_inf)

    @property
    def device(self) -> tuple[int, int]:
        """Where the tensors are, as DLPack has it."""
        return self._members[0].device

    @property
    def own(self) -> dict[str, Any]:
        """What the calls read beside the user's arrays; of the first tensor what is not shared."""
        return self._members[0].own

    def update_calls(self) -> Sequence[Call]:
        """What a step runs when its scalars are there."""
        return self._batch.update_calls(self._members)

    def check_that_memory_stays(self) -> None:
        """Raise where torch has moved or freed the storage of a tensor that was planned."""
        for i, (given, member) in enumerate(zip(self._given, self._members, strict=True)):
            for name, address in member.addresses.items():
                check_stays(f"{name} of tensor {i}", given[name], address)

    def mark_written(self) -> None:
        for mark in self._marks:
            mark()

    def _check_apart(self, tensors: Sequence[Mapping[str, Any]]) -> None:
        """Raise where a tensor's output is in another tensor's way."""
        outputs = {t.name: t.output for t in self.kernel.spec.tensors}
        check_overlap(
            (view_of(name, x), f"{name} of tensor {i}", outputs[name])
            for i, given in enumerate(tensors)
            for name, x in given.items()
        )

    def _with_grads(self, grads: Sequence[Any]) -> list[dict[str, Any]]:
        """The arguments of each tensor with another gradient."""
        grads = as_list("grads", grads)
        if len(grads) != len(self):
            wanted = f"{len(self)} gradients"
            raise ShapeMismatch("grads", expected=wanted, got=str(len(grads)))
        return [{**given, "grad": grad} for given, grad in zip(self._given, grads, strict=True)]

    def _follow(self, tensors: list[dict[str, Any]]) -> None:
        """Bind again what has another gradient, or memory that torch has moved."""
        members = list(self._members)
        for i, (given, before) in enumerate(zip(tensors, self._given, strict=True)):
            addresses = {n: x.data_ptr() for n, x in given.items() if is_torch(x)}
            same = given.get("grad") is before.get("grad")
            if not same or addresses != members[i].addresses:
                members[i] = self._batch.add(given)
        if any(new is not old for new, old in zip(members, self._members, strict=True)):
            self._check_apart(tensors)
            self._batch.forget_tables()
        self._given, self._members = tensors, members
