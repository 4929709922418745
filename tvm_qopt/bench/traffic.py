"""The roofline's update: it moves what a float32 AdamW moves and computes next to nothing."""

from __future__ import annotations

from types import SimpleNamespace

from tvm_qopt.rules import Settings, rule
from tvm_qopt.xp import ArrayNamespace, Value


@rule(
    slots=("exp_avg", "exp_avg_sq"), hyper=(), scalars=(), derive=lambda hyper, step, settings: {}
)
def in_place_addition(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """The gradient is added to everything."""
    return p + g, {name: xp.bind(value + g, f"{name}_new") for name, value in s.items()}
