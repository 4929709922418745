"""Occupancy and the model of time, on numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from tvm_qopt.errors import UnknownName
from tvm_qopt.gpus import GPUS, LIMITS, model, occupancy
from tvm_qopt.targets import CUDA_ARCHS


def test_every_architecture_of_a_preset_has_its_limits() -> None:
    assert tuple(LIMITS) == CUDA_ARCHS
    assert {gpu.arch for gpu in GPUS} <= set(CUDA_ARCHS)
    with pytest.raises(UnknownName, match=r"sm_70.*sm_90"):
        occupancy("sm_70", 32, 32, 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "warps", "limit"),
    [
        ("sm_90", 32, 40, 0, 32, "blocks"),  # 32 blocks of one warp
        ("sm_86", 32, 40, 0, 16, "blocks"),
        ("sm_90", 256, 32, 0, 64, "warps"),
        ("sm_90", 256, 33, 0, 48, "registers"),  # 40 * 32 a warp, 12 warps a quarter
        ("sm_90", 256, 65, 0, 24, "registers"),  # 72 * 32 a warp, 7 a quarter: 3 blocks of 8
        ("sm_80", 256, 32, 41 << 10, 24, "shared memory"),  # 1 KiB more is reserved
        ("sm_75", 256, 32, 32 << 10, 16, "shared memory"),  # none is
    ],
)
def test_occupancy(
    arch: str, threads: int, registers: int, shared: int, warps: int, limit: str
) -> None:
    found = occupancy(arch, threads, registers, shared)
    assert (found.warps, found.limit) == (warps, limit)
    assert found.share == warps / LIMITS[arch].warps


def test_the_slowest_part_is_the_time() -> None:
    h200 = next(gpu for gpu in GPUS if gpu.name == "H200")
    lanes = 132 * 1.98e9
    bound_by_bytes = model(h200, moved=16, instructions=90, arithmetic=50, logic=30, special=2)
    assert bound_by_bytes.seconds == bound_by_bytes.memory == 16 / 4.8e12
    assert bound_by_bytes.bandwidth_share == 1
    rates = {"instructions": 128, "arithmetic": 128, "logic": 64, "special": 16}
    for part, rate in rates.items():
        work = {**dict.fromkeys(rates, 0.0), part: 200.0}
        time = model(h200, moved=16, **work)
        assert time.seconds == pytest.approx(200 / rate / lanes)
        assert time.bandwidth_share == pytest.approx(16 / 4.8e12 / time.seconds)
    a100 = next(gpu for gpu in GPUS if gpu.arch == "sm_80")
    half_rate = model(a100, moved=0, instructions=200, arithmetic=150, logic=0, special=0)
    assert half_rate.seconds == pytest.approx(150 / 64 / (108 * 1.41e9))
