"""Mixed precision: torch's scaler with the unscaling inside the step, labml's pair, clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tvm_qopt import optim

INF, NAN = float("inf"), float("nan")


def batches(steps: int) -> list[Any]:
    torch.manual_seed(2)
    return [torch.randn(8, 70) for _ in range(steps)]


def linear(dtype: str = "float32") -> Any:
    torch.manual_seed(1)
    return torch.nn.Linear(70, 70).to(getattr(torch, dtype))


def loss_of(model: Any, x: Any) -> Any:
    return model(x.to(model.weight.dtype)).float().square().mean()


def weights(model: Any) -> bytes:
    return b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())


def plain(steps: int, name: str = "AdamW8bit", **options: Any) -> Any:
    model = linear()
    optimizer = getattr(optim, name)(model.parameters(), **options)
    for x in batches(steps):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("unscale", (False, True))
def test_a_scaled_run_is_the_unscaled_one_to_the_bit(unscale: bool) -> None:
    model = linear()
    optimizer = optim.AdamW8bit(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in batches(4):
        scaler.scale(loss_of(model, x)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not optimizer.last_step_skipped
        optimizer.zero_grad()
    assert weights(model) == weights(plain(4))
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("unscale", (False, True))
def test_an_overflow_skips_the_step_and_halves_the_scale(unscale: bool) -> None:
    model = linear()
    optimizer = optim.AdamW8bit(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    skipped = []
    for step, x in enumerate(batches(4)):
        scaler.scale(loss_of(model, x)).backward()
        if step == 2:
            model.weight.grad[3, 4] = INF
            before = weights(model), {k: v for k, v in optimizer.state[model.bias].items()}
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.last_step_skipped)
        if step == 2:
            assert weights(model) == before[0] and optimizer.state[model.bias]["step"] == 2
        optimizer.zero_grad()
    assert skipped == [False, False, True, False] and scaler.get_scale() == 512.0
    assert optimizer.state[model.weight]["step"] == 3


def test_autocast_trains_float32_weights() -> None:
    model = linear()
    optimizer = optim.AdamW8bit(model.parameters(), lr=0.05)
    losses = []
    for x in batches(1) * 10:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


class Half:
    """A float16 model under AdamFP16 and a scaler, step by step."""

    def __init__(self, scaler: Any = optim.GradScalerFP16, scale: float = 1024.0) -> None:
        self.model = linear("float16")
        self.optimizer = optim.AdamFP16(self.model.parameters(), lr=1e-3)
        self.scaler = scaler("cpu", init_scale=scale)

    def backward(self, x: Any) -> None:
        self.scaler.scale(loss_of(self.model, x)).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def grad(self) -> Any:
        return self.model.weight.grad


def test_adam_fp16_keeps_float32_moments_and_a_master_that_is_the_truth() -> None:
    half = Half()
    for x in batches(3):
        half.backward(x)
        half.step()
        half.optimizer.zero_grad()
    state = half.optimizer.state[half.model.weight]
    kinds = {name: state[name].dtype for name in ("exp_avg", "exp_avg_sq", "param_master")}
    assert set(kinds.values()) == {torch.float32}
    master = state["param_master"]
    assert torch.equal(half.model.weight.detach(), master.half())
    assert not torch.equal(half.model.weight.detach().float(), master)


def test_unscaling_is_in_float32_whether_asked_for_or_inside_the_step() -> None:
    """Gradients of 2^-26 are 0 in float16; scaled they are not, and they move their weights."""
    inside, asked, through = Half(), Half(), Half(torch.amp.GradScaler)
    for half in (inside, asked, through):
        for p in half.model.parameters():
            p.grad = torch.full_like(p, 2.0**-16)  # of a scale of 1024
        half.scaler.scale(torch.ones(1))
    asked.scaler.unscale_(asked.optimizer)
    assert asked.grad.dtype == torch.float32 and float(asked.grad[0, 0]) == 2.0**-26
    for half in (inside, asked, through):
        half.step()
    assert inside.grad.dtype == torch.float16
    masters = [h.optimizer.state[h.model.weight]["param_master"] for h in (inside, asked, through)]
    assert torch.equal(masters[0], masters[1]) and torch.equal(masters[0], masters[2])
    start = linear("float16").weight.detach().float()
    assert float((masters[0] - start).abs().min()) > 5e-4


def test_clipping_between_unscale_and_step_acts_on_what_is_used() -> None:
    """labml's own clipping changed the scaled float16 gradient, which its step never read."""
    clipped, scaled = Half(), Half()
    for half in (clipped, scaled):
        half.backward(batches(1)[0])
        half.scaler.unscale_(half.optimizer)
    norm = float(torch.nn.utils.clip_grad_norm_(clipped.model.parameters(), 1e-3))
    assert norm > 1e-2
    for p in scaled.model.parameters():
        p.grad.mul_(1e-3 / (norm + 1e-6))
    for half in (clipped, scaled):
        half.step()
    a, b = (half.optimizer.state[half.model.weight]["exp_avg"] for half in (clipped, scaled))
    assert torch.allclose(a, b, rtol=1e-5, atol=0) and 0 < float(a.norm()) < 1e-3


def test_a_skipped_step_leaves_nothing_stale() -> None:
    """After it the next gradient is used, with or without a scaler."""
    half, twin = Half(), Half()
    first, second = batches(2)
    half.backward(first)
    half.grad[0, 0] = INF
    half.scaler.unscale_(half.optimizer)
    half.step()
    assert half.optimizer.last_step_skipped and not half.optimizer.state
    half.optimizer.zero_grad()
    loss_of(half.model, second).backward()
    half.optimizer.step()
    loss_of(twin.model, second).backward()
    twin.optimizer.step()
    assert weights(half.model) == weights(twin.model)


def test_scaled_gradients_accumulate_after_zeroing_in_place() -> None:
    half = Half()
    for x in batches(3):
        half.backward(x)
        half.backward(x)
        half.scaler.unscale_(half.optimizer)
        half.step()
        half.optimizer.zero_grad(set_to_none=False)
    assert half.optimizer.state[half.model.weight]["step"] == 3
    assert float(half.grad.abs().max()) == 0.0


def test_a_disabled_scaler_changes_no_gradient() -> None:
    model = linear("float16")
    optimizer = optim.AdamFP16(model.parameters())
    scaler = optim.GradScalerFP16("cpu", enabled=False)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad.dtype == torch.float16
    scaler.step(optimizer)
    assert optimizer.state[model.weight]["step"] == 1


def test_our_clip_is_torchs() -> None:
    ours = plain(3, max_grad_norm=0.05)
    model = linear()
    optimizer = optim.AdamW8bit(model.parameters())
    for x in batches(3):
        loss_of(model, x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-5)
    assert weights(ours) != weights(plain(3))


def test_the_clip_is_of_all_gradients_unscaled_and_the_norm_is_told() -> None:
    a, b = torch.nn.Parameter(torch.zeros(300)), torch.nn.Parameter(torch.zeros(300))
    c = torch.nn.Parameter(torch.zeros(0))
    groups = [{"params": [a, c]}, {"params": [b], "max_grad_norm": None}]
    optimizer = optim.SGD(groups, lr=1.0, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for p in (a, b, c):
        p.grad = torch.full_like(p, 8.0)  # 1 unscaled
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    assert optimizer.last_grad_norm == pytest.approx(math.sqrt(600), rel=1e-6)
    assert torch.allclose(a, torch.tensor(-1 / math.sqrt(600)), rtol=1e-5)
    assert torch.equal(b, torch.full((300,), -1.0))
    a.grad = torch.full_like(a, 1e-3)
    b.grad = c.grad = None
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(1e-3 * math.sqrt(300), rel=1e-6)
    assert torch.allclose(a, torch.tensor(-1 / math.sqrt(600) - 1e-3), rtol=1e-5)


@pytest.mark.parametrize("bad", (NAN, INF))
def test_a_norm_that_is_not_finite_skips_the_step(bad: float) -> None:
    p, q = torch.nn.Parameter(torch.zeros(300)), torch.nn.Parameter(torch.zeros(300))
    optimizer = optim.SGD([p, q], lr=1.0, max_grad_norm=1.0)
    p.grad, q.grad = torch.ones(300), torch.ones(300)
    q.grad[5] = bad
    optimizer.step()
    assert optimizer.last_step_skipped and not math.isfinite(optimizer.last_grad_norm or 0.0)
    assert torch.equal(p, torch.zeros(300)) and optimizer.state[p]["step"] == 0
