"""Scheduling operations on named stages, shared by the target kinds."""

from __future__ import annotations

from collections.abc import Iterable

from tvm_qopt.compiler.schedule import Placement


def loops(placement: Placement, stage: str) -> list[object]:
    """The loops around a stage, outermost first."""
    sch = placement.sch
    return list(sch.get_loops(sch.get_sblock(stage)))


def merge_loops(placement: Placement, stages: Iterable[str], depth: int) -> object:
    """Fuse the loops at one depth of stages that stand side by side, all of the same extent.

    Before: for b: A[b]; for b: B[b].  After: for b: A[b]; B[b].
    The fused loop stands where the last of them stood, and holds them in the order given, which
    TVM takes on trust: name producers before their consumers.
    """
    found = [loops(placement, stage)[depth] for stage in stages]
    return found[0] if len(found) == 1 else placement.sch.merge(*found)


def rfactor_lanes(placement: Placement, reduction: str, lanes: int) -> str:
    """Reduce a block to `lanes` partial results first; the name of the partial stage.

    Before: for b, k: R[b] max= x[b, k].
    After:  for b, k0, l: P[b, l] max= x[b, k0 * lanes + l]; for b, l: R[b] max= P[b, l].
    """
    sch = placement.sch
    _, inner = sch.split(loops(placement, reduction)[1], [None, lanes])
    return str(sch.get(sch.rfactor(inner, 1)).name_hint)


def unroll_inner(placement: Placement, loop: object, times: int) -> None:
    """Before: for v: S[v].  After: for v0: S[v0 * times]; S[v0 * times + 1]; ..."""
    sch = placement.sch
    times = min(times, int(sch.get(loop).extent)) if times > 1 else 1
    if times > 1:
        _, inner = sch.split(loop, [None, times])
        sch.unroll(inner)
