"""Run a WGSL kernel on NumPy arrays in a child process, through wgpu on whatever adapter there is.

A child, since a driver that fails ends its process.  As a script this file is the child:
`python webgpu_runner.py JOB`, where JOB is a file that `run` wrote and that gets the results.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PROBE = "import wgpu; wgpu.gpu.request_adapter_sync().request_device_sync()"


def why_missing() -> str | None:
    """Why WGSL cannot be run here, in words; None if it can."""
    child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
    if child.returncode == 0:
        return None
    return "no WebGPU: pip install wgpu, and a Vulkan driver (apt-get install mesa-vulkan-drivers)"


def run(source: str, groups: int, size: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays after `groups` workgroups of the kernel in `source`; size: its nb or B.

    Raises RuntimeError with the child's words when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-webgpu-") as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((source, groups, size, dict(arrays))))
        command = [sys.executable, str(Path(__file__)), str(job)]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if child.returncode:
            raise RuntimeError(f"the WebGPU child failed:\n{child.stderr}")
        results: dict[str, Array] = pickle.loads(job.read_bytes())
    return results


def _run_here(source: str, groups: int, size: int, arrays: dict[str, Array]) -> dict[str, Array]:
    import wgpu

    device = wgpu.gpu.request_adapter_sync().request_device_sync()
    module = device.create_shader_module(code=source)
    pipeline = device.create_compute_pipeline(layout="auto", compute={"module": module})
    bindings = re.findall(r"@binding\((\d+)\) var<(\w+)[^>]*> (\w+) :", source)
    usage = wgpu.BufferUsage
    buffers, entries = {}, []
    for number, space, name in bindings:
        held = name.removesuffix("_ptr")
        data = np.array([size, groups - 1], np.uint32) if space == "uniform" else arrays[held]
        flags = usage.UNIFORM if space == "uniform" else usage.STORAGE | usage.COPY_SRC
        buffers[held] = device.create_buffer_with_data(data=data, usage=flags)
        entries.append({"binding": int(number), "resource": {"buffer": buffers[held]}})
    group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = device.create_command_encoder()
    work = encoder.begin_compute_pass()
    work.set_pipeline(pipeline)
    work.set_bind_group(0, group)
    work.dispatch_workgroups(groups)
    work.end()
    device.queue.submit([encoder.finish()])
    return {
        name: np.frombuffer(device.queue.read_buffer(buffers[name]), array.dtype)
        for name, array in arrays.items()
        if name in buffers
    }


if __name__ == "__main__":
    job = Path(sys.argv[1])
    job.write_bytes(pickle.dumps(_run_here(*pickle.loads(job.read_bytes()))))
