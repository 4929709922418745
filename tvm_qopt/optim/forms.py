"""How the constructor of each rule looks: its arguments after the peers, and what they mean to the
rule.  A rule that is not named here gets a form from its own declaration.

May import layer 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_qopt.errors import HyperOutOfRange
from tvm_qopt.rules import Hyper, get_rule
from tvm_qopt.spec import rule_choices

Options = Mapping[str, Any]

REQUIRED = object()
"""The default of an argument that has none."""

BETAS = ("beta1", "beta2", "beta3")


@dataclass(frozen=True)
class Form:
    """arguments: name -> default, in order, of which the first `positional` may stand without
    their names.  settings: options -> settings of the rule, beside those of the options' names.
    constants: option -> the number that stands for None.  initial: slot -> the option that its
    elements start from.
    """

    arguments: Mapping[str, Any]
    positional: int = 4
    settings: Callable[[Options], dict[str, Any]] = lambda options: {}
    constants: Mapping[str, float] = field(default_factory=dict)
    initial: Mapping[str, str] = field(default_factory=dict)


def _sgd_settings(options: Options) -> dict[str, Any]:
    if options["nesterov"] and (float(options["momentum"]) <= 0 or options["dampening"] != 0):
        got = f"momentum={options['momentum']!r}, dampening={options['dampening']!r}"
        raise HyperOutOfRange("nesterov", expected="momentum > 0 and dampening 0", got=got)
    momentum = "nesterov" if options["nesterov"] else "on" if options["momentum"] else "off"
    return {"momentum": momentum}


def _fp16_settings(options: Options) -> dict[str, Any]:
    decay = "absolute" if options["absolute"] else "decoupled"
    return {
        "form": "optimized" if options["optimized_update"] else "plain",
        "decay": decay if options["weight_decouple"] else "coupled",
    }


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
LAMB = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2}
BOUNDS = {"lower_bound": -1.0, "upper_bound": -1.0}

FORMS: dict[str, Form] = {
    "adam": Form(ADAM),
    "adamw": Form({**ADAM, "weight_decay": 1e-2}),
    "adam_fp16": Form(
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-16,
            "weight_decay": 0.0,
            "optimized_update": True,
            "weight_decouple": True,
            "absolute": False,
        },
        settings=_fp16_settings,
    ),
    "sgd": Form(
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        settings=_sgd_settings,
    ),
    "lion": Form({"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, positional=3),
    "rmsprop": Form(
        {
            "lr": 1e-2,
            "alpha": 0.99,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "momentum": 0.0,
            "centered": False,
        },
        settings=lambda options: {"momentum": options["momentum"] != 0},
    ),
    "adagrad": Form(
        {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        },
        initial={"sum": "initial_accumulator_value"},
    ),
    "ademamix": Form(
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999, 0.9999),
            "alpha": 5.0,
            "t_alpha": None,
            "t_beta3": None,
            "eps": 1e-8,
            "weight_decay": 1e-2,
        },
        settings=lambda options: {
            "warm_up": options["t_alpha"] is not None or options["t_beta3"] is not None
        },
        constants={"t_alpha": 1.0, "t_beta3": 1.0},
    ),
    "lamb": Form({**LAMB, "bias_correction": True, **BOUNDS}),
    "lans": Form({**LAMB, **BOUNDS}),
    "lars": Form(
        {
            "lr": REQUIRED,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "eps": 1e-8,
            "trust_coefficient": 1e-3,
        },
        positional=2,  # bitsandbytes has dampening next
    ),
}

USUAL = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}

MEANING = {
    "lr": "learning rate, a number or a one-element tensor",
    "betas": "decay rates of the moments",
    "eps": "added to the root of the second moment; positive",
    "weight_decay": "decay of the weights, coupled or not as said above",
    "amsgrad": "divide by the root of the largest second moment so far (Reddi et al. 2018)",
    "momentum": "factor of the buffer",
    "dampening": "of the gradient on its way into the buffer",
    "nesterov": "Nesterov's form; needs momentum > 0 and dampening 0",
    "alpha": "decay rate of the second moment; in AdEMAMix the weight of the slow moment",
    "centered": "divide by the root of the variance",
    "lr_decay": "lr is divided by 1 + (step - 1) lr_decay",
    "initial_accumulator_value": "what the sum of squares starts from",
    "t_alpha": "steps over which alpha rises; None: it is constant",
    "t_beta3": "steps over which the third beta rises; None: it is constant",
    "bias_correction": "of both moments",
    "lower_bound": "of the weight's norm in the trust ratio; off where negative",
    "upper_bound": "of the weight's norm in the trust ratio; off where negative",
    "trust_coefficient": "factor of the trust ratio",
    "optimized_update": "eps beside the uncorrected root; False: as torch has it",
    "weight_decouple": "decay the weight itself, not through the gradient",
    "absolute": "decay by weight_decay alone, not lr weight_decay",
}


def form_of(rule: str) -> Form:
    """The form of a rule; one without an entry takes its hyper-parameters and settings by name."""
    if rule in FORMS:
        return FORMS[rule]
    declared = get_rule(rule)
    hyper = declared.hyper(declared.defaults)
    defaults = {h.name: USUAL.get(h.name, h.default) for h in hyper}
    given = {name: REQUIRED if value is None else value for name, value in defaults.items()}
    betas = tuple(given.pop(name) for name in BETAS if name in given)
    arguments = {"lr": given.pop("lr")} if "lr" in given else {}
    arguments |= {"betas": REQUIRED if REQUIRED in betas else betas} if betas else {}
    settings = {name: choices[0] for name, choices in declared.settings.items()}
    return Form({**arguments, **given, **settings}, positional=0)


def settings_of(rule: str, form: Form, options: Options) -> dict[str, Any]:
    """The settings of the rule that the options ask for."""
    by_name = {name: options[name] for name in rule_choices(get_rule(rule)) if name in options}
    numbers = {h.name for h in get_rule(rule).hyper(get_rule(rule).defaults)}
    plain = {name: value for name, value in by_name.items() if name not in numbers}
    return {**plain, **form.settings(options)}


def hyper_of(rule: str, form: Form, options: Options, settings: Options) -> dict[str, float]:
    """Hyper-parameter -> number, for those that the rule has under its settings."""
    declared = get_rule(rule)
    ranges = declared.hyper({**declared.defaults, **settings})
    return {h.name: number_of(h.name, form, options) for h in ranges}


def number_of(name: str, form: Form, options: Options) -> float:
    if name in BETAS:
        return float(options["betas"][BETAS.index(name)])
    value = options[name]
    return form.constants[name] if value is None else float(value)


def check_hyper(rule: str, form: Form, options: Options, settings: Options) -> None:
    """Raise HyperOutOfRange, under the constructor's names, unless every number is in its range."""
    declared = get_rule(rule)
    ranges = {h.name: h for h in declared.hyper({**declared.defaults, **settings})}
    number = sum(name in BETAS for name in ranges)
    if number:
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != number:
            raise HyperOutOfRange("betas", expected=f"{number} numbers", got=repr(betas))
    for name, h in ranges.items():
        _check(name, h, form, options)


def _check(name: str, h: Hyper, form: Form, options: Options) -> None:
    value = options["betas"][BETAS.index(name)] if name in BETAS else options[name]
    if value is None and name in form.constants:
        return
    try:
        h.check(value)
    except HyperOutOfRange as error:
        shown = f"betas[{BETAS.index(name)}]" if name in BETAS else name
        raise HyperOutOfRange(shown, expected=error.expected, got=error.got) from None
