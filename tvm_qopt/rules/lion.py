"""Lion: the sign of an interpolation."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import BETA1, BETA2, LR, WEIGHT_DECAY, Settings, rule
from tvm_qopt.xp import ArrayNamespace, Value


def lion_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    return {
        "lr": h["lr"],
        "beta1": h["beta1"],
        "one_minus_beta1": 1 - h["beta1"],
        "beta2": h["beta2"],
        "one_minus_beta2": 1 - h["beta2"],
        "decay": 1 - h["lr"] * h["weight_decay"],
    }


@rule(
    slots=("exp_avg",),
    hyper=(LR, BETA1, BETA2, WEIGHT_DECAY),
    scalars=("lr", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "decay"),
    derive=lion_scalars,
)
def lion(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """Lion (Chen et al. 2023, algorithm 2), decoupled weight decay; the sign of 0 is 0."""
    m = s["exp_avg"]
    c = xp.bind(h.beta1 * m + h.one_minus_beta1 * g, "interpolated")
    update = xp.where(c > 0.0, h.lr, xp.where(c < 0.0, -h.lr, 0.0))
    m = xp.bind(h.beta2 * m + h.one_minus_beta2 * g, "exp_avg_new")
    return p * h.decay - update, {"exp_avg": m}
