"""The compiled kernels of every rule and setting against the oracles of the rules.

With float32 state along the oracle's own path; with 8-bit state each step from the kernel's own,
since after one code that differs at a midpoint the paths part.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle_rules
import oracles
import pytest

import tvm_qopt
from tvm_qopt.errors import HyperOutOfRange, UnknownName, UnsupportedSpec
from tvm_qopt.rules import RULES

Array = npt.NDArray[Any]
F64 = oracle_rules.F64

SIZE, STEPS = 4113, 5  # 16 blocks and a tail
EPS = 2.0**-23  # one ulp, relative to the lower end of a binade
TINY = 2.0**-149

MOVE = 1e-5  # of what a weight's move would be did no terms cancel: some 20 roundings are 2.4e-6;
# a norm adds up to 1.5e-6 (8 roundings of a sum over a block are 256 * EPS / 2 at the very worst)
WEIGHT_ULP = 2  # the decay factor, p * decay and the sum: half an ulp each
MOMENT = 1e-6  # of the terms of a moment: decode, scalars and sum, 6 ulp
NORMED = 1e-5  # where the gradient is divided by a norm of it


@dataclass(frozen=True)
class Case:
    """A rule with settings and typical hyper-parameters; `state` is the 8-bit state to try, as
    well as float32 (None: that alone)."""

    rule: str
    hyper: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    state: str | None = None

    def __str__(self) -> str:
        return "-".join([self.rule, *(f"{k}={v}" for k, v in self.settings.items())])

    def spec(self, state: str, **more: Any) -> tvm_qopt.KernelSpec:
        return tvm_qopt.KernelSpec.of(self.rule, state, **self.settings, **more)

    @property
    def slots(self) -> tuple[str, ...]:
        return oracle_rules.slots(self.rule, **self.settings)

    @property
    def first_step(self) -> int:
        return 0 if self.settings.get("scalars") == "ascend" else 1

    def oracle(
        self, p: Array, g: Array, state: Mapping[str, Array], *, step: int, **hyper: float
    ) -> oracle_rules.Result:
        """One step of the oracle, from arrays of any float type."""
        given: dict[str, Any] = {**self.hyper, **hyper}
        if self.rule == "sgd":
            given["nesterov"] = self.settings["momentum"] == "nesterov"
        passed = ("eps_beside", "decay", "scalars", "bias_correction", "form")
        given |= {name: value for name, value in self.settings.items() if name in passed}
        wide = {name: x.astype(np.float64) for name, x in state.items()}
        moved: oracle_rules.Result = oracle_rules.RULES[self.rule](
            p.astype(np.float64), g.astype(np.float64), wide, **given, step=step
        )
        return moved


ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SEEN_EPS = {**ADAM, "eps": 1e-2}  # that shows, as all of those below: 1e-3 of any is seen
EXACT = {**SEEN_EPS, "beta1": 0.5, "beta2": 0.75}  # float32 holds their powers and differences
SGD = {"lr": 1e-2, "weight_decay": 0.1}
RMSPROP = {"lr": 1e-2, "alpha": 0.9, "eps": 1e-2, "weight_decay": 0.1}
LAMB = {**ADAM, "eps": 1e-3, "weight_decay": 0.5}
LARS = {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.1, "eps": 10.0, "trust_coefficient": 0.01}
MIX = {**SEEN_EPS, "beta3": 0.99, "alpha": 5.0}

CASES = [
    Case("adam", ADAM, {"amsgrad": False, "eps_beside": "corrected"}, "dynamic8"),
    Case("adam", SEEN_EPS, {"amsgrad": False, "eps_beside": "uncorrected"}),
    Case("adam", SEEN_EPS, {"amsgrad": True, "eps_beside": "corrected"}),
    Case("adam", SEEN_EPS, {"amsgrad": True, "eps_beside": "uncorrected"}, "fp8"),
    *(
        Case(
            "adamw", SEEN_EPS, {"amsgrad": amsgrad, "eps_beside": eps_beside, "decay": decay}, state
        )
        for decay in ("before", "after")
        for amsgrad, eps_beside, state in (
            (False, "corrected", "dynamic8" if decay == "before" else None),
            (False, "uncorrected", None),
            (True, "corrected", "fp8" if decay == "after" else None),
            (True, "uncorrected", None),
        )
    ),
    Case("adamw", EXACT, {"amsgrad": False, "scalars": "ascend"}),
    Case("adamw", EXACT, {"amsgrad": True, "scalars": "ascend"}),
    Case("adam_fp16", SEEN_EPS, {"form": "optimized", "decay": "decoupled"}, "dynamic8"),
    Case("adam_fp16", SEEN_EPS, {"form": "plain", "decay": "absolute"}),
    Case("adam_fp16", SEEN_EPS, {"form": "plain", "decay": "coupled"}, "fp8"),
    Case("adamw_mxnet", {**SEEN_EPS, "lr": 1.0, "eta": 1e-2}, {}, "dynamic8"),
    Case("lion", {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 1.0}, {}, "dynamic8"),
    Case("sgd", SGD, {"momentum": "off"}),
    Case("sgd", {**SGD, "momentum": 0.9, "dampening": 0.3}, {"momentum": "on"}, "dynamic8"),
    Case("sgd", {**SGD, "momentum": 0.9}, {"momentum": "nesterov"}, "dynamic8"),
    Case("rmsprop", RMSPROP, {"centered": False, "momentum": False}, "dynamic8"),
    Case("rmsprop", {**RMSPROP, "momentum": 0.9}, {"centered": False, "momentum": True}, "fp8"),
    Case("rmsprop", RMSPROP, {"centered": True, "momentum": False}, "fp8"),
    Case("rmsprop", {**RMSPROP, "momentum": 0.9}, {"centered": True, "momentum": True}, "dynamic8"),
    Case("adagrad", {**SGD, "lr_decay": 0.1, "eps": 1e-2}, {}, "dynamic8"),
    Case("ademamix", MIX, {"warm_up": False}, "dynamic8"),
    Case("ademamix", {**MIX, "t_alpha": 4.0, "t_beta3": 4.0}, {"warm_up": True}, "fp8"),
    Case("lamb", LAMB, {"bias_correction": True}, "dynamic8"),
    Case("lamb", LAMB, {"bias_correction": False}, "fp8"),
    Case("lars", LARS, {}, "dynamic8"),
    Case("lans", LAMB, {}, "dynamic8"),
]
WITH_NORMS = [case for case in CASES if case.rule in ("lamb", "lars", "lans")]
LOW_BIT = [case for case in CASES if case.state is not None]
ONE_EACH = [next(c for c in CASES if c.rule == rule) for rule in sorted(oracle_rules.RULES)]

PROPAGATE = [case for case in ONE_EACH if case.rule in ("lion", "rmsprop", "lamb", "lans")]
"""A first moment alone, a second alone, and both under norms: the policy itself knows no rule."""


def case_of(rule: str, **settings: Any) -> Case:
    return next(c for c in CASES if c.rule == rule and settings.items() <= dict(c.settings).items())


each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_rule = pytest.mark.parametrize("case", ONE_EACH, ids=str)
each_normed = pytest.mark.parametrize("case", WITH_NORMS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel of this file, built in one child."""
    low_bit = [case.spec(case.state) for case in LOW_BIT if case.state]
    propagate = [case.spec("float32", nonfinite="propagate") for case in PROPAGATE]
    tvm_qopt.load_many([*(case.spec("float32") for case in CASES), *low_bit, *propagate])


def test_the_cases_cover_every_rule_and_setting() -> None:
    shipped = {n: r for n, r in RULES.items() if r.update.__module__.startswith("tvm_qopt.rules.")}
    updates = {n: r for n, r in shipped.items() if r.is_update}
    assert {case.rule for case in CASES} == set(updates)
    for name, rule in updates.items():
        mine = [{**rule.defaults, **case.settings} for case in CASES if case.rule == name]
        for setting, choices in rule.settings.items():
            assert {each[setting] for each in mine} == set(choices), f"{name}: {setting}"
        for case in (case for case in CASES if case.rule == name):
            settings = {**rule.defaults, **case.settings}
            slots = rule.slots(settings)
            assert tuple(slot.name for slot in slots) == case.slots
            for slot in slots:
                assert slot.nonnegative == (slot.name in oracle_rules.NONNEGATIVE)


# Running a kernel


class Run:
    """Weights and state under one kernel."""

    def __init__(self, case: Case, state: str, param: Array, **more: Any) -> None:
        self.case, self.kernel = case, tvm_qopt.load(case.spec(state, **more))
        self.param = param.astype(np.float32)
        self.grad = np.zeros_like(self.param)
        self.state = self.kernel.init_state(self.param)
        self.plan = self.kernel.plan(param=self.param, grad=self.grad, state=self.state)

    def step(self, grad: Array, *, step: int = 1, **hyper: Any) -> bool:
        self.grad[...] = grad
        ran: bool = self.plan.step(step=step, **{**self.case.hyper, **hyper})
        return ran

    def decoded(self) -> dict[str, F64]:
        values = self.kernel.decode_state(self.state)
        return {slot: values[slot].astype(np.float64) for slot in self.case.slots}

    def fill(self, state: Mapping[str, Array]) -> None:
        """Put values into a float32 state."""
        for slot, values in state.items():
            self.state[slot][...] = values

    def bits(self) -> bytes:
        names = sorted(self.state)
        return b"".join(a.tobytes() for a in (self.param, *(self.state[n] for n in names)))


def weights(rng: np.random.Generator, size: int = SIZE) -> oracles.F32:
    """Small enough for their last place to be small beside a step."""
    return (0.1 * rng.normal(size=size)).astype(np.float32)


def gradient(rng: np.random.Generator, size: int = SIZE) -> oracles.F32:
    """Normal, over two decades, with lanes of 0 and a block of zeros where there are several."""
    values = rng.normal(size=size) * 10.0 ** rng.uniform(-2, 0, size)
    values[::16] = 0
    if size > 512:
        values[256:512] = 0
    return values.astype(np.float32)


# What is compared, and how closely


@dataclass
class Expected:
    """The oracle's step, and how far a float32 kernel may be from it."""

    p: F64
    state: dict[str, F64]
    p_tolerance: F64
    state_tolerance: dict[str, F64]
    unsure: Array  # elements of which a rounding decides


def expected_of(
    case: Case, p: Array, g: Array, state: Mapping[str, Array], step: int, **hyper: float
) -> Expected:
    """Errors are relative to the terms, which may cancel in the result: their sum is what the same
    step makes of absolute values."""
    moved, new = case.oracle(p, g, state, step=step, **hyper)
    sizes = {slot: np.abs(x) for slot, x in state.items()}
    far, terms = case.oracle(-np.abs(p), np.abs(g), sizes, step=step, **hyper)
    coupled = case.rule in ("adam", "sgd", "rmsprop", "adagrad", "lars")
    coupled |= case.settings.get("decay") == "coupled"
    if coupled or case.rule in ("lamb", "lans"):  # the decay adds to the gradient or direction
        far, terms = case.oracle(np.abs(p), np.abs(g), sizes, step=step, **hyper)
        move = np.abs(np.abs(p) - far)
    else:
        move = np.abs(np.abs(p) + far)
        move = np.maximum(move, np.abs(moved - p))
    relative = NORMED if case.rule in ("lans", "lars") else MOMENT
    tolerance = {slot: relative * np.abs(x) + 4 * TINY for slot, x in terms.items()}
    unsure = np.zeros(np.shape(p), bool)
    loss = np.ones(np.shape(p))
    if case.rule == "lion":
        b1 = case.hyper["beta1"]
        m = state["exp_avg"].astype(np.float64)
        c, size = b1 * m + (1 - b1) * g, b1 * np.abs(m) + (1 - b1) * np.abs(g)
        unsure = (np.abs(c) <= 4 * EPS * size) & (size > 0)
    if case.settings.get("centered"):
        v, a2 = new["square_avg"], new["grad_avg"] ** 2
        unsure = (v - a2 < 1e-4 * v) & (v > 0)
        loss = np.where(unsure | (v == 0), 1.0, v / np.where(v > a2, v - a2, 1.0)) ** 1.5
        if "momentum_buffer" in tolerance:
            tolerance["momentum_buffer"] = tolerance["momentum_buffer"] * 8 * loss
    slack = MOVE * move * loss + WEIGHT_ULP * EPS * np.abs(p) + 4 * TINY
    return Expected(moved, new, slack, tolerance, unsure)


def assert_weights(found: Array, expected: Expected) -> None:
    off = np.abs(found.astype(np.float64) - expected.p)
    bad = np.flatnonzero((off > expected.p_tolerance) & ~expected.unsure)
    assert not bad.size, (
        f"{bad.size} weights, at {bad[0]} {found[bad[0]]} for {expected.p[bad[0]]}, "
        f"{off[bad[0]] / expected.p_tolerance[bad[0]]:.3g} times the tolerance"
    )
    assert expected.unsure.mean() < 0.01


FP8_E4M3 = np.array(
    [f * 2.0**-9 for f in range(8)]
    + [(1 + f / 8) * 2.0 ** (e - 7) for e in range(1, 16) for f in range(8) if (e, f) != (15, 7)]
)
"""The non-negative values of OCP E4M3: eighths of a binade, and eight below 2^-6."""


@functools.cache
def levels_of(format_: str) -> F64:
    """The levels, scaled so that the largest is 1."""
    if format_ == "fp8_e4m3":
        return np.unique(np.concatenate([-FP8_E4M3, FP8_E4M3])) / 448
    return oracles.dynamic_map(format_ == "dynamic8s").astype(np.float64)


def assert_nearest(slot: str, found: F64, exact: F64, format_: str, tolerance: F64) -> None:
    """The stored value is a level of the block's scale, and none is nearer to the moment.

    That is within half a level of it, wherever it lies between two.  The encoders and the scale
    are some 8 ulp off, of the value; with the moment's own tolerance that may decide for either
    neighbour, both of which are then about as near.
    """
    levels = levels_of(format_)
    starts = np.arange(0, exact.size, 256)
    absmax = np.maximum.reduceat(np.abs(exact), starts)
    slack = np.maximum.reduceat(tolerance, starts) + 8 * EPS * absmax
    scale = np.repeat(absmax, 256)[: exact.size]
    unit = exact / np.where(scale == 0, 1, scale)
    above = np.searchsorted(levels, unit).clip(1, levels.size - 1)
    nearest = np.minimum(np.abs(unit - levels[above]), np.abs(unit - levels[above - 1])) * scale
    # a level moves with its scale, by its own share of the scale's error
    per_value = np.repeat(slack / np.where(absmax == 0, 1, absmax), 256)[: exact.size]
    allowed = (
        nearest + 2 * tolerance + per_value * (np.abs(exact) + nearest) + 8 * EPS * np.abs(exact)
    )
    bad = np.flatnonzero(np.abs(found - exact) > allowed)
    assert not bad.size, (
        f"{slot}: {bad.size} values, at {bad[0]} {found[bad[0]]} for {exact[bad[0]]}, "
        f"{abs(found[bad[0]] - exact[bad[0]]) / allowed[bad[0]]:.3g} times what is allowed"
    )


# Every rule and setting


def follow_the_oracle(case: Case, size: int, steps: int = STEPS, **hyper: float) -> None:
    """Each step from the oracle's own weights and state, rounded to float32."""
    rng = np.random.default_rng(size)
    run = Run(case, "float32", weights(rng, size))
    p, state = run.param.copy(), {slot: np.zeros(size, np.float32) for slot in case.slots}
    for step in range(case.first_step, case.first_step + steps):
        g = gradient(rng, size)
        run.param[...] = p
        run.fill(state)
        assert run.step(g, step=step, **hyper)
        expected = expected_of(case, p, g, oracle_rules.zero_rule(state), step, **hyper)
        assert_weights(run.param, expected)
        for slot, values in run.decoded().items():
            off = np.abs(values - expected.state[slot])
            assert (off <= expected.state_tolerance[slot])[~expected.unsure].all(), slot
        p = expected.p.astype(np.float32)
        state = {slot: x.astype(np.float32) for slot, x in expected.state.items()}
    assert (run.state["nonfinite_count"] == 0).all()


@each_case
def test_float32_state(case: Case) -> None:
    follow_the_oracle(case, SIZE)


def follow_the_kernel(case: Case, size: int) -> None:
    """Each step from the kernel's own weights and decoded state."""
    assert case.state is not None
    rng = np.random.default_rng(size)
    run = Run(case, case.state, weights(rng, size))
    formats = dict(zip(case.slots, run.kernel.spec.state, strict=True))
    for step in range(case.first_step, case.first_step + STEPS):
        p, state, g = run.param.copy(), run.decoded(), gradient(rng, size)
        assert run.step(g, step=step)
        expected = expected_of(case, p, g, oracle_rules.zero_rule(state), step)
        assert_weights(run.param, expected)
        for slot, values in run.decoded().items():
            exact, off = expected.state[slot], expected.state_tolerance[slot]
            if expected.unsure.any() and slot == "momentum_buffer":
                continue  # one element of which a rounding decides may be its block's largest
            assert_nearest(f"{slot}, step {step}", values, exact, formats[slot], off)


@pytest.mark.parametrize("case", LOW_BIT, ids=str)
def test_8_bit_state(case: Case) -> None:
    follow_the_kernel(case, SIZE)


@pytest.mark.parametrize("size", [1, 255, 256, 257])
@pytest.mark.parametrize("case", [case_of("ademamix", warm_up=False), case_of("lans")], ids=str)
def test_sizes(case: Case, size: int) -> None:
    """Tails alone, blocks alone and both; 4113 is above.  A gradient of the first size is 0."""
    follow_the_oracle(case, size)
    follow_the_kernel(case, size)


def test_adagrad_from_an_initial_accumulator() -> None:
    case, rng = case_of("adagrad"), np.random.default_rng(3)
    run, g = Run(case, "float32", weights(rng)), gradient(rng)
    p, start = run.param.copy(), {"sum": np.full(SIZE, 0.5, np.float32)}
    run.fill(start)
    run.step(g)
    assert_weights(run.param, expected_of(case, p, g, start, 1))


@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16", "sqrt8u", "dynamic8u"])
def test_an_initial_value_is_exact_and_one_that_overflows_is_refused(state: str) -> None:
    kernel = tvm_qopt.load(tvm_qopt.KernelSpec.of("adagrad", state))
    p = np.zeros(300, np.float32)
    for value in (0.5, 60000.0):
        held = kernel.decode_state(kernel.init_state(p, {"sum": value}))["sum"]
        np.testing.assert_allclose(held, value, rtol=2.0**-8)  # what bfloat16 resolves
    for value in (-1.0, 1e39, 1e300, float("inf"), float("nan")):
        with pytest.raises(tvm_qopt.QoptError, match=r"^sum: expected a number in \[0, "):
            kernel.init_state(p, {"sum": value})
    if state == "float16":
        with pytest.raises(tvm_qopt.QoptError, match=r"^sum: expected .* 65504\], got 65505"):
            kernel.init_state(p, {"sum": 65505.0})


# Rows of the cases that concern rules


@pytest.mark.parametrize(("decay", "expected"), [("before", 0.85), ("after", 0.855)])
def test_decay_order(decay: str, expected: float) -> None:
    case = case_of("adamw", decay=decay, amsgrad=False)
    run = Run(case, "float32", np.ones(1))
    run.step(np.ones(1), lr=0.1, weight_decay=0.5, eps=1e-8)
    assert run.param[0] == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("state", ["float32", "dynamic8"])
def test_lion_decay(state: str) -> None:
    run = Run(case_of("lion"), state, -np.ones(1))
    run.step(np.full(1, 1e-3), lr=1e-2, weight_decay=0.1)
    assert run.param[0] == pytest.approx(-1.009, rel=2e-7)


@pytest.mark.parametrize("case", [c for c in CASES if c.rule == "lamb"], ids=str)
def test_lamb_steps_follow_the_weight(case: Case) -> None:
    """w = 1 moves 10 times as far as w = 0.1; w = 0 moves, at ratio 1."""
    g = np.abs(gradient(np.random.default_rng(4))) + 0.1
    moves = []
    for weight in (0.1, 1.0, 0.0):
        run = Run(case, "float32", np.full(SIZE, weight))
        before = run.param.astype(np.float64)
        run.step(g, weight_decay=0)
        moves.append(before - run.param)
    np.testing.assert_allclose(moves[1], 10 * moves[0], rtol=1e-4)  # an ulp of 1 in 0.01
    assert np.linalg.norm(moves[1]) == pytest.approx(1e-2 * np.sqrt(SIZE), rel=1e-5)
    direction, _ = case.oracle(np.zeros(SIZE), g, zeros(case), step=1, weight_decay=0)
    np.testing.assert_allclose(moves[2], -direction, rtol=1e-5)  # the oracle's ratio is 1 too
    assert (moves[2] > 0).all()


def zeros(case: Case, size: int = SIZE) -> dict[str, Array]:
    return {slot: np.zeros(size) for slot in case.slots}


@each_normed
def test_zero_norms(case: Case) -> None:
    """No weight, no gradient, or neither, with decay and without: ratio 1, and never a NaN."""
    rng = np.random.default_rng(5)
    for p, g in (
        (np.zeros(SIZE), gradient(rng)),
        (weights(rng), np.zeros(SIZE)),
        (np.zeros(SIZE), np.zeros(SIZE)),
    ):
        for weight_decay in (0.0, 0.1):
            run = Run(case, "float32", p)
            before = run.param.copy()
            assert run.step(g, weight_decay=weight_decay)
            expected = expected_of(case, before, g, zeros(case), 1, weight_decay=weight_decay)
            assert np.isfinite(run.param).all()
            assert_weights(run.param, expected)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-1.0, -1.0), (50.0, -1.0), (1.0, -1.0), (-1.0, 0.5), (-1.0, 50.0), (-1.0, 0.0), (50.0, 2.0)],
)
@pytest.mark.parametrize("case", [c for c in WITH_NORMS if c.rule != "lars"], ids=str)
def test_bounds(case: Case, lower: float, upper: float) -> None:
    """The norm is about 6.4: lower by max, upper by min, an upper bound of 0 gives the plain lr."""
    follow_the_oracle(case, SIZE, steps=2, lower_bound=lower, upper_bound=upper)


@pytest.mark.parametrize("case", [c for c in WITH_NORMS if c.rule != "lars"], ids=str)
def test_a_lower_bound_counts_for_a_weight_of_zeros(case: Case) -> None:
    rng = np.random.default_rng(6)
    run, g = Run(case, "float32", np.zeros(SIZE)), gradient(rng)
    run.step(g, lower_bound=3.0)
    expected = expected_of(case, np.zeros(SIZE), g, zeros(case), 1, lower_bound=3.0)
    assert_weights(run.param, expected)
    assert np.linalg.norm(run.param) == pytest.approx(3 * case.hyper["lr"], rel=1e-3)


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the number of threads back."""
    number = tvm_qopt.get_num_threads()
    yield
    tvm_qopt.set_num_threads(number)


@pytest.mark.parametrize("state", ["float32", "8-bit"])
@each_normed
def test_any_number_of_threads_gives_the_same_bits(case: Case, state: str, threads: None) -> None:
    """One thread runs the serial functions, more the parallel ones; 140 001 elements are past
    where the serial functions are used for any number of threads."""
    bits = []
    for number in (1, 2, 4):
        tvm_qopt.set_num_threads(number)
        rng = np.random.default_rng(7)
        run = Run(case, "float32" if state == "float32" else str(case.state), weights(rng, 140_001))
        assert run.kernel.manifest.serial_below < 140_001
        for step in (1, 2, 3):
            run.step(gradient(rng, 140_001), step=step)
        bits.append(run.bits())
    assert bits[0] == bits[1] == bits[2]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@each_normed
def test_norms_of_small_and_large_gradients(case: Case, large: bool) -> None:
    """As far as float32 holds the squares: LAMB's second moment has a thousandth of them, of lanes
    10^5 times smaller than the largest; LANS' gradient is divided by its norm."""
    scale = 10.0 ** ((12 if case.rule == "lamb" else 17) * (1 if large else -1))
    rng = np.random.default_rng(8)
    run, g = Run(case, "float32", weights(rng)), (gradient(rng) * scale).astype(np.float32)
    expected = expected_of(case, run.param, g, zeros(case), 1, eps=1e-30)
    assert run.step(g, eps=1e-30)
    assert_weights(run.param, expected)
    for slot, values in run.decoded().items():
        off = np.abs(values - expected.state[slot])
        assert (off <= expected.state_tolerance[slot]).all(), slot


@pytest.mark.parametrize("case", [case_of("lars"), case_of("lans")], ids=str)
def test_a_gradient_whose_norm_is_beyond_float32_changes_nothing(case: Case) -> None:
    """As `Plan.step` says: it returns False. An infinite norm is not a gradient of zeros."""
    rng = np.random.default_rng(8)
    run = Run(case, "float32", weights(rng))
    run.step(gradient(rng))
    before = run.bits()
    assert not run.step(gradient(rng) * 1e22, step=2)
    assert run.bits() == before


@pytest.mark.parametrize("case", [c for c in WITH_NORMS if c.rule != "lars"], ids=str)
def test_a_weight_whose_norm_is_beyond_float32_changes_nothing(case: Case) -> None:
    """Both norms are infinite where the decay is seen, and one where it is not."""
    rng = np.random.default_rng(8)
    for weight_decay in (0.0, 0.1):
        run = Run(case, "float32", weights(rng) * 1e22)
        before = run.bits()
        assert not run.step(gradient(rng), weight_decay=weight_decay)
        assert run.bits() == before


@each_rule
def test_a_rate_of_zero_moves_nothing(case: Case) -> None:
    rng = np.random.default_rng(9)
    run = Run(case, "float32", weights(rng))
    before = run.param.tobytes()
    rate: dict[str, Any] = {"eta" if case.rule == "adamw_mxnet" else "lr": 0.0}
    run.step(gradient(rng), **rate)
    assert run.param.tobytes() == before


COUPLED = [
    c
    for c in CASES
    if c.rule in ("sgd", "rmsprop", "adagrad", "adam") or c.settings.get("decay") == "coupled"
]


@pytest.mark.parametrize("case", COUPLED, ids=str)
def test_coupled_decay_is_a_gradient(case: Case) -> None:
    """weight_decay on a gradient g is g + wd p without it, to rounding."""
    rng = np.random.default_rng(10)
    p, g = weights(rng), gradient(rng)
    runs = [Run(case, "float32", p) for _ in range(2)]
    runs[0].step(g, weight_decay=0.5)
    runs[1].step(g + np.float32(0.5) * p, weight_decay=0)
    np.testing.assert_allclose(runs[0].param, runs[1].param, rtol=1e-5, atol=1e-6)
    for slot, values in runs[0].decoded().items():
        np.testing.assert_allclose(values, runs[1].decoded()[slot], rtol=1e-5, atol=1e-9)


# Elements that are not finite

BAD = {7: np.nan, 300: np.inf, 4100: -np.inf}  # in a full block, in a block of zeros, in the tail


def check_that_only_these_are_skipped(case: Case, state: str, bad: Mapping[int, float]) -> None:
    """Their weights and state stay; they count in no norm: the rest moves as if they were not
    there."""
    rng = np.random.default_rng(11)
    run = Run(case, state, weights(rng))
    for step in (1, 2):
        run.step(gradient(rng), step=step)
    where, others = list(bad), np.delete(np.arange(SIZE), list(bad))
    p, old, g = run.param.copy(), run.decoded(), gradient(rng)
    g[where] = list(bad.values())
    assert run.step(g, step=3)
    counts = run.state["nonfinite_count"]
    assert counts.nonzero()[0].tolist() == [i // 256 for i in where]
    assert counts.sum() == len(bad)

    used = {slot: x[others] for slot, x in oracle_rules.zero_rule(old).items()}
    expected = expected_of(case, p[others], g[others], used, 3)
    assert run.param[where].tobytes() == p[where].tobytes()
    assert_weights(run.param[others], expected)
    for (slot, values), format_ in zip(run.decoded().items(), run.kernel.spec.state, strict=True):
        exact, off = old[slot].copy(), np.zeros(SIZE)
        exact[others], off[others] = expected.state[slot], expected.state_tolerance[slot]
        if state == "float32":
            assert (values[where] == exact[where]).all(), slot
            assert (np.abs(values - exact) <= off)[others][~expected.unsure].all(), slot
        elif slot != "momentum_buffer" or not expected.unsure.any():
            assert_nearest(slot, values, exact, format_, off)  # under the block's new scale


@pytest.mark.parametrize(
    ("case", "state"),
    [*((case, "float32") for case in CASES), *((case, str(case.state)) for case in LOW_BIT)],
    ids=str,
)
def test_skip_leaves_the_element_and_only_it(case: Case, state: str) -> None:
    check_that_only_these_are_skipped(case, state, BAD)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.rule != "lans" and oracle_rules.NONNEGATIVE.intersection(c.slots)],
    ids=str,
)
def test_a_second_moment_beyond_float32_is_skipped(case: Case) -> None:
    """A gradient that float32 holds and whose square it does not; LANS divides it by its norm."""
    check_that_only_these_are_skipped(case, "float32", {7: 1e25, 300: -1e25, 4100: 3e38})


@pytest.mark.parametrize("case", PROPAGATE, ids=str)
def test_propagate_makes_the_weight_nan_and_its_state_zero(case: Case) -> None:
    rng = np.random.default_rng(11)
    run = Run(case, "float32", weights(rng), nonfinite="propagate")
    run.step(gradient(rng))
    g, where = gradient(rng), list(BAD)
    g[where] = list(BAD.values())
    assert run.step(g, step=2)
    assert np.isnan(run.param).nonzero()[0].tolist() == where
    for slot, values in run.decoded().items():
        assert np.isfinite(values).all() and (values[where] == 0).all(), slot
    assert run.state["nonfinite_count"].sum() == 3


@each_rule
def test_found_inf_changes_nothing(case: Case) -> None:
    run = Run(case, "float32", weights(np.random.default_rng(12)))
    before = run.bits()
    assert not run.step(np.full(SIZE, np.inf), found_inf=1.0)
    assert run.bits() == before


@each_rule
def test_gradient_scales(case: Case) -> None:
    """A power of two as loss scale changes no bit; gnorm_scale is a factor."""
    rng = np.random.default_rng(13)
    p, g = weights(rng), gradient(rng)
    runs = [Run(case, "float32", p) for _ in range(3)]
    runs[0].step(g)
    runs[1].step(g * 1024, grad_scale=1024.0)
    runs[2].step(g * 4, gnorm_scale=0.25)
    assert runs[0].bits() == runs[1].bits() == runs[2].bits()


# Bad input


def plan_of(case: Case) -> tuple[Run, bytes]:
    run = Run(case, "float32", np.ones(300))
    run.grad[...] = 1
    return run, run.bits()


@each_case
def test_hyper_parameters_that_a_rule_does_not_know(case: Case) -> None:
    """The message lists those that it has."""
    run, before = plan_of(case)
    has = {*case.hyper} | (
        {"lower_bound", "upper_bound"} if "lower_bound" in has_of(case) else set()
    )
    with pytest.raises(UnknownName, match="learning_rate") as caught:
        run.plan.step(step=1, learning_rate=1.0, **case.hyper)
    known = str(caught.value).split("known: ")[1]
    assert set(known.split(", ")) == has
    assert run.bits() == before


def has_of(case: Case) -> set[str]:
    rule = RULES[case.rule]
    return {h.name for h in rule.hyper({**rule.defaults, **case.settings})}


@each_case
def test_hyper_parameters_that_are_missing(case: Case) -> None:
    run, before = plan_of(case)
    has_default = {"trust_coefficient"} | ({"eps"} if case.rule == "adam_fp16" else set())
    for name in case.hyper.keys() - has_default:
        rest = {k: v for k, v in case.hyper.items() if k != name}
        with pytest.raises(HyperOutOfRange, match=f"^{name}: expected a number, got nothing"):
            run.plan.step(step=1, **rest)
    assert run.bits() == before


OUT_OF_RANGE: dict[str, tuple[float, ...]] = {
    "lr": (-1e-3,),
    "eta": (-1.0,),
    "beta1": (-0.1, 1.0),
    "beta2": (-0.1, 1.0),
    "beta3": (-0.1, 1.0),
    "alpha": (-0.1,),
    "eps": (0.0, -1e-8),
    "weight_decay": (-0.1,),
    "momentum": (-0.1,),
    "dampening": (-0.1, 1.1),
    "lr_decay": (-0.1,),
    "trust_coefficient": (-1e-3,),
    "t_alpha": (0.0, -1.0),
    "t_beta3": (0.0, -1.0),
    "lower_bound": (),
    "upper_bound": (),
}


@each_case
def test_hyper_parameters_out_of_range(case: Case) -> None:
    """Each names itself; neither NaN nor an infinity nor another type is a number."""
    run, before = plan_of(case)
    for name in sorted(has_of(case)):
        values: tuple[Any, ...] = (*OUT_OF_RANGE[name], np.nan, np.inf, "1", None, True)
        if case.rule == "rmsprop" and name == "alpha":
            values += (1.0,)
        for value in values:
            with pytest.raises(HyperOutOfRange, match=f"^{name}: "):
                run.plan.step(step=1, **{**case.hyper, name: value})
    assert run.bits() == before


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        ("lion", {"amsgrad": True}, "unknown setting of lion 'amsgrad'; known: clip_gradient"),
        ("sgd", {"momentum": True}, "momentum: one of ('on', 'off', 'nesterov'), got True"),
        ("sgd", {"nesterov": True}, "unknown setting of sgd 'nesterov'; known: clip_gradient, mom"),
        ("rmsprop", {"centered": 1}, "centered: one of (False, True), got 1"),
        ("adam", {"decay": "before"}, "unknown setting of adam 'decay'"),
        ("adamw", {"eps_beside": "inside"}, "eps_beside: one of ('corrected', 'uncorrected')"),
        ("lamb", {"bias_correction": 0}, "bias_correction: one of (True, False), got 0"),
        ("sgd", {"zero_rule": True}, "unknown setting of sgd 'zero_rule'"),
        ("lars", {"zero_rule": False}, "unknown setting of lars 'zero_rule'"),
        ("adamax", {}, "unknown rule 'adamax'; known: adagrad, adam, adam_fp16, adamw"),
    ],
)
def test_settings_that_a_rule_does_not_have(
    rule: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnknownName, UnsupportedSpec), match=re.escape(message)):
        tvm_qopt.KernelSpec.of(rule, "float32", **settings)


@each_case
def test_a_signed_slot_in_an_unsigned_format(case: Case) -> None:
    signed = [slot for slot in case.slots if slot not in oracle_rules.NONNEGATIVE]
    if not signed:
        case.spec("dynamic8u")
        return
    with pytest.raises(UnsupportedSpec, match=f"{signed[0]} is signed, dynamic8u is not"):
        case.spec("dynamic8u")


@each_case
def test_too_few_formats(case: Case) -> None:
    formats = "+".join(["float32"] * (len(case.slots) + 2))
    wanted = f"{case.rule} has {len(case.slots)} slots, got {len(case.slots) + 2} formats"
    with pytest.raises(UnsupportedSpec, match=wanted):
        case.spec(formats)
