"""CUDA kernels run by a user's means: tests for a process that has the device of tests/cuda_on_cpu.

Not collected by itself: test_cuda_runs.py runs this file in such a process.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt import reference, sample
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.runtime.plan import Plan
from tvm_qopt.spec import KernelSpec, norm_tensor

Array = npt.NDArray[Any]
HERE = Path(__file__).parent
TARGET = "cuda-sm90"
PLAIN = "adamw-dynamic8-b256-p_f32-g_f32"
OF_CHECK = (
    PLAIN, "quantize-dynamic8s-b256-p_f32-g_f32", "sum_sq-float32-b256-p_f32-g_f32"
)  # fmt: skip
SPECS = [
    *OF_CHECK,
    "adamw-4bit-b128-p_bf16_split-g_f16",
    "adamw-codebook8+linear4u-b64-p_bf16-g_bf16-nonfinite_propagate",
    "lion-nf4-b64-p_bf16_stochastic-g_f32",
    "lamb-fp8-b256-p_f16_master-g_bf16",
    "lans-linear8s+sqrt8u-b4096-p_f32-g_f32",
    "dequantize-dynamic4s-b128-p_f16-g_f32",
]
STEP = 7
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
OF_PLAN = ("hyper", "rng", "block_number")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    tvm_qopt.load_many([KernelSpec.parse(name) for name in SPECS], target=TARGET)


def load(name: str = PLAIN) -> Kernel:
    return tvm_qopt.load(name, target=TARGET)


def put(x: Array, shift: int = 0) -> Any:
    """A copy on the device, `shift` elements into its memory."""
    whole = cupy.empty(x.size + shift, x.dtype)
    whole[shift:].set(x)
    return whole[shift:]


def raw(x: Any) -> Array:
    """On the host, 16-bit floats as their bits."""
    host: Array = x.get()
    return host.view(np.uint16) if host.dtype == np.float16 else host


def planned(
    kernel: Kernel, arrays: Mapping[str, Array], shift: int = 0
) -> tuple[Plan, dict[str, Any]]:
    """A plan for copies of arguments by name, and the copies."""
    spec = kernel.spec
    dtypes = {t.name: t.dtype for t in spec.tensors}
    held = {
        name: put(x.view(np.float16) if dtypes[name] == "float16" else x, shift)
        for name, x in arrays.items()
        if name not in OF_PLAN and not name.startswith("norm")
    }
    state, result = dict(held), spec.rule_.result
    given = {name: state.pop(name) for name in ("param", "grad") if name in state}
    if result not in (None, "param"):
        given["result"] = state.pop(result)
    maps = {name.removesuffix("_qmap"): state.pop(name) for name in held if name.endswith("_qmap")}
    return kernel.plan(**given, state=state, qmap=maps or None), held


def adamw(n: int = 1003) -> tuple[Plan, dict[str, Any]]:
    kernel = load()
    return planned(kernel, sample.arguments(kernel.spec, n, seed=5))


def bits(held: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: x.get().tobytes() for name, x in held.items()}


# --- right ---


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("blocks", [0, 2, 3])
def test_steps_and_norms_equal_the_reference(name: str, blocks: int) -> None:
    """`main` and `tail`, and `main_any` where memory begins beside the start of a vector."""
    kernel = load(name)
    spec = kernel.spec
    for rest, shift in ((0, 0), (5, 0), (spec.block_size - 1, 3), (37, 1)):
        n = blocks * spec.block_size + rest
        if not n:
            continue
        arrays = sample.arguments(spec, n, seed=n, spoiled=blocks > 1)
        plan, held = planned(kernel, arrays, shift)
        before = {**arrays, **{name: raw(x) for name, x in held.items()}}
        assert plan.step(step=STEP, **sample.hyper_values(spec))
        after = {name: raw(x) for name, x in held.items()}
        before["hyper"] = plan._host_hyper.copy()  # with what the norm passes made
        before["rng"] = np.array([0, 0, STEP], np.int32)
        assert reference.disagreement(spec, before, reference.step(spec, before), after) is None
        for number, norms in enumerate(spec.rule_.norms):
            got = plan.norms(number)
            want = reference.step(spec, {**before, **after}, norms=number)
            for each in norms.names:
                total = want[norm_tensor(number, each)].astype(np.float64).sum()
                assert math.isclose(got[each], math.sqrt(total), rel_tol=1e-5), each


def test_states_begin_with_zeros_and_with_the_weights_themselves() -> None:
    for name in SPECS[3:]:
        kernel = load(name)
        param = sample.arguments(kernel.spec, 300, seed=1)["param"]
        param = param.view(np.float16) if kernel.spec.param == "float16" else param
        state = kernel.init_state(cupy.asarray(param))
        decoded = kernel.decode_state(state, _maps(kernel.spec))
        assert all((x == 0).all() for x in decoded.values())
        if "param_master" in state:
            np.testing.assert_array_equal(state["param_master"].get(), param.astype(np.float32))


def _maps(spec: KernelSpec) -> dict[str, Array] | None:
    maps = {
        s.name: np.linspace(-1, 1, 256, dtype=np.float32) for s, f in spec.slots if f.runtime_map
    }
    for levels in maps.values():
        levels[128] = 0
    return maps or None


def test_many_tensors_step_as_one_by_one() -> None:
    kernel, sizes = load(), (1, 300, 4096, 77, 2048 + 9)
    for name in (PLAIN, "lamb-fp8-b256-p_f16_master-g_bf16"):
        kernel = load(name)
        apart = [planned(kernel, sample.arguments(kernel.spec, n, seed=n)) for n in sizes]
        tensors, others = [], []
        for n in sizes:
            _, held = planned(kernel, sample.arguments(kernel.spec, n, seed=n))
            state = {k: x for k, x in held.items() if k not in ("param", "grad")}
            tensors.append({"param": held["param"], "grad": held["grad"], "state": state})
            others.append(held)
        together, hyper = kernel.plan_many(tensors), sample.hyper_values(kernel.spec)
        for step in (3, 4):
            assert all(together.step(step=step, **hyper))
            assert all(plan.step(step=step, **hyper) for plan, _ in apart)
        for (_, one), other in zip(apart, others, strict=True):
            assert bits(one) == bits(other)


# --- streams and graphs ---


def test_a_given_stream_is_the_only_one_that_a_step_waits_for() -> None:
    """Its scalars too: on another stream they would come too late, or too early."""
    expected = adamw()
    for step in (1, 2, 3):
        expected[0].step(step=step, **HYPER)
    wanted = bits(expected[1])
    for given in (False, True):
        plan, held = adamw()
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        for step in (1, 2, 3):
            if given:
                plan.step(step=step, stream=stream.ptr, **HYPER)
            else:
                with stream:
                    plan.step(step=step, **HYPER)
        with stream:
            assert bits(held) == wanted


def test_steps_behind_an_event_see_what_was_written_ahead_of_it() -> None:
    plan, held = adamw()
    expected, other = adamw()
    cupy.cuda.Device().synchronize()
    new = np.full(1003, 0.25, np.float32)
    writer, stepper = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    other["grad"].set(new)
    expected.step(step=1, **HYPER)
    wanted = bits(other)
    with writer:
        held["grad"].set(new)
        written = cupy.cuda.Event()
        written.record()
    with stepper:
        stepper.wait_event(written)
        plan.step(step=1, **HYPER)
        assert bits(held) == wanted


@pytest.mark.parametrize("name", [PLAIN, "lion-nf4-b64-p_bf16_stochastic-g_f32"])
def test_captured_steps_replay_with_numbers_of_their_own(name: str) -> None:
    kernel = load(name)
    arrays = sample.arguments(kernel.spec, 2100, seed=3)
    hyper = sample.hyper_values(kernel.spec)
    (plan, held), (other, expected) = planned(kernel, arrays), planned(kernel, arrays)
    found = cupy.full(1, 0.0, "float32")
    step = plan.capturable(step=4, grad_scale=2.0, found_inf=found, **hyper)
    replay = captured(step.step)
    at = 4
    for inf, lr in ((0, 1e-2), (1, 1e-2), (0, 5e-3), (0, 5e-3)):
        found.fill(inf)
        step.set(lr=lr)
        replay()
        if not inf:
            at += 1
            other.step(step=at, grad_scale=2.0, **{**hyper, "lr": lr})
        assert bits(held) == bits(expected) and step.steps() == at


def test_a_captured_step_keeps_the_memory_that_it_reads() -> None:
    """Its found_inf too, where none was given."""
    plan, held = adamw()
    step = plan.capturable(**HYPER)
    replay = captured(step.step)
    other, expected = adamw()
    for at in (1, 2):
        replay()
        other.step(step=at, **HYPER)
    assert step.steps() == 2 and bits(held) == bits(expected)


def captured(work: Callable[[], object]) -> Callable[[], None]:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            work()
        finally:
            graph = stream.end_capture()

    def replay() -> None:
        graph.launch()

    return replay


def test_a_capture_refuses_a_step_that_copies_from_the_host() -> None:
    plan, _ = adamw()
    with pytest.raises(cupy.CUDARuntimeError, match="900"):
        captured(lambda: plan.step(step=1, **HYPER))


def test_found_inf_on_the_device_holds_a_step_back() -> None:
    plan, held = adamw()
    before = bits(held)
    assert plan.step(step=1, found_inf=cupy.full(1, 1.0, "float32"), **HYPER)
    assert bits(held) == before
    assert plan.step(step=1, found_inf=cupy.full(1, 0.0, "float32"), **HYPER)
    assert bits(held) != before


def test_tvm_times_a_kernel_by_events() -> None:
    import tvm

    kernel, device = load(), tvm.cuda(0)
    n = 4 * kernel.spec.block_size
    values = sample.arguments(kernel.spec, n, seed=1)
    arguments = [
        tvm.runtime.tensor(values[t.name].reshape(t.sizes(4, kernel.spec.block_size)), device)
        for t in kernel.spec.tensors
    ]
    module = tvm.runtime.load_module(str(kernel.folder / "kernel.so"))
    taken = module.time_evaluator("main", device, number=3, repeat=2)(*arguments).results
    assert len(taken) == 2 and min(taken) > 1e-6


def test_the_check_of_gpus_finds_all_right(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "left_out.json").write_text("{}")
    for name in OF_CHECK:
        (tmp_path / "artifacts" / name).symlink_to(load(name).folder)
    command = [sys.executable, str(HERE / "check.py"), "--device", "cupy", "--size", "20000"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" right ") == 6 and done.stdout.count("300 tensors") == 1
    assert "captured steps, replayed" in done.stdout
