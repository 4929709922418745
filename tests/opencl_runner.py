"""Run OpenCL kernels on NumPy arrays in a child process, on PoCL or in the Oclgrind simulator.

A child, since Oclgrind takes over the OpenCL library of a whole process, and since a kernel that
writes where it should not ends the process it is in.  As a script this file is the child:
`python opencl_runner.py JOB`, where JOB is a file that `run` wrote and that gets the results.
"""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
OCLGRIND = ("--data-races", "--uninitialized")
NO_OPTIMIZATION = "-cl-opt-disable"  # clang's vector intrinsics end Oclgrind

_PROBE = """
import pyopencl
raise SystemExit(not any(platform.get_devices() for platform in pyopencl.get_platforms()))
"""


@dataclass(frozen=True)
class Launch:
    """One kernel on named arrays, which it updates in place; sizes: its integer arguments by name.

    groups and threads: TVM's launch is one group for each turn of the loop bound to blockIdx.x
    (here: each block), of as many threads as the loops bound to threadIdx.x have turns.
    """

    kernel: str
    groups: int
    threads: int
    sizes: Mapping[str, int]
    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class Outcome:
    """The arrays of each launch after it, and what the simulator reported ("" on PoCL)."""

    arrays: list[dict[str, Array]]
    reports: str


def why_missing(*, oclgrind: bool) -> str | None:
    """Why kernels cannot be run here, in words; None if they can."""
    try:
        import pyopencl  # noqa: F401
    except ImportError:
        return "pyopencl is not installed: pip install pyopencl"
    if oclgrind:
        found = shutil.which("oclgrind")
        return None if found else "oclgrind is not installed: apt-get install oclgrind"
    child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
    return "no OpenCL device: apt-get install pocl-opencl-icd" if child.returncode else None


def run(source: str, launches: Sequence[Launch], *, oclgrind: bool = False) -> Outcome:
    """Run the launches in order, each on a copy of its arrays.

    Raises RuntimeError with the child's words when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-opencl-") as folder:
        job = Path(folder) / "job"
        options = [NO_OPTIMIZATION] if oclgrind else []
        job.write_bytes(pickle.dumps((source, list(launches), options)))
        tool = [shutil.which("oclgrind") or "oclgrind", *OCLGRIND] if oclgrind else []
        command = [*tool, sys.executable, str(Path(__file__)), str(job)]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if child.returncode:
            raise RuntimeError(f"the OpenCL child failed ({child.returncode}):\n{child.stderr}")
        return Outcome(pickle.loads(job.read_bytes()), child.stderr if oclgrind else "")


def arguments_of(source: str, kernel: str) -> list[str]:
    """The names of a kernel's arguments, in order; TVM appends _ptr to those of buffers."""
    found = re.search(rf"__kernel void {kernel}\(([^)]*)\)\s*\{{", source)
    assert found, f"no kernel {kernel}"
    return [argument.split()[-1].removesuffix("_ptr") for argument in found.group(1).split(",")]


def main(job: Path) -> None:
    import pyopencl as cl

    source, launches, options = pickle.loads(job.read_bytes())
    device = next(d for platform in cl.get_platforms() for d in platform.get_devices())
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    program = cl.Program(context, source).build(options)
    results = [_launch(cl, queue, program, source, launch) for launch in launches]
    job.write_bytes(pickle.dumps(results))


def _launch(cl: Any, queue: Any, program: Any, source: str, launch: Launch) -> dict[str, Array]:
    context, flags = queue.context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    arrays = launch.arrays.items()
    buffers = {name: cl.Buffer(context, flags, hostbuf=array) for name, array in arrays}
    sizes = {name: np.int64(size) for name, size in launch.sizes.items()}
    kernel = cl.Kernel(program, launch.kernel)
    kernel.set_args(*({**buffers, **sizes}[name] for name in arguments_of(source, launch.kernel)))
    shape = (launch.groups * launch.threads,), (launch.threads,)
    cl.enqueue_nd_range_kernel(queue, kernel, *shape)
    out = {name: np.empty_like(array) for name, array in arrays}
    for name, array in out.items():
        cl.enqueue_copy(queue, array, buffers[name])
    queue.finish()
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
