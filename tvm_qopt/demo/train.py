"""The training loop, and the two optimizers behind one interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tvm_qopt.demo.network import Array, Labels, Tensors, backward, forward, init_weights, loss_of
from tvm_qopt.runtime.kernel import Kernel

BATCH = 64
TEST_SHARE = 0.2
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


class Optimizer(Protocol):
    """Updates the weights it was made with, in place, from gradients in fixed arrays."""

    @property
    def state_bytes(self) -> int: ...

    def step(self, t: int) -> None: ...


class CompiledAdamW:
    """A plan a tensor, checked once; small tensors too have their state in the kernel's format."""

    def __init__(self, weights: Tensors, grads: Tensors, kernel: Kernel) -> None:
        states = {name: kernel.init_state(p) for name, p in weights.items()}
        self.state_bytes = sum(a.nbytes for state in states.values() for a in state.values())
        self.plans = [
            kernel.plan(param=p, grad=grads[name], state=states[name])
            for name, p in weights.items()
        ]

    def step(self, t: int) -> None:
        for plan in self.plans:
            plan.step(step=t, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY)


class NumpyAdamW:
    """Float32 AdamW (Loshchilov & Hutter 2019, algorithm 2), written from the paper."""

    def __init__(self, weights: Tensors, grads: Tensors, kernel: Kernel) -> None:
        self.weights, self.grads = weights, grads
        self.m = {name: np.zeros_like(p) for name, p in weights.items()}
        self.v = {name: np.zeros_like(p) for name, p in weights.items()}
        self.state_bytes = sum(a.nbytes for moment in (self.m, self.v) for a in moment.values())

    def step(self, t: int) -> None:
        for name, p in self.weights.items():
            g, m, v = self.grads[name], self.m[name], self.v[name]
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            m_hat, v_hat = m / (1 - BETA1**t), v / (1 - BETA2**t)
            p *= 1 - LR * WEIGHT_DECAY
            p -= LR * m_hat / (np.sqrt(v_hat) + EPS)


OPTIMIZERS: dict[str, Callable[[Tensors, Tensors, Kernel], Optimizer]] = {
    "8-bit AdamW, compiled": CompiledAdamW,
    "float32 AdamW, NumPy": NumpyAdamW,
}


@dataclass(frozen=True)
class Run:
    """What training gave.  losses: of each batch, before its step.  final_loss: over all training
    samples.  step_us, whole_us: median times in microseconds, of one update of all tensors and of
    a whole training step."""

    name: str
    losses: list[float]
    final_loss: float
    accuracy: float
    parameters: int
    state_bytes: int
    step_us: float
    whole_us: float


@dataclass(frozen=True)
class Digits:
    """Handwritten digits (8 x 8 pixels in [0, 1]), as training and test samples."""

    x: Array
    labels: Labels
    test_x: Array
    test_labels: Labels


def load_digits(rng: np.random.Generator) -> Digits:
    from sklearn import datasets

    data = datasets.load_digits()
    x, labels = (data.data / 16.0).astype(np.float32), data.target.astype(np.int64)
    order = rng.permutation(len(x))
    test, training = np.split(order, [int(len(x) * TEST_SHARE)])
    return Digits(x[training], labels[training], x[test], labels[test])


def batches(rng: np.random.Generator, size: int) -> Iterator[Labels]:
    """Indices of batch after batch; each epoch in a new order, its short rest left out."""
    while True:
        order = rng.permutation(size)
        yield from (order[i : i + BATCH] for i in range(0, size - BATCH + 1, BATCH))


def train(
    name: str,
    make: Callable[[Tensors, Tensors, Kernel], Optimizer],
    kernel: Kernel,
    *,
    steps: int,
    seed: int,
    tick: Callable[[], object],
) -> Run:
    """Train from scratch; the same seed gives the same weights, split and batches."""
    rng = np.random.default_rng(seed)
    digits, weights = load_digits(rng), init_weights(rng)
    grads = {tensor: np.zeros_like(p) for tensor, p in weights.items()}
    optimizer = make(weights, grads, kernel)
    losses, times, whole = [], [], []
    for t, batch in zip(range(1, steps + 1), batches(rng, len(digits.x)), strict=False):
        begin = time.perf_counter()
        losses.append(backward(weights, digits.x[batch], digits.labels[batch], grads))
        start = time.perf_counter()
        optimizer.step(t)
        times.append(time.perf_counter() - start)
        whole.append(time.perf_counter() - begin)
        tick()
    logits = forward(weights, digits.test_x)[-1]
    return Run(
        name=name,
        losses=losses,
        final_loss=loss_of(forward(weights, digits.x)[-1], digits.labels)[0],
        accuracy=float((logits.argmax(axis=1) == digits.test_labels).mean()),
        parameters=sum(p.size for p in weights.values()),
        state_bytes=optimizer.state_bytes,
        step_us=float(np.median(times)) * 1e6,
        whole_us=float(np.median(whole)) * 1e6,
    )
