"""The classes: names, signatures, docstrings, the peers' defaults, and what they refuse."""

from __future__ import annotations

import inspect
import math
import pydoc
from typing import Any

import pytest
import torch

from tvm_qopt import optim
from tvm_qopt.errors import HyperOutOfRange, QoptError, UnknownName, UnsupportedSpec

CLASSES = [
    each
    for name, each in vars(optim).items()
    if inspect.isclass(each)
    and issubclass(each, optim.QoptOptimizer)
    and each is not optim.QoptOptimizer
]
NO_DEFAULT = {"LARS", "LARS8bit", "SGD8bit"}


def made(name: str, **options: Any) -> Any:
    if name in NO_DEFAULT:
        options.setdefault("lr", 1e-3)
    return getattr(optim, name)([torch.nn.Parameter(torch.ones(5000))], **options)


def defaults(name: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(optim, name)).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not p.empty}


def test_there_are_the_classes_that_people_look_for() -> None:
    names = {each.__name__ for each in CLASSES}
    rules = (
        "SGD",
        "Adam",
        "AdamW",
        "Lion",
        "RMSprop",
        "Adagrad",
        "AdEMAMix",
        "LAMB",
        "LARS",
        "LANS",
    )
    assert names >= {name + end for name in rules for end in ("", "8bit")}
    assert names >= {"Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8", "AdamFP16"}
    assert {*names, "GradScalerFP16", "from_torch"} <= set(optim.__all__)


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_a_class_shows_its_signature_and_its_arguments(each: Any) -> None:
    signature = inspect.signature(each)
    first, *rest = signature.parameters.values()
    assert first.name == "params" and getattr(optim, each.__name__) is each
    kinds = [p.kind for p in rest]
    positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert positional <= 4 and kinds == sorted(kinds)
    shown = pydoc.plain(pydoc.render_doc(each))
    assert f"{each.__name__}(params, lr" in shown
    for p in rest:
        assert f"\n{p.name} : " in inspect.cleandoc(each.__doc__)


def test_defaults_are_those_of_the_peers() -> None:
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad"):
        theirs = inspect.signature(getattr(torch.optim, name)).parameters
        common = theirs.keys() & defaults(name).keys()
        assert len(common) >= 6
        assert {n: theirs[n].default for n in common} == {n: defaults(name)[n] for n in common}
    bitsandbytes: dict[str, dict[str, Any]] = {
        "AdamW8bit": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
        "Adam8bit": {"weight_decay": 0.0},
        "Lion8bit": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        "LAMB8bit": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0},
        "RMSprop8bit": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8},
        "Adagrad8bit": {"lr": 1e-2, "eps": 1e-10},
        "AdEMAMix8bit": {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "weight_decay": 1e-2},
    }
    for name, expected in bitsandbytes.items():
        wanted = {**expected, "state": "8bit", "block_size": 256, "min_8bit_size": 4096}
        assert wanted.items() <= defaults(name).items(), name
    torchao = {"AdamW4bit": (128, "4bit", 1e-2), "Adam4bit": (128, "4bit", 0.0)}
    torchao |= {"AdamWFp8": (256, "fp8", 1e-2), "AdamFp8": (256, "fp8", 0.0)}
    for name, (block, state, decay) in torchao.items():
        found = defaults(name)
        assert (found["block_size"], found["state"], found["weight_decay"]) == (block, state, decay)


def test_the_peers_positions_hold() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    group = optim.AdamW8bit([p], 1e-2, (0.5, 0.6), 1e-6, 0.3).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-2, (0.5, 0.6), 1e-6)
    assert group["weight_decay"] == 0.3
    group = optim.SGD([p], 1e-2, 0.9, 0.1, 0.2).param_groups[0]
    assert (group["momentum"], group["dampening"], group["weight_decay"]) == (0.9, 0.1, 0.2)
    with pytest.raises(TypeError):
        optim.AdamW8bit([p], 1e-2, (0.5, 0.6), 1e-6, 0.3, True)


@pytest.mark.parametrize(
    "name, options, kind, says",
    [
        ("AdamW8bit", {"lr": -1.0}, HyperOutOfRange, "lr: expected a number in"),
        ("AdamW8bit", {"lr": math.nan}, HyperOutOfRange, "lr"),
        ("AdamW8bit", {"lr": torch.ones(2)}, HyperOutOfRange, "lr"),
        ("AdamW8bit", {"betas": (1.0, 0.9)}, HyperOutOfRange, r"betas\[0\]"),
        ("AdamW8bit", {"betas": (0.9, -0.1)}, HyperOutOfRange, r"betas\[1\]"),
        ("AdamW8bit", {"betas": (0.9,)}, HyperOutOfRange, "betas: expected 2 numbers"),
        ("AdamW8bit", {"betas": True}, HyperOutOfRange, "betas"),
        ("AdamW8bit", {"eps": -1e-8}, HyperOutOfRange, "eps"),
        ("AdamW8bit", {"eps": 0.0}, HyperOutOfRange, "eps"),
        ("AdamW8bit", {"weight_decay": -1.0}, HyperOutOfRange, "weight_decay"),
        ("AdamW8bit", {"amsgrad": 1}, UnsupportedSpec, "amsgrad"),
        ("AdamW8bit", {"state": "9bit"}, UnknownName, "9bit"),
        ("AdamW8bit", {"state": "codebook8"}, UnsupportedSpec, "codebook8"),
        ("AdamW8bit", {"block_size": 100}, UnsupportedSpec, "block_size"),
        ("AdamW8bit", {"min_8bit_size": -1}, HyperOutOfRange, "min_8bit_size"),
        ("AdamW8bit", {"master_weights": "float64"}, HyperOutOfRange, "master_weights"),
        (
            "AdamW8bit",
            {"master_weights": "split", "bf16_stochastic_round": True},
            HyperOutOfRange,
            "bf16_stochastic_round: expected False beside master_weights",
        ),
        ("AdamW8bit", {"nonfinite": "raise"}, UnsupportedSpec, "nonfinite"),
        ("AdamW8bit", {"settings": {"zero": False}}, UnknownName, "zero"),
        ("AdamW8bit", {"settings": "zero_rule"}, HyperOutOfRange, "settings"),
        ("AdamW8bit", {"settings": {"amsgrad": True}}, HyperOutOfRange, "amsgrad an option"),
        ("AdamW8bit", {"settings": {"clip_gradient": True}}, HyperOutOfRange, "clip_gradient"),
        ("SGD", {"settings": {"momentum": "on"}}, HyperOutOfRange, "momentum an option"),
        ("AdamW8bit", {"max_grad_norm": 0.0}, HyperOutOfRange, "max_grad_norm"),
        ("AdamW8bit", {"foreach": "yes"}, HyperOutOfRange, "foreach: expected one of None, False"),
        ("AdamW8bit", {"fused": 2}, HyperOutOfRange, "fused: expected one of None, False"),
        ("AdamW8bit", {"capturable": True}, HyperOutOfRange, "capturable: expected False"),
        ("AdamW8bit", {"differentiable": True}, HyperOutOfRange, "differentiable: expected False"),
        ("AdamW8bit", {"seed": -1}, HyperOutOfRange, "seed"),
        ("SGD", {"nesterov": True}, HyperOutOfRange, "nesterov"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, HyperOutOfRange, "nesterov"),
        ("SGD", {"momentum": -0.9}, HyperOutOfRange, "momentum"),
        ("RMSprop", {"alpha": 1.5}, HyperOutOfRange, "alpha"),
        ("Adagrad", {"initial_accumulator_value": -1.0}, HyperOutOfRange, "initial_accumulator"),
        ("AdEMAMix8bit", {"t_alpha": 0}, HyperOutOfRange, "t_alpha"),
        ("AdEMAMix8bit", {"betas": (0.9, 0.999)}, HyperOutOfRange, "betas: expected 3 numbers"),
    ],
)
def test_what_is_out_of_range_is_a_value_error_that_names_it(
    name: str, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as found:
        made(name, **options)
    assert isinstance(found.value, ValueError) and isinstance(found.value, QoptError)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad"])
def test_who_swaps_the_class_may_pass_what_torch_takes(name: str) -> None:
    """All that torch's constructor has, and what says how to compute changes no bit."""
    given = inspect.signature(getattr(torch.optim, name)).parameters.items()
    usual = {key: p.default for key, p in given if p.default is not p.empty}
    usual.pop("decoupled_weight_decay", None)  # Adam's, for which there is AdamW
    found = []
    for how in ({}, {"foreach": True, "fused": False}, {"foreach": False, "fused": True}):
        kept = {key: value for key, value in how.items() if key in usual}
        optimizer = made(name, **{**usual, **kept})
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.linspace(-1, 1, 5000)
        optimizer.step()
        assert {key: optimizer.param_groups[0][key] for key in kept} == kept
        found.append(p.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_cuda_graph_cannot_capture_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = made("AdamW")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="step: expected a stream that no CUDA graph captures"):
        optimizer.step()


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(
        TypeError, match="AdamW8bit: got an unexpected keyword argument 'optim_bits'"
    ):
        made("AdamW8bit", optim_bits=8)
    with pytest.raises(TypeError, match="lr"):
        optim.SGD8bit([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        optim.AdamW8bit(torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW8bit([])
    with pytest.raises(ValueError, match="non-leaf"):
        optim.AdamW8bit([torch.ones(3, requires_grad=True) * 2])


def test_a_rule_of_the_registry_has_a_class_without_more() -> None:
    """One that no form is written for: its arguments are its hyper-parameters and settings."""
    each = optim.optimizer_class("adamw_mxnet", "AdamWMXNet", state="float32")
    names = [*inspect.signature(each).parameters]
    assert names[:3] == ["params", "lr", "betas"] and {"eta", "eps", "state"} <= set(names)
    with pytest.raises(TypeError, match="eta"):
        each([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(UnknownName, match="no_such_option"):
        optim.optimizer_class("adamw", "Other", no_such_option=1)
    with pytest.raises(UnknownName, match="no_such_rule"):
        optim.optimizer_class("no_such_rule", "Other")


def test_every_class_steps() -> None:
    """Once, on its default options; Adam goes down by lr whatever the gradient."""
    for each in CLASSES:
        optimizer = made(each.__name__)
        p = optimizer.param_groups[0]["params"][0]
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        assert torch.isfinite(p).all() and (p < 1).all(), each.__name__
        if each.__name__.startswith("Adam"):
            assert torch.allclose(p, torch.full_like(p, 1 - 1e-3), atol=2e-5), each.__name__
