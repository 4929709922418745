"""What to build: KernelSpec, its readable name, and the arguments of its kernel.

May import layer 0 only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm_qopt.errors import UnknownName, UnsupportedSpec
from tvm_qopt.formats import FAMILIES, FORMATS, StateFormat, get_format
from tvm_qopt.params import SHORT, STORAGE
from tvm_qopt.rules import Hyper, Rule, Slot, get_rule

BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)

NONFINITE = ("skip", "propagate")
"""Policies for an element whose scaled gradient or new state is not finite, the default first."""

GRAD_SCALE = Hyper("grad_scale", low_open=True)
GNORM_SCALE = Hyper("gnorm_scale")
"""Given at each step beside the rule's own, 1 by default: the gradient is divided by the first
(the loss scale) and multiplied by the second."""

GRADIENT_SCALAR = "grad_factor"

PER_ELEMENT: tuple[int | str, ...] = ("nb", "B")
PER_BLOCK: tuple[int | str, ...] = ("nb",)

HYPER, PARAM, GRAD, STATE, CONST, COUNTER = "hyper", "param", "grad", "state", "const", "counter"


@dataclass(frozen=True)
class TensorSpec:
    """One argument of a kernel.

    shape: of integers and "nb" (number of blocks), "B" (block size).  dtype: what the user holds;
    storage: what the kernel's argument is declared as, of the same width.
    """

    name: str
    role: str
    shape: tuple[int | str, ...]
    dtype: str
    output: bool = False

    @property
    def storage(self) -> str:
        return STORAGE.get(self.dtype, self.dtype)

    @property
    def per_element(self) -> bool:
        return self.shape == PER_ELEMENT


@dataclass(frozen=True)
class KernelSpec:
    """The full description of a kernel; hashable, and `KernelSpec.parse(spec.name) == spec`.

    state: a format for each slot of the rule.  settings: the variants of rule, formats and
    definition that differ from their defaults, sorted.  Make one with `KernelSpec.of`.
    """

    rule: str
    state: tuple[str, ...]
    block_size: int
    param: str
    grad: str
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        rule: str,
        state: str = "dynamic8",
        *,
        block_size: int = 256,
        param: str = "float32",
        grad: str | None = None,
        **settings: Any,
    ) -> KernelSpec:
        """A spec from a rule's name and a state: a format, a family, or formats joined by "+".

        grad is the parameter's dtype where not given.  Raises UnknownName and UnsupportedSpec.
        """
        formats = _formats_of(get_rule(rule), state)
        spec = cls(rule, formats, block_size, param, param if grad is None else grad)
        return cls(rule, formats, block_size, spec.param, spec.grad, spec._canonical(settings))

    def __post_init__(self) -> None:
        slots = get_rule(self.rule).slots
        if len(self.state) != len(slots):
            raise UnsupportedSpec(
                f"state: {self.rule} has {len(slots)} slots, got {len(self.state)} formats"
            )
        for slot, name in zip(slots, self.state, strict=True):
            if not slot.nonnegative and not get_format(name).signed:
                raise UnsupportedSpec(f"state: {slot.name} is signed, {name} is not")
        if self.block_size not in BLOCK_SIZES or not isinstance(self.block_size, int):
            raise UnsupportedSpec(f"block_size: one of {BLOCK_SIZES}, got {self.block_size!r}")
        for role, dtype in (("param", self.param), ("grad", self.grad)):
            if dtype not in STORAGE:
                raise UnsupportedSpec(f"{role}: one of {tuple(STORAGE)}, got {dtype!r}")
        self._canonical(dict(self.settings))

    @cached_property
    def rule_(self) -> Rule:
        return get_rule(self.rule)

    @cached_property
    def slots(self) -> tuple[tuple[Slot, StateFormat], ...]:
        return tuple(zip(self.rule_.slots, map(get_format, self.state), strict=True))

    @cached_property
    def choices(self) -> Mapping[str, tuple[Any, ...]]:
        """Every setting of this spec with its choices, the default first."""
        choices: dict[str, tuple[Any, ...]] = {"nonfinite": NONFINITE}
        if self.rule_.root:
            choices["zero_rule"] = (True, False)
        for format_ in {format_.name: format_ for _, format_ in self.slots}.values():
            choices.update(format_.settings)
        return {**choices, **self.rule_.settings}

    @cached_property
    def all_settings(self) -> Mapping[str, Any]:
        """Every setting with its value."""
        return {name: values[0] for name, values in self.choices.items()} | dict(self.settings)

    @property
    def state_name(self) -> str:
        """The family where all slots follow it, else the formats joined by "+"."""
        for family in FAMILIES:
            if _formats_of(self.rule_, family) == self.state:
                return family
        return self.state[0] if len(set(self.state)) == 1 else "+".join(self.state)

    @property
    def name(self) -> str:
        """For example adamw-dynamic8-b256-p_bf16-g_f32-nonfinite_propagate; also a file name."""
        parts = [self.rule, self.state_name, f"b{self.block_size}"]
        parts += [f"p_{SHORT[self.param]}", f"g_{SHORT[self.grad]}"]
        parts += [f"{name}_{_setting_text(value)}" for name, value in self.settings]
        return "-".join(parts)

    @classmethod
    def parse(cls, name: str) -> KernelSpec:
        """The spec of a name as `name` writes it; block size and dtypes may be left out."""
        rule, _, rest = name.partition("-")
        state, *parts = rest.split("-") if rest else ["dynamic8"]
        given: dict[str, Any] = {}
        for part in parts:
            what, value = _read_part(part)
            if what in given:
                raise UnsupportedSpec(f"spec name: {name!r} gives {what} twice")
            given[what] = value
        fields = {
            what: given.pop(what) for what in ("block_size", "param", "grad") if what in given
        }
        plain = cls.of(rule, state, **fields)
        return cls.of(rule, state, **fields, **parse_settings(plain, given))

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The layout of the float32 tensor `hyper`: what the kernel reads, in order."""
        return (GRADIENT_SCALAR, *self.rule_.scalars)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The arguments of the kernel, in order; outputs are updated in place."""
        tensors = [
            TensorSpec("hyper", HYPER, (len(self.scalars),), "float32"),
            TensorSpec("param", PARAM, PER_ELEMENT, self.param, output=True),
            TensorSpec("grad", GRAD, PER_ELEMENT, self.grad),
        ]
        for slot, format_ in self.slots:
            if not format_.scaled:
                tensors.append(TensorSpec(slot.name, STATE, PER_ELEMENT, "float32", output=True))
                continue
            tensors.append(
                TensorSpec(f"{slot.name}_codes", STATE, PER_ELEMENT, "uint8", output=True)
            )
            tensors.append(
                TensorSpec(f"{slot.name}_scale", STATE, PER_BLOCK, "float32", output=True)
            )
            if format_.runtime_map:
                levels = 2**format_.bits
                tensors.append(TensorSpec(f"{slot.name}_qmap", CONST, (levels,), "float32"))
        tensors.append(TensorSpec("nonfinite_count", COUNTER, PER_BLOCK, "int32", output=True))
        return tuple(tensors)

    def _canonical(self, settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """The settings that differ from their defaults, sorted; raises for what does not exist."""
        for name, value in settings.items():
            if name not in self.choices:
                raise UnknownName(f"setting of {self.rule}", name, self.choices)
            choices = self.choices[name]
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                raise UnsupportedSpec(f"{name}: one of {choices}, got {value!r}")
        defaults = {name: values[0] for name, values in self.choices.items()}
        return tuple(sorted((n, v) for n, v in settings.items() if v != defaults[n]))


def _formats_of(rule: Rule, state: str) -> tuple[str, ...]:
    if state in FAMILIES:
        signed, nonnegative = FAMILIES[state]
        return tuple(nonnegative if slot.nonnegative else signed for slot in rule.slots)
    names = state.split("+")
    for name in names:
        if name not in FORMATS:
            raise UnknownName("state", name, {**FORMATS, **FAMILIES})
    return tuple(names * len(rule.slots) if len(names) == 1 else names)


def _read_part(part: str) -> tuple[str, Any]:
    """What a part of a spec's name is about, and its value (of a setting, as text)."""
    if re.fullmatch(r"b\d+", part):
        return "block_size", int(part[1:])
    what, underscore, value = part.rpartition("_")
    if not underscore:
        forms = ("b<block size>", "p_<dtype>", "g_<dtype>", "<setting>_<value>")
        raise UnknownName("part of a spec's name", part, forms)
    if what not in ("p", "g"):
        return what, value
    dtypes = {short: dtype for dtype, short in SHORT.items()}
    if value not in dtypes:
        raise UnknownName("dtype", value, dtypes)
    return "param" if what == "p" else "grad", dtypes[value]


def _setting_text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def parse_settings(spec: KernelSpec, texts: Mapping[str, str]) -> dict[str, Any]:
    """Settings from a name: the choice that is written so."""
    typed = {}
    for name, text in texts.items():
        if name not in spec.choices:
            raise UnknownName(f"setting of {spec.rule}", name, spec.choices)
        by_text = {_setting_text(choice): choice for choice in spec.choices[name]}
        if text not in by_text:
            raise UnknownName(f"value of the setting {name}", text, by_text)
        typed[name] = by_text[text]
    return typed
