"""The blockwise update on a CPU."""

from __future__ import annotations

from tvm_qopt.compiler.schedule import MAIN, SERIAL, TAIL, Placement, schedule
from tvm_qopt.schedules.common import loops, merge_loops, rfactor_lanes, unroll_inner

LANES = 64  # LLVM splits a vector into what the CPU has, and interleaves the parts
UNROLL = 2


@schedule("llvm", pattern="blockwise", entries=(MAIN, TAIL, SERIAL))
def blockwise(placement: Placement) -> None:
    """One parallel loop over quantisation blocks, two SIMD sweeps over each.

    1. All loops over blocks become one, parallel: a block is one thread's, so results do not
       depend on their number.
    2. The first sweep decodes, updates, writes the weight and keeps `lanes` maxima a moment;
       the second scales and encodes.  Stages of one sweep share a loop over vectors, so what
       passes between them lives in registers; between the sweeps the new moments (1 KiB a moment
       at 256) live in L1.
    3. Maxima are of the bit patterns as integers: LLVM may reorder those, and a NaN has no say.

    What bounds it, measured on Zen 4 with AVX-512 for dynamic8 AdamW: arithmetic, some 90 vector
    operations for 16 parameters at about one a cycle, half in each sweep; two threads' memory would
    allow 27 cycles at 16 bytes a parameter.  The division and the root hide behind the rest.  From
    127 cycles (one thread, in cache) to 71, lanes 16: look-ups among 16 numbers for what depends on
    the decade of a code (-23); no `x + 1` of integers in the loop (-22: LLVM makes it `x - (-1)`,
    and the all-ones idiom of AVX-512 waits for its register's old value, which chains iterations);
    finiteness by products with 0 (-10); an addition that can be masked in place of a subtraction
    that cannot (-4).  With more lanes independent parts interleave: -10 % again, with 64 and 2.
    Buffers of a block on the stack matter with two threads only (see `realign.on_stack`).  Tried
    without effect: other offsets between arrays, blocks of 128 or 1024, finiteness by subtraction,
    a shorter rounding to fp8.

    The tail is the same with one element in place of a vector, since its size is not known.
    """
    vector = placement.entry != TAIL
    sch, (reductions,) = placement.sch, placement.reductions
    lanes = placement.choose("lanes", (8, 16, 32, 64), LANES) if vector else 1
    unroll = placement.choose("unroll", (1, 2, 4), UNROLL) if vector else 1
    partials = [rfactor_lanes(placement, r, lanes) for r in reductions] if vector else reductions
    first, second = placement.elements[0], placement.elements[1]
    packed = placement.packed[1]
    for stage in (*first, *second) if vector else ():
        sch.split(loops(placement, stage)[1], [None, lanes])
    for stage in packed if vector else ():
        sch.split(loops(placement, stage)[1], [None, lanes // 2])

    upper = merge_loops(placement, (*placement.per_block[1], *second, *packed), 0)
    for reduction in reductions if vector else ():
        sch.compute_at(sch.get_sblock(reduction), upper)
    lower = merge_loops(placement, (*first, *partials), 0)
    # a tail of odd size has one byte for its last code: packing is a loop of its own there
    for sweep in ((*first, *partials), (*second, *packed) if vector else second):
        if sweep:
            unroll_inner(placement, merge_loops(placement, sweep, 1), unroll)
    block_loop = sch.merge(lower, upper)

    if vector:
        for stage in (*first, *partials, *second, *packed):
            sch.vectorize(loops(placement, stage)[-1])
    if placement.entry == MAIN:
        sch.parallel(block_loop)
    for partial in partials:  # last: a decomposed reduction refuses the operations above
        sch.decompose_reduction(sch.get_sblock(partial), loops(placement, partial)[1])
