"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import (
    EPS,
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    Hyper,
    Settings,
    Zeroes,
    root_beside,
    rule,
)
from tvm_qopt.xp import ArrayNamespace, Value

ALPHA = Hyper("alpha", high=1.0)


def rmsprop_slots(settings: Settings) -> tuple[str, ...]:
    centered = ("grad_avg",) if settings["centered"] else ()
    return ("+square_avg", *centered, *(("momentum_buffer",) if settings["momentum"] else ()))


def rmsprop_hyper(settings: Settings) -> tuple[Hyper, ...]:
    return (LR, ALPHA, EPS, WEIGHT_DECAY, *((MOMENTUM,) if settings["momentum"] else ()))


def rmsprop_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    return {
        "lr": h["lr"],
        "alpha": h["alpha"],
        "one_minus_alpha": 1 - h["alpha"],
        "eps": h["eps"],
        "weight_decay": h["weight_decay"],
        "momentum": h.get("momentum", 0.0),
    }


def rmsprop_zeroes(settings: Settings) -> Zeroes:
    return "square_avg", ("grad_avg",) if settings["centered"] else ()


@rule(
    slots=rmsprop_slots,
    hyper=rmsprop_hyper,
    scalars=("lr", "alpha", "one_minus_alpha", "eps", "weight_decay", "momentum"),
    derive=rmsprop_scalars,
    settings={"centered": (False, True), "momentum": (False, True)},
    zeroes=rmsprop_zeroes,
)
def rmsprop(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """RMSprop (Tieleman & Hinton 2012) as torch has it, eps beside the root, coupled decay.

    Centered (Graves 2013), the variance v - a^2 is not let below 0, where rounding could take it.
    """
    g = xp.bind(g + h.weight_decay * p, "grad_decayed")
    v = h.alpha * s["square_avg"] + h.one_minus_alpha * (g * g)
    v = xp.bind(v, "square_avg_new")
    new = {"square_avg": v}
    if settings["centered"]:
        a = xp.bind(h.alpha * s["grad_avg"] + h.one_minus_alpha * g, "grad_avg_new")
        new["grad_avg"] = a
        v = xp.maximum(v - a * a, 0.0)
    update = g / root_beside(xp, v, h.eps)
    if not settings["momentum"]:
        return p - h.lr * update, new
    buffer = xp.bind(h.momentum * s["momentum_buffer"] + update, "momentum_buffer_new")
    return p - h.lr * buffer, {**new, "momentum_buffer": buffer}
