"""CUDA without a GPU: kernels, TVM's host code, streams and graphs, on the device of
tests/cuda_on_cpu, in processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cuda_runner
import pytest

HERE = Path(__file__).parent
ALONE = ("--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(HERE))

OTHER_ARCH = """
import cupy, sys, tvm_qopt
from tvm_qopt.errors import ArtifactInvalid
param = cupy.full(300, 1.0, "float32")
kernel = tvm_qopt.load("quantize-dynamic8s-b256-p_f32-g_f32", target="cuda-sm90")
state = kernel.init_state(param)
try:
    kernel.plan(param=param, state=state)
except ArtifactInvalid as error:
    assert "code for sm_90 and this GPU is sm_80" in str(error), error
else:
    raise SystemExit("not refused")
from tvm_qopt.runtime.arrays import target_of, view_of
assert target_of(view_of("param", param)) == "cuda-sm80"
"""

MACHINE_CODE = """
import cupy, tvm_qopt
from tvm_qopt.compiler.build import build
from tvm_qopt.compiler.fatbin import list_cubins
from tvm_qopt.targets import get_target
from pathlib import Path
import sys
spec, folder = tvm_qopt.KernelSpec.parse("sum_sq-float32-b256-p_f32-g_f32"), Path(sys.argv[1])
build(spec, get_target("cuda-sm80+sm90"), folder)
assert list_cubins(folder / "kernel.so") == ["sm_80", "sm_90"]
kernel = tvm_qopt.load(folder)
param = cupy.full(1000, 2.0, "float32")
norm = kernel.plan(param=param, state=kernel.init_state(param)).norms()["param"]
assert abs(norm - 4000 ** 0.5) < 1e-4, norm
"""


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.mark.parametrize("file", ["inside_cuda.py", "inside_cuda_many.py", "inside_cuda_faults.py"])
def test_what_runs_on_the_device(file: str, device: Path) -> None:
    """Tests in that file, many; the first builds what the others take."""
    check(cuda_runner.run(device, "-m", "pytest", "-q", "--tb=short", *ALONE, str(HERE / file)))


def test_an_artifact_without_code_for_this_gpu_is_refused(device: Path) -> None:
    check(cuda_runner.run(device, "-c", OTHER_ARCH, arch="80"))


def test_an_artifact_with_machine_code_runs_too(device: Path, tmp_path: Path) -> None:
    from tvm_qopt.compiler.cuda import find_cuda_compiler

    if find_cuda_compiler() is None:
        pytest.skip("no nvcc and no NVRTC: pip install 'tvm_qopt[cuda]'")
    folder = str(tmp_path / "artifact")
    check(cuda_runner.run(device, "-c", MACHINE_CODE, folder, machine_code=True))
