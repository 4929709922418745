"""The GPU kernels in the simulator Oclgrind, which reports data races, accesses outside a buffer,
barriers that not all threads reach, and values used before they are set."""

from __future__ import annotations

import itertools
import re
from typing import Any

import opencl_runner
import pytest
from gpu_jobs import fault, launches
from opencl_kernels import Decisions, build, run_steps
from opencl_runner import Job

from tvm_qopt import sample
from tvm_qopt.compiler.build import lower
from tvm_qopt.compiler.schedule import MAIN, TAIL
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

PLAIN = "adamw-dynamic8-b64-p_f32-g_f32"
SPECS = [
    PLAIN,
    "adamw-dynamic8-b256-p_bf16-g_bf16",
    "adamw-dynamic8-b4096-p_f16-g_f16",
    "adamw-4bit-b128-p_f32-g_f32",
    "adamw-codebook8-b256-p_f32-g_f32",
    "adamw-float32-b256-p_f32-g_f32",
    "lion-nf4-b64-p_bf16_stochastic-g_f32",
    "lans-4bit-b64-p_bf16-g_bf16",
    "quantize-linear4u-b64-p_f32-g_f32",
    "dequantize-dynamic4s-b128-p_f16-g_f32",
    "sum_sq-dynamic8-b256-p_bf16-g_f32",
]
WALKED = "lion-linear8s-b1024-p_f32-g_f32"
SAMPLED: list[tuple[str, Decisions]] = [
    ("adamw-dynamic8-b4096-p_f16-g_f16", (("elements", 32), ("vector", 8))),
    ("adamw-codebook8-b256-p_f32-g_f32", (("elements", 4), ("maps_in_shared", 0))),
    ("adamw-4bit-b128-p_f32-g_f32", (("elements", 16), ("vector", 2))),
]


@pytest.fixture(scope="module", autouse=True)
def oclgrind() -> None:
    if why := opencl_runner.why_missing(oclgrind=True):
        pytest.skip(why)


@pytest.mark.parametrize("name", SPECS)
def test_simulator_reports_nothing(name: str) -> None:
    kernels = build(name)
    size = kernels.spec.block_size
    faults, reports = run_steps(kernels, (2 * size + min(size // 2 + 1, 600),), oclgrind=True)
    assert reports == "" and not faults


def whole_space(name: str) -> list[Decisions]:
    choices = lower(KernelSpec.parse(name), get_target("opencl"), MAIN).choices
    each = [[(key, value) for value in choice.candidates] for key, choice in choices.items()]
    return list(itertools.product(*each))


@pytest.mark.parametrize(
    ("name", "decisions"), [*((WALKED, point) for point in whole_space(WALKED)), *SAMPLED]
)
def test_simulator_reports_nothing_whatever_is_decided(name: str, decisions: Decisions) -> None:
    kernels = build(name, decisions, (MAIN,))
    arrays = sample.arguments(kernels.spec, kernels.spec.block_size, seed=1, spoiled=True)
    outcome = opencl_runner.run(
        kernels.source, kernels.launches, launches(kernels.spec, arrays), oclgrind=True
    )
    assert outcome.reports == ""
    assert fault(kernels.spec, arrays, outcome.arrays) is None


# --- what the simulator is for ---


def without_barriers(source: str) -> str:
    return re.sub(r"barrier\([^)]*\);", "", source)


def with_local_fences(source: str) -> str:
    return source.replace(" | CLK_GLOBAL_MEM_FENCE", "")


def with_a_barrier_for_some(source: str) -> str:
    return re.sub(r"(barrier\([^)]*\);)", r"if (get_local_id(0) < 7) { \1 }", source)


def without_the_loads(source: str) -> str:
    """No weight is read, and the update goes on from what lies in the registers."""
    load = r"vstore\d\(vload\d\(0, param_ptr[^;]*;|param_local_ptr\[0\] = param_ptr[^;]*;"
    return re.sub(load, "", source)


def beyond_the_end(source: str) -> str:
    return source.replace("get_group_id(0)", "(get_group_id(0) + 1)")


SPOILED = [
    (MAIN, without_barriers, "data race"),
    (TAIL, without_barriers, "data race"),
    (MAIN, with_local_fences, "data race"),
    (TAIL, with_local_fences, "data race"),
    (MAIN, with_a_barrier_for_some, "divergence"),
    (MAIN, without_the_loads, "ninitialized"),
    (MAIN, beyond_the_end, "Invalid"),
]


@pytest.mark.parametrize(("entry", "spoil", "report"), SPOILED)
def test_simulator_sees_what_is_wrong(entry: str, spoil: Any, report: str) -> None:
    kernels = build(PLAIN)
    assert spoil(kernels.source) != kernels.source
    arrays = sample.arguments(kernels.spec, 64 if entry == MAIN else 63, seed=1)
    jobs = launches(kernels.spec, arrays)
    spoiled = spoil(kernels.source)
    assert report in opencl_runner.run(spoiled, kernels.launches, jobs, oclgrind=True).reports


def test_decisions_make_different_kernels() -> None:
    """A thread's elements bound its vector, so that some are the same."""
    points = whole_space(WALKED)
    assert len({build(WALKED, point, (MAIN,)).source for point in points}) > len(points) // 2


def test_simulator_sees_a_block_too_many() -> None:
    kernels = build(PLAIN)
    arrays = sample.arguments(kernels.spec, 64, seed=1)
    job = Job(MAIN, Part(0, 2, 64), arrays)
    outcome = opencl_runner.run(kernels.source, kernels.launches, [job], oclgrind=True)
    assert "Invalid" in outcome.reports
