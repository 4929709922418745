"""What the bench times of ours, and what bounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np

from tvm_qopt import ops
from tvm_qopt.bench.arrays import Array, filled, placed, split
from tvm_qopt.bench.machine import check_free
from tvm_qopt.bench.measure import OURS, ROOFLINE, STEP, Contender, LeftOut, Skipped, timed
from tvm_qopt.bench.traffic import in_place_addition
from tvm_qopt.params import get_param_format
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.runtime.store import load, load_many
from tvm_qopt.spec import KernelSpec

HYPER = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "alpha": 5.0, "eps": 1e-8,
    "weight_decay": 1e-2, "momentum": 0.9, "dampening": 0.0, "eta": 1.0, "lr_decay": 0.0,
    "t_alpha": 1e4, "t_beta3": 1e4, "clip_gradient": 1.0,
}  # fmt: skip
"""By name, for every rule; alpha is AdEMAMix's (RMSprop takes ALPHA)."""
ALPHA = 0.99
GRADIENT = 1e-3  # its deviation
TINY, TINY_CALLS = 100, 300
OPERATORS = ("quantize", "dequantize")
OPERATOR_BYTES = 10.0  # a parameter: its value, its code, and a result


@cache
def shared(size: int, dtype: str, scale: float) -> Array:
    """Weights and gradients are the same arrays for all: a step is far longer than a cache, and
    memory is short."""
    return filled(size, dtype, scale)


def rooflines(size: int, threads: int) -> list[Contender]:
    """In-place additions, whose bytes a second bound every step: one of NumPy's, with two arrays,
    and one of our own, with the four arrays of a float32 AdamW (more streams are faster)."""
    kernel = load(KernelSpec.of(in_place_addition.__name__, "float32"))
    four = update(kernel, [size], "in-place p, m, v += g")
    return [dataclasses.replace(four, kind=ROOFLINE), numpy_addition(size, threads)]


def numpy_addition(size: int, threads: int) -> Contender:
    """Reads two float32 arrays and writes one in place, a slice on each thread."""
    p, g = shared(size, "float32", 1.0), shared(size, "float32", GRADIENT)
    cuts = np.linspace(0, size, threads + 1).astype(int)
    pool = ThreadPoolExecutor(threads)

    def add(i: int) -> None:
        part = slice(cuts[i], cuts[i + 1])
        np.add(p[part], g[part], out=p[part])

    step = timed(lambda: list(pool.map(add, range(threads))))
    return Contender("in-place p += g (NumPy)", ROOFLINE, 12, size, step)


def ours(
    specs: Sequence[KernelSpec], sizes: Sequence[int]
) -> tuple[list[Contender], list[Skipped]]:
    """A step over tensors for each spec; where they are many, one over a flat tensor as well.

    Beside the first: one in NumPy's own arrays, and one of a tiny tensor.  And those that memory
    is too short for.
    """
    updates = [spec for spec in specs if spec.rule not in OPERATORS]
    kernels = dict(zip(updates, load_many(updates), strict=True))
    total, made, skipped = sum(sizes), [], []
    for name, held, make in _wanted(specs, kernels, sizes):
        try:
            check_free(held * total)
        except LeftOut as error:
            skipped.append(Skipped(name, str(error)))
        else:
            made.append(make(name))
    return made, skipped


def _wanted(
    specs: Sequence[KernelSpec], kernels: Mapping[KernelSpec, Kernel], sizes: Sequence[int]
) -> Iterator[tuple[str, float, Callable[[str], Contender]]]:
    """Name, bytes a parameter, and what makes it."""
    total = sum(sizes)
    for spec in specs:
        if spec.rule in OPERATORS:
            yield spec.name, OPERATOR_BYTES, partial(operator, spec, total)
            kept = partial(operator, spec, total, keep=True)
            yield f"{spec.name}, into kept arrays", OPERATOR_BYTES, kept
            continue
        held = bytes_held(kernels[spec])
        if len(sizes) > 1:
            yield f"{spec.name}, one flat tensor", held, partial(update, kernels[spec], [total])
        yield spec.name, held, partial(update, kernels[spec], sizes)
    for spec, kernel in [*kernels.items()][:1]:
        numpy = partial(update, kernel, [total], place=copies)
        yield f"{spec.name}, NumPy's arrays", bytes_held(kernel), numpy
        yield f"{spec.name}, {TINY} elements", 0, partial(tiny, kernel)


def bytes_held(kernel: Kernel) -> float:
    """Bytes a parameter of weights, gradient and state."""
    spec, size = kernel.spec, 10 * kernel.spec.block_size
    param = filled(size, spec.param)
    arrays = [param, filled(size, spec.grad), *kernel.init_state(param).values()]
    return float(sum(array.nbytes for array in arrays)) / size


def copies(arrays: Sequence[Array]) -> list[Array]:
    """Where NumPy places them."""
    return [array.copy() for array in arrays]


def update(
    kernel: Kernel,
    sizes: Sequence[int],
    name: str,
    *,
    place: Callable[[Sequence[Array]], list[Array]] = placed,
) -> Contender:
    """One step of a kernel over all tensors."""
    spec, total = kernel.spec, sum(sizes)
    flat = [shared(total, spec.param, 1.0), shared(total, spec.grad, GRADIENT)]
    if place is not placed:
        flat = place(flat)
    elif get_param_format(spec.param_format).beside:  # the weights belong to what is beside them
        flat[0] = filled(total, spec.param)
    params, grads = (split(array, sizes) for array in flat)
    states = [kernel.init_state(param) for param in params]
    for slot in states[0]:
        for state, array in zip(states, place([s[slot] for s in states]), strict=True):
            state[slot] = array
    step, moved = stepper(kernel, params, grads, states)
    return Contender(name, OURS, moved / total, total, timed(step))


def stepper(
    kernel: Kernel,
    params: Sequence[Any],
    grads: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
) -> tuple[Callable[[], None], int]:
    """A step over all tensors, and the bytes that it must move."""
    spec, hyper, count = kernel.spec, hyper_of(kernel.spec), 0
    maps = {
        s.name: np.linspace(-1, 1, 256, dtype=np.float32) for s, f in spec.slots if f.runtime_map
    }
    tensors = list(zip(params, grads, states, strict=True))
    given = [{"param": p, "grad": g, "state": s, "qmap": maps} for p, g, s in tensors]
    plan = kernel.plan(**given[0]) if len(given) == 1 else kernel.plan_many(given)

    def step() -> None:
        nonlocal count
        count += 1
        plan.step(step=count, **hyper)

    return step, sum(bytes_moved(spec, {"param": p, "grad": g, **s}) for p, g, s in tensors)


def hyper_of(spec: KernelSpec) -> dict[str, Any]:
    names = [h.name for h in spec.hyper if h.default is None]
    return {n: ALPHA if (spec.rule, n) == ("rmsprop", "alpha") else HYPER[n] for n in names}


def bytes_moved(spec: KernelSpec, arrays: Mapping[str, Any]) -> int:
    """Every argument read once and every output written once; norm passes read the inputs again."""
    passes = 1 + len(spec.rule_.norms)
    named = [t for t in spec.tensors if t.name in arrays]
    return sum(arrays[t.name].nbytes * (passes + t.output) for t in named)


def tiny(kernel: Kernel, name: str) -> Contender:
    """A planned step of a hundred elements, Python and all."""
    param, grad = filled(TINY, kernel.spec.param), filled(TINY, kernel.spec.grad, GRADIENT)
    step, moved = stepper(kernel, [param], [grad], [kernel.init_state(param)])
    return Contender(name, OURS, moved, 1, timed(step, TINY_CALLS), STEP)


def operator(spec: KernelSpec, size: int, name: str, *, keep: bool = False) -> Contender:
    """`ops.quantize` or `ops.dequantize` as users call them: with new arrays for the result, or
    with kept ones."""
    format_, block = spec.slots[0][1].name, spec.block_size
    x = shared(size, spec.param, 1.0)
    codes, scale = stored = ops.quantize(x, format_, block)
    moved = (x.nbytes + codes.nbytes + scale.nbytes) / size
    if spec.rule == "quantize":
        call = partial(ops.quantize, x, format_, block, out=stored if keep else None)
    else:
        result = filled(size, spec.param) if keep else None
        call = partial(ops.dequantize, *stored, format_, block, dtype=spec.param, out=result)
    return Contender(name, OURS, moved, size, timed(call))
