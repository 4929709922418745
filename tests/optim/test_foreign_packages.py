"""Training that changes its optimizer midway, against bitsandbytes and torchao as installed.

Each way: 5 steps there, the state handed over, 5 steps here, and the weights of 10 steps there.
What may be left is what the two do otherwise: the order of roundings in float32; in 8 bits that
bitsandbytes encodes by a table of 65,536 even bins; that one side rounds state which the other
keeps; and of Lion, signs of sums next to 0.  `close` bounds it as a share of the distance trained,
two or three times what was seen; where no state is handed over more than a fifth is left.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tvm_qopt import optim
from tvm_qopt.errors import StateReencoded

SHAPES = ((70, 70), (8229,), (64, 128), (7,), ())  # of whole blocks, with a tail, small, 0-d
WHOLE = ((32, 256), (64, 128), (7,), ())
MOMENTUM = {"lr": 0.1, "momentum": 0.9}

Case = tuple[str, str, dict[str, Any], float]

# theirs, ours, options of both, close
OF_BITSANDBYTES: list[Case] = [
    ("AdamW8bit", "AdamW8bit", {}, 1e-3),
    ("AdamW8bit", "AdamW", {}, 1e-2),
    ("AdamW", "AdamW", {}, 1e-4),
    ("AdamW", "AdamW8bit", {}, 1e-2),
    ("Adam8bit", "AdamW8bit", {"weight_decay": 0.1}, 1e-3),
    ("Lion8bit", "Lion8bit", {"lr": 1e-3}, 1e-2),
    ("SGD8bit", "SGD8bit", MOMENTUM, 1e-3),
    ("SGD", "SGD", MOMENTUM, 1e-6),
    ("RMSprop8bit", "RMSprop8bit", {}, 1e-2),  # its map has a sign, which the moment has not
    ("Adagrad8bit", "Adagrad8bit", {}, 1e-2),
    ("AdEMAMix8bit", "AdEMAMix8bit", {}, 1e-3),
    ("AdEMAMix", "AdEMAMix", {"t_alpha": 100, "t_beta3": 100}, 1e-4),
]
OF_TORCHAO: list[Case] = [
    ("AdamW8bit", "AdamW8bit", {}, 1e-4),
    ("Adam8bit", "Adam8bit", {"weight_decay": 0.1}, 1e-4),
    ("AdamW4bit", "AdamW4bit", {}, 1e-4),
    ("AdamWFp8", "AdamWFp8", {}, 1e-4),
    ("AdamWFp8", "AdamW8bit", {}, 3e-2),
]


def params(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Any]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def train(optimizer: Any, weights: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in weights:
            grad = torch.randn(tuple(p.shape), generator=generator) * 0.1 + 0.05
            p.grad = grad.to(p.dtype)
        optimizer.step()


def flat(weights: list[Any]) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in weights])


def share_left(
    first: Callable[[list[Any]], Any],
    second: Callable[[list[Any]], Any],
    handed: Any,
    shapes: Any,
) -> float:
    """Of ten steps: how far apart the changed and the unchanged training end."""
    weights = params(shapes=shapes)
    start, before = flat(weights), first(weights)
    train(before, weights, 0, 5)
    others, saved = copy.deepcopy(weights), handed(before)
    train(before, weights, 5, 10)
    after = second(others)
    if saved is not None:
        after.load_state_dict(saved)
    train(after, others, 5, 10)
    return float((flat(others) - flat(weights)).norm() / (flat(weights) - start).norm())


def through_a_file(optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check(package: Any, to: str, case: Case, shapes: Any = SHAPES) -> None:
    theirs, ours, options, close = case

    def there(weights: list[Any]) -> Any:
        return getattr(package, theirs)(weights, **options)

    def here(weights: list[Any]) -> Any:
        return getattr(optim, ours)(weights, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateReencoded)
        assert share_left(there, here, through_a_file, shapes) < close
        assert share_left(here, there, lambda it: optim.export_state_dict(it, to), shapes) < close
    assert share_left(there, here, lambda it: None, shapes) > 0.2


@pytest.mark.parametrize("case", OF_BITSANDBYTES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_training_goes_on_from_and_to_bitsandbytes(bitsandbytes: Any, case: Case) -> None:
    check(bitsandbytes, "bitsandbytes", case)


@pytest.mark.parametrize("case", OF_TORCHAO, ids=lambda case: f"{case[0]}-{case[1]}")
def test_training_goes_on_from_and_to_torchao(torchao: Any, case: Case) -> None:
    check(torchao, "torchao", case, WHOLE)


def test_a_last_block_that_torchao_keeps_in_floats_is_encoded_here(torchao: Any) -> None:
    check(torchao, "torchao", ("AdamW8bit", "AdamW8bit", {}, 1e-2))


def test_codes_of_bitsandbytes_come_and_go_to_the_bit(bitsandbytes: Any) -> None:
    weights = params(torch.bfloat16)
    theirs = bitsandbytes.AdamW8bit(weights)
    train(theirs, weights, 0, 3)
    ours = optim.AdamW8bit(weights, state="dynamic8", master_weights="split")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.load_state_dict(theirs.state_dict())
    again = bitsandbytes.AdamW8bit(weights)
    again.load_state_dict(optim.export_state_dict(ours, "bitsandbytes"))
    for p in weights:
        for key, value in theirs.state[p].items():
            same = again.state[p][key]
            assert torch.equal(same, value) if torch.is_tensor(value) else same == value
    assert torch.equal(ours.state[weights[0]]["exp_avg_codes"], theirs.state[weights[0]]["state1"])


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_codes_of_torchao_come_and_go_to_the_bit(torchao: Any, name: str) -> None:
    weights = params(torch.bfloat16)
    theirs = getattr(torchao, name)(weights, bf16_stochastic_round=False)
    train(theirs, weights, 0, 3)
    ours = getattr(optim, name)(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateReencoded)  # of the moments that it keeps in bfloat16
        ours.load_state_dict(theirs.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = optim.export_state_dict(ours, "torchao")
    again = getattr(torchao, name)(weights)
    again.load_state_dict(written)
    for slot in ("exp_avg", "exp_avg_sq"):
        a, b = theirs.state[weights[2]][slot], again.state[weights[2]][slot]
        assert type(a) is type(b) and torch.equal(a.dequantize(), b.dequantize())
        assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        assert (a.block_size, a.dtype, a.shape) == (b.block_size, b.dtype, b.shape)
    assert again.state[weights[2]]["step"] == 3
