"""LAMB: Adam's direction, scaled to the norm of the weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import (
    BETA1,
    BETA2,
    EPS,
    LR,
    WEIGHT_DECAY,
    Hyper,
    Norms,
    Settings,
    normal_eps,
    root_beside,
    rule,
)
from tvm_qopt.rules.arithmetic import sqrt
from tvm_qopt.xp import ArrayNamespace, Value

LOWER_BOUND = Hyper("lower_bound", low=-math.inf, default=-1.0)
UPPER_BOUND = Hyper("upper_bound", low=-math.inf, default=-1.0)


def lamb_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    corrected = settings["bias_correction"]
    c1 = 1 - h["beta1"] ** step if corrected else 1.0
    c2 = sqrt(1 - h["beta2"] ** step) if corrected else 1.0
    return {
        "beta1": h["beta1"],
        "one_minus_beta1": 1 - h["beta1"],
        "beta2": h["beta2"],
        "one_minus_beta2": 1 - h["beta2"],
        "direction_size": c2 / c1,
        "eps": normal_eps(h["eps"] * c2),
        "weight_decay": h["weight_decay"],
    }


def bounded(norm: float, h: Mapping[str, float]) -> float:
    """A weight norm within its bounds, each off where negative (MXNet's operators; where their
    document says max of the upper bound it means min)."""
    if h["lower_bound"] >= 0:
        norm = max(norm, h["lower_bound"])
    return min(norm, h["upper_bound"]) if h["upper_bound"] >= 0 else norm


def trust_ratio(weight_norm: float, direction_norm: float) -> float:
    """1 where either norm is 0: a tensor of zeros moves as without LAMB."""
    return weight_norm / direction_norm if weight_norm and direction_norm else 1.0


def lamb_direction(
    xp: ArrayNamespace, h: SimpleNamespace, p: Value, g: Value, s: dict[str, Value]
) -> tuple[Value, dict[str, Value]]:
    m = xp.bind(h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g, "exp_avg_new")
    v = xp.bind(h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g), "exp_avg_sq_new")
    direction = h.direction_size * m / root_beside(xp, v, h.eps) + h.weight_decay * p
    return xp.bind(direction, "direction"), {"exp_avg": m, "exp_avg_sq": v}


def lamb_terms(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[dict[str, Value], dict[str, Value]]:
    direction, new = lamb_direction(xp, h, p, g, s)
    return {"weight": p, "direction": direction}, new


def lamb_finish(
    norms: Mapping[str, float], h: Mapping[str, float], settings: Settings
) -> Mapping[str, float]:
    ratio = trust_ratio(bounded(norms["weight"], h), norms["direction"])
    return {"step_size": h["lr"] * ratio}


LAMB_SCALARS = (
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "direction_size",
    "eps",
    "weight_decay",
)


@rule(
    slots=("exp_avg", "+exp_avg_sq"),
    hyper=(BETA1, BETA2, EPS, WEIGHT_DECAY),
    scalars=LAMB_SCALARS,
    derive=lamb_scalars,
    settings={"bias_correction": (True, False)},
    zeroes=("exp_avg_sq", ("exp_avg",)),
    result="direction",
)
def lamb_phase1(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """LAMB's direction as a tensor (MXNet's lamb_update_phase1); the weight is only read."""
    return lamb_direction(xp, h, p, g, s)


@rule(
    slots=("exp_avg", "+exp_avg_sq"),
    hyper=(LR, BETA1, BETA2, EPS, WEIGHT_DECAY, LOWER_BOUND, UPPER_BOUND),
    scalars=(*LAMB_SCALARS, "step_size"),
    derive=lamb_scalars,
    settings={"bias_correction": (True, False)},
    zeroes=("exp_avg_sq", ("exp_avg",)),
    norms=(Norms(("weight", "direction"), lamb_terms, ("step_size",), lamb_finish),),
)
def lamb(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """LAMB (You et al. 2020, algorithm 2), weight decay inside the direction, as MXNet has it."""
    direction, new = lamb_direction(xp, h, p, g, s)
    return p - h.step_size * direction, new
