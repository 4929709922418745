"""Whether our steps slow the rest of a training step: torch's matrix products between them.

The same loop with torch's own fused optimizer and with ours, in phases that take turns.  Needs
torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_qopt.bench.contenders import GRADIENT, HYPER, stepper
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.runtime.threads import get_num_threads

LAYERS, WIDTH, BATCH = 8, 1024, 256
PHASES, IN_A_PHASE = 12, 5
TORCH = "torch AdamW, fused, float32"


@dataclass(frozen=True)
class Loop:
    """Median milliseconds of an iteration and of its parts, products and update."""

    name: str
    whole: float
    products: float
    update: float


def loops(kernels: Sequence[Kernel]) -> list[Loop]:
    """The loop with torch's optimizer, then with each kernel; the first phase of each is left
    out."""
    import torch

    torch.set_num_threads(get_num_threads())
    torch.manual_seed(0)
    updates = {TORCH: torch_update()} | {k.spec.name: our_update(k) for k in kernels}
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    batch = torch.randn(BATCH, WIDTH)

    def products() -> None:
        x = batch
        for weight in weights:
            x = x @ weight

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in updates}
    for phase in range(PHASES + 1):
        for name, update in updates.items():
            found = [(_seconds(products), _seconds(update)) for _ in range(IN_A_PHASE)]
            if phase:
                times[name] += found
    return [_loop(name, found) for name, found in times.items()]


def _tensors() -> list[Any]:
    """Weights with gradients."""
    import torch

    params = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(LAYERS)]
    for param in params:
        param.grad = torch.randn(WIDTH, WIDTH) * GRADIENT
    return params


def torch_update() -> Callable[[], object]:
    import torch

    betas = HYPER["beta1"], HYPER["beta2"]
    optimizer = torch.optim.AdamW(
        _tensors(), HYPER["lr"], betas, weight_decay=HYPER["weight_decay"], fused=True
    )
    return lambda: optimizer.step()


def our_update(kernel: Kernel) -> Callable[[], object]:
    """Of a kernel for float32 weights and gradients."""
    params = _tensors()
    weights = [param.detach() for param in params]
    grads = [param.grad for param in params]
    return stepper(kernel, weights, grads, [kernel.init_state(w) for w in weights])[0]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _loop(name: str, times: Sequence[tuple[float, float]]) -> Loop:
    columns = [[p + u for p, u in times], *zip(*times, strict=True)]
    whole, products, update = (1e3 * statistics.median(column) for column in columns)
    return Loop(name, whole, products, update)
