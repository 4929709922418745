"""A character-level transformer on the documentation that ships with Python (`help("topics")`).

Imports torch: import this module where torch is installed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tvm_qopt.demo.network import Labels
from tvm_qopt.demo.train import BETA1, BETA2, EPS, WEIGHT_DECAY, Optimizer, Run
from tvm_qopt.runtime.kernel import Kernel

LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 64, 64
BATCH = 8
TEST_SHARE = 0.1
TEST_WINDOWS = 256
LR = 3e-3  # of 1e-3 and 3e-3 the better with float32 state

Weights = dict[str, Any]  # leaf tensors


@dataclass(frozen=True)
class Text:
    """Characters as numbers below `vocabulary`; the last tenth is the test."""

    training: Labels
    test: Labels
    vocabulary: int


@cache
def load_text() -> Text:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters, codes = np.unique(np.array(list(text)), return_inverse=True)
    training, test = np.split(codes.astype(np.int64), [int(len(codes) * (1 - TEST_SHARE))])
    return Text(training, test, len(characters))


def windows(codes: Labels, starts: Labels) -> tuple[Any, Any]:
    """Inputs and what follows each of their characters: [windows, CONTEXT] both."""
    rows = torch.from_numpy(codes[starts[:, None] + np.arange(CONTEXT + 1)])
    return rows[:, :-1], rows[:, 1:]


def init_weights(rng: np.random.Generator, vocabulary: int) -> Weights:
    """GPT-2's: N(0, 0.02), smaller where a layer adds to the stream; biases 0, gains 1."""
    into_stream = 0.02 / math.sqrt(2 * LAYERS)
    made: dict[str, np.ndarray[Any, Any]] = {}

    def linear(name: str, outputs: int, inputs: int, deviation: float = 0.02) -> None:
        made[f"{name}.weight"] = deviation * rng.standard_normal((outputs, inputs))
        made[f"{name}.bias"] = np.zeros(outputs)

    def norm(name: str) -> None:
        made[f"{name}.weight"], made[f"{name}.bias"] = np.ones(WIDTH), np.zeros(WIDTH)

    made["characters"] = 0.02 * rng.standard_normal((vocabulary, WIDTH))
    made["positions"] = 0.02 * rng.standard_normal((CONTEXT, WIDTH))
    for layer in range(LAYERS):
        norm(f"{layer}.norm1")
        linear(f"{layer}.qkv", 3 * WIDTH, WIDTH)
        linear(f"{layer}.attended", WIDTH, WIDTH, into_stream)
        norm(f"{layer}.norm2")
        linear(f"{layer}.up", 4 * WIDTH, WIDTH)
        linear(f"{layer}.down", WIDTH, 4 * WIDTH, into_stream)
    norm("norm")
    linear("logits", vocabulary, WIDTH)
    return {
        name: torch.from_numpy(w.astype(np.float32)).requires_grad_() for name, w in made.items()
    }


def forward(weights: Weights, x: Any) -> Any:
    """Logits [windows, characters, vocabulary] of the character after each (pre-norm blocks)."""

    def linear(name: str, h: Any) -> Any:
        return F.linear(h, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, h: Any) -> Any:
        return F.layer_norm(h, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    h = F.embedding(x, weights["characters"]) + weights["positions"][: x.shape[1]]
    for layer in range(LAYERS):
        qkv = linear(f"{layer}.qkv", norm(f"{layer}.norm1", h))
        q, k, v = qkv.unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + linear(f"{layer}.attended", heads.transpose(1, 2).flatten(2))
        h = h + linear(f"{layer}.down", F.gelu(linear(f"{layer}.up", norm(f"{layer}.norm2", h))))
    return linear("logits", norm("norm", h))


def loss_of(logits: Any, following: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class CompiledAdamW:
    """A plan a tensor, small ones too; each backward pass makes new gradients, taken and freed."""

    def __init__(self, weights: Weights, kernel: Kernel) -> None:
        self.weights = list(weights.values())
        states = [kernel.init_state(w) for w in self.weights]
        self.state_bytes = sum(a.nbytes for state in states for a in state.values())
        self.plans = [
            kernel.plan(param=w, grad=torch.zeros_like(w), state=state)
            for w, state in zip(self.weights, states, strict=True)
        ]

    def step(self, t: int) -> None:
        for plan, w in zip(self.plans, self.weights, strict=True):
            plan.step(
                grad=w.grad,
                step=t,
                lr=LR,
                beta1=BETA1,
                beta2=BETA2,
                eps=EPS,
                weight_decay=WEIGHT_DECAY,
            )
            w.grad = None


@contextmanager
def one_thread() -> Iterator[None]:
    """Of torch's: the tensors are too small to gain by more, and lose where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train_text(
    name: str,
    make: Callable[[Weights], Optimizer],
    *,
    steps: int,
    seed: int,
    tick: Callable[[], object],
) -> Run:
    """Train from scratch; the same seed gives the same weights and batches.

    final_loss and accuracy (of the next character) are over windows of the test text, the same
    for all seeds.
    """
    rng, text = np.random.default_rng(seed), load_text()
    weights = init_weights(rng, text.vocabulary)
    optimizer = make(weights)
    losses, times, whole = [], [], []
    for t in range(1, steps + 1):
        begin = time.perf_counter()
        x, following = windows(
            text.training, rng.integers(len(text.training) - CONTEXT, size=BATCH)
        )
        loss = loss_of(forward(weights, x), following)
        loss.backward()
        losses.append(float(loss.detach()))
        start = time.perf_counter()
        optimizer.step(t)
        times.append(time.perf_counter() - start)
        whole.append(time.perf_counter() - begin)
        tick()
    starts = np.linspace(0, len(text.test) - CONTEXT - 1, TEST_WINDOWS).astype(np.int64)
    x, following = windows(text.test, starts)
    with torch.no_grad():
        logits = forward(weights, x)
    return Run(
        name=name,
        losses=losses,
        final_loss=float(loss_of(logits, following)),
        accuracy=float((logits.argmax(-1) == following).float().mean()),
        parameters=sum(w.numel() for w in weights.values()),
        state_bytes=optimizer.state_bytes,
        step_us=float(np.median(times)) * 1e6,
        whole_us=float(np.median(whole)) * 1e6,
    )
