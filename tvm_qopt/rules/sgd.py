"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import LR, MOMENTUM, WEIGHT_DECAY, Hyper, Settings, rule
from tvm_qopt.xp import ArrayNamespace, Value

DAMPENING = Hyper("dampening", high=1.0, high_open=False)


def sgd_hyper(settings: Settings) -> tuple[Hyper, ...]:
    """Nesterov's form is defined without dampening."""
    given = {"off": (), "on": (MOMENTUM, DAMPENING), "nesterov": (MOMENTUM,)}
    return (LR, WEIGHT_DECAY, *given[settings["momentum"]])


def sgd_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    """The first update puts the gradient into the buffer undampened, as torch does."""
    momentum, dampening = h.get("momentum", 0.0), h.get("dampening", 0.0)
    return {
        "lr": h["lr"],
        "weight_decay": h["weight_decay"],
        "momentum": momentum,
        "gradient_part": 1.0 if step == 1 else 1 - dampening,
    }


@rule(
    slots=lambda settings: () if settings["momentum"] == "off" else ("momentum_buffer",),
    hyper=sgd_hyper,
    scalars=("lr", "weight_decay", "momentum", "gradient_part"),
    derive=sgd_scalars,
    settings={"momentum": ("on", "off", "nesterov")},
)
def sgd(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """SGD as torch has it (momentum after Sutskever et al. 2013), coupled weight decay."""
    g = xp.bind(g + h.weight_decay * p, "grad_decayed")
    if settings["momentum"] == "off":
        return p - h.lr * g, {}
    buffer = h.momentum * s["momentum_buffer"] + h.gradient_part * g
    buffer = xp.bind(buffer, "momentum_buffer_new")
    direction = g + h.momentum * buffer if settings["momentum"] == "nesterov" else buffer
    return p - h.lr * direction, {"momentum_buffer": buffer}
