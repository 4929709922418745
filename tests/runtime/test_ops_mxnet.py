"""MXNet's operators: the printed vectors, float64 formulas of their own, outputs and errors.

The formulas are section 2 of the semantics document, written here in float64 apart from the
package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import oracles
import pytest

import tvm_qopt
from tvm_qopt import ops as typed_ops
from tvm_qopt.errors import QoptError

Array = npt.NDArray[Any]
F32 = np.float32
ops: Any = typed_ops  # mypy cannot follow the unpacked arguments
N = 3 * 1371  # 16 blocks and a short one

FORMS = [("float32", False), ("float16", False), ("float16", True), ("bfloat16", True)]
"""Dtype of weight, and whether a float32 weight32 is beside it."""

forms = pytest.mark.parametrize(("dtype", "mixed"), FORMS, ids=lambda x: str(x))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """All kernels of these tests by one compiler process."""
    names = [f"sum_sq-dynamic8-b256-p_{d}-g_{d}" for d in ("f32", "f16", "bf16")]
    names += [f"dequantize-{long}-b256-p_{d}-g_{d}" for long, d in SHORT.items()]
    moments = "clip_gradient_on-nonfinite_propagate-zero_rule_off"
    for state, param, grad in LAYOUTS:
        for rule in ("lamb", "lans", "adamw_mxnet"):
            names.append(f"{rule}-{state}-b256-p_{param}-g_{grad}-{moments}")
        g = "f32" if "master" in param else grad
        names.append(f"sgd-dynamic8-b256-p_{param}-g_{g}-momentum_off-nonfinite_propagate")
        held = param if "master" not in param else "f32"
        names.append(f"lamb_phase1-{state}-b256-p_{held}-g_{grad}-{moments}")
    names.append(f"lamb_phase1-float32-b256-p_f32-g_f16-{moments}-bias_correction_off")
    tvm_qopt.load_many(names)


SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
LAYOUTS = [
    ("float32", "f32", "f32"),
    ("float16", "f16", "f16"),
    ("float32", "f16_master", "f16"),
    ("float32", "bf16_master", "bf16"),
]


# The formulas, in float64


def gradient(grad: Array, rescale: float, clip: float) -> Array:
    scaled = grad.astype(np.float64) * rescale
    return scaled if clip < 0 else np.where(abs(scaled) > clip, np.copysign(clip, scaled), scaled)


def moments(g: Array, m: Array, v: Array, b1: float, b2: float) -> tuple[Array, Array]:
    return b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g


def bound(norm: float, lower: float, upper: float) -> float:
    """Section 2.2: the lower bound first, the upper one by a minimum."""
    norm = max(norm, lower) if lower >= 0 else norm
    return min(norm, upper) if upper >= 0 else norm


def ratio(n: float, r2: float) -> float:
    return 1.0 if n == 0 or r2 == 0 else n / r2


def phase1(
    w: Array, grad: Array, m: Array, v: Array, *, b1: float, b2: float, eps: float, t: int,
    wd: float, rescale: float, clip: float, bias: bool = True,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Section 2.1: g, mean, var."""
    m, v = moments(gradient(grad, rescale, clip), m, v, b1, b2)
    c1, c2 = (1 - b1**t, 1 - b2**t) if bias else (1.0, 1.0)
    return (m / c1) / (np.sqrt(v / c2) + eps) + wd * w, m, v


def phase2(w: Array, g: Array, r1: float, r2: float, lr: float, lo: float, up: float) -> Array:
    return w - lr * ratio(bound(r1, lo, up), r2) * g


def lamb(
    w: Array, grad: Array, m: Array, v: Array, *, lr: float, lo: float, up: float, **how: Any
) -> tuple[Array, Array, Array]:
    """Section 2.5: weight, mean, var."""
    g, m, v = phase1(w, grad, m, v, **how)
    return phase2(w, g, float(np.linalg.norm(w)), float(np.linalg.norm(g)), lr, lo, up), m, v


def lans(
    w: Array, grad: Array, m: Array, v: Array, *, lr: float, b1: float, b2: float, eps: float,
    t: int, wd: float, rescale: float, clip: float, lo: float, up: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Section 2.6; the norm of weight32 in mp mode, as the package documents."""
    g = grad * rescale
    norm = np.linalg.norm(g)
    g = gradient(g / norm if norm else g, 1.0, clip)
    m, v = moments(g, m, v, b1, b2)
    s = np.sqrt(v / (1 - b2**t)) + eps
    big_m, big_g = (m / (1 - b1**t)) / s + wd * w, g / s + wd * w
    n = bound(float(np.linalg.norm(w)), lo, up)
    a_m, a_g = (ratio(n, float(np.linalg.norm(x))) for x in (big_m, big_g))
    return w - lr * b1 * a_m * big_m - lr * (1 - b1) * a_g * big_g, m, v


def adamw(
    w: Array, grad: Array, m: Array, v: Array, *, lr: float, eta: float, b1: float, b2: float,
    eps: float, wd: float, rescale: float, clip: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Section 2.7: weight, mean, var."""
    m, v = moments(gradient(grad, rescale, clip), m, v, b1, b2)
    return w - eta * (lr * m / (np.sqrt(v) + eps) + wd * w), m, v


# Tensors and comparison


def tensors(dtype: Any, mixed: bool, *, n: int = N, seed: int = 5) -> dict[str, Any]:
    """weight, grad, mean, var[, weight32], two-dimensional; weight is the rounded weight32."""
    rng = np.random.default_rng(seed)

    def some(scale: float) -> Array:
        return (rng.standard_normal(n) * scale).astype(F32).reshape(3, -1)

    weight32, held = some(1), "float32" if mixed else dtype
    arrays = {
        "weight": oracles.narrow(weight32, dtype),
        "grad": oracles.narrow(some(0.5), dtype),
        "mean": some(0.1).astype(held),
        "var": (some(0.1) ** 2 + F32(1e-3)).astype(held),  # normal numbers of float16
    }
    return {**arrays, **({"weight32": weight32} if mixed else {})}


def wide(arrays: dict[str, Any], dtype: Any) -> list[Array]:
    """The true weight, grad, mean and var, as float64."""
    weight = arrays.get("weight32", arrays["weight"])
    held = [oracles.widen(arrays["grad"], dtype), arrays["mean"], arrays["var"]]
    first = weight if "weight32" in arrays else oracles.widen(weight, dtype)
    return [np.asarray(x, np.float64) for x in (first, *held)]


HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def near(got: Array, expected: Array, dtype: Any, *terms: Array) -> None:
    """One rounding to the dtype, and float32 arithmetic: a few 2^-24 of the largest term.

    The bound of 4e-7 a term is twice the worst seen; without the terms cancellation would fail it.
    """
    values = oracles.widen(got, dtype).astype(np.float64)
    size = np.maximum.reduce([abs(expected), *map(abs, terms)])
    assert np.isfinite(values).all()
    wrong = abs(values - expected) - abs(expected) * HALF_ULP[dtype] - size * 8e-7
    assert (wrong <= 2.0**-25).all(), wrong.max()  # half a step of float16's denormals


def near_moments(arrays: dict[str, Any], m: Array, v: Array, before: list[Array], g: Array) -> None:
    dtype = str(arrays["mean"].dtype)
    near(arrays["mean"], m, dtype, before[2], g)
    near(arrays["var"], v, dtype, before[3], g * g)


def copied(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array.copy() for name, array in arrays.items()}


def same(a: dict[str, Any], b: dict[str, Any], *but: str) -> None:
    for name in a:
        assert name in but or a[name].tobytes() == b[name].tobytes(), name


def one(value: float, dtype: Any = F32) -> Array:
    return np.array([value], dtype)


# The vectors of section 2.8


def vector() -> dict[str, Any]:
    weight32 = np.array([0.5, -0.25, 1.0], F32)
    return {
        "weight": weight32.astype(np.float16),
        "grad": np.array([0.1, -0.2, 0.3], np.float16),
        "mean": np.array([0.01, 0, -0.02], F32),
        "var": np.array([1e-4, 2e-4, 0], F32),
        "weight32": weight32,
    }


@pytest.mark.parametrize(
    ("bias_correction", "g"),
    [(True, [0.28445578, -0.11504255, -0.78850186]), (False, [1.3882476, -0.55957747, -3.94131])],
)
def test_vector_of_phase_1(bias_correction: bool, g: list[float]) -> None:
    a = vector()
    got = ops.mp_lamb_update_phase1(
        *a.values(),
        t=3,
        wd=0.01,
        rescale_grad=0.5,
        clip_gradient=0.08,
        bias_correction=bias_correction,
    )
    # printed with float32's 1 - beta2, 1.3e-5 off ours; var enters g by its root
    np.testing.assert_allclose(a["mean"], [0.01399878, -0.008000001, -0.009999998], rtol=3e-7)
    np.testing.assert_allclose(a["var"], [1.0239874e-4, 2.0619991e-4, 6.3999169e-6], rtol=1.4e-5)
    np.testing.assert_allclose(got, g, rtol=7e-6)
    assert got.dtype == F32
    same(a, vector(), "mean", "var")


PHASE2 = [
    (-1, -1, [0.46148387, -0.2344229, 1.1067655]),
    (2, -1, [0.43276072, -0.2228064, 1.186385]),
    (-1, 0.5, [0.48319018, -0.2432016, 1.0465963]),
    (-1, 0, [0.47155443, -0.23849575, 1.0788502]),
]


@pytest.mark.parametrize(("lower", "upper", "expected"), PHASE2)
@pytest.mark.parametrize("mixed", [False, True])
def test_vector_of_phase_2(lower: float, upper: float, expected: list[float], mixed: bool) -> None:
    a = vector()
    g = np.array([0.28445578, -0.11504255, -0.78850186], F32)
    norms, how = (one(1.145644), one(0.8460999)), {"lower_bound": lower, "upper_bound": upper}
    if mixed:
        out = ops.mp_lamb_update_phase2(a["weight"], g, *norms, a["weight32"], lr=0.1, **how)
        np.testing.assert_allclose(a["weight32"], expected, rtol=2e-7)  # one float32 rounding
        assert out.tobytes() == a["weight32"].astype(np.float16).tobytes()
        same(a, vector(), "weight32")
    else:
        out = ops.lamb_update_phase2(a["weight32"], g, *norms, lr=0.1, **how)
        np.testing.assert_allclose(out, expected, rtol=2e-7)
        same(a, vector())


def test_vector_of_adamw() -> None:
    a = vector()
    out = ops.mp_adamw_update(*a.values(), one(0.5), lr=1, eta=0.01, wd=0.01)
    # var is 1.3e-5 off theirs, the step at most 1.4e-2 of the weight: 1e-7, and an ulp
    np.testing.assert_allclose(a["weight32"], [0.48611617, -0.24307266, 1.0062184], rtol=3e-7)
    assert out.tobytes() == a["weight32"].astype(np.float16).tobytes()


# Against the formulas


@forms
@pytest.mark.parametrize("rescale", [0.7, -0.7])
@pytest.mark.parametrize("clip", [-1.0, 0.0, 0.2])
def test_phase_1(dtype: Any, mixed: bool, rescale: float, clip: float) -> None:
    a = tensors(dtype, mixed)
    before, start = wide(a, dtype), copied(a)
    call = ops.mp_lamb_update_phase1 if mixed else ops.lamb_update_phase1
    how = {"beta1": 0.8, "beta2": 0.98, "epsilon": 1e-4, "t": 4, "wd": 0.1}
    g = call(*a.values(), rescale_grad=rescale, clip_gradient=clip, **how)
    numbers: dict[str, Any] = {"b1": 0.8, "b2": 0.98, "eps": 1e-4, "t": 4, "wd": 0.1}
    expected, m, v = phase1(*before, **numbers, rescale=rescale, clip=clip)
    assert g.dtype == a["mean"].dtype and g.shape == a["weight"].shape
    scaled = gradient(before[1], rescale, clip)
    # the direction is up to 1 / sqrt(v) times the terms of mean
    steep = (abs(before[2]) + abs(scaled)) / np.sqrt(v)
    near(g, expected, str(g.dtype), steep, before[0])
    near_moments(a, m, v, before, scaled)
    same(a, start, "mean", "var")


@forms
@pytest.mark.parametrize(
    ("r1", "r2", "lower", "upper"),
    [(3, 2, -1, -1), (3, 2, 5, -1), (3, 2, -1, 1), (3, 2, 5, 1), (3, 2, -1, 0), (3, 2, 0, -1),
     (0, 2, -1, -1), (3, 0, -1, -1), (0, 2, 4, -1), (0, 2, 0, 0)],
)  # fmt: skip
def test_phase_2(dtype: Any, mixed: bool, r1: float, r2: float, lower: float, upper: float) -> None:
    a = tensors(dtype, mixed)
    held = "float32" if mixed else dtype
    g = (a["mean"] * 3).astype(held)
    before, given, start = wide(a, dtype)[0], g.copy(), copied(a)
    how = {"lr": 0.01, "lower_bound": lower, "upper_bound": upper}
    norms = (one(r1, held), one(r2, held))
    if mixed:
        out = ops.mp_lamb_update_phase2(a["weight"], g, *norms, a["weight32"], **how)
        assert out.tobytes() == oracles.narrow(a["weight32"], dtype).tobytes()
    else:
        out = ops.lamb_update_phase2(a["weight"], g, *norms, **how)
    expected = phase2(before, g.astype(np.float64), r1, r2, 0.01, lower, upper)
    near(a["weight32"] if mixed else out, expected, held, before)
    assert g.tobytes() == given.tobytes()
    same(a, start, "weight32")


HOW = {"beta1": 0.8, "beta2": 0.98, "epsilon": 1e-4}
NUMBERS: dict[str, Any] = {"b1": 0.8, "b2": 0.98, "eps": 1e-4}


@forms
@pytest.mark.parametrize("rule", ["lamb", "lans"])
@pytest.mark.parametrize(("lower", "upper"), [(-1, -1), (100, -1), (-1, 10), (-1, 0)])
def test_multi_lamb_and_lans(
    dtype: Any, mixed: bool, rule: str, lower: float, upper: float
) -> None:
    """Two tensors of different sizes, three steps of each, from the state that is stored."""
    groups = [tensors(dtype, mixed), tensors(dtype, mixed, n=21, seed=6)]
    lrs, wds, clip = [0.01, 0.02], [0.1, 0.0], 0.3 if rule == "lamb" else 0.1
    call = getattr(ops, f"multi_mp_{rule}_update" if mixed else f"multi_{rule}_update")
    for step in (1, 2, 3):
        before = [wide(a, dtype) for a in groups]
        steps = [step, step + 10]
        out = call(
            *(array for a in groups for array in a.values()),
            learning_rates=lrs,
            wds=wds,
            step_count=steps,
            rescale_grad=0.7,
            clip_gradient=clip,
            lower_bound=lower,
            upper_bound=upper,
            out=[a["weight"] for a in groups],
            **HOW,
        )
        for i, a in enumerate(groups):
            w, m, v = {"lamb": lamb, "lans": lans}[rule](
                *before[i], lr=lrs[i], wd=wds[i], t=steps[i], rescale=0.7, clip=clip,
                lo=lower, up=upper, **NUMBERS,
            )  # fmt: skip
            assert out[i] is a["weight"]
            held = "float32" if mixed else dtype
            near(a["weight32"] if mixed else a["weight"], w, held, before[i][0])
            if mixed:
                assert a["weight"].tobytes() == oracles.narrow(a["weight32"], dtype).tobytes()
            scaled = gradient(before[i][1], 0.7, clip)
            near_moments(a, m, v, before[i], scaled)


@forms
@pytest.mark.parametrize("clip", [-1.0, 0.0, 0.2])
@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_adamw(dtype: Any, mixed: bool, clip: float, scale: float) -> None:
    a = tensors(dtype, mixed)
    before, start = wide(a, dtype), copied(a)
    call = ops.mp_adamw_update if mixed else ops.adamw_update
    how: dict[str, Any] = {"lr": 0.3, "eta": 0.02, "wd": 0.1}
    out = call(*a.values(), one(scale), clip_gradient=clip, **how, **HOW)
    numbers = {**how, **NUMBERS, "rescale": scale, "clip": clip}
    w, m, v = adamw(*before, **numbers)
    near(a["weight32"] if mixed else out, w, "float32" if mixed else dtype, before[0])
    scaled = gradient(before[1], scale, clip)
    near_moments(a, m, v, before, scaled)
    same(a, start, "mean", "var", "weight32")  # grad too: MXNet's overwrites it
    if mixed:
        assert out.tobytes() == oracles.narrow(a["weight32"], dtype).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_mp_operators_do_to_weight32_what_the_plain_ones_do_to_a_weight(dtype: Any) -> None:
    mixed = tensors(dtype, True)
    plain = {**copied(mixed), "grad": oracles.widen(mixed["grad"], dtype)}
    plain["weight"] = plain.pop("weight32")
    how: dict[str, Any] = {"lr": 0.3, "eta": 0.02, "wd": 0.1}
    ops.mp_adamw_update(*mixed.values(), 0.5, **how)
    ops.adamw_update(*plain.values(), 0.5, **how, out=plain["weight"])
    for name, other in (("mean", "mean"), ("var", "var"), ("weight32", "weight")):
        np.testing.assert_array_max_ulp(mixed[name], plain[other], 1)  # contraction


# Lists


@forms
@pytest.mark.parametrize("rule", ["lamb", "lans", "adamw"])
def test_a_list_gives_the_bits_of_one_tensor_at_a_time(dtype: Any, mixed: bool, rule: str) -> None:
    """60 tensors: MXNet's kernels hold 45 and 50."""
    sizes = [3 * (1 + 7 * (i % 5)) for i in range(60)]
    together = [tensors(dtype, mixed, n=n, seed=i) for i, n in enumerate(sizes)]
    apart = [copied(a) for a in together]
    call = getattr(ops, f"multi_mp_{rule}_update" if mixed else f"multi_{rule}_update")
    single = ops.mp_adamw_update if mixed else ops.adamw_update
    lrs, wds = [0.01 * (i + 1) for i in range(60)], [0.001 * i for i in range(60)]
    flat = [array for a in together for array in a.values()]
    if rule == "adamw":
        outs = call(*flat, one(0.5), lrs=lrs, wds=wds, etas=lrs[::-1], num_weights=60)
        for i, a in enumerate(apart):
            out = single(*a.values(), one(0.5), lr=lrs[i], wd=wds[i], eta=lrs[59 - i])
            assert out.tobytes() == outs[i].tobytes()
    else:
        steps = [*range(1, 61)]
        how = {"step_count": steps, "num_tensors": 60}
        outs = call(*flat, learning_rates=lrs, wds=wds, **how)
        for i, a in enumerate(apart):
            (out,) = call(*a.values(), learning_rates=[lrs[i]], wds=[wds[i]], step_count=[steps[i]])
            assert out.tobytes() == outs[i].tobytes()
    for a, b in zip(together, apart, strict=True):
        same(a, b)


@forms
def test_multi_lamb_is_the_two_phases(dtype: Any, mixed: bool) -> None:
    a, b = tensors(dtype, mixed), tensors(dtype, mixed)
    how = {"beta1": 0.8, "beta2": 0.98, "rescale_grad": 0.7, "clip_gradient": 0.3}
    call = ops.multi_mp_lamb_update if mixed else ops.multi_lamb_update
    (out,) = call(*a.values(), learning_rates=[0.01], wds=[0.1], step_count=[4], **how)
    start = wide(b, dtype)[0]
    first = ops.mp_lamb_update_phase1 if mixed else ops.lamb_update_phase1
    g = first(*b.values(), t=4, wd=0.1, **how)
    r1, r2 = one(ops.global_norm([b.get("weight32", b["weight"])])), one(ops.global_norm([g]))
    if mixed:
        ops.mp_lamb_update_phase2(b["weight"], g, r1, r2, b["weight32"], lr=0.01)
        out, two = a["weight32"], b["weight32"]
    else:
        two = ops.lamb_update_phase2(b["weight"], g, r1, r2, lr=0.01)
    # the norms are rounded to float32 between the phases, and g to its dtype
    ulp = {"float32": 2.0**-23, "float16": 2.0**-10}[str(two.dtype)]
    new = two.astype(np.float64)
    assert (abs(out - new) <= ulp * (abs(new) + 2 * abs(new - start)) + 2.0**-24).all()
    same({n: a[n] for n in ("mean", "var")}, b)


def test_no_tensors() -> None:
    lists: dict[str, Any] = {"learning_rates": [], "wds": [], "step_count": []}
    assert ops.multi_lamb_update(**lists) == ops.multi_mp_lans_update(**lists, out=[]) == []
    assert ops.multi_adamw_update(1.0, lrs=[], wds=[], etas=[]) == []


# Outputs


def outputs(name: str, a: dict[str, Any], out: Any) -> Any:
    """One call of an operator on the tensors of a form."""
    if "phase1" in name:
        return getattr(ops, name)(*a.values(), t=1, wd=0.1, out=out)
    if "phase2" in name:
        g = a["mean"]
        last = (a["weight32"],) if "weight32" in a else ()
        return getattr(ops, name)(a["weight"], g, one(2), one(1), *last, lr=0.1, out=out)
    how: dict[str, Any]
    if "adamw" in name:
        how = {"lrs": [1], "wds": [0.1], "etas": [0.1]} if "multi" in name else {}
        how = how or {"lr": 1, "wd": 0.1, "eta": 0.1}
        given = [*a.values(), one(0.5)]
    else:
        how, given = {"learning_rates": [0.1], "wds": [0.1], "step_count": [1]}, [*a.values()]
    if "multi" not in name:
        return getattr(ops, name)(*given, **how, out=out)
    return getattr(ops, name)(*given, **how, out=None if out is None else [out])[0]


def updates() -> Iterator[tuple[str, str, bool]]:
    for dtype, mixed in FORMS:
        mp = "mp_" if mixed else ""
        yield f"{mp}lamb_update_phase2", dtype, mixed
        yield f"{mp}adamw_update", dtype, mixed
        for rule in ("lamb", "lans", "adamw"):
            yield f"multi_{mp}{rule}_update", dtype, mixed


@pytest.mark.parametrize(("name", "dtype", "mixed"), [*updates()], ids=lambda x: str(x))
def test_out_is_weight_or_a_new_array_or_the_given_one(name: str, dtype: Any, mixed: bool) -> None:
    start = tensors(dtype, mixed)
    new, place, view, other = (copied(start) for _ in range(4))
    result = outputs(name, new, None)
    assert result.dtype == new["weight"].dtype and result.shape == new["weight"].shape
    assert not np.shares_memory(result, new["weight"])
    assert outputs(name, place, place["weight"]) is place["weight"]
    outputs(name, view, view["weight"][:])
    given = np.zeros_like(other["weight"])
    assert outputs(name, other, given) is given
    bits = result.tobytes()
    assert bits != start["weight"].tobytes()
    assert bits == place["weight"].tobytes() == view["weight"].tobytes() == given.tobytes()
    same(new, start, "mean", "var", "weight32")
    assert "phase2" in name or new["mean"].tobytes() != start["mean"].tobytes()
    assert not mixed or new["weight32"].tobytes() != start["weight32"].tobytes()
    for a in (place, view, other):
        same(a, new, "weight")


def test_out_of_phase_1() -> None:
    for dtype, mixed in FORMS:
        a, b = tensors(dtype, mixed), tensors(dtype, mixed)
        name = "mp_lamb_update_phase1" if mixed else "lamb_update_phase1"
        given = np.ones_like(a["mean"])
        assert outputs(name, a, given) is given
        assert given.tobytes() == outputs(name, b, None).tobytes()


def test_a_weight_with_a_nan_is_copied_with_it() -> None:
    """The new weight is the kernel's, from the copy of the old one."""
    a = tensors("float16", False)
    a["weight"][0, 0] = np.nan
    out = ops.adamw_update(*a.values(), 1.0, lr=1, eta=0.1)
    assert np.isnan(out[0, 0]) and np.isfinite(out.reshape(-1)[1:]).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (), (256,), (2, 0)])
def test_shapes(shape: tuple[int, ...]) -> None:
    w, grad, mean, var = (np.full(shape, x, F32) for x in (1, 0.5, 0, 0))
    g = ops.lamb_update_phase1(w, grad, mean, var, t=1, wd=0.0)
    np.testing.assert_allclose(g, np.ones(shape), rtol=1e-5)  # epsilon beside 0.5
    (out,) = ops.multi_lamb_update(
        w, grad, mean, var, learning_rates=[0.1], wds=[0.0], step_count=[2]
    )
    assert out.shape == shape and (out < 1).all()


# A scale that is 0, NaN or infinite


SCALES = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e39, 1e-50]  # 1e39: as float32


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("multi", [False, True])
@forms
def test_a_bad_scale_changes_nothing(dtype: Any, mixed: bool, multi: bool, scale: float) -> None:
    a = tensors(dtype, mixed)
    start, mp = copied(a), "mp_" if mixed else ""
    given = np.zeros_like(a["weight"])
    how: dict[str, Any]
    if multi:
        call = getattr(ops, f"multi_{mp}adamw_update")
        how = {"lrs": [1], "wds": [0.1], "etas": [0.1]}
    else:
        call = getattr(ops, f"{mp}adamw_update")
        how = {"lr": 1, "wd": 0.1, "eta": 0.1}
    for scales in (np.array([scale]), scale):
        new = call(*a.values(), scales, **how)
        call(*a.values(), scales, **how, out=[given] if multi else given)
        call(*a.values(), scales, **how, out=[a["weight"]] if multi else a["weight"])
        same(a, start)
        assert (given == 0).all()
        assert (new[0] if multi else new).tobytes() == a["weight"].tobytes()


def test_a_bad_scale_does_not_hide_bad_input() -> None:
    a = tensors("float32", False)
    a["var"] = a["var"].astype(np.float16)
    with pytest.raises(QoptError, match=r"^var: expected float32, got float16"):
        ops.adamw_update(*a.values(), 0.0, lr=1, eta=1)


# What is not finite


@forms
def test_a_nan_gradient_spoils_its_own_element(dtype: Any, mixed: bool) -> None:
    for name in ("adamw_update", "multi_lamb_update", "multi_lans_update"):
        a = tensors(dtype, mixed)
        a["grad"].reshape(-1)[7] = oracles.narrow(np.array([np.nan], F32), dtype)[0]
        if mixed:
            name = name.replace("adamw", "mp_adamw").replace("multi_", "multi_mp_")
        out = oracles.widen(outputs(name, a, a["weight"]), dtype).reshape(-1)
        assert np.isnan(out[7]) and np.isfinite(np.delete(out, 7)).all()
        assert a["mean"].reshape(-1)[7] == 0 == a["var"].reshape(-1)[7]


def test_zero_weights_and_zero_gradients() -> None:
    """Zero norms give the plain lr; LANS leaves a zero gradient, where MXNet's 0/0 is NaN."""
    w, zero = np.ones(300, F32), np.zeros(300, F32)
    moved = [np.zeros(300, F32) for _ in range(2)]
    call: Callable[..., Any]
    for call in (ops.multi_lamb_update, ops.multi_lans_update):
        how = {"learning_rates": [0.1], "wds": [0.0], "step_count": [1]}
        (out,) = call(w, zero, *(x.copy() for x in moved), **how)
        assert (out == w).all()
        (out,) = call(zero, w, *(x.copy() for x in moved), **how)
        # m / sqrt(v) is 1 but for epsilon, which stands beside 1 or beside 300 ** -0.5
        np.testing.assert_allclose(out, -0.1, rtol=2e-5)


# Norms


def test_global_norm() -> None:
    rng = np.random.default_rng(1)
    x = [rng.standard_normal(n).astype(F32) for n in (100_003, 1, 0, 256)]
    x[0] = x[0][1:]  # an odd address
    held: list[Any] = [
        x[0],
        x[1].reshape(()),
        x[2],
        oracles.f32_to_bf16(x[3]),
        x[0].astype(np.float16),
    ]
    wide = [*x[:3], oracles.bf16_to_f32(oracles.f32_to_bf16(x[3])), held[4].astype(F32)]
    expected = np.linalg.norm(np.concatenate([a.reshape(-1).astype(np.float64) for a in wide]))
    # a block's sum has 256 float32 roundings in vector lanes: well below 256 / 2 * 2^-24
    np.testing.assert_allclose(ops.global_norm(held), expected, rtol=1e-6)
    assert ops.global_norm([]) == 0.0 == ops.global_norm(iter([x[2]]))
    assert type(ops.global_norm(held)) is float


def test_norms_are_the_same_bits_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(2)
    x = [rng.standard_normal(n).astype(F32) for n in (3_000_001, 70_000)]
    a = {"weight": x[0], "grad": x[0][::-1].copy(), "mean": x[0] * 0, "var": x[0] * 0}
    before, seen = tvm_qopt.get_num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            tvm_qopt.set_num_threads(threads)
            b = copied(a)
            (out,) = ops.multi_lamb_update(
                *b.values(), learning_rates=[0.1], wds=[0.1], step_count=[1]
            )
            seen.add((ops.global_norm(x), ops.multi_sum_sq(*x).tobytes(), out.tobytes()))
    finally:
        tvm_qopt.set_num_threads(before)
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_norm_of_what_is_not_finite(dtype: Any) -> None:
    for values, expected in (
        ([1, np.inf], np.inf),
        ([-np.inf, 1], np.inf),
        ([np.nan, np.inf], np.nan),
        ([np.nan, 1], np.nan),
    ):
        x = oracles.narrow(np.array(values, F32), dtype)
        np.testing.assert_equal(ops.global_norm([x, np.ones(2, F32)]), expected)
        np.testing.assert_equal(ops.multi_sum_sq(x)[0], expected)
    assert np.isnan(ops.global_norm([np.array([np.inf], F32), np.array([np.nan], F32)]))
    assert ops.global_norm([np.array([1e20], F32)]) == np.inf  # its square is beyond float32


def test_multi_sum_sq() -> None:
    rng = np.random.default_rng(3)
    x = [rng.standard_normal(n).astype(t) for n, t in ((1000, F32), (7, np.float16), (0, F32))]
    got = ops.multi_sum_sq(*x, num_arrays=3)
    expected = [(a.astype(np.float64) ** 2).sum() for a in x]
    assert got.dtype == F32 and got.shape == (3,)
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # as above
    assert ops.multi_sum_sq().shape == (0,)
    with pytest.raises(QoptError, match=r"^num_arrays: expected 3.*got 2"):
        ops.multi_sum_sq(*x, num_arrays=2)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (np.ones((2, 2), F32), "^tensors: expected a list of arrays, got ndarray"),
        (3, "^tensors: .*int"),
        ([np.ones(2, F32), np.ones(2)], r"^tensors\[1\]: expected one of float32.*float64"),
        ([np.ones(2, np.int32)], r"^tensors\[0\]: .*int32"),
        ([np.ones(4, F32)[::2]], r"^tensors\[0\]: .*contiguous"),
        ([None], r"^tensors\[0\]: expected an array"),
    ],
)
def test_bad_input_of_global_norm(tensors: Any, says: str) -> None:
    with pytest.raises(QoptError, match=says):
        ops.global_norm(tensors)


# Other libraries


def test_ml_dtypes() -> None:
    """bfloat16 arrays of NumPy by name; the result is of the weight's dtype."""
    ml_dtypes = pytest.importorskip(
        "ml_dtypes", reason="ml_dtypes is not installed: it is an extra"
    )
    a, b = tensors("bfloat16", True), tensors("bfloat16", True)
    b |= {n: b[n].view(ml_dtypes.bfloat16) for n in ("weight", "grad")}
    expected, got = (ops.mp_adamw_update(*x.values(), 0.5, lr=1, eta=0.1) for x in (a, b))
    assert got.dtype == ml_dtypes.bfloat16 and got.tobytes() == expected.tobytes()
    assert ops.global_norm([b["grad"]]) == ops.global_norm([a["grad"]])
    b["grad"][0, 0] = np.nan
    assert np.isnan(ops.global_norm([b["grad"]]))


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip(
        "torch", reason="torch is not installed: pip install tvm_qopt[torch]"
    )


@forms
def test_torch_tensors_get_the_bits_of_numpy(torch: Any, dtype: Any, mixed: bool) -> None:
    for name in [n for n, d, m in updates() if (d, m) == (dtype, mixed)]:
        a = tensors(dtype, mixed)
        t = {n: torch.from_numpy(x.copy()) for n, x in a.items()}
        for n in ("weight", "grad"):
            t[n] = t[n].view(getattr(torch, dtype))
        expected, got = outputs(name, a, None), outputs(name, t, None)
        assert isinstance(got, torch.Tensor) and got.dtype == t["weight"].dtype
        assert got.view(torch.uint8).numpy().tobytes() == expected.tobytes()
        for n in a:
            assert t[n].view(torch.uint8).numpy().tobytes() == a[n].tobytes()
        parameter = torch.nn.Parameter(t["weight"])
        outputs(name, {**t, "weight": parameter}, parameter)


def test_norms_of_torch_tensors(torch: Any) -> None:
    x = torch.arange(10.0)
    held = [x, x.to(torch.bfloat16).requires_grad_(), x.half()]
    assert ops.global_norm(held) == pytest.approx(3**0.5 * 285**0.5)
    sums = ops.multi_sum_sq(*held)
    assert isinstance(sums, torch.Tensor) and sums.tolist() == [285.0] * 3
    assert np.isnan(ops.global_norm([torch.tensor([1, float("nan")], dtype=torch.bfloat16)]))


# Bad input


def call_with(name: str, mixed: bool, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operator, all good but those of `changes`; in a list the last tensor's.

    Here "rescale" is the last array of the multi_ operators.
    """
    a = tensors("float16" if mixed else "float32", mixed, n=6)
    options: dict[str, Any]
    if "phase1" in name:
        options = {"t": 1, "wd": 0.1}
    elif "phase2" in name:
        last = {n: a[n] for n in a if n == "weight32"}
        a = {"weight": a["weight"], "g": a["mean"], "r1": one(2), "r2": one(1), **last}
        options = {"lr": 0.1}
    elif "multi" in name and "adamw" in name:
        options = {"lrs": [1, 1], "wds": [0.1, 0.1], "etas": [0.1, 0.1]}
    elif "multi" in name:
        options = {"learning_rates": [1, 1], "wds": [0.1, 0.1], "step_count": [1, 1]}
    else:
        a["rescale_grad"] = one(0.5)
        options = {"lr": 1, "eta": 0.1}
    changed = copied(a)
    for key, value in changes.items():
        (changed if key in a else options)[key] = value
    scale = options.pop("rescale", one(0.5))
    arrays = [array for group in (a, changed)["multi" not in name :] for array in group.values()]
    return arrays + [scale] * ("multi" in name and "adamw" in name), options


W = np.ones((3, 2), F32)
BAD: list[tuple[str, bool, dict[str, Any], str]] = [
    ("lamb_update_phase1", False, {"weight": None}, "^weight: expected an array"),
    ("lamb_update_phase1", False, {"weight": W.astype(float)}, "^weight: .*float16, got float64"),
    ("lamb_update_phase1", False, {"grad": W.astype(np.float16)}, "^grad: expected float32"),
    ("lamb_update_phase1", False, {"mean": np.ones(6, F32)}, r"^mean: expected shape \(3, 2\)"),
    ("lamb_update_phase1", False, {"var": W.astype(np.float16)}, "^var: expected float32"),
    ("lamb_update_phase1", False, {"t": 0}, "^t: expected an integer from 1 to 2.53 - 1, got 0"),
    ("lamb_update_phase1", False, {"t": 1.5}, "^t: .*1.5"),
    ("lamb_update_phase1", False, {"wd": -1}, "^wd: .*-1"),
    ("lamb_update_phase1", False, {"epsilon": 0}, "^epsilon: .*got 0"),
    ("lamb_update_phase1", False, {"beta1": 1.0}, "^beta1: "),
    ("lamb_update_phase1", False, {"beta2": float("nan")}, "^beta2: .*nan"),
    ("lamb_update_phase1", False, {"rescale_grad": float("inf")}, "^rescale_grad: .*inf"),
    ("lamb_update_phase1", False, {"rescale_grad": "x"}, "^rescale_grad: .*x"),
    ("lamb_update_phase1", False, {"clip_gradient": float("nan")}, "^clip_gradient: .*nan"),
    ("lamb_update_phase1", False, {"bias_correction": 1}, "^bias_correction: .*got 1"),
    ("lamb_update_phase1", False, {"out": W[:2]}, r"^out: expected shape \(3, 2\)"),
    ("lamb_update_phase1", False, {"out": W.astype(np.float16)}, "^out: expected float32"),
    ("mp_lamb_update_phase1", True, {"weight": W}, "^weight: .*bfloat16, got float32"),
    ("mp_lamb_update_phase1", True, {"grad": W}, "^grad: expected float16"),
    ("mp_lamb_update_phase1", True, {"mean": W.astype(np.float16)}, "^mean: expected float32"),
    ("mp_lamb_update_phase1", True, {"weight32": W[:2]}, r"^weight32: expected shape \(3, 2\)"),
    ("mp_lamb_update_phase1", True, {"weight32": W.astype("f2")}, "^weight32: expected float32"),
    ("mp_lamb_update_phase1", True, {"out": W.astype(np.float16)}, "^out: expected float32"),
    ("lamb_update_phase2", False, {"g": W[:1]}, r"^g: expected shape \(3, 2\)"),
    ("lamb_update_phase2", False, {"g": W.astype(np.float16)}, "^g: expected float32"),
    ("lamb_update_phase2", False, {"r1": np.ones(2, F32)}, r"^r1: expected shape \(1,\).*\(2,\)"),
    ("lamb_update_phase2", False, {"r1": np.ones((), F32)}, r"^r1: expected shape \(1,\)"),
    ("lamb_update_phase2", False, {"r2": np.ones((2, 1), F32)}, r"^r2: .*got \(2, 1\)"),
    ("lamb_update_phase2", False, {"r2": 1.0}, "^r2: expected an array"),
    ("lamb_update_phase2", False, {"r1": np.ones(1)}, "^r1: .*float32, got float64"),
    ("lamb_update_phase2", False, {"r1": one(-1)}, "^r1: .*not negative, got -1.0"),
    ("lamb_update_phase2", False, {"r2": one(np.nan)}, "^r2: .*got nan"),
    ("lamb_update_phase2", False, {"r2": one(np.inf)}, "^r2: .*finite.*got inf"),
    ("lamb_update_phase2", False, {"lr": float("nan")}, "^lr: .*nan"),
    ("lamb_update_phase2", False, {"lr": 1e30, "r2": one(1e-30)}, "^lr: .*float32 can hold"),
    ("lamb_update_phase2", False, {"lower_bound": float("nan")}, "^lower_bound: .*nan"),
    ("lamb_update_phase2", False, {"upper_bound": "x"}, "^upper_bound: .*x"),
    ("lamb_update_phase2", False, {"out": W[:2]}, r"^out: expected shape \(3, 2\)"),
    ("mp_lamb_update_phase2", True, {"g": W.astype(np.float16)}, "^g: expected float32"),
    ("mp_lamb_update_phase2", True, {"r1": one(1, np.float16)}, "^r1: expected one of float32"),
    ("mp_lamb_update_phase2", True, {"weight32": W[:1]}, "^weight32: expected shape"),
    ("mp_lamb_update_phase2", True, {"out": W}, "^out: expected float16"),
    ("adamw_update", False, {"lr": -1.0}, "^lr: .*-1.0"),
    ("adamw_update", False, {"eta": float("nan")}, "^eta: .*nan"),
    ("adamw_update", False, {"rescale_grad": np.ones(2, F32)}, r"^rescale_grad: .*\(2,\)"),
    ("adamw_update", False, {"rescale_grad": None}, "^rescale_grad: .*None"),
    ("mp_adamw_update", True, {"weight32": W.astype(float)}, "^weight32: expected float32"),
    ("multi_lamb_update", False, {"learning_rates": [1]}, "^learning_rates: expected 2.*got 1"),
    ("multi_lamb_update", False, {"wds": 0.1}, "^wds: expected a list of 2.*got float"),
    ("multi_lamb_update", False, {"step_count": [1, 0]}, r"^step_count\[1\]: .*got 0"),
    ("multi_lamb_update", False, {"learning_rates": [1, "x"]}, r"^learning_rates\[1\]: .*x"),
    ("multi_lamb_update", False, {"wds": [1, -1]}, r"^wds\[1\]: .*-1"),
    ("multi_lamb_update", False, {"num_tensors": 3}, "^num_tensors: expected 2.*got 3"),
    ("multi_lamb_update", False, {"out": [W]}, "^out: expected 2.*got 1"),
    ("multi_lamb_update", False, {"out": W}, "^out: expected a list of 2.*ndarray"),
    ("multi_lamb_update", False, {"out": [W, W[:1]]}, r"^out\[1\]: expected shape \(3, 2\)"),
    ("multi_lamb_update", False, {"grad": None}, r"^grad\[1\]: expected an array"),
    ("multi_lamb_update", False, {"var": W[:1]}, r"^var\[1\]: expected shape \(3, 2\)"),
    ("multi_lamb_update", False, {"epsilon": -1}, "^epsilon: "),
    ("multi_mp_lamb_update", True, {"weight32": W[:1]}, r"^weight32\[1\]: expected shape"),
    ("multi_mp_lamb_update", True, {"weight": W}, r"^weight\[1\]: expected one of float16"),
    ("multi_lans_update", False, {"upper_bound": float("nan")}, "^upper_bound: .*nan"),
    ("multi_mp_lans_update", True, {"step_count": [1]}, "^step_count: expected 2.*got 1"),
    ("multi_adamw_update", False, {"etas": [1]}, "^etas: expected 2.*got 1"),
    ("multi_adamw_update", False, {"lrs": [1, None]}, r"^lrs\[1\]: .*None"),
    ("multi_adamw_update", False, {"num_weights": 1}, "^num_weights: expected 2.*got 1"),
    ("multi_adamw_update", False, {"rescale": np.ones(3)}, r"^rescale_grad: .*\(3,\)"),
    ("multi_mp_adamw_update", True, {"mean": W[:1]}, r"^mean\[1\]: expected shape"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mixed", "changes", "says"), BAD, ids=lambda x: str(x)[:40])
def test_bad_input_is_named_and_changes_nothing(
    name: str, mixed: bool, changes: dict[str, Any], says: str
) -> None:
    arrays, options = call_with(name, mixed, changes)
    watched = [x for x in arrays if isinstance(x, np.ndarray)]
    before = [x.copy() for x in watched]
    with pytest.raises(QoptError, match=says):
        getattr(ops, name)(*arrays, **options)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(watched, before, strict=True))
    assert (W == 1).all()


def test_arrays_that_do_not_come_out_even() -> None:
    lists: dict[str, Any] = {"learning_rates": [1], "wds": [0], "step_count": [1]}
    with pytest.raises(QoptError, match=r"^arrays: .*weight, grad, mean, var.*got 3 arrays"):
        ops.multi_lamb_update(W, W, W, **lists)
    with pytest.raises(QoptError, match=r"^arrays: .*got 4 arrays"):
        ops.multi_mp_adamw_update(W, W, W, W, 1.0, lrs=[1], wds=[0], etas=[1])
    with pytest.raises(QoptError, match=r"^arrays: .*rescale_grad"):
        ops.multi_adamw_update(lrs=[], wds=[], etas=[])


def test_memory_that_is_shared() -> None:
    a = tensors("float32", False, n=6)
    both = np.zeros(8, F32)
    a["weight"] = both[:6].reshape(3, 2)
    with pytest.raises(QoptError, match=r"memory shared with (weight|out)$"):
        ops.adamw_update(*a.values(), 1.0, lr=1, eta=1, out=both[2:].reshape(3, 2))
    with pytest.raises(QoptError, match=r"memory shared with (grad|out)$"):
        ops.lamb_update_phase1(*a.values(), t=1, wd=0, out=a["grad"])
    with pytest.raises(QoptError, match=r"memory shared with (mean|var)$"):
        ops.adamw_update(a["weight"], a["grad"], a["mean"], a["mean"], 1.0, lr=1, eta=1)
    a["mean"].flags.writeable = False
    with pytest.raises(QoptError, match=r"^mean: expected a writable array"):
        ops.adamw_update(*a.values(), 1.0, lr=1, eta=1)


@pytest.mark.parametrize("missing", ["t", "wd"])
def test_a_missing_argument_is_named(missing: str) -> None:
    given = {name: value for name, value in (("t", 1), ("wd", 0.1)) if name != missing}
    with pytest.raises(TypeError, match=f"'{missing}'"):
        ops.lamb_update_phase1(W, W, W.copy(), W.copy(), **given)


def test_memory_that_tensors_of_a_list_share() -> None:
    """One update's result must not be another one's input: refused before anything is written."""
    a, b = tensors("float32", False), tensors("float32", False, seed=6)
    start = [copied(a), copied(b)]
    lists: dict[str, Any] = {"learning_rates": [1, 1], "wds": [0, 0], "step_count": [1, 1]}
    both = [*a.values(), *b.values()]
    one_mean = [*a.values(), *{**b, "mean": a["mean"]}.values()]
    chained = [*a.values(), *{**b, "grad": a["weight"]}.values()]
    other = np.zeros_like(a["weight"])
    for arrays, out in (
        (both, [b["weight"], a["weight"]]),
        (both, [other, other]),
        (both, [a["weight"], a["mean"]]),
        ([*a.values(), *a.values()], None),
        (one_mean, None),
        (chained, [a["weight"], b["weight"]]),
    ):
        with pytest.raises(QoptError, match=r"\[[01]\]: .*memory shared with \w+\[[01]\]$"):
            ops.multi_lamb_update(*arrays, **lists, out=out)
        for now, before in zip((a, b), start, strict=True):
            assert all((now[name] == before[name]).all() for name in now)
    one_grad = [*a.values(), *{**b, "grad": a["grad"]}.values()]
    ops.multi_lamb_update(*one_grad, **lists, out=[a["weight"], b["weight"]])  # only read
