"""What is edited in CUDA text: look-ups and reductions of a warp, and kernels for many tensors."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from tvm_qopt.compiler import cuda
from tvm_qopt.compiler.build import compile_spec, entry_points, lower
from tvm_qopt.compiler.cuda_text import edit
from tvm_qopt.compiler.launch import threads_of
from tvm_qopt.compiler.many import many_function, with_bodies
from tvm_qopt.errors import BuildError
from tvm_qopt.spec import KernelSpec, many_entry
from tvm_qopt.targets import get_target

TARGET = get_target("cuda-sm90")
LAMB = KernelSpec.parse("lamb-dynamic8-b256-p_f32-g_f32")
needs_compiler = pytest.mark.skipif(
    cuda.find_cuda_compiler() is None, reason="no nvcc, and no NVRTC (pip install 'tvm_qopt[cuda]')"
)


@cache
def source(spec: KernelSpec) -> str:
    return cuda.device_source(compile_spec(spec, TARGET))


def kernels(text: str) -> dict[str, str]:
    """Kernel -> its text."""
    return {
        found[1]: found[0]
        for found in re.finditer(
            r"__global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\([^\n]*\{\n.*?\n\}\n", text, re.S
        )
    }


def test_a_warp_adds_up_integers_by_one_call_and_floats_by_shuffles() -> None:
    """A norm pass has floats in a buffer of the name that holds integers in the update."""
    found = kernels(edit(source(LAMB)))
    calls = {
        name: Counter(re.findall(r"= (qopt_\w+_of_warp|__shfl_down_sync)\(", text))
        for name, text in found.items()
        if name.endswith("main_kernel")
    }
    assert calls["main_kernel"] == {"qopt_max_of_warp": 2, "qopt_add_of_warp": 1}
    (norms,) = (each for name, each in calls.items() if name != "main_kernel")
    assert norms["__shfl_down_sync"] == 5 * len(LAMB.rule_.norms[0].names)


def test_look_ups_of_a_tail_are_loads() -> None:
    """Threads leave the loop of a short block in turn, so a shuffle there would wait for them."""
    found = kernels(edit(source(LAMB)))
    for name, text in found.items():
        used = set(re.findall(r"qopt_(permute16|entry16)_\d+\(", text))
        assert used == ({"entry16"} if "tail" in name else {"permute16"}), name
    assert "qopt_permute16(" not in edit(source(LAMB))


def test_each_table_stands_in_the_text_once() -> None:
    text = edit(source(LAMB))
    (lanes, tables) = map(int, re.findall(r"qopt_tables\[(\d+)\]\[(\d+)\] =", text)[0])
    assert (lanes, tables) == (16, 1 + 2 * 6)  # the bits of 2^23, and those of each moment
    assert text.count("float qopt_permute16_") == tables


@pytest.mark.parametrize(
    "text",
    [
        "  if (a < b) {\n    x = LOOK_UP;\n  } else {\n    x = a;\n  }\n",
        "  if (a < b) {\n    x = a;\n  } else {\n    x = LOOK_UP;\n  }\n",
        "  x = ((a < b) ? LOOK_UP : a);\n",
    ],
)
def test_a_look_up_under_a_condition_is_refused(text: str) -> None:
    call = f"qopt_permute16({'0x1p+0f/*1.000000e+00*/, ' * 16}i)"
    head = 'extern "C" __global__ void k_kernel(int i) {\n'
    with pytest.raises(BuildError, match="a look-up under a condition"):
        edit(f"{head}{text.replace('LOOK_UP', call)}}}\n")
    fine = f"  for (int k = 0; k < 2; ++k) {{\n    x = {call};\n  }}\n  if (a < b) {{\n  }}\n"
    assert "qopt_permute16_0(i)" in edit(f"{head}{fine}}}\n")


@needs_compiler
def test_ptx_has_one_instruction_for_a_warp_where_the_gpu_has() -> None:
    spec = KernelSpec.of("adamw")
    text = cuda.device_source(compile_spec(spec, TARGET, ["main"]))
    newer, older = (cuda.compile_ptx(text, arch) for arch in ("sm_80", "sm_75"))
    assert newer.count("redux.sync") == 3 and "shfl.sync.bfly" not in newer
    assert "redux.sync" not in older and older.count("shfl.sync.bfly") == 3 * 5
    assert newer.count("shfl.sync.idx") == older.count("shfl.sync.idx") == 8 * 12 + 3  # and TVM's
    assert newer.count("prmt.b32") >= 8 * 2


def test_kernels_for_many_tensors_have_the_body_of_those_for_one() -> None:
    functions = {name: lower(LAMB, TARGET, name).final for name in entry_points(LAMB, "cuda")}
    many = {
        many_entry(name): many_function(func, many_entry(name)) for name, func in functions.items()
    }
    for name, func in functions.items():
        assert threads_of(many[many_entry(name)]) == threads_of(func)
    with pytest.raises(BuildError, match="another form"):
        with_bodies(
            'extern "C" __global__ void k_kernel(float* __restrict__ x_ptr) {\n  x_ptr[0] = 1;\n}\n'
            'extern "C" __global__ void k_many_kernel(long* __restrict__ chunks_ptr) {\n  ;\n}\n'
        )
