"""The named stages of an unscheduled definition: what reads what, and their order.

A *pass* is a run of element-wise stages between block reductions: pass 0 needs no scale of this
step, pass 1 needs the scales of pass 0, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize

REDUCTION = 2  # IterVar.CommReduce


@dataclass(frozen=True)
class Stage:
    """One block of the definition: the buffers it reads, its loops, and where it stands.

    packed: its second axis counts bytes of two 4-bit codes, not elements.
    """

    name: str
    reads: frozenset[str]
    axes: int
    reduction: bool
    packed: bool
    statement: tirx.Stmt


def stages_of(func: tirx.PrimFunc) -> list[Stage]:
    """The stages of an unscheduled function, in order; each writes the buffer of its own name."""
    statements = _root(func).body.seq
    whole = next(size for size in map(_size, statements) if size is not None)
    return [_stage(statement, whole) for statement in statements]


def passes(stages: list[Stage]) -> dict[str, int]:
    """Stage name -> number of block reductions on the longest way from the inputs to it."""
    number: dict[str, int] = {}
    for stage in stages:  # producers stand before their consumers
        inputs = [number[name] for name in stage.reads if name in number]
        number[stage.name] = max(inputs, default=0) + (1 if stage.reduction else 0)
    return number


def order_by_pass(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same stages, those of one pass side by side, so that a schedule can fuse their loops.

    Before: decode a, reduce a, encode a, decode b, reduce b, encode b (as te's search visits them).
    After:  decode a, decode b; reduce a, reduce b; encode a, encode b.
    Within a pass reductions go first, then other per-block stages (they start it), then the rest,
    packed ones last.
    """
    root, stages = _root(func), stages_of(func)
    number = passes(stages)
    ordered = sorted(stages, key=lambda s: (number[s.name], not s.reduction, s.axes, s.packed))
    body = tirx.SeqStmt([stage.statement for stage in ordered])
    block = SBlock(
        [],
        [],
        [],
        root.name_hint,
        body,
        alloc_buffers=root.alloc_buffers,
        annotations=root.annotations,
    )
    return func.with_body(SBlockRealize([], True, block))


def _root(func: tirx.PrimFunc) -> SBlock:
    return func.body.block


def _size(statement: tirx.Stmt) -> str | None:
    """The extent of the second axis, in words (nothing else compares symbolic ones)."""
    block = next(_blocks(statement))
    return str(block.iter_vars[1].dom.extent) if len(block.iter_vars) == 2 else None


def _stage(statement: tirx.Stmt, whole: str) -> Stage:
    block = next(_blocks(statement))
    return Stage(
        name=block.name_hint,
        reads=frozenset(region.source.name for region in block.reads),
        axes=len(block.iter_vars),
        reduction=any(var.iter_type == REDUCTION for var in block.iter_vars),
        packed=_size(statement) not in (None, whole),
        statement=statement,
    )


def _blocks(statement: tirx.Stmt) -> Iterator[SBlock]:
    while isinstance(statement, tirx.For):
        statement = statement.body
    yield statement.block
