"""Checkpoints of torch's own optimizers: one tensor a moment, under the names that we have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch
from tvm_qopt.optim.foreign.kind import IMPLEMENTATION, Kind, Moments, Options
from tvm_qopt.optim.foreign.moment import Moment, Note, floats

CLASSES = {
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamw": "AdamW",
    "rmsprop": "RMSprop",
    "sgd": "SGD",
}
"""Rule -> the class that torch and we have under one name, with one set of state keys."""

DECOUPLED = {"adam": False, "adamw": True}


def _moments(
    label: str, rule: str, slots: Sequence[str], state: Options, param: torch.Tensor
) -> dict[str, Moment]:
    kept = {name: value for name, value in state.items() if value is not None}
    unknown = sorted(map(str, kept.keys() - {*slots, "step"}))
    if unknown:
        known = f"{', '.join(slots)} and step" if slots else "step"
        raise StateMismatch(label, expected=known, got=f"also {', '.join(unknown)}")
    shape = tuple(param.shape)
    return {slot: floats(label, slot, kept[slot], shape) for slot in slots if slot in kept}


def _options(rule: str, group: Options) -> dict[str, Any]:
    decoupled = group.get("decoupled_weight_decay")
    unlike = decoupled is not None and bool(decoupled) != DECOUPLED.get(rule, bool(decoupled))
    if unlike and group.get("weight_decay"):
        wanted = f"weights that decay as {CLASSES[rule]} has it"
        got = f"decoupled_weight_decay={decoupled}"
        raise StateMismatch("weight_decay", expected=wanted, got=got)
    return {name: value for name, value in group.items() if name not in IMPLEMENTATION}


def _state(
    label: str, rule: str, moments: Moments, step: int, param: torch.Tensor, notes: list[Note]
) -> dict[str, Any]:
    stored: dict[str, Any] = {slot: each.decoded().clone() for slot, each in moments.items()}
    if rule == "sgd":
        return stored  # it counts no steps
    return {"step": torch.tensor(float(step)), **stored} if stored else {}


def _group(rule: str, options: Options) -> dict[str, Any]:
    made = getattr(torch.optim, CLASSES[rule])([torch.zeros(1)], lr=1e-3).param_groups[0]
    return {
        name: options[name] if name in options and name not in IMPLEMENTATION else value
        for name, value in made.items()
        if name != "params"
    }


def _never(_: Options) -> bool:
    """It is what is nobody else's."""
    return False


TORCH = Kind("torch", CLASSES.keys(), _never, _never, _moments, _options, _state, _group)
