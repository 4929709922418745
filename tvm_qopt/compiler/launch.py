"""How a GPU function is launched: by the loops of its body that are bound to threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import sym, tirx
from tvm.s_tir.stmt import SBlockRealize

from tvm_qopt.errors import BuildError

_MOST_BLOCKS = 64  # of a group
_THREAD_INDEX = 1  # IterVar.kThreadIndex


def thread_loop(axis: str, number: tirx.Var, extent: Any, body: tirx.Stmt) -> tirx.For:
    """A loop whose turns are threads ("threadIdx.x") or groups of them ("blockIdx.x")."""
    thread = tirx.IterVar(None, tirx.Var("thread", number.ty.dtype), _THREAD_INDEX, axis)
    kind = tirx.ForKind.THREAD_BINDING
    return tirx.For(number, tirx.const(0, number.ty.dtype), extent, kind, body, thread)


def gpu_function(name: str, buffers: Sequence[Any], body: tirx.Stmt) -> tirx.PrimFunc:
    """A function that was not scheduled, for TVM to split in host and device code."""
    return tirx.PrimFunc(buffers, body).with_attr(
        {"global_symbol": name, "tirx.noalias": True, "s_tir": True}
    )


def extents(func: tirx.PrimFunc) -> dict[str, tirx.PrimExpr]:
    """Axis ("threadIdx.x", "blockIdx.x") -> extent of the loops that are bound to it."""
    bound = (loop for loop in _loops(func.body) if loop.thread_binding is not None)
    return {str(loop.thread_binding.thread_tag): loop.extent for loop in bound}


def threads_of(func: tirx.PrimFunc) -> int:
    """Threads of a thread block."""
    found = extents(func)
    if "threadIdx.x" not in found:
        raise BuildError("a GPU kernel without a loop bound to threadIdx.x")
    return int(found["threadIdx.x"])


def blocks_of_group(func: tirx.PrimFunc) -> int:
    """The k for which ceil(nb / k) thread blocks are launched for nb quantisation blocks.

    Raises BuildError where there is no such k.
    """
    blocks, groups = func.params[-1].ty.shape[0], extents(func)["blockIdx.x"]
    analyzer = sym.Analyzer()
    for count in range(1, _MOST_BLOCKS + 1):
        if analyzer.can_prove_equal(groups, tirx.floordiv(blocks + count - 1, count)):
            return count
    raise BuildError(f"{groups} thread blocks for {blocks} quantisation blocks, in no known ratio")


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
