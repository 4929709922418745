"""OpenCL as a target for users: `load(..., target="opencl")` on pyopencl arrays, here on PoCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt import reference
from tvm_qopt.errors import (
    ArtifactInvalid,
    DeviceMismatch,
    DtypeMismatch,
    HyperOutOfRange,
    ShapeMismatch,
    UnknownName,
    UnsupportedSpec,
)
from tvm_qopt.formats.dynamic import dynamic_map
from tvm_qopt.manifest import Launch
from tvm_qopt.runtime.opencl import SourceModule

cl = pytest.importorskip("pyopencl", reason="pip install pyopencl")
if not any(platform.get_devices() for platform in cl.get_platforms()):
    pytest.skip("no OpenCL device: apt-get install pocl-opencl-icd", allow_module_level=True)
cl_array = pytest.importorskip("pyopencl.array")

Array = npt.NDArray[Any]
HYPER: dict[str, float] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
HYPER["weight_decay"] = 0.1
of = tvm_qopt.KernelSpec.of
PLAIN = of("adamw")
SPECS = [
    PLAIN,
    of("adamw", "codebook8+linear4u", block_size=64, param="bfloat16", nonfinite="propagate"),
    of("lamb"),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    tvm_qopt.load_many(SPECS, target="opencl")
    tvm_qopt.load("lamb")


@pytest.fixture(scope="module")
def queue() -> Any:
    return new_queue()


def new_queue(properties: int = 0) -> Any:
    device = next(d for platform in cl.get_platforms() for d in platform.get_devices())
    return cl.CommandQueue(cl.Context([device]), properties=properties)


def put(queue: Any, x: Array, at: int = 0) -> Any:
    """A copy on the device, from element `at` of a memory object on."""
    whole = cl_array.zeros(queue, x.size + at, x.dtype)
    whole[at:].set(x)
    return whole[at:]


def values(spec: tvm_qopt.KernelSpec, n: int) -> dict[str, Array]:
    """A weight and a gradient, three elements of which are not finite."""
    rng = np.random.default_rng(n)
    param, grad = rng.normal(size=n), rng.normal(size=n) * 10 ** rng.uniform(-4, 0, n)
    grad[rng.integers(n, size=min(3, n // 8))] = np.array([np.nan, np.inf, -np.inf])[: n // 8]
    return {"param": stored(param, spec.param), "grad": stored(grad, spec.grad)}


def stored(x: Array, dtype: str) -> Array:
    x = x.astype(np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x


def maps(spec: tvm_qopt.KernelSpec, place: Callable[[Array], Any]) -> dict[str, Any] | None:
    if not any(format_.runtime_map for _, format_ in spec.slots):
        return None
    return {
        slot.name: place(dynamic_map(signed=not slot.nonnegative))
        for slot, format_ in spec.slots
        if format_.runtime_map
    }


def step(
    target: str, spec: tvm_qopt.KernelSpec, given: Mapping[str, Array], place: Callable[..., Any]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Two steps; the arrays ahead of the second and after it."""
    kernel = tvm_qopt.load(spec, target=target)
    arrays = {name: place(x) for name, x in given.items()}
    state = kernel.init_state(arrays["param"])
    qmap = maps(spec, place)
    plan = kernel.plan(**arrays, state=state, qmap=qmap)
    assert plan.step(step=1, **HYPER)
    tables = {f"{slot}_qmap": x for slot, x in (qmap or {}).items()}
    before = {n: fetched(x) for n, x in {**arrays, **tables, **state}.items()}
    assert plan.step(step=2, **HYPER)
    return before, {n: fetched(x) for n, x in {**arrays, **state}.items()}


def fetched(x: Any) -> Array:
    return np.array(x.get() if hasattr(x, "get") else x)


def assert_close(name: str, got: Array, want: Array, largest: Array) -> None:
    """But for contraction: codes and 16-bit weights by one next to a midpoint, floats by ulps of
    the largest term."""
    if name == "nonfinite_count":
        np.testing.assert_array_equal(got, want)
    elif got.dtype != np.float32:
        apart = np.abs(got.astype(np.int64) - want)
        assert apart.max(initial=0) <= 1 and np.count_nonzero(apart) <= 2 + got.size // 200, name
    else:
        bound = 4 * np.spacing(np.maximum(largest, np.abs(want)))
        assert np.all((np.abs(got - want) <= bound) | (np.isnan(got) & np.isnan(want))), name


# 3 + 1 elements: not aligned to vectors; sub-buffers could not begin there either
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_steps_equal_the_reference(spec: tvm_qopt.KernelSpec, at: int, queue: Any) -> None:
    for n in (spec.block_size - 1, 9 * spec.block_size, 4 * spec.block_size + 5):
        given = values(spec, n)
        before, after = step("opencl", spec, given, lambda x: put(queue, x, at))
        if spec.rule_.norms:  # which the reference takes as given
            expected = step("llvm-native", spec, given, np.copy)[1]
        else:
            hyper = reference.hyper(spec, step=2, **HYPER)
            expected = reference.step(spec, {**before, "hyper": hyper})
        for t in spec.tensors:
            if t.output and t.name in after:
                x = before[t.name]
                largest = np.abs(x) if x.dtype == np.float32 else np.zeros(x.shape, np.float32)
                assert_close(t.name, after[t.name], expected[t.name], largest)


def test_state_goes_to_the_host_and_back(queue: Any) -> None:
    kernel = tvm_qopt.load(PLAIN, target="opencl")
    param = put(queue, np.ones(300, np.float32))
    state = kernel.init_state(param, {"exp_avg_sq": 0.5})
    assert all(isinstance(x, cl_array.Array) for x in state.values())
    decoded = kernel.decode_state(state)
    np.testing.assert_array_equal(decoded["exp_avg"], np.zeros(300))
    np.testing.assert_array_equal(decoded["exp_avg_sq"], np.full(300, 0.5))


def planned(queue: Any, **others: Any) -> tuple[Any, dict[str, Any]]:
    kernel = tvm_qopt.load(PLAIN, target="opencl")
    arrays = {name: put(queue, np.full(300, 1.0, np.float32)) for name in ("param", "grad")}
    state = kernel.init_state(arrays["param"])
    arrays |= {**state, **others}
    held = {name: arrays[name] for name in state}
    return kernel.plan(param=arrays["param"], grad=arrays["grad"], state=held), arrays


def test_found_inf_leaves_everything(queue: Any) -> None:
    plan, arrays = planned(queue)
    on_device = put(queue, np.ones(3, np.float32), 1)[1:2]
    for found, ran in ((1.0, False), (np.ones(1, np.float32), False), (on_device, True)):
        before = {name: x.get() for name, x in arrays.items()}
        assert plan.step(step=1, found_inf=found, **HYPER) is ran  # True: the device decides
        assert all((x.get() == before[name]).all() for name, x in arrays.items())
    assert plan.step(step=1, found_inf=put(queue, np.zeros(1, np.float32)), **HYPER)


def test_another_gradient_and_a_queue_without_order(queue: Any) -> None:
    plan, arrays = planned(queue)
    plan.step(step=1, **HYPER)
    free = new_queue(cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE)
    other, moved = planned(free)
    other.step(step=1, grad=put(free, np.full(301, 1.0, np.float32), 1)[:300], **HYPER)
    plan.step(step=2, stream=cl.CommandQueue(queue.context), **HYPER)
    for step_ in (2, 3):
        other.step(step=step_, **HYPER)
    plan.step(step=3, **HYPER)
    for name, x in arrays.items():
        np.testing.assert_array_equal(x.get(), moved[name].get(), name)


def test_arguments_that_do_not_fit_are_named(queue: Any) -> None:
    kernel, elsewhere = tvm_qopt.load(PLAIN, target="opencl"), new_queue()
    whole = put(queue, np.ones(600, np.float32))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DeviceMismatch, "grad.*context", {"grad": put(elsewhere, np.ones(300, np.float32))}),
        (DeviceMismatch, "grad.*cpu", {"grad": np.ones(300, np.float32)}),
        (DtypeMismatch, "grad.*float32.*float64", {"grad": put(queue, np.ones(300))}),
        (ShapeMismatch, "grad.*shape", {"grad": put(queue, np.ones(299, np.float32))}),
        (ShapeMismatch, "grad.*contiguous", {"grad": whole[::2]}),
        (ShapeMismatch, "memory shared", {"param": whole[:300], "grad": whole[100:400]}),
        (DeviceMismatch, "param.*queue", {"param": whole[300:].with_queue(None)}),
    ]
    for kind, words, others in wrong:
        arrays = {name: put(queue, np.ones(300, np.float32)) for name in ("param", "grad")}
        state = kernel.init_state(arrays["param"])
        with pytest.raises(kind, match=words):
            kernel.plan(**{**arrays, **others}, state=state)
    with pytest.raises(DeviceMismatch, match=r"param.*opencl.*cpu"):
        host = np.ones(300, np.float32)
        kernel.plan(param=host, grad=host.copy(), state=kernel.init_state(host))
    plan, _ = planned(queue)
    with pytest.raises(ShapeMismatch, match=r"stream.*CommandQueue"):
        plan.step(step=1, stream=0, **HYPER)
    with pytest.raises(DeviceMismatch, match=r"stream: expected a queue of the OpenCL context"):
        plan.step(step=1, stream=elsewhere, **HYPER)
    with pytest.raises(HyperOutOfRange, match="lr"):
        plan.step(step=1, **{**HYPER, "lr": np.nan})


def test_sub_buffers_of_one_object_overlap(queue: Any) -> None:
    kernel = tvm_qopt.load(PLAIN, target="opencl")
    memory = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 8192)
    parts = [
        cl_array.Array(queue, (300,), np.float32, data=memory.get_sub_region(at, 2048))
        for at in (0, 1024, 4096)
    ]
    state = kernel.init_state(parts[0])
    with pytest.raises(ShapeMismatch, match="memory shared"):
        kernel.plan(param=parts[0], grad=parts[1], state=state)
    kernel.plan(param=parts[0], grad=parts[2], state=state)


def test_a_driver_that_refuses_the_source_is_quoted(queue: Any) -> None:
    launch = Launch("main_kernel", ("param", "nb"), (1,), 1)
    module = SourceModule({"kernel.cl": "not C"}, {"main": launch}, "here")
    with pytest.raises(ArtifactInvalid, match=r"here/kernel\.cl: the OpenCL compiler of "):
        module.program(queue.context, "kernel.cl")
    wide = SourceModule({"k.cl": ""}, {"main": Launch("k", (), (1 << 20, 2), 1)}, "here")
    with pytest.raises(DeviceMismatch, match=f"groups of {1 << 21} work items"):
        wide.program(queue.context, "k.cl")


def test_a_capturable_step_is_the_plans_to_the_bit(queue: Any) -> None:
    """Step, scalars and found_inf on the device; held back it changes and counts nothing."""
    (plan, arrays), (other, expected) = planned(queue), planned(queue)
    found = put(queue, np.zeros(1, np.float32))
    replayed = plan.capturable(step=4, grad_scale=2.0, maximize=True, found_inf=found, **HYPER)
    assert replayed.steps() == 4
    for step_, inf, lr in ((5, 0.0, 1e-2), (6, 1.0, 1e-2), (6, 0.0, 5e-3)):
        found.set(np.array([inf], np.float32))
        replayed.set(lr=lr)
        replayed.step()
        if not inf:
            other.step(step=step_, grad_scale=2.0, maximize=True, **{**HYPER, "lr": lr})
        for name, x in arrays.items():
            np.testing.assert_array_equal(x.get(), expected[name].get(), name)
    assert replayed.steps() == 6
    replayed.set(beta2=1.0 - 2**-30, eps=1e-35)  # eps after its correction is no float32 number
    replayed.step()
    assert replayed.steps() == 6


def test_what_cannot_be_captured_says_so(queue: Any) -> None:
    plan, _ = planned(queue)
    with pytest.raises(UnknownName, match="momentum"):
        plan.capturable(**HYPER).set(momentum=0.9)
    with pytest.raises(HyperOutOfRange, match="lr"):
        plan.capturable(**HYPER).set(lr=-1.0)
    with pytest.raises(DtypeMismatch, match=r"found_inf.*float32"):
        plan.capturable(found_inf=put(queue, np.zeros(1)), **HYPER)
    kernel = tvm_qopt.load("lamb", target="opencl")
    param = put(queue, np.ones(300, np.float32))
    lamb = kernel.plan(param=param, grad=param.copy(), state=kernel.init_state(param))
    with pytest.raises(UnsupportedSpec, match="without norms"):
        lamb.capturable(**HYPER)
