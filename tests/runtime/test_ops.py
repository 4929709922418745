"""ApplyAdamWQuant in two phases: the printed vectors, the oracle, and every error with its code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import oracles
import pytest

from tvm_qopt import ops

Array = npt.NDArray[Any]
QMAP_M, QMAP_V = oracles.dynamic_map(True), oracles.dynamic_map(False)
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}


def tensors(n: int = 5, dtype: Any = np.float32, *, block: int = 256) -> dict[str, Any]:
    blocks = -(-n // block)
    return {
        "var": np.ones(n, dtype),
        "grad": np.full(n, 0.3, dtype),
        "m": np.full(n, 127, np.uint8),
        "v": np.zeros(n, np.uint8),
        "qmap_m": QMAP_M,
        "qmap_v": QMAP_V,
        "absmax_m": np.zeros(blocks, np.float32),
        "absmax_v": np.zeros(blocks, np.float32),
        "step": np.array([1]),
    }


def run(arrays: dict[str, Any], semantics: str, **hyper: Any) -> None:
    given = {**HYPER, "gnorm_scale": 1.0, **hyper}
    size, executor = ops.apply_adamw_quant_get_workspace_size(
        *arrays.values(), semantics=semantics, **given
    )
    ops.apply_adamw_quant(None, size, executor)


def vector_a(step: int) -> dict[str, Any]:
    """Section 1.9 (a)."""
    a = tensors(257)
    low, high = np.linspace(-1, -0.001, 128), np.linspace(0.1, 1, 128)
    a["qmap_m"] = np.concatenate([low, high]).astype(np.float32)
    a["qmap_v"] = (np.arange(256) / 255).astype(np.float32)
    a["grad"][:], a["grad"][0], a["grad"][256] = 0.001, 1, 0.5
    midpoint = (float(a["qmap_v"][100]) + float(a["qmap_v"][101])) / 2
    g = np.float32(np.sqrt(midpoint))
    while float(g * g) >= midpoint:
        g = np.nextafter(g, np.float32(0))
    a["grad"][1] = g
    a["m"][:], a["absmax_m"][:], a["absmax_v"][:], a["step"][0] = 0, 1, 1, step
    return a


@pytest.mark.parametrize(
    ("semantics", "step", "repaired"), [("ascend", 0, 128), ("documented", 1, 127)]
)
def test_vector_a(semantics: str, step: int, repaired: int) -> None:
    a = vector_a(step)
    run(a, semantics, lr=0, beta1=0, beta2=0, weight_decay=0)
    assert (a["m"][[0, 256]] == 255).all() and (a["m"][2:256] == repaired).all()
    assert a["v"][[0, 1, 256]].tolist() == [255, 100, 255]
    assert a["absmax_m"].tolist() == [1, 0.5] and a["absmax_v"].tolist() == [1, 0.25]


def vector_b(step: int) -> dict[str, Any]:
    """Section 1.9 (b)."""
    a = tensors(5)
    a["var"][:], a["grad"][:] = [1, -2, 0.5, 0, 3], [0.1, -0.2, 0, 1e-4, 0.05]
    a["m"][:], a["v"][:] = [255, 0, 127, 130, 64], [200, 255, 0, 10, 128]
    a["absmax_m"][:], a["absmax_v"][:], a["step"][0] = 0.5, 0.25, step
    return a


@pytest.mark.parametrize(
    ("semantics", "step", "var", "rtol"),
    [
        # printed to 8 digits by a float32 model: an ulp or two, by contraction
        ("ascend", 4, [0.99700230, -1.9964248, 0.49950001, -4.1650592e-06, 2.9974341], 3e-7),
        # section 5.6 prints float32 bias corrections; formed in float64 they differ by 9.2e-6
        ("documented", 5, [0.99700028, -1.9964232, 0.49950001, -4.1692274e-06, 2.9974346], 1.2e-5),
    ],
)
def test_vector_b(semantics: str, step: int, var: list[float], rtol: float) -> None:
    a = vector_b(step)
    run(a, semantics, gnorm_scale=0.5)
    np.testing.assert_allclose(a["var"], var, rtol=rtol)
    assert a["m"].tolist() == [254, 0, 127, 131, 66]
    assert a["v"].tolist() == [200, 255, 0, 10, 128]
    np.testing.assert_allclose(a["absmax_m"], 0.45683593, rtol=2e-7)
    np.testing.assert_allclose(a["absmax_v"], 0.24976, rtol=2e-7)


@pytest.mark.parametrize(
    ("semantics", "step", "var"),
    [("ascend", 0, 0.9), ("ascend", 1, 0.9255866), ("documented", 1, 0.9)],
)
def test_vector_c(semantics: str, step: int, var: float) -> None:
    a = tensors(1)
    a["step"][0] = step
    run(a, semantics, lr=0.1, weight_decay=0)
    np.testing.assert_allclose(a["var"], var, rtol=2e-7)
    assert (a["m"][0], a["v"][0]) == (255, 255)
    # printed with float32's 1 - beta, which is 1.3e-5 off the float64 one of "documented"
    np.testing.assert_allclose(a["absmax_m"], 0.030000009, rtol=1e-6)
    np.testing.assert_allclose(a["absmax_v"], 8.9998844e-05, rtol=2e-5)
    assert a["step"][0] == step


@pytest.mark.parametrize("semantics", ["ascend", "documented"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_against_the_oracle(semantics: Any, dtype: Any) -> None:
    """Three steps of a (3, 1371) tensor, from a state of random codes under two odd maps."""
    rng = np.random.default_rng(7)
    n = 3 * 1371
    qmap_m = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
    qmap_v = np.sort(rng.uniform(0, 1, 256)).astype(np.float32)
    qmap_v[-1] = 1
    a: dict[str, Any] = tensors(n)
    a["var"] = oracles.narrow(rng.standard_normal(n).astype(np.float32), dtype).reshape(3, -1)
    a["grad"] = oracles.narrow(rng.standard_normal(n).astype(np.float32), dtype).reshape(3, -1)
    for name in ("m", "v"):
        a[name] = rng.integers(0, 256, n, np.uint8).reshape(3, -1)
        a[f"absmax_{name}"][:] = rng.uniform(0.1, 1, a[f"absmax_{name}"].size)
    a["qmap_m"], a["qmap_v"] = qmap_m, qmap_v
    for step in (1, 2, 3):
        a["step"][0] = step
        before = {name: array.copy() for name, array in a.items()}
        run(a, semantics, gnorm_scale=0.7)
        flat = [before[name].reshape(-1) for name in ("var", "grad", "m", "v")]
        expected = oracles.adamw_quant(
            *flat, qmap_m, qmap_v, before["absmax_m"], before["absmax_v"],
            step=step, gnorm_scale=0.7, semantics=semantics, dtype=dtype, **HYPER,
        )  # fmt: skip
        for name, qmap in (("m", qmap_m), ("v", qmap_v)):
            value = getattr(expected, f"{name}_value")
            scale = getattr(expected, f"absmax_{name}")
            np.testing.assert_allclose(a[f"absmax_{name}"], scale, rtol=3e-7)  # contraction
            wrong = a[name].reshape(-1) != getattr(expected, name)
            unit = (value / np.repeat(scale, 256)[:n]).astype(np.float32)
            # search is exact within 2 ulp of a midpoint; the moment's contraction adds up to 2,
            # and more relative to itself where its two terms cancel
            near = oracles.ulps_from_midpoint(unit, qmap) <= 4
            cancelled = np.abs(unit) < 2e-2
            assert not (wrong & ~near & ~cancelled).any()
            assert wrong.mean() < 2e-3
        got = oracles.widen(a["var"].reshape(-1), dtype).astype(np.float64)
        ulp = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
        moved = np.abs(expected.var_exact - oracles.widen(flat[0], dtype))
        # one rounding of the weight, and float32 arithmetic on the update
        bound = np.abs(expected.var_exact) * ulp + moved * 2e-6 + 1e-7
        assert (np.abs(got - expected.var_exact) <= bound).all()


def test_one_nan_costs_one_weight() -> None:
    a = tensors(300)
    a["grad"][7] = np.nan
    run(a, "documented")
    assert np.isnan(a["var"][7]) and np.isfinite(np.delete(a["var"], 7)).all()
    assert a["m"][7] == 127 and a["v"][7] == 0
    assert np.isfinite(a["absmax_m"]).all() and (np.delete(a["m"], 7) == 255).all()


def test_an_empty_tensor_is_a_step_that_does_nothing() -> None:
    run(tensors(0), "documented")


def test_phase_two_runs_once() -> None:
    a = tensors()
    size, executor = ops.apply_adamw_quant_get_workspace_size(*a.values(), gnorm_scale=1.0, **HYPER)
    assert size == 0
    ops.apply_adamw_quant(None, size, executor)
    once = a["var"].copy()
    with pytest.raises(ops.AclnnError, match="executor") as caught:
        ops.apply_adamw_quant(None, size, executor)
    assert caught.value.code == 361001
    assert (a["var"] == once).all()


def test_phase_one_changes_nothing() -> None:
    a = tensors()
    before = {name: array.copy() for name, array in a.items()}
    ops.apply_adamw_quant_get_workspace_size(*a.values(), gnorm_scale=1.0, **HYPER)
    assert all((a[name] == before[name]).all() for name in a)


BAD: list[tuple[str, Any, int, str]] = [
    *((name, None, 161001, "got None") for name in tensors()),
    ("var", np.ones(5), 161002, "float64"),
    ("var", np.array(1, np.float32), 161002, "dimensions"),
    ("var", np.ones((1,) * 9, np.float32), 161002, "dimensions"),
    ("var", np.ones(10, np.float32)[::2], 161002, "contiguous"),
    ("grad", np.ones(5, np.float16), 161002, "float16"),
    ("grad", np.ones(4, np.float32), 161002, r"\(4,\)"),
    ("m", np.ones(5, np.int8), 161002, "int8"),
    ("v", np.ones((5, 1), np.uint8), 161002, r"\(5, 1\)"),
    ("qmap_m", QMAP_M[:-1], 161002, r"\(255,\)"),
    ("qmap_m", QMAP_M[::-1].copy(), 161002, "ascending"),
    ("qmap_v", np.where(np.arange(256) == 9, np.nan, QMAP_V).astype(np.float32), 161002, "finite"),
    ("qmap_v", QMAP_V.astype(np.float64), 161002, "float64"),
    ("absmax_m", np.zeros(2, np.float32), 161002, r"\(2,\)"),
    ("absmax_v", np.zeros(1, np.float16), 161002, "float16"),
    ("step", np.array([1], np.int32), 161002, "int32"),
    ("step", np.array([1, 2]), 161002, r"\(2,\)"),
    ("step", np.array([0]), 161002, "got 0"),
    ("lr", float("nan"), 161002, "nan"),
    ("lr", "fast", 161002, "fast"),
    ("beta1", 1.0, 161002, "1.0"),
    ("beta2", -0.1, 161002, "-0.1"),
    ("eps", 0.0, 161002, "0.0"),
    ("weight_decay", -1.0, 161002, "-1.0"),
    ("gnorm_scale", float("inf"), 161002, "inf"),
    ("block_size", 128, 161002, "128"),
    ("quant_mode", "TENSORWISE", 161002, "TENSORWISE"),
    ("semantics", "other", 161002, "other"),
]


@pytest.mark.parametrize(("name", "value", "code", "says"), BAD, ids=lambda x: str(x)[:20])
def test_bad_input_is_named_and_changes_nothing(
    name: str, value: Any, code: int, says: str
) -> None:
    a = tensors()
    options = {**HYPER, "gnorm_scale": 1.0}
    (a if name in a else options)[name] = value
    before = {n: array.copy() for n, array in a.items() if array is not None}
    with pytest.raises(ops.AclnnError, match=says) as caught:
        ops.apply_adamw_quant_get_workspace_size(*a.values(), **options)
    assert caught.value.code == code
    assert str(caught.value).startswith(f"{name}:")
    assert isinstance(caught.value, ValueError)
    assert all(np.array_equal(a[n], before[n], equal_nan=True) for n in before if n != "step")
