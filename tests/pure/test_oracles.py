"""The oracle against printed vectors, against brute force, and against cases worked by hand."""

from __future__ import annotations

import ast
import hashlib
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SIGNED, UNSIGNED = oracles.dynamic_map(True), oracles.dynamic_map(False)
NAN, INF = np.float32(np.nan), np.float32(np.inf)

HYPER: dict[str, Any] = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0,
    "eps": 1e-8,
    "gnorm_scale": 1,
}

# The document prints eight or nine digits of float32 results; "last ulp may differ" (1.9b).
PRINTED = 2e-7
# float32(1) - float32(0.999) is 1.3e-5 off 0.001; 'documented' forms 1 - beta in float64.
ROUNDED_BETA = 2e-5
# Section 5.6 was printed with float32 betas and bias corrections: 9.2e-6 of a move of 4.2e-6.
ROUNDED_BIAS_CORRECTION = 1e-10


def f32(*values: float) -> oracles.F32:
    return np.array(values, np.float32)


def u8(*values: int) -> oracles.U8:
    return np.array(values, np.uint8)


def f32_from_bits(*bits: int) -> oracles.F32:
    return np.array(bits, np.uint32).view(np.float32)


def vector_a(**settings: Any) -> oracles.QuantStep:
    """Section 1.9 (a): 257 elements, a map without a zero, betas 0, so m = g and v = g * g."""
    halves = np.linspace(-1, -0.001, 128), np.linspace(0.1, 1, 128)
    qmap_m = np.concatenate(halves).astype(np.float32)
    qmap_v = (np.arange(256) / 255).astype(np.float32)
    grad = np.full(257, 0.001, np.float32)
    grad[[0, 256]] = 1, 0.5
    middle = oracles.midpoints(qmap_v)[100]
    grad[1] = np.sqrt(middle)
    while float(grad[1]) ** 2 >= middle:
        grad[1] = np.nextafter(grad[1], np.float32(0))
    zeros, ones = np.zeros(257, np.uint8), np.ones(2, np.float32)
    var = np.ones(257, np.float32)
    hyper = HYPER | {"lr": 0, "beta1": 0, "beta2": 0}
    return oracles.adamw_quant(
        var, grad, zeros, zeros, qmap_m, qmap_v, ones, ones, **hyper, **settings
    )


def vector_b(**settings: Any) -> oracles.QuantStep:
    """Section 1.9 (b): one short block under the dynamic maps."""
    var, grad = f32(1, -2, 0.5, 0, 3), f32(0.1, -0.2, 0, 1e-4, 0.05)
    m, v = u8(255, 0, 127, 130, 64), u8(200, 255, 0, 10, 128)
    hyper = HYPER | {"lr": 1e-2, "weight_decay": 0.1, "gnorm_scale": 0.5}
    return oracles.adamw_quant(
        var, grad, m, v, SIGNED, UNSIGNED, f32(0.5), f32(0.25), **hyper, **settings
    )


def vector_c(**settings: Any) -> oracles.QuantStep:
    """Section 1.9 (c): the first step from zero state."""
    return oracles.adamw_quant(
        f32(1), f32(0.3), u8(127), u8(0), SIGNED, UNSIGNED, f32(0), f32(0), **HYPER, **settings
    )


def two_blocks(grad: oracles.F32, **settings: Any) -> oracles.QuantStep:
    """Eight elements in two blocks of four, from a state that is not zero; float32 weights of 1."""
    arrays: dict[str, Any] = {
        "var": np.ones(8, np.float32),
        "m": np.full(8, 200, np.uint8),
        "v": np.full(8, 150, np.uint8),
        "absmax_m": f32(0.5, 0.5),
        "absmax_v": f32(0.25, 0.25),
    }
    hyper = HYPER | {"weight_decay": 0.1, "step": 3, "block_size": 4}
    everything = arrays | hyper | settings
    return oracles.adamw_quant(grad=grad, qmap_m=SIGNED, qmap_v=UNSIGNED, **everything)


# Independence and maps


def test_imports_numpy_and_the_standard_library_only() -> None:
    tree = ast.parse(Path(oracles.__file__).read_text(encoding="utf-8"))
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    roots = {str(name).partition(".")[0] for name in names}
    assert roots <= sys.stdlib_module_names | {"numpy"}


@pytest.mark.parametrize(
    ("qmap", "sha256"),
    [
        (SIGNED, "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"),
        (UNSIGNED, "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398"),
    ],
    ids=["signed", "unsigned"],
)
def test_dynamic_map_is_the_documents_to_the_bit(qmap: oracles.F32, sha256: str) -> None:
    assert qmap.shape == (256,) and qmap.dtype == np.float32
    assert hashlib.sha256(qmap.astype("<f4").tobytes()).hexdigest() == sha256


def test_dynamic_map_ends_and_zero() -> None:
    assert SIGNED[[0, 127, 128, 255]].tolist() == f32(-0.992968738, 0, 5.50000038e-7, 1).tolist()
    assert UNSIGNED[[0, 1, 127, 255]].tolist() == f32(0, 3.2500003e-7, 0.103515625, 1).tolist()


# Nearest code


@pytest.mark.parametrize("qmap", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_nearest_code_is_plain_argmin(qmap: oracles.F32) -> None:
    rng = np.random.default_rng(0)
    wide = rng.uniform(-1.5, 1.5, 4000).astype(np.float32)
    tiny = (wide * 10.0 ** rng.uniform(-9, 0, 4000)).astype(np.float32)
    near = oracles.midpoints(qmap).astype(np.float32)
    edges = [np.nextafter(near, -INF), near, np.nextafter(near, INF), qmap]
    x = np.concatenate([wide, tiny, *edges])
    distance = np.abs(x.astype(np.float64)[:, None] - qmap.astype(np.float64))
    np.testing.assert_array_equal(oracles.nearest_code(x, qmap), distance.argmin(axis=1))


# A coarse binary grid: many exact ties and repeated levels, and every difference is exact.
GRID = st.integers(-16, 16).map(lambda k: k / 16)


@settings(max_examples=100, deadline=None)
@given(st.lists(GRID, min_size=1, max_size=9), st.lists(GRID, min_size=1, max_size=9))
def test_nearest_code_in_exact_fractions(levels: list[float], xs: list[float]) -> None:
    qmap = np.sort(f32(*levels))
    exact = [[abs(Fraction(x) - Fraction(float(q))) for q in qmap] for x in xs]
    expected = [row.index(min(row)) for row in exact]
    assert oracles.nearest_code(f32(*xs), qmap).tolist() == expected


def test_nearest_code_at_ties_ends_and_nan() -> None:
    qmap = f32(-1, 0, 1, 2)
    x = f32(-0.5, 0.5, 1.5, -9, 9, -1e38, 1e38, -np.inf, np.inf, np.nan, -0.0)
    assert oracles.nearest_code(x, qmap).tolist() == [0, 1, 2, 0, 3, 0, 3, 0, 3, 0, 1]
    assert oracles.nearest_code(x[:9].reshape(3, 3), qmap).shape == (3, 3)


def test_ulps_from_midpoint() -> None:
    qmap = f32(0, 1, 3)
    assert oracles.midpoints(qmap).tolist() == [0.5, 2]
    x = np.nextafter(f32(0.5, 2, 2, 2), f32(1, 9, 0, 2))  # ulp of 2 is twice that just below it
    np.testing.assert_array_equal(oracles.ulps_from_midpoint(x, qmap), [1, 1, 1, 0])
    assert np.isnan(oracles.ulps_from_midpoint(f32(np.nan, np.inf), qmap)).all()
    assert oracles.ulps_from_midpoint(f32(-0.5, 1), qmap).tolist() == [2.0**24, 2.0**22]


# Quantise and dequantise


def test_zero_blocks_take_the_code_nearest_zero_and_decode_to_zero() -> None:
    x = f32(0, 0, 0, -0.0, 2, -1, 0)
    for qmap, zero in ((SIGNED, 127), (f32(-1, -0.5, 0.5, 1), 1)):
        codes, absmax = oracles.quantize(x, qmap, 4, repair=True)
        assert codes[:4].tolist() == [zero] * 4 and absmax.tolist() == [0, 2]
        assert (oracles.dequantize(codes, absmax, qmap, 4)[:4] == 0).all()


def test_the_short_last_block_has_its_own_scale() -> None:
    codes, absmax = oracles.quantize(f32(1, -4, 2, 0.25, -0.5), SIGNED, 4)
    assert absmax.tolist() == [4, 0.5]
    assert codes[1] == 0 and codes[4] == 0  # the signed map has no -1
    expected = SIGNED[codes] * f32(4, 4, 4, 4, 0.5)
    assert oracles.dequantize(codes, absmax, SIGNED, 4).tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_non_finite_value_spoils_its_block_alone(bad: np.float32) -> None:
    codes, absmax = oracles.quantize(np.array([1, bad, 1, -1, 2], np.float32), SIGNED, 4)
    np.testing.assert_array_equal(absmax, [bad, 2])
    zero = int(np.isinf(bad)) * 127  # 1 / NaN is NaN, code 0; 1 / Inf is 0, code 127
    assert codes.tolist() == [zero, 0, zero, zero, 255]  # Inf / Inf is NaN


def test_an_empty_tensor_has_no_blocks() -> None:
    codes, absmax = oracles.quantize(f32(), SIGNED, 4)
    assert codes.shape == absmax.shape == (0,)
    assert oracles.dequantize(codes, absmax, SIGNED, 4).shape == (0,)


def test_repair_acts_on_strictly_opposite_signs_only() -> None:
    x = f32(0.01, -0.01, 0, 1)
    no_zero, with_zero, no_negative = f32(-0.02, 0.5, 1), f32(-1, 0, 1), f32(0, 0.5, 1)
    assert oracles.quantize(x, no_zero, 4)[0].tolist() == [0, 0, 0, 2]
    assert oracles.quantize(x, no_zero, 4, repair=True)[0].tolist() == [1, 0, 0, 2]
    for qmap in (with_zero, no_negative):  # a level of 0 has no sign
        plain, repaired = (oracles.quantize(x, qmap, 4, repair=r)[0] for r in (False, True))
        np.testing.assert_array_equal(plain, repaired)
    assert oracles.quantize(-x, f32(-1, 0.02), 4)[0].tolist() == [1, 1, 1, 0]
    assert oracles.quantize(-x, f32(-1, 0.02), 4, repair=True)[0].tolist() == [0, 1, 1, 0]


# bfloat16


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # tie, down to even
        (0x3F818000, 0x3F82),  # tie, up to even
        (0x3F808001, 0x3F81),  # just above a tie
        (0x3F817FFF, 0x3F81),  # just below a tie
        (0xBF818000, 0xBF82),
        (0x80000000, 0x8000),  # -0
        (0x00000001, 0x0000),  # subnormals
        (0x00008001, 0x0001),
        (0x7F7F7FFF, 0x7F7F),  # the last value that rounds to the largest finite
        (0x7F7F8000, 0x7F80),  # a tie that overflows
        (0x7F7FFFFF, 0x7F80),
        (0xFF7FFFFF, 0xFF80),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_bf16_rounds_to_nearest_even(bits: int, expected: int) -> None:
    assert oracles.f32_to_bf16(f32_from_bits(bits)).tolist() == [expected]


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
def test_bf16_nan_stays_a_quiet_nan_of_its_sign(bits: int) -> None:
    (rounded,) = oracles.f32_to_bf16(f32_from_bits(bits))
    assert rounded & 0x7FC0 == 0x7FC0 and rounded >> 15 == bits >> 31
    assert np.isnan(oracles.bf16_to_f32(np.array([rounded]))).all()


def test_bf16_values_survive_a_round_trip() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    values = oracles.bf16_to_f32(bits)
    real = ~np.isnan(values)
    np.testing.assert_array_equal(oracles.f32_to_bf16(values)[real], bits[real])
    assert (~real).sum() == 2 * 127


# Printed vectors (sections 1.9 and 5.6)


@pytest.mark.parametrize(
    ("semantics", "step", "small"), [("ascend", 0, 128), ("documented", 1, 127)]
)
def test_vector_a(semantics: str, step: int, small: int) -> None:
    out = vector_a(semantics=semantics, step=step)
    assert out.m[[0, 256]].tolist() == [255, 255] and (out.m[2:256] == small).all()
    assert out.v[[0, 1, 256]].tolist() == [255, 100, 255]
    np.testing.assert_allclose(out.absmax_m, [1, 0.5], atol=1e-6)  # the document's own tolerance
    np.testing.assert_allclose(out.absmax_v, [1, 0.25], atol=1e-6)
    assert (out.var == 1).all()  # lr 0


def test_vector_b_ascend() -> None:
    out = vector_b(semantics="ascend", step=4)
    expected = [0.99700230, -1.9964248, 0.49950001, -4.1650592e-06, 2.9974341]
    np.testing.assert_allclose(out.var, expected, rtol=PRINTED)
    assert out.m.tolist() == [254, 0, 127, 131, 66] and out.v.tolist() == [200, 255, 0, 10, 128]
    np.testing.assert_allclose(out.absmax_m, [0.45683593], rtol=PRINTED)
    np.testing.assert_allclose(out.absmax_v, [0.24976], rtol=PRINTED)


def test_vector_b_documented_is_section_5_6() -> None:
    out = vector_b(semantics="documented", step=5)
    expected = [0.99700028, -1.9964232, 0.49950001, -4.1692274e-06, 2.9974346]
    np.testing.assert_allclose(out.var, expected, rtol=PRINTED, atol=ROUNDED_BIAS_CORRECTION)
    assert out.m.tolist() == [254, 0, 127, 131, 66] and out.v.tolist() == [200, 255, 0, 10, 128]
    np.testing.assert_allclose(out.absmax_m, [0.45683593], rtol=PRINTED)
    np.testing.assert_allclose(out.absmax_v, [0.24976], rtol=PRINTED)


@pytest.mark.parametrize(("step", "var"), [(0, 0.9), (1, 0.9255866)])
def test_vector_c_ascend(step: int, var: float) -> None:
    out = vector_c(semantics="ascend", step=step)
    np.testing.assert_allclose(out.var, [var], rtol=PRINTED)
    assert out.m.tolist() == [255] and out.v.tolist() == [255]
    np.testing.assert_allclose(out.absmax_m, [0.030000009], rtol=PRINTED)
    np.testing.assert_allclose(out.absmax_v, [8.9998844e-05], rtol=PRINTED)


def test_vector_c_documented() -> None:
    out = vector_c(semantics="documented", step=1)
    np.testing.assert_allclose(out.var, [0.9], rtol=PRINTED)
    assert out.m.tolist() == [255] and out.v.tolist() == [255]
    np.testing.assert_allclose(out.absmax_m, [0.030000009], rtol=ROUNDED_BETA)
    np.testing.assert_allclose(out.absmax_v, [8.9998844e-05], rtol=ROUNDED_BETA)


def test_ascend_scalars_are_float32_and_count_from_zero() -> None:
    s = oracles.ascend_scalars(**HYPER | {"weight_decay": 0.5, "gnorm_scale": 0.25}, step=0)
    assert all(isinstance(value, np.float32) for value in vars(s).values())
    assert s.t == 1 and s.gs == 0.25 and s.df == np.float32(0.95)
    assert s.c1 == s.o1 == np.float32(1) - np.float32(0.9)
    assert s.c2 == np.sqrt(s.o2) and s.o2 == np.float32(1) - np.float32(0.999)
    assert oracles.ascend_scalars(**HYPER, step=-1).c1 == 0


# AdamW in float64


@pytest.mark.parametrize(("decay", "expected"), [("before", 0.85), ("after", 0.855)])
def test_adamw_decay_order(decay: oracles.Decay, expected: float) -> None:
    one, zero = np.ones(1), np.zeros(1)
    hyper: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    p, m, v = oracles.adamw(one, one, zero, zero, **hyper, weight_decay=0.5, step=1, decay=decay)
    np.testing.assert_allclose(p, expected, rtol=1e-8)  # eps 1e-8 beside sqrt(v_hat) = 1
    np.testing.assert_allclose([*m, *v], [0.1, 0.001], rtol=1e-12)  # float64 rounding


def test_adamw_second_step_by_hand() -> None:
    """betas 1/2: m = 1/2, 3/4 of 1 and c1 = 1/2, 3/4, so m_hat = 1; likewise v_hat = 1."""
    path = oracles.adamw_steps_reference(
        np.ones(2), [np.ones(2), np.ones(2)], lr=0.25, beta1=0.5, beta2=0.5, eps=1
    )
    assert path.tolist() == [[1, 1], [0.875, 0.875], [0.75, 0.75]]  # lr / (1 + eps) per step


def test_reference_path_does_not_depend_on_the_gradients_scale() -> None:
    gradients = np.random.default_rng(0).normal(size=(20, 64))
    start = np.ones(64)
    plain, small = (
        oracles.adamw_steps_reference(start, s * gradients, lr=1e-3, eps=1e-30)
        for s in (1.0, 2.0**-40)
    )
    np.testing.assert_allclose(plain, small, rtol=1e-12)  # scaled by a power of two: eps only


# Settings of the quantised step


def test_documented_weight_is_float64_adamw_on_the_decoded_moments() -> None:
    grad = np.linspace(-1, 1, 8, dtype=np.float32)
    out = two_blocks(grad)
    m, v = np.float32(SIGNED[200]) / 2, np.float32(UNSIGNED[150]) / 4
    hyper: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    moments = np.full(8, m), np.full(8, v)
    p, m_new, v_new = oracles.adamw(np.ones(8), grad, *moments, **hyper, weight_decay=0.1, step=3)
    # float32 moments of two terms whose sum cancels by at most 10
    np.testing.assert_allclose(out.m_value, m_new, rtol=2e-6)
    np.testing.assert_allclose(out.v_value, v_new, rtol=2e-6)
    np.testing.assert_allclose(out.var_exact, p, rtol=2e-6)
    np.testing.assert_array_equal(out.var, out.var_exact.astype(np.float32))


def test_state_written_is_the_quantised_state() -> None:
    out = two_blocks(np.linspace(-1, 1, 8, dtype=np.float32))
    for value, codes, absmax, qmap in (
        (out.m_value, out.m, out.absmax_m, SIGNED),
        (out.v_value, out.v, out.absmax_v, UNSIGNED),
    ):
        assert value.dtype == np.float32 and codes.dtype == np.uint8
        np.testing.assert_array_equal(absmax, np.abs(value).reshape(2, 4).max(axis=1))
        ratio = value.reshape(2, 4) / absmax[:, None]
        np.testing.assert_array_equal(codes, oracles.nearest_code(ratio, qmap).reshape(-1))


def test_zero_rule_forgets_m_where_v_decodes_to_zero() -> None:
    grad = np.zeros(8, np.float32)
    v = u8(0, 150, 150, 150, 150, 150, 150, 150)
    without, with_rule = (two_blocks(grad, v=v, zero_rule=z) for z in (False, True))
    assert without.var[0] < -1e5  # m / eps
    assert with_rule.var[0] == np.float32(1 - 0.1 * 0.1) and with_rule.m[0] == 127
    np.testing.assert_array_equal(without.var[1:], with_rule.var[1:])


@pytest.mark.parametrize("bad", [NAN, INF, np.float32(1e25)])  # 1e25 squared overflows v
@pytest.mark.parametrize("zero_rule", [False, True])
@pytest.mark.parametrize("semantics", ["documented", "ascend"])
def test_skip_keeps_the_element_and_its_block(
    semantics: str, zero_rule: bool, bad: np.float32
) -> None:
    grad = np.full(8, 0.5, np.float32)
    settings: dict[str, Any] = {"semantics": semantics, "zero_rule": zero_rule}
    settings["v"] = u8(150, 0, 150, 150, 150, 150, 150, 150)
    clean = two_blocks(grad, **settings)
    out = two_blocks(np.where(np.arange(8) == 1, bad, grad), nonfinite="skip", **settings)
    assert out.skipped.tolist() == [False, True] + [False] * 6
    assert (out.var[1], out.var_exact[1]) == (1, 1)  # no decay either
    assert (out.m_value[1], out.v_value[1]) == (SIGNED[200] / 2, 0)  # as stored
    others = np.arange(8) != 1
    np.testing.assert_array_equal(out.var[others], clean.var[others])
    np.testing.assert_array_equal(out.m_value[others], clean.m_value[others])
    assert np.isfinite(out.absmax_m).all() and np.isfinite(out.absmax_v).all()
    assert out.absmax_m[0] == out.m_value[:4].max()


def test_skip_lets_the_stored_moments_take_part_in_the_scale() -> None:
    grad = f32(np.nan, 0, 0, 0, 0, 0, 0, 0)
    out = two_blocks(grad, nonfinite="skip")
    stored = SIGNED[200] * np.float32(0.5)
    assert out.absmax_m.tolist() == [stored, stored * np.float32(0.9)]
    assert out.m[0] == 255 and out.m[4] == 255


def test_propagate_spoils_one_weight_and_clears_its_moments() -> None:
    grad = f32(0.5, np.nan, 0.5, 0.5, 0.5, 0.5, 0.5, np.inf)
    out = two_blocks(grad, nonfinite="propagate")
    assert np.isnan(out.var).tolist() == [False, True] + [False] * 5 + [True]
    assert out.m[[1, 7]].tolist() == [127, 127] and out.v[[1, 7]].tolist() == [0, 0]
    assert np.isfinite(out.absmax_m).all() and np.isfinite(out.absmax_v).all()


def test_without_a_policy_one_nan_spoils_its_block() -> None:
    out = two_blocks(f32(0.5, np.nan, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5), semantics="ascend")
    assert np.isnan(out.absmax_m).tolist() == [True, False] and not out.skipped.any()
    assert (
        out.m[:4].tolist() == [0] * 4 and np.isnan(out.var).tolist() == [False, True] + [False] * 6
    )


def test_skip_keeps_a_weights_bits_even_if_they_are_a_signalling_nan() -> None:
    var = f32_from_bits(0x7F800001, *[0x3F800000] * 7)
    out = two_blocks(f32(np.inf, *[0] * 7), var=var, nonfinite="skip")
    assert out.var.view(np.uint32)[0] == 0x7F800001
    bits = np.array([0x7F81] + [0x3F80] * 7, np.uint16)
    half = two_blocks(
        f32(np.inf, *[0] * 7), var=bits, dtype="bfloat16", grad_dtype="float32", nonfinite="skip"
    )
    assert half.var.dtype == np.uint16 and half.var[0] == 0x7F81


@pytest.mark.parametrize("semantics", ["documented", "ascend"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_are_widened_then_rounded_once(semantics: str, dtype: oracles.Dtype) -> None:
    values = np.linspace(-1, 1, 8, dtype=np.float32)
    var, grad = oracles.narrow(values, dtype), oracles.narrow(values[::-1], dtype)
    half = two_blocks(grad, var=var, dtype=dtype, semantics=semantics)
    wide = [oracles.widen(a, dtype) for a in (var, grad)]
    full = two_blocks(wide[1], var=wide[0], semantics=semantics)
    np.testing.assert_array_equal(half.var_exact, full.var_exact)
    np.testing.assert_array_equal(half.var, oracles.narrow(full.var, dtype))
    np.testing.assert_array_equal(half.m, full.m)


def test_gnorm_scale_multiplies_the_gradient() -> None:
    grad = np.linspace(-1, 1, 8, dtype=np.float32)
    scaled, plain = two_blocks(grad * 1024, gnorm_scale=2.0**-10), two_blocks(grad)
    np.testing.assert_array_equal(scaled.var_exact, plain.var_exact)  # powers of two are exact


def test_any_shape_is_flattened_row_major_and_arguments_are_left_alone() -> None:
    grad = np.linspace(-1, 1, 8, dtype=np.float32)
    flat = two_blocks(grad)
    var, m = np.ones((2, 2, 2), np.float32), np.full((2, 2, 2), 200, np.uint8)
    v = np.full((2, 2, 2), 150, np.uint8)
    cube = two_blocks(grad.reshape(2, 2, 2), var=var, m=m, v=v)
    for name in ("var", "m", "v", "m_value", "skipped"):
        np.testing.assert_array_equal(getattr(cube, name).reshape(-1), getattr(flat, name))
    assert (var == 1).all() and (m == 200).all() and (v == 150).all()
