"""A running torch optimizer turned into ours: it goes on where it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tvm_qopt
from tvm_qopt import optim
from tvm_qopt.errors import HyperOutOfRange, UnknownName

CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
]


def params() -> list[Any]:
    torch.manual_seed(1)
    made = [
        torch.randn(70, 70),
        torch.randn(7),
        torch.randn(60, 90).t(),
        torch.randn(30, 40)[:, ::2],
    ]
    return [torch.nn.Parameter(x) for x in made]


def train(optimizer: Any, params: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(tuple(p.shape), generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_with_float32_state_it_goes_on_as_torch_would(name: str, options: dict[str, Any]) -> None:
    theirs = params()
    reference = getattr(torch.optim, name)(theirs, **options)
    train(reference, theirs, 0, 5)
    ours = copy.deepcopy(theirs)
    replaced = getattr(torch.optim, name)(ours, **options)
    replaced.load_state_dict(reference.state_dict())
    optimizer = optim.from_torch(replaced, state="float32")
    assert type(optimizer) is getattr(optim, name)
    train(reference, theirs, 5, 10)
    train(optimizer, ours, 5, 10)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-5)


def test_with_8_bits_the_moments_are_those_of_torch_rounded() -> None:
    ours = params()
    reference = torch.optim.AdamW(ours, lr=0.02)
    train(reference, ours, 0, 5)
    optimizer = optim.from_torch(reference)
    state, theirs = optimizer.state[ours[0]], reference.state[ours[0]]
    assert state["step"] == 5 and state["exp_avg_codes"].dtype == torch.uint8
    for slot, decoded in tvm_qopt.load("adamw").decode_state(state).items():
        error = (torch.from_numpy(decoded) - theirs[slot]).abs()
        assert float(error.max()) < 0.02 * float(theirs[slot].abs().max())
    small, moments = optimizer.state[ours[1]], reference.state[ours[1]]
    assert torch.equal(small["exp_avg"], moments["exp_avg"])
    turned = optimizer.state[ours[2]]["exp_avg_codes"]
    assert turned.stride() == ours[2].stride()
    train(optimizer, ours, 5, 7)
    assert optimizer.state[ours[0]]["step"] == 7


def test_groups_options_and_names_are_taken_along() -> None:
    first, second = params()[:2]
    theirs = torch.optim.AdamW(
        [
            {"params": [("first", first)], "lr": 0.5, "mark": "mine"},
            {"params": [("second", second)]},
        ],
        betas=(0.8, 0.9),
        fused=True,
    )
    ours = optim.from_torch(theirs, state="4bit", block_size=128, max_grad_norm=1.0)
    a, b = ours.param_groups
    assert (a["lr"], a["mark"], a["betas"], b["lr"]) == (0.5, "mine", (0.8, 0.9), 1e-3)
    assert a["params"][0] is first and ours.describe().rows[0].parameter == "first"
    assert a["state"] == "4bit" and a["max_grad_norm"] == 1.0 and a["fused"] is None
    train(ours, [first, second], 0, 1)


def test_adam_with_decoupled_decay_is_adamw() -> None:
    theirs = torch.optim.Adam(params(), weight_decay=0.1, decoupled_weight_decay=True)
    assert type(optim.from_torch(theirs)) is optim.AdamW


def test_what_cannot_be_turned_is_refused() -> None:
    with pytest.raises(UnknownName, match="NAdam"):
        optim.from_torch(torch.optim.NAdam(params()))
    with pytest.raises(HyperOutOfRange, match="differentiable"):
        optim.from_torch(torch.optim.AdamW(params(), differentiable=True))

    mine = type("Mine", (torch.optim.AdamW,), {})
    with pytest.raises(UnknownName, match="Mine"):
        optim.from_torch(mine(params()))
