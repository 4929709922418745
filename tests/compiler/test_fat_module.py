"""One artifact for every NVIDIA GPU: machine code for the known ones, PTX for later ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_qopt.compiler import cuda
from tvm_qopt.compiler.build import build
from tvm_qopt.compiler.fatbin import list_cubins, list_ptx
from tvm_qopt.errors import ArtifactInvalid, UnknownName
from tvm_qopt.runtime.cuda import check_cubins
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import CUDA_ARCHS, cuda_target, get_target

KERNEL = 'extern "C" __global__ void k(float *x) { x[threadIdx.x] /= 3.f; }'


@pytest.mark.skipif(cuda.find_cuda_compiler() is None, reason="no nvcc and no NVRTC")
def test_one_artifact_of_bfloat16_weights_for_every_architecture(tmp_path: Path) -> None:
    """bfloat16 is bit patterns in kernels, so that sm_75, which has no such type, runs it too."""
    spec = KernelSpec.parse("adamw-float32-b256-p_bf16-g_bf16")
    manifest = build(spec, get_target("cuda-all"), tmp_path / "fat")
    assert manifest.archs == (*CUDA_ARCHS, "compute_120")
    assert list_cubins(tmp_path / "fat" / "kernel.so") == list(CUDA_ARCHS)
    for gpu in (*CUDA_ARCHS, "sm_87", "sm_103", "sm_121", "sm_130", "sm_200"):
        check_cubins(manifest.archs, gpu)
    with pytest.raises(ArtifactInvalid, match="this GPU is sm_70"):
        check_cubins(manifest.archs, "sm_70")


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
def test_ptx_is_there_for_the_newest_architecture_alone(
    tmp_path: Path, compiler: cuda.Compiler
) -> None:
    if compiler not in cuda.installed_compilers():
        pytest.skip(f"{compiler} is not installed")
    for archs, ptx in ((["sm_75", "sm_120"], ["compute_120"]), (["sm_90"], [])):
        (tmp_path / "fatbin").write_bytes(cuda.compile_cuda(KERNEL, archs, compiler=compiler))
        assert list_cubins(tmp_path / "fatbin") == archs
        assert list_ptx(tmp_path / "fatbin") == ptx


def test_a_card_later_than_this_version_is_served_by_the_newest_preset() -> None:
    assert cuda_target("sm_87") == "cuda-sm86"
    assert cuda_target("sm_121") == "cuda-sm120"
    assert cuda_target("sm_130") == "cuda-sm120"
    with pytest.raises(UnknownName, match="sm_70"):
        cuda_target("sm_70")
