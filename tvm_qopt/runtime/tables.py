"""One launch on a GPU in place of many: tables that tell every group of threads where it works.

May import pyopencl, inside functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.runtime.arguments import Part
from tvm_qopt.runtime.arrays import copy_from_host, first_element, full_like, view_of, window
from tvm_qopt.runtime.calls import Call
from tvm_qopt.runtime.opencl import Bound, Region
from tvm_qopt.spec import CHUNKS, PLACES, many_entry, norms_of

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel

Integers = npt.NDArray[np.int64]
MOST = 8  # lists of calls whose tables are kept
ALONE_FROM = 1 << 20
"""Elements of a tensor that has a launch of its own: it takes a GPU longer than a launch does, and
its groups need not look up first where they work."""


class Tables:
    """The tables of a batch.  They are made when a list of calls is first made; what they say of a
    tensor's place is sent again where torch has moved it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._kept: dict[tuple[int, ...], _Merged] = {}

    def merged(self, calls: Sequence[Call], like: Any, moves: int) -> list[Call]:
        """The same work in fewer calls: one for the calls of an entry point.

        like: an array of the caller's library.  moves: another number than before where an
        address has changed.  An OpenCL kernel takes a memory object for each argument, so there
        tensors merge where each of their arguments lies in one with the others'
        (`Kernel.init_states`).
        """
        key = tuple(map(id, calls))
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MOST:
                self._kept.clear()
            kept = self._kept[key] = self._merge(list(calls), like, moves)
        elif kept.moves != moves:
            for table in kept.tables:
                table.follow()
            kept.moves = moves
        return kept.merged

    def forget(self) -> None:
        """Drop all tables: what they were made of is no more."""
        self._kept.clear()

    def _merge(self, calls: list[Call], like: Any, moves: int) -> _Merged:
        groups: dict[Any, list[Call]] = {}
        for call in calls:
            alone = call.elements >= ALONE_FROM
            groups.setdefault(id(call) if alone else _shared(call), []).append(call)
        kernel = self._kernel
        kind = _OpenClTable if kernel.manifest.kind == "opencl" else _CudaTable
        tables = {k: kind(kernel, each, like) for k, each in groups.items() if len(each) > 1}
        merged = [tables[key].call if key in tables else each[0] for key, each in groups.items()]
        return _Merged(calls, merged, list(tables.values()), moves)


def _shared(call: Call) -> Any:
    """What calls must share to be made as one."""
    return call.serial.memory if isinstance(call.serial, Bound) else call.entry


@dataclass
class _Merged:
    """calls: those that were merged, kept since their ids are the key."""

    calls: list[Call]
    merged: list[Call]
    tables: list[_Table]
    moves: int


class _Table(ABC):
    """The launch that stands for calls of one entry point."""

    def __init__(self, kernel: Kernel, calls: Sequence[Call], like: Any) -> None:
        self._calls, first = calls, calls[0]
        blocks = self._blocks_of_group()
        self._known = self._find_places()
        counts = [-(-call.part.blocks // blocks) for call in calls]
        width = self._known.size // len(calls)
        begins = np.repeat(np.arange(len(calls), dtype=np.int64) * width << 32, counts)
        chunks = begins | np.concatenate([np.arange(count) for count in counts])
        self._arrays = {
            name: full_like(like, values.shape, "int64", None)
            for name, values in ((CHUNKS, chunks), (PLACES, self._known))
        }
        copy_from_host(self._arrays[CHUNKS], chunks)
        copy_from_host(self._arrays[PLACES], self._known)
        # A group of the launch is a chunk, so it is one of `blocks` blocks' worth.
        part = Part(0, len(chunks) * blocks, first.part.size)
        entry = many_entry(first.entry)
        function, arguments = self._bound(kernel.entries[entry], part)
        elements = sum(call.elements for call in calls)
        self.call = Call(entry, None, function, part, arguments, elements)

    def follow(self) -> None:
        """Say where the tensors are now."""
        places = self._find_places()
        if not np.array_equal(places, self._known):
            self._known = places
            copy_from_host(self._arrays[PLACES], places)

    def _find_places(self) -> Integers:
        """What `spec.PLACES` says."""
        rows = [[*self._distances(call), _size(call)] for call in self._calls]
        return np.array(rows, np.int64).reshape(-1)

    @abstractmethod
    def _blocks_of_group(self) -> int: ...

    @abstractmethod
    def _distances(self, call: Call) -> list[int]: ...

    @abstractmethod
    def _bound(self, function: Any, part: Part) -> tuple[Any, tuple[Any, ...]]:
        """The function to call, and what with."""


class _OpenClTable(_Table):
    """Of arguments that lie in the same memory objects, where nothing moves."""

    def _blocks_of_group(self) -> int:
        return int(self._calls[0].serial.entry.launch.blocks)

    def _distances(self, call: Call) -> list[int]:
        return [call.serial.given[name].place for name in call.serial.names]

    def _bound(self, function: Any, part: Part) -> tuple[Any, tuple[Any, ...]]:
        first = self._calls[0].serial
        given = {name: Region(first.given[name].array, 0) for name in first.names}
        given |= {name: Region(array, 0) for name, array in self._arrays.items()}
        watched = [call.serial.given[name].array for call in self._calls for name in first.names]
        return function.bound(part, given, watched=watched), ()


class _CudaTable(_Table):
    """Of arguments at any addresses, as distances from the first call's where they were."""

    def __init__(self, kernel: Kernel, calls: Sequence[Call], like: Any) -> None:
        tensors = kernel.spec.tensors
        self._bases = [argument.data_ptr() for argument in calls[0].arguments]
        self._sizes = [np.dtype(t.storage).itemsize for t in tensors]
        self._order = sorted(range(len(tensors)), key=lambda i: tensors[i].name)
        super().__init__(kernel, calls, like)

    def _blocks_of_group(self) -> int:
        return 1  # compiler.many.many_function refuses another

    def _distances(self, call: Call) -> list[int]:
        addresses = [argument.data_ptr() for argument in call.arguments]
        return [(addresses[i] - self._bases[i]) // self._sizes[i] for i in self._order]

    def _bound(self, function: Any, part: Part) -> tuple[Any, tuple[Any, ...]]:
        views = [view_of(name, array) for name, array in self._arrays.items()]
        tables = (window(v, offset=0, shape=v.shape, dtype=v.dtype) for v in views)
        return function, (*map(first_element, self._calls[0].arguments), *tables)


def _size(call: Call) -> int:
    return call.part.size if norms_of(call.entry)[1] == "tail" else call.part.blocks
