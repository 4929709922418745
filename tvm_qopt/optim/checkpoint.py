"""Saved states: what they say beside torch's, and reading one without touching the optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch, StateReencoded
from tvm_qopt.optim.engine import Groups, label_of
from tvm_qopt.optim.entry import dtype_name
from tvm_qopt.optim.forms import Form
from tvm_qopt.optim.layout import Layout
from tvm_qopt.optim.options import STORAGE, check_options, options_of, spec_of
from tvm_qopt.optim.shards import is_spread, local_of
from tvm_qopt.optim.slabs import mark, part_of_state, spread_state
from tvm_qopt.optim.state import FORMAT, State, checked, format_tensor, format_text
from tvm_qopt.spec import KernelSpec

OF_OPTIMIZER = (*STORAGE, "params", "overrides")
"""Entries of a group that are the optimizer's, whatever was saved."""


def spec_at(rule: str, form: Form, groups: Groups, number: int, position: int) -> KernelSpec:
    """The kernel that a parameter's options choose (for a gradient of its own dtype)."""
    param = groups[number]["params"][position]
    options = options_of(groups[number], position)
    return spec_of(rule, form, options, size=param.numel(), param=dtype_name(param.dtype))


def places(groups: Groups) -> Iterator[tuple[int, int, torch.Tensor]]:
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            yield number, position, param


def tagged(rule: str, form: Form, groups: Groups, packed: dict[str, Any]) -> dict[str, Any]:
    """What torch packed, with the format of each parameter's state beside it."""
    states = dict(packed["state"])
    indices = [index for group in packed["param_groups"] for index in group["params"]]
    for (number, position, param), index in zip(places(groups), indices, strict=True):
        if states.get(index):
            spec = spec_at(rule, form, groups, number, position)
            state = states[index]
            if is_spread(param):
                state = spread_state(state, spec, param)
            text = format_tensor(format_text(spec, Layout.of(local_of(param))))
            states[index] = {**state, FORMAT: text.to(param.device)}
    return {**packed, "state": states}


def read(
    rule: str, form: Form, groups: Groups, saved: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, State]]:
    """New groups and states from what was saved; raises StateMismatch, and changes nothing."""
    check_parts(groups, saved)
    saved_groups = saved["param_groups"]
    fresh = [_group(group, other) for group, other in zip(groups, saved_groups, strict=True)]
    for group in fresh:
        check_options(rule, form, group)
    states, anew = {}, []
    for label, number, position, param, state in saved_states(fresh, saved):
        spec = spec_at(rule, form, fresh, number, position)
        found, encoded = part_of_state(label, state, spec, param)
        layout = Layout.of(local_of(param))
        states[param] = checked(label, found, spec, layout, param.device)
        mark(states[param], spec, param)
        anew += [label] if encoded else []
    if anew:
        text = f"state was re-encoded, since its blocks start elsewhere: {', '.join(anew)}"
        warnings.warn(text, StateReencoded, stacklevel=3)
    return fresh, states


def check_parts(groups: Groups, saved: Mapping[str, Any]) -> None:
    """Raise unless there are groups of these sizes, and states of their parameters only."""
    for part in ("state", "param_groups"):
        if part not in saved:
            raise StateMismatch("state_dict", expected=f"an entry {part!r}", got=repr([*saved]))
    _check_sizes(groups, saved["param_groups"])
    indices = _indices(saved)
    for index in saved["state"]:
        if index not in indices:
            got = "one that no group has"
            raise StateMismatch(f"state of parameter {index!r}", expected="a parameter", got=got)


def saved_states(
    groups: Groups, saved: Mapping[str, Any]
) -> Iterator[tuple[str, int, int, torch.Tensor, Mapping[str, Any]]]:
    """Each parameter that has a saved state: what it is called, its place, itself, that state."""
    for (number, position, param), index in zip(places(groups), _indices(saved), strict=True):
        if saved["state"].get(index):
            yield label_of(groups, number, position), number, position, param, saved["state"][index]


def _indices(saved: Mapping[str, Any]) -> list[Any]:
    return [index for group in saved["param_groups"] for index in group["params"]]


def _check_sizes(groups: Groups, saved: Sequence[Mapping[str, Any]]) -> None:
    sizes, others = ([len(group["params"]) for group in each] for each in (groups, saved))
    if sizes != others:
        wanted = f"{len(sizes)} of {sizes} parameters"
        raise StateMismatch("param_groups", expected=wanted, got=f"{len(others)} of {others}")


def _group(group: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's own parameters and storage, with the numbers that were saved."""
    numbers = {name: value for name, value in saved.items() if name not in OF_OPTIMIZER}
    merged = {**group, **copy.deepcopy(numbers)}
    merged["overrides"] = copy.deepcopy(group["overrides"])
    for position, own in saved.get("overrides", {}).items():
        kept = {name: value for name, value in own.items() if name not in STORAGE}
        if kept:
            merged["overrides"].setdefault(position, {}).update(kept)
    return merged
