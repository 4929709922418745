"""Laws of the state formats, on NumPy: each entry of the registry against a float64 brute force."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import oracles
import pytest

from tvm_qopt import formats
from tvm_qopt.errors import UnknownName
from tvm_qopt.formats import FAMILIES, FORMATS, StateFormat, get_format
from tvm_qopt.xp import NUMPY

F32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]

CLOSED = sorted(name for name, each in FORMATS.items() if each.qmap is not None)
SEARCHED = sorted(name for name, each in FORMATS.items() if each.runtime_map)

SHA256 = {  # of the levels as little-endian float32 (semantics, section 4.1)
    "dynamic8s": "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    "dynamic8u": "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
DECODE_ULP = 2  # the closed form is rounded once, torch's table up to four times; 8 is the promise
CLOSED_ULP = 4  # worst measured: 3, on +-40 ulp around every midpoint; 12 is the promise
SEARCH_ULP = 2  # of x or the level: both distances are rounded to float32, half an ulp each


def encode(format_: StateFormat, x: F32, qmap: F32 | None = None, **settings: Any) -> Codes:
    defaults = {name: choices[0] for name, choices in format_.settings.items()}
    codes: Codes = format_.encode(NUMPY, x, qmap, defaults | settings, "encode")
    assert codes.dtype == np.int32 and codes.shape == x.shape
    return codes


def decode(format_: StateFormat, codes: Codes, qmap: F32 | None = None) -> F32:
    levels: F32 = format_.decode(NUMPY, codes, qmap, "decode")
    assert levels.dtype == np.float32
    return levels


def all_codes() -> Codes:
    return np.arange(256, dtype=np.int32)


def levels_of(name: str) -> F32:
    levels = get_format(name).qmap
    assert levels is not None
    return levels


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
    signed, levels = get_format(name).signed, levels_of(name)
    near = around(oracles.midpoints(levels), 40)
    return np.concatenate([random_values(signed, 4_000_000), near, special_values(signed)])


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
    assert sorted(SHA256) == CLOSED, "a new map needs its SHA-256 here"
    for signed, nonnegative in FAMILIES.values():
        assert get_format(signed).signed and nonnegative in FORMATS


def test_a_second_registration_is_refused() -> None:
    with pytest.raises(ValueError, match="'dynamic8s' is registered twice"):
        formats.register(get_format("dynamic8s"))
    with pytest.raises(ValueError, match="'dynamic8' is registered twice"):
        formats.register_family("dynamic8", signed="dynamic8s", nonnegative="dynamic8u")
    with pytest.raises(ValueError, match="'float32' is registered twice"):
        formats.register_family("float32", signed="float32", nonnegative="float32")


def test_an_unknown_format_is_an_error_that_lists_what_exists() -> None:
    with pytest.raises(UnknownName, match="unknown state format 'dynamic9'") as caught:
        get_format("dynamic9")
    assert all(name in str(caught.value) for name in (*FORMATS, *FAMILIES))


@pytest.mark.parametrize("name", CLOSED)
def test_levels_are_those_of_the_appendix(name: str) -> None:
    levels = levels_of(name)
    assert levels.dtype == np.float32 and levels.shape == (256,)
    assert (np.diff(levels) > 0).all() and levels[0] >= -1 and levels[-1] == 1
    assert hashlib.sha256(levels.astype("<f4").tobytes()).hexdigest() == SHA256[name]
    np.testing.assert_array_equal(levels, oracles.dynamic_map(get_format(name).signed))


@pytest.mark.parametrize("name", CLOSED)
def test_decode_is_within_two_ulp_of_the_table(name: str) -> None:
    levels, decoded = levels_of(name), decode(get_format(name), all_codes())
    distance = np.abs(decoded.astype(np.float64) - levels) / np.spacing(np.abs(levels))
    assert distance.max() <= DECODE_ULP
    np.testing.assert_array_equal(decoded == 0, levels == 0)  # 0 is exact, and so is 1
    assert decoded[levels == 1].tolist() == [1]
    assert (np.diff(decoded) > 0).all()


@pytest.mark.parametrize("name", CLOSED)
def test_encode_is_the_nearest_level_but_a_hair_from_a_tie(name: str) -> None:
    x, levels = probes(name), levels_of(name)
    codes, nearest = encode(get_format(name), x), oracles.nearest_code(x, levels).astype(np.int32)
    wrong = codes != nearest
    assert np.abs(codes - nearest).max() <= 1
    assert (oracles.ulps_from_midpoint(x[wrong], levels) <= CLOSED_ULP).all()


@pytest.mark.parametrize("name", CLOSED)
def test_encode_is_monotone(name: str) -> None:
    codes = encode(get_format(name), np.sort(probes(name)))
    assert (np.diff(codes) >= 0).all() and codes.min() >= 0 and codes.max() == 255


@pytest.mark.parametrize("name", CLOSED)
def test_encode_undoes_decode(name: str) -> None:
    format_, codes = get_format(name), all_codes()
    np.testing.assert_array_equal(encode(format_, levels_of(name)), codes)
    np.testing.assert_array_equal(encode(format_, decode(format_, codes)), codes)


@pytest.mark.parametrize("name", CLOSED)
def test_the_sign_never_flips_and_zero_stays_zero(name: str) -> None:
    format_, x = get_format(name), probes(name)
    decoded = decode(format_, encode(format_, x))
    assert (decoded[x >= 0] >= 0).all() and (decoded[x <= 0] <= 0).all()
    zeros = encode(format_, np.array([0.0, -0.0], np.float32))
    assert zeros.tolist() == [format_.zero_code] * 2
    assert (decode(format_, zeros) == 0).all()


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
    np.testing.assert_array_equal(decode(format_, all_codes(), qmap), qmap)


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


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_says_what_it_is(name: str) -> None:
    format_ = get_format(name)
    assert format_.scaled == (format_.bits < 16)
    assert format_.summary.endswith(".") or format_.runtime_map
    assert hash(format_) == hash(get_format(name))
