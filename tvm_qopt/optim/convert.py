"""torch's optimizers into ours, with the state that they have."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from tvm_qopt.errors import HyperOutOfRange, StateMismatch, UnknownName
from tvm_qopt.ops import quantize
from tvm_qopt.optim.base import QoptOptimizer
from tvm_qopt.optim.checkpoint import places, spec_at
from tvm_qopt.optim.engine import label_of
from tvm_qopt.optim.layout import GAPS, Layout
from tvm_qopt.optim.state import STEP, State, fill
from tvm_qopt.runtime.arrays import target_of, view_of
from tvm_qopt.runtime.store import load
from tvm_qopt.spec import KernelSpec

NAMES = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
"""Classes that torch and we have under one name, with one set of state keys."""

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


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
            ours.state[param] = encoded(label, theirs, spec, param)
    return ours


def encoded(label: str, theirs: Mapping[str, Any], spec: KernelSpec, param: torch.Tensor) -> State:
    """The state of a parameter from float moments under the names of the rule's slots."""
    layout = Layout.of(param)
    state: State = {STEP: int(theirs.get(STEP, 1))}  # SGD counts none; its buffer says one was
    for slot, format_ in spec.slots:
        value = theirs.get(slot.name)
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            shape = tuple(param.shape)
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateMismatch(label, expected=f"{slot.name} of shape {shape}", got=str(got))
        moved = layout.arranged(value.detach().to(param.device, torch.float32, copy=True))
        if format_.dtype is not None:
            state[slot.name] = moved.to(getattr(torch, format_.dtype))
            continue
        codes, scale = quantize(layout.flat(moved), format_.name, spec.block_size)
        per_element = codes.numel() == param.numel() and format_.bits == 8
        state[f"{slot.name}_codes"] = layout.shaped(codes) if per_element else codes
        state[f"{slot.name}_scale"] = scale
    weights = param.detach()
    weights = weights.contiguous() if layout.kind == GAPS else layout.flat(weights)
    fill(state, load(spec, target=target_of(view_of("param", weights))), layout, weights, {})
    return state


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
