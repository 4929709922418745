"""The norm of all gradients, for a clip inside the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from tvm_qopt.optim.entry import Entry, dtype_name
from tvm_qopt.optim.state import COUNT
from tvm_qopt.runtime.arrays import full_like, target_of, view_of
from tvm_qopt.runtime.batch import Batch, Member
from tvm_qopt.runtime.store import load
from tvm_qopt.spec import KernelSpec


class GradNorm:
    """Sums of squares of gradients, by one kernel a dtype and device; the same bits for any number
    of threads."""

    def __init__(self) -> None:
        self._batches: dict[tuple[torch.dtype, torch.device], Batch] = {}

    def total(self, entries: Sequence[Entry]) -> float:
        """The Euclidean norm of the gradients that entries read; NaN or infinite where an element
        is, and infinite beyond float32.  Waits for a GPU."""
        by_batch: dict[Batch, list[Member]] = defaultdict(list)
        for entry in entries:
            grad = entry.param.grad
            batch = self._batch(grad)
            if entry.norm is None:
                entry.norm = _member(batch, entry.layout.flat(entry.layout.arranged(grad)))
            entry.norm.place("param", entry.grad_address)
            by_batch[batch].append(entry.norm)
        sums = [batch.sums(members)["param"].tolist() for batch, members in by_batch.items()]
        return math.sqrt(math.fsum(value for each in sums for value in each))

    def _batch(self, grad: torch.Tensor) -> Batch:
        key = grad.dtype, grad.device
        if key not in self._batches:
            spec = KernelSpec.of("sum_sq", param=dtype_name(grad.dtype))
            target = target_of(view_of("grad", grad))
            self._batches[key] = Batch(load(spec, target=target))
        return self._batches[key]


def _member(batch: Batch, grad: torch.Tensor) -> Member:
    counts = full_like(grad, (-(-grad.numel() // batch.kernel.spec.block_size),), "int32", 0)
    member = batch.add({"param": grad, COUNT: counts})
    member.own[COUNT] = counts
    return member
