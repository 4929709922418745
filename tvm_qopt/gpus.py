"""What NVIDIA publishes of its GPUs, and what follows for a kernel: how many of its warps an SM
holds, and a model of its time.

Limits of an SM: CUDA Programming Guide, "Technical Specifications per Compute Capability"; units in
which registers and shared memory are given out: cuda_occupancy.h of the CUDA toolkit.  GPUs: data
sheets and architecture papers.  May import the standard library and layer 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_qopt.errors import UnknownName

WARP = 32
PARTITIONS = 4
"""Of an SM, each with a quarter of the registers and a scheduler that issues one warp instruction a
clock."""
REGISTERS = 65536
REGISTER_UNIT = 256  # registers of a warp are given out in these
SPECIAL_PER_CLOCK = 16
LOGIC_PER_CLOCK = 64
ARITHMETIC_PER_CLOCK = {"sm_75": 64, "sm_80": 64}
"""Results a clock and SM of rcp, rsqrt, sqrt, ex2; of comparisons, additions of integers and bit
operations; and of sums and products in float32 where that is less than the issue rate (throughput
table of the CUDA Programming Guide, compute capability 7.5 to 9.0).  Conversions between integers
and float32 share the unit of the first (pipe XU of the Nsight Compute guide)."""


@dataclass(frozen=True)
class SmLimits:
    """What is resident on one SM at most; shared memory in bytes, `reserved` of each block."""

    warps: int
    blocks: int
    shared: int
    shared_unit: int = 128
    reserved: int = 1024


LIMITS: Mapping[str, SmLimits] = {
    "sm_75": SmLimits(32, 16, 64 << 10, shared_unit=256, reserved=0),
    "sm_80": SmLimits(64, 32, 164 << 10),
    "sm_86": SmLimits(48, 16, 100 << 10),
    "sm_89": SmLimits(48, 24, 100 << 10),
    "sm_90": SmLimits(64, 32, 228 << 10),
    "sm_100": SmLimits(64, 32, 228 << 10),
    "sm_120": SmLimits(48, 24, 100 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps of a kernel on one SM; limit: what allows no more."""

    blocks: int
    warps: int
    share: float
    limit: str


def occupancy(arch: str, threads: int, registers: int, shared: int) -> Occupancy:
    """How much of an SM of `arch` a kernel fills: threads and bytes of shared memory of a block,
    registers of a thread.  Raises UnknownName for an architecture that is not in the table."""
    if arch not in LIMITS:
        raise UnknownName("GPU architecture", arch, LIMITS)
    limits = LIMITS[arch]
    warps = -(-threads // WARP)
    of_warp = _round_up(max(registers, 1) * WARP, REGISTER_UNIT)
    of_block = _round_up(shared + limits.reserved, limits.shared_unit)
    allowed = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps,
        "shared memory": limits.shared // of_block if of_block else limits.blocks,
    }
    limit = min(allowed, key=lambda name: allowed[name])
    resident = allowed[limit] * warps
    return Occupancy(allowed[limit], resident, resident / limits.warps, limit)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Gpu:
    """clock: boost, in Hz.  bandwidth: of the memory, in bytes a second."""

    name: str
    arch: str
    sms: int
    clock: float
    bandwidth: float


GPUS = (
    Gpu("H200", "sm_90", 132, 1.98e9, 4.8e12),
    Gpu("H100 SXM", "sm_90", 132, 1.98e9, 3.35e12),
    Gpu("A100 80GB", "sm_80", 108, 1.41e9, 2.039e12),
    Gpu("L40S", "sm_89", 142, 2.52e9, 0.864e12),
    Gpu("RTX 4090", "sm_89", 128, 2.52e9, 1.008e12),
)

ASSUMPTIONS = (
    "time = the longest of bytes / bandwidth, instructions / 128, sums and products / 128 (64 on "
    "sm_75 and sm_80), comparisons, integer and bit operations / 64, special functions and "
    "conversions / 16 (a clock and SM), at boost clock, each at its published peak and wholly "
    "overlapped; every branch is entered, slow paths of division and root never.  Not a "
    "measurement."
)


@dataclass(frozen=True)
class ModelTime:
    """Seconds an element that each limit asks for on one GPU."""

    gpu: Gpu
    memory: float
    issue: float
    arithmetic: float
    logic: float
    special: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.issue, self.arithmetic, self.logic, self.special)

    @property
    def bandwidth_share(self) -> float:
        """The share of the memory's bandwidth that is left to reach: 1 where bytes decide."""
        return self.memory / self.seconds


def model(
    gpu: Gpu, *, moved: float, instructions: float, arithmetic: float, logic: float, special: float
) -> ModelTime:
    """moved: bytes an element.  instructions: of a thread, an element; the others: those among them
    that the units for sums and products, for integers and bits, and for special functions do."""
    clocks = gpu.sms * gpu.clock
    return ModelTime(
        gpu,
        memory=moved / gpu.bandwidth,
        issue=instructions / (clocks * PARTITIONS * WARP),
        arithmetic=arithmetic / (clocks * ARITHMETIC_PER_CLOCK.get(gpu.arch, PARTITIONS * WARP)),
        logic=logic / (clocks * LOGIC_PER_CLOCK),
        special=special / (clocks * SPECIAL_PER_CLOCK),
    )
