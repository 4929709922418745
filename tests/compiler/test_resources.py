"""What the compilers say of the CUDA kernels, which no GPU here has run: they spill nothing, keep
nothing in local memory, and half of an SM's warps or more are resident."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tvm_qopt.cli.app import app
from tvm_qopt.compiler import cuda, resources
from tvm_qopt.compiler.instructions import Counts, count_machine_code, count_ptx, find_nvdisasm
from tvm_qopt.compiler.nvrtc import wheel_folders
from tvm_qopt.gpus import LIMITS, occupancy
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

pytestmark = pytest.mark.skipif(
    cuda.find_cuda_compiler() is None, reason="no nvcc, and no NVRTC (pip install 'tvm_qopt[cuda]')"
)
needs_nvdisasm = pytest.mark.skipif(
    find_nvdisasm() is None, reason="nvdisasm is not installed: pip install 'tvm_qopt[cuda]'"
)
SPECS = [
    f"adamw-{state}-p_{dtype}-g_{dtype}"
    for state in ("dynamic8-b256", "fp8-b256", "4bit-b128")
    for dtype in ("f32", "bf16")
]


@pytest.mark.parametrize("name", SPECS)
def test_full_blocks_fit_in_registers(name: str) -> None:
    spec = KernelSpec.parse(name)
    found = resources.resources(spec, get_target("cuda-sm80+sm90"), ["main"])
    assert [each.arch for each in found] == ["sm_80", "sm_90"]
    for each in found:
        assert (each.spill_stores, each.spill_loads, each.local) == (0, 0, 0)
        assert each.occupancy.share >= 0.5, each
        assert each.elements and each.elements * each.threads % spec.block_size == 0
        assert each.counts.loads_16 >= 2 or spec.param != "float32"  # weights and gradients


@needs_nvdisasm
@pytest.mark.parametrize("name", [name for name in SPECS if "f32" in name])
def test_the_model_says_that_memory_decides(name: str) -> None:
    """Of an H200, whose memory is the fastest for its arithmetic; with bfloat16 it does not."""
    spec = KernelSpec.parse(name)
    found = resources.resources(spec, get_target("cuda-sm90"), ["main"])
    (time,) = (t for t in resources.model_times(spec, found) if t.gpu.name == "H200")
    assert time.bandwidth_share >= 0.9


# --- counts ---

KERNEL = """
extern "C" __global__ void k(const float4 *__restrict__ a, float *b, float *c) {
  float4 v = a[threadIdx.x];
  float w = b[threadIdx.x];
  w += __shfl_down_sync(0xffffffffu, v.x, 1) / v.y;
  __syncthreads();
  c[threadIdx.x] = __fsqrt_rn(w) + v.z + v.w;
}
"""


def assert_kinds(found: Counts) -> None:
    assert (found.loads_16, found.loads_narrow) == (1, 1)
    assert (found.stores_16, found.stores_narrow) == (0, 1)
    assert (found.shuffles, found.divisions, found.barriers) == (1, 1, 1)


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_instructions_of_machine_code_without_slow_paths(arch: str) -> None:
    cubin, log = cuda.compile_cubin(KERNEL, arch)
    nvdisasm = find_nvdisasm()
    assert nvdisasm and "'k'" in log
    found = count_machine_code(cubin, nvdisasm)["k"]
    assert_kinds(found)
    assert found.special == 2  # 1/y and 1/sqrt; those of the slow paths are not among them
    assert found.total < 75 < found.seldom


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_both_compilers_say_what_a_kernel_uses(compiler: cuda.Compiler) -> None:
    if compiler not in cuda.installed_compilers():
        pytest.skip(f"{compiler} is not installed")
    _, log = cuda.compile_cubin(KERNEL, "sm_90", compiler=compiler)
    used = resources._read_log(log)["k"]
    assert 8 <= used.pop("registers") <= 64
    assert used == {"local": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0}


def test_instructions_of_ptx() -> None:
    found = count_ptx(cuda.compile_ptx(KERNEL, "sm_90"))["k"]
    assert_kinds(found)
    assert found.special == 1 and found.seldom == 0


# --- occupancy ---

OCCUPANCY = """
#include <stdio.h>
#include <cuda_occupancy.h>
int main(void) {
  int major, minor, warps, sm_shared, threads, registers, shared;
  while (scanf("%d %d %d %d %d %d %d", &major, &minor, &warps, &sm_shared, &threads, &registers,
               &shared) == 7) {
    cudaOccDeviceProp d = {0};
    d.computeMajor = major; d.computeMinor = minor; d.warpSize = 32; d.numSms = 1;
    d.maxThreadsPerBlock = 1024; d.maxThreadsPerMultiprocessor = 32 * warps;
    d.regsPerBlock = d.regsPerMultiprocessor = 65536;
    d.sharedMemPerBlock = 48 << 10; d.sharedMemPerMultiprocessor = sm_shared;
    d.sharedMemPerBlockOptin = sm_shared - 1024;
    d.reservedSharedMemPerBlock = major >= 8 ? 1024 : 0;
    cudaOccFuncAttributes f = {0};
    f.maxThreadsPerBlock = 1024; f.numRegs = registers; f.sharedSizeBytes = shared;
    cudaOccDeviceState s = {0};
    s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult r;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &d, &f, &s, threads, 0)) return 1;
    printf("%d\\n", r.activeBlocksPerMultiprocessor);
  }
  return 0;
}
"""


def test_occupancy_is_that_of_nvidias_own_calculator(tmp_path: Path) -> None:
    roots = (Path("/usr/local/cuda"), *wheel_folders())
    include = next(
        (r / "include" for r in roots if (r / "include/cuda_occupancy.h").exists()), None
    )
    gcc = shutil.which("gcc")
    if include is None or gcc is None:
        pytest.skip("gcc or cuda_occupancy.h is not installed")
    command = [gcc, "-w", "-x", "c", "-", f"-I{include}", "-o", str(tmp_path / "occupancy")]
    subprocess.run(command, input=OCCUPANCY, text=True, check=True)
    cases = [
        (arch, threads, registers, shared)
        for arch in LIMITS
        for threads in (32, 64, 96, 128, 256, 512)
        for registers in (16, 32, 33, 46, 62, 64, 65, 96, 128)
        for shared in (0, 132, 4096, 20000)
    ]
    lines = []
    for arch, *block in cases:
        limits, number = LIMITS[arch], int(arch[3:])
        numbers = (number // 10, number % 10, limits.warps, limits.shared, *block)
        lines.append(" ".join(map(str, numbers)))
    run = subprocess.run(
        [tmp_path / "occupancy"], input="\n".join(lines), text=True, capture_output=True, check=True
    )
    assert [occupancy(*case).blocks for case in cases] == list(map(int, run.stdout.split()))


# --- the command ---


def test_show_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["show", "adamw", "--target", "cuda-sm90", "--what", "resources", "--entry", "main"]
    if find_nvdisasm():
        data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        (kernel,) = data["kernels"]
        assert (kernel["kernel"], kernel["counted_in"]) == ("main_kernel", "machine code")
        assert data["bytes_of_element"] == 16 + 24 / 256  # two scales and a counter a block
        assert [each["gpu"]["name"] for each in data["model"]] == ["H200", "H100 SXM"]
        assert all(0 < each["bandwidth_share"] <= 1 for each in data["model"])
    monkeypatch.setattr(resources, "find_nvdisasm", lambda: None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "in PTX" in result.stdout
    assert "pip install 'tvm_qopt[cuda]'" in result.stderr and "model" not in result.stdout


def test_resources_are_of_cuda_targets() -> None:
    result = CliRunner().invoke(app, ["show", "adamw", "--what", "resources", "--target", "opencl"])
    assert result.exit_code == 2 and "cuda targets" in result.stderr
