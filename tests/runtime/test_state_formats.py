"""The compiled AdamW with every pair of state formats that makes sense.

Each step is taken from the kernel's own state, which is read by tables written here.  The oracle is
float64; the bounds are what float32 roundings add up to, and the codes are the nearest but for that
distance from a midpoint.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracles
import pytest

import tvm_qopt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

EPS = 2.0**-23  # one ulp, relative to the lower end of a binade
SLOTS = ("exp_avg", "exp_avg_sq")
HYPER: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LINEAR_SIGNED = (np.minimum(np.arange(256) - 127, 127) / 127).astype(np.float32)
LINEAR_UNSIGNED = (np.arange(256) / 255).astype(np.float32)
CODES = np.arange(256, dtype=np.uint8)
DYNAMIC4 = [  # semantics, section 5.1
    *(-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0),
    *(0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0),
]
QUANTILE = statistics.NormalDist().inv_cdf
NF4 = sorted(
    [QUANTILE(float(p)) / QUANTILE(0.9677083) for p in np.linspace(0.9677083, 0.5, 9)]
    + [-QUANTILE(float(p)) / QUANTILE(0.9677083) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
)
LEVELS = {
    "dynamic8s": oracles.dynamic_map(True),
    "dynamic8u": oracles.dynamic_map(False),
    "sqrt_dynamic8u": oracles.dynamic_map(False),
    "linear8s": LINEAR_SIGNED,
    "linear8u": LINEAR_UNSIGNED,
    "sqrt8u": LINEAR_UNSIGNED,
    "fp8_e4m3": CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "fp8_e5m2": CODES.view(ml_dtypes.float8_e5m2).astype(np.float32),
    "dynamic4s": np.array(DYNAMIC4, np.float32),
    "linear4u": (np.arange(1, 17) / 16).astype(np.float32),
    "nf4": np.array(NF4, np.float32),
}
FOUR_BITS = ("dynamic4s", "linear4u", "nf4")
PEAK = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
ROOTS = ("sqrt8u", "sqrt_dynamic8u")

LEVEL_ULP = 2  # of a decoded level against its table (tests/pure/test_formats: 2, 1 and 0)
CODE_ULP = 4 + 2  # encode 4 (ibidem, worst of all), value * (peak / absmax) 1.5; measured 1.3
SCALE_ULP = 2  # absmax * (1 / peak), the reciprocal rounded too; measured 1.14
SUM_ULP = 2  # 1 - beta itself, g * g, their product, the sum: half an ulp each; measured 1.4
UPDATE_ULP = 4  # step size and eps themselves, step size * m, sqrt, + eps, /: half an ulp each
WEIGHT_ULP = 2  # decay itself, p * decay, and the sum

STATES = [  # state and block size
    ("float32", 256),
    ("bfloat16", 64),
    ("float16", 512),
    ("dynamic8", 256),
    ("linear8s+linear8u", 1024),
    ("fp8", 256),
    ("fp8_e5m2", 2048),
    ("dynamic8s+sqrt8u", 128),
    ("dynamic8s+sqrt_dynamic8u", 256),
    ("linear8s+sqrt8u", 4096),
    ("dynamic8s+float32", 256),
    ("4bit", 128),
    ("4bit", 64),
    ("nf4+linear4u", 128),
    ("nf4+linear4u", 64),
]
SPECS = [tvm_qopt.KernelSpec.of("adamw", state, block_size=block) for state, block in STATES]
PACKED = [spec for spec in SPECS if set(spec.state) & set(FOUR_BITS)]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel of this file, built in one child."""
    tvm_qopt.load_many(SPECS)


class Run:
    """Weights, gradients and state of one kernel."""

    def __init__(self, spec: tvm_qopt.KernelSpec, param: Array) -> None:
        self.spec, self.kernel = spec, tvm_qopt.load(spec)
        self.arrays = {"param": param.astype(np.float32), "grad": np.zeros(param.size, np.float32)}
        self.state = self.kernel.init_state(self.arrays["param"])
        self.arrays |= self.state
        self.plan = self.kernel.plan(
            param=self.arrays["param"], grad=self.arrays["grad"], state=self.state
        )
        self.number = 0

    def copy(self) -> dict[str, Array]:
        return {name: array.copy() for name, array in self.arrays.items()}

    def step(self, grad: Array, **hyper: Any) -> None:
        self.number += 1
        self.arrays["grad"][...] = grad
        assert self.plan.step(**{**HYPER, "step": self.number, **hyper})


def by_block(x: Array, size: int, block: int) -> F64:
    return np.repeat(np.asarray(x, np.float64), block)[:size]


def codes_of(format_: str, slot: str, arrays: Mapping[str, Array]) -> Array:
    """The code of each element; of 4 bits the even element is in the high half of a byte."""
    stored, size = arrays[f"{slot}_codes"], arrays["param"].size
    if format_ not in FOUR_BITS:
        return stored
    assert stored.dtype == np.uint8 and stored.shape == ((size + 1) // 2,)
    codes = np.empty(2 * stored.size, np.uint8)
    codes[::2], codes[1::2] = stored // 16, stored % 16
    return codes[:size]


def read(spec: tvm_qopt.KernelSpec, index: int, arrays: Mapping[str, Array]) -> F64:
    """What a slot holds, by table and in float64."""
    slot, format_ = SLOTS[index], spec.state[index]
    if format_ == "bfloat16":
        return np.asarray(oracles.bf16_to_f32(arrays[slot].view(np.uint16)), np.float64)
    if format_ not in LEVELS:
        return np.asarray(arrays[slot], np.float64)
    codes = codes_of(format_, slot, arrays)
    scale = by_block(arrays[f"{slot}_scale"], codes.size, spec.block_size)
    value: F64 = LEVELS[format_][codes].astype(np.float64) * scale
    return value**2 if format_ in ROOTS else value


def read_ulp(format_: str) -> float:
    """How far a kernel's float32 reading of a slot may lie from `read`, in ulp."""
    if format_ not in LEVELS:
        return 0
    once = LEVEL_ULP + 0.5
    return 2 * once + 0.5 if format_ in ROOTS else once


def expected(
    spec: tvm_qopt.KernelSpec, before: Mapping[str, Array], step: int, hyper: Mapping[str, Any]
) -> tuple[F64, F64, list[F64], list[F64]]:
    """The oracle's weights and moments, and by how much a float32 kernel may miss each."""
    m, v = (read(spec, index, before) for index in range(2))
    g, p = (before[name].astype(np.float64) for name in ("grad", "param"))
    m = np.where(v == 0, 0, m)  # the zero rule
    weight, *new = oracles.adamw(p, g, m, v, step=step, **hyper)
    b1, b2 = hyper["beta1"], hyper["beta2"]
    parts = [(b1 * np.abs(m), (1 - b1) * np.abs(g)), (b2 * v, (1 - b2) * g * g)]
    off = [
        EPS * (read_ulp(format_) * old + SUM_ULP * (old + added))
        for format_, (old, added) in zip(spec.state, parts, strict=True)
    ]
    c1, c2 = 1 - b1**step, 1 - b2**step
    low, high = (np.sqrt(np.maximum(new[1] + s * off[1], 0) / c2) + hyper["eps"] for s in (-1, 1))
    size = hyper["lr"] * (np.abs(new[0]) + off[0]) / c1 / low
    spread = size * (1 - low / high) + hyper["lr"] * off[0] / c1 / low
    slack = spread + EPS * (UPDATE_ULP * size + WEIGHT_ULP * np.abs(p))
    return weight, slack, new, off


def nearest_level(levels: F32, x: F64) -> F32:
    """The finite level nearest x, the lower on a tie."""
    ascending = np.unique(levels[np.isfinite(levels)])
    return ascending[oracles.nearest_code(x, ascending)]


def check_codes(format_: str, codes: Array, unit: F64, hair: F64) -> float:
    """Codes of values `unit` known within `hair`; the share whose level is exactly the nearest."""
    levels = LEVELS[format_]
    low, high = (nearest_level(levels, unit + s * hair) for s in (-1, 1))
    got = levels[codes]
    outside = np.flatnonzero(~((low <= got) & (got <= high)))
    if outside.size:
        i = outside[0]
        raise AssertionError(
            f"{format_}: {outside.size} codes, at {i} {got[i]} not in [{low[i]}, {high[i]}]"
        )
    return float((got == nearest_level(levels, unit)).mean())


def check_slot(
    spec: tvm_qopt.KernelSpec, index: int, after: Mapping[str, Array], value: F64, off: F64
) -> float:
    """A slot after a step whose moments are `value`, known within `off`."""
    slot, format_, size = SLOTS[index], spec.state[index], value.size
    if format_ == "float32":
        assert (np.abs(after[slot] - value) <= off).all()
        return 1.0
    if format_ in KINDS:
        low, high = ((value + s * off).astype(np.float32).astype(KINDS[format_]) for s in (-1, 1))
        got = read(spec, index, after)
        assert ((low.astype(np.float64) <= got) & (got <= high.astype(np.float64))).all()
        bits = value.astype(np.float32).astype(KINDS[format_]).view(np.uint16)
        return float((after[slot].view(np.uint16) == bits).mean())
    scale, peak = after[f"{slot}_scale"], PEAK.get(format_, 1.0)
    ends = [value - off, value, value + off]
    if format_ in ROOTS:
        ends = [np.sqrt(np.maximum(end, 0)) for end in ends]
    stored, hair = ends[1], np.maximum(ends[2] - ends[1], ends[1] - ends[0])
    starts = np.arange(0, size, spec.block_size)
    absmax = np.maximum.reduceat(np.abs(stored), starts)
    slack = np.maximum.reduceat(hair, starts) + EPS * SCALE_ULP * absmax
    assert (np.abs(scale.astype(np.float64) * peak - absmax) <= slack).all(), f"{slot}_scale"
    own = by_block(scale, size, spec.block_size)
    divisor = np.where(own == 0, 1, own)
    unit = np.where(own == 0, 0, stored / divisor)
    hair = np.where(own == 0, 0, hair / divisor + CODE_ULP * EPS * np.abs(unit))
    return check_codes(format_, codes_of(format_, slot, after), unit, hair)


def check_step(run: Run, before: Mapping[str, Array], **hyper: Any) -> float:
    """Assert that a step did what the oracle says; the least share of states that are equal."""
    spec, after, values = run.spec, run.arrays, {**HYPER, **hyper}
    before = {**before, "grad": after["grad"]}
    weight, slack, new, off = expected(spec, before, run.number, values)
    wrong = np.abs(after["param"] - weight) > slack
    assert not wrong.any(), f"weights at {np.flatnonzero(wrong)[:5]}"
    assert not after["nonfinite_count"].any()
    return min(check_slot(spec, i, after, new[i], off[i]) for i in range(2))


def gradient(rng: np.random.Generator, size: int, block: int) -> F32:
    """Heavy-tailed, some lanes 0, and a block of zeros where there are several."""
    grad = rng.standard_t(3, size)
    grad[::16] = 0
    if size > 2 * block:
        grad[block : 2 * block] = 0
    return grad.astype(np.float32)


@each_spec
def test_steps_from_its_own_state_against_the_oracle(spec: tvm_qopt.KernelSpec) -> None:
    """One element, a tail alone, blocks and a tail, and more than one thread is used for."""
    rng = np.random.default_rng(30)
    for size in (1, spec.block_size - 1, 4 * spec.block_size + 37, 132_109):
        run = Run(spec, rng.normal(size=size))
        for _ in range(3):
            before = run.copy()
            run.step(gradient(rng, size, spec.block_size))
            share = check_step(run, before)
            assert share > 0.999 or size < 132_109, "the bounds hide no rough encoder"


@pytest.mark.parametrize("spec", PACKED, ids=[spec.name for spec in PACKED])
@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 5001])
def test_4_bit_steps_of_every_kind_of_size(spec: tvm_qopt.KernelSpec, size: int) -> None:
    """Odd sizes have half a byte left over, which is 0."""
    rng = np.random.default_rng(36)
    run = Run(spec, rng.normal(size=size))
    for slot in SLOTS:
        assert run.state[f"{slot}_codes"].shape == ((size + 1) // 2,)
        assert run.state[f"{slot}_scale"].shape == (-(-size // spec.block_size),)
    for _ in range(4):
        before = run.copy()
        run.step(gradient(rng, size, spec.block_size) if size > 2 else rng.normal(size=size))
        assert check_step(run, before) > 0.998  # of 5001 a few may lie a hair from a midpoint
        for slot in SLOTS if size % 2 else ():
            assert run.state[f"{slot}_codes"][-1] % 16 == 0
    levels = {len(set(codes_of(f, s, run.arrays))) for f, s in zip(spec.state, SLOTS, strict=True)}
    assert size < 5001 or min(levels) > 8, "the case has something to lose"


@each_spec
def test_the_first_step_is_exact(spec: tvm_qopt.KernelSpec) -> None:
    """From zero moments each moment is a product of float32, so scales and 16-bit states have the
    bits of that, and codes differ from the nearest only CODE_ULP from a midpoint."""
    rng, size = np.random.default_rng(31), 5 * 4096 + 11
    grad = gradient(rng, size, spec.block_size)
    run = Run(spec, np.ones(size))
    run.step(grad)
    values = [grad * np.float32(1 - 0.9), (grad * grad) * np.float32(1 - 0.999)]
    for index, (slot, format_, value) in enumerate(zip(SLOTS, spec.state, values, strict=True)):
        if format_ not in LEVELS:
            kind = KINDS.get(format_, np.float32)
            assert run.arrays[slot].tobytes() == value.astype(kind).tobytes()
            continue
        stored = np.sqrt(value) if format_ in ROOTS else value
        starts = np.arange(0, size, spec.block_size)
        absmax = np.maximum.reduceat(np.abs(stored), starts)
        scale, peak = run.arrays[f"{slot}_scale"], PEAK.get(format_, 1.0)
        exact = absmax.astype(np.float64) / peak
        ulps = np.abs(scale - exact) / np.spacing(absmax / np.float32(peak))
        assert ulps.max() <= (SCALE_ULP if format_ in PEAK else 0), f"{slot}_scale"
        block = by_block(absmax / np.float64(peak), size, spec.block_size)
        unit = np.divide(stored, block, out=np.zeros(size), where=block != 0)
        share = check_codes(
            format_, codes_of(format_, slot, run.arrays), unit, CODE_ULP * EPS * np.abs(unit)
        )
        assert share > 0.9998, f"{index}: {share}"


NO_SQUARE = np.nextafter(1.0, 0.0).item()  # a beta2 under which a square never overflows 16 bits
TOP = {"float16": 65504, "bfloat16": 1e19}  # with finite squares in float32
CASTS = {
    **KINDS,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("state", sorted({f for spec in SPECS for f in spec.state} & {*CASTS}))
def test_ties_have_the_bits_of_ml_dtypes(state: str) -> None:
    """With beta1 = 0 the first moment is the gradient; with the peak as absmax its scale is 1."""
    spec = next(each for each in SPECS if each.state[0] == state)
    kind, width = CASTS[state], 8 if state in LEVELS else 16
    patterns = np.arange(2**width, dtype=np.uint8 if width == 8 else np.uint16)
    levels = np.unique(patterns.view(kind).astype(np.float32))
    levels = levels[np.abs(levels) <= PEAK.get(state, TOP.get(state, 0))]
    ties = oracles.midpoints(levels).astype(np.float32)
    rest = spec.block_size - 1
    rows = np.resize(ties, (-(-ties.size // rest), rest))
    grad = np.insert(rows, 7, PEAK.get(state, 1), axis=1).reshape(-1).astype(np.float32)
    run = Run(spec, np.ones(grad.size))
    run.step(grad, beta1=0.0, beta2=NO_SQUARE)
    stored = run.arrays["exp_avg_codes" if width == 8 else "exp_avg"]
    assert stored.tobytes() == grad.astype(kind).tobytes()
    assert not run.arrays["nonfinite_count"].any()


BEYOND = {  # state -> the least float32 that it would store as infinite: 65520, and half a unit up
    "float16": np.float32(65520),  # from the largest bfloat16
    "bfloat16": np.float32(2.0**128 - 2.0**119),
}


@pytest.mark.parametrize("state", sorted(BEYOND))
def test_an_element_that_would_be_stored_as_infinite_is_skipped_and_counted(state: str) -> None:
    """By the second moment, whose new value with beta2 = 0 is the gradient's square; it alone."""
    spec = next(each for each in SPECS if set(each.state) == {state})
    root = np.sqrt(np.float64(BEYOND[state]))
    near = np.float32(root) * (1 + EPS * np.arange(-3, 4)).astype(np.float32)
    rng, size = np.random.default_rng(37), 3 * spec.block_size + 5
    run = Run(spec, rng.normal(size=size))
    run.step(rng.normal(size=size))
    before, grad = run.copy(), rng.normal(size=size).astype(np.float32)
    places = spec.block_size - 3 + np.arange(near.size)  # some in the first block, some in the next
    grad[places] = near * rng.choice([-1, 1], near.size).astype(np.float32)
    beyond = grad * grad >= BEYOND[state]
    assert 0 < beyond.sum() < near.size and np.isfinite(grad * grad).all()
    run.step(grad, beta2=0.0)
    for name in ("param", *SLOTS):
        same = run.arrays[name][beyond].tobytes() == before[name][beyond].tobytes()
        assert same and (run.arrays[name] != before[name])[~beyond & (grad != 0)].mean() > 0.9
    counts = np.add.reduceat(beyond, np.arange(0, size, spec.block_size))
    assert run.arrays["nonfinite_count"].tolist() == counts.tolist()
    with np.errstate(over="ignore"):
        kept = (grad * grad).astype(KINDS[state])
    assert np.isfinite(kept[~beyond].astype(np.float32)).all()
    stored = run.arrays["exp_avg_sq"].view(np.uint16)
    np.testing.assert_array_equal(stored[~beyond], kept.view(np.uint16)[~beyond])


def test_a_first_moment_that_would_be_stored_as_infinite_is_skipped_and_counted() -> None:
    spec = next(each for each in SPECS if each.state == ("float16", "float16"))
    below, limit = np.nextafter(np.float32(65520), np.float32(0)), np.float32(65520)
    grad = np.array([below, limit, 1e5, -below, -limit, -1e5, 1], np.float32)
    run = Run(spec, np.ones(grad.size))
    run.step(grad, beta1=0.0, beta2=NO_SQUARE)
    assert run.arrays["exp_avg"].tolist() == [65504, 0, 0, -65504, 0, 0, 1]
    assert ((run.arrays["param"] == 1) == [False, True, True, False, True, True, False]).all()
    assert run.arrays["nonfinite_count"].tolist() == [4]


@each_spec
def test_a_short_last_block_has_the_bits_of_a_full_one(spec: tvm_qopt.KernelSpec) -> None:
    rng, block = np.random.default_rng(32), spec.block_size
    for rest in (1, block // 2 + 3, block - 1):
        size = 2 * block + rest
        param = rng.normal(size=3 * block)
        short, full = Run(spec, param[:size]), Run(spec, param)
        for _ in range(3):
            grad = gradient(rng, 3 * block, block)
            grad[size:] = 0
            short.step(grad[:size])
            full.step(grad)
        for name, array in short.arrays.items():
            other = full.arrays[name][: array.size]
            if array.size < size and name.endswith("_codes") and size % 2:  # two codes a byte
                assert array[-1] % 16 == 0
                other = np.append(other[:-1], other[-1] & 0xF0).astype(np.uint8)
            assert array.tobytes() == other.tobytes(), f"{name}, tail of {rest}"


@each_spec
def test_a_block_of_zeros_has_scale_zero_and_stays(spec: tvm_qopt.KernelSpec) -> None:
    rng, block = np.random.default_rng(33), spec.block_size
    size = 2 * block + 5
    run = Run(spec, np.ones(size))
    for _ in range(20):
        grad = rng.normal(size=size)
        grad[:block], grad[-5:] = 0, 0
        run.step(grad, weight_decay=0.0)
    zero = np.r_[0:block, 2 * block : size]
    assert (run.arrays["param"][zero] == 1).all()
    assert (run.arrays["param"][block : 2 * block] != 1).all()
    for index, slot in enumerate(SLOTS):
        assert (read(spec, index, run.arrays)[zero] == 0).all()
        if f"{slot}_scale" in run.arrays:
            assert run.arrays[f"{slot}_scale"][[0, 2]].tolist() == [0, 0]
            levels = LEVELS[spec.state[index]]
            least = np.nanmin(np.abs(levels))
            assert (levels[codes_of(spec.state[index], slot, run.arrays)[zero]] == least).all()
            assert least == 0 or spec.state[index] == "linear4u"


@each_spec
def test_a_scale_of_zero_decodes_to_zero_whatever_the_codes(spec: tvm_qopt.KernelSpec) -> None:
    """As a state that another library made may hold."""
    size = 3 * spec.block_size
    ours, clean = (Run(spec, np.ones(size)) for _ in range(2))
    for slot, format_ in zip(SLOTS, spec.state, strict=True):
        if format_ in LEVELS:
            finite = np.flatnonzero(np.isfinite(LEVELS[format_]))
            some = np.arange(256) if format_ in FOUR_BITS else finite
            ours.arrays[f"{slot}_codes"][...] = np.resize(some, ours.state[f"{slot}_codes"].shape)
    grad = gradient(np.random.default_rng(34), size, spec.block_size)
    for run in (ours, clean):
        run.step(grad)
    for name in ours.arrays:
        assert ours.arrays[name].tobytes() == clean.arrays[name].tobytes(), name


@each_spec
def test_a_finite_gradient_never_leaves_a_state_that_is_not(spec: tvm_qopt.KernelSpec) -> None:
    """From 1e-20 (its square is subnormal) to 1e6 (its square is beyond float16)."""
    for size in (1e-20, 1e-12, 1e-4, 1e4, 1e6):
        run = Run(spec, np.ones(300))
        for seed in range(3):
            run.step(size * np.random.default_rng(seed).normal(size=300))
            assert np.isfinite(run.arrays["param"]).all()
            for index in range(2):
                assert np.isfinite(read(spec, index, run.arrays)).all(), f"{size} in {SLOTS[index]}"


@each_spec
def test_decode_state_is_what_the_tables_say(spec: tvm_qopt.KernelSpec) -> None:
    rng, size = np.random.default_rng(35), 3 * spec.block_size + 7
    run = Run(spec, np.ones(size))
    for when in ("fresh", "after a step"):
        decoded = run.kernel.decode_state(run.state)
        for index, slot in enumerate(SLOTS):
            value = read(spec, index, run.arrays)
            slack = EPS * read_ulp(spec.state[index]) * np.abs(value)
            values = decoded[slot]
            if spec.state[index] in FOUR_BITS:
                assert values.shape == (size + size % 2,), "an odd size gives one more"
                values = values[:size]
            wrong = np.abs(values - value) > slack
            assert values.dtype == np.float32 and not wrong.any(), f"{slot}, {when}"
        run.step(gradient(rng, size, spec.block_size))


@functools.cache
def outlier_gradients() -> list[F32]:
    gradients = []
    for seed in range(100):
        grad = np.random.default_rng(seed).normal(size=8192) * 1e-4
        grad[3] = 50
        gradients.append(grad.astype(np.float32))
    return gradients


@functools.cache
def outlier_reference() -> F64:
    path = oracles.adamw_steps_reference(np.ones(8192), outlier_gradients(), lr=1e-3)
    return np.asarray(path[-1])


WIDE = {  # where v stays alive but m has only its lowest levels, 5.5e-7, 3.25e-6 and 7.75e-6
    "dynamic8s+sqrt_dynamic8u": 5.0,  # and sqrt(v) 7.75e-7 and 2.1e-6: measured 4.8
    "dynamic8s+float32": 6.0,  # measured 5.7
}


@each_spec
def test_outlier_in_a_block(spec: tvm_qopt.KernelSpec) -> None:
    """One gradient of 50 among 1e-4: no neighbour moves more than twice the reference's largest,
    nor freezes; two states keep a wider bound.  Measured at block 256, mean and largest over the
    reference's: 0.68 and 0.79 with every state under which v decodes to 0 (then the zero rule
    acts), 1.00 and 1.00 with bfloat16, 1.45 and 4.8 with sqrt_dynamic8u.  16 levels of v without a
    zero do freeze all beside an outlier (torchao's pair too: 1.0e-3 is the first step alone)."""
    run = Run(spec, np.ones(8192))
    for grad in outlier_gradients():
        run.step(grad, lr=1e-3, weight_decay=0.0)
    neighbours = np.delete(np.arange(spec.block_size), 3)
    ours, theirs = (
        np.abs(path[neighbours].astype(np.float64) - 1)
        for path in (run.arrays["param"], outlier_reference())
    )
    assert ours.mean() <= 2 * theirs.mean()
    assert ours.max() <= WIDE.get(spec.state_name, 2.0) * theirs.max()
    if spec in PACKED:
        assert 0.99e-3 < ours.mean() <= ours.max() < 1.01e-3
    else:
        assert ours.mean() > 0.5 * theirs.mean(), "not frozen either"
