"""Every rule with 8-bit state reaches a minimum in about the steps of its float32 state.

Two functions of 512 variables, two blocks: a convex quadratic of curvatures 1 to 100, and 256
copies of Rosenbrock's function from about its usual start (-1.2, 1).  Gradients are exact, so that
the state's rounding is the only difference; rates fall, as sign-like rules need near a minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle_rules
import pytest

import tvm_qopt

F64 = npt.NDArray[np.float64]

SIZE, LIMIT = 512, 4000
GOAL = 1e-3  # of the value at the start
FACTOR = 1.25  # the largest of the table is 1.17 (Lion on the quadratic); several are below 1
FALL = 300.0  # steps after which the rate is half

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True)
class Case:
    """A rule, its hyper-parameters, and the rates for the quadratic and for Rosenbrock's."""

    rule: str
    rates: tuple[float, float]
    hyper: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    fall: float = FALL

    def __str__(self) -> str:
        return "-".join([self.rule, *(f"{k}={v}" for k, v in self.settings.items())])

    def spec(self, state: str) -> tvm_qopt.KernelSpec:
        return tvm_qopt.KernelSpec.of(self.rule, state, **self.settings)


SGD = {"momentum": 0.9, "weight_decay": 0.0}
RMSPROP = {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0}
CASES = [
    Case("adam", (0.05, 0.05), ADAM),
    Case("adam_fp16", (0.05, 0.05), ADAM),
    Case("adamw", (0.05, 0.05), ADAM),
    Case("adamw_mxnet", (0.05, 0.05), {**ADAM, "eta": 1.0}),
    Case("lion", (0.02, 0.02), {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}),
    Case("sgd", (1e-3, 1e-3), {**SGD, "dampening": 0.0}, {"momentum": "on"}),
    Case("sgd", (1e-3, 5e-4), SGD, {"momentum": "nesterov"}),
    Case("rmsprop", (0.02, 0.02), RMSPROP),
    Case(
        "rmsprop",
        (0.005, 0.005),
        {**RMSPROP, "momentum": 0.9},
        {"centered": True, "momentum": True},
    ),
    Case(
        "adagrad",
        (0.5, 0.5),
        {"lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0},
        fall=np.inf,  # the rule has a fall of its own
    ),
    Case("ademamix", (0.05, 0.05), {**ADAM, "beta3": 0.95, "alpha": 2.0}),
    Case("lamb", (0.05, 0.05), ADAM),
    Case("lars", (1.0, 1.0), {**SGD, "eps": 1e-8, "trust_coefficient": 0.01}),
    Case("lans", (0.05, 0.05), ADAM),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel of this file, built in one child."""
    tvm_qopt.load_many([case.spec(state) for case in CASES for state in ("float32", "dynamic8")])


def test_every_rule_is_here() -> None:
    assert {case.rule for case in CASES} == set(oracle_rules.RULES)


CURVATURE = np.logspace(0, 2, SIZE)
CENTER = np.random.default_rng(1).normal(size=SIZE)

Problem = tuple[F64, Callable[[F64], tuple[float, F64]]]
"""A start, and a function: point -> value, gradient."""


def quadratic() -> Problem:
    def evaluate(x: F64) -> tuple[float, F64]:
        away = x - CENTER
        return 0.5 * float(np.mean(CURVATURE * away**2)), CURVATURE * away

    return np.random.default_rng(0).normal(size=SIZE), evaluate


def rosenbrock() -> Problem:
    def evaluate(x: F64) -> tuple[float, F64]:
        a, b = x[::2], x[1::2]
        rest, slope = b - a**2, np.empty(SIZE)
        slope[::2], slope[1::2] = -2 * (1 - a) - 400 * a * rest, 200 * rest
        return float(np.mean((1 - a) ** 2 + 100 * rest**2)), slope

    near = 0.1 * np.random.default_rng(0).normal(size=SIZE)
    return np.tile([-1.2, 1.0], SIZE // 2) + near, evaluate


def steps_to_the_goal(case: Case, state: str, problem: Problem, rate: float) -> int:
    start, evaluate = problem
    kernel = tvm_qopt.load(case.spec(state))
    param, grad = start.astype(np.float32), np.zeros(SIZE, np.float32)
    plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
    first, _ = evaluate(param.astype(np.float64))
    for step in range(1, LIMIT + 1):
        value, slope = evaluate(param.astype(np.float64))
        if value < GOAL * first:
            return step - 1
        grad[...] = slope
        assert plan.step(step=step, lr=rate / (1 + step / case.fall), **case.hyper)
    raise AssertionError(f"{case}, {state}: {value / first:.2g} of the start after {LIMIT} steps")


@pytest.mark.parametrize(
    ("number", "problem"), [(0, quadratic), (1, rosenbrock)], ids=["quadratic", "rosenbrock"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_8_bit_state_takes_about_the_steps_of_float32(
    case: Case, number: int, problem: Callable[[], Problem]
) -> None:
    plain, low = (
        steps_to_the_goal(case, state, problem(), case.rates[number])
        for state in ("float32", "dynamic8")
    )
    assert low <= FACTOR * plain, f"{low} steps, {plain} with float32 state"
