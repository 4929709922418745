"""A parameter bound to a kernel, and whether that still holds: callers move tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tvm_qopt.errors import ArgumentMismatch, DeviceMismatch, DtypeMismatch, ShapeMismatch
from tvm_qopt.optim.layout import GAPS, ROWS, Layout
from tvm_qopt.optim.shards import Groups
from tvm_qopt.optim.state import MASTER, State, adopt, fill, tensors_of
from tvm_qopt.params import STORAGE

if TYPE_CHECKING:
    from tvm_qopt.optim.engine import Lane
    from tvm_qopt.runtime.batch import Member

STRIDED = torch.strided


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Say of which parameter an argument is that does not fit."""
    try:
        yield
    except ArgumentMismatch as error:
        name = f"{label}: {error.name}"
        raise type(error)(name, expected=error.expected, got=error.got) from error


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_kind(label: str, param: torch.Tensor, grad: torch.Tensor) -> None:
    """Raise for parameters and gradients that no kernel takes, as torch does."""
    if any(n > 1 and not stride for n, stride in zip(param.shape, param.stride(), strict=True)):
        wanted = "weights each in its own place"
        raise ShapeMismatch(label, expected=wanted, got=f"strides {tuple(param.stride())}")
    if grad.layout is not STRIDED:
        wanted = "a dense gradient (torch.optim.SparseAdam takes sparse ones)"
        raise DeviceMismatch(label, expected=wanted, got=str(grad.layout))
    for x in (param, grad):
        if dtype_name(x.dtype) not in STORAGE:
            wanted = f"a parameter and a gradient of {', '.join(STORAGE)}"
            got = f"{dtype_name(param.dtype)} with a gradient of {dtype_name(grad.dtype)}"
            raise DtypeMismatch(label, expected=wanted, got=got)


@dataclass
class Held:
    """What must live until a step is done: copies of gradients, and `staged`: weights with gaps
    and the copies that are stepped in their place."""

    copies: list[torch.Tensor] = field(default_factory=list)
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def write_back(self) -> None:
        for param, weights in self.staged:
            param.detach().copy_(weights)


class Entry:
    """param, bound to a member of its lane's batch.

    It holds no gradient, only its address: zero_grad is to free it.
    """

    __slots__ = (
        "_address",
        "_dtype",
        "_end",
        "_master",
        "_pinned",
        "_plain",
        "_size",
        "_version",
        "grad_address",
        "grad_dtype",
        "groups",
        "label",
        "lane",
        "layout",
        "member",
        "names",
        "norm",
        "param",
        "seed",
        "spec",
        "state",
        "tick",
    )

    def __init__(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: State,
        lane: Lane,
        *,
        label: str,
        seed: int,
        groups: Groups = (),
    ) -> None:
        self.param, self.label, self.lane, self.state = param, label, lane, state
        self.groups = groups  # of processes that have the other parts
        self.spec = lane.batch.kernel.spec
        self.seed, self.tick = seed, -1
        self.norm: Member | None = None  # of its gradient, where that is asked for
        self.layout = Layout.of(param)
        weights = self._weights()
        with naming(label):
            fill(state, lane.batch.kernel, self.layout, weights, lane.initial)
            self.names = lane.names
            given = {
                t.name: self.layout.flat(state[t.name]) if t.per_element else state[t.name]
                for t in tensors_of(self.spec)
            }
            read = self.layout.flat(self.layout.arranged(grad.resolve_neg()))
            self.member = lane.batch.add({"param": weights, "grad": read, **given})
        self._size, self._dtype, self.grad_dtype = param.numel(), param.dtype, grad.dtype
        self._address, self.grad_address = param.data_ptr(), read.data_ptr()
        self._end = self._address + param.numel() * param.itemsize
        self._pinned = self._hash()
        self._master = self.layout.flat(state[MASTER]) if MASTER in given else None
        self._version = -1
        self._plain = self.layout.kind == ROWS and self._master is None

    def _weights(self) -> torch.Tensor:
        """The weights as the kernel takes them; a copy where they have gaps."""
        param = self.param.detach()
        return param.contiguous() if self.layout.kind == GAPS else self.layout.flat(param)

    def take(self, state: Mapping[str, Any], grad: torch.Tensor, held: Held) -> bool:
        """Have the next step read this gradient and the weights as they are now.

        Returns False, and is to be bound again, where weights, state or gradient are not where and
        what they were: a copy, another dtype, memory that moved.  (Tens of microseconds a step
        hang on this method; each test is of something that callers do.)
        """
        param = self.param
        if (
            param.data_ptr() != self._address
            or param.dtype is not self._dtype
            or grad.dtype is not self.grad_dtype
            or grad.layout is not STRIDED
            or grad.numel() != self._size
            or state is not self.state
            or not self.lies(param)
        ):
            return False
        try:
            if self._hash() != self._pinned:
                return False
        except KeyError:
            return False
        if self._plain and grad.is_contiguous() and not grad.is_neg():
            self.read(grad.data_ptr())
        else:
            self._arrange(grad, held)
        return True

    def lies(self, param: torch.Tensor) -> bool:
        """Whether weights at this address are as many and in the order that was bound; those with
        gaps are copied at every step, in the order of their dimensions."""
        fits = self.layout.kind == GAPS or self.layout.fits(param)
        return fits and param.numel() == self._size

    def _hash(self) -> int:
        """One number for where all tensors of the state are: it is compared at every step."""
        state = self.state
        return hash(tuple([state[name].data_ptr() for name in self.names]))

    def read(self, address: int) -> None:
        """Have the next step read a gradient that lies as the weights do, at an address."""
        if address == self.grad_address:
            return
        if not address and self._size:
            wanted = "memory that holds it"
            raise ShapeMismatch(f"{self.label}: grad", expected=wanted, got="a freed storage")
        if self._address < address + self._size * self.grad_dtype.itemsize and address < self._end:
            wanted, got = "memory of its own", "the memory of the weights"
            raise ShapeMismatch(f"{self.label}: grad", expected=wanted, got=got)
        self.member.place("grad", address)
        self.grad_address = address

    def _arrange(self, grad: torch.Tensor, held: Held) -> None:
        """Read a copy of the gradient where it lies otherwise than the weights; stage weights."""
        arranged = self.layout.arranged(grad.resolve_neg())
        held.copies.append(arranged)
        self.read(arranged.data_ptr())
        if not self.master_holds:
            adopt(self._weights(), self._master)
        if self.layout.kind == GAPS:
            weights = self._weights()
            held.staged.append((self.param, weights))
            self.member.place("param", weights.data_ptr())

    @property
    def has_master(self) -> bool:
        return self._master is not None

    @property
    def master_holds(self) -> bool:
        """Whether nobody has written to weights that have a master since the last step."""
        return self._master is None or self.param._version == self._version

    def written(self) -> None:
        """The step is done: what is written to the weights from now on is from outside."""
        if self._master is not None:
            self._version = self.param._version
