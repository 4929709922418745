"""Many tensors by one call: on LLVM, and on OpenCL (PoCL) by launches with a table."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import opencl_runner
import pytest
import torch

import tvm_qopt
from tvm_qopt.errors import DtypeMismatch, HyperOutOfRange, ShapeMismatch
from tvm_qopt.formats.dynamic import dynamic_map
from tvm_qopt.runtime.opencl import Bound

Array = npt.NDArray[Any]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
PLAIN = tvm_qopt.KernelSpec.of("adamw")
LAMB = tvm_qopt.KernelSpec.of("lamb")
MIXED = tvm_qopt.KernelSpec.of(
    "adamw", "codebook8+linear4u", block_size=64, param="bfloat16", nonfinite="propagate"
)
TARGETS = ("llvm-native", "opencl")


@pytest.fixture(scope="module")
def queue() -> Any:
    if why := opencl_runner.why_missing(oclgrind=False):
        pytest.skip(why)
    import pyopencl as cl

    device = next(d for platform in cl.get_platforms() for d in platform.get_devices())
    return cl.CommandQueue(cl.Context([device]))


@pytest.fixture(params=TARGETS)
def place(request: pytest.FixtureRequest) -> Callable[[Array], Any]:
    """A copy of a NumPy array on the target."""
    return on(request.getfixturevalue("queue")) if request.param == "opencl" else np.copy


def on(queue: Any) -> Callable[[Array], Any]:
    from pyopencl.array import to_device

    return lambda x: to_device(queue, x)


def kernel_for(spec: tvm_qopt.KernelSpec, x: Any) -> Any:
    return tvm_qopt.load(spec, target=TARGETS[not isinstance(x, np.ndarray)])


def tensors(
    spec: tvm_qopt.KernelSpec, sizes: list[int], place: Callable[[Array], Any], every: int = 16
) -> list[dict[str, Any]]:
    """Slices of one weight and one gradient; every: elements by which they are aligned."""
    rng = np.random.default_rng(len(sizes))
    starts = np.cumsum([0, *(-(-n // every) * every for n in sizes)]).tolist()
    values = rng.normal(size=(2, starts[-1] + 1)).astype(np.float32)
    if spec.param == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    whole = [place(x) for x in values]
    cut = [[x[a : a + n] for a, n in zip(starts, sizes, strict=False)] for x in whole]
    states = kernel_for(spec, whole[0]).init_states(cut[0])
    maps = [slot.name for slot, format_ in spec.slots if format_.runtime_map]
    qmap = {name: place(dynamic_map(signed=True)) for name in maps} or None
    return [
        {"param": p, "grad": g, "state": s, "qmap": qmap}
        for p, g, s in zip(*cut, states, strict=True)
    ]


def bits(given: list[dict[str, Any]]) -> list[bytes]:
    arrays = [x for one in given for x in (one["param"], *one["state"].values())]
    return [(x if isinstance(x, np.ndarray) else x.get()).tobytes() for x in arrays]


def by_plans(spec: tvm_qopt.KernelSpec, given: list[dict[str, Any]], steps: int) -> list[bytes]:
    for one in given:
        plan = kernel_for(spec, one["param"]).plan(**one)
        for step in range(1, steps + 1):
            plan.step(step=step, **HYPER)
    return bits(given)


def sizes_of(count: int) -> list[int]:
    """Uneven: some shorter than a block, some without a tail, one empty."""
    rng = np.random.default_rng(count)
    sizes = rng.integers(1, 1500, count)
    sizes[::5] = 256 * rng.integers(1, 4, len(sizes[::5]))
    sizes[1:2] = 0
    return [int(n) for n in sizes]


@pytest.mark.parametrize(
    ("spec", "count", "every"),
    [(PLAIN, 1, 16), (PLAIN, 2, 16), (PLAIN, 300, 16), (PLAIN, 7, 3), (LAMB, 5, 16)],
    ids=lambda x: x.name if isinstance(x, tvm_qopt.KernelSpec) else str(x),
)
def test_many_are_each_to_the_bit(
    spec: tvm_qopt.KernelSpec, count: int, every: int, place: Callable[[Array], Any]
) -> None:
    assert_each_to_the_bit(spec, count, place, every)


def test_packed_codes_and_maps_are_found_by_the_table(queue: Any) -> None:
    assert_each_to_the_bit(MIXED, 9, on(queue), 16)


def assert_each_to_the_bit(
    spec: tvm_qopt.KernelSpec, count: int, place: Callable[[Array], Any], every: int
) -> None:
    expected = by_plans(spec, tensors(spec, sizes_of(count), place, every), 2)
    given = tensors(spec, sizes_of(count), place, every)
    many = kernel_for(spec, given[0]["param"]).plan_many(given)
    for step in (1, 2):
        assert many.step(step=step, **HYPER) == [True] * count
    assert bits(given) == expected


def test_slices_of_one_array_are_one_launch(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    enqueue = Bound.enqueue

    def counted(self: Bound, queue: Any) -> None:
        launched.append(self.entry.name)
        enqueue(self, queue)

    monkeypatch.setattr(Bound, "enqueue", counted)
    given = tensors(PLAIN, sizes_of(40), on(queue))
    many = kernel_for(PLAIN, given[0]["param"]).plan_many(given)
    many.step(step=1, **HYPER)
    assert sorted(launched) == ["main_many", "tail_many"]
    launched.clear()
    other = given[3]["grad"].copy()  # in memory of its own: a launch more of each entry point
    many.step(step=2, grads=[other if i == 3 else g["grad"] for i, g in enumerate(given)], **HYPER)
    assert sorted(launched) == ["main", "main_many", "tail", "tail_many"]


def test_gradients_that_were_replaced_are_let_go(queue: Any) -> None:
    given = tensors(PLAIN, sizes_of(12), on(queue))
    many = kernel_for(PLAIN, given[0]["param"]).plan_many(given)
    for step in (1, 2, 3):
        grads = [one["grad"].copy() for one in given]
        many.step(step=step, grads=grads, **HYPER)
        queue.finish()
        if step == 1:
            first = [weakref.ref(grad) for grad in grads]
    del grads
    gc.collect()
    assert not any(grad() for grad in first)


def test_gradients_and_storage_that_moved_are_followed() -> None:
    kernel = tvm_qopt.load(PLAIN)
    runs = []
    for moves in (False, True):
        rng = np.random.default_rng(4)
        params, grads = (
            [torch.tensor(rng.normal(size=n)).float() for n in (300, 70)] for _ in "pg"
        )
        given = [
            {"param": p, "grad": g, "state": kernel.init_state(p)}
            for p, g in zip(params, grads, strict=True)
        ]
        many = kernel.plan_many(given)
        many.step(step=1, **HYPER)
        if moves:
            params[0].data = params[0].data.clone()
            grads = [g.clone() for g in grads]
            for one in given:
                one["grad"].fill_(float("nan"))
        assert many.step(step=2, grads=grads, **HYPER) == [True, True]
        runs.append([p.numpy().tobytes() for p in params])
    assert runs[0] == runs[1]


def test_what_does_not_fit_is_named(place: Callable[[Array], Any]) -> None:
    given = tensors(PLAIN, [300, 300], place)
    kernel = kernel_for(PLAIN, given[0]["param"])
    many = kernel.plan_many(given)
    before = bits(given)
    assert many.step(step=1, found_inf=1.0, **HYPER) == [False, False]
    with pytest.raises(ShapeMismatch, match="grads: expected 2 gradients, got 1"):
        many.step(step=1, grads=[given[0]["grad"]], **HYPER)
    with pytest.raises(DtypeMismatch, match=r"grads: expected a sequence.*, got int"):
        many.step(step=1, grads=5, **HYPER)
    with pytest.raises(ShapeMismatch, match=r"of tensor \d: .*memory shared with .* of tensor \d"):
        many.step(step=1, grads=[given[1]["param"], given[1]["grad"]], **HYPER)
    with pytest.raises(HyperOutOfRange, match="maximize: expected True or False, got 'no'"):
        many.step(step=1, maximize="no", **HYPER)
    with pytest.raises(HyperOutOfRange, match="seed"):
        many.step(step=1, seed=3, **HYPER)
    assert bits(given) == before
    shared = [given[0], {**given[1], "param": given[0]["param"]}]
    with pytest.raises(ShapeMismatch, match="param of tensor"):
        kernel.plan_many(shared)
    assert len(kernel.plan_many(iter(given))) == 2
    with pytest.raises(DtypeMismatch, match=r"tensors: expected a sequence.*, got int"):
        kernel.plan_many(5)
    with pytest.raises(DtypeMismatch, match="tensor 0: expected a dict of arguments, got str"):
        kernel.plan_many(given[0])
    with pytest.raises(ShapeMismatch, match="tensor 1: expected one of param, grad, state"):
        kernel.plan_many([given[0], {**given[1], "gard": 0}])
