"""Metal and WGSL: their text by structure, and WGSL run where there is a WebGPU adapter: through
wgpu (Mesa's lavapipe is one on a CPU) and in headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import chromium_runner
import pytest
import webgpu_runner
from gpu_jobs import faults
from opencl_runner import Array, Job
from webgpu_runner import Dispatch, dispatch

import tvm_qopt
from tvm_qopt.compiler.build import build, compile_spec, shaders_of
from tvm_qopt.errors import ArtifactInvalid, UnsupportedSpec
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

METAL = ["adamw-dynamic8-b256-p_f32-g_f32", "adamw-fp8-b64-p_bf16-g_bf16", "lion-float16-p_f16"]
METAL_LIBRARY = Path(__file__).parents[1] / "metal"
WGSL = "adamw-float32-b256-p_f32-g_f32"
RUN = [
    WGSL,
    "ademamix-float32-b4096-p_f32-g_f32",
    "lamb-float32-b64-p_f32-g_f32",
    "lion-float32-b512-p_f32-g_f32",
    "sum_sq-float32-b128-p_f32-g_f32",
]
ENTRIES = ("main", "tail", "main_any")


@cache
def texts_of(name: str, target: str) -> dict[str, str]:
    spec, preset = KernelSpec.parse(name), get_target(target)
    return shaders_of(spec, preset)


def assert_brackets_match(text: str) -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert text.count(opening) == text.count(closing) > 0


# --- Metal ---


@pytest.mark.parametrize("name", METAL)
def test_metal_kernels_stand_alone(name: str) -> None:
    texts = texts_of(name, "metal")
    assert list(texts) == [f"{entry}_kernel.metal" for entry in ENTRIES]
    arguments = sorted(t.name for t in KernelSpec.parse(name).tensors)
    for file, text in texts.items():
        assert re.findall(r"kernel void (\w+)\(", text) == [file.removesuffix(".metal")]
        buffers = re.findall(r"device \w+\* (\w+)_ptr \[\[ buffer\((\d+)\) \]\]", text)
        assert buffers == [(argument, str(i)) for i, argument in enumerate(arguments)]
        assert "double" not in text and text.count("#include <metal_stdlib>") == 1
        assert re.match(r"// One threadgroup of \d+ threads for each", text)
        assert_brackets_match(text)
        barriers = re.findall(r"threadgroup_barrier\((.*?)\);", text)
        assert set(barriers) == {"mem_flags::mem_threadgroup | mem_flags::mem_device"}


def check_metal(text: str) -> str:
    """What g++ says of a Metal kernel, given declarations of what we use of Metal's library.

    It finds names that are not declared, calls with types that Metal has no function for, values
    used before they are set, and what is no C++14.  It does not know address spaces, attributes,
    what else Metal forbids, or whether its library has what the declarations say.
    """
    command = ["g++", "-x", "c++", "-std=c++14", "-fsyntax-only", "-Wall", "-Wno-attributes"]
    command += ["-Wno-unused", "-I", str(METAL_LIBRARY), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed: apt-get install g++")
@pytest.mark.parametrize("name", [*METAL, "lion-nf4-b64-p_bf16_stochastic-g_f32", "lamb-4bit"])
def test_metal_kernels_have_the_types_of_metal(name: str) -> None:
    assert set(map(check_metal, texts_of(name, "metal").values())) == {""}


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed: apt-get install g++")
@pytest.mark.parametrize(
    ("right", "wrong", "report"),
    [
        ("int(-2147483648)", "-2147483648", "as_type keeps the size"),
        ("fabs(", "fabsf(", "not declared"),
        ("simd_shuffle_down(", "simd_shuffle_down(1.0, ", "no matching function"),
    ],
)
def test_types_that_metal_lacks_are_found(right: str, wrong: str, report: str) -> None:
    text = texts_of(METAL[0], "metal")["main_kernel.metal"]
    assert right in text
    assert report in check_metal(text.replace(right, wrong))


def test_a_metal_artifact_is_text_for_other_programs(tmp_path: Path) -> None:
    manifest = build(KernelSpec.parse(METAL[2]), get_target("metal"), tmp_path / "metal")
    assert set(manifest.files) == {f"{entry}_kernel.metal" for entry in ENTRIES}
    with pytest.raises(ArtifactInvalid, match="built for metal, which the Python runtime does not"):
        tvm_qopt.load(tmp_path / "metal")


# --- WebGPU ---


def test_wgsl_kernels_stand_alone() -> None:
    texts = texts_of(WGSL, "webgpu")
    assert list(texts) == [f"{entry}_kernel.wgsl" for entry in ENTRIES]
    arguments = sorted(t.name for t in KernelSpec.parse(WGSL).tensors)
    for file, text in texts.items():
        assert re.findall(r"@compute .*\nfn (\w+)\(", text) == [file.removesuffix(".wgsl")]
        buffers = re.findall(
            r"@binding\((\d+)\) var<storage, (\w+)> (\w+)_ptr : array<(.32)>", text
        )
        assert [name for _, _, name, _ in buffers] == arguments
        read_only = [name for _, access, name, _ in buffers if access == "read"]
        assert read_only == ["grad", "hyper"]
        assert not re.search(r"\b(f64|f16|[iu](8|16|64))\b|-2147483648i", text)
        assert_brackets_match(text)
        barriers = text.count("workgroupBarrier();")
        assert text.count("storageBarrier(); workgroupBarrier();") == barriers > 0


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("adamw-dynamic8", r"exp_avg_codes \(uint8\), exp_avg_sq_codes \(uint8\)"),
        ("adamw-float32-p_bf16-g_f32", r"param \(bfloat16\)"),
    ],
)
def test_wgsl_stores_no_narrow_numbers(name: str, missing: str) -> None:
    with pytest.raises(UnsupportedSpec, match=rf"no storage of 8 or 16 bits, which {missing} need"):
        compile_spec(KernelSpec.parse(name), get_target("webgpu"))


@pytest.mark.parametrize("target", ["rocm", "vulkan"])
def test_a_target_that_tvm_cannot_build_says_what_it_lacks(target: str) -> None:
    with pytest.raises(UnsupportedSpec, match=f"target {target}: TVM's wheel has no .*opencl"):
        get_target(target)


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("runner", [webgpu_runner, chromium_runner], ids=["wgpu", "chromium"])
def test_wgsl_kernels_equal_the_reference(runner: ModuleType, name: str) -> None:
    if why := runner.why_missing():
        pytest.skip(why)
    spec, texts = KernelSpec.parse(name), texts_of(name, "webgpu")

    def run(jobs: Sequence[Job]) -> list[dict[str, Array]]:
        return runner.run([dispatch(texts[f"{job.entry}_kernel.wgsl"], job) for job in jobs])

    size = spec.block_size
    assert not faults(spec, (1, size - 1, 5 * size + size // 2 + 1), run, spoil=False)


def test_what_chromium_says_of_a_kernel_is_an_error() -> None:
    if why := chromium_runner.why_missing():
        pytest.skip(why)
    text = texts_of(WGSL, "webgpu")["main_kernel.wgsl"].replace("fma(", "fused(")
    with pytest.raises(RuntimeError, match=r"error, line \d+: unresolved call target 'fused'"):
        chromium_runner.run([Dispatch(text, 1, ())])
