"""Parameters, random gradients, and all bits of an optimizer, for the tests beside."""

from __future__ import annotations

from typing import Any

import torch

Param = Any


def param(*shape: int) -> Param:
    return torch.nn.Parameter(torch.randn(*shape))


def grads(*params: Param) -> None:
    for p in params:
        p.grad = torch.randn_like(p)


def bits(optimizer: Any) -> list[bytes]:
    """Of all weights and states, in order."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            tensors = [p, *(state[k] for k in sorted(state) if k != "step")]
            found += [x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors]
            found.append(str(state.get("step")).encode())
    return found
