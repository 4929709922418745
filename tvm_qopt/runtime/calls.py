"""The calls of a kernel's entry points for one tensor, bound to their arguments; making them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_qopt.errors import DeviceMismatch
from tvm_qopt.runtime.arguments import Part, window_of, windows
from tvm_qopt.runtime.arrays import CUDA, OPENCL, ArrayView, current_stream
from tvm_qopt.runtime.ending import enter, leave
from tvm_qopt.runtime.opencl import Entry, queue_of
from tvm_qopt.runtime.threads import call_in_turn, call_parallel, get_num_threads
from tvm_qopt.spec import KernelSpec, norms_entry

if TYPE_CHECKING:
    from tvm_qopt.runtime.kernel import Kernel

VECTOR_BYTES = 16  # what `main` needs of every address on a GPU, where there is a `main_any`
PARALLEL_FROM = 1 << 14
"""Elements of a tensor that threads share where they are awake, since others of the step call for
them; `serial_below` of the manifest is how many a whole step must have to wake them."""


@dataclass(frozen=True, slots=True)
class Call:
    """An entry point: the function for many threads (None where one thread is always sooner), that
    for one, and what they are called with; on OpenCL the latter is a kernel that has its arguments.
    """

    entry: str
    parallel: Any
    serial: Any
    part: Part
    arguments: tuple[Any, ...]
    elements: int

    @classmethod
    def of(
        cls,
        entry: str,
        parallel: Any,
        serial: Any,
        part: Part,
        arguments: tuple[Any, ...],
        names: Sequence[str],
    ) -> Call:
        if isinstance(serial, Entry):
            serial = serial.bound(part, dict(zip(names, arguments, strict=True)))
        return cls(entry, parallel, serial, part, arguments, part.blocks * part.size)

    def with_argument(self, index: int, argument: Any) -> Call:
        arguments = (*self.arguments[:index], argument, *self.arguments[index + 1 :])
        return dataclasses.replace(self, arguments=arguments)


@dataclass(frozen=True, slots=True)
class Calls:
    """update: the calls of the update; norms: those of each norm pass.  The full blocks by one
    entry point, a short last block by `tail`; none for an empty tensor."""

    update: list[Call]
    norms: list[list[Call]]

    def rebind(self, spec: KernelSpec, name: str, view: ArrayView) -> None:
        """Put the windows of one argument in the place of the old ones."""
        index = [t.name for t in spec.tensors].index(name)
        for calls in (self.update, *self.norms):
            for i, call in enumerate(calls):
                argument = window_of(spec, spec.tensors[index], view, call.part)
                calls[i] = call.with_argument(index, argument)

    def for_any_address(self, kernel: Kernel) -> Calls:
        """The same for addresses that `main` does not take."""

        def of(calls: list[Call], number: int | None) -> list[Call]:
            name = _entry("main_any", number)
            full, names = kernel.spec.block_size, [t.name for t in kernel.spec.tensors]
            return [
                Call.of(name, None, kernel.entries[name], call.part, call.arguments, names)
                if call.part.size == full
                else call
                for call in calls
            ]

        return Calls(of(self.update, None), [of(each, i) for i, each in enumerate(self.norms)])


def bind(kernel: Kernel, views: Mapping[str, ArrayView]) -> Calls:
    """The calls for arrays that were checked."""
    size, block = views["param"].size, kernel.spec.block_size
    blocks, rest = divmod(size, block)
    names = [t.name for t in kernel.spec.tensors]
    passes: list[int | None] = [None, *range(len(kernel.spec.rule_.norms))]
    calls: dict[int | None, list[Call]] = {number: [] for number in passes}
    if blocks:
        part = Part(0, blocks, block)
        arguments = windows(kernel.spec, views, part)
        for number in passes:
            entries = {p: kernel.entries[_entry(p, number)] for p in kernel.parts}
            name, parallel = _choose(entries, views, small=size < PARALLEL_FROM)
            entry = _entry(name, number)
            call = Call.of(entry, parallel, kernel.entries[entry], part, arguments, names)
            calls[number].append(call)
    if rest:
        part = Part(blocks, 1, rest)
        arguments = windows(kernel.spec, views, part)
        for number in passes:
            entry = _entry("tail", number)
            call = Call.of(entry, None, kernel.entries[entry], part, arguments, names)
            calls[number].append(call)
    return Calls(calls.pop(None), list(calls.values()))


def _entry(part: str, norms: int | None) -> str:
    return part if norms is None else norms_entry(norms, part)


def _choose(
    entries: Mapping[str, Any], views: Mapping[str, ArrayView], *, small: bool
) -> tuple[str, Any]:
    """For the full blocks the entry point for one thread (or for a GPU), and the function for many
    threads."""
    if "main_any" in entries:
        aligned = all(view.address % VECTOR_BYTES == 0 for view in views.values())
        return "main" if aligned else "main_any", None
    return "main_serial", None if small else entries["main"]


def run(
    kernel: Kernel,
    calls: Sequence[Call],
    device: tuple[int, int],
    *,
    like: Any,
    stream: Any = None,
) -> None:
    """Make calls of a kernel, for one tensor or for many, in order; on a GPU queue them.

    like: an array of the caller's library, whose current stream (or queue) is the default.
    """
    if not calls:  # an empty tensor
        return
    try:
        enter()
        if device[0] == CUDA:
            _run_on_stream(device, like, calls, stream)
        elif device[0] == OPENCL:
            queue = queue_of(like, stream)
            for call in calls:
                call.serial.enqueue(queue)
        elif stream is not None:
            raise DeviceMismatch("stream", expected="None on a CPU", got=repr(stream))
        else:
            _run_here(kernel, calls)
    finally:
        leave()


def _run_here(kernel: Kernel, calls: Sequence[Call]) -> None:
    """Make calls on this thread, with others where the work is worth waking them."""
    if len(calls) == 1 and calls[0].elements < kernel.manifest.serial_below:
        calls[0].serial(*calls[0].arguments)
        return
    elements = sum([call.elements for call in calls])
    if elements < kernel.manifest.serial_below or get_num_threads() == 1:
        call_in_turn([(call.serial, call.arguments) for call in calls])
    else:
        functions = [(call.parallel or call.serial, call.arguments) for call in calls]
        call_parallel(functions, elements)


def _run_on_stream(
    device: tuple[int, int], like: Any, calls: Sequence[Call], stream: int | None
) -> None:
    """Queue the calls on a stream, by default the one that the caller's library uses now."""
    import tvm_ffi

    handle = current_stream(like, device[1]) if stream is None else stream
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", device[1]), handle):
        for call in calls:
            call.serial(*call.arguments)
