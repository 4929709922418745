"""torch's optimizers into ours, with the state that they have."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from tvm_qopt.errors import HyperOutOfRange, UnknownName
from tvm_qopt.optim.base import QoptOptimizer
from tvm_qopt.optim.checkpoint import places, spec_at
from tvm_qopt.optim.engine import label_of
from tvm_qopt.optim.foreign.kind import IMPLEMENTATION
from tvm_qopt.optim.foreign.plain import CLASSES, TORCH
from tvm_qopt.optim.foreign.read import read_state

NAMES = tuple(CLASSES.values())


def from_torch(
    optimizer: torch.optim.Optimizer, *, state: str = "8bit", **options: Any
) -> QoptOptimizer:
    """Our optimizer in the place of a torch one: its parameters, groups, options and state.

    optimizer : a torch.optim.Adam, AdamW, SGD, RMSprop or Adagrad, before or after some steps; it
        is left as it is, and may be thrown away.  Schedulers are to be made anew.
    state : how state is kept from now on; "float32" continues as torch would.
    options : others of the class, such as master_weights.

    Examples
    --------
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> ...
    >>> optimizer = tvm_qopt.optim.from_torch(optimizer)
    """
    made = _class_for(optimizer)
    groups = [_group(group) for group in optimizer.param_groups]
    ours: QoptOptimizer = made(groups, state=state, **options)
    for number, position, param in places(ours.param_groups):
        theirs = optimizer.state.get(param)
        if theirs and any(isinstance(value, torch.Tensor) for value in theirs.values()):
            label = label_of(ours.param_groups, number, position)
            spec = spec_at(ours.rule, ours.form, ours.param_groups, number, position)
            ours.state[param] = read_state(TORCH, label, theirs, spec, param, [])
    return ours


def _class_for(optimizer: torch.optim.Optimizer) -> type[Any]:
    name = type(optimizer).__name__
    if name not in NAMES or type(optimizer) is not getattr(torch.optim, name):
        raise UnknownName("torch optimizer", name, NAMES)
    decoupled = {group.get("decoupled_weight_decay", False) for group in optimizer.param_groups}
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise HyperOutOfRange("differentiable", expected="False", got="True")
    if len(decoupled) > 1:
        got = "both"
        raise HyperOutOfRange("decoupled_weight_decay", expected="one for all groups", got=got)
    ours = importlib.import_module("tvm_qopt.optim")
    return getattr(ours, "AdamW" if True in decoupled else name)  # type: ignore[no-any-return]


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in group.items() if name not in IMPLEMENTATION}
    if "param_names" in kept:
        kept["params"] = list(zip(kept.pop("param_names"), kept["params"], strict=True))
    return kept
