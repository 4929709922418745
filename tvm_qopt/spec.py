"""What to build: KernelSpec, its readable name, and the arguments of its kernel.

May import layer 0 only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm_qopt.errors import UnknownName, UnsupportedSpec
from tvm_qopt.formats import FAMILIES, StateFormat, get_format
from tvm_qopt.params import SHORT, STORAGE, get_param_format
from tvm_qopt.rules import CLIP_SCALAR, Hyper, Rule, Slot, get_rule

DEFAULT_STATE = "dynamic8"

NAMED_FIELDS = ("block_size", "param", "param_format", "grad")
"""The fields of a spec that its name may leave out."""

BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)

NONFINITE = ("skip", "propagate")
"""Policies for an element whose scaled gradient or new state is not finite, the default first."""

GRAD_SCALE = Hyper("grad_scale", low_open=True)
GNORM_SCALE = Hyper("gnorm_scale")
"""Given at each step beside the rule's own, 1 by default: the gradient is divided by the first
(the loss scale) and multiplied by the second."""

CLIP_GRADIENT = Hyper("clip_gradient", low=-math.inf)
"""With the setting clip_gradient: the scaled gradient is clipped to +-this, element by element;
off where negative (0 is a bound)."""

GRADIENT_SCALAR = "grad_factor"

PER_ELEMENT: tuple[int | str, ...] = ("nb", "B")
PER_BLOCK: tuple[int | str, ...] = ("nb",)
PACKED: tuple[int | str, ...] = ("nb", "B/2")
"""Shapes of arguments; packed: two 4-bit codes a byte, the even element in the high half."""

HYPER, PARAM, BESIDE, GRAD = "hyper", "param", "beside", "grad"
STATE, CONST, COUNTER, WORKSPACE, RNG = "state", "const", "counter", "workspace", "rng"
RESULT = "result"
RNG_SCALARS = ("seed_low", "seed_high", "step")
SCALARS = ("hyper", "rng")  # arguments that are read by name of their elements
OF_PLAN = ("hyper", "workspace", "rng")  # roles of what a plan makes for itself
"""Roles; "beside" is what a parameter format keeps beside the parameter."""


MAIN, TAIL, SERIAL, ANY = "main", "tail", "main_serial", "main_any"
"""Entry points: full blocks; the short last block; full blocks on the calling thread; full blocks
of tensors that are aligned to their elements only."""

GATE, ADVANCE = "gate", "advance"
STEP_ENTRIES = (GATE, ADVANCE)
"""Entry points of GPU kinds with one thread, ahead of the update on its stream.  `gate` puts NaN in
place of the gradient's factor where found_inf is not 0, and a kernel that reads it there writes
nothing.  `advance` counts the step and forms `hyper` from `clock`, or does what `gate` does."""


def norm_tensor(number: int, name: str) -> str:
    """The argument that holds a norm's partial sums of squares, of norm pass `number`."""
    return f"norm{number}_{name}"


def norms_entry(number: int, part: str) -> str:
    """The entry point of norm pass `number` for a part of the tensor (main, tail, ...)."""
    return f"norms{number}_{part}"


MANY = "_many"


CHUNKS, PLACES = "chunks", "places"
"""What an entry point for many tensors has in place of a size, int64.  places: for each tensor the
distance in elements of each of its arguments, by name in order, from the one that the kernel gets,
then its size (nb or B).  chunks: for each group of threads, where in `places` its tensor begins
times 2^32, and its number among the groups of that tensor."""


def many_entry(entry: str) -> str:
    """The entry point for many tensors, where a kind has them."""
    return entry + MANY


def norms_of(entry: str) -> tuple[int | None, str]:
    """The inverse: (number, part), (None, part) for an entry point of the update."""
    found = re.fullmatch(r"norms(\d+)_(\w+)", entry)
    return (int(found[1]), found[2]) if found else (None, entry)


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

    def sizes(self, blocks: int, size: int) -> tuple[int, ...]:
        """The shape for a number of blocks of a size."""
        values = {"nb": blocks, "B": size, "B/2": (size + 1) // 2}
        return tuple(values[s] if isinstance(s, str) else s for s in self.shape)

    def start(self, block: int, size: int) -> int:
        """The flat index of the first element of a block."""
        whole = self.sizes(1, size)
        return block * (whole[-1] if len(whole) == 2 else 1) if self.shape[0] == "nb" else 0

    def held(self, elements: int, size: int) -> tuple[int, ...] | None:
        """The flat shape that the user holds for a number of elements; None: the parameter's."""
        if self.per_element:
            return None
        if self.shape == PACKED:
            return ((elements + 1) // 2,)
        return self.sizes(-(-elements // size), size)


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
    param_format: str = "plain"
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        rule: str,
        state: str = DEFAULT_STATE,
        *,
        block_size: int = 256,
        param: str = "float32",
        grad: str | None = None,
        param_format: str = "plain",
        **settings: Any,
    ) -> KernelSpec:
        """A spec from a rule's name and a state: a format, a family, or formats joined by "+".

        grad is the parameter's dtype where not given.  Raises UnknownName and UnsupportedSpec.
        """
        formats = _formats_of(get_rule(rule), state, settings)
        grad = param if grad is None else grad
        choices = rule_choices(get_rule(rule), formats)
        different = _canonical(rule, choices, settings)
        return cls(rule, formats, block_size, param, grad, param_format, different)

    def __post_init__(self) -> None:
        if not isinstance(self.state, tuple):
            raise UnsupportedSpec(f"state: a tuple of format names, got {self.state!r}")
        slots = self.rule_.slots(self.all_settings)
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
        dtypes = get_param_format(self.param_format).dtypes
        if self.param not in dtypes:
            raise UnsupportedSpec(
                f"param: {self.param_format} weights are one of {dtypes}, got {self.param!r}"
            )
        _canonical(self.rule, self.choices, dict(self.settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return KernelSpec.parse, (self.name,)

    @cached_property
    def rule_(self) -> Rule:
        return get_rule(self.rule)

    @cached_property
    def slots(self) -> tuple[tuple[Slot, StateFormat], ...]:
        return tuple(
            zip(self.rule_.slots(self.all_settings), map(get_format, self.state), strict=True)
        )

    @cached_property
    def choices(self) -> Mapping[str, tuple[Any, ...]]:
        """Every setting of this spec with its choices, the default first."""
        return rule_choices(self.rule_, self.state)

    @cached_property
    def all_settings(self) -> Mapping[str, Any]:
        """Every setting with its value."""
        return {name: values[0] for name, values in self.choices.items()} | dict(self.settings)

    @property
    def state_name(self) -> str:
        """The family where all slots follow it, else the formats joined by "+"."""
        for family in FAMILIES:
            if _formats_of(self.rule_, family, dict(self.settings)) == self.state:
                return family
        return self.state[0] if len(set(self.state)) == 1 else "+".join(self.state)

    @property
    def name(self) -> str:
        """For example adamw-dynamic8-b256-p_bf16-g_f32-nonfinite_propagate; also a file name."""
        parts = [self.rule, self.state_name, f"b{self.block_size}"]
        how = "" if self.param_format == "plain" else f"_{self.param_format}"
        parts += [f"p_{SHORT[self.param]}{how}", f"g_{SHORT[self.grad]}"]
        parts += [f"{name}_{_setting_text(value)}" for name, value in self.settings]
        return "-".join(parts)

    @classmethod
    def parse(cls, name: str) -> KernelSpec:
        """The spec of a name as `name` writes it; block size and dtypes may be left out."""
        rule, _, rest = name.partition("-")
        state, *parts = rest.split("-") if rest else [DEFAULT_STATE]
        given: dict[str, Any] = {}
        for part in parts:
            for what, value in _read_part(part).items():
                if what in given:
                    raise UnsupportedSpec(f"spec name: {name!r} gives {what} twice")
                given[what] = value
        fields = {what: given.pop(what) for what in NAMED_FIELDS if what in given}
        return cls.of(rule, state, **fields, **parse_settings(get_rule(rule), state, given))

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The layout of the float32 tensor `hyper`: what the kernel reads, in order."""
        clip = (CLIP_SCALAR,) if self.all_settings["clip_gradient"] else ()
        return (GRADIENT_SCALAR, *clip, *self.rule_.scalars)

    @cached_property
    def hyper(self) -> tuple[Hyper, ...]:
        """What the user gives at each step, beside grad_scale and gnorm_scale."""
        clip = (CLIP_GRADIENT,) if self.all_settings["clip_gradient"] else ()
        return (*self.rule_.hyper(self.all_settings), *clip)

    @cached_property
    def clock(self) -> tuple[str, ...]:
        """The layout of the float64 tensor from which `advance` forms `hyper`."""
        return ("step", *(h.name for h in self.hyper), GRAD_SCALE.name, GNORM_SCALE.name)

    def step_arguments(self, entry: str) -> tuple[str, ...]:
        """The arguments of `gate` and `advance`, in order."""
        if entry == GATE:
            return ("hyper", "found_inf")
        random = any(t.name == "rng" for t in self.tensors)
        return ("clock", "found_inf", "hyper", *(("rng",) if random else ()))

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The arguments of the kernel, in order; outputs are updated in place."""
        rule, weights = self.rule_, get_param_format(self.param_format)
        written = rule.result == "param"
        tensors = [
            TensorSpec("hyper", HYPER, (len(self.scalars),), "float32"),
            TensorSpec("param", PARAM, PER_ELEMENT, self.param, output=written),
            *(TensorSpec(n, BESIDE, PER_ELEMENT, d, output=written) for n, d in weights.beside),
        ]
        if rule.reads_grad:
            tensors.append(TensorSpec("grad", GRAD, PER_ELEMENT, self.grad))
        for slot, format_ in self.slots:
            tensors += _slot_tensors(slot.name, format_, output=rule.writes_state)
        if weights.random:
            tensors.append(TensorSpec("rng", RNG, (len(RNG_SCALARS),), "int32"))
            tensors.append(TensorSpec("block_number", RNG, PER_BLOCK, "int32"))
        if rule.result not in (None, "param"):
            tensors.append(TensorSpec(rule.result, RESULT, PER_ELEMENT, self.param, output=True))
        tensors.append(TensorSpec("nonfinite_count", COUNTER, PER_BLOCK, "int32", output=True))
        for number, norms in enumerate(rule.norms):
            for name in norms.names:
                partial = norm_tensor(number, name)
                tensors.append(TensorSpec(partial, WORKSPACE, PER_BLOCK, "float32", output=True))
        return tuple(tensors)

    def outputs(self, norms: int | None = None) -> tuple[TensorSpec, ...]:
        """What the update writes, or what norm pass `norms` writes."""
        if norms is None:
            return tuple(t for t in self.tensors if t.output and t.role != WORKSPACE)
        names = {norm_tensor(norms, name) for name in self.rule_.norms[norms].names}
        return tuple(t for t in self.tensors if t.name in names)


def _slot_tensors(slot: str, format_: StateFormat, *, output: bool) -> list[TensorSpec]:
    """A slot's value, or its codes, scale and map."""
    if format_.dtype is not None:
        return [TensorSpec(slot, STATE, PER_ELEMENT, format_.dtype, output=output)]
    shape = PACKED if format_.bits == 4 else PER_ELEMENT
    tensors = [
        TensorSpec(f"{slot}_codes", STATE, shape, "uint8", output=output),
        TensorSpec(f"{slot}_scale", STATE, PER_BLOCK, "float32", output=output),
    ]
    if format_.runtime_map:
        tensors.append(TensorSpec(f"{slot}_qmap", CONST, (2**format_.bits,), "float32"))
    return tensors


def rule_choices(rule: Rule, formats: tuple[str, ...] = ()) -> Mapping[str, tuple[Any, ...]]:
    """Every setting of a rule with these formats, and its choices, the default first."""
    choices: dict[str, tuple[Any, ...]] = {"nonfinite": NONFINITE, "clip_gradient": (False, True)}
    if rule.zeroes is not None:
        choices["zero_rule"] = (True, False)
    for name in formats:
        choices.update(get_format(name).settings)
    return {**choices, **rule.settings}


def _canonical(
    rule: str, choices: Mapping[str, tuple[Any, ...]], settings: Mapping[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """The settings that differ from their defaults, sorted; raises for what does not exist."""
    for name, value in settings.items():
        if name not in choices:
            raise UnknownName(f"setting of {rule}", name, choices)
        if not any(type(value) is type(choice) and value == choice for choice in choices[name]):
            raise UnsupportedSpec(f"{name}: one of {choices[name]}, got {value!r}")
    return tuple(sorted((n, v) for n, v in settings.items() if v != choices[n][0]))


def _slots_of(rule: Rule, settings: Mapping[str, Any]) -> tuple[Slot, ...]:
    return rule.slots({**rule.defaults, **settings})


def _formats_of(rule: Rule, state: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    slots = _slots_of(rule, settings)
    if state in FAMILIES:
        signed, nonnegative = FAMILIES[state]
        return tuple(nonnegative if slot.nonnegative else signed for slot in slots)
    names = state.split("+")
    for name in names:
        get_format(name)
    return tuple(names * len(slots) if len(names) == 1 else names)


def _read_part(part: str) -> dict[str, Any]:
    """What a part of a spec's name says: fields with their values, a setting with its text."""
    if re.fullmatch(r"b\d+", part):
        return {"block_size": int(part[1:])}
    what, underscore, value = part.rpartition("_")
    if not underscore:
        forms = ("b<block size>", "p_<dtype>", "g_<dtype>", "<setting>_<value>")
        raise UnknownName("part of a spec's name", part, forms)
    if not part.startswith(("p_", "g_")):
        return {what: value}
    role, short, *param_format = part.split("_", 2)
    dtypes = {short: dtype for dtype, short in SHORT.items()}
    if short not in dtypes:
        raise UnknownName("dtype", short, dtypes)
    if role == "p" and param_format:
        return {"param": dtypes[short], "param_format": param_format[0]}
    return {"param" if role == "p" else "grad": dtypes[short]}


def _setting_text(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def parse_settings(rule: Rule, state: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Settings from a name: the choice that is written so."""
    if not texts:
        return {}
    choices = rule_choices(rule, _named_formats(state))
    typed = {}
    for name, text in texts.items():
        if name not in choices:
            raise UnknownName(f"setting of {rule.name}", name, choices)
        by_text = {_setting_text(choice): choice for choice in choices[name]}
        if text not in by_text:
            raise UnknownName(f"value of the setting {name}", text, by_text)
        typed[name] = by_text[text]
    return typed


def _named_formats(state: str) -> tuple[str, ...]:
    """The formats that a state's name speaks of, whichever slots they are for."""
    return FAMILIES[state] if state in FAMILIES else tuple(state.split("+"))
