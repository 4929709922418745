"""Float32 state beside torch's own optimizers: every option, dtype and memory layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tvm_qopt import optim

Param = Any

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [
        {},
        {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
        {"amsgrad": True, "maximize": True},
    ],
    "Adam": [{}, {"weight_decay": 0.1, "maximize": True}],
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ],
    "RMSprop": [{}, {"alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "weight_decay": 0.1}],
}
CASES = [(name, options) for name, each in OPTIONS.items() for options in each]


def params(dtype: Any = None) -> list[Param]:
    """One of each kind that a model may have, small and beyond a block."""
    made = [torch.randn(s, dtype=dtype) for s in ((40, 30), (7,), (), (0,), (1, 256), (300,))]
    made.append(torch.randn(8, 3, 5, 5, dtype=dtype).to(memory_format=torch.channels_last))
    made.append(torch.randn(30, 17, dtype=dtype).t())
    made.append(torch.randn(64, dtype=dtype)[5:60])  # a view that begins inside
    made.append(torch.randn(30, 40, dtype=dtype)[:, ::2])  # a view with gaps
    return [torch.nn.Parameter(x) for x in made]


def twins(dtype: Any = None) -> tuple[list[Param], list[Param]]:
    torch.manual_seed(1)
    ours = params(dtype)
    torch.manual_seed(1)
    return ours, params(dtype)


def give_gradients(ours: list[Param], theirs: list[Param], *, turn: bool = False) -> None:
    for p, q in zip(ours, theirs, strict=True):
        grad = torch.randn(tuple(p.shape), dtype=p.dtype)
        q.grad = grad.clone()
        p.grad = grad.t().contiguous().t() if turn and p.dim() == 2 else grad


def furthest(ours: list[Param], theirs: list[Param]) -> float:
    """The largest difference, over what float32 rounding of a weight is."""
    worst = 0.0
    for p, q in zip(ours, theirs, strict=True):
        if p.numel():
            scale = q.detach().abs().clamp(min=1.0)
            worst = max(worst, float(((p - q).detach().abs() / scale).max()))
    return worst


@pytest.mark.parametrize("name, options", CASES)
def test_float32_state_goes_torchs_way(name: str, options: dict[str, Any]) -> None:
    ours, theirs = twins()
    optimizer = getattr(optim, name)(ours, **options)
    reference = getattr(torch.optim, name)(theirs, **options)
    for step in range(12):
        give_gradients(ours, theirs, turn=step % 2 == 1)
        optimizer.step()
        reference.step()
    assert furthest(ours, theirs) < 12 * 2.0**-23  # a rounding of each step, at most


def test_adamw_is_torchs_after_a_hundred_steps() -> None:
    ours, theirs = twins()
    optimizer, reference = optim.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for _ in range(100):
        give_gradients(ours, theirs)
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        assert (p - q).norm().item() <= 1e-6 * q.norm().item()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_16_bit_weights_with_float32_state_are_the_float32_ones_rounded(dtype: str) -> None:
    """One step, where torch rounds its moments to 16 bits: compare with its float32."""
    ours, wide = twins()
    for p in (*ours, *wide):
        p.data = p.data.to(getattr(torch, dtype))
    for q in wide:
        q.data = q.data.float()
    optimizer = optim.AdamW(ours, lr=0.05, master_weights="float32")
    reference = torch.optim.AdamW(wide, lr=0.05)
    for _ in range(3):
        for p, q in zip(ours, wide, strict=True):
            p.grad = torch.randn(tuple(p.shape)).to(p.dtype)
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, wide, strict=True):
        unit = torch.finfo(p.dtype).eps
        assert torch.allclose(p.detach().float(), q.detach(), rtol=unit, atol=unit / 8)
        master = optimizer.state[p]["param_master"]
        assert torch.allclose(master, q.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(master.to(p.dtype), p.detach())


def test_lion_lamb_and_ademamix_of_an_independent_hand() -> None:
    """Two steps of one weight tensor, by the papers' formulas in float64."""
    start, grads = torch.randn(300), [torch.randn(300) for _ in range(2)]
    wd, lr = 0.1, 0.01

    def run(name: str, **options: Any) -> Any:
        p = torch.nn.Parameter(start.clone())
        optimizer = getattr(optim, name)([p], lr=lr, weight_decay=wd, **options)
        for grad in grads:
            p.grad = grad.clone()
            optimizer.step()
        return p.detach().double()

    p, m = start.double(), torch.zeros(300, dtype=torch.float64)
    for g in (grad.double() for grad in grads):
        p = p * (1 - lr * wd) - lr * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    assert torch.allclose(run("Lion"), p, rtol=1e-5, atol=1e-7)

    p, m, v = start.double(), torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate((grad.double() for grad in grads), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + wd * p
        p = p - lr * p.norm() / u.norm() * u
    assert torch.allclose(run("LAMB"), p, rtol=1e-4, atol=1e-6)

    p, m, v, slow = start.double(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate((grad.double() for grad in grads), 1):
        alpha = min(t / 4, 1) * 5.0
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        slow = 0.9999 * slow + 0.0001 * g
        root = (v / (1 - 0.999**t)).sqrt() + 1e-8
        p = p - lr * ((m / (1 - 0.9**t) + alpha * slow) / root + wd * p)
    assert torch.allclose(run("AdEMAMix", t_alpha=4), p, rtol=1e-4, atol=1e-6)


def test_8_bit_state_trains_as_float32_does() -> None:
    """A quadratic bowl with noise: the same loss within a tenth, in a quarter of the memory."""

    def train(name: str) -> tuple[float, int]:
        torch.manual_seed(3)
        target = torch.randn(100, 60)
        p = torch.nn.Parameter(torch.zeros(100, 60))
        optimizer = getattr(optim, name)([p], lr=0.05)
        for _ in range(150):
            loss = ((p - target - 0.1 * torch.randn(100, 60)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        size = sum(x.nbytes for x in optimizer.state[p].values() if isinstance(x, torch.Tensor))
        return float(((p.detach() - target) ** 2).mean()), size

    (plain, float_bytes) = train("AdamW")
    for name, share in (("AdamW8bit", 0.27), ("AdamWFp8", 0.27), ("AdamW4bit", 0.15)):
        loss, size = train(name)
        assert loss < plain + 0.1 and size < share * float_bytes, name
