"""AdamW: decoupled weight decay."""

from __future__ import annotations

from types import SimpleNamespace

from tvm_qopt.rules import Settings, rule
from tvm_qopt.rules.adam import (
    ADAM_HYPER,
    ADAM_SCALARS,
    ADAM_SETTINGS,
    adam_scalars,
    adam_slots,
    adam_step,
    adam_zeroes,
)
from tvm_qopt.xp import ArrayNamespace, Value


@rule(
    slots=adam_slots,
    hyper=ADAM_HYPER,
    scalars=ADAM_SCALARS,
    derive=adam_scalars,
    settings={**ADAM_SETTINGS, "decay": ("before", "after"), "scalars": ("float64", "ascend")},
    zeroes=adam_zeroes,
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
    update, new = adam_step(xp, h, g, s, settings)
    if settings["decay"] == "before":
        return p * h.decay - update, new
    return (p - update) * h.decay, new
