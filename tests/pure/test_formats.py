"""Laws of the state formats, on NumPy: each entry of the registry against a float64 brute force."""

from __future__ import annotations

import hashlib
import statistics
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracles
import pytest

from tvm_qopt import formats, reference
from tvm_qopt.errors import UnknownName
from tvm_qopt.formats import FAMILIES, FORMATS, StateFormat, get_format
from tvm_qopt.spec import HYPER, PACKED, PER_BLOCK, PER_ELEMENT, KernelSpec
from tvm_qopt.xp import NUMPY, ArrayNamespace, NumpyNamespace

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]

SEARCHED = sorted(name for name, each in FORMATS.items() if each.runtime_map)
DIRECT = sorted(name for name, each in FORMATS.items() if not each.scaled)
KNOWN = sorted(FORMATS.keys() - {*SEARCHED, *DIRECT})
FLOAT8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}

SHA256 = {  # of the levels as little-endian float32 (semantics, section 4.1)
    "dynamic8s": "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    "dynamic8u": "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
    "sqrt_dynamic8u": "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}


XP: ArrayNamespace = NUMPY


class Known(NamedTuple):
    """What a format with a map of its own is held to.

    levels: by code, by the semantics, sections 4.1, 5.1 and 8 (NaN and Inf where it has them; codes
    past the last level repeat it).  decode_ulp: of a level, against that table; each measured bound
    is reached.  encode_ulp: from a midpoint, of x, where either code may come; measured on +-40 ulp
    around every midpoint.
    """

    levels: F32
    decode_ulp: float
    encode_ulp: float
    peak: float = 1


def _dynamic4() -> F32:
    """Section 5.1: three decades of the map of section 4.1, with its float32 steps."""
    values = [np.array([0, 1], np.float32)]
    for i in range(3):
        bounds = oracles._boundaries(2**i)
        decade = np.float32(10.0 ** (i - 2)) * ((bounds[:-1] + bounds[1:]) / np.float32(2))
        values += [decade, -decade]
    return np.sort(np.concatenate(values))


def _nf4() -> F32:
    """QLoRA: 8 levels above 0 and 7 below it, at even quantiles of the normal distribution."""
    quantile, outermost = statistics.NormalDist().inv_cdf, 0.9677083
    above = [quantile(float(p)) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    below = [-quantile(float(p)) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    return (np.sort([*above, 0.0, *below]) / max(above)).astype(np.float32)


def _float8(name: str) -> F32:
    levels: F32 = np.arange(256, dtype=np.uint8).view(FLOAT8[name]).astype(np.float32)
    return levels


LINEAR_SIGNED = (np.minimum(np.arange(256) - 127, 127) / 127).astype(np.float32)
LINEAR_UNSIGNED = (np.arange(256) / 255).astype(np.float32)

# Dynamic: the closed form is rounded once, torch's table up to four times (8 ulp promised); encode
# has three products and a sum, each rounded (12 promised; worst measured 2 signed, 3 unsigned).
# Linear: k * (1 / 127) has the reciprocal's half ulp and one rounding; x * 127 and + 0.5 are each
# rounded, and the table is (measured 0.5 and 1).  fp8 moves the same bits: exact, where a tie goes
# to even, the brute force's to the lower level.  linear4u is exact, ties too.  nf4 compares with
# midpoints that are rounded to float32.
LEVELS = {
    "dynamic8s": Known(oracles.dynamic_map(True), 2, 4),
    "dynamic8u": Known(oracles.dynamic_map(False), 2, 4),
    "sqrt_dynamic8u": Known(oracles.dynamic_map(False), 2, 4),
    "dynamic4s": Known(_dynamic4(), 2, 4),
    "linear8s": Known(LINEAR_SIGNED, 1, 2),
    "linear8u": Known(LINEAR_UNSIGNED, 1, 2),
    "sqrt8u": Known(LINEAR_UNSIGNED, 1, 2),
    "linear4u": Known((np.arange(1, 17) / 16).astype(np.float32), 0, 0),
    "nf4": Known(_nf4(), 0, 0.5),
    "fp8_e4m3": Known(_float8("fp8_e4m3"), 0, 0, peak=448),
    "fp8_e5m2": Known(_float8("fp8_e5m2"), 0, 0, peak=57344),
}
WITHOUT_ZERO = {"linear4u"}
FEW = {4: 4, 8: 30}  # codes that a case must have more of, by bits
NF4_PUBLISHED = [  # Dettmers et al. 2023, appendix E, the lower half and the upper
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
SCALE_ULP = 2  # 1 / peak and its product with absmax, each rounded: measured 1.14
SEARCH_ULP = 2  # of x or the level: both distances are rounded to float32, half an ulp each


@pytest.fixture(
    params=[{}, {"permutes": True}, {"predicates": True}, {"permutes": True, "predicates": True}],
    ids=str,
    autouse=True,
)
def namespace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every law in each form: closed, with look-ups among 16 numbers, with predicates."""
    monkeypatch.setattr(sys.modules[__name__], "XP", NumpyNamespace(**request.param))


def encode(format_: StateFormat, x: F32, qmap: F32 | None = None, **settings: Any) -> Codes:
    defaults = {name: choices[0] for name, choices in format_.settings.items()}
    codes: Codes = format_.encode(XP, x, qmap, defaults | settings, "encode")
    assert codes.dtype in (np.int32, np.uint8) and codes.shape == x.shape
    return codes.astype(np.int32)


def decode(format_: StateFormat, codes: Codes, qmap: F32 | None = None) -> F32:
    levels: F32 = format_.decode(XP, codes, qmap, "decode")
    assert levels.dtype == np.float32
    return levels


def levels_of(name: str) -> F32:
    """The level of each code by the semantics."""
    assert name in LEVELS, f"{name}: an entry in LEVELS adds a format to every law of this file"
    return LEVELS[name].levels


@cache
def finite_codes(name: str) -> Codes:
    codes: Codes = np.flatnonzero(np.isfinite(levels_of(name))).astype(np.int32)
    return codes


@cache
def sorted_levels(name: str) -> F32:
    """The finite levels, ascending, each once."""
    return np.unique(levels_of(name)[finite_codes(name)])


def peak_of(name: str) -> np.float32:
    return np.float32(LEVELS[name].peak if name in LEVELS else 1)


def first_codes(name: str) -> Codes:
    """Of each finite code the first that has its level, bit for bit (-0 is not 0)."""
    codes = finite_codes(name)
    bits = levels_of(name)[codes].view(np.int32)
    _, index, inverse = np.unique(bits, return_index=True, return_inverse=True)
    first: Codes = codes[index][inverse]
    return first


def random_values(signed: bool, count: int) -> F32:
    """Half linear, half log-uniform down to far below the lowest level."""
    rng = np.random.default_rng(20)
    linear = rng.uniform(-1 if signed else 0, 1, count // 2)
    small = 10.0 ** rng.uniform(-12, 0, count // 2)
    sign = rng.choice([-1, 1], count // 2) if signed else 1
    return np.concatenate([linear, sign * small]).astype(np.float32)


def around(values: npt.NDArray[Any], ulps: int) -> F32:
    """Each value as float32 and its neighbours up to `ulps` away (none across 0)."""
    centre = values.astype(np.float32).reshape(-1, 1)
    bits = centre.view(np.int32) + np.arange(-ulps, ulps + 1, dtype=np.int32)
    near: F32 = np.where(centre == 0, 0, bits).astype(np.int32).view(np.float32).reshape(-1)
    return near


def special_values(signed: bool) -> F32:
    """Zeros, subnormals, and the ends of the range overshot by what a rounded quotient may."""
    one, tiny = np.float32(1), np.float32(2.0**-149)
    past = np.nextafter(np.nextafter(one, np.float32(2)), np.float32(2))
    values = np.array([0, tiny, 1e-40, 2.0**-126, one, past], np.float32)
    return np.concatenate([values, -values]) if signed else values


@cache
def probes(name: str) -> F32:
    """What encoders of a known map are tried on: 4 million values and all that is near a tie."""
    signed, levels = get_format(name).signed, sorted_levels(name)
    near = around(oracles.midpoints(levels), 40)
    far = np.concatenate([random_values(signed, 4_000_000), special_values(signed)])
    return np.concatenate([far * peak_of(name), near])


def maps() -> dict[str, F32]:
    rng = np.random.default_rng(21)
    values = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    repeated = np.sort(rng.choice(values, 256)).astype(np.float32)
    no_zero = np.concatenate([np.linspace(-1, -0.001, 128), np.linspace(0.1, 1, 128)])
    return {
        "dynamic_signed": oracles.dynamic_map(True),
        "dynamic_unsigned": oracles.dynamic_map(False),
        "linspace": np.linspace(-1, 1, 256, dtype=np.float32),
        "random": values,
        "repeated": repeated,
        "one_level": np.full(256, 0.5, np.float32),
        "without_zero": no_zero.astype(np.float32),
    }


MAPS = maps()


def test_registered_names_are_their_keys_and_families_name_formats() -> None:
    assert all(name == each.name for name, each in FORMATS.items())
    for name in KNOWN:
        assert levels_of(name).shape == (2 ** get_format(name).bits,)
    assert set(LEVELS) == set(KNOWN), "no entry of LEVELS without a format"
    for signed, nonnegative in FAMILIES.values():
        assert get_format(signed).signed and nonnegative in FORMATS


def test_formats_and_families_of_the_issue_are_there() -> None:
    roots = {name for name, each in FORMATS.items() if each.root}
    assert roots == {"sqrt8u", "sqrt_dynamic8u"}
    assert not any(get_format(name).signed for name in roots)
    assert {name: each.dtype for name, each in FORMATS.items() if each.dtype} == {
        name: name for name in ("float32", "bfloat16", "float16")
    }
    assert FAMILIES["fp8"] == ("fp8_e4m3", "fp8_e4m3")
    assert FAMILIES["dynamic8"] == ("dynamic8s", "dynamic8u")
    assert FAMILIES["4bit"] == ("dynamic4s", "linear4u")
    assert {name for name, each in FORMATS.items() if each.bits == 4} == {
        *("dynamic4s", "linear4u", "nf4")
    }


def test_a_second_registration_is_refused() -> None:
    with pytest.raises(ValueError, match="'dynamic8s' is registered twice"):
        formats.register(get_format("dynamic8s"))
    with pytest.raises(ValueError, match="'dynamic8' is registered twice"):
        formats.register_family("dynamic8", signed="dynamic8s", nonnegative="dynamic8u")
    with pytest.raises(ValueError, match="'float32' is registered twice"):
        formats.register_family("float32", signed="float32", nonnegative="float32")


def test_an_unknown_format_is_an_error_that_lists_what_exists() -> None:
    with pytest.raises(UnknownName, match="unknown state 'dynamic9'") as caught:
        get_format("dynamic9")
    assert all(name in str(caught.value) for name in (*FORMATS, *FAMILIES))


@pytest.mark.parametrize("name", KNOWN)
def test_levels_are_those_of_the_semantics(name: str) -> None:
    format_, levels = get_format(name), levels_of(name)
    own = getattr(format_, "levels", None) if format_.qmap is None else format_.qmap
    assert own is not None and own.dtype == np.float32
    np.testing.assert_array_equal(own, levels)
    known = ~np.isnan(levels)
    np.testing.assert_array_equal(np.signbit(own)[known], np.signbit(levels)[known])
    ascending = sorted_levels(name)
    assert ascending[-1] == format_.peak == peak_of(name)
    assert ascending[0] >= -format_.peak if format_.signed else ascending[0] >= 0
    assert (0 in ascending) == (name not in WITHOUT_ZERO)
    if name in SHA256:
        assert hashlib.sha256(levels.astype("<f4").tobytes()).hexdigest() == SHA256[name]


def test_4_bit_levels_are_those_published() -> None:
    """To the digits of section 5.1; and NF4 as far as its float32 quantiles went."""
    torchao = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    both = np.array([*(-x for x in torchao[::-1]), 0, *torchao, 1])
    np.testing.assert_allclose(np.asarray(get_format("dynamic4s").qmap), both, rtol=2e-7)
    assert get_format("dynamic4s").zero_code == get_format("nf4").zero_code == 7
    nf4 = np.asarray(get_format("nf4").qmap)
    np.testing.assert_allclose(nf4, np.array(NF4_PUBLISHED), atol=3e-7)
    assert get_format("linear4u").zero_code == 0


@pytest.mark.parametrize("name", KNOWN)
def test_decode_is_the_table_within_a_stated_ulp(name: str) -> None:
    codes, levels = finite_codes(name), levels_of(name)[finite_codes(name)]
    decoded = decode(get_format(name), codes)
    distance = np.abs(decoded.astype(np.float64) - levels) / np.spacing(np.abs(levels))
    assert distance.max() <= LEVELS[name].decode_ulp
    np.testing.assert_array_equal(decoded == 0, levels == 0)  # 0 is exact, and so is the peak
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(levels))
    assert (decoded[levels == levels.max()] == peak_of(name)).all()
    assert (np.diff(decoded[np.argsort(levels, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("name", KNOWN)
def test_encode_is_the_nearest_level_but_a_hair_from_a_tie(name: str) -> None:
    x, ascending = probes(name), sorted_levels(name)
    nearest = oracles.nearest_code(x, ascending).astype(np.int64)
    place = np.searchsorted(ascending, levels_of(name)[encode(get_format(name), x)])
    wrong = place != nearest
    assert np.abs(place - nearest).max() <= 1
    assert (oracles.ulps_from_midpoint(x[wrong], ascending) <= LEVELS[name].encode_ulp).all()


@pytest.mark.parametrize("name", KNOWN)
def test_encode_is_monotone_and_reaches_both_ends(name: str) -> None:
    codes = encode(get_format(name), np.sort(probes(name)))
    levels = levels_of(name)[codes]
    assert (np.diff(levels) >= 0).all()
    assert (levels[0], levels[-1]) == (sorted_levels(name)[0], sorted_levels(name)[-1])
    assert np.unique(levels).size == sorted_levels(name).size
    assert name in FLOAT8 or (np.diff(codes) >= 0).all()


@pytest.mark.parametrize("name", KNOWN)
def test_encode_undoes_decode(name: str) -> None:
    """To the code itself wherever no lower code has the same level."""
    format_, codes = get_format(name), finite_codes(name)
    np.testing.assert_array_equal(encode(format_, levels_of(name)[codes]), first_codes(name))
    np.testing.assert_array_equal(encode(format_, decode(format_, codes)), first_codes(name))
    assert (first_codes(name) != codes).sum() == (name == "linear8s")


@pytest.mark.parametrize("name", KNOWN)
def test_the_sign_never_flips_and_zero_stays_zero(name: str) -> None:
    """Where the map has no zero, 0 becomes the level nearest it."""
    format_, x = get_format(name), probes(name)
    decoded = decode(format_, encode(format_, x))
    assert (decoded[x > 0] >= 0).all() and (decoded[x < 0] <= 0).all()
    least = levels_of(name)[format_.zero_code]
    assert (decoded[x == 0] == least).all() and (x == 0).any()
    zeros = encode(format_, np.array([0.0, -0.0], np.float32))
    assert zeros[0] == format_.zero_code and (decode(format_, zeros) == least).all()
    assert least == np.abs(sorted_levels(name)).min() and (least == 0) == (name not in WITHOUT_ZERO)


@pytest.mark.parametrize("name", KNOWN)
def test_the_largest_element_has_the_level_nearest_the_peak(name: str) -> None:
    """And so has a quotient that rounding left an ulp or two above it."""
    ends = around(np.array([peak_of(name)]), 2)
    ends = np.concatenate([ends, -ends]) if get_format(name).signed else ends
    ascending = sorted_levels(name)
    levels = levels_of(name)[encode(get_format(name), ends)]
    np.testing.assert_array_equal(levels, ascending[oracles.nearest_code(ends, ascending)])
    assert (levels[: ends.size // 2] > 0).all() and levels[0] == peak_of(name)


@pytest.mark.parametrize("name", sorted(FLOAT8))
def test_fp8_has_the_bits_of_ml_dtypes(name: str) -> None:
    """Ties to even, subnormal levels, -0 and all: every probe and every 509th float32 in range."""
    peak = peak_of(name)
    every = np.arange(0, int(peak.view(np.int32)) + 1, 509, dtype=np.int32).view(np.float32)
    ties = oracles.midpoints(sorted_levels(name)).astype(np.float32)
    x = np.concatenate([every, -every, ties, probes(name)])
    x = x[np.abs(x) <= peak]
    expected = x.astype(FLOAT8[name]).view(np.uint8)
    np.testing.assert_array_equal(encode(get_format(name), x), expected)
    assert np.unique(expected).size == finite_codes(name).size


@pytest.mark.parametrize("name", sorted(FLOAT8))
def test_fp8_saturates_and_is_never_nan_or_inf(name: str) -> None:
    peak = float(peak_of(name))
    x = np.array([1.03, 1.0625, 1.25, 2, 1e10, 1e30], np.float64) * peak
    x = np.append(x, np.finfo(np.float32).max).astype(np.float32)
    for sign in (1, -1):
        levels = levels_of(name)[encode(get_format(name), (sign * x).astype(np.float32))]
        assert (levels == sign * peak).all()


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("map_name", MAPS)
def test_search_is_the_nearest_level_but_a_hair_from_a_tie(name: str, map_name: str) -> None:
    """Levels are compared, not codes: between equal levels either code is right."""
    qmap = MAPS[map_name]
    near = around(oracles.midpoints(qmap), 40)
    outside = np.array([-3, 3, -1e30, 1e30], np.float32)
    values = (random_values(True, 400_000), near, special_values(True), qmap, outside)
    x = np.concatenate(values).astype(np.float32)
    level, nearest = (
        qmap[c] for c in (encode(get_format(name), x, qmap), oracles.nearest_code(x, qmap))
    )
    hair = SEARCH_ULP * np.spacing(np.maximum(np.abs(x), np.abs(nearest))).astype(np.float64)
    wrong = (level != nearest) & np.isfinite(hair)
    x, level, nearest, hair = (each[wrong].astype(np.float64) for each in (x, level, nearest, hair))
    assert (np.abs(x - (level + nearest) / 2) <= hair).all()


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("map_name", MAPS)
def test_search_takes_the_lower_code_on_a_tie(name: str, map_name: str) -> None:
    qmap = MAPS[map_name]
    middle = oracles.midpoints(qmap)
    exact = middle.astype(np.float32) == middle
    distance = np.abs(middle - qmap[:-1])
    exact &= (distance.astype(np.float32) == distance) & (np.diff(qmap) > 0)
    codes = encode(get_format(name), middle[exact].astype(np.float32), qmap)
    np.testing.assert_array_equal(qmap[codes], qmap[:-1][exact])


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("map_name", MAPS)
def test_search_is_monotone_and_finds_each_level(name: str, map_name: str) -> None:
    format_, qmap = get_format(name), MAPS[map_name]
    codes = encode(format_, np.sort(random_values(True, 100_000)), qmap)
    assert (np.diff(codes) >= 0).all()
    first_of_equals = np.searchsorted(qmap, qmap)
    np.testing.assert_array_equal(encode(format_, qmap, qmap), first_of_equals)
    np.testing.assert_array_equal(decode(format_, np.arange(256, dtype=np.int32), qmap), qmap)


@pytest.mark.parametrize("name", SEARCHED)
def test_sign_repair_moves_one_code_toward_the_sign_of_the_value(name: str) -> None:
    """Against the oracle's repair, on a map without zero, where opposite signs occur."""
    qmap, x = MAPS["without_zero"], random_values(True, 100_000)
    x = np.append(x, np.float32(0.002))  # nearest is -0.001
    codes, _ = oracles.quantize(np.append(x, np.float32(1)), qmap, x.size + 1, repair=True)
    near = oracles.ulps_from_midpoint(x, qmap) <= SEARCH_ULP
    repaired = encode(get_format(name), x, qmap, sign_repair=True)
    np.testing.assert_array_equal(repaired[~near], codes[:-1][~near])
    assert (repaired != encode(get_format(name), x, qmap)).sum() > 0
    unsigned = MAPS["dynamic_unsigned"]
    plain = encode(get_format(name), x, unsigned)
    np.testing.assert_array_equal(
        encode(get_format(name), x, unsigned, sign_repair=True), plain
    )  # a map without a negative level has nothing to repair


@pytest.mark.parametrize("size", [1, 2, 3, 16, 63, 64, 127])
def test_packing_is_undone(size: int) -> None:
    """Two codes a byte, the even one in the high half; beside an odd last one there is 0."""
    codes = np.random.default_rng(23).integers(0, 16, (5, size)).astype(np.int32)
    xp = NumpyNamespace(size)
    packed = xp.pack4(codes)
    assert packed.dtype == np.uint8 and packed.shape == (5, (size + 1) // 2)
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        pairs = zip(row[::2], [*row[1::2], 0][: len(stored)], strict=True)
        assert stored == [16 * even + odd for even, odd in pairs]
    unpacked = xp.unpack4(packed)
    assert unpacked.dtype == np.int32
    np.testing.assert_array_equal(unpacked, codes)


def test_every_byte_is_two_codes() -> None:
    codes = NUMPY.unpack4(np.arange(256, dtype=np.uint8).reshape(2, 128))
    assert codes.reshape(-1, 2).tolist() == [[byte // 16, byte % 16] for byte in range(256)]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_says_what_it_is(name: str) -> None:
    format_ = get_format(name)
    assert format_.scaled == (format_.bits < 16)
    assert format_.summary.endswith(".") or format_.runtime_map
    assert hash(format_) == hash(get_format(name))


# Blocks: the scale and the codes together, by the reference

BLOCK = 64
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def spec_of(name: str) -> tuple[KernelSpec, str]:
    """AdamW with one slot of a format, and that slot: the first moment takes signed ones."""
    state = f"{name}+float32" if get_format(name).signed else f"float32+{name}"
    slot = "exp_avg" if get_format(name).signed else "exp_avg_sq"
    return KernelSpec.of("adamw", state, block_size=BLOCK), slot


def codes_of(name: str, slot: str, arrays: Mapping[str, Array]) -> Array:
    """The code of each element; of 4 bits the even element is in the high half of a byte."""
    stored = arrays[f"{slot}_codes"]
    if get_format(name).bits == 8:
        return stored
    halves = np.stack([stored // 16, stored % 16], axis=1)
    return halves.reshape(-1)[: arrays["param"].size]


def after_steps(spec: KernelSpec, *gradients: F32) -> dict[str, Array]:
    """The arrays after one step a gradient, from a state whose codes and scales are all 0."""
    size = gradients[0].size
    arrays: dict[str, Array] = {}
    for t in spec.tensors:
        if t.role == HYPER:
            continue
        sizes = {PER_ELEMENT: size, PACKED: (size + 1) // 2, PER_BLOCK: -(-size // BLOCK)}
        arrays[t.name] = np.zeros(sizes.get(t.shape, 256), t.storage)
        if t.shape == (256,):
            arrays[t.name] = MAPS["dynamic_signed"]
    for number, grad in enumerate(gradients, start=1):
        scalars = spec.rule_.derive(ADAMW, number, spec.all_settings)
        hyper = [1.0, *(scalars[name] for name in spec.rule_.scalars)]
        arrays |= {"hyper": np.array(hyper, np.float32), "grad": grad}
        arrays |= reference.step(spec, arrays)
    return arrays


def gradients_of(count: int) -> list[F32]:
    """Over six decades, so that their squares stay normal numbers for all the powers below."""
    rng = np.random.default_rng(22)
    sizes = [10.0 ** rng.uniform(-6, 0, 5 * BLOCK + 17) for _ in range(count)]
    return [(each * rng.choice([-1, 1], each.size)).astype(np.float32) for each in sizes]


@pytest.mark.parametrize("name", KNOWN)
def test_scale_invariance_by_powers_of_two(name: str) -> None:
    """Gradients times 2^k: the same codes, and scales times 2^k (2^2k for a second moment without a
    root).  Second moments pass both thresholds at which the reciprocal of absmax is shifted."""
    (spec, slot), gradients = spec_of(name), gradients_of(2)
    plain = after_steps(spec, *gradients)
    few = FEW[get_format(name).bits]
    assert np.unique(codes_of(name, slot, plain)).size > few, "the case has something to lose"
    square = slot == "exp_avg_sq" and not get_format(name).root
    for k in (-37, -30, -1, 5, 31, 37):
        moved = after_steps(spec, *(g * np.float32(2.0**k) for g in gradients))
        np.testing.assert_array_equal(moved[f"{slot}_codes"], plain[f"{slot}_codes"])
        expected = plain[f"{slot}_scale"] * np.float32(2.0 ** (2 * k if square else k))
        np.testing.assert_array_equal(moved[f"{slot}_scale"], expected)


@pytest.mark.parametrize("name", [*KNOWN, *SEARCHED])
def test_the_scale_is_absmax_over_peak_and_a_block_of_zeros_has_none(name: str) -> None:
    (spec, slot), (grad,) = spec_of(name), gradients_of(1)
    grad[BLOCK : 2 * BLOCK] = 0
    out = after_steps(spec, grad)
    exact, _ = spec_of("float32")
    values = after_steps(exact, grad)[slot]
    values = np.sqrt(values) if get_format(name).root else values
    absmax = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BLOCK))
    expected = absmax.astype(np.float64) / float(peak_of(name))
    off = np.abs(out[f"{slot}_scale"] - expected) / np.spacing(expected.astype(np.float32))
    assert (off <= (SCALE_ULP if peak_of(name) != 1 else 0)).all()
    zeros = slice(BLOCK, 2 * BLOCK)
    assert out[f"{slot}_scale"][1] == 0
    zero_code = 127 if name in SEARCHED else get_format(name).zero_code
    assert (codes_of(name, slot, out)[zeros] == zero_code).all()


@pytest.mark.parametrize("name", KNOWN)
def test_no_finite_block_gives_a_code_without_a_finite_level(name: str) -> None:
    """Up to the end of the float32 range and down into its subnormal numbers."""
    spec, slot = spec_of(name)
    for top in (1e-45, 1e-42, 1e-38, 1e-22, 1e-19, 1e18, 1e38):
        if slot == "exp_avg_sq" and top == 1e38:
            continue  # its square is no float32
        grad = np.where(np.arange(BLOCK) % 3 == 0, top, top / 7).astype(np.float32)
        out = after_steps(spec, grad)
        assert np.isfinite(levels_of(name)[codes_of(name, slot, out)]).all()
        assert np.isfinite(out[f"{slot}_scale"]).all()


@pytest.mark.parametrize("name", KNOWN)
def test_a_block_whose_scale_is_zero_stores_the_code_nearest_zero(name: str) -> None:
    """Also where absmax / peak is what became 0, of values that are not."""
    spec, slot = spec_of(name)
    for top in (0.0, 1e-44, 3e-43, 1e-22):
        out = after_steps(spec, np.full(BLOCK, top, np.float32))
        if out[f"{slot}_scale"][0] == 0:
            assert (codes_of(name, slot, out) == get_format(name).zero_code).all(), f"{top}"


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_direct_state_is_the_value_rounded_to_nearest_even(name: str) -> None:
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[name]
    (grad,) = gradients_of(1)
    for state in (f"{name}+float32", f"float32+{name}"):
        slot = ("exp_avg", "exp_avg_sq")[state.startswith("float32")]
        value = after_steps(KernelSpec.of("adamw", "float32", block_size=BLOCK), grad)[slot]
        out = after_steps(KernelSpec.of("adamw", state, block_size=BLOCK), grad)[slot]
        assert out.tobytes() == value.astype(kind).tobytes()
