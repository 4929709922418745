"""The norm of all gradients, for a clip inside the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tvm_qopt.optim.entry import Entry, dtype_name
from tvm_qopt.optim.shards import add_up
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
        by_batch: dict[Batch, list[Entry]] = defaultdict(list)
        for entry in entries:
            batch = self._batch(entry)
            if entry.norm is None:
                entry.norm = _member(batch, entry)
            entry.norm.place("param", entry.grad_address)
            by_batch[batch].append(entry)
        sums = [_sums(batch, found).tolist() for batch, found in by_batch.items()]
        return math.sqrt(math.fsum(value for each in sums for value in each))

    def _batch(self, entry: Entry) -> Batch:
        key = entry.grad_dtype, entry.param.device
        if key not in self._batches:
            spec = KernelSpec.of("sum_sq", param=dtype_name(entry.grad_dtype))
            target = target_of(view_of("param", entry.param))
            self._batches[key] = Batch(load(spec, target=target))
        return self._batches[key]


def _sums(batch: Batch, entries: Sequence[Entry]) -> npt.NDArray[np.float64]:
    """One a whole parameter, also where this process has a part of it."""
    sums = batch.sums([entry.norm for entry in entries if entry.norm is not None])
    groups, device = [entry.groups for entry in entries], entries[0].param.device
    return add_up(sums, groups, device)["param"]


def _member(batch: Batch, entry: Entry) -> Member:
    param = entry.param
    grad = torch.empty(param.numel(), dtype=entry.grad_dtype, device=param.device)  # placed later
    counts = full_like(grad, (-(-grad.numel() // batch.kernel.spec.block_size),), "int32", 0)
    member = batch.add({"param": grad, COUNT: counts})
    member.own[COUNT] = counts
    return member
