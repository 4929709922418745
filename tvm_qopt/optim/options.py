"""The options that every class has, what they may be, and the kernel that they choose.

May import layer 0 only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tvm_qopt.errors import HyperOutOfRange, UnknownName, UnsupportedSpec
from tvm_qopt.formats import get_format
from tvm_qopt.optim.forms import Form, check_hyper, settings_of
from tvm_qopt.rules import Hyper, get_rule
from tvm_qopt.spec import KernelSpec, rule_choices

Options = Mapping[str, Any]

COMMON: dict[str, Any] = {
    "state": "float32",
    "block_size": 256,
    "min_8bit_size": 4096,
    "master_weights": None,
    "bf16_stochastic_round": False,
    "nonfinite": "skip",
    "settings": None,
    "max_grad_norm": None,
    "maximize": False,
    "seed": 0,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}
"""Option -> default, in the order of signatures."""

MEANING = {
    "state": "how the state is stored, `tvm-qopt list`",
    "block_size": "elements that share a scale",
    "min_8bit_size": "a parameter of fewer elements has float32 state",
    "master_weights": 'of 16-bit weights: "float32" beside them, or for bfloat16 "split", the 16 '
    "bits that restore it",
    "bf16_stochastic_round": "round bfloat16 weights at random, so that the mean is right",
    "nonfinite": 'a gradient or new state that is not finite: "skip" or "propagate", by element',
    "settings": "settings of the kernel by name, beside those here, such as zero_rule",
    "max_grad_norm": "clip the gradients to this norm of all of them, inside the step",
    "maximize": "go up the gradient",
    "seed": "of the random rounding",
    "foreach": "as torch's: None, True or False; every step is of all tensors at once",
    "fused": "as torch's: None, True or False; every step is fused",
    "capturable": "as torch's, but for True: the step is counted on the host, and a graph that is "
    "captured would repeat the numbers of one step",
    "differentiable": "as torch's, but for True: a step has no gradient",
    "overrides": "parameter -> options of its own",
}

STORAGE = ("state", "block_size", "min_8bit_size", "master_weights", "bf16_stochastic_round")
"""The options that say how state is stored: those of the optimizer, not of a saved state, hold."""

OF_CALLS = ("clip_gradient", "scalars")
"""Settings that change what each call is given; the classes do not."""

MASTERS = {None: "plain", "float32": "master", "split": "split"}
MAX_GRAD_NORM = Hyper("max_grad_norm", low_open=True)
SMALL_STATE = "float32"


def param_format_of(options: Options, dtype: str) -> str:
    """How weights of a dtype are kept: float32 ones need no help."""
    if dtype == "float32":
        return "plain"
    if dtype == "bfloat16" and options["bf16_stochastic_round"]:
        return "stochastic"
    return MASTERS[options["master_weights"]]


def spec_of(
    rule: str, form: Form, options: Options, *, size: int, param: str, grad: str | None = None
) -> KernelSpec:
    """The kernel for a parameter of `size` elements; raises UnknownName or UnsupportedSpec."""
    settings = {**settings_of(rule, form, options), **(options["settings"] or {})}
    given: dict[str, Any] = {
        "block_size": options["block_size"],
        "param": param,
        "grad": grad,
        "param_format": param_format_of(options, param),
    }
    spec = KernelSpec.of(rule, options["state"], **given, **settings)
    if size >= options["min_8bit_size"] or not any(f.scaled for _, f in spec.slots):
        return spec
    known = rule_choices(get_rule(rule))  # without those of the formats
    kept = {name: value for name, value in settings.items() if name in known}
    return KernelSpec.of(rule, SMALL_STATE, **given, **kept)


def check_options(rule: str, form: Form, options: Options) -> None:
    """Raise, as torch's constructors do, for what is out of range or cannot be done."""
    _check_choice("master_weights", options, MASTERS)
    for name in ("bf16_stochastic_round", "maximize"):
        _check_choice(name, options, (False, True))
    _check_of_torch(options)
    for name in ("min_8bit_size", "seed"):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise HyperOutOfRange(name, expected="an integer from 0", got=repr(value))
    if options["bf16_stochastic_round"] and options["master_weights"] is not None:
        wanted = "False beside master_weights, which keep what rounding loses"
        raise HyperOutOfRange("bf16_stochastic_round", expected=wanted, got="True")
    if options["max_grad_norm"] is not None:
        MAX_GRAD_NORM.check(options["max_grad_norm"])
    for option in form.initial.values():
        Hyper(option).check(options[option])
    settings = settings_of(rule, form, options)
    _check_settings(options, settings)
    check_hyper(rule, form, options, settings)
    _check_state(spec_of(rule, form, options, size=options["min_8bit_size"], param="float32"))


def _check_settings(options: Options, settings: Options) -> None:
    given = options["settings"]
    if not isinstance(given, (Mapping, type(None))):
        raise HyperOutOfRange("settings", expected="a dict", got=repr(given))
    for name in given or {}:
        if name in settings or name in options or name in OF_CALLS:
            where = "an option of its own" if name not in OF_CALLS else "nothing: see Kernel.plan"
            raise HyperOutOfRange("settings", expected=f"for {name} {where}", got=repr(given))


def _check_of_torch(options: Options) -> None:
    """What torch's constructors take: all that changes no result, and no more."""
    for name in ("foreach", "fused"):
        _check_choice(name, options, (None, False, True))
    for name in ("capturable", "differentiable"):
        if options[name] is not False:
            wanted = f"False ({MEANING[name].partition('True: ')[2]})"
            raise HyperOutOfRange(name, expected=wanted, got=repr(options[name]))


def _check_choice(name: str, options: Options, choices: Iterable[Any]) -> None:
    if not any(options[name] is each or options[name] == each for each in choices):
        wanted = f"one of {', '.join(map(repr, choices))}"
        raise HyperOutOfRange(name, expected=wanted, got=repr(options[name]))


def _check_state(spec: KernelSpec) -> None:
    for name in spec.state:
        if get_format(name).runtime_map:
            raise UnsupportedSpec(f"state: {name} needs a map at each call; use Kernel.plan for it")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownName for an option that does not exist."""
    for name in given:
        if name not in known:
            raise UnknownName("option", name, known)


def options_of(group: Options, position: int) -> Options:
    """The options of a parameter: its group's, and what it overrides."""
    own = group["overrides"].get(position)
    return {**group, **own} if own else group
