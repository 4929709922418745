"""A state_dict of another optimizer, read into groups and states of ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from tvm_qopt.optim.checkpoint import OF_OPTIMIZER, check_parts, saved_states, spec_at
from tvm_qopt.optim.engine import Groups
from tvm_qopt.optim.foreign.kind import Kind
from tvm_qopt.optim.foreign.moment import Note
from tvm_qopt.optim.foreign.place import placed, warn
from tvm_qopt.optim.forms import Form
from tvm_qopt.optim.options import check_options
from tvm_qopt.optim.state import STEP, State, step_of

STEPLESS = ("sgd",)
"""Rules that count no steps in torch; a buffer says that one was made."""


def read_foreign(
    kind: Kind, rule: str, form: Form, groups: Groups, saved: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[torch.Tensor, State]]:
    """New groups and states; raises StateMismatch, and changes nothing.

    Warns once (StateReencoded) where a moment could not be taken as it is.
    """
    check_parts(groups, saved)
    kind.check_rule(rule)
    fresh = [
        _group(kind, rule, group, other)
        for group, other in zip(groups, saved["param_groups"], strict=True)
    ]
    for group in fresh:
        check_options(rule, form, group)
    states, notes = {}, list[Note]()
    for label, number, position, param, state in saved_states(fresh, saved):
        if any(value is not None and key != STEP for key, value in state.items()):
            spec = spec_at(rule, form, fresh, number, position)
            states[param] = read_state(kind, label, state, spec, param, notes)
    warn(f"a state of {kind.name}", notes, stacklevel=3)
    return fresh, states


def read_state(
    kind: Kind,
    label: str,
    saved: Mapping[str, Any],
    spec: Any,
    param: torch.Tensor,
    notes: list[Note],
) -> State:
    """The state of one parameter."""
    slots = [slot.name for slot, _ in spec.slots]
    moments = kind.moments(label, spec.rule, slots, saved, param)
    step = 1 if STEP not in saved and spec.rule in STEPLESS else step_of(label, saved)
    return placed(label, moments, step, spec, param, notes)


def _group(
    kind: Kind, rule: str, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """A group's own parameters and storage, with the numbers that were saved."""
    numbers = kind.options(rule, saved)
    kept = {name: value for name, value in numbers.items() if name not in OF_OPTIMIZER}
    return {**group, **copy.deepcopy(kept), "overrides": copy.deepcopy(group["overrides"])}
