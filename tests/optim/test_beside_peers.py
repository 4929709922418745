"""One step at a time beside the 8-bit, 4-bit and FP8 AdamW of others, from their own state.

Ours with `zero_rule` off stores the nearest level, and so do they, but for what each has of its
own:

- torchao: a value half way goes up, where ours goes down; no scale below 1e-12.  What its blocks do
  not divide it keeps in the weights' dtype, so all shapes here are of whole blocks.
- bitsandbytes on a CPU: a value is first rounded to the nearest of 65,536 even steps from -1 to 1,
  of which 0 is none, so codes of values that lie less than a step apart may be others.
- Both: the order of roundings in float32, which moves what lies within a few units of half way; and
  a NaN spreads over its block, where ours leaves one weight alone (no NaN here).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tvm_qopt import optim
from tvm_qopt.optim.checkpoint import spec_at
from tvm_qopt.runtime.state import decode

SHAPES = ((64, 256), (8192,), (32, 8, 32))
BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.999}
HALF_STEP = 1 / 65535
ROUNDINGS = 4 * 2.0**-24
"""Relative to the terms of a sum in float32."""

OF_THE_MOVE = 2e-5
"""torchao takes 1 - beta ** step in float32, which is 2e-3 at the second step."""


def fp8_levels() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def levels(state: Any, slot: str) -> torch.Tensor:
    """By code, of what torchao or bitsandbytes stores."""
    if isinstance(state.get("state1"), torch.Tensor):
        return state["qmap1" if slot == "exp_avg" else "qmap2"].double()
    kept = state[slot]
    return kept.qmap.double() if hasattr(kept, "qmap") else fp8_levels()


def stored(state: Any, slot: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, one an element, and scales, of theirs."""
    if isinstance(state.get("state1"), torch.Tensor):
        number = 1 if slot == "exp_avg" else 2
        return state[f"state{number}"].reshape(-1), state[f"absmax{number}"]
    kept = state[slot]
    return unpacked(kept.codes.view(torch.uint8).reshape(-1), kept.numel()), kept.scale


def unpacked(codes: torch.Tensor, size: int) -> torch.Tensor:
    return codes if codes.numel() == size else torch.stack([codes >> 4, codes & 15], -1).view(-1)


def check(package: Any, name: str, half_step: float) -> float:
    """Three steps; returns the share of codes that are not the same."""
    torch.manual_seed(0)
    theirs_weights = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    weights = [torch.nn.Parameter(p.detach().clone()) for p in theirs_weights]
    theirs = getattr(package, name)(theirs_weights, lr=1e-2)
    ours = getattr(optim, name)(weights, lr=1e-2, settings={"zero_rule": False})
    different = total = 0
    for step in range(3):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            for p, q in zip(theirs_weights, weights, strict=True):
                q.copy_(p)
                p.grad = torch.randn(p.shape) * 10.0 ** -(torch.arange(p.numel()).view(p.shape) % 5)
                q.grad = p.grad.clone()
            if step:
                ours.load_state_dict(theirs.state_dict())
        start = [q.detach().clone() for q in weights]
        before = [values(ours, i) if step else None for i in range(len(weights))]
        theirs.step()
        ours.step()
        for i, (p, q) in enumerate(zip(theirs_weights, weights, strict=True)):
            moved = (q - start[i]).abs()
            assert ((p - q).abs() <= ROUNDINGS * q.abs() + OF_THE_MOVE * moved).all()
            for slot in BETAS:
                different += compare(slot, p, theirs.state[p], ours, i, before[i], half_step)
                total += p.numel()
    return different / total


def values(optimizer: Any, position: int) -> dict[str, Any]:
    spec = spec_at(optimizer.rule, optimizer.form, optimizer.param_groups, 0, position)
    return decode(spec, optimizer.state[optimizer.param_groups[0]["params"][position]])


def compare(
    slot: str, p: Any, state: Any, ours: Any, position: int, before: Any, half_step: float
) -> int:
    """Ours is the nearest level to the exact moment, and theirs no further but for what is named;
    returns how many codes differ."""
    grad, beta = p.grad.reshape(-1).double(), BETAS[slot]
    old = torch.zeros(1) if before is None else torch.from_numpy(before[slot].reshape(-1))
    terms = beta * old.double(), (1 - beta) * (grad if slot == "exp_avg" else grad * grad)
    own = ours.state[ours.param_groups[0]["params"][position]]
    codes, scale = unpacked(own[f"{slot}_codes"].reshape(-1), p.numel()), own[f"{slot}_scale"]
    other_codes, other_scale = stored(state, slot)
    torch.testing.assert_close(scale, other_scale, rtol=1e-6, atol=0)
    unit = scale.double().repeat_interleave(p.numel() // scale.numel())
    exact, slack = sum(terms) / unit, ROUNDINGS * sum(t.abs() for t in terms) / unit
    table = levels(state, slot)
    gap, other = ((table[c.long()] - exact).abs() for c in (codes, other_codes))
    assert (gap <= other + slack).all(), slot
    assert (other <= gap + slack + 2 * half_step).all(), slot
    return int((codes != other_codes).sum())


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_codes_are_those_of_torchao(torchao: Any, name: str) -> None:
    assert check(torchao, name, 0.0) < 1e-4


def test_codes_are_those_of_bitsandbytes(bitsandbytes: Any) -> None:
    assert 0.01 < check(bitsandbytes, "AdamW8bit", HALF_STEP) < 0.5


def test_zeros_are_not_those_of_torchao_and_bitsandbytes(torchao: Any, bitsandbytes: Any) -> None:
    """A block without a gradient, and an element without one beside others."""
    grad = torch.cat([torch.zeros(256), torch.ones(4095), torch.zeros(1)])
    found = []
    for package in (torchao, bitsandbytes, optim):
        p = torch.nn.Parameter(torch.ones(grad.numel()))
        optimizer = package.AdamW8bit([p])
        p.grad = grad.clone()
        optimizer.step()
        found.append((p, optimizer.state[p]))
    (_, first), (_, second), (p, own) = found
    assert stored(first, "exp_avg")[1][0] == pytest.approx(1e-12)
    assert stored(second, "exp_avg")[1][0] == 0 == own["exp_avg_scale"][0]
    assert stored(second, "exp_avg")[0][-1] == 131  # 2.1e-5 of the largest
    assert stored(first, "exp_avg")[0][-1] == 127 == own["exp_avg_codes"][-1]
    assert (p[:256] == p[-1]).all()
