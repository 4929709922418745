"""Kernels as OpenCL C: built by the driver once a context, launched on the queue of the caller's
arrays (pyopencl.array.Array).

May import pyopencl, inside functions; manifest and errors of layer 0.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_qopt.errors import ArtifactInvalid, DeviceMismatch, ShapeMismatch, ToolMissing
from tvm_qopt.manifest import Launch
from tvm_qopt.spec import CHUNKS, PLACES

if TYPE_CHECKING:
    from tvm_qopt.runtime.arguments import Part

_OBJECT_BITS = 46  # no memory object is larger than 64 TiB


def is_opencl(x: Any) -> bool:
    """Whether x is a pyopencl array; pyopencl is not imported for it."""
    array = sys.modules.get("pyopencl.array")
    return array is not None and isinstance(x, array.Array)


def check_pyopencl() -> None:
    """Raise ToolMissing where pyopencl is not installed."""
    try:
        import pyopencl  # noqa: F401
    except ImportError as error:
        raise ToolMissing(
            f"OpenCL kernels are called through pyopencl ({error}): pip install 'tvm_qopt[opencl]'"
        ) from error


def address_of(name: str, x: Any) -> int:
    """A number for the first byte of an array: its memory object's, then its place in it.

    Two arrays overlap where their numbers do, sub-buffers included; and as every memory object
    begins on a boundary of at least 128 bytes, it is aligned as the array is.
    """
    import pyopencl as cl

    memory = x.base_data
    if memory is None:
        return 0
    if not isinstance(memory, cl.MemoryObjectHolder):
        got = f"one on {type(memory).__name__}"
        raise DeviceMismatch(name, expected="an array on an OpenCL buffer", got=got)
    start, parent = int(x.offset), memory.get_info(cl.mem_info.ASSOCIATED_MEMOBJECT)
    if parent is not None:
        start, memory = start + int(memory.get_info(cl.mem_info.OFFSET)), parent
    return (int(memory.int_ptr) << _OBJECT_BITS) + start


def new_array(like: Any, values: np.ndarray[Any, Any], shape: Sequence[int], *, fill: bool) -> Any:
    """An array on the queue of `like`, of the dtype of `values` and (fill) of their one value."""
    import pyopencl as cl
    from pyopencl.array import Array

    if like.queue is None:
        raise DeviceMismatch("param", expected="an array with a queue", got="one without")
    made = Array(like.queue, tuple(shape), values.dtype, allocator=like.allocator)
    if fill and made.size:
        event = cl.enqueue_fill_buffer(
            like.queue, made.base_data, values.reshape(-1)[:1], made.offset, made.nbytes
        )
        made.add_event(event)
    return made


def write(target: Any, values: np.ndarray[Any, Any]) -> None:
    """Queue a copy of small values into an array, behind whatever it waits for."""
    import pyopencl as cl

    if not target.size:
        return
    kept = np.array(values, dtype=target.dtype)  # the event keeps it until it is copied
    event = cl.enqueue_copy(
        target.queue,
        target.base_data,
        kept,
        dst_offset=target.offset,
        is_blocking=False,
        wait_for=target.events,
    )
    target.add_event(event)


@dataclass(frozen=True)
class Region:
    """Part of an array, as a kernel's argument: the array, and the elements to its first one."""

    array: Any
    offset: int

    @property
    def place(self) -> int:
        """Elements from the start of the memory object."""
        return int(self.array.offset) // int(self.array.dtype.itemsize) + self.offset


class SourceModule:
    """OpenCL C and the launches of its entry points; module[name] is an `Entry`.

    sources: file -> text; where: their folder, for errors; options: of the driver's compiler.  A
    program is built when a context is first used, and kept as long as this object.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        launches: Mapping[str, Launch],
        where: str,
        options: Sequence[str] = (),
    ) -> None:
        check_pyopencl()
        self._sources, self._launches, self._where = sources, launches, where
        self._options = list(options)
        self._programs: dict[tuple[Any, str], Any] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Entry:
        if name not in self._launches:
            raise AttributeError(name)
        return Entry(self, name, self._launches[name])

    def program(self, context: Any, file: str) -> Any:
        """The built program; raises ArtifactInvalid or DeviceMismatch where a device cannot."""
        import pyopencl as cl

        with self._lock:
            if (context, file) not in self._programs:
                self._check_groups(context)
                try:
                    built = cl.Program(context, self._sources[file]).build(options=self._options)
                except cl.Error as error:
                    lines = str(error).strip().splitlines()
                    devices = ", ".join(device.name.strip() for device in context.devices)
                    raise ArtifactInvalid(
                        f"{self._where}/{file}: the OpenCL compiler of {devices} refuses it: "
                        + "; ".join(lines[:6])
                    ) from error
                self._programs[context, file] = built
            return self._programs[context, file]

    def _check_groups(self, context: Any) -> None:
        most = max(int(np.prod(launch.threads)) for launch in self._launches.values())
        for device in context.devices:
            if device.max_work_group_size < most:
                wanted = f"an OpenCL device with groups of {most} work items"
                got = f"{device.name.strip()} with {device.max_work_group_size}"
                raise DeviceMismatch("param", expected=wanted, got=got)


@dataclass(frozen=True)
class Entry:
    """An entry point."""

    module: SourceModule
    name: str
    launch: Launch

    def bound(
        self, part: Part, given: Mapping[str, Region], *, watched: Sequence[Any] = ()
    ) -> Bound:
        """The kernel for its arguments, of which `given` may have more than it takes.

        watched: other arrays that it reads or writes.
        """
        bound = Bound(self, part, given)
        arrays = [*watched, *(given[name].array for name in bound.names)]
        bound.arrays = list({id(array.events): array for array in arrays}.values())
        return bound


class Bound:
    """A kernel with its arguments, to be launched at every step, by one thread at a time."""

    def __init__(self, entry: Entry, part: Part, given: Mapping[str, Region]) -> None:
        self.entry, self.part, self.given = entry, part, given
        self.names = tuple(name for name in entry.launch.arguments if name in given)
        self.arrays: list[Any] = []

    @property
    def memory(self) -> tuple[Any, ...]:
        """What two launches must share to be made as one."""
        objects = (int(self.given[name].array.base_data.int_ptr) for name in self.names)
        return (self.entry.name, *objects)

    @cached_property
    def _kernel(self) -> Any:
        import pyopencl as cl

        launch, sizes = self.entry.launch, {"nb": self.part.blocks, "B": self.part.size}
        context = self.given[self.names[0]].array.context
        kernel = cl.Kernel(self.entry.module.program(context, launch.source), launch.kernel)
        arguments: list[Any] = []
        for name in launch.arguments:
            if name in self.given:
                region = self.given[name]
                arguments.append(region.array.base_data)
                if PLACES not in launch.arguments or name in (CHUNKS, PLACES):
                    arguments.append(np.int64(region.place))
            else:
                arguments.append(np.int64(sizes[name]))
        kernel.set_args(*arguments)
        return kernel

    def enqueue(self, queue: Any) -> None:
        """Launch it behind what its arrays wait for; they then wait for it (pyopencl's rule)."""
        import pyopencl as cl

        groups = -(-self.part.blocks // self.entry.launch.blocks)
        x, *others = self.entry.launch.threads
        before = [event for array in self.arrays for event in array.events]
        event = cl.enqueue_nd_range_kernel(
            queue, self._kernel, (groups * x, *others), self.entry.launch.threads, wait_for=before
        )
        for array in self.arrays:
            array.add_event(event)


def queue_of(like: Any, stream: Any) -> Any:
    """The queue to launch on: the one given, or that of an array."""
    import pyopencl as cl

    if stream is None:
        return like.queue
    if not isinstance(stream, cl.CommandQueue):
        got = type(stream).__name__
        raise ShapeMismatch("stream", expected="a pyopencl.CommandQueue", got=got)
    if stream.context != like.context:
        wanted = "a queue of the OpenCL context of param"
        raise DeviceMismatch("stream", expected=wanted, got="one of another context")
    return stream
