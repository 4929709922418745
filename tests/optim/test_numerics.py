"""What 16-bit weights, values that are not finite and random rounding do."""

from __future__ import annotations

from typing import Any

import torch
from loops import grads, param

from tvm_qopt import optim


def test_one_nan_stops_one_weight_and_is_counted() -> None:
    p = torch.nn.Parameter(torch.ones(8192))
    optimizer = optim.AdamW8bit([p])
    for step in range(3):
        p.grad = torch.ones(8192)
        if step == 1:
            p.grad[7] = float("nan")
        optimizer.step()
    assert torch.isfinite(p).all() and optimizer.nonfinite_count() == 1
    assert float(p.detach()[7]) > float(p.detach()[8]) == float(p.detach()[255])
    lost = torch.nn.Parameter(torch.ones(300))
    lost.grad = torch.full((300,), float("nan"))
    optim.AdamW([lost], nonfinite="propagate").step()
    assert torch.isnan(lost).all()


def test_bfloat16_weights_stagnate_unless_something_is_done() -> None:
    ends = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "float32": {"master_weights": "float32"},
        "split": {"master_weights": "split"},
        "stochastic": {"bf16_stochastic_round": True},
        "another seed": {"bf16_stochastic_round": True, "seed": 1},
    }
    for name, options in ways.items():
        p = torch.nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
        optimizer = optim.AdamW8bit([p], lr=1e-3, weight_decay=0.0, **options)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[name] = p.detach().float()
    assert torch.equal(ends["plain"], torch.ones(8192))
    assert float((ends["float32"] - 0.9).abs().max()) < 0.004
    assert torch.equal(ends["float32"], ends["split"])
    assert abs(float(ends["stochastic"].mean()) - 0.9) < 0.002
    assert not torch.equal(ends["stochastic"], ends["another seed"])


def test_two_parameters_round_by_numbers_of_their_own() -> None:
    p, q = (torch.nn.Parameter(torch.ones(8192, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = optim.AdamW8bit([p, q], bf16_stochastic_round=True)
    for each in (p, q):
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert not torch.equal(p, q)


def test_a_lamb_norm_beyond_float32_skips_its_own_tensor_and_is_seen() -> None:
    huge, p = torch.nn.Parameter(torch.full((300,), 1e30)), param(300)
    optimizer = optim.LAMB([huge, p])
    grads(huge, p)
    before = p.detach().clone()
    optimizer.step()
    assert optimizer.last_step_skipped and not torch.equal(p, before)
    assert torch.equal(huge, torch.full((300,), 1e30))
    assert (optimizer.state[huge]["step"], optimizer.state[p]["step"]) == (0, 1)
