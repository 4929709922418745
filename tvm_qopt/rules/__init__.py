"""Update rules: pure functions over an array namespace, one file each, and their registry.

May import layer 0 only.  To add a rule: write its file with `@rule` and name it at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm_qopt.errors import HyperOutOfRange, NameTaken, UnknownName, UnsupportedSpec
from tvm_qopt.xp import ArrayNamespace, Value

Settings = Mapping[str, Any]
Update = Callable[
    [ArrayNamespace, SimpleNamespace, Value, Value, dict[str, Value], Settings],
    tuple[Value, dict[str, Value]],
]
Zeroes = tuple[str, tuple[str, ...]]
Derive = Callable[[Mapping[str, float], int, Settings], Mapping[str, float]]


@dataclass(frozen=True)
class Hyper:
    """A scalar that the user gives at each step, with the range in which the rule is defined."""

    name: str
    low: float = 0.0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True
    default: float | None = None

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
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise HyperOutOfRange(self.name, expected=self.range, got=repr(value)) from None
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        if not (above and below):
            raise HyperOutOfRange(self.name, expected=self.range, got=repr(value))
        return number


CLIP_SCALAR = "grad_clip"
"""The scalar that holds the bound of the element-wise clip, where there is one."""

LR = Hyper("lr")
BETA1 = Hyper("beta1", high=1.0)
BETA2 = Hyper("beta2", high=1.0)
MOMENTUM = Hyper("momentum")
WEIGHT_DECAY = Hyper("weight_decay")
EPS = Hyper("eps", low=1e-35, high=1e30)
LEAST_NORMAL = 2.0**-126


def normal_eps(eps: float) -> float:
    """An eps as the kernel adds it: one that float32 rounds to 0 would let 0/0 through."""
    if not eps >= LEAST_NORMAL:
        wanted = "a value that float32 can still hold after the bias correction"
        raise HyperOutOfRange("eps", expected=wanted, got=f"{eps:g} after it")
    return eps


def root_beside(xp: ArrayNamespace, v: Value, eps: Value) -> Value:
    """sqrt(v) + eps, to the bit.

    A root below half a unit of eps adds nothing.  So none is taken of less than that: the root of a
    denormal takes a CPU twice as long.
    """
    if xp.predicates:
        return xp.sqrt(v) + eps
    least = eps * 2.0**-26
    return xp.sqrt(xp.maximum(v, xp.minimum(least, 1.0) * least)) + eps


TAKEN = (
    *("hyper", "param", "param_master", "param_low", "grad", "nonfinite_count", "rng"),
    *("block_number", "clock", "found_inf", "nb", "B", "chunks", "places"),
)
"""Names of what kernels read beside slots, on some target: a slot has another."""


@dataclass(frozen=True)
class Slot:
    """A state tensor of a rule, by torch's name; a nonnegative one may use unsigned codes."""

    name: str
    nonnegative: bool

    @classmethod
    def parse(cls, text: str) -> Slot:
        name = text.lstrip("+")
        if name in TAKEN:
            raise UnsupportedSpec(f"slot {name}: kernels have another argument of this name")
        return cls(name, text.startswith("+"))


@dataclass(frozen=True)
class Norms:
    """Euclidean norms that a rule needs of the whole tensor before its update.

    terms(xp, h, p, g, state, settings) -> (name -> value, the new state where it is known yet);
    finish(norms, hyper, settings) -> scalar name -> value, for scalars that the update reads.
    Elements with a gradient or new state that is not finite do not count, but where `masked` is
    off: there they make the norm so.  Squares are summed by
    blocks in float32: a norm beyond 1e19 skips the step, elements below 1e-23 count as 0.
    """

    names: tuple[str, ...]
    terms: Callable[..., tuple[dict[str, Value], dict[str, Value]]]
    scalars: tuple[str, ...]
    finish: Callable[[Mapping[str, float], Mapping[str, float], Settings], Mapping[str, float]]
    masked: bool = True


@dataclass(frozen=True)
class Rule:
    """An update p, state = update(xp, h, p, g, state, settings) with all that surrounds it.

    The update binds each new state as "<slot>_new".  slots and hyper may depend on the settings.
    hyper: what the user gives at each step.  scalars: what the kernel reads as h.<name>, made by
    derive(hyper, step, settings) on the host, or by `norms`, passes over the tensor ahead of the
    update, in order: each may read what those before it made.  settings: name -> choices, the
    default first.
    result: what the update's first value becomes: the parameter, else a tensor of this name and of
    the parameter's dtype, beside a parameter that is only read; None where there is no such value.
    clips_itself: the element-wise clip is the update's (h.grad_clip), not made ahead of it.
    zeroes: a second moment and what it is to divide: where the former decodes to exactly 0 the
    latter counts as 0 (setting zero_rule), since a moment divided by eps alone is never meant.
    """

    name: str
    update: Update
    slots: Callable[[Settings], tuple[Slot, ...]]
    hyper: Callable[[Settings], tuple[Hyper, ...]]
    scalars: tuple[str, ...]
    derive: Derive
    settings: Mapping[str, tuple[Any, ...]]
    zeroes: Callable[[Settings], Zeroes] | None
    first_step: Callable[[Settings], int]
    norms: tuple[Norms, ...] = ()
    result: str | None = "param"
    reads_grad: bool = True
    writes_state: bool = True
    clips_itself: bool = False

    @property
    def defaults(self) -> Settings:
        """The rule's own settings at their defaults."""
        return {name: choices[0] for name, choices in self.settings.items()}

    @property
    def is_update(self) -> bool:
        """Whether it moves the parameter along a gradient; others are operators only."""
        return self.reads_grad and self.result == "param"

    @property
    def summary(self) -> str:
        return (self.update.__doc__ or self.name).strip().splitlines()[0]


RULES: dict[str, Rule] = {}


def rule(
    *,
    slots: tuple[str, ...] | Callable[[Settings], tuple[str, ...]],
    hyper: tuple[Hyper, ...] | Callable[[Settings], tuple[Hyper, ...]],
    scalars: tuple[str, ...],
    derive: Derive,
    settings: Mapping[str, tuple[Any, ...]] | None = None,
    zeroes: Zeroes | Callable[[Settings], Zeroes] | None = None,
    first_step: Callable[[Settings], int] = lambda _: 1,
    norms: tuple[Norms, ...] = (),
    result: str | None = "param",
    reads_grad: bool = True,
    writes_state: bool = True,
    clips_itself: bool = False,
) -> Callable[[Update], Update]:
    """Register the decorated update under its function's name; "+slot" marks a nonnegative slot."""

    def register(update: Update) -> Update:
        name = update.__name__
        if name in RULES:
            raise NameTaken("rule", name)
        RULES[name] = Rule(
            name=name,
            update=update,
            slots=lambda settings: tuple(map(Slot.parse, _by_settings(slots, settings))),
            hyper=lambda settings: _by_settings(hyper, settings),
            scalars=scalars,
            derive=derive,
            settings=dict(settings or {}),
            zeroes=None if zeroes is None else lambda settings: _by_settings(zeroes, settings),
            first_step=first_step,
            norms=norms,
            result=result,
            reads_grad=reads_grad,
            writes_state=writes_state,
            clips_itself=clips_itself,
        )
        return update

    return register


def _by_settings(given: Any, settings: Settings) -> Any:
    return given(settings) if callable(given) else given


def get_rule(name: str) -> Rule:
    if name not in RULES:
        raise UnknownName("rule", name, RULES)
    return RULES[name]


from tvm_qopt.rules import adagrad as adagrad  # noqa: E402
from tvm_qopt.rules import adam as adam  # noqa: E402
from tvm_qopt.rules import adam_fp16 as adam_fp16  # noqa: E402
from tvm_qopt.rules import adamw as adamw  # noqa: E402
from tvm_qopt.rules import adamw_mxnet as adamw_mxnet  # noqa: E402
from tvm_qopt.rules import ademamix as ademamix  # noqa: E402
from tvm_qopt.rules import convert as convert  # noqa: E402
from tvm_qopt.rules import lamb as lamb  # noqa: E402
from tvm_qopt.rules import lans as lans  # noqa: E402
from tvm_qopt.rules import lars as lars  # noqa: E402
from tvm_qopt.rules import lion as lion  # noqa: E402
from tvm_qopt.rules import rmsprop as rmsprop  # noqa: E402
from tvm_qopt.rules import sgd as sgd  # noqa: E402
