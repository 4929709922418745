"""labml's Adam for half-precision training."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import (
    BETA1,
    BETA2,
    LR,
    WEIGHT_DECAY,
    Hyper,
    Settings,
    normal_eps,
    root_beside,
    rule,
)
from tvm_qopt.rules.arithmetic import sqrt
from tvm_qopt.xp import ArrayNamespace, Value

EPS_FP16 = Hyper("eps", low=1e-35, high=1e30, default=1e-16)


def fp16_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    """optimized: eps beside the uncorrected root; plain: beside the corrected one, as torch."""
    c1, c2 = 1 - h["beta1"] ** step, sqrt(1 - h["beta2"] ** step)
    lr, weight_decay = h["lr"], h["weight_decay"]
    kept = {"decoupled": 1 - lr * weight_decay, "absolute": 1 - weight_decay, "coupled": 1.0}
    return {
        "beta1": h["beta1"],
        "one_minus_beta1": 1 - h["beta1"],
        "beta2": h["beta2"],
        "one_minus_beta2": 1 - h["beta2"],
        "step_size": lr * c2 / c1,
        "eps": normal_eps(h["eps"] if settings["form"] == "optimized" else h["eps"] * c2),
        "decay": kept[settings["decay"]],
        "weight_decay": weight_decay,
    }


@rule(
    slots=("exp_avg", "+exp_avg_sq"),
    hyper=(LR, BETA1, BETA2, EPS_FP16, WEIGHT_DECAY),
    scalars=(
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "step_size",
        "eps",
        "decay",
        "weight_decay",
    ),
    derive=fp16_scalars,
    settings={
        "form": ("optimized", "plain"),
        "decay": ("decoupled", "absolute", "coupled"),
    },
    zeroes=("exp_avg_sq", ("exp_avg",)),
)
def adam_fp16(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """Adam of labml's AdamFP16: eps 1e-16 beside the uncorrected root, weights with a master.

    The weight decays ahead of the moments: by 1 - lr wd (decoupled), 1 - wd (absolute), or through
    the gradient (coupled).  param_format="master" is its float32 copy.
    """
    if settings["decay"] == "coupled":
        g = xp.bind(g + h.weight_decay * p, "grad_decayed")
    m = xp.bind(h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g, "exp_avg_new")
    v = xp.bind(h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g), "exp_avg_sq_new")
    update = h.step_size * m / root_beside(xp, v, h.eps)
    return p * h.decay - update, {"exp_avg": m, "exp_avg_sq": v}
