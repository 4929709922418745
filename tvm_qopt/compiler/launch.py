"""How a scheduled GPU function is launched, read from the loops that are bound to threads."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import sym, tirx
from tvm.s_tir.stmt import SBlockRealize

from tvm_qopt.errors import BuildError

_MOST_BLOCKS = 64  # of a group


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
