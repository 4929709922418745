"""What the bench times: kernels of ours, torch's fused AdamW where torch is, and the roofline.

Every contender owns its arrays, all filled: pages never written read at the speed of a cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.runtime.store import load_many
from tvm_qopt.spec import KernelSpec

HYPER = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "alpha": 5.0, "eps": 1e-8,
    "weight_decay": 1e-2, "momentum": 0.9, "dampening": 0.0, "eta": 1.0, "lr_decay": 0.0,
    "t_alpha": 1e4, "t_beta3": 1e4, "clip_gradient": 1.0,
}  # fmt: skip
"""By name, for every rule; alpha is AdEMAMix's (RMSprop takes ALPHA)."""
ALPHA = 0.99
ROOFLINE = "in-place p += g (NumPy)"
TORCH = "torch AdamW fused, float32 state"


@dataclass(frozen=True)
class Contender:
    """A name, the bytes a step must move for each parameter, and the step itself."""

    name: str
    bytes: float
    step: Callable[[], object]


def roofline(size: int, threads: int) -> Contender:
    """Reads two float32 arrays and writes one in place, a slice on each thread."""
    p, g = _normal(size), _normal(size)
    cuts = np.linspace(0, size, threads + 1).astype(int)
    pool = ThreadPoolExecutor(threads)

    def add(i: int) -> None:
        part = slice(cuts[i], cuts[i + 1])
        np.add(p[part], g[part], out=p[part])

    return Contender(ROOFLINE, 12, lambda: list(pool.map(add, range(threads))))


def ours(specs: Sequence[KernelSpec], size: int) -> list[Contender]:
    """A kernel for each spec, its gradient of the size that training sees."""
    return [_one(kernel, spec, size) for kernel, spec in zip(load_many(specs), specs, strict=True)]


def torch_fused(size: int, threads: int) -> Contender | None:
    """torch.optim.AdamW(fused=True); None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(threads)
    p = torch.nn.Parameter(torch.from_numpy(_normal(size)))
    p.grad = torch.from_numpy(_normal(size) * np.float32(1e-3))
    return Contender(TORCH, 28, torch.optim.AdamW([p], fused=True).step)


def _one(kernel: Any, spec: KernelSpec, size: int) -> Contender:
    param, grad = _stored(_normal(size), spec.param), _stored(_normal(size) * 1e-3, spec.grad)
    state = kernel.init_state(param)
    qmap = {
        s.name: np.linspace(-1, 1, 256, dtype=np.float32) for s, f in spec.slots if f.runtime_map
    }
    plan = kernel.plan(param=param, grad=grad, state=state, qmap=qmap)
    names = [h.name for h in spec.hyper if h.default is None]
    hyper = {n: ALPHA if (spec.rule, n) == ("rmsprop", "alpha") else HYPER[n] for n in names}
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        plan.step(step=count, **hyper)

    return Contender(spec.name, _bytes(spec, {"param": param, "grad": grad, **state}, size), step)


def _bytes(spec: KernelSpec, arrays: dict[str, npt.NDArray[Any]], size: int) -> float:
    """Every argument read once and every output written once; norm passes read the inputs again."""
    passes = 1 + len(spec.rule_.norms)
    total = 0
    for t in spec.tensors:
        if t.name in arrays:
            total += arrays[t.name].nbytes * (passes + t.output)
    return total / size


def _normal(size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(size, dtype=np.float32)


def _stored(x: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)
