"""Many tensors of one kernel that step together, for callers who check their tensors themselves.

What a Plan checks at every step is checked when a tensor joins; after that a step takes addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import ShapeMismatch
from tvm_qopt.runtime.arguments import check_arguments, own_arrays
from tvm_qopt.runtime.arrays import (
    CUDA,
    OPENCL,
    ArrayView,
    address_cell,
    copy_from_host,
    is_torch,
    on_stream,
    view_of,
)
from tvm_qopt.runtime.calls import VECTOR_BYTES, Call, bind, run
from tvm_qopt.runtime.scalars import Scalars, random_words
from tvm_qopt.runtime.state import sums_of
from tvm_qopt.runtime.tables import Tables
from tvm_qopt.spec import norm_tensor

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel

Sums = dict[str, npt.NDArray[np.float64]]
"""The name of a norm -> the sum of squares of each member."""

MOVING = ("param", "grad")


class _Moves:
    """How often an address of a batch's members has changed."""

    count = 0


class Member:
    """A tensor of a batch.  It keeps no array of the user's alive: whoever steps it does.

    `place` says where weight and gradient are now; their sizes and dtypes stay.
    """

    def __init__(
        self,
        kernel: Kernel,
        given: Mapping[str, Any],
        views: dict[str, ArrayView],
        own: dict[str, Any],
        moves: _Moves,
    ) -> None:
        self._kernel, self.device = kernel, views["param"].device
        self.own, self._moves = own, moves
        self.addresses = {n: views[n].address for n, x in given.items() if is_torch(x)}
        views = views | {name: view_of(name, array) for name, array in own.items()}
        self.calls = bind(kernel, views)
        self._aligned = "main_any" not in kernel.parts
        index = {t.name: i for i, t in enumerate(kernel.spec.tensors)}
        self._places = {
            name: self._cells(views, name, index[name]) for name in MOVING if name in index
        }

    def _cells(self, views: Mapping[str, Any], name: str, index: int) -> list[tuple[Any, int]]:
        """The cells that hold an address, with their distance from the tensor's own."""
        if self.device[0] == OPENCL:  # where nothing moves
            return []
        cells = [address_cell(call.arguments[index]) for call in self.calls.update]
        return [(cell, cell.value - views[name].address) for cell in cells]

    def seed(self, seed: int, step: int) -> None:
        """Set what the next step's random rounding depends on, where the weights have one."""
        if "rng" in self.own:
            copy_from_host(self.own["rng"], random_words(seed, step))

    def place(self, name: str, address: int) -> None:
        for cell, offset in self._places[name]:
            if cell.value != address + offset:
                cell.value = address + offset
                self._moves.count += 1
        if not self._aligned and address % VECTOR_BYTES:
            self.calls, self._aligned = self.calls.for_any_address(self._kernel), True


class Batch:
    """The tensors of one kernel on one device; not to be stepped by two threads at once."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._passes, self._scalars = kernel.spec.rule_.norms, Scalars(kernel.spec)
        self._host = np.zeros(len(kernel.spec.scalars), np.float32)
        self._tables, self._moves = Tables(kernel), _Moves()
        self._shared: Any = None  # the scalars of all members, where no norm makes them differ

    def add(self, given: Mapping[str, Any]) -> Member:
        """Check the arguments of a tensor (those of `Kernel.plan`, by name) and bind them."""
        return self.add_all([given])[0]

    def add_all(self, tensors: Sequence[Mapping[str, Any]]) -> list[Member]:
        """The same of many, which may then be one launch on OpenCL too."""
        if not tensors:
            return []
        kernel = self.kernel
        spec, kind = kernel.spec, kernel.manifest.kind
        views = [check_arguments(spec, kind, given) for given in tensors]
        devices = {view["param"].device for view in views}
        if len(devices) > 1:
            got = f"{len(devices)} devices"
            raise ShapeMismatch("tensors", expected="tensors of one device", got=got)
        kernel.check_runs_on(*devices)
        params = [given["param"] for given in tensors]
        own = own_arrays(spec, params, [view["param"] for view in views])
        if not self._passes:
            self._shared = own[0]["hyper"] if self._shared is None else self._shared
            own = [{**each, "hyper": self._shared} for each in own]
        return [
            Member(kernel, *each, self._moves) for each in zip(tensors, views, own, strict=True)
        ]

    def forget_tables(self) -> None:
        """Let go of members that were replaced: tables keep OpenCL's arrays alive."""
        self._tables.forget()

    def scalars(
        self,
        hyper: dict[str, float],
        *,
        step: int,
        grad_scale: float = 1.0,
        gnorm_scale: float = 1.0,
        maximize: bool = False,
    ) -> list[float]:
        """What members read in a step, arguments as for `Plan.step`; raises what it raises."""
        scalars = self._scalars.of(step, grad_scale, gnorm_scale, hyper)
        if maximize:
            scalars[0] = -scalars[0]
        return scalars

    def step(
        self,
        members: Sequence[Member],
        scalars: list[float],
        *,
        reduce: Callable[[Sums], Sums] = lambda sums: sums,
        stream: Any = None,
    ) -> list[bool]:
        """Update the members' tensors as `Plan.step` would one by one, to the bit.

        scalars: the last that the method of this name made.  reduce: adds up the sums of squares
        of tensors that are spread over processes.  Returns which members ran.
        """
        if not members:
            return []
        ran = [True] * len(members)
        with on_stream(members[0].own["hyper"], stream):
            if self._passes:
                ran = self._find_norms(members, scalars, reduce, stream)
            else:
                self._write(self._shared, scalars)
            ready = [member for member, runs in zip(members, ran, strict=True) if runs]
            self._run(self.update_calls(ready), members, stream)
        return ran

    def update_calls(self, members: Sequence[Member]) -> Sequence[Call]:
        """What updates the members when their scalars are there."""
        return self._merged([call for m in members for call in m.calls.update], members)

    def sums(self, members: Sequence[Member], number: int = 0, *, stream: Any = None) -> Sums:
        """Run norm pass `number` with the scalars as they are; waits for a GPU."""
        calls = [call for m in members for call in m.calls.norms[number]]
        self._run(self._merged(calls, members), members, stream)
        return {
            name: sums_of([m.own[norm_tensor(number, name)] for m in members])
            for name in self._passes[number].names
        }

    def _find_norms(
        self,
        members: Sequence[Member],
        scalars: list[float],
        reduce: Callable[[Sums], Sums],
        stream: Any,
    ) -> list[bool]:
        """Give each member its scalars; returns which have norms that float32 can hold."""
        own = [list(scalars) for _ in members]
        finite = [True] * len(members)
        for number in range(len(self._passes)):
            self._write_each(members, own)
            sums = reduce(self.sums(members, number, stream=stream))
            for i, values in enumerate(own):
                norms = {name: math.sqrt(each[i]) for name, each in sums.items()}
                finite[i] = finite[i] and self._scalars.finish(number, norms, values)
        self._write_each(members, own)
        return finite

    def _write_each(self, members: Sequence[Member], own: list[list[float]]) -> None:
        for member, values in zip(members, own, strict=True):
            self._write(member.own["hyper"], values)

    def _write(self, hyper: Any, scalars: list[float]) -> None:
        if isinstance(hyper, np.ndarray):
            hyper[:] = scalars
        else:
            self._host[:] = scalars
            copy_from_host(hyper, self._host)

    def _run(self, calls: Sequence[Call], members: Sequence[Member], stream: Any) -> None:
        like = members[0].own["hyper"]
        run(self.kernel, calls, members[0].device, like=like, stream=stream)

    def _merged(self, calls: Sequence[Call], members: Sequence[Member]) -> Sequence[Call]:
        """The same in fewer calls, where a GPU makes one of many."""
        if len(calls) < 2 or members[0].device[0] not in (CUDA, OPENCL):
            return calls
        return self._tables.merged(calls, members[0].own["hyper"], self._moves.count)
