"""A call of a kernel on many tensors that was checked once and can be made at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvm_qopt.errors import HyperOutOfRange, ShapeMismatch
from tvm_qopt.runtime.arguments import check_overlap
from tvm_qopt.runtime.arrays import is_torch, version_counter, view_of
from tvm_qopt.runtime.batch import Batch, Member
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
        self._check_apart()
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
        scalars = self._batch.scalars(
            hyper, step=step, grad_scale=grad_scale, gnorm_scale=gnorm_scale, maximize=maximize
        )
        random = any("rng" in member.own for member in self._members)
        if seed is not None and not random:
            what = f"no seed: {self.kernel.spec.param_format} weights are not random"
            raise HyperOutOfRange("seed", expected=what, got=repr(seed))
        if grads is not None:
            self._take_grads(grads)
        for i, given in enumerate(self._given):
            self._follow(i, given)
        if found_inf is not None and read_number("found_inf", found_inf) != 0.0:
            return [False] * len(self)
        for member in self._members if random else ():
            member.seed(0 if seed is None else seed, step)
        ran = self._batch.step(self._members, scalars, stream=stream)
        for mark, runs in zip(self._marks, ran, strict=True):
            if runs:
                mark()
        return ran

    def _check_apart(self) -> None:
        """Raise where a tensor's output is in another tensor's way."""
        outputs = {t.name: t.output for t in self.kernel.spec.tensors}
        check_overlap(
            (view_of(name, x), f"{name} of tensor {i}", outputs[name])
            for i, given in enumerate(self._given)
            for name, x in given.items()
        )

    def _take_grads(self, grads: Sequence[Any]) -> None:
        if len(grads) != len(self):
            wanted = f"{len(self)} gradients"
            raise ShapeMismatch("grads", expected=wanted, got=str(len(grads)))
        members: list[Member] = []
        given: list[dict[str, Any]] = []
        for i, grad in enumerate(grads):
            same = grad is self._given[i].get("grad")
            given.append({**self._given[i], "grad": grad})
            members.append(self._members[i] if same else self._batch.add(given[i]))
        self._given, self._members = given, members

    def _follow(self, i: int, given: Mapping[str, Any]) -> None:
        """Bind a tensor again whose memory torch has moved."""
        addresses = {n: x.data_ptr() for n, x in given.items() if is_torch(x)}
        if addresses != self._members[i].addresses:
            self._members[i] = self._batch.add(given)
