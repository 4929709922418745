"""LARS: momentum, scaled to the norm of the weight."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import EPS, LR, MOMENTUM, WEIGHT_DECAY, Hyper, Norms, Settings, rule
from tvm_qopt.xp import ArrayNamespace, Value

TRUST_COEFFICIENT = Hyper("trust_coefficient", default=1e-3)


def lars_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    return {"momentum": h["momentum"], "weight_decay": h["weight_decay"]}


def lars_terms(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[dict[str, Value], dict[str, Value]]:
    return {"weight": p, "grad": g}, {}


def lars_finish(
    norms: Mapping[str, float], h: Mapping[str, float], settings: Settings
) -> Mapping[str, float]:
    weight, grad = norms["weight"], norms["grad"]
    ratio = 1.0
    if weight > 0 and grad > 0:
        divisor = grad + h["weight_decay"] * weight + h["eps"]
        ratio = h["trust_coefficient"] * weight / divisor
    return {"step_size": h["lr"] * ratio}


@rule(
    slots=("momentum_buffer",),
    hyper=(LR, MOMENTUM, WEIGHT_DECAY, EPS, TRUST_COEFFICIENT),
    scalars=("momentum", "weight_decay", "step_size"),
    derive=lars_scalars,
    norms=(Norms(("weight", "grad"), lars_terms, ("step_size",), lars_finish),),
)
def lars(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """LARS (You et al. 2017, algorithm 1); a tensor whose weight or gradient is 0 has ratio 1."""
    buffer = h.momentum * s["momentum_buffer"] + h.step_size * (g + h.weight_decay * p)
    buffer = xp.bind(buffer, "momentum_buffer_new")
    return p - buffer, {"momentum_buffer": buffer}
