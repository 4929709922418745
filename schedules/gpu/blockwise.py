"""The blockwise update on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_qopt.compiler.schedule import ANY, MAIN, TAIL, Placement, schedule
from tvm_qopt.schedules.common import loops, merge_loops

WARP = 32
THREADS = 256  # at most: OpenCL devices need not take more in a group
ELEMENTS = 8  # of a thread
LARGEST_BLOCK = 4096  # a tail is shorter
FEW = 32  # scalars that fit in registers


@dataclass(frozen=True)
class Tiling:
    """Element i = (outer * threads + thread) * vector + v of a block is its thread's (outer, v)."""

    outer: int
    threads: int
    vector: int


@dataclass(frozen=True)
class Sweep:
    """Stages that share a loop over a thread's elements: copies in, arithmetic, copies out."""

    loads: tuple[str, ...]
    compute: tuple[str, ...]
    stores: tuple[str, ...]

    @property
    def stages(self) -> tuple[str, ...]:
        return (*self.loads, *self.compute, *self.stores)


@schedule("cuda", "opencl", "metal", "webgpu", pattern="blockwise", entries=(MAIN, TAIL, ANY))
def blockwise(placement: Placement) -> None:
    """A thread block for each quantisation block, eight elements a thread, two sweeps over them.

    1. The first sweep copies a thread's elements into registers, four by one load, decodes,
       updates, and writes the weight; the second scales and encodes.  The new moments stay in
       registers between the sweeps: every loop over a thread's elements is unrolled.
    2. The maxima and the count go through warp shuffles to shared memory.  TVM puts a barrier
       between the one thread that writes there and those that read, and that barrier also parts
       the reads of the old scales (all threads) from the writes of the new ones (one thread), also
       where a block is one warp and its shuffles need none.  OpenCL needs `register_barrier_fence`.
    3. The scalars of the step and of the block are copied into registers first; what follows from
       a maximum (its reciprocal) every thread forms for itself.

    At least a warp of threads, so that no shuffle has lanes missing: blocks of 64 have vectors of
    two elements.  `main_any` is the same without vectors.  The tail has a loop of unknown length in
    place of the unrolled ones, with a test for each element, and its moments lie in local memory.

    Not timed on a GPU yet; PoCL and Oclgrind run it.  AdamW with dynamic8 by nvcc 13: 59 registers
    at blocks of 256 for sm_90, 67 at 4096, no spills for sm_75 to sm_120; 188 PTX instructions an
    element, so arithmetic and not memory may be the limit of the fastest cards.  Tried and dropped:
    a buffer index with the thread in it (TVM then gives each thread the registers of all).  Weighed
    only: vectors through the whole of the arithmetic (OpenCL's vector booleans are of another
    kind); one vector a thread (twice the shuffles an element, and at 256 two warps with barriers
    between); a code book in shared memory (a search meets one bank as it meets one line).
    """
    sch, tiling, (reductions,) = placement.sch, _tiling(placement), placement.reductions
    arguments = _arguments(placement)
    results = tuple(stage for stage in placement.per_block[1] if stage in arguments)
    scalars = tuple(stage for stage in placement.per_block[1] if stage not in arguments)
    readers = (*placement.elements[0], *results)
    step_scalars = _copy_in(placement, readers, _of_step)
    block_scalars = _copy_in(placement, readers, _of_block)
    first, second = (_sweep(placement, stages) for stages in placement.elements[:2])

    _set_scope(placement, (*first.compute, *scalars, *second.compute), "local")
    _set_scope(placement, reductions, "shared")
    for stage in (*first.stages, *reductions, *second.stages):
        _tile(placement, stage, tiling)
    for stage in results:
        _by_one_thread(placement, stage, tiling)

    order = (*block_scalars, *first.stages, *reductions, *scalars, *second.stages, *results)
    block_loop = merge_loops(placement, order, 0)
    for stage in step_scalars:
        sch.compute_at(sch.get_sblock(stage), block_loop)
        sch.unroll(loops(placement, stage)[-1])
    for sweep in filter(lambda sweep: sweep.stages, (first, second)):
        _share_loops(placement, sweep)
    for stage in reductions:
        _bind(placement, stage)
    sch.bind(block_loop, "blockIdx.x")
    _keep_in_registers(placement, first.compute, tiling)


def _tiling(placement: Placement) -> Tiling:
    if placement.entry == TAIL:
        return Tiling(LARGEST_BLOCK // THREADS, THREADS, 1)
    stage = placement.sch.get(placement.sch.get_sblock(placement.elements[0][0]))
    size = int(stage.iter_vars[1].dom.extent)
    most = placement.choose("threads", (64, 128, 256), THREADS)
    elements = placement.choose("elements", (4, 8, 16), ELEMENTS)
    threads = min(max(size // elements, WARP), most)
    vector = min(4, size // threads) if placement.entry == MAIN else 1
    return Tiling(size // threads // vector, threads, vector)


# --- copies between arguments and registers ---


def _arguments(placement: Placement) -> frozenset[str]:
    """The names of the kernel's arguments; a stage of such a name is an output."""
    return frozenset(param.name for param in placement.sch.mod["main"].params)


def _sweep(placement: Placement, stages: tuple[str, ...]) -> Sweep:
    """The stages with a copy in of each argument they read and a copy out of each they write."""
    sch, arguments = placement.sch, _arguments(placement)
    loads = _copy_in(placement, stages, lambda region: len(region.region) == 2)
    stores = tuple(
        str(sch.get(sch.cache_write(sch.get_sblock(stage), 0, "local")).name_hint)
        for stage in stages
        if stage in arguments
    )
    return Sweep(loads, stages, stores)


def _copy_in(
    placement: Placement, stages: Iterable[str], wanted: Callable[[Any], bool]
) -> tuple[str, ...]:
    """Copy arguments that the stages read to registers first; the names of the copying stages."""
    sch, arguments = placement.sch, _arguments(placement)
    copies = []
    for stage in stages:
        for region in sch.get(sch.get_sblock(stage)).reads:
            if region.source.name in arguments and wanted(region):
                copy = sch.cache_read(sch.get_sblock(stage), region.source.name, "local")
                copies.append(str(sch.get(copy).name_hint))
    return tuple(copies)


def _of_block(region: Any) -> bool:
    """One value for each block: a scale, a counter."""
    return len(region.region) == 1 and isinstance(region.region[0].min, tirx.Var)


def _of_step(region: Any) -> bool:
    """A few values that all blocks share (a code book is not few)."""
    shared = len(region.region) == 1 and isinstance(region.region[0].min, tirx.IntImm)
    return shared and int(region.source.shape[0]) <= FEW


def _set_scope(placement: Placement, stages: Iterable[str], scope: str) -> None:
    """Where the results of stages live; outputs are arguments and have their place."""
    sch, arguments = placement.sch, _arguments(placement)
    for stage in stages:
        if stage not in arguments:
            sch.set_scope(sch.get_sblock(stage), 0, scope)


# --- threads ---


def _tile(placement: Placement, stage: str, tiling: Tiling) -> None:
    """Before: for b, i.  After: for b, thread, outer, v."""
    sch = placement.sch
    factors = [None, tiling.threads, tiling.vector]
    outer, thread, v = sch.split(loops(placement, stage)[1], factors)
    sch.reorder(thread, outer, v)


def _by_one_thread(placement: Placement, stage: str, tiling: Tiling) -> None:
    """Before: for b: S[b].  After: for b, _ in 1, thread: if thread < 1: S[b]."""
    sch = placement.sch
    unit = sch.add_unit_loop(sch.get_sblock(stage))
    _, thread = sch.split(unit, [1, tiling.threads])
    sch.bind(thread, "threadIdx.x")


def _share_loops(placement: Placement, sweep: Sweep) -> None:
    """Before: for b: for thread, outer, v: S; the same: T; ...
    After: for b: for thread, outer: copies in (for v); for v: S; T; ...; copies out (for v)."""
    sch = placement.sch
    merge_loops(placement, sweep.stages, 1)
    merge_loops(placement, sweep.stages, 2)
    merge_loops(placement, sweep.compute, 3)
    _bind(placement, sweep.compute[0])
    for stage in (*sweep.loads, *sweep.stores):
        sch.vectorize(loops(placement, stage)[3])


def _bind(placement: Placement, stage: str) -> None:
    """Bind the loop over threads and unroll those over a thread's elements."""
    sch = placement.sch
    _, thread, outer, v = loops(placement, stage)
    sch.bind(thread, "threadIdx.x")
    sch.unroll(v)
    if placement.entry != TAIL:
        sch.unroll(outer)


def _keep_in_registers(placement: Placement, stages: Iterable[str], tiling: Tiling) -> None:
    """Index what a thread hands from sweep to sweep by (outer, v), so that it is an array of a
    thread's elements only.

    The thread is left out of the index, since registers are its own; TVM, which thinks of one
    array, has to be told that this is injective.  It also bounds the length of a tail.
    """
    sch, arguments = placement.sch, _arguments(placement)
    run = tiling.threads * tiling.vector

    def layout(b: Any, i: Any) -> tuple[Any, ...]:
        return b, i % (tiling.outer * run) // run, i % tiling.vector

    for stage in stages:
        if stage not in arguments:
            block = sch.get_sblock(stage)
            sch.transform_layout(block, ("write", 0), layout, assume_injective_transform=True)
