"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import EPS, LR, WEIGHT_DECAY, Hyper, Settings, root_beside, rule
from tvm_qopt.xp import ArrayNamespace, Value


def adagrad_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    return {
        "step_size": h["lr"] / (1 + (step - 1) * h["lr_decay"]),
        "eps": h["eps"],
        "weight_decay": h["weight_decay"],
    }


@rule(
    slots=("+sum",),
    hyper=(LR, Hyper("lr_decay"), WEIGHT_DECAY, EPS),
    scalars=("step_size", "eps", "weight_decay"),
    derive=adagrad_scalars,
)
def adagrad(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """Adagrad (Duchi et al. 2011, the diagonal form) as torch has it, coupled weight decay."""
    g = xp.bind(g + h.weight_decay * p, "grad_decayed")
    total = xp.bind(s["sum"] + g * g, "sum_new")
    return p - h.step_size * g / root_beside(xp, total, h.eps), {"sum": total}
