"""AdEMAMix: a fast and a slow moment."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import (
    BETA1,
    BETA2,
    EPS,
    LR,
    WEIGHT_DECAY,
    Hyper,
    Settings,
    normal_eps,
    root_beside,
    rule,
)
from tvm_qopt.rules.arithmetic import exp, log, sqrt
from tvm_qopt.xp import ArrayNamespace, Value

BETA3, ALPHA = Hyper("beta3", high=1.0), Hyper("alpha")
WARM_UP = (Hyper("t_alpha", low_open=True), Hyper("t_beta3", low_open=True))


def ademamix_hyper(settings: Settings) -> tuple[Hyper, ...]:
    constant = (LR, BETA1, BETA2, BETA3, ALPHA, EPS, WEIGHT_DECAY)
    return (*constant, *WARM_UP) if settings["warm_up"] else constant


def ademamix_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    """alpha rises linearly over t_alpha steps, beta3 from beta1 over t_beta3, evenly in half-life.

    eps and the step size carry sqrt(1 - beta2^t), as in Adam.
    """
    alpha, beta3 = h["alpha"], h["beta3"]
    if settings["warm_up"]:
        alpha = min(step * alpha / h["t_alpha"], alpha)
        beta3 = min(_warm_beta3(h["beta1"], beta3, step / h["t_beta3"]), beta3)
    c1, c2 = 1 - h["beta1"] ** step, sqrt(1 - h["beta2"] ** step)
    return {
        "beta1": h["beta1"],
        "one_minus_beta1": 1 - h["beta1"],
        "beta2": h["beta2"],
        "one_minus_beta2": 1 - h["beta2"],
        "beta3": beta3,
        "one_minus_beta3": 1 - beta3,
        "fast_size": h["lr"] * c2 / c1,
        "slow_size": h["lr"] * c2 * alpha,
        "eps": normal_eps(h["eps"] * c2),
        "decay": 1 - h["lr"] * h["weight_decay"],
    }


def _warm_beta3(beta1: float, beta3: float, part: float) -> float:
    if part >= 1 or beta1 == 0 or beta3 == 0:
        return beta3
    log1, log3 = log(beta1), log(beta3)
    warm: float = exp(log1 * log3 / ((1 - part) * log3 + part * log1))
    return warm


@rule(
    slots=("exp_avg", "exp_avg_slow", "+exp_avg_sq"),
    hyper=ademamix_hyper,
    scalars=(
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "beta3",
        "one_minus_beta3",
        "fast_size",
        "slow_size",
        "eps",
        "decay",
    ),
    derive=ademamix_scalars,
    settings={"warm_up": (False, True)},
    zeroes=("exp_avg_sq", ("exp_avg", "exp_avg_slow")),
)
def ademamix(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """AdEMAMix (Pagliardini et al. 2024): the slow moment is not bias-corrected."""
    fast = xp.bind(h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g, "exp_avg_new")
    slow = xp.bind(h.beta3 * s["exp_avg_slow"] + h.one_minus_beta3 * g, "exp_avg_slow_new")
    v = xp.bind(h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g), "exp_avg_sq_new")
    update = (h.fast_size * fast + h.slow_size * slow) / root_beside(xp, v, h.eps)
    return p * h.decay - update, {"exp_avg": fast, "exp_avg_slow": slow, "exp_avg_sq": v}
