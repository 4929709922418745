"""The oracles of the rules against torch, against printed vectors, and against steps by hand."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle_rules
import pytest

from tvm_qopt.rules import RULES

F64 = oracle_rules.F64

SIZE, STEPS = 37, 5
NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: the oracles are not compared with torch.optim",
)


def f64(*values: float) -> F64:
    return np.array(values, np.float64)


def test_the_oracles_know_every_rule_and_nothing_of_the_package() -> None:
    shipped = {n: r for n, r in RULES.items() if r.update.__module__.startswith("tvm_qopt.rules.")}
    updates = {name for name, r in shipped.items() if r.is_update}
    assert set(oracle_rules.RULES) == updates
    tree = ast.parse(Path(str(oracle_rules.__file__)).read_text(encoding="utf-8"))
    modules = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    }
    assert modules <= {*sys.stdlib_module_names, "numpy"}


# Against torch

ADAM = {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}  # an eps that is seen

TORCH_CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    *(
        (rule, name, {"amsgrad": amsgrad}, {**ADAM, "weight_decay": 0.1})
        for rule, name in (("adam", "Adam"), ("adamw", "AdamW"))
        for amsgrad in (False, True)
    ),
    ("sgd", "SGD", {"momentum": "off"}, {"lr": 0.02, "weight_decay": 0.1}),
    *(
        (
            "sgd",
            "SGD",
            {"momentum": "on"},
            {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.7, "dampening": dampening},
        )
        for dampening in (0.0, 0.3, 1.0)
    ),
    (
        "sgd",
        "SGD",
        {"momentum": "nesterov"},
        {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.7, "nesterov": True},
    ),
    *(
        (
            "rmsprop",
            "RMSprop",
            {"centered": centered, "momentum": momentum > 0},
            {
                "lr": 0.02,
                "alpha": 0.9,
                "eps": 1e-3,
                "weight_decay": 0.1,
                **({"momentum": momentum} if momentum else {}),
            },
        )
        for centered in (False, True)
        for momentum in (0.0, 0.7)
    ),
    (
        "adagrad",
        "Adagrad",
        {},
        {"lr": 0.02, "lr_decay": 0.2, "eps": 1e-3, "weight_decay": 0.1, "initial": 0.3},
    ),
]


def torch_arguments(name: str, settings: dict[str, Any], hyper: dict[str, Any]) -> dict[str, Any]:
    """The same hyper-parameters as torch's class takes them."""
    given = {k: v for k, v in hyper.items() if k not in ("beta1", "beta2", "initial")}
    if name in ("Adam", "AdamW"):
        given |= {"betas": (hyper["beta1"], hyper["beta2"]), **settings}
    if name == "RMSprop":
        given["centered"] = settings["centered"]
    if name == "Adagrad":
        given["initial_accumulator_value"] = hyper["initial"]
    return given


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("rule", "name", "settings", "hyper"),
    TORCH_CASES,
    ids=["-".join([c[0], *map(str, {**c[2], **c[3]}.values())]) for c in TORCH_CASES],
)
def test_against_torch(
    rule: str, name: str, settings: dict[str, Any], hyper: dict[str, Any]
) -> None:
    """Five steps in float64 from one start; both round at 1e-16, in another order."""
    import torch

    rng = np.random.default_rng(0)
    p = rng.normal(size=SIZE)
    weight = torch.nn.Parameter(torch.tensor(p, dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([weight], **torch_arguments(name, settings, hyper))
    state = {
        slot: np.full(SIZE, hyper.get("initial", 0.0))
        for slot in oracle_rules.slots(rule, **settings)
    }
    given = {k: v for k, v in hyper.items() if k != "initial"}
    for step in range(1, STEPS + 1):
        g = rng.normal(size=SIZE)
        weight.grad = torch.tensor(g)
        optimizer.step()
        p, state = oracle_rules.RULES[rule](p, g, state, **given, step=step)
        np.testing.assert_allclose(p, weight.detach().numpy(), rtol=1e-12, atol=1e-14)
        for slot, value in state.items():
            theirs = optimizer.state[weight][slot].numpy()
            np.testing.assert_allclose(value, theirs, rtol=1e-12, atol=1e-14)


# Printed vectors (section 2.8): a float32 model, eight digits

PRINTED = 1e-6  # float32(1 - 0.999^3), which divides v there, is off by up to 2^-25 / 0.003
WEIGHT, MOMENTS = (
    f64(0.5, -0.25, 1.0),
    {"exp_avg": f64(0.01, 0, -0.02), "exp_avg_sq": f64(1e-4, 2e-4, 0)},
)
GRAD = f64(*np.array([0.1, -0.2, 0.3], np.float16))
PHASE1: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-6,
    "weight_decay": 0.01,
    "step": 3,
}
DIRECTION = f64(0.28445578, -0.11504255, -0.78850186)


def test_lamb_phase1_vector() -> None:
    """rescale .5 and clip .08 come before the rule."""
    g = np.clip(GRAD * 0.5, -0.08, 0.08)
    direction, new = oracle_rules.lamb_phase1(WEIGHT, g, MOMENTS, **PHASE1)
    np.testing.assert_allclose(direction, DIRECTION, rtol=1e-5)
    np.testing.assert_allclose(
        new["exp_avg"], [0.01399878, -0.008000001, -0.009999998], rtol=PRINTED
    )
    # float32(1 - 0.999) is 1.3e-5 off
    np.testing.assert_allclose(
        new["exp_avg_sq"], [1.0239874e-4, 2.0619991e-4, 6.3999169e-6], rtol=2e-5
    )
    direction, _ = oracle_rules.lamb_phase1(WEIGHT, g, MOMENTS, **PHASE1, bias_correction=False)
    np.testing.assert_allclose(direction, [1.3882476, -0.55957747, -3.94131], rtol=1e-5)


@pytest.mark.parametrize(
    ("lower", "upper", "rate", "weight"),
    [
        (-1, -1, 0.13540292, (0.46148387, -0.2344229, 1.1067655)),
        (2, -1, 0.2363787, (0.43276072, -0.2228064, 1.186385)),
        (-1, 0.5, 0.059094675, (0.48319018, -0.2432016, 1.0465963)),
        (-1, 0, 0.1, (0.47155443, -0.23849575, 1.0788502)),
    ],
)
def test_lamb_phase2_vector(
    lower: float, upper: float, rate: float, weight: tuple[float, ...]
) -> None:
    moved, used = oracle_rules.lamb_phase2(
        WEIGHT, DIRECTION, 1.145644, 0.8460999, lr=0.1, lower_bound=lower, upper_bound=upper
    )
    assert used == pytest.approx(rate, rel=PRINTED)
    np.testing.assert_allclose(moved, weight, rtol=PRINTED)


def test_lamb_is_its_phases() -> None:
    """The norms of the vector are those of its weights and its direction."""
    g = np.clip(GRAD * 0.5, -0.08, 0.08)
    moved, new = oracle_rules.lamb(WEIGHT, g, MOMENTS, lr=0.1, **PHASE1)
    np.testing.assert_allclose(moved, [0.46148387, -0.2344229, 1.1067655], rtol=PRINTED)
    assert set(new) == {"exp_avg", "exp_avg_sq"}


def test_mp_adamw_vector() -> None:
    moved, _ = oracle_rules.adamw_mxnet(
        WEIGHT,
        GRAD * 0.5,
        MOMENTS,
        lr=1,
        eta=0.01,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
    )
    np.testing.assert_allclose(moved, [0.48611617, -0.24307266, 1.0062184], rtol=PRINTED)


# By hand


def test_lion_by_hand() -> None:
    """Interpolations 0.5 (0.4 + 0.2), 0 and -; the row of decay of the cases."""
    p, new = oracle_rules.lion(
        f64(1, 1, 1),
        f64(0.2, -0.4, -1),
        {"exp_avg": f64(0.4, 0.4, 0.4)},
        lr=0.1,
        beta1=0.5,
        beta2=0.75,
        weight_decay=0.2,
        step=1,
    )
    np.testing.assert_allclose(p, [0.88, 0.98, 1.08], rtol=1e-15)
    np.testing.assert_allclose(new["exp_avg"], [0.35, 0.2, 0.05], rtol=1e-14)
    p, _ = oracle_rules.lion(
        f64(-1),
        f64(1e-3),
        {"exp_avg": f64(0)},
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        step=1,
    )
    assert p[0] == pytest.approx(-1.009, rel=1e-15)


@pytest.mark.parametrize(("decay", "expected"), [("before", 0.85), ("after", 0.855)])
def test_adamw_decay_order_by_hand(decay: str, expected: float) -> None:
    p, _ = oracle_rules.adamw(
        f64(1),
        f64(1),
        {"exp_avg": f64(0), "exp_avg_sq": f64(0)},
        lr=0.1,
        beta1=0.9,
        beta2=0.999,
        eps=1e-16,
        weight_decay=0.5,
        decay=decay,
        step=1,
    )
    assert p[0] == pytest.approx(expected, rel=1e-15)


def test_adam_eps_by_hand() -> None:
    """From zero, g = 1, beta2 = 0.75: sqrt(v) is 0.5, sqrt(v_hat) 1, and eps = 0.5 beside each."""
    zero = {"exp_avg": f64(0), "exp_avg_sq": f64(0)}
    hyper: dict[str, Any] = {"lr": 0.3, "beta1": 0.5, "beta2": 0.75, "eps": 0.5, "weight_decay": 0}
    for eps_beside, move in (("corrected", 0.3 / 1.5), ("uncorrected", 0.3 * 0.5 / (0.5 + 0.5))):
        p, _ = oracle_rules.adam(f64(0), f64(1), zero, **hyper, eps_beside=eps_beside, step=1)
        assert p[0] == pytest.approx(-move, rel=1e-15)


def test_ascend_counts_one_step_more() -> None:
    """beta1 = 0.5, beta2 = 0.75 and step 1, so t = 2: m_hat = 2/3, v_hat = 4/7."""
    p, _ = oracle_rules.adamw(
        f64(0),
        f64(1),
        {"exp_avg": f64(0), "exp_avg_sq": f64(0)},
        lr=0.1,
        beta1=0.5,
        beta2=0.75,
        eps=1e-30,
        weight_decay=0,
        scalars="ascend",
        step=1,
    )
    assert p[0] == pytest.approx(-0.1 * (0.5 / 0.75) / math.sqrt(0.25 / (1 - 0.75**2)), rel=1e-14)


def test_ademamix_by_hand() -> None:
    """p = 2, g = 4, step 1: m1 = 2, m1_hat = 4; m2 = 1; v_hat = 16; with alpha 3 and eps 1 the
    quotient is 7/5; the decay adds 0.1 * 2."""
    state = {"exp_avg": f64(0), "exp_avg_slow": f64(0), "exp_avg_sq": f64(0)}
    p, new = oracle_rules.ademamix(
        f64(2),
        f64(4),
        state,
        lr=0.5,
        beta1=0.5,
        beta2=0.9,
        beta3=0.75,
        alpha=3,
        eps=1,
        weight_decay=0.1,
        step=1,
    )
    assert p[0] == pytest.approx(2 - 0.5 * (1.4 + 0.2), rel=1e-14)
    found = [new[slot][0] for slot in ("exp_avg", "exp_avg_slow", "exp_avg_sq")]
    np.testing.assert_allclose(found, [2, 1, 1.6], rtol=1e-14)


def test_ademamix_warm_up_by_hand() -> None:
    """beta3 goes from beta1 at 0 to itself: at half way 1 / ln beta3(t) is the mean of both ends'.

    In words of half-lives: 1 / -log2(0.5) = 1 and 1 / -log2(0.5 ** (1 / 3)) = 3, so 2 between them.
    """
    warm = {"beta1": 0.5, "beta3": 0.5 ** (1 / 3), "alpha": 4.0, "t_alpha": 8.0, "t_beta3": 6.0}
    assert oracle_rules.ademamix_schedule(3, **warm) == pytest.approx((1.5, 0.5**0.5), rel=1e-14)
    for step in (6, 8, 100):
        alpha, beta3 = oracle_rules.ademamix_schedule(step, **warm)
        assert (alpha, beta3) == pytest.approx((min(step / 2, 4.0), warm["beta3"]), rel=1e-14)


def test_lars_by_hand() -> None:
    """||p|| = 5, ||g|| = 10, decay 0.2, eps 1: ratio 0.6 * 5 / 12 = 1/4, lr times it 1/8."""
    hyper: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.2, "eps": 1.0}
    old = {"momentum_buffer": f64(1, -2)}
    p, new = oracle_rules.lars(f64(3, 4), f64(6, 8), old, **hyper, trust_coefficient=0.6, step=2)
    np.testing.assert_allclose(new["momentum_buffer"], [0.5 + 6.6 / 8, -1 + 8.8 / 8], rtol=1e-14)
    np.testing.assert_allclose(p, [3 - 0.5 - 0.825, 4 + 1 - 1.1], rtol=1e-14)
    p, _ = oracle_rules.lars(f64(0, 0), f64(6, 8), old, **hyper, trust_coefficient=0.6, step=2)
    np.testing.assert_allclose(p, [-0.5 - 3, 1 - 4], rtol=1e-14)  # a zero norm: ratio 1
    p, _ = oracle_rules.lars(f64(3, 4), f64(0, 0), old, **hyper, trust_coefficient=0.6, step=2)
    np.testing.assert_allclose(p, [3 - 0.5 - 0.3, 4 + 1 - 0.4], rtol=1e-14)


LANS: dict[str, Any] = {
    "lr": 0.5,
    "beta1": 0.75,
    "beta2": 0.9,
    "eps": 1.0,
    "weight_decay": 0.0,
    "step": 1,
}
ZERO = {"exp_avg": f64(0, 0), "exp_avg_sq": f64(0, 0)}


def test_lans_by_hand() -> None:
    """g becomes (0.6, 0.8), the roots of v_hat too; both directions are g / (|g| + 1): at the first
    step the two parts are the same, and together lr ||p|| along them."""
    direction = f64(0.6 / 1.6, 0.8 / 1.8)
    unit = direction / math.hypot(*direction)
    p, new = oracle_rules.lans(f64(3, 4), f64(6, 8), ZERO, **LANS)
    np.testing.assert_allclose(p, f64(3, 4) - 0.5 * 5 * unit, rtol=1e-14)
    np.testing.assert_allclose(new["exp_avg"], [0.15, 0.2], rtol=1e-14)
    np.testing.assert_allclose(new["exp_avg_sq"], [0.036, 0.064], rtol=1e-14)
    # beta1 m + ... of an old moment against g: only the moment's part turns
    old = {"exp_avg": f64(-0.2, 0), "exp_avg_sq": f64(0, 0)}
    p, _ = oracle_rules.lans(f64(3, 4), f64(6, 8), old, **LANS)
    moment = f64(0, 0.8 / 1.8)
    expected = f64(3, 4) - 0.5 * 5 * (0.75 * moment / moment[1] + 0.25 * unit)
    np.testing.assert_allclose(p, expected, rtol=1e-14)


def test_lans_without_a_gradient() -> None:
    """No NaN; without decay the directions are 0 too, and nothing moves."""
    p, new = oracle_rules.lans(f64(3, 4), f64(0, 0), ZERO, **LANS)
    assert p.tolist() == [3, 4] and not any(x.any() for x in new.values())
    p, _ = oracle_rules.lans(f64(3, 4), f64(0, 0), ZERO, **{**LANS, "weight_decay": 0.1})
    np.testing.assert_allclose(p, [1.5, 2], rtol=1e-14)  # lr ||p|| along p, whatever the decay


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [(-1, -1, 5), (0, -1, 5), (7, -1, 7), (-1, 2, 2), (7, 2, 2), (-1, 0, 0), (7, 9, 7), (1, 9, 5)],
)
def test_bounds(lower: float, upper: float, expected: float) -> None:
    assert oracle_rules.bound(5.0, lower, upper) == expected


def test_zero_rule() -> None:
    state = {"exp_avg": f64(1, 2), "exp_avg_slow": f64(3, 4), "exp_avg_sq": f64(0, 1)}
    after = oracle_rules.zero_rule(state)
    assert [x.tolist() for x in after.values()] == [[0, 2], [0, 4], [0, 1]]
    state = {"exp_avg": f64(1, 2), "exp_avg_sq": f64(0, 0), "max_exp_avg_sq": f64(0, 1)}
    assert oracle_rules.zero_rule(state)["exp_avg"].tolist() == [0, 2]
    buffer = {"square_avg": f64(0), "grad_avg": f64(1), "momentum_buffer": f64(2)}
    after = oracle_rules.zero_rule(buffer)
    assert (after["grad_avg"][0], after["momentum_buffer"][0]) == (0, 2)
    assert oracle_rules.zero_rule({"momentum_buffer": f64(1)})["momentum_buffer"][0] == 1
