"""How cost grows with the size and falls with threads; what a step needs beside its tensors."""

from __future__ import annotations

import re
import statistics
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_qopt.bench.arrays import filled
from tvm_qopt.bench.contenders import GRADIENT, bytes_held, stepper
from tvm_qopt.bench.machine import check_free
from tvm_qopt.bench.measure import WARM_UP, LeftOut, Skipped, middle_half, timed
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.runtime.threads import get_num_threads, set_num_threads

SIZES = (10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9)
ROUNDS = 7
TURN = 2 * 10**6  # elements: smaller tensors are stepped several times in a turn
SPARE = 1.05  # memory to ask for, over that of the tensors
DENORMAL = 3e-20  # a gradient whose square is a denormal in the second moment


@dataclass(frozen=True)
class Point:
    """ns: median nanoseconds a parameter, low and high of the middle half."""

    spec: str
    threads: int
    size: int
    ns: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """Median time with one input over that with another, both interleaved."""

    spec: str
    size: int
    value: float


def growth(
    kernel: Kernel, sizes: Sequence[int], threads: Sequence[int]
) -> Iterator[Point | Skipped]:
    """Points of rising size, up to where memory ends."""
    for size in sizes:
        try:
            check_free(SPARE * size * bytes_held(kernel))
        except LeftOut as error:
            yield Skipped(f"{kernel.spec.name}, {size:,} parameters", str(error))
            return
        yield from _points(kernel, size, threads)


def tensors(kernel: Kernel, size: int, gradient: float = GRADIENT) -> dict[str, Any]:
    """Weights, gradient and state of one flat tensor, all written."""
    spec = kernel.spec
    param, grad = filled(size, spec.param), filled(size, spec.grad, gradient)
    return {"param": param, "grad": grad, **kernel.init_state(param)}


def step_of(kernel: Kernel, arrays: dict[str, Any]) -> Any:
    state = {name: array for name, array in arrays.items() if name not in ("param", "grad")}
    return stepper(kernel, [arrays["param"]], [arrays["grad"]], [state])[0]


def _points(kernel: Kernel, size: int, threads: Sequence[int]) -> Iterator[Point]:
    run = timed(step_of(kernel, tensors(kernel, size)), max(1, TURN // size))
    times: dict[int, list[float]] = {number: [] for number in threads}
    before = get_num_threads()
    for turn in range(WARM_UP + ROUNDS):
        for number, its_times in times.items():
            set_num_threads(number)
            seconds = run()
            if turn >= WARM_UP:
                its_times.append(seconds / size * 1e9)
    set_num_threads(before)
    for number, found in times.items():
        name = kernel.spec.name
        yield Point(name, number, size, statistics.median(found), *middle_half(found))


def memory_above(kernel: Kernel, size: int) -> int:
    """Bytes that planning and three steps take at their peak, beside the tensors.

    The larger of what Python and NumPy allocate and of what the process grows by, which the system
    knows to a few hundred KiB.  What a process takes once, at its first step ever, is not counted:
    the pool and its stacks.
    """
    step_of(kernel, tensors(kernel, 2 * TURN))()
    arrays = tensors(kernel, size)
    tracemalloc.start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    step = step_of(kernel, arrays)
    for _ in range(3):
        step()
    grown, (_, allocated) = _memory("VmHWM") - before, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return max(grown, allocated)


def _memory(name: str) -> int:
    """Bytes of a line in /proc/self/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"no {name} in /proc/self/status"
    return int(found[1]) * 1024


def denormal_cost(kernel: Kernel, size: int) -> Ratio:
    """Steps whose second moment is denormal, over normal ones."""
    runs = [timed(step_of(kernel, tensors(kernel, size, g))) for g in (GRADIENT, DENORMAL)]
    times: list[list[float]] = [[], []]
    for _ in range(WARM_UP):
        for run in runs:
            run()
    for _ in range(3 * ROUNDS):
        for run, its_times in zip(runs, times, strict=True):
            its_times.append(run())
    normal, denormal = map(statistics.median, times)
    return Ratio(kernel.spec.name, size, denormal / normal)
