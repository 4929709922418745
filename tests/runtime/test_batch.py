"""Many tensors stepped together: the same bits as one plan each, and tensors that move."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt.errors import HyperOutOfRange, ShapeMismatch, UnknownName
from tvm_qopt.runtime.batch import Batch, Member, Sums
from tvm_qopt.runtime.state import sums_of

Array = npt.NDArray[Any]

SIZES = (0, 1, 255, 256, 257, 4096, 135_536)  # the last is beyond what one thread handles
HYPER: dict[str, dict[str, float]] = {
    "adamw": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1},
    "lamb": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1},
    "lans": {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1},
}
of = tvm_qopt.KernelSpec.of
SPECS = [
    of("adamw"),
    of("adamw", "float32"),
    of("adamw", param="bfloat16", param_format="stochastic"),
    of("lamb"),
    of("lans"),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    tvm_qopt.load_many(SPECS)


def raw(rng: np.random.Generator, n: int, dtype: str, scale: float = 1.0) -> Array:
    values = (rng.standard_normal(n) * scale).astype(np.float32)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def tensors(spec: tvm_qopt.KernelSpec) -> list[dict[str, Array]]:
    rng, kernel = np.random.default_rng(3), tvm_qopt.load(spec)
    made = []
    for n in SIZES:
        param = raw(rng, n, spec.param)
        made.append({"param": param, "grad": raw(rng, n, spec.grad), **kernel.init_state(param)})
    return made


def plan_steps(spec: tvm_qopt.KernelSpec, steps: int, **options: Any) -> list[dict[str, Array]]:
    kernel, given = tvm_qopt.load(spec), tensors(spec)
    for one in given:
        state = {name: a for name, a in one.items() if name not in ("param", "grad")}
        plan = kernel.plan(param=one["param"], grad=one["grad"], state=state)
        for step in range(1, steps + 1):
            plan.step(step=step, **options, **HYPER[spec.rule])
    return given


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("threads", (1, 2))
def test_a_batch_is_its_plans_to_the_bit(spec: tvm_qopt.KernelSpec, threads: int) -> None:
    options: dict[str, Any] = {"grad_scale": 4.0, "gnorm_scale": 0.5, "maximize": True}
    seeded = {"seed": 7} if spec.param_format == "stochastic" else {}
    expected = plan_steps(spec, 2, **options, **seeded)
    before = tvm_qopt.get_num_threads()
    tvm_qopt.set_num_threads(threads)
    try:
        given = tensors(spec)
        batch = Batch(tvm_qopt.load(spec))
        members = [batch.add(one) for one in given]
        for step in (1, 2):
            for member in members:
                member.seed(7, step)
            scalars = batch.scalars(HYPER[spec.rule], step=step, **options)
            assert batch.step(members, scalars) == [True] * len(members)
    finally:
        tvm_qopt.set_num_threads(before)
    for one, other in zip(given, expected, strict=True):
        assert {n: a.tobytes() for n, a in one.items()} == {
            n: a.tobytes() for n, a in other.items()
        }


def test_weights_and_gradients_that_moved_are_used_where_they_are() -> None:
    spec = of("adamw")
    expected, given = plan_steps(spec, 1), tensors(spec)
    batch = Batch(tvm_qopt.load(spec))
    members = [batch.add(one) for one in given]
    moved = [{name: one[name].copy() for name in ("param", "grad")} for one in given]
    for one in given:
        one["grad"][:] = np.nan  # whoever still reads here is found out
    for member, one in zip(members, moved, strict=True):
        member.place("param", one["param"].ctypes.data)
        member.place("grad", one["grad"].ctypes.data)
    batch.step(members, batch.scalars(HYPER["adamw"], step=1))
    for here, one, other in zip(moved, given, expected, strict=True):
        assert here["param"].tobytes() == other["param"].tobytes()
        assert one["exp_avg_codes"].tobytes() == other["exp_avg_codes"].tobytes()


def test_a_norm_that_overflows_leaves_its_own_tensor_alone() -> None:
    spec = of("lamb")
    given = tensors(spec)
    given[3]["param"][:] = 1e30
    before = [{name: a.copy() for name, a in one.items()} for one in given]
    batch = Batch(tvm_qopt.load(spec))
    members = [batch.add(one) for one in given]
    ran = batch.step(members, batch.scalars(HYPER["lamb"], step=1))
    assert ran == [i != 3 for i in range(len(SIZES))]
    assert all(np.array_equal(given[3][name], a) for name, a in before[3].items())
    assert not np.array_equal(given[4]["param"], before[4]["param"])


def test_norms_of_parts_are_reduced_to_that_of_the_whole() -> None:
    """Two halves whose sums of squares are added step as the whole does."""
    spec, rng = of("lamb", "float32"), np.random.default_rng(5)
    kernel = tvm_qopt.load(spec)
    whole = {"param": raw(rng, 512, "float32"), "grad": raw(rng, 512, "float32")}
    halves = [{n: a[i : i + 256].copy() for n, a in whole.items()} for i in (0, 256)]
    kernel.plan(**whole, state=kernel.init_state(whole["param"])).step(step=1, **HYPER["lamb"])
    batch = Batch(kernel)
    given = [{**half, **kernel.init_state(half["param"])} for half in halves]
    members = [batch.add(one) for one in given]

    def together(sums: Sums) -> Sums:
        return {name: np.full_like(each, each.sum()) for name, each in sums.items()}

    batch.step(members, batch.scalars(HYPER["lamb"], step=1), reduce=together)
    joined = np.concatenate([half["param"] for half in halves])
    assert joined.tobytes() == whole["param"].tobytes()


def test_a_batch_refuses_what_a_plan_refuses() -> None:
    spec = of("adamw")
    kernel, one = tvm_qopt.load(spec), tensors(spec)[4]
    batch = Batch(kernel)
    with pytest.raises(ShapeMismatch, match="memory shared with"):
        batch.add({**one, "grad": one["param"]})
    with pytest.raises(HyperOutOfRange, match="beta1"):
        batch.scalars({**HYPER["adamw"], "beta1": 1.5}, step=1)
    with pytest.raises(UnknownName, match="momentum"):
        batch.scalars({**HYPER["adamw"], "momentum": 0.5}, step=1)
    with pytest.raises(HyperOutOfRange, match="step"):
        batch.scalars(HYPER["adamw"], step=0)
    assert batch.step([], []) == []


def test_an_interrupt_between_calls_comes_after_the_last() -> None:
    """Weights and codes of a tensor never part: what began is made to its end."""
    spec = of("adamw")
    expected, given = plan_steps(spec, 1), tensors(spec)
    before = tvm_qopt.get_num_threads()
    tvm_qopt.set_num_threads(1)
    try:
        batch = Batch(tvm_qopt.load(spec))
        members: list[Member] = [batch.add(one) for one in given]
        call = members[2].calls.update[0]

        def interrupted(*arguments: Any) -> None:
            call.serial(*arguments)
            raise KeyboardInterrupt

        broken = dataclasses.replace(call, parallel=None, serial=interrupted)
        members[2].calls.update[0] = broken
        with pytest.raises(KeyboardInterrupt):
            batch.step(members, batch.scalars(HYPER["adamw"], step=1))
    finally:
        tvm_qopt.set_num_threads(before)
    for one, other in zip(given, expected, strict=True):
        assert one["param"].tobytes() == other["param"].tobytes()


def test_sums_do_not_depend_on_what_stands_beside() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.random(n).astype(np.float32) ** 3 for n in (0, 1, 7, 129, 135_537, 8, 0, 1000)]
    together = sums_of(arrays)
    assert [float(x) for x in together] == [float(sums_of([a])[0]) for a in arrays]
    assert together[4] == pytest.approx(float(arrays[4].sum(dtype=np.float64)), rel=1e-14)
    assert sums_of([]).size == 0
