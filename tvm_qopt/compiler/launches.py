"""What the runtime must know to launch a kernel from its OpenCL C: geometry, arguments, offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tvm import sym, tirx
from tvm.s_tir.stmt import SBlockRealize

from tvm_qopt.errors import BuildError
from tvm_qopt.manifest import Launch
from tvm_qopt.spec import STEP_ENTRIES

_KERNEL = re.compile(r"__kernel void (?P<name>\w+)\((?P<arguments>[^)]*)\)(?P<end>;| \{)")
_POINTER = re.compile(r"\s*(?P<type>__global [^,]*?)(?P<name>\w+)_ptr\s*")
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_SIZES = ("nb", "B")
_MOST_BLOCKS = 64  # of a group


def with_offsets(source: str) -> str:
    """The same kernels with the place of its first element behind each buffer.

    `__global float* restrict x_ptr` becomes `__global float* restrict x_ptr, long x_at`.  An
    OpenCL kernel takes memory objects, and a sub-buffer of one may begin only where the device
    allows (every 128 to 512 bytes): the scales of a tail never do.
    """
    return _KERNEL.sub(_with_offsets, source)


def _with_offsets(found: re.Match[str]) -> str:
    arguments, moves = [], []
    for argument in found["arguments"].split(","):
        arguments.append(argument)
        if pointer := _POINTER.fullmatch(argument):
            arguments.append(f" long {pointer['name']}_at")
            moves.append(f"\n  {pointer['name']}_ptr += {pointer['name']}_at;")
    body = "".join(moves) if found["end"] != ";" else ""
    return f"__kernel void {found['name']}({','.join(arguments)}){found['end']}{body}"


def launches_of(
    functions: Mapping[str, tirx.PrimFunc], sources: Mapping[str, str]
) -> dict[str, Launch]:
    """The launch of each entry point, from its scheduled function and the OpenCL C by file.

    Raises BuildError for an entry point that is not one kernel on one axis of groups, and for one
    that keeps something between threads in memory that is no argument.
    """
    kernels = {
        found["name"]: (file, tuple(map(_name_of, found["arguments"].split(","))))
        for file, source in sources.items()
        for found in _KERNEL.finditer(source)
    }
    return {name: _launch(name, func, kernels) for name, func in functions.items()}


def _launch(
    name: str, func: tirx.PrimFunc, kernels: Mapping[str, tuple[str, tuple[str, ...]]]
) -> Launch:
    own = [kernel for kernel in kernels if re.fullmatch(rf"{name}_kernel(_\d+)?", kernel)]
    if own != [f"{name}_kernel"]:
        raise BuildError(f"{name}: expected one kernel in the OpenCL C, got {own}")
    file, arguments = kernels[own[0]]
    foreign = set(arguments) - {param.name for param in func.params} - set(_SIZES)
    if foreign:
        raise BuildError(f"{name}: its kernel needs memory beside its arguments: {sorted(foreign)}")
    extents = dict(_thread_extents(func.body))
    threads = tuple(int(extents[axis]) for axis in _THREADS if axis in extents)
    blocks = 1 if name in STEP_ENTRIES else _blocks_of_a_group(name, func, extents)
    return Launch(own[0], arguments, threads, blocks, file)


def _name_of(argument: str) -> str:
    return argument.split()[-1].removesuffix("_ptr")


def _blocks_of_a_group(name: str, func: tirx.PrimFunc, extents: Mapping[str, tirx.PrimExpr]) -> int:
    """The k for which ceil(nb / k) groups are launched; a tail has one block and one group."""
    blocks, groups = func.params[-1].ty.shape[0], extents["blockIdx.x"]
    analyzer = sym.Analyzer()
    for count in range(1, _MOST_BLOCKS + 1):
        if analyzer.can_prove_equal(groups, tirx.floordiv(blocks + count - 1, count)):
            return count
    raise BuildError(f"{name}: {groups} groups for {blocks} quantisation blocks, in no known ratio")


def _thread_extents(statement: tirx.Stmt) -> Iterator[tuple[str, tirx.PrimExpr]]:
    """Every loop that is bound to threads: its axis and extent."""
    if isinstance(statement, SBlockRealize):
        yield from _thread_extents(statement.block.body)
    elif isinstance(statement, tirx.SeqStmt):
        for child in statement.seq:
            yield from _thread_extents(child)
    elif isinstance(statement, tirx.For):
        if statement.thread_binding is not None:
            yield str(statement.thread_binding.thread_tag), statement.extent
        yield from _thread_extents(statement.body)
