"""LANS: LAMB on the normalised gradient, with a Nesterov part."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import (
    BETA1,
    BETA2,
    CLIP_SCALAR,
    EPS,
    LR,
    WEIGHT_DECAY,
    Norms,
    Settings,
    normal_eps,
    root_beside,
    rule,
)
from tvm_qopt.rules.arithmetic import sqrt
from tvm_qopt.rules.lamb import LOWER_BOUND, UPPER_BOUND, bounded, trust_ratio
from tvm_qopt.xp import ArrayNamespace, Value, clip


def lans_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    c1, c2 = 1 - h["beta1"] ** step, sqrt(1 - h["beta2"] ** step)
    return {
        "beta1": h["beta1"],
        "one_minus_beta1": 1 - h["beta1"],
        "beta2": h["beta2"],
        "one_minus_beta2": 1 - h["beta2"],
        "moment_size": c2 / c1,
        "grad_size": c2,
        "eps": normal_eps(h["eps"] * c2),
        "weight_decay": h["weight_decay"],
    }


def grad_terms(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[dict[str, Value], dict[str, Value]]:
    return {"grad": g}, {}


def grad_finish(
    norms: Mapping[str, float], h: Mapping[str, float], settings: Settings
) -> Mapping[str, float]:
    """A gradient of zeros stays one: MXNet's kernel divides 0 by 0."""
    return {"inverse_grad_norm": 1 / norms["grad"] if norms["grad"] else 0.0}


def lans_directions(
    xp: ArrayNamespace, h: SimpleNamespace, p: Value, g: Value, s: dict[str, Value]
) -> tuple[Value, Value, dict[str, Value]]:
    g = xp.bind(g * h.inverse_grad_norm, "grad_normalised")
    if hasattr(h, CLIP_SCALAR):  # of the normalised gradient, as MXNet has it
        g = xp.bind(clip(xp, g, getattr(h, CLIP_SCALAR)), "grad_clipped")
    m = xp.bind(h.beta1 * s["exp_avg"] + h.one_minus_beta1 * g, "exp_avg_new")
    v = xp.bind(h.beta2 * s["exp_avg_sq"] + h.one_minus_beta2 * (g * g), "exp_avg_sq_new")
    divisor = xp.bind(root_beside(xp, v, h.eps), "divisor")
    decay = xp.bind(h.weight_decay * p, "decay")
    moment = xp.bind(h.moment_size * m / divisor + decay, "moment_direction")
    grad = xp.bind(h.grad_size * g / divisor + decay, "grad_direction")
    return moment, grad, {"exp_avg": m, "exp_avg_sq": v}


def lans_terms(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[dict[str, Value], dict[str, Value]]:
    moment, grad, new = lans_directions(xp, h, p, g, s)
    return {"weight": p, "moment_direction": moment, "grad_direction": grad}, new


def lans_finish(
    norms: Mapping[str, float], h: Mapping[str, float], settings: Settings
) -> Mapping[str, float]:
    weight = bounded(norms["weight"], h)
    moment = trust_ratio(weight, norms["moment_direction"])
    grad = trust_ratio(weight, norms["grad_direction"])
    return {
        "moment_step": h["lr"] * h["beta1"] * moment,
        "grad_step": h["lr"] * (1 - h["beta1"]) * grad,
    }


@rule(
    slots=("exp_avg", "+exp_avg_sq"),
    hyper=(LR, BETA1, BETA2, EPS, WEIGHT_DECAY, LOWER_BOUND, UPPER_BOUND),
    scalars=(
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "moment_size",
        "grad_size",
        "eps",
        "weight_decay",
        "inverse_grad_norm",
        "moment_step",
        "grad_step",
    ),
    derive=lans_scalars,
    zeroes=("exp_avg_sq", ("exp_avg",)),
    clips_itself=True,
    norms=(
        Norms(("grad",), grad_terms, ("inverse_grad_norm",), grad_finish),
        Norms(
            ("weight", "moment_direction", "grad_direction"),
            lans_terms,
            ("moment_step", "grad_step"),
            lans_finish,
        ),
    ),
)
def lans(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """LANS (Zheng et al. 2020, algorithm 2), the fused form of MXNet's multi_lans_update."""
    moment, grad, new = lans_directions(xp, h, p, g, s)
    return p - (h.moment_step * moment + h.grad_step * grad), new
