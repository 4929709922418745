"""Run WGSL kernels on NumPy arrays in a child process, through wgpu on whatever adapter there is.

A child, since a driver that fails ends its process.  As a script this file is the child:
`python webgpu_runner.py JOBS`, where JOBS is a file that `run` wrote and that gets the results.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from opencl_runner import Array, Job

_PROBE = "import wgpu; wgpu.gpu.request_adapter_sync().request_device_sync()"


@dataclass(frozen=True)
class Binding:
    """A buffer of a shader and what it begins with."""

    number: int
    name: str
    uniform: bool
    data: Array


@dataclass(frozen=True)
class Dispatch:
    """A shader on `groups` workgroups, with its buffers."""

    source: str
    groups: int
    bindings: tuple[Binding, ...]


def dispatch(source: str, job: Job) -> Dispatch:
    """A job for one of our kernels: its buffers are arguments by name, then its sizes."""
    sizes = {"nb": job.part.blocks, "B": job.part.size}
    (size,) = re.findall(r"struct PODArgs \{\s+(\w+): i32,\s+packGridDimX: u32\s+\}", source)
    values = np.array([sizes[size], job.part.blocks - 1], np.uint32)
    bindings = [
        Binding(int(number), name, True, values)
        if space == "uniform"
        else Binding(int(number), name.removesuffix("_ptr"), False, _of(job, name))
        for number, space, name in re.findall(r"@binding\((\d+)\) var<(\w+)[^>]*> (\w+) :", source)
    ]
    return Dispatch(source, job.part.blocks, tuple(bindings))


def _of(job: Job, name: str) -> Array:
    return np.ascontiguousarray(job.arrays[name.removesuffix("_ptr")])


@cache
def why_missing() -> str | None:
    """Why WGSL cannot be run here, in words; None if it can."""
    child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
    if child.returncode == 0:
        return None
    return "no WebGPU: pip install wgpu, and a Vulkan driver (apt-get install mesa-vulkan-drivers)"


def run(dispatches: Sequence[Dispatch]) -> list[dict[str, Array]]:
    """The buffers of each after it, but for sizes.

    Raises RuntimeError with the child's words when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-webgpu-") as folder:
        file = Path(folder) / "jobs"
        file.write_bytes(pickle.dumps(list(dispatches)))
        command = [sys.executable, str(Path(__file__)), str(file)]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if child.returncode:
            raise RuntimeError(f"the WebGPU child failed:\n{child.stderr}")
        results: list[dict[str, Array]] = pickle.loads(file.read_bytes())
    return results


def main(file: Path) -> None:
    import wgpu

    device = wgpu.gpu.request_adapter_sync().request_device_sync()
    dispatches = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps([_made(device, each) for each in dispatches]))


def _made(device: Any, work: Dispatch) -> dict[str, Array]:
    from wgpu import BufferUsage

    module = device.create_shader_module(code=work.source)
    pipeline = device.create_compute_pipeline(layout="auto", compute={"module": module})
    buffers, entries = {}, []
    for each in work.bindings:
        usage = BufferUsage.UNIFORM if each.uniform else BufferUsage.STORAGE | BufferUsage.COPY_SRC
        buffers[each.name] = device.create_buffer_with_data(data=each.data, usage=usage)
        entries.append({"binding": each.number, "resource": {"buffer": buffers[each.name]}})
    group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = device.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(work.groups)
    compute.end()
    device.queue.submit([encoder.finish()])
    return {
        each.name: np.frombuffer(device.queue.read_buffer(buffers[each.name]), each.data.dtype)
        for each in work.bindings
        if not each.uniform
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
