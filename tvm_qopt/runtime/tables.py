"""One OpenCL launch in place of many: a table that tells every group of threads where it works.

May import pyopencl, inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.manifest import TABLE
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.runtime.calls import Call
from tvm_qopt.runtime.opencl import Bound, Region, new_array, write
from tvm_qopt.spec import TensorSpec, many_entry

Rows = npt.NDArray[np.int64]
MOST = 8  # lists of calls whose tables are kept


class Tables:
    """The tables of a batch.  One is made when a list of calls is first made, and again when one
    of them is another (an address has changed)."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = {t.name: t for t in tensors}
        self._kept: dict[tuple[int, ...], tuple[list[Call], list[Call]]] = {}

    def merged(self, calls: Sequence[Call]) -> list[Call]:
        """The same work in fewer calls: one for all of an entry point on the same memory objects.

        A kernel takes a memory object for each argument, so tensors merge where each of their
        arguments lies in one with the others' (`Kernel.init_states`).
        """
        key = tuple(map(id, calls))
        if key not in self._kept:
            if len(self._kept) >= MOST:
                self._kept.clear()
            self._kept[key] = list(calls), self._merge(calls)  # the ids live as long as the key
        return self._kept[key][1]

    def _merge(self, calls: Sequence[Call]) -> list[Call]:
        groups: dict[tuple[Any, ...], list[Call]] = {}
        for call in calls:
            groups.setdefault(call.serial.memory, []).append(call)
        return [
            each[0] if len(each) == 1 else self._one([call.serial for call in each])
            for each in groups.values()
        ]

    def _one(self, kernels: list[Bound]) -> Call:
        first = kernels[0]
        rows = np.concatenate([_rows(each, self._tensors) for each in kernels])
        arrays = [each.given[name].array for each in kernels for name in each.names]
        like = next(array for array in arrays if array.queue is not None)
        table = new_array(like, np.empty(1, np.int64), (rows.size,), fill=False)
        write(table, rows.reshape(-1))
        given = {name: Region(first.given[name].array, 0) for name in first.names}
        # A group of the table's launch is a row, so it is one of `blocks` blocks' worth.
        part = Part(0, len(rows) * first.entry.launch.blocks, first.part.size)
        entry = first.entry.module[many_entry(first.entry.name)]
        bound = entry.bound(part, {**given, TABLE: Region(table, 0)}, watched=arrays)
        return Call(None, bound, part, (), part.blocks * part.size)


def _rows(kernel: Bound, tensors: Mapping[str, TensorSpec]) -> Rows:
    """A row for each group of one tensor: the place of each argument, and the size."""
    part, k = kernel.part, kernel.entry.launch.blocks
    starts = np.arange(0, part.blocks, k)
    columns = [
        kernel.given[name].place + starts * tensors[name].start(1, part.size)
        for name in kernel.names
    ]
    by_blocks = kernel.entry.launch.arguments[-1] == "nb"
    sizes = np.minimum(part.blocks - starts, k) if by_blocks else np.full(len(starts), part.size)
    return np.stack([*columns, sizes], axis=1).astype(np.int64)
