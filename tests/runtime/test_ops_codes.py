"""quantize and dequantize: every format against an exact search of its table, shapes and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import oracles
import pytest

import tvm_qopt
from tvm_qopt import ops
from tvm_qopt.errors import QoptError
from tvm_qopt.formats import FORMATS

Array = npt.NDArray[Any]
F32 = np.float32
NAN = float("nan")


def fp8(exponent_bits: int) -> Array:
    """The finite levels of an OCP 8-bit format by code; NaN and infinite codes are NaN here."""
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    levels = []
    for code in range(256):
        e, f = code % 128 >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
        value = (1 + f) * 2.0 ** (e - bias) if e else f * 2.0 ** (1 - bias)
        top = code % 128 == 127 if exponent_bits == 4 else e == 31
        levels.append(NAN if top else -value if code & 128 else value)
    return np.array(levels)


def dynamic4() -> Array:
    """Three decades of 1, 2 and 4 levels, the middles of (0.1, 1) cut evenly, then 0 and +-1."""
    positive = [
        10.0 ** (i - 2) * (0.1 + 0.9 * (k + 0.5) / 2**i) for i in range(3) for k in range(2**i)
    ]
    return np.array(sorted([*(-x for x in positive), 0, *positive, 1]))


NF4 = [
    # the table that QLoRA prints (appendix E)
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
QMAP = np.sort(np.random.default_rng(9).uniform(-1, 1, 256)).astype(F32)
QMAP[[0, -1]] = -1, 1

TABLES: dict[str, Array] = {  # level by code
    "dynamic8s": oracles.dynamic_map(True),
    "dynamic8u": oracles.dynamic_map(False),
    "sqrt_dynamic8u": oracles.dynamic_map(False),
    "dynamic4s": dynamic4(),
    "linear8s": np.append(np.arange(-127, 128) / 127, 1.0),  # 255 is never stored
    "linear8u": np.arange(256) / 255,
    "sqrt8u": np.arange(256) / 255,
    "linear4u": np.arange(1, 17) / 16,
    "nf4": np.array(NF4),
    "fp8_e4m3": fp8(4) / 448,
    "fp8_e5m2": fp8(5) / 57344,
    "codebook8": QMAP,
}
UNSIGNED = {"dynamic8u", "sqrt_dynamic8u", "linear8u", "sqrt8u", "linear4u"}
ROOTS = {"sqrt_dynamic8u", "sqrt8u"}
FOUR_BITS = {"dynamic4s", "linear4u", "nf4"}
formats = pytest.mark.parametrize("name", TABLES)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """All kernels of these tests by one compiler process."""
    tvm_qopt.load_many(
        [
            tvm_qopt.KernelSpec.of(rule, name, param=dtype, block_size=block)
            for rule in ("quantize", "dequantize")
            for name, dtype, block in (
                *((name, "float32", 256) for name in TABLES),
                ("dynamic8s", "float16", 256),
                ("dynamic8s", "bfloat16", 256),
                ("linear8u", "bfloat16", 256),
                ("linear4u", "float32", 128),
                ("dynamic8s", "float32", 64),
                ("dynamic8s", "float32", 4096),
            )
        ]
    )


def values(name: str, n: int, seed: int = 3) -> Array:
    """Values of several scales, with zeros; a whole block of zeros where there are two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-4, 0, n)
    x[:: max(n // 7, 1)] = 0
    x[256:512] = 0
    return (abs(x) if name in UNSIGNED else x).astype(F32)


def given(name: str) -> dict[str, Any]:
    return {"qmap": QMAP} if name == "codebook8" else {}


def unpacked(codes: Array, name: str, n: int) -> Array:
    if name not in FOUR_BITS:
        return codes.reshape(-1)
    return np.stack([codes >> 4, codes & 15], 1).reshape(-1)[:n]


def scale_of_elements(scale: Array, n: int, block: int = 256) -> Array:
    return np.repeat(scale.astype(np.float64), block)[:n]


def test_there_is_a_table_for_each_format_with_codes() -> None:
    assert set(TABLES) == {name for name, each in FORMATS.items() if each.scaled}


# Against tables


@formats
@pytest.mark.parametrize("n", [1, 255, 256, 257, 4113])
def test_codes_are_the_nearest_levels(name: str, n: int) -> None:
    x = values(name, n)
    codes, scale = ops.quantize(x, name, **given(name))
    assert codes.dtype == np.uint8 and scale.dtype == F32
    assert codes.shape == ((-(-n // 2),) if name in FOUR_BITS else x.shape)
    table = TABLES[name].astype(np.float64)
    peak = np.nanmax(table * {"fp8_e4m3": 448, "fp8_e5m2": 57344}.get(name, 1))
    starts = np.arange(0, n, 256)
    absmax = np.maximum.reduceat(abs(x), starts).astype(np.float64)
    # a root and the product with 1 / peak: an ulp each
    np.testing.assert_allclose(scale, (absmax**0.5 if name in ROOTS else absmax) / peak, rtol=2e-7)
    stored = np.sqrt(x.astype(np.float64)) if name in ROOTS else x.astype(np.float64)
    whole = scale_of_elements(scale, n) * peak
    unit = np.divide(stored, whole, out=np.zeros(n), where=whole > 0)
    distance = abs(unit[:, None] - np.where(np.isnan(table), np.inf, table))
    got = distance[np.arange(n), unpacked(codes, name, n)]
    # the value is scaled in float32 with up to 2 ulp, and the closed forms take midpoints in it
    assert (got <= distance.min(1) + 4e-7 * abs(unit) + 1e-9).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dynamic8u", "float32"), *(("dynamic8s", d) for d in ("float32", "float16", "bfloat16"))],
)
def test_dynamic_maps_are_the_oracle(name: str, dtype: Any) -> None:
    x = oracles.narrow(values(name, 4113), dtype)
    codes, scale = ops.quantize(x, name)
    qmap, wide = TABLES[name], oracles.widen(x, dtype)
    expected, absmax = oracles.quantize(wide, qmap, 256)
    assert scale.tobytes() == absmax.tobytes()
    divisor = np.where(absmax == 0, 1, absmax)
    unit = (wide / np.repeat(divisor, 256)[: x.size]).astype(F32)
    # ours multiplies by a reciprocal: 1.5 ulp, and the closed form adds up to 2
    at_midpoint = oracles.ulps_from_midpoint(unit, qmap) <= 4
    assert (codes[~at_midpoint] == expected[~at_midpoint]).all() and at_midpoint.mean() < 1e-2
    back = ops.dequantize(codes, scale, name)
    # the table's levels are rounded at three places (torch's linspace), the closed form's once
    np.testing.assert_allclose(back, oracles.dequantize(codes, absmax, qmap, 256), rtol=5e-7)


@formats
def test_every_code_decodes_to_its_level(name: str) -> None:
    table = TABLES[name].astype(np.float64)
    n = table.size
    scale = np.array([0.75], F32)
    codes = np.arange(n, dtype=np.uint8)
    held = (codes[::2] << 4 | codes[1::2]) if name in FOUR_BITS else codes
    got = ops.dequantize(held, scale, name, **given(name)).astype(np.float64)
    peak = {"fp8_e4m3": 448, "fp8_e5m2": 57344}.get(name, 1)
    expected = table * peak * 0.75
    expected = expected**2 if name in ROOTS else expected
    ok = np.isfinite(table)
    # up to 4 ulp of the tables above against levels that are rounded once, twice that for a root
    rtol = 1e-6 if name in ROOTS else 6e-7
    np.testing.assert_allclose(got[ok], expected[ok], rtol=rtol)


@formats
def test_a_stored_value_comes_back(name: str) -> None:
    """Within half the widest step, and stored again it has the same codes.

    The peaks are positive: the dynamic maps have 1 and no -1, so a negative peak would shrink.
    """
    x = values(name, 4113)
    x[::256] = 4
    codes, scale = ops.quantize(x, name, **given(name))
    y = ops.dequantize(codes, scale, name, shape=x.shape, **given(name))
    again, _ = ops.quantize(y, name, **given(name))
    same = codes == again
    # a random map has levels too near to tell apart
    assert same.mean() > 0.99 if name == "codebook8" else same.all()
    levels = np.sort(TABLES[name].astype(np.float64))
    step = np.nanmax(np.diff(levels)) / 2
    step = max(step, levels[0]) if name in UNSIGNED else step  # of linear4u, which has no 0
    step = 1 - (1 - step) ** 2 if name in ROOTS else step
    assert (abs(y.astype(np.float64) - x) <= 4 * step * (1 + 1e-6)).all()


# Shapes, dtypes, libraries


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 11, 13), (2, 128)])
@pytest.mark.parametrize("name", ["dynamic8s", "linear4u"])
def test_shapes(shape: tuple[int, ...], name: str) -> None:
    n = int(np.prod(shape))
    x = abs(values(name, max(n, 1))[:n]).reshape(shape)
    codes, scale = ops.quantize(x, name)
    assert codes.shape == (((n + 1) // 2,) if name == "linear4u" else shape)
    assert scale.shape == (-(-n // 256),)
    y = ops.dequantize(codes, scale, name, shape=shape)
    assert y.shape == shape and y.dtype == F32
    whole = ops.dequantize(codes, scale, name)
    assert whole.shape == ((2 * codes.size,) if name == "linear4u" else shape)
    assert whole.reshape(-1)[:n].tobytes() == y.tobytes()
    assert ops.dequantize(codes, scale, name, shape=[n]).shape == (n,)


def test_nibbles_the_even_element_is_in_the_high_half() -> None:
    x = np.array([1, 1 / 16, 0.5], F32)
    codes, _ = ops.quantize(x, "linear4u")
    assert codes.tolist()[0] == 0xF0 and codes[1] >> 4 == 7


@pytest.mark.parametrize(
    ("name", "block"), [("dynamic8s", 64), ("dynamic8s", 4096), ("linear4u", 128)]
)
def test_block_sizes(name: str, block: int) -> None:
    x = values(name, 5000)
    codes, scale = ops.quantize(x, name, block)
    assert scale.tolist() == np.maximum.reduceat(abs(x), np.arange(0, 5000, block)).tolist()
    y = ops.dequantize(codes, scale, name, block, shape=(5000,))
    assert abs(y - x).max() <= abs(x).max() / 15  # a step of linear4u, which has no 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_of_input_and_output(dtype: Any) -> None:
    """A 16-bit input has the codes of its float32 value; an output is the float32 one rounded."""
    x = oracles.narrow(values("dynamic8s", 1000), dtype)
    codes, scale = ops.quantize(x, "dynamic8s")
    wide, wide_scale = ops.quantize(oracles.widen(x, dtype), "dynamic8s")
    assert codes.tobytes() == wide.tobytes() and scale.tobytes() == wide_scale.tobytes()
    y = ops.dequantize(codes, scale, "dynamic8s", dtype=dtype)
    full = ops.dequantize(codes, scale, "dynamic8s")
    assert y.tobytes() == oracles.narrow(full, dtype).tobytes()


def test_inputs_may_be_read_only_and_are_not_written() -> None:
    x = values("dynamic8s", 1000)
    kept = x.copy()
    x.flags.writeable = False
    codes, scale = ops.quantize(x, "dynamic8s")
    codes.flags.writeable = scale.flags.writeable = False
    ops.dequantize(codes, scale, "dynamic8s")
    assert (x == kept).all()


def test_what_is_not_finite_is_stored_as_0() -> None:
    x = np.ones(300, F32)
    x[[3, 5, 7]] = np.nan, np.inf, -np.inf
    codes, scale = ops.quantize(x, "dynamic8s")
    y = ops.dequantize(codes, scale, "dynamic8s")
    assert (y[[3, 5, 7]] == 0).all() and (np.delete(y, [3, 5, 7]) == 1).all()


@pytest.mark.parametrize("name", ["dynamic8s", "linear4u"])
def test_torch_tensors_get_the_bits_of_numpy(name: str) -> None:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed: pip install tvm_qopt[torch]"
    )
    x = values(name, 999).reshape(27, 37)
    expected = ops.quantize(x, name)
    t = torch.from_numpy(x).requires_grad_()
    codes, scale = ops.quantize(t, name)
    assert isinstance(codes, torch.Tensor) and codes.dtype == torch.uint8
    assert codes.numpy().tobytes() == expected[0].tobytes()
    assert scale.numpy().tobytes() == expected[1].tobytes()
    y = ops.dequantize(codes, scale, name, shape=t.shape)
    assert isinstance(y, torch.Tensor) and y.shape == t.shape
    assert y.numpy().tobytes() == ops.dequantize(*expected, name, shape=x.shape).tobytes()
    brain = ops.dequantize(*ops.quantize(t.detach().bfloat16(), "dynamic8s"), "dynamic8s",
                           dtype="bfloat16")  # fmt: skip
    assert brain.dtype == torch.bfloat16 and brain.shape == t.shape


# Bad input


X = np.ones(300, F32)
QUANTIZE: list[tuple[dict[str, Any], str]] = [
    ({"format": "int8"}, "unknown format with codes 'int8'; known: codebook8, .*nf4"),
    ({"format": "dynamic8"}, "unknown format with codes 'dynamic8'"),
    ({"format": "float32"}, "unknown format with codes 'float32'"),
    ({"format": None}, "unknown format with codes None"),
    ({"block_size": 100}, "^block_size: one of .*got 100"),
    ({"block_size": "256"}, "^block_size: one of .*got '256'"),
    ({"x": X.astype(float)}, "^x: expected one of float32, float16, bfloat16, got float64"),
    ({"x": [1.0]}, "^x: expected an array"),
    ({"x": X[::2]}, "^x: expected a contiguous"),
    ({"x": -X, "format": "dynamic8u"}, "^x: expected no negative value, since dynamic8u"),
    ({"x": -X, "format": "sqrt8u"}, "^x: expected no negative value, since sqrt8u"),
    ({"x": -X * np.inf, "format": "linear8u"}, "^x: expected no negative value"),
    ({"qmap": QMAP}, "^qmap: expected nothing, since dynamic8s has its own map"),
    ({"format": "codebook8"}, "^qmap: expected an array, got nothing"),
    ({"format": "codebook8", "qmap": QMAP[:-1]}, r"^qmap: expected shape \(256,\)"),
    ({"format": "codebook8", "qmap": QMAP[::-1].copy()}, "^qmap: expected levels in ascending"),
]


@pytest.mark.parametrize(("changes", "says"), QUANTIZE, ids=lambda x: str(x)[:40])
def test_bad_input_of_quantize(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(QoptError, match=says):
        ops.quantize(**{"x": X, "format": "dynamic8s", **changes})


def test_minus_zero_and_nan_are_no_negative_values() -> None:
    for x in (np.array([-0.0, np.nan, 1], F32), np.array([0x8000, 0xFFC0, 0x3F80], np.uint16)):
        codes, _ = ops.quantize(x, "linear8u")
        assert codes.tolist() == [0, 0, 255]
    with pytest.raises(QoptError, match=r"^x: expected no negative value"):
        ops.quantize(np.array([0xBF80], np.uint16), "linear8u")


CODES, SCALE = np.zeros(300, np.uint8), np.ones(2, F32)
DEQUANTIZE: list[tuple[dict[str, Any], str]] = [
    ({"format": "int8"}, "unknown format with codes 'int8'"),
    ({"block_size": 0}, "^block_size: one of .*got 0"),
    ({"dtype": "float64"}, "^dtype: one of float32, float16, bfloat16, got 'float64'"),
    ({"codes": CODES.astype(np.int8)}, "^codes: expected uint8, got int8"),
    ({"codes": CODES[::2]}, "^codes: expected a contiguous"),
    ({"codes": None}, "^codes: expected an array"),
    ({"scale": SCALE[:1]}, r"^scale: expected shape \(2,\), got \(1,\)"),
    ({"scale": SCALE.astype(float)}, "^scale: expected float32, got float64"),
    ({"scale": None}, "^scale: expected an array, got nothing"),
    ({"block_size": 64}, r"^scale: expected shape \(5,\)"),
    ({"shape": (299,)}, r"^shape: expected a shape of 300 elements.*got \(299,\)"),
    ({"shape": (-1, 300)}, "^shape: "),
    ({"shape": 300}, "^shape: .*got 300"),
    ({"shape": (300.0,)}, "^shape: "),
    ({"format": "nf4", "shape": (598,)}, "^shape: expected a shape of 600 elements or one less"),
    ({"format": "nf4", "codes": CODES.reshape(3, 100)}, r"^codes: expected shape \(300,\)"),
    ({"qmap": QMAP}, "^qmap: expected nothing"),
    ({"format": "codebook8"}, "^qmap: expected an array"),
    ({"out": np.zeros(301, F32)}, r"^out: expected shape \(300,\), got \(301,\)"),
    ({"out": np.zeros((20, 15), F32)}, r"^out: expected shape \(300,\), got \(20, 15\)"),
    ({"out": np.zeros(600, F32)[::2]}, "^out: expected a contiguous"),
    ({"out": np.zeros(300)}, "^out: expected float32, got float64"),
    ({"out": 3}, "^out: expected an array"),
]


@pytest.mark.parametrize(("changes", "says"), DEQUANTIZE, ids=lambda x: str(x)[:40])
def test_bad_input_of_dequantize(changes: dict[str, Any], says: str) -> None:
    good = {"codes": CODES, "scale": SCALE, "format": "dynamic8s"}
    with pytest.raises(QoptError, match=says):
        ops.dequantize(**{**good, **changes})


@pytest.mark.parametrize("name", ["dynamic8s", "nf4"])
def test_results_may_be_written_to_given_arrays(name: str) -> None:
    x = np.random.default_rng(3).standard_normal((7, 111), dtype=F32)
    codes, scale = ops.quantize(x, name)
    out = np.full_like(codes, 7), np.full_like(scale, 7)
    again = ops.quantize(x, name, out=out)
    assert again[0] is out[0] and again[1] is out[1]
    np.testing.assert_array_equal(out[0], codes)
    np.testing.assert_array_equal(out[1], scale)
    values = np.full_like(x, 7)
    assert ops.dequantize(codes, scale, name, shape=x.shape, out=values) is values
    np.testing.assert_array_equal(values, ops.dequantize(codes, scale, name, shape=x.shape))
    with pytest.raises(QoptError, match=r"^out: expected a pair of codes and scale"):
        ops.quantize(x, name, out=codes)
    with pytest.raises(QoptError, match=r"^codes: expected uint8, got float32"):
        ops.quantize(x, name, out=(x, scale))
