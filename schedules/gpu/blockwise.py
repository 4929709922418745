"""The blockwise update on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from tvm_qopt.compiler.schedule import ANY, MAIN, TAIL, Placement, schedule
from tvm_qopt.schedules.common import loops, merge_loops

WARP = 32
THREADS = 256  # at most: OpenCL devices need not take more in a group
ELEMENTS = 8  # of a thread
LARGEST_BLOCK = 4096  # a tail is shorter
LANES = {"float32": 4, "int32": 4, "uint16": 8, "uint8": 4}
LEVELS = 256  # of a run-time map
FEW = 32  # scalars that fit in registers


@dataclass(frozen=True)
class Tiling:
    """Element i = (outer * threads + thread) * vector + v of a block is its thread's (outer, v)."""

    outer: int
    threads: int
    vector: int


@dataclass(frozen=True)
class Sweep:
    """Stages that share a loop over a thread's elements: copies in, arithmetic, packing of two
    codes a byte, copies out.  apart: packing in a loop of its own."""

    loads: tuple[str, ...]
    compute: tuple[str, ...]
    packing: tuple[str, ...]
    stores: tuple[str, ...]
    apart: tuple[str, ...]

    @property
    def together(self) -> tuple[str, ...]:
        return (*self.loads, *self.compute, *self.packing, *self.stores)

    @property
    def stages(self) -> tuple[str, ...]:
        return (*self.together, *self.apart)


@schedule("cuda", "opencl", "metal", "webgpu", pattern="blockwise", entries=(MAIN, TAIL, ANY))
def blockwise(placement: Placement) -> None:
    """A thread block for each quantisation block, eight elements a thread, two sweeps over them.

    1. The first sweep copies a thread's elements into registers, four by one load, decodes,
       updates, and writes the weight; the second scales, encodes, packs 4-bit codes and writes
       them.  The new moments stay in registers between the sweeps: every loop over a thread's
       elements is unrolled.
    2. The maxima and the count go through warp shuffles to shared memory.  TVM puts a barrier
       between the one thread that writes there and those that read, and that barrier also parts
       the reads of the old scales (all threads) from the writes of the new ones (one thread), also
       where a block is one warp and its shuffles need none.  OpenCL needs `register_barrier_fence`.
    3. The scalars of the step and of the block are copied into registers first; what follows from
       a maximum (its reciprocal) every thread forms for itself.  Run-time maps go to shared memory,
       where a search meets banks, not cache lines.

    At least a warp of threads, so that no shuffle has lanes missing: blocks of 64 have vectors of
    two elements.  Two codes of a byte are always one thread's.  `main_any` is the same without
    vectors.  The tail has a loop of unknown length in place of the unrolled ones, with a test for
    each element, its moments lie in local memory, and it packs in a loop of its own.

    Not timed on a GPU yet; PoCL, Oclgrind and (the CUDA text) g++ run it.  Machine instructions an
    element of AdamW for sm_90 (nvcc 13), slow paths of roots and divisions left out, float32 and
    bfloat16: dynamic8 118 and 134, fp8 107 and 117, 4 bits in blocks of 128 107 and 118.  Some 15
    of them are a thread's and a block's, shared by 8 elements: 4 share them at 128, 2 at 64.  No
    spills; 64 registers at blocks of 256.  4.8 TB/s would allow 111 and 70 (4 bits: 98 and 57):
    with float32 memory is the limit of the fastest cards, with bfloat16 arithmetic.
    dynamic8 took 165 with closed forms.  What did it: look-ups among 16 numbers that lie in the
    lanes of a warp (-35), their tables in one array (-5), a code moved into the bits of 2^23 by one
    instruction (-4), the maxima of a warp by one (-1; 4 bits -4), the scalars of a step by 16 bytes
    (-1), no floor under the root, which is for CPUs (-2).
    Tried and dropped: a buffer index with the thread in it (TVM then gives each thread the
    registers of all); several blocks a thread block, one each threadIdx.y (a third more
    instructions for the last one's test, and TVM leaves out the barriers); eight elements of 16
    bits by one load as default (0.5 instructions less, but codes then come in halves of 8 bytes).
    Weighed only: vectors through the whole of the arithmetic (OpenCL's vector booleans are of
    another kind); tables of levels in shared memory (a block would first have to fill them).
    """
    sch, tiling, (reductions,) = placement.sch, _tiling(placement), placement.reductions
    before, after = placement.per_block
    results = tuple(stage for stage in after if _is_output(placement, stage))
    scalars = tuple(stage for stage in after if stage not in results)
    readers = (*before, *placement.elements[0], *results)
    step_scalars = _copy_in(placement, readers, _of_step)
    block_scalars = _copy_in(placement, readers, _of_block)
    maps = _share_maps(placement)
    first, second = (_sweep(placement, number) for number in (0, 1))
    elements = (*first.compute, *second.compute)

    _set_scope(placement, (*before, *elements, *scalars), "local")
    _set_scope(placement, reductions, "shared")
    for stage in (*first.stages, *reductions, *second.stages):
        _tile(placement, stage, tiling)
    for stage in results:
        _by_one_thread(placement, stage, tiling)

    order = (
        *(*block_scalars, *before, *first.stages, *reductions),
        *(*scalars, *second.stages, *results),
    )
    block_loop = merge_loops(placement, order, 0)
    for stage in step_scalars:
        sch.compute_at(sch.get_sblock(stage), block_loop)
        _copy_scalars(placement, stage)
    for stage in maps:
        _place_map(placement, stage, block_loop, tiling)
    for sweep in filter(lambda sweep: sweep.stages, (first, second)):
        _share_loops(placement, sweep)
    for stage in reductions:
        _bind(placement, stage)
    sch.bind(block_loop, "blockIdx.x")
    kept = elements if placement.entry == TAIL else first.compute
    _keep_in_registers(placement, kept, tiling)


def _tiling(placement: Placement) -> Tiling:
    params = placement.sch.mod["main"].params
    fewest = 2 if any(_is_packed(placement, p) for p in params) else 1  # codes of a byte
    if placement.entry == TAIL:
        return Tiling(LARGEST_BLOCK // THREADS // fewest, THREADS, fewest)
    size = int(_size(placement))
    elements = placement.choose("elements", (4, 8, 16, 32), ELEMENTS)
    threads = min(max(size // elements, WARP), THREADS)
    if placement.entry == MAIN:
        vector = min(placement.choose("vector", (2, 4, 8), 4), size // threads)
    else:
        vector = fewest
    return Tiling(size // threads // vector, threads, vector)


# --- copies between arguments and registers ---


def _is_argument(placement: Placement, buffer: Any) -> bool:
    return any(buffer.same_as(param) for param in placement.sch.mod["main"].params)


def _is_output(placement: Placement, stage: str) -> bool:
    """Whether a stage writes an argument of the kernel."""
    return _is_argument(placement, _result(placement, stage))


def _sweep(placement: Placement, number: int) -> Sweep:
    """The stages with a copy in of each argument they read and a copy out of each they write.

    A tail has a byte for its last code alone, so its loops over bytes and over elements differ: it
    reads and writes packed codes where they are.
    """
    sch, tail = placement.sch, placement.entry == TAIL
    compute, packed = placement.elements[number], placement.packed[number]
    packing, apart = ((), packed) if tail else (packed, ())

    def by_element(region: Any) -> bool:
        return len(region.region) == 2 and not (tail and _is_packed(placement, region.source))

    loads = _copy_in(placement, compute, by_element)
    stores = tuple(
        str(sch.get(sch.cache_write(sch.get_sblock(stage), 0, "local")).name_hint)
        for stage in (*compute, *packing)
        if _is_output(placement, stage)
    )
    return Sweep(loads, compute, packing, stores, apart)


def _copy_in(
    placement: Placement, stages: Iterable[str], wanted: Callable[[Any], bool]
) -> tuple[str, ...]:
    """Copy arguments that the stages read to registers first; the names of the copying stages."""
    sch = placement.sch
    copies = []
    for stage in stages:
        for region in sch.get(sch.get_sblock(stage)).reads:
            if _is_argument(placement, region.source) and wanted(region):
                copy = sch.cache_read(sch.get_sblock(stage), region.source.name, "local")
                copies.append(str(sch.get(copy).name_hint))
    return tuple(copies)


def _share_maps(placement: Placement) -> tuple[str, ...]:
    """Copy each run-time map to shared memory, once for all stages that look something up; the
    names of the copying stages."""
    sch = placement.sch
    readers: dict[str, list[Any]] = {}
    for stage in (name for names in placement.elements for name in names):
        block = sch.get_sblock(stage)
        for name in {region.source.name for region in sch.get(block).reads if _of_map(region)}:
            readers.setdefault(name, []).append(block)
    if not readers or not placement.choose("maps_in_shared", (0, 1), 1):
        return ()
    for name, blocks in readers.items():
        for block in blocks:
            _reads_whole_map(placement, block, name)
    copies = (sch.cache_read(of[0], name, "shared", of) for name, of in readers.items())
    return tuple(str(sch.get(copy).name_hint) for copy in copies)


def _reads_whole_map(placement: Placement, block: Any, name: str) -> None:
    """Tell TVM that a block reads a map from end to end: it does not see that codes are below 256.

    (Schedule.annotate_buffer_access takes only as many ranges as the block has loops.)
    """
    found = placement.sch.get(block)
    number = [region.source.name for region in found.reads].index(name)
    loops = [iterator.var for iterator in found.iter_vars]
    bounds = [tirx.const(bound, "int64") for bound in (0, LEVELS)]
    annotate = tvm.get_global_func("s_tir.schedule.ScheduleAnnotateBufferAccess")
    annotate(placement.sch, block, number, 0, tirx.IndexMap(loops, bounds, None))


def _of_block(region: Any) -> bool:
    """One value for each block: a scale, a counter."""
    return len(region.region) == 1 and isinstance(region.region[0].min, tirx.Var)


def _of_step(region: Any) -> bool:
    """A few values that all blocks share (a code book is not few)."""
    shared = len(region.region) == 1 and isinstance(region.region[0].min, tirx.IntImm)
    return shared and int(region.source.shape[0]) <= FEW


def _of_map(region: Any) -> bool:
    """Many values that all blocks share."""
    extent = region.source.shape[0]
    return isinstance(extent, tirx.IntImm) and int(extent) > FEW


def _set_scope(placement: Placement, stages: Iterable[str], scope: str) -> None:
    """Where the results of stages live; outputs are arguments and have their place."""
    sch = placement.sch
    for stage in stages:
        if not _is_output(placement, stage):
            sch.set_scope(sch.get_sblock(stage), 0, scope)


def _size(placement: Placement) -> Any:
    """The elements of a block."""
    stage = (*placement.elements[0], *placement.reductions[0])[0]
    return placement.sch.get(placement.sch.get_sblock(stage)).iter_vars[1].dom.extent


def _result(placement: Placement, stage: str) -> Any:
    """The buffer that a stage writes."""
    sch = placement.sch
    return sch.get(sch.get_sblock(stage)).writes[0].source


def _is_packed(placement: Placement, buffer: Any) -> bool:
    """Whether the second axis of a buffer counts bytes of two codes."""
    return len(buffer.shape) == 2 and str(buffer.shape[1]) != str(_size(placement))


# --- threads ---


def _tile(placement: Placement, stage: str, tiling: Tiling) -> None:
    """Before: for b, i.  After: for b, thread, outer, v.  Of packed codes v counts bytes."""
    sch = placement.sch
    packed = _is_packed(placement, _result(placement, stage))
    factors = [None, tiling.threads, tiling.vector // 2 if packed else tiling.vector]
    outer, thread, v = sch.split(loops(placement, stage)[1], factors)
    sch.reorder(thread, outer, v)


def _by_one_thread(placement: Placement, stage: str, tiling: Tiling) -> None:
    """Before: for b: S[b].  After: for b, _ in 1, thread: if thread < 1: S[b]."""
    sch = placement.sch
    unit = sch.add_unit_loop(sch.get_sblock(stage))
    _, thread = sch.split(unit, [1, tiling.threads])
    sch.bind(thread, "threadIdx.x")


def _place_map(placement: Placement, stage: str, block_loop: Any, tiling: Tiling) -> None:
    """Before: for i: S.  After: for b: for outer, thread, v: S."""
    sch = placement.sch
    sch.compute_at(sch.get_sblock(stage), block_loop)
    (size,) = _result(placement, stage).shape
    width = min(4, max(int(size) // tiling.threads, 1)) if placement.entry == MAIN else 1
    factors = [None, tiling.threads, width]
    outer, thread, v = sch.split(loops(placement, stage)[-1], factors)
    sch.bind(thread, "threadIdx.x")
    sch.unroll(outer)
    sch.vectorize(v)


def _share_loops(placement: Placement, sweep: Sweep) -> None:
    """Before: for b: for thread, outer, v: S; the same: T; ...
    After: for b: for thread, outer: copies in (for v); for v: S; T; ...; copies out (for v)."""
    sch = placement.sch
    merge_loops(placement, sweep.together, 1)
    merge_loops(placement, sweep.together, 2)
    merge_loops(placement, sweep.compute, 3)
    for stage in (sweep.compute[0], *sweep.apart):
        _bind(placement, stage)
    for stage in sweep.packing:
        sch.unroll(loops(placement, stage)[3])
    for stage in (*sweep.loads, *sweep.stores):
        _copy(placement, stage)


def _copy_scalars(placement: Placement, stage: str) -> None:
    """By 16 bytes as far as they go; `main_any` and the tail one by one."""
    sch, i = placement.sch, loops(placement, stage)[-1]
    extent, lanes = sch.get(i).extent, LANES[str(_result(placement, stage).dtype)]
    if not isinstance(extent, tirx.IntImm):  # the loop over blocks: one scalar has none
        return
    if placement.entry != MAIN or int(extent) % lanes:
        sch.unroll(i)
        return
    outer, v = sch.split(i, [None, lanes])
    sch.unroll(outer)
    sch.vectorize(v)


def _copy(placement: Placement, stage: str) -> None:
    """By the widest accesses that there are, or element by element at any address."""
    sch, v = placement.sch, loops(placement, stage)[3]
    lanes = LANES[str(_result(placement, stage).dtype)]
    if placement.entry != MAIN:
        sch.unroll(v)
        return
    if int(sch.get(v).extent) > lanes:
        outer, v = sch.split(v, [None, lanes])
        sch.unroll(outer)
    sch.vectorize(v)


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
    sch = placement.sch
    run = tiling.threads * tiling.vector

    def layout(b: Any, i: Any) -> tuple[Any, ...]:
        return b, i % (tiling.outer * run) // run, i % tiling.vector

    for stage in stages:
        if not _is_output(placement, stage):
            block = sch.get_sblock(stage)
            sch.transform_layout(block, ("write", 0), layout, assume_injective_transform=True)
