"""The GPU kernels, run without a GPU: as OpenCL C on PoCL against the reference.

CUDA kernels come from the same scheduled function.
"""

from __future__ import annotations

import re

import numpy as np
import opencl_runner
import pytest
import tvm_ffi
from opencl_kernels import Decisions, build, run_steps

from tvm_qopt.compiler import opencl
from tvm_qopt.compiler.build import compile_spec
from tvm_qopt.compiler.cuda import device_source
from tvm_qopt.errors import BuildError
from tvm_qopt.formats import FORMATS
from tvm_qopt.params import PARAM_FORMATS
from tvm_qopt.rules import RULES
from tvm_qopt.spec import BLOCK_SIZES, KernelSpec
from tvm_qopt.targets import get_target

SPECS = [
    "adamw-dynamic8-b64-p_f32-g_f32",
    "adamw-dynamic8-b256-p_bf16-g_bf16",
    "adamw-dynamic8-b4096-p_f16-g_f16",
    "adamw-4bit-b128-p_f32-g_f32",
    "adamw-codebook8-b256-p_f32-g_f32",
    "adam-fp8-b512-p_bf16_master-g_bf16",
    "adam_fp16-float32-b1024-p_f16_master-g_f16",
    "adamw_mxnet-fp8_e5m2-b2048-p_f32-g_f16",
    "ademamix-dynamic8s+nf4+sqrt8u-b128-p_bf16_split-g_bf16",
    "adagrad-sqrt_dynamic8u-b64-p_f32-g_f32-nonfinite_propagate",
    "lion-nf4-b64-p_bf16_stochastic-g_f32",
    "rmsprop-linear8u-b4096-p_f32-g_f32",
    "sgd-linear8s-b256-p_f16-g_f16",
    "lars-bfloat16-b256-p_f32-g_f32",
    "lamb-dynamic8-b512-p_f32-g_f32",
    "lamb_phase1-float16+float32-b64-p_f32-g_f32",
    "lans-4bit-b64-p_bf16-g_bf16",
    "quantize-linear4u-b64-p_f32-g_f32",
    "quantize-dynamic8s-b256-p_f32-g_f32",
    "dequantize-dynamic4s-b128-p_f16-g_f32",
    "sum_sq-dynamic8-b256-p_bf16-g_f32",
]
"""Every rule, state format, parameter format, dtype and block size at least once."""

TILINGS: list[tuple[str, Decisions]] = [
    ("adamw-dynamic8-b256-p_bf16-g_bf16", (("elements", 4), ("vector", 2))),
    ("adamw-4bit-b128-p_f32-g_f32", (("vector", 2),)),
    ("adamw-codebook8-b256-p_f32-g_f32", (("maps_in_shared", 0),)),
    ("rmsprop-linear8u-b4096-p_f32-g_f32", (("elements", 32), ("vector", 8))),
]


@pytest.fixture(scope="module")
def device() -> None:
    if why := opencl_runner.why_missing(oclgrind=False):
        pytest.skip(why)


def test_every_part_occurs() -> None:
    specs = [KernelSpec.parse(name) for name in SPECS]
    own = {n for n, rule in RULES.items() if rule.update.__module__.startswith("tvm_qopt.rules.")}
    assert {spec.rule for spec in specs} == own
    assert {format_.name for spec in specs for _, format_ in spec.slots} == {*FORMATS}
    assert {spec.param_format for spec in specs} == {*PARAM_FORMATS}
    assert {spec.block_size for spec in specs} == {*BLOCK_SIZES}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", SPECS)
def test_kernels_equal_the_reference(name: str) -> None:
    kernels = build(name)
    size = kernels.spec.block_size
    faults, _ = run_steps(kernels, (1, size - 1, 5 * size + size // 2 + 1))
    assert not faults


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "decisions"), TILINGS)
def test_kernels_with_other_tilings_equal_the_reference(name: str, decisions: Decisions) -> None:
    kernels = build(name, decisions)
    assert kernels.source != build(name).source
    faults, _ = run_steps(kernels, (2 * kernels.spec.block_size + 7,))
    assert not faults


# --- the source ---


def test_every_barrier_fences_global_memory() -> None:
    source = build(SPECS[0]).source
    barriers = set(re.findall(r"barrier\(([^)]*)\)", source))
    assert barriers == {"CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE"}


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_cuda_has_a_barrier_between_old_and_new_scales(size: int) -> None:
    """Also where a block is one warp, whose shuffles need no barrier."""
    spec = KernelSpec.of("adamw", block_size=size)
    source = device_source(compile_spec(spec, get_target("cuda-sm90")))
    kernels = [text for text in source.split('extern "C"') if "threadIdx.x" in text]
    assert len(kernels) == 3
    for kernel in kernels:
        body = kernel[kernel.index("{") :]
        reads, writes = (_places(body, rf"{sign}") for sign in (r"(?! = )", " = "))
        barrier = body.rindex("__syncthreads()")
        assert max(reads) < barrier < min(writes)


def _places(body: str, sign: str) -> list[int]:
    """Where a kernel mentions its blocks' scales and counts, by what follows."""
    arguments = r"(?:exp_avg_scale|exp_avg_sq_scale|nonfinite_count)_ptr"
    return [found.start() for found in re.finditer(rf"{arguments}\[[^\]]*?\]{sign}", body)]


def test_source_without_the_fence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencl, "_edit", lambda code, target: code)
    try:
        executable = compile_spec(KernelSpec.parse("adamw-float32"), get_target("opencl"))
        with pytest.raises(BuildError, match="register_barrier_fence"):
            opencl.opencl_source(executable)
    finally:
        monkeypatch.undo()
        opencl.register_barrier_fence()
    assert tvm_ffi.get_global_func("tvm_callback_opencl_postproc")("x", None) == "x"


def test_source_has_every_digit_of_a_constant() -> None:
    source = build(SPECS[0]).source  # 128/9, a ninth of the top decade's levels
    bits = int(np.float32(128 / 9).view(np.int32))
    assert f"as_float({bits})" in source and "1.422222e+01f" not in source


def test_float16_asks_for_no_extension() -> None:
    source = build("adamw-dynamic8-b4096-p_f16-g_f16").source
    assert "vload_half" in source and "vstore_half_rte" in source
    assert "cl_khr_fp16" not in source and "convert_half" not in source
