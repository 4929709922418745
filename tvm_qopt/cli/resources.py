"""The tables of `tvm-qopt show --what resources`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm_qopt.cli.report import print_note, print_table
from tvm_qopt.errors import UnsupportedSpec
from tvm_qopt.gpus import ASSUMPTIONS, ModelTime
from tvm_qopt.targets import TargetPreset

if TYPE_CHECKING:
    from tvm_qopt.compiler.record import Selection
    from tvm_qopt.compiler.resources import Resources
    from tvm_qopt.spec import KernelSpec

OTHERS = (
    *("shuffles", "divisions", "special", "conversions", "arithmetic", "logic", "barriers"),
    *("total", "seldom"),
)
NO_NVDISASM = (
    "instructions are those of PTX, and the model needs machine code: nvdisasm was not found; "
    "pip install 'tvm_qopt[cuda]'"
)


def find(
    spec: KernelSpec, preset: TargetPreset, entry: str | None, selection: Selection
) -> list[Resources]:
    """Raises UnsupportedSpec for a target that is not CUDA's."""
    if preset.kind != "cuda":
        raise UnsupportedSpec(
            f"--what resources: of cuda targets, which a compiler reports on; got {preset.name}"
        )
    from tvm_qopt.compiler.resources import resources

    return resources(spec, preset, [entry] if entry else None, selection.decisions)


def print_tables(spec: KernelSpec, found: Sequence[Resources]) -> None:
    from tvm_qopt.compiler.resources import PTX, model_times

    print_table(
        "resources (registers of a thread; bytes: spill stores + loads, local, shared memory)",
        ("kernel", "GPU", "registers", "spills", "local", "shared", "threads", "occupancy"),
        map(_resources_row, found),
    )
    print_table(
        f"instructions of a thread, in {found[0].counted_in} (loads, stores: 16 bytes + narrower)",
        ("kernel", "GPU", "loads", "stores", *OTHERS, "an element"),
        map(_counts_row, found),
    )
    if times := model_times(spec, found):
        print_table(
            "model of main, ps a parameter",
            (
                *("GPU", "bytes", "instructions", "arithmetic", "logic", "special", "time"),
                "of the bandwidth",
            ),
            map(_time_row, times),
        )
        print_note(f"model, {ASSUMPTIONS}")
    if found[0].counted_in == PTX:
        print_note(NO_NVDISASM)


def as_data(spec: KernelSpec, found: Sequence[Resources]) -> dict[str, Any]:
    from tvm_qopt.compiler.resources import bytes_of_element, model_times

    return {
        "kernels": [
            {**dataclasses.asdict(each), "occupancy": dataclasses.asdict(each.occupancy)}
            for each in found
        ],
        "bytes_of_element": bytes_of_element(spec),
        "model": [_time_data(time) for time in model_times(spec, found)],
        "assumptions": ASSUMPTIONS,
    }


def _resources_row(each: Resources) -> tuple[str, ...]:
    held = each.occupancy
    return (
        _entry(each),
        each.arch,
        str(each.registers),
        f"{each.spill_stores} + {each.spill_loads}",
        str(each.local),
        str(each.shared),
        str(each.threads),
        f"{held.share:.0%}: {held.warps} warps, by {held.limit}",
    )


def _counts_row(each: Resources) -> tuple[str, ...]:
    counts = each.counts
    of_element = f"{counts.total / each.elements:.0f}" if each.elements else "-"
    loads = f"{counts.loads_16} + {counts.loads_narrow}"
    stores = f"{counts.stores_16} + {counts.stores_narrow}"
    others = (str(getattr(counts, name)) for name in OTHERS)
    return _entry(each), each.arch, loads, stores, *others, of_element


def _entry(each: Resources) -> str:
    return each.kernel.replace("_kernel", "")


def _time_row(time: ModelTime) -> tuple[str, ...]:
    parts = (
        *(time.memory, time.issue, time.arithmetic, time.logic, time.special),
        time.seconds,
    )
    return time.gpu.name, *(f"{part * 1e12:.2f}" for part in parts), f"{time.bandwidth_share:.0%}"


def _time_data(time: ModelTime) -> dict[str, Any]:
    data = dataclasses.asdict(time)
    return {**data, "seconds": time.seconds, "bandwidth_share": time.bandwidth_share}
