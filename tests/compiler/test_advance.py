"""The kernel that forms a step's scalars on the device: what the host forms, for every rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tvm

from tvm_qopt.compiler.advance import step_functions
from tvm_qopt.compiler.build import tvm_target
from tvm_qopt.compiler.gate import leave_if_gated, mask_if_gated
from tvm_qopt.compiler.launches import launches_of, with_offsets
from tvm_qopt.compiler.opencl import opencl_source
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.compiler.tracing import paths
from tvm_qopt.errors import BuildError
from tvm_qopt.rules import RULES, normal_eps
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.runtime.opencl import Region, SourceModule
from tvm_qopt.runtime.scalars import Scalars
from tvm_qopt.spec import ADVANCE, GATE, KernelSpec
from tvm_qopt.targets import get_target

of = KernelSpec.of
OWN = [name for name, rule in RULES.items() if rule.update.__module__.startswith("tvm_qopt.rules")]
SPECS = [
    *(of(rule, "float32") for rule in OWN if not RULES[rule].norms),
    of("adamw", clip_gradient=True),
    of("adam_fp16", decay="coupled", form="plain"),
    of("adamw", param="bfloat16", param_format="stochastic"),
]
VALUES = {"lr": 3e-3, "eps": 1e-7, "weight_decay": 0.1, "lr_decay": 1e-3, "momentum": 0.9}
VALUES |= {"dampening": 0.1, "alpha": 0.99, "eta": 0.7, "clip_gradient": 0.25}
VALUES |= {"beta1": 0.9, "beta2": 0.999, "beta3": 0.9999}


def test_scalars_of_the_device_are_those_of_the_host() -> None:
    cl = pytest.importorskip("pyopencl")
    if not any(platform.get_devices() for platform in cl.get_platforms()):
        pytest.skip("no OpenCL device: apt-get install pocl-opencl-icd")
    device = next(d for platform in cl.get_platforms() for d in platform.get_devices())
    queue = cl.CommandQueue(cl.Context([device]))
    for spec in SPECS:
        func = step_functions(spec)[ADVANCE]
        target = tvm_target(get_target("opencl"))
        source = opencl_source(compile_module(tvm.IRModule({ADVANCE: func}), target))
        launches = launches_of({ADVANCE: func}, {"kernel.cl": source})
        entry = SourceModule({"kernel.cl": with_offsets(source)}, launches, "")[ADVANCE]
        hyper = {h.name: VALUES[h.name] for h in spec.hyper}
        for step in (1, 2, 1000, 123_456_789):
            arrays = advanced(queue, entry, spec, hyper, step)
            want = np.array(Scalars(spec).of(step, 4.0, 0.5, hyper), np.float32)
            # pow of two libraries may differ by an ulp of float64: seldom seen as one of float32
            np.testing.assert_array_max_ulp(arrays["hyper"], want, 1)
            assert arrays["clock"][0] == step
            if "rng" in arrays:
                np.testing.assert_array_equal(arrays["rng"], [7, 8, step])


def advanced(
    queue: Any, entry: Any, spec: KernelSpec, hyper: dict[str, float], step: int
) -> dict[str, npt.NDArray[Any]]:
    from pyopencl.array import to_device

    values = {**hyper, "step": step - 1, "grad_scale": 4.0, "gnorm_scale": 0.5}
    host = {
        "clock": np.array([values[name] for name in spec.clock], np.float64),
        "found_inf": np.zeros(1, np.float32),
        "hyper": np.zeros(len(spec.scalars), np.float32),
        "rng": np.array([7, 8, 0], np.int32),
    }
    arrays = {name: to_device(queue, host[name]) for name in spec.step_arguments(ADVANCE)}
    regions = {name: Region(x, 0) for name, x in arrays.items()}
    entry.bound(Part(0, 1, 1), regions).enqueue(queue)
    return {name: x.get() for name, x in arrays.items()}


def test_every_comparison_is_followed_both_ways() -> None:
    zero, one = (tvm.tirx.Var(name, "float64") for name in ("x", "y"))

    def form(path: Any) -> list[Any]:
        x, y = path.number(zero), path.number(one)
        return [normal_eps(min(x, y)), 1.0 if x == 1.0 else y]

    ways = list(paths(form))
    assert len(ways) == 4  # of eight, those where eps is too small are refused
    assert {(str(a), str(b)) for _, (a, b) in ((w, map(_named, r)) for w, r in ways)} == {
        ("x", "1.0"),
        ("x", "y"),
        ("y", "1.0"),
        ("y", "y"),
    }


def _named(x: Any) -> str:
    return str(x.expr) if hasattr(x, "expr") else str(x)


def test_rules_that_the_device_cannot_follow_have_no_advance() -> None:
    for spec in (of("lamb"), of("adamw", scalars="ascend"), of("ademamix", warm_up=True)):
        assert set(step_functions(spec)) == {GATE}


def test_every_kernel_but_those_of_the_step_is_gated() -> None:
    leave = "  if (hyper_ptr[0] != hyper_ptr[0]) return;\n"
    for head, has_gate in {
        'extern "C" __global__ void __launch_bounds__(64) tail_kernel(float* hyper_ptr)': True,
        'extern "C" __global__ void main_kernel(float* hyper_ptr, int64_t nb)': True,
        'extern "C" __global__ void advance_kernel(float* hyper_ptr)': False,
        'extern "C" __global__ void other_kernel(float* x_ptr)': False,
    }.items():
        text = f"{head};\n{head} {{\n  x = 1;\n}}\n"
        assert leave_if_gated(text) == text.replace("{\n", "{\n" + leave * has_gate)


def test_every_store_to_an_argument_is_masked() -> None:
    head = "__kernel void main_kernel(__global float* restrict x_ptr, __global float* hyper_ptr)"
    stores = "  x_ptr[i] = 1;\n    vstore4(y, 0, x_ptr + 4);\n"
    others = "  x_local_ptr[0] = x_ptr[0];\n  vstore4(vload4(0, x_ptr + 4), 0, y_ptr + 0);\n"
    masked = stores.replace("x_ptr[i]", "if (go) x_ptr[i]").replace("vst", "if (go) vst")
    got = mask_if_gated(f"{head};\n{head} {{\n{others}{stores}}}\n")
    test = "  const bool go = hyper_ptr[0] == hyper_ptr[0];\n"
    assert got == f"{head};\n{head} {{\n{test}{others}{masked}}}\n"
    with pytest.raises(BuildError, match="no store"):
        mask_if_gated(f"{head} {{\n{others}}}\n")
