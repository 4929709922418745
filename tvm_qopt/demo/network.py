"""A perceptron with two hidden layers: its weights, forward and backward pass, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Tensors = dict[str, Array]

SIZES = (64, 512, 256, 10)
LAYERS = range(1, len(SIZES))


def init_weights(rng: np.random.Generator) -> Tensors:
    """He initialisation: {"w1": (64, 512), "b1": (512,), ...}."""
    weights: Tensors = {}
    for layer, (inputs, outputs) in enumerate(pairwise(SIZES), start=1):
        draw = rng.standard_normal((inputs, outputs)) * np.sqrt(2.0 / inputs)
        weights[f"w{layer}"] = draw.astype(np.float32)
        weights[f"b{layer}"] = np.zeros(outputs, np.float32)
    return weights


def forward(weights: Mapping[str, Array], x: Array) -> list[Array]:
    """The input of each layer, and last the logits."""
    values = [x]
    for layer in LAYERS:
        z = values[-1] @ weights[f"w{layer}"] + weights[f"b{layer}"]
        values.append(z if layer == LAYERS[-1] else np.maximum(z, 0.0))
    return values


def loss_of(logits: Array, labels: Labels) -> tuple[float, Array]:
    """Mean cross-entropy, and the probabilities."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    log_p = shifted - log_sum
    return float(-log_p[np.arange(len(labels)), labels].mean()), np.exp(log_p)


def backward(weights: Mapping[str, Array], x: Array, labels: Labels, grads: Tensors) -> float:
    """The loss of a batch; its gradients are written into `grads`, whose arrays stay in place."""
    values = forward(weights, x)
    loss, delta = loss_of(values[-1], labels)
    delta[np.arange(len(labels)), labels] -= 1.0
    delta /= len(labels)
    for layer in reversed(LAYERS):
        np.dot(values[layer - 1].T, delta, out=grads[f"w{layer}"])
        delta.sum(axis=0, out=grads[f"b{layer}"])
        if layer > 1:
            delta = (delta @ weights[f"w{layer}"].T) * (values[layer - 1] > 0.0)
    return loss
