"""What is to be known of another optimizer's checkpoints: one object each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch
from tvm_qopt.optim.foreign.moment import Moment, Note

Options = Mapping[str, Any]
Moments = Mapping[str, Moment]

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
"""Entries of torch's groups that say how it computes."""


@dataclass(frozen=True)
class Kind:
    """rules: those of ours that the package has.

    wrote, made: whether a state, a group with no state beside it, is of the package.
    moments: (label, rule, slots, saved state, parameter) -> moment by slot, of those stored.
    options: (rule, saved group) -> our options.
    state: (label, rule, moments, step, parameter, notes) -> a state; it adds a note of each moment
    that had to be re-encoded.
    group: (rule, options) -> a group.
    """

    name: str
    rules: Collection[str]
    wrote: Callable[[Options], bool]
    made: Callable[[Options], bool]
    moments: Callable[[str, str, Sequence[str], Options, torch.Tensor], dict[str, Moment]]
    options: Callable[[str, Options], dict[str, Any]]
    state: Callable[[str, str, Moments, int, torch.Tensor, list[Note]], dict[str, Any]]
    group: Callable[[str, Options], dict[str, Any]]

    def check_rule(self, rule: str) -> None:
        if rule not in self.rules:
            wanted = f"an optimizer whose state {self.name} has: {', '.join(sorted(self.rules))}"
            raise StateMismatch("state_dict", expected=wanted, got=rule)


def refuse_unlike(what: str, kind: str, options: Options, wanted: Options) -> None:
    """Raise for options that the other optimizer has not, or has under another meaning."""
    for name, value in wanted.items():
        if name in options and options[name] != value:
            raise StateMismatch(
                f"{what}: {name}", expected=f"{value!r}, as {kind} has it", got=repr(options[name])
            )
