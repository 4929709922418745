"""What the compilers say of CUDA kernels where there is no GPU: registers, spills, instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_qopt.compiler.build import compile_spec, entry_points, lower
from tvm_qopt.compiler.cuda import compile_cubin, compile_ptx, device_source
from tvm_qopt.compiler.instructions import (
    Counts,
    count_machine_code,
    count_ptx,
    find_nvdisasm,
)
from tvm_qopt.compiler.launch import blocks_of_group
from tvm_qopt.compiler.schedule import MAIN, TAIL
from tvm_qopt.errors import BuildError
from tvm_qopt.gpus import GPUS, ModelTime, Occupancy, model, occupancy
from tvm_qopt.spec import RESULT, WORKSPACE, KernelSpec, norms_of
from tvm_qopt.targets import TargetPreset

MACHINE_CODE, PTX = "machine code", "PTX"


@dataclass(frozen=True)
class Resources:
    """One kernel of an entry point, for one architecture.

    registers, local (bytes of stack, spills and indexed arrays): of a thread; shared (bytes): of a
    thread block of `threads`.  elements: that a thread handles; None where that depends on the
    tensor (the tail).  counted_in: where the instructions were counted.
    """

    kernel: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    local: int
    shared: int
    threads: int
    elements: float | None
    counted_in: str
    counts: Counts

    @property
    def occupancy(self) -> Occupancy:
        return occupancy(self.arch, self.threads, self.registers, self.shared)


def resources(
    spec: KernelSpec,
    preset: TargetPreset,
    entries: Sequence[str] | None = None,
    decisions: Mapping[str, int] | None = None,
) -> list[Resources]:
    """Every kernel of a spec, or of `entries`, for each architecture of a CUDA preset.

    The compilers' options are those of an artifact.  Instructions are counted in machine code where
    nvdisasm is installed, else in PTX.  Raises ToolMissing without a CUDA compiler, BuildError.
    """
    names = tuple(entries or entry_points(spec, preset.kind))
    source = device_source(compile_spec(spec, preset, names, decisions))
    elements = {name: _elements_of_group(spec, preset, name, decisions) for name in names}
    return [each for arch in preset.archs for each in _of_arch(source, arch, elements)]


def bytes_of_element(spec: KernelSpec) -> float:
    """Bytes that the update must move for one element: every argument once in, every output once
    out."""
    moved = 0
    for t in spec.tensors:
        if t.shape[0] == "nb" and t.role != WORKSPACE:
            size = math.prod(t.sizes(1, spec.block_size)) * np.dtype(t.storage).itemsize
            moved += size * (1 + (t.output and t.role != RESULT))
    return moved / spec.block_size


def model_times(spec: KernelSpec, found: Sequence[Resources]) -> list[ModelTime]:
    """The model's time of the update of full blocks on each GPU whose architecture is among those
    found, where instructions were counted in machine code."""
    times = []
    for gpu in GPUS:
        for each in found:
            if (each.kernel, each.arch, each.counted_in) == (
                f"{MAIN}_kernel",
                gpu.arch,
                MACHINE_CODE,
            ):
                counts, elements = each.counts, each.elements or math.nan
                times.append(
                    model(
                        gpu,
                        moved=bytes_of_element(spec),
                        instructions=counts.total / elements,
                        arithmetic=counts.arithmetic / elements,
                        logic=counts.logic / elements,
                        special=(counts.special + counts.conversions) / elements,
                    )
                )
    return times


def _of_arch(source: str, arch: str, elements: Mapping[str, int | None]) -> list[Resources]:
    cubin, log = compile_cubin(source, arch)
    used = _read_log(log)
    nvdisasm = find_nvdisasm()
    if nvdisasm:
        counted_in, counts = MACHINE_CODE, count_machine_code(cubin, nvdisasm)
    else:
        counted_in, counts = PTX, count_ptx(compile_ptx(source, arch))
    bounds = re.findall(r"__launch_bounds__\((\d+)\) (\w+)\(", source)
    threads = {kernel: int(number) for number, kernel in bounds}
    found = []
    for entry, in_group in elements.items():
        for kernel in (k for k in threads if re.fullmatch(rf"{entry}_kernel(_\d+)?", k)):
            each = None if in_group is None else in_group / threads[kernel]
            found.append(
                Resources(
                    kernel=kernel,
                    arch=arch,
                    **used[kernel],
                    threads=threads[kernel],
                    elements=each,
                    counted_in=counted_in,
                    counts=counts[kernel],
                )
            )
    return found


def _read_log(log: str) -> dict[str, dict[str, int]]:
    """What `ptxas -v` says of each kernel."""
    used = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        memory = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        if registers is None or memory is None:
            raise BuildError(f"ptxas -v reports resources in another form than expected:\n{log}")
        local, stores, loads = map(int, memory.groups())
        shared = re.search(r"(\d+) bytes smem", part)
        used[part.partition("'")[0]] = {
            "registers": int(registers[1]),
            "spill_stores": stores,
            "spill_loads": loads,
            "local": local,
            "shared": int(shared[1]) if shared else 0,
        }
    return used


def _elements_of_group(
    spec: KernelSpec, preset: TargetPreset, entry: str, decisions: Mapping[str, int] | None
) -> int | None:
    """Elements that a thread block handles, from the number of blocks that are launched."""
    if norms_of(entry)[1] == TAIL:
        return None
    return blocks_of_group(lower(spec, preset, entry, decisions).final) * spec.block_size
