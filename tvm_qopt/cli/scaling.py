"""`tvm-qopt bench --scaling`: sizes, threads, memory, denormal numbers and a training loop."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_qopt.cli.report import print_note, print_table, waiting

if TYPE_CHECKING:
    from tvm_qopt.bench.loop import Loop
    from tvm_qopt.bench.scaling import Point, Ratio
    from tvm_qopt.runtime.kernel import Kernel
    from tvm_qopt.spec import KernelSpec

USUAL = (
    "adamw-float32-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_f32-g_f32",
    "lion-dynamic8-b256-p_bf16-g_bf16",
)
MIDDLE = 10**7  # parameters where one size has to do
DENORMAL_SIZES = (10**6, MIDDLE)  # bound by arithmetic and by bytes
FLOAT32 = "float32"


@dataclasses.dataclass(frozen=True)
class Found:
    points: list[Point]
    left_out: list[str]
    memory: dict[str, int]
    denormal: list[Ratio]
    loops: list[Loop]


def find(specs: Sequence[KernelSpec], largest: int | None) -> Found:
    """All measurements.  largest: parameters, by default what memory allows up to 10^9."""
    from tvm_qopt.bench.scaling import SIZES, Point, denormal_cost, growth, memory_above
    from tvm_qopt.runtime.store import load_many
    from tvm_qopt.runtime.threads import get_num_threads

    sizes = [size for size in SIZES if size <= (largest or SIZES[-1])] or [largest or SIZES[0]]
    middle = min(MIDDLE, sizes[-1])
    kernels = load_many(specs)
    threads = sorted({1, get_num_threads()})
    with waiting("sizes and threads"):
        found = [each for k in kernels for each in growth(k, sizes, threads)]
    points = [each for each in found if isinstance(each, Point)]
    left_out = [f"{e.name}: {e.reason}" for e in found if not isinstance(e, Point)]
    with waiting("memory, denormal numbers, a training loop"):
        memory = {kernel.spec.name: memory_above(kernel, middle) for kernel in kernels}
        sizes = sorted({min(size, sizes[-1]) for size in DENORMAL_SIZES})
        ratios = [denormal_cost(kernel, size) for kernel in kernels for size in sizes]
        loops, why_none = _loops(kernels)
    return Found(points, left_out + why_none, memory, ratios, loops)


def _loops(kernels: Sequence[Kernel]) -> tuple[list[Loop], list[str]]:
    """The loop with every kernel for float32 weights; else why there is none."""
    fitting = [k for k in kernels if k.spec.param == k.spec.grad == FLOAT32]
    if importlib.util.find_spec("torch") is None or not fitting:
        return [], ["the training loop: it takes torch and a spec of float32 weights"]
    from tvm_qopt.bench.loop import loops

    return loops(fitting), []


def report_scaling(
    specs: Sequence[KernelSpec], largest: int | None, plot: Path | None, json: str | None
) -> None:
    from tvm_qopt.bench.machine import BUSY, Watch
    from tvm_qopt.bench.plot import plot_points
    from tvm_qopt.cli.bench import facts_now, write_json
    from tvm_qopt.spec import KernelSpec

    facts, watch = facts_now(), Watch()
    found = find(list(specs) or [KernelSpec.parse(name) for name in USUAL], largest)
    others = sum(watch.others())
    if others > BUSY:
        print_note(f"warning: this machine was busy: {others:.2f} processors used by others")
    if plot:
        plot_points(found.points, facts, plot)
    if not write_json({"machine": facts, **dataclasses.asdict(found)}, json):
        _print(facts, found)


def _print(facts: Mapping[str, str], found: Found) -> None:
    curves = list(dict.fromkeys((p.spec, p.threads) for p in found.points))
    by_place = {(p.spec, p.threads, p.size): p for p in found.points}

    def cell(curve: tuple[str, int], size: int) -> str:
        point: Any = by_place.get((*curve, size))
        return f"{point.ns:.3f}" if point else ""

    sizes = sorted({p.size for p in found.points})
    title = ", ".join(f"{name} {value}" for name, value in facts.items())
    print_table(
        f"nanoseconds a parameter by size; {title}",
        ["parameters", *(f"{spec}, {n} threads" for spec, n in curves)],
        [[f"{size:,}", *(cell(curve, size) for curve in curves)] for size in sizes],
    )
    print_table(
        "with a denormal second moment",
        ["update", "parameters", "time over that of a normal one"],
        [[ratio.spec, f"{ratio.size:,}", f"{ratio.value:.2f}"] for ratio in found.denormal],
    )
    print_table(
        "memory beside the tensors",
        ["update", "KiB at the peak"],
        [[name, f"{taken / 1024:.0f}"] for name, taken in found.memory.items()],
    )
    if found.loops:
        print_table(
            "a loop of matrix products and an update, milliseconds an iteration",
            ["update", "whole", "products", "update alone"],
            [
                [e.name, f"{e.whole:.1f}", f"{e.products:.1f}", f"{e.update:.1f}"]
                for e in found.loops
            ],
        )
    for line in found.left_out:
        print_note(f"left out: {line}")
