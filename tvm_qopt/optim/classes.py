"""Optimizer classes from rules: a signature, a docstring and the defaults of the peers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tvm_qopt.optim import forms, options
from tvm_qopt.optim.base import QoptOptimizer
from tvm_qopt.optim.forms import REQUIRED, form_of
from tvm_qopt.optim.options import COMMON
from tvm_qopt.rules import get_rule

VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "8bit": {"state": "8bit"},
    "4bit": {"state": "4bit", "block_size": 128},
    "Fp8": {"state": "fp8"},
}
"""The end of a class's name -> options that have other defaults there."""

BITSANDBYTES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": REQUIRED},
    "lamb": {"eps": 1e-8, "weight_decay": 0.0},
}
"""Where the defaults of its 8-bit classes are not those of torch or the paper."""

EMPTY = inspect.Parameter.empty
ONLY_NAMED = inspect.Parameter.KEYWORD_ONLY
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def optimizer_class(
    rule: str, name: str, *, module: str = __name__, **defaults: Any
) -> type[QoptOptimizer]:
    """A torch optimizer class for a rule of the registry, one of your own included.

    name: of the class, and in `module` the name under which it can be pickled.  defaults: of
    options that differ from the usual, such as state="8bit".
    """
    form = form_of(rule)
    given = {**form.arguments, **COMMON, **defaults}
    options.check_names(defaults, {**form.arguments, **COMMON})
    body = {
        "__doc__": _docstring(rule, given),
        "__module__": module,
        "__signature__": _signature(form.positional, given),
        "rule": rule,
        "form": form,
    }
    return type(name, (QoptOptimizer,), body)


def classes_of(rule: str, name: str, *variants: str, module: str) -> list[type[QoptOptimizer]]:
    """The classes of a rule with other states: those of VARIANTS, under `name` + variant."""
    return [
        optimizer_class(rule, name + each, module=module, **_defaults(rule, each))
        for each in variants
    ]


def _defaults(rule: str, variant: str) -> dict[str, Any]:
    own = BITSANDBYTES.get(rule, {}) if variant == "8bit" else {}
    return {**VARIANTS[variant], **own}


def _signature(positional: int, given: Mapping[str, Any]) -> inspect.Signature:
    """params, the rule's arguments, and the common ones by name."""
    parameters = [inspect.Parameter("params", POSITIONAL)]
    for i, (name, default) in enumerate(given.items()):
        kind = POSITIONAL if i < positional else ONLY_NAMED
        default = EMPTY if default is REQUIRED else default
        parameters.append(inspect.Parameter(name, kind, default=default))
    parameters.append(inspect.Parameter("overrides", ONLY_NAMED, default=None))
    return inspect.Signature(parameters)


def _docstring(rule: str, given: Mapping[str, Any]) -> str:
    declared = get_rule(rule)
    text = inspect.cleandoc(declared.update.__doc__ or rule)
    meanings = {**options.MEANING, **forms.MEANING}
    lines = [
        text,
        "",
        "State is kept as `state` says, in float32 for parameters of fewer than `min_8bit_size`",
        "elements; options may be given by group, and by parameter with `overrides`.",
        "",
        "Parameters",
        "----------",
        "params : parameters, named parameters, or groups of them as dicts.",
    ]
    for name, default in given.items():
        shown = "required" if default is REQUIRED else f"default {default!r}"
        lines.append(f"{name} : {meanings.get(name, 'of the rule')} ({shown}).")
    lines.append(f"overrides : {meanings['overrides']} (default None).")
    return "\n".join(lines)
