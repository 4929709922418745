"""Run OpenCL kernels on NumPy arrays in a child process, on PoCL or in the Oclgrind simulator.

A child, since Oclgrind takes over the OpenCL library of a whole process, and since a kernel that
writes where it should not ends the process it is in.  As a script this file is the child:
`python opencl_runner.py JOBS`, where JOBS is a file that `run` wrote and that gets the results.
"""

from __future__ import annotations

import pickle
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

from tvm_qopt.manifest import OPENCL_SOURCE, Launch
from tvm_qopt.runtime.arguments import Part
from tvm_qopt.runtime.opencl import Region, SourceModule

Array = npt.NDArray[Any]
OCLGRIND = ("--data-races", "--uninitialized")
NO_OPTIMIZATION = "-cl-opt-disable"  # clang's vector intrinsics end Oclgrind

_PROBE = """
import pyopencl
raise SystemExit(not any(platform.get_devices() for platform in pyopencl.get_platforms()))
"""


@dataclass(frozen=True)
class Job:
    """One entry point on named arrays of `part`, which it updates in place."""

    entry: str
    part: Part
    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class Outcome:
    """The arrays of each job after it, and what the simulator reported ("" on PoCL)."""

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


def run(
    source: str, launches: Mapping[str, Launch], jobs: Sequence[Job], *, oclgrind: bool = False
) -> Outcome:
    """Make the jobs in order, each on a copy of its arrays, as the runtime does for users.

    Raises RuntimeError with the child's words when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-opencl-") as folder:
        file = Path(folder) / "jobs"
        options = [NO_OPTIMIZATION] if oclgrind else []
        file.write_bytes(pickle.dumps((source, launches, list(jobs), options)))
        tool = [shutil.which("oclgrind") or "oclgrind", *OCLGRIND] if oclgrind else []
        command = [*tool, sys.executable, str(Path(__file__)), str(file)]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if child.returncode:
            raise RuntimeError(f"the OpenCL child failed ({child.returncode}):\n{child.stderr}")
        return Outcome(pickle.loads(file.read_bytes()), child.stderr if oclgrind else "")


def main(file: Path) -> None:
    import pyopencl as cl

    source, launches, jobs, options = pickle.loads(file.read_bytes())
    device = next(d for platform in cl.get_platforms() for d in platform.get_devices())
    queue = cl.CommandQueue(cl.Context([device]))
    module = SourceModule({OPENCL_SOURCE: source}, launches, "", options)
    file.write_bytes(pickle.dumps([_made(queue, module[job.entry], job) for job in jobs]))


def _made(queue: Any, entry: Any, job: Job) -> dict[str, Array]:
    from pyopencl.array import to_device

    arrays = {name: to_device(queue, np.ascontiguousarray(x)) for name, x in job.arrays.items()}
    regions = {name: Region(x, 0) for name, x in arrays.items()}
    entry.bound(job.part, regions).enqueue(queue)
    return {name: x.get() for name, x in arrays.items()}


if __name__ == "__main__":
    # Jobs are pickled by the name that importers know.
    import opencl_runner

    opencl_runner.main(Path(sys.argv[1]))
