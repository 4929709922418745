"""Many tensors by one launch on CUDA: tests for a process that has the device of tests/cuda_on_cpu.

Not collected by itself: test_cuda_runs.py runs this file in such a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import pytest
from inside_cuda import HYPER, PLAIN, bits, captured, load, planned, put

from tvm_qopt import sample
from tvm_qopt.runtime import batch, tables
from tvm_qopt.runtime.arrays import view_of
from tvm_qopt.runtime.batch import Batch
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.spec import KernelSpec

SPECS = (
    PLAIN,
    "adamw-codebook8+linear4u-b64-p_bf16-g_bf16-nonfinite_propagate",
    "lion-nf4-b64-p_bf16_stochastic-g_f32",
    "lamb-fp8-b256-p_f16_master-g_bf16",
)
SIZES = (5, 256, 1000, 512, 3, 777, 64, 2048, 300, 1)
SHIFTED = (0, 3, 0, 0, 1)  # elements into their memory, in turn


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each pass or step, how many launches it made."""
    counted: list[int] = []
    run = batch.run

    def counting(kernel: Kernel, calls: Sequence[Any], *rest: Any, **more: Any) -> None:
        counted.append(len(calls))
        run(kernel, calls, *rest, **more)

    monkeypatch.setattr(batch, "run", counting)
    return counted


def arguments(kernel: Kernel) -> tuple[list[dict[str, Any]], list[Any]]:
    """The arguments of tensors that lie anywhere, and a plan for each (of these very arrays)."""
    plans = []
    for i, n in enumerate(SIZES):
        arrays = sample.arguments(kernel.spec, n, seed=i, spoiled=i == 2)
        plans.append(planned(kernel, arrays, SHIFTED[i % len(SHIFTED)]))
    given = []
    for _, held in plans:
        state = dict(held)
        one: dict[str, Any] = {name: state.pop(name) for name in ("param", "grad")}
        maps = [name for name in state if name.endswith("_qmap")]
        one["qmap"] = {name.removesuffix("_qmap"): state.pop(name) for name in maps} or None
        given.append({**one, "state": state})
    return given, plans


@pytest.mark.parametrize("name", SPECS)
def test_many_are_each_to_the_bit(name: str, launches: list[int]) -> None:
    kernel = load(name)
    hyper = sample.hyper_values(kernel.spec)
    _, alone = arguments(kernel)
    for plan, _ in alone:
        for step in (1, 2):
            plan.step(step=step, **hyper)
    given, held = arguments(kernel)
    many = kernel.plan_many(given)
    for step in (1, 2):
        assert many.step(step=step, **hyper) == [True] * len(SIZES)
    for (_, got), (_, expected) in zip(held, alone, strict=True):
        assert bits(got) == bits(expected)
    passes = 2 * (1 + len(kernel.spec.rule_.norms))
    assert launches == [3] * passes  # main, main_any and tail


def test_a_moved_tensor_is_followed(launches: list[int]) -> None:
    """As torch's gradients do, at the address of another weight's first, misaligned in the end."""
    kernel = load(PLAIN)
    together, (given, _), (_, alone) = Batch(kernel), arguments(kernel), arguments(kernel)
    members = [together.add({**g["state"], "param": g["param"], "grad": g["grad"]}) for g in given]
    for step, shift in ((1, 0), (2, 0), (3, 4), (4, 1)):
        grads = [np.random.default_rng(step + n).normal(size=n).astype(np.float32) for n in SIZES]
        kept = [put(grad, shift) for grad in grads]
        for member, grad in zip(members, kept, strict=True):
            member.place("grad", view_of("grad", grad).address)
        together.step(members, together.scalars(HYPER, step=step))
        for (plan, _), grad in zip(alone, grads, strict=True):
            plan.step(step=step, grad=put(grad, shift), **HYPER)
        kept[0].get()  # waits; until then the gradients of this step have to live
    for g, (_, expected) in zip(given, alone, strict=True):
        del expected["grad"]
        assert bits({**g["state"], "param": g["param"]}) == bits(expected)
    assert launches[:3] == [3] * 3


def test_captured_steps_of_many_are_each_to_the_bit() -> None:
    kernel = load(PLAIN)
    (given, held), (_, alone) = arguments(kernel), arguments(kernel)
    flag = cupy.full(1, 0.0, "float32")
    steps = kernel.plan_many(given).capturable(found_inf=flag, **HYPER)
    replay = captured(steps.step)
    for found in (0.0, 1.0, 0.0):
        flag.fill(found)
        replay()
    assert steps.steps() == 2
    for plan, _ in alone:
        for step in (1, 2):
            plan.step(step=step, **HYPER)
    for (_, got), (_, expected) in zip(held, alone, strict=True):
        assert bits(got) == bits(expected)


def test_a_large_tensor_has_a_launch_of_its_own(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ALONE_FROM", 1000)
    kernel = load(PLAIN)
    given, _ = arguments(kernel)
    kernel.plan_many(given).step(step=1, **HYPER)
    assert launches == [4]  # that of 2048 elements beside main, main_any and tail


def test_a_list_of_one_needs_no_table(launches: list[int]) -> None:
    kernel = load(PLAIN)
    given, _ = arguments(kernel)
    kernel.plan_many(given[1:2]).step(step=1, **HYPER)
    assert launches == [1] and KernelSpec.parse(PLAIN) == kernel.spec
