"""AdamW as MXNet's operators have it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import BETA1, BETA2, EPS, LR, WEIGHT_DECAY, Hyper, Settings, root_beside, rule
from tvm_qopt.xp import ArrayNamespace, Value


def mxnet_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    return {
        "beta1": h["beta1"],
        "one_minus_beta1": 1 - h["beta1"],
        "beta2": h["beta2"],
        "one_minus_beta2": 1 - h["beta2"],
        "step_size": h["eta"] * h["lr"],
        "eps": h["eps"],
        "decay": 1 - h["eta"] * h["weight_decay"],
    }


@rule(
    slots=("exp_avg", "+exp_avg_sq"),
    hyper=(LR, Hyper("eta"), BETA1, BETA2, EPS, WEIGHT_DECAY),
    scalars=(
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "step_size",
        "eps",
        "decay",
    ),
    derive=mxnet_scalars,
    zeroes=("exp_avg_sq", ("exp_avg",)),
)
def adamw_mxnet(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """AdamW of MXNet (adamw_update): w -= eta (lr m / (sqrt(v) + eps) + wd w), no bias correction.

    The caller puts a bias correction into eta, which then moves the decay too.
    """
    m = xp.bind(h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g, "exp_avg_new")
    v = xp.bind(h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g), "exp_avg_sq_new")
    return p * h.decay - h.step_size * m / root_beside(xp, v, h.eps), {
        "exp_avg": m,
        "exp_avg_sq": v,
    }
