"""Weights of 16 bits with what makes up for their rounding: `master`, `split` and `stochastic`.

The float32 kernel is what the first two are held against, bit for bit; the split rule (semantics,
end of section 8) is written here a second time.  Stochastic rounding (section 5.5) is held to its
statistics: the kernel draws the numbers, the tests know only how often each outcome is due.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracles
import pytest

import tvm_qopt
from tvm_qopt import reference
from tvm_qopt.errors import (
    DtypeMismatch,
    HyperOutOfRange,
    ShapeMismatch,
    UnknownName,
    UnsupportedSpec,
)
from tvm_qopt.runtime import threads

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]

SIZE, BLOCK = 5 * 256 + 37, 256
HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
STILL = {"lr": 0.0, "weight_decay": 0.0}  # with a gradient of 0: p * 1 - 0

of = functools.partial(tvm_qopt.KernelSpec.of, "adamw")
PLAIN = of(grad="bfloat16")  # float32 weights
PLAIN_F16 = of("float32", grad="float16")
BF16 = of(param="bfloat16")
MASTER = of(param="bfloat16", param_format="master")
MASTER_F16 = of("float32", param="float16", param_format="master")
MASTER_SPOILED = of(param="bfloat16", param_format="master", nonfinite="propagate")
SPLIT = of(param="bfloat16", param_format="split")
SPLIT_SPOILED = of(param="bfloat16", param_format="split", nonfinite="propagate")
RANDOM = of("float32", param="bfloat16", param_format="stochastic", grad="float32")
RANDOM8 = of(param="bfloat16", param_format="stochastic")
SPECS = [PLAIN, PLAIN_F16, BF16, MASTER, MASTER_F16, MASTER_SPOILED, SPLIT, SPLIT_SPOILED]
SPECS += [RANDOM, RANDOM8]

FORMATTED = [MASTER, MASTER_F16, SPLIT]


def each(*specs: tvm_qopt.KernelSpec) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", specs, ids=[spec.name for spec in specs])


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel of this file, built in one child."""
    tvm_qopt.load_many(SPECS)


# The rule of `split`, on integers of 64 bits: nothing overflows


def split(master: F32) -> tuple[Bits, Bits]:
    """Weight and low bits: the upper half of the bits plus 0x8000, and the lower half."""
    bits = master.view(np.uint32).astype(np.int64)
    return ((bits + 0x8000) >> 16).astype(np.uint16), (bits & 0xFFFF).astype(np.uint16)


def restore(weight: Bits, low: Bits) -> F32:
    """The inverse: one unit less where the low bits had rounded up."""
    high = weight.astype(np.int64) - (low >= 0x8000)
    return ((high << 16) | low).astype(np.uint32).view(np.float32)


def rows() -> F32:
    """The master's rows: ends, zeros, subnormal numbers, Inf, and ties of every kind."""
    named = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000]  # 0, -0, Inf, -Inf
    named += [0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F7F0000]  # about the largest
    named += [0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00018000, 0x007FFFFF, 0x807F8000]
    named += [0x00800000, 0x00807FFF, 0x3F800000, 0xBF808000, 0x3F808000, 0x3F818000, 0x3F81FFFF]
    rng = np.random.default_rng(40)
    high = rng.integers(0, 0x7F80, 3000) | (rng.integers(0, 2, 3000) << 15)
    low = rng.choice([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xEDCB], 3000)
    bits = np.concatenate([np.array(named), (high << 16) | low])
    values: F32 = bits.astype(np.uint32).view(np.float32)
    return values


class Run:
    """Weights under one kernel, stepped by gradients in float32."""

    def __init__(self, spec: tvm_qopt.KernelSpec, param: Array, **beside: Array) -> None:
        self.spec, self.kernel, self.param = spec, tvm_qopt.load(spec), param.copy()
        self.grad = oracles.narrow(np.zeros(param.size, np.float32), spec.grad)  # type: ignore[arg-type]
        self.state = self.kernel.init_state(self.param)
        for name, values in beside.items():
            self.state[name][...] = values
        self.plan = self.kernel.plan(param=self.param, grad=self.grad, state=self.state)
        self.number = 0

    def step(self, grad: F32, **hyper: Any) -> None:
        self.number += 1
        self.grad[...] = oracles.narrow(grad, self.spec.grad)  # type: ignore[arg-type]
        assert self.plan.step(**{**HYPER, "step": self.number, **hyper})

    @property
    def master(self) -> F32:
        """The float32 weights that the step works on."""
        if "param_master" in self.state:
            return np.asarray(self.state["param_master"], np.float32)
        if "param_low" in self.state:
            return restore(self.param, self.state["param_low"])
        return oracles.widen(self.param, self.spec.param)  # type: ignore[arg-type]

    def moments(self) -> bytes:
        beside = ("param_master", "param_low")
        return b"".join(a.tobytes() for n, a in self.state.items() if n not in beside)


def start(spec: tvm_qopt.KernelSpec, size: int = SIZE) -> Array:
    values = np.random.default_rng(41).normal(size=size).astype(np.float32)
    return oracles.narrow(values, spec.param)  # type: ignore[arg-type]


def gradients(count: int, size: int = SIZE) -> list[F32]:
    """Normal, with lanes and a block of zeros."""
    rng, made = np.random.default_rng(42), []
    for _ in range(count):
        grad = rng.normal(size=size).astype(np.float32)
        grad[::16], grad[BLOCK : 2 * BLOCK] = 0, 0
        made.append(grad)
    return made


# Against float32 weights


@each(*FORMATTED)
def test_the_path_is_that_of_float32_weights(spec: tvm_qopt.KernelSpec) -> None:
    """The same bits in weights and state over 50 steps; `param` is the rounded master each time."""
    plain = PLAIN_F16 if spec is MASTER_F16 else PLAIN
    ours = Run(spec, start(spec))
    theirs = Run(plain, oracles.widen(start(spec), spec.param))  # type: ignore[arg-type]
    assert ours.master.tobytes() == theirs.param.tobytes()
    for grad in gradients(50):
        ours.step(grad)
        theirs.step(grad)
        assert ours.master.tobytes() == theirs.param.tobytes(), f"step {ours.number}"
        assert ours.moments() == theirs.moments(), f"step {ours.number}"
        if spec is SPLIT:
            weight, low = split(theirs.param)
            assert ours.state["param_low"].tobytes() == low.tobytes()
        else:
            weight = oracles.narrow(theirs.param, spec.param)  # type: ignore[arg-type]
        assert ours.param.tobytes() == weight.tobytes(), f"step {ours.number}"
    assert (ours.master != oracles.widen(ours.param, spec.param)).mean() > 0.9  # type: ignore[arg-type]


def test_more_elements_than_one_thread_takes() -> None:
    size = 132_109
    runs = [Run(MASTER, start(MASTER, size)), Run(SPLIT, start(SPLIT, size))]
    for grad in gradients(3, size):
        for run in runs:
            run.step(grad)
    assert runs[0].master.tobytes() == runs[1].master.tobytes()
    assert runs[0].moments() == runs[1].moments()


# Rows


def test_the_rule_restores_every_row() -> None:
    """And so the independent form is one: the weight nearest, ties away from zero."""
    weight, low = split(rows())
    assert restore(weight, low).tobytes() == rows().tobytes()
    finite = np.isfinite(rows())
    exact = rows().astype(np.float64)[finite]
    unit = (rows().view(np.uint32) & 0x7FFF0000)[finite]
    below = (unit.view(np.float32)).astype(np.float64)
    above = (unit.astype(np.uint64) + 0x10000).astype(np.uint32).view(np.float32)
    above = np.where(np.isinf(above), 2.0**128, above.astype(np.float64))
    nearer_above = above - np.abs(exact) <= np.abs(exact) - below
    expected = np.copysign(np.where(nearer_above, above, below), exact)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(oracles.bf16_to_f32(weight)[finite], expected)
    ties = (low == 0x8000) & finite
    assert ties.sum() > 100 and (weight != oracles.f32_to_bf16(rows()))[ties].mean() > 0.3


def test_split_keeps_every_row() -> None:
    """A step that moves nothing loads and stores: 0, -0, Inf, the largest, subnormal ones, ties."""
    weight, low = split(rows())
    run = Run(SPLIT, weight, param_low=low)
    for _ in range(2):
        run.step(np.zeros(weight.size, np.float32), **STILL)
        assert run.param.tobytes() == weight.tobytes()
        assert run.state["param_low"].tobytes() == low.tobytes()
    assert not run.state["nonfinite_count"].any(), "weights are not what the policy is about"


@each(MASTER, MASTER_F16)
def test_master_keeps_every_row_and_rounds_it_to_nearest_even(spec: tvm_qopt.KernelSpec) -> None:
    edges = np.array([65504, 65519.996, 65520, -65520, 2.0**-25, 3 * 2.0**-25, 6e-8], np.float32)
    values = np.concatenate([rows(), edges])
    param = oracles.narrow(np.zeros(values.size, np.float32), spec.param)  # type: ignore[arg-type]
    run = Run(spec, param, param_master=values)
    run.step(np.zeros(values.size, np.float32), **STILL)
    assert run.master.tobytes() == values.tobytes()
    with np.errstate(over="ignore"):
        kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[spec.param]
        assert run.param.tobytes() == values.astype(kind).tobytes()


NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)


def test_a_nan_weight_stays_a_nan_in_split() -> None:
    """Every payload that a pair can hold, one that 0x8000 would carry into the sign's place too."""
    bits = NANS.astype(np.int64)
    weight = ((bits >> 16) + ((bits & 0x8000) >> 15)).astype(np.uint16)
    low = (bits & 0xFFFF).astype(np.uint16)
    run = Run(SPLIT, weight, param_low=low)
    np.testing.assert_array_equal(run.master.view(np.uint32), NANS)
    run.step(np.zeros(NANS.size, np.float32), **STILL)
    assert np.isnan(run.master).all()
    assert np.isnan(oracles.bf16_to_f32(run.param)).all()


@each(MASTER, MASTER_F16)
def test_a_nan_master_stays_a_nan(spec: tvm_qopt.KernelSpec) -> None:
    zeros = np.zeros(NANS.size, np.float32)
    param = oracles.narrow(zeros, spec.param)  # type: ignore[arg-type]
    run = Run(spec, param, param_master=NANS.view(np.float32))
    run.step(zeros, **STILL)
    assert np.isnan(run.master).all()
    assert np.isnan(oracles.widen(run.param, spec.param)).all()  # type: ignore[arg-type]


def test_split_overflows_to_inf_only_in_the_weight() -> None:
    """The largest float32 is Inf as bfloat16, and comes back."""
    weight, low = split(np.full(3, np.finfo(np.float32).max, np.float32))
    run = Run(SPLIT, weight, param_low=low)
    assert np.isinf(oracles.bf16_to_f32(run.param)).all() and np.isfinite(run.master).all()
    run.step(np.ones(3, np.float32), lr=1e32, weight_decay=0.0)
    moved = np.float64(np.finfo(np.float32).max) - 1e32
    np.testing.assert_allclose(run.master.astype(np.float64), moved, rtol=3e-7)


# What is not finite


@each(MASTER, MASTER_F16, SPLIT)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_skip_leaves_weight_and_what_is_beside_it(spec: tvm_qopt.KernelSpec, bad: float) -> None:
    run, clean = Run(spec, start(spec)), Run(spec, start(spec))
    first, second, third = gradients(3)
    for each_run in (run, clean):
        each_run.step(first)
    old = run.param[7].tobytes() + run.master[7].tobytes()
    second[7] = bad
    run.step(second)
    assert run.param[7].tobytes() + run.master[7].tobytes() == old
    assert run.state["nonfinite_count"].tolist() == [1, 0, 0, 0, 0, 0]
    clean.step(np.where(np.arange(SIZE) == 7, first, second))
    others = np.arange(SIZE) // BLOCK != 0  # its own block may have another scale
    assert run.master[others].tobytes() == clean.master[others].tobytes()
    run.step(third)
    assert run.master[7].tobytes() not in old and np.isfinite(run.master).all()


@each(MASTER_SPOILED, SPLIT_SPOILED)
def test_propagate_spoils_one_weight_for_good(spec: tvm_qopt.KernelSpec) -> None:
    run, clean = Run(spec, start(spec)), Run(spec, start(spec))
    grads = gradients(3)
    grads[0][7] = np.nan
    for grad in grads:
        run.step(grad)
        clean.step(np.where(np.isnan(grad), np.float32(0), grad))
        assert np.flatnonzero(np.isnan(run.master)).tolist() == [7]
        assert np.flatnonzero(np.isnan(oracles.bf16_to_f32(run.param))).tolist() == [7]
        assert np.delete(run.master, 7).tobytes() == np.delete(clean.master, 7).tobytes()
        for name in ("exp_avg", "exp_avg_sq"):  # its moments are stored as 0
            for part in ("codes", "scale"):
                mine, other = (r.state[f"{name}_{part}"] for r in (run, clean))
                assert mine.tobytes() == other.tobytes()
    assert run.state["nonfinite_count"].sum() == 1


# Stagnation (cases.md)


def test_bf16_stagnation() -> None:
    """100 steps of 1e-3 from 1: a bfloat16 that rounds each step never leaves 1."""
    ends = {}
    for spec in (BF16, MASTER, SPLIT, RANDOM8):
        run = Run(spec, oracles.f32_to_bf16(np.ones(SIZE, np.float32)))
        for _ in range(100):
            run.step(np.ones(SIZE, np.float32), weight_decay=0.0)
        ends[spec.param_format] = run.master
        shown = oracles.bf16_to_f32(run.param)
        assert np.abs(shown - run.master).max() <= 2.0**-9  # half a unit below 1
    assert (ends["plain"] == 1).all()
    for name in ("master", "split"):
        np.testing.assert_allclose(ends[name], 0.9, atol=5e-6)  # 100 roundings of 2^-25
    assert ends["master"].tobytes() == ends["split"].tobytes()
    # 100 draws of variance under (2^-8)^2 / 4 each: a weight's deviation is under 0.02, that of the
    # mean of 1317 under 0.00054, of which the bound is 3.7.
    assert np.unique(ends["stochastic"]).size > 3
    assert abs(ends["stochastic"].astype(np.float64).mean() - 0.9) <= 0.002


# Stochastic rounding


def decayed(
    param: Bits, keep: float, *, seed: int | None = None, step: int = 1, spoil: F32 | None = None
) -> Bits:
    """Weights after a step under a gradient of 0, which multiplies them by `keep` and no more.

    `keep` is a float32 in [0, 1], and its product with weights that are powers of two is exact.
    """
    run, zeros = Run(RANDOM, param), np.zeros(param.size, np.float32)
    run.number = step - 1
    given: dict[str, Any] = {} if seed is None else {"seed": seed}
    run.step(zeros if spoil is None else spoil, lr=1.0, weight_decay=1.0 - keep, **given)
    return run.param


def between(low: int, high: int = 0x3F40) -> tuple[float, Bits]:
    """A float32 with these halves of its bits, and the bfloat16 numbers below and above it."""
    value = np.array((high << 16) | low, np.uint32).view(np.float32)
    return float(value), np.array([high, high + 1], np.uint16)


def ones(size: int) -> Bits:
    return np.full(size, 0x3F80, np.uint16)


DRAWS = 200_000
LOWS = [1, 0x00FF, 0x2000, 0x8000, 0xC000, 0xFFFF]


@pytest.mark.parametrize("low", LOWS, ids=hex)
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_stochastic_is_unbiased_and_takes_neighbours_only(low: int, sign: int) -> None:
    """Up with probability low / 65536: of n draws that is known to sqrt(n q (1 - q)), and 4.5 of
    those; the mean of the weights is that of the ups."""
    value, (below, above) = between(low)
    q = low / 65536
    got = decayed(ones(DRAWS) | np.uint16(sign), value, seed=11, step=low)
    assert set(np.unique(got)) <= {below | sign, above | sign}
    up = int((got == above | sign).sum())
    error = np.sqrt(DRAWS * q * (1 - q))
    assert abs(up - DRAWS * q) <= 4.5 * error + 1
    mean = np.abs(oracles.bf16_to_f32(got)).astype(np.float64).mean()
    unit = 2.0**-8  # of numbers in [0.5, 1)
    assert abs(mean - value) <= (4.5 * error + 1) / DRAWS * unit


def test_stochastic_is_one_draw_for_each_place() -> None:
    """Up where the draw is below the bits that are cut: what goes up from 0x2000 does from 0xC000;
    and the draws of one step fill the range evenly (chi-square over 64 bins, 6 sigma)."""
    size, steps = 40_000, 64
    went = np.zeros((steps - 1, size), bool)
    for i in range(1, steps):
        value, (_, above) = between(i * (0x10000 // steps))
        went[i - 1] = decayed(ones(size), value, seed=3, step=7) == above
    assert (went[1:] >= went[:-1]).all()
    counts = np.bincount(went.sum(axis=0), minlength=steps)
    chi = ((counts - size / steps) ** 2 / (size / steps)).sum()
    assert abs(chi - (steps - 1)) <= 6 * np.sqrt(2 * (steps - 1))
    draws = went.sum(axis=0).astype(np.float64)
    lags = (1, 2, BLOCK, 3 * BLOCK)  # neighbours, and the same place of other blocks
    near = [np.corrcoef(draws[:-lag], draws[lag:])[0, 1] for lag in lags]
    assert np.abs(near).max() <= 5 / np.sqrt(size), near


SAME: dict[str, Any] = {"seed": 5, "step": 9}
OTHERS: list[dict[str, Any]] = [
    {"seed": 6, "step": 9},
    {"seed": 5 + 2**32, "step": 9},
    {"seed": 2**64 - 1, "step": 9},
    {"seed": 5, "step": 10},
    {"seed": 9, "step": 5},
    {"step": 9},
]


def test_stochastic_repeats_by_seed_and_step_and_differs_by_either() -> None:
    """A draw that is another one falls alike half of the time, give or take 5 sigma."""
    value, _ = between(0x8000)
    first = decayed(ones(DRAWS), value, **SAME)
    assert decayed(ones(DRAWS), value, **SAME).tobytes() == first.tobytes()
    for given in OTHERS:
        other = decayed(ones(DRAWS), value, **given)
        alike = float((other == first).mean())
        assert abs(alike - 0.5) <= 5 * 0.5 / np.sqrt(DRAWS), given
    blocks = first[: DRAWS // BLOCK * BLOCK].reshape(-1, BLOCK)
    assert np.unique(blocks, axis=0).shape == blocks.shape, "no two blocks alike"
    assert np.unique(blocks.T, axis=0).shape == blocks.T.shape, "nor two lanes"


def test_no_seed_is_seed_0() -> None:
    value, _ = between(0x8000)
    assert decayed(ones(999), value).tobytes() == decayed(ones(999), value, seed=0).tobytes()


def test_stochastic_has_the_same_bits_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And an element the same in a tensor with a tail, with another tail, or with more blocks."""
    monkeypatch.setattr(threads, "_requested", None)  # put back as it was at the end
    value, _ = between(0x8000)
    size = 3 * 65_536 + 77
    whole = decayed(ones(size), value, **SAME)
    for n in (1, 2, 4):
        tvm_qopt.set_num_threads(n)
        assert decayed(ones(size), value, **SAME).tobytes() == whole.tobytes(), f"{n} threads"
        for part in (1, 255, 256, 257, 135_536):
            got = decayed(ones(part), value, **SAME)
            assert got.tobytes() == whole[:part].tobytes(), f"{part} elements, {n} threads"


def test_a_weight_that_bfloat16_holds_never_changes() -> None:
    """All finite bit patterns, -0 and the subnormal ones too, and the infinite ones."""
    patterns = np.arange(2**16).astype(np.uint16)
    patterns = patterns[(patterns & 0x7FFF) <= 0x7F80]
    for seed in range(3):
        assert decayed(patterns, 1.0, seed=seed).tobytes() == patterns.tobytes()


def test_a_finite_weight_never_rounds_to_inf() -> None:
    """Above the largest bfloat16 a draw has one number to go to."""
    largest = np.array([0x7F7F, 0xFF7F] * 5000, np.uint16)
    run = Run(RANDOM, largest)
    grad = np.where(np.arange(largest.size) % 2 == 0, -1, 1).astype(np.float32)
    run.step(grad, lr=1e36, weight_decay=0.0, seed=1)  # 3.3895e38 + 1e36 < 3.4028e38
    assert run.param.tobytes() == largest.tobytes()
    just_below = np.full(5000, 0x7F7E, np.uint16)
    run = Run(RANDOM, just_below)
    run.step(np.full(5000, -1, np.float32), lr=2e36, weight_decay=0.0, seed=1)
    assert set(run.param) == {0x7F7F}, "1.5 units up, of which there is one"


def test_nan_and_inf_weights_stay_what_they_are() -> None:
    """Through a step that would draw: of every NaN pattern, quiet or not, a NaN is left."""
    patterns = np.arange(2**16).astype(np.uint16)
    special = patterns[(patterns & 0x7F80) == 0x7F80]
    value, _ = between(0x8000)
    for seed in range(3):
        got = decayed(special, value, seed=seed)
        was, now = oracles.bf16_to_f32(special), oracles.bf16_to_f32(got)
        np.testing.assert_array_equal(np.isnan(now), np.isnan(was))
        np.testing.assert_array_equal(now[~np.isnan(was)], was[~np.isnan(was)])


def test_a_negative_weight_goes_as_its_positive() -> None:
    value, _ = between(0x1234)
    up = decayed(ones(DRAWS), value, **SAME)
    down = decayed(ones(DRAWS) | np.uint16(0x8000), value, **SAME)
    assert (up ^ down == 0x8000).all()


def test_an_element_that_is_not_finite_keeps_its_weight() -> None:
    grad = np.zeros(SIZE, np.float32)
    grad[5] = np.nan
    got = decayed(ones(SIZE), between(0x8000)[0], seed=1, spoil=grad)
    assert got[5] == 0x3F80 and set(np.delete(got, 5)) == {0x3F40, 0x3F41}


def with_random(run: Run, *, seed: int, step: int, **hyper: Any) -> dict[str, Array]:
    """The arrays of a run as the reference takes them."""
    rng = np.array([seed % 2**32, seed >> 32, step], np.uint32).view(np.int32)
    blocks = -(-run.param.size // BLOCK)
    return {
        "hyper": reference.hyper(run.spec, step, **HYPER | hyper),
        "param": run.param,
        "grad": run.grad,
        "rng": rng,
        "block_number": np.arange(blocks, dtype=np.int32),
        **run.state,
    }


@each(RANDOM, RANDOM8)
def test_stochastic_is_the_reference_bit_for_bit(spec: tvm_qopt.KernelSpec) -> None:
    """Where the value has one rounding; where a kernel may contract a sum, a weight in 65536 / 300
    that is an ulp off draws otherwise."""
    hyper: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.25 + 2.0**-12}
    for size in (1, 255, SIZE):
        for step, seed in enumerate((0, 2**63 + 12345, 2**32 - 1), start=1):
            run = Run(spec, start(spec, size))
            expected = reference.step(spec, with_random(run, seed=seed, step=step, **hyper))
            run.number = step - 1
            run.step(np.zeros(size, np.float32), seed=seed, **hyper)
            assert run.param.tobytes() == expected["param"].tobytes(), f"{size}, seed {seed}"
    run = Run(spec, start(spec, DRAWS))
    run.grad[...] = oracles.narrow(gradients(1, DRAWS)[0], spec.grad)  # type: ignore[arg-type]
    expected = reference.step(spec, with_random(run, seed=77, step=1))
    run.step(gradients(1, DRAWS)[0], seed=77)
    assert (run.param != expected["param"]).mean() < 300 / 65536 / 20


BAD_SEEDS = [-1, 2**64, 1.0, "1", True, [1], float("nan")]


@pytest.mark.parametrize("seed", BAD_SEEDS, ids=repr)
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    run = Run(RANDOM8, start(RANDOM8))
    before = run.param.tobytes() + run.moments()
    with pytest.raises(HyperOutOfRange, match=r"^seed: expected an integer") as caught:
        run.step(gradients(1)[0], seed=seed)
    assert f"got {seed!r}" in str(caught.value)
    assert run.param.tobytes() + run.moments() == before


@each(BF16, MASTER, SPLIT)
def test_a_seed_for_weights_without_random_numbers_is_refused(spec: tvm_qopt.KernelSpec) -> None:
    run = Run(spec, start(spec))
    before = run.param.tobytes() + run.moments()
    with pytest.raises(HyperOutOfRange, match=f"^seed: .*{spec.param_format}.* got 0"):
        run.step(gradients(1)[0], seed=0)
    assert run.param.tobytes() + run.moments() == before


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_the_ends_of_the_seeds_are_legal(seed: int) -> None:
    Run(RANDOM8, start(RANDOM8)).step(gradients(1)[0], seed=seed)


# The state beside the weights


def test_state_from_numpy_and_ml_dtypes() -> None:
    values = rows()[np.isfinite(rows())]
    for given in (oracles.f32_to_bf16(values), values.astype(ml_dtypes.bfloat16)):
        wide = np.asarray(given.view(ml_dtypes.bfloat16), np.float32)
        master = tvm_qopt.load(MASTER).init_state(given)["param_master"]
        assert master.dtype == np.float32 and master.tobytes() == wide.tobytes()
        low = tvm_qopt.load(SPLIT).init_state(given)["param_low"]
        assert low.dtype == np.uint16 and low.shape == given.shape and not low.any()
        assert restore(given.view(np.uint16), low).tobytes() == wide.tobytes()
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    master = tvm_qopt.load(MASTER_F16).init_state(half)["param_master"]
    assert master.tobytes() == half.astype(np.float32).tobytes()


@each(*FORMATTED)
def test_state_has_the_shape_of_the_weights_and_its_own_memory(spec: tvm_qopt.KernelSpec) -> None:
    flat = start(spec, 6 * 257)
    state = tvm_qopt.load(spec).init_state(flat.reshape(6, 257))
    (name,) = state.keys() & {"param_master", "param_low"}
    assert state[name].shape == (6, 257) and not np.shares_memory(state[name], flat)
    assert next(iter(state)) == name, "in the order of the kernel's arguments"


@each(*FORMATTED)
def test_torch_and_numpy_give_the_same_bits(spec: tvm_qopt.KernelSpec) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: it is an extra")
    kernel, theirs = tvm_qopt.load(spec), Run(spec, start(spec))
    kind = getattr(torch, spec.param)
    param = torch.from_numpy(start(spec).view(np.int16)).view(kind).clone()
    state = kernel.init_state(param)
    assert {"param_master": torch.float32, "param_low": torch.uint16}.items() >= {
        (name, state[name].dtype) for name in state.keys() & {"param_master", "param_low"}
    }
    grad = torch.zeros(SIZE, dtype=getattr(torch, spec.grad))
    plan = kernel.plan(param=param, grad=grad, state=state)
    for number, values in enumerate(gradients(3), start=1):
        grad.copy_(torch.from_numpy(values))
        theirs.step(values)
        assert plan.step(**HYPER, step=number)
    assert param.view(torch.int16).numpy().tobytes() == theirs.param.tobytes()
    for name, array in theirs.state.items():
        assert state[name].numpy().tobytes() == array.tobytes(), name


# Names and errors


def test_names_parse_back() -> None:
    names = {
        SPLIT: "adamw-dynamic8-b256-p_bf16_split-g_bf16",
        MASTER: "adamw-dynamic8-b256-p_bf16_master-g_bf16",
        MASTER_F16: "adamw-float32-b256-p_f16_master-g_f16",
        RANDOM8: "adamw-dynamic8-b256-p_bf16_stochastic-g_bf16",
    }
    for spec, name in names.items():
        assert spec.name == name and tvm_qopt.KernelSpec.parse(name) == spec
    short = tvm_qopt.KernelSpec.parse("adamw-fp8-p_f16_master-g_f32")
    assert short == of("fp8", param="float16", grad="float32", param_format="master")
    assert tvm_qopt.KernelSpec.parse("adamw-dynamic8-p_f32") == of(), "plain has no word"


@pytest.mark.parametrize(
    ("param_format", "dtype"),
    [
        ("master", "float32"),
        *(("split", dtype) for dtype in ("float32", "float16")),
        *(("stochastic", dtype) for dtype in ("float32", "float16")),
    ],
)
def test_a_dtype_that_a_format_cannot_have_names_param(param_format: str, dtype: str) -> None:
    with pytest.raises(UnsupportedSpec, match=r"\bparam\b") as caught:
        of(param=dtype, param_format=param_format)
    message = str(caught.value)
    assert param_format in message and repr(dtype) in message and "bfloat16" in message


def test_an_unknown_format_lists_those_that_are() -> None:
    text = "adamw-dynamic8-p_bf16_halves"
    for make in (
        functools.partial(of, param="bfloat16", param_format="halves"),
        functools.partial(tvm_qopt.KernelSpec.parse, text),
    ):
        with pytest.raises(UnknownName, match="unknown parameter format 'halves'") as caught:
            make()
        names = ("plain", "master", "split", "stochastic")
        assert all(name in str(caught.value) for name in names)


@each(*FORMATTED)
def test_what_is_beside_the_weights_is_checked(spec: tvm_qopt.KernelSpec) -> None:
    kernel, param = tvm_qopt.load(spec), start(spec)
    state = kernel.init_state(param)
    (name,) = state.keys() & {"param_master", "param_low"}
    good = state[name]
    for bad, error in (
        (good.astype(np.float64 if name == "param_master" else np.int16), DtypeMismatch),
        (good[:-1].copy(), ShapeMismatch),
        (None, ShapeMismatch),
    ):
        with pytest.raises(error, match=name):
            kernel.plan(param=param, grad=param.copy(), state={**state, name: bad})
    with pytest.raises(ShapeMismatch, match=name):
        tvm_qopt.load(BF16 if spec.param == "bfloat16" else PLAIN_F16).plan(
            param=param, grad=param.copy(), state=state
        )
