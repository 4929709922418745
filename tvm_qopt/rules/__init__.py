"""Update rules: pure functions over an array namespace, one file each, and their registry.

May import layer 0 only.  To add a rule: write its file with `@rule` and name it at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm_qopt.errors import HyperOutOfRange, UnknownName
from tvm_qopt.xp import ArrayNamespace, Value

Settings = Mapping[str, Any]
Update = Callable[
    [ArrayNamespace, SimpleNamespace, Value, Value, dict[str, Value], Settings],
    tuple[Value, dict[str, Value]],
]
Derive = Callable[[Mapping[str, float], int, Settings], Mapping[str, float]]


@dataclass(frozen=True)
class Hyper:
    """A scalar that the user gives at each step, with the range in which the rule is defined."""

    name: str
    low: float = 0.0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True

    @property
    def range(self) -> str:
        return (
            f"a number in {'(' if self.low_open else '['}{self.low:g}, "
            f"{self.high:g}{')' if self.high_open else ']'}"
        )

    def check(self, value: object) -> float:
        """Return the value as a float, or raise HyperOutOfRange (NaN is in no range)."""
        try:
            number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            raise HyperOutOfRange(self.name, expected=self.range, got=repr(value)) from None
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        if not (above and below):
            raise HyperOutOfRange(self.name, expected=self.range, got=repr(value))
        return number


LR = Hyper("lr")
BETA1 = Hyper("beta1", high=1.0)
BETA2 = Hyper("beta2", high=1.0)
WEIGHT_DECAY = Hyper("weight_decay")
EPS = Hyper("eps", low=1e-35, high=1e30)
LEAST_NORMAL = 2.0**-126


def normal_eps(eps: float) -> float:
    """An eps as the kernel adds it: one that float32 rounds to 0 would let 0/0 through."""
    if not eps >= LEAST_NORMAL:
        wanted = "a value that float32 can still hold after the bias correction"
        raise HyperOutOfRange("eps", expected=wanted, got=f"{eps:g} after it")
    return eps


@dataclass(frozen=True)
class Slot:
    """A state tensor of a rule, by torch's name; a nonnegative one may use unsigned codes."""

    name: str
    nonnegative: bool


@dataclass(frozen=True)
class Rule:
    """An update p, state = update(xp, h, p, g, state, settings) with all that surrounds it.

    hyper: what the user gives at each step.  scalars: what the kernel reads as h.<name>, made by
    derive(hyper, step, settings) on the host.  settings: name -> choices, the default first.
    root: the slot whose square root divides the update; where it decodes to exactly 0 the other
    slots count as 0 (setting zero_rule), since a moment divided by eps alone is never meant.
    """

    name: str
    update: Update
    slots: tuple[Slot, ...]
    hyper: tuple[Hyper, ...]
    scalars: tuple[str, ...]
    derive: Derive
    settings: Mapping[str, tuple[Any, ...]]
    root: str | None
    first_step: Callable[[Settings], int]

    @property
    def summary(self) -> str:
        return (self.update.__doc__ or self.name).strip().splitlines()[0]


RULES: dict[str, Rule] = {}


def rule(
    *,
    slots: tuple[str, ...],
    hyper: tuple[Hyper, ...],
    scalars: tuple[str, ...],
    derive: Derive,
    settings: Mapping[str, tuple[Any, ...]] | None = None,
    root: str | None = None,
    first_step: Callable[[Settings], int] = lambda _: 1,
) -> Callable[[Update], Update]:
    """Register the decorated update under its function's name; "+slot" marks a nonnegative slot."""

    def register(update: Update) -> Update:
        name = update.__name__
        if name in RULES:
            raise ValueError(f"rule {name!r} is registered twice")
        RULES[name] = Rule(
            name=name,
            update=update,
            slots=tuple(Slot(s.lstrip("+"), s.startswith("+")) for s in slots),
            hyper=hyper,
            scalars=scalars,
            derive=derive,
            settings=dict(settings or {}),
            root=root,
            first_step=first_step,
        )
        return update

    return register


def get_rule(name: str) -> Rule:
    if name not in RULES:
        raise UnknownName("rule", name, RULES)
    return RULES[name]


from tvm_qopt.rules import adamw as adamw  # noqa: E402
