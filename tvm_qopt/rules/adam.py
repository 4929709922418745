"""Adam and what its kin share: the scalars of a step and the moments."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from tvm_qopt.rules import (
    BETA1,
    BETA2,
    EPS,
    LR,
    WEIGHT_DECAY,
    Settings,
    Zeroes,
    normal_eps,
    root_beside,
    rule,
)
from tvm_qopt.rules.arithmetic import sqrt
from tvm_qopt.xp import ArrayNamespace, Value

ADAM_HYPER = (LR, BETA1, BETA2, EPS, WEIGHT_DECAY)
ADAM_SCALARS = (
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "step_size",
    "eps",
    "decay",
    "weight_decay",
)
ADAM_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "amsgrad": (False, True),
    "eps_beside": ("corrected", "uncorrected"),
}


def adam_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    """The scalars of Adam at update number `step`, formed in float64.

    sqrt(1 - beta2^t) is moved from under v to the step size and eps, which saves a multiplication
    an element: lr m_hat / (sqrt(v_hat) + eps) = step_size m / (sqrt(v) + eps sqrt(1 - beta2^t)).
    eps_beside="uncorrected" leaves eps beside sqrt(v) as it is (labml, MXNet).
    With scalars="ascend" as the Ascend kernel: in float32 throughout and with t = step + 1.
    """
    if settings.get("scalars") == "ascend":
        with np.errstate(all="ignore"):  # what float32 cannot hold is refused by the caller
            one = np.float32(1)
            narrow: dict[str, Any] = {name: np.float32(value) for name, value in h.items()}
            c2 = np.float32(sqrt(one - narrow["beta2"] ** (np.float32(step) + one)))
            return _scalars(narrow, np.float32(step) + one, one, c2, settings)
    return _scalars(h, step, 1.0, sqrt(1.0 - h["beta2"] ** step), settings)


def _scalars(
    h: Mapping[str, Any], t: Any, one: Any, c2: Any, settings: Settings
) -> Mapping[str, float]:
    lr, beta1, beta2 = h["lr"], h["beta1"], h["beta2"]
    eps, weight_decay = h["eps"], h["weight_decay"]
    c1 = one - beta1**t
    return {
        "beta1": beta1,
        "one_minus_beta1": one - beta1,
        "beta2": beta2,
        "one_minus_beta2": one - beta2,
        "step_size": lr * c2 / c1,
        "eps": normal_eps(eps * c2 if settings["eps_beside"] == "corrected" else eps),
        "decay": one - lr * weight_decay,
        "weight_decay": weight_decay,
    }


def adam_slots(settings: Settings) -> tuple[str, ...]:
    slots = ("exp_avg", "+exp_avg_sq")
    return (*slots, "+max_exp_avg_sq") if settings["amsgrad"] else slots


def adam_zeroes(settings: Settings) -> Zeroes:
    return "max_exp_avg_sq" if settings["amsgrad"] else "exp_avg_sq", ("exp_avg",)


def adam_step(
    xp: ArrayNamespace, h: SimpleNamespace, g: Value, s: dict[str, Value], settings: Settings
) -> tuple[Value, dict[str, Value]]:
    """What Adam takes from the weight, and the new moments."""
    m = xp.bind(h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g, "exp_avg_new")
    v = xp.bind(h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g), "exp_avg_sq_new")
    new = {"exp_avg": m, "exp_avg_sq": v}
    if settings["amsgrad"]:
        v = xp.bind(xp.maximum(s["max_exp_avg_sq"], v), "max_exp_avg_sq_new")
        new["max_exp_avg_sq"] = v
    return h.step_size * m / root_beside(xp, v, h.eps), new  # m / eps alone may overflow


@rule(
    slots=adam_slots,
    hyper=ADAM_HYPER,
    scalars=ADAM_SCALARS,
    derive=adam_scalars,
    settings=ADAM_SETTINGS,
    zeroes=adam_zeroes,
)
def adam(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """Adam (Kingma & Ba 2015, algorithm 1) with coupled weight decay (L2) as torch has it.

    amsgrad: Reddi et al. 2018.  eps_beside="uncorrected" with eps 1e-16 is labml's AdamFP16.
    """
    update, new = adam_step(xp, h, xp.bind(g + h.weight_decay * p, "grad_decayed"), s, settings)
    return p - update, new
