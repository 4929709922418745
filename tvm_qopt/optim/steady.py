"""A step that is like the one before: what `Entry.take` asks of each, asked of all at once.

Of hundreds of small tensors the questions cost more than the update; lists that C walks cost half
of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch

from tvm_qopt.optim.entry import STRIDED, Entry
from tvm_qopt.optim.layout import GAPS, ROWS

if TYPE_CHECKING:
    from tvm_qopt.optim.engine import Lane, Source

address_of, size_of = torch.Tensor.data_ptr, torch.Tensor.numel
is_contiguous, is_negated = torch.Tensor.is_contiguous, torch.Tensor.is_neg
dtype_of, layout_of = attrgetter("dtype"), attrgetter("layout")


def same(found: Sequence[object], known: Sequence[object]) -> bool:
    """Whether two lists have the same objects."""
    return len(found) == len(known) and all(map(is_, found, known))


class Steady:
    """The parameters of a step, and where all that it touched was.

    sources: by key, the options of groups and of parameters with their own.  lanes: the entries.
    """

    def __init__(
        self,
        sources: Mapping[Any, Source],
        params: Sequence[torch.Tensor],
        lanes: Mapping[Lane, list[Entry]],
        entries: Sequence[Entry],
    ) -> None:
        self.sources, self.lanes, self._params, self._entries = sources, lanes, params, entries
        self._absent = [param.grad is None for param in params]
        self._present = [entry.param for entry in entries]
        self._states = [entry.state for entry in entries]
        self._places = [(entry.state, name) for entry in entries for name in entry.names]
        self._held = [address_of(state[name]) for state, name in self._places]
        self._weights = list(map(address_of, self._present))
        self._dtypes = list(map(dtype_of, self._present))
        self._grad_dtypes = [entry.grad_dtype for entry in entries]
        self._sizes = list(map(size_of, self._present))
        self._masters = [entry for entry in entries if entry.has_master]
        self._rows = all(entry.layout.kind == ROWS for entry in entries)

    @classmethod
    def of(
        cls,
        sources: Mapping[Any, Source],
        params: Sequence[torch.Tensor],
        lanes: Mapping[Lane, list[Entry]],
    ) -> Steady | None:
        """None unless each parameter is one entry, a whole tensor that is stepped where it lies."""
        by_param = {entry.param: entry for entry in chain.from_iterable(lanes.values())}
        present = [param for param in params if param.grad is not None]
        entries = [by_param[param] for param in present if param in by_param]
        if len(entries) != len(present) or len(by_param) != len(present):
            return None
        if any(entry.layout.kind == GAPS for entry in entries):
            return None
        return cls(sources, params, lanes, entries)

    def take(self, params: Sequence[torch.Tensor], states: Mapping[torch.Tensor, Any]) -> bool:
        """Have the next step read the gradients of now.

        Returns False, with nothing done, where something is not as it was; it is then for the
        entries to say what.
        """
        if not same(params, self._params):
            return False
        grads = [param.grad for param in params]
        if [grad is None for grad in grads] != self._absent:
            return False
        grads = [grad for grad in grads if grad is not None]
        if not (self._state_stays(states) and self._weights_stay() and self._readable(grads)):
            return False
        for entry, address in zip(self._entries, map(address_of, grads), strict=True):
            if address != entry.grad_address:
                entry.read(address)
        return True

    def _state_stays(self, states: Mapping[torch.Tensor, Any]) -> bool:
        if not all(map(is_, map(states.get, self._present), self._states)):
            return False
        try:
            held = [state[name] for state, name in self._places]
        except KeyError:
            return False
        return list(map(address_of, held)) == self._held

    def _weights_stay(self) -> bool:
        return (
            list(map(address_of, self._present)) == self._weights
            and list(map(dtype_of, self._present)) == self._dtypes
            and self._lying(self._present)
            and all(entry.master_holds for entry in self._masters)
        )

    def _readable(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether each gradient is what it was and can be read where it lies."""
        if any(layout is not STRIDED for layout in map(layout_of, grads)):
            return False
        return (
            self._lying(grads)
            and list(map(dtype_of, grads)) == self._grad_dtypes
            and not any(map(is_negated, grads))
        )

    def _lying(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether each weight (or gradient) has its elements where those of the state are."""
        if self._rows:
            fits = all(map(is_contiguous, tensors))
        else:
            fits = all(e.layout.fits(x) for e, x in zip(self._entries, tensors, strict=True))
        return fits and list(map(size_of, tensors)) == self._sizes
