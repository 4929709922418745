"""How a scheduled GPU function is launched, read from the loops that are bound to threads."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import tirx
from tvm.s_tir.stmt import SBlockRealize

from tvm_qopt.errors import BuildError


def threads_of(func: tirx.PrimFunc) -> int:
    """Threads of a thread block."""
    return int(_bound(func, "threadIdx.x").value)


def blocks_of_group(func: tirx.PrimFunc) -> int | None:
    """Quantisation blocks that a thread block handles; None where the launch does not say."""
    extent = _bound(func, "blockIdx.x")
    if isinstance(extent, tirx.Var):
        return 1
    if isinstance(extent, tirx.FloorDiv) and isinstance(extent.b, tirx.IntImm):
        return int(extent.b.value)
    return None


def _bound(func: tirx.PrimFunc, tag: str) -> tirx.PrimExpr:
    """The extent of the first loop that is bound to a thread index."""
    for loop in _loops(func.body):
        if loop.thread_binding is not None and loop.thread_binding.thread_tag == tag:
            return loop.extent
    raise BuildError(f"a GPU kernel without a loop bound to {tag}")


def _loops(node: tirx.Stmt) -> Iterator[tirx.For]:
    """The loops of a statement, outer ones first."""
    if isinstance(node, tirx.For):
        yield node
        yield from _loops(node.body)
    elif isinstance(node, SBlockRealize):
        yield from _loops(node.block.body)
    elif isinstance(node, tirx.SeqStmt):
        for part in node.seq:
            yield from _loops(part)
