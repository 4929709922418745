"""AdamW: decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from tvm_qopt.rules import BETA1, BETA2, EPS, LR, WEIGHT_DECAY, Settings, normal_eps, rule
from tvm_qopt.xp import ArrayNamespace, Value

SCALARS = (
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "step_size",
    "eps",
    "decay",
)


def adam_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    """The scalars of Adam at update number `step`, formed in float64.

    sqrt(1 - beta2^t) is moved from under v to the step size and eps, which saves a multiplication
    an element: lr m_hat / (sqrt(v_hat) + eps) = -step_size m / (sqrt(v) + eps sqrt(1 - beta2^t)).
    With scalars="ascend" as the Ascend kernel: in float32 throughout and with t = step + 1.
    """
    if settings["scalars"] == "ascend":
        with np.errstate(all="ignore"):  # what float32 cannot hold is refused by the caller
            return _scalars(h, np.float32(step) + np.float32(1), np.float32)
    return _scalars(h, float(step), float)


def _scalars(h: Mapping[str, float], t: Any, real: Any) -> Mapping[str, float]:
    one = real(1)
    lr, beta1, beta2 = real(h["lr"]), real(h["beta1"]), real(h["beta2"])
    eps, weight_decay = real(h["eps"]), real(h["weight_decay"])
    c1 = one - beta1**t
    c2 = real(math.sqrt(one - beta2**t))
    return {
        "beta1": beta1,
        "one_minus_beta1": one - beta1,
        "beta2": beta2,
        "one_minus_beta2": one - beta2,
        "step_size": -lr * c2 / c1,
        "eps": normal_eps(eps * c2),
        "decay": one - lr * weight_decay,
    }


@rule(
    slots=("exp_avg", "+exp_avg_sq"),
    hyper=(LR, BETA1, BETA2, EPS, WEIGHT_DECAY),
    scalars=SCALARS,
    derive=adam_scalars,
    settings={"decay": ("before", "after"), "scalars": ("float64", "ascend")},
    root="exp_avg_sq",
    first_step=lambda settings: 0 if settings["scalars"] == "ascend" else 1,
)
def adamw(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2), eps beside the corrected root.

    decay="before" shrinks the weight ahead of the update as torch does; "after" shrinks the updated
    weight as the kernels of Ascend and of bitsandbytes for CUDA do.
    """
    m = h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g
    v = h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g)
    m, v = xp.bind(m, "exp_avg_step"), xp.bind(v, "exp_avg_sq_step")
    update = h.step_size * m / (xp.sqrt(v) + h.eps)  # in this order: m / eps alone may overflow
    p_new = p * h.decay + update if settings["decay"] == "before" else (p + update) * h.decay
    return p_new, {"exp_avg": m, "exp_avg_sq": v}
