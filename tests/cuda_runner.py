"""CUDA without a GPU: artifacts for CUDA run on this CPU, in child processes that tests start.

The kernels are the text that TVM writes and the CUDA compiler gets, compiled by g++; TVM's host
code for CUDA and its runtime library are the real ones; the driver, the CUDA runtime, nvcc and
CuPy are played by the files of tests/cuda_on_cpu. The device checks what a GPU does not: an
access outside of an allocation or to the host's memory, one that is not aligned, a race within a
block or between blocks, threads that wait for each other for ever, a device pointer that the host
reads. Fresh memory and what is shared holds NaN. Work is done no sooner than somebody waits for
it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = HERE / "cuda_on_cpu"
DRIVER = ("memory.cpp", "block.cpp", "streams.cpp", "driver.cpp")
OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE")
OF_STORES = ("TVM_QOPT_STORE", "TVM_QOPT_POLICY")


def why_missing() -> str | None:
    """Why CUDA cannot be run here, in words; None if it can."""
    return None if shutil.which("g++") else "g++ is not installed: apt-get install g++"


def install(folder: Path) -> None:
    """Build the libraries of the device into a new folder."""
    (folder / "bin").mkdir(parents=True)
    (folder / "kernels").mkdir()
    (folder / "store").mkdir(mode=0o700)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\nexec {sys.executable} {FILES / "nvcc.py"} "$@"\n')
    nvcc.chmod(0o755)
    (folder / "versions").write_text("libcudart.so.13 { global: cuda*; };\n")
    versions = f"-Wl,--version-script={folder / 'versions'}"
    driver, runtime = folder / "libcuda.so.1", folder / "libcudart.so.13"
    for library, sources, more in (
        (driver, DRIVER, ["-ldl"]),
        (runtime, ("runtime.cpp",), [driver, versions]),
    ):
        paths = [FILES / name for name in sources]
        command = ["g++", *OPTIONS, "-o", library, *paths, *more, f"-Wl,-soname,{library.name}"]
        subprocess.run(command, check=True)


def environment(folder: Path, *, arch: str = "90", machine_code: bool = False) -> dict[str, str]:
    """The environment of a child process that has the device of `folder` (see `install`).

    In it `tvm_qopt.load(spec, target="cuda-sm90")` and `tvm-qopt build` make artifacts whose
    kernels run here, in a store of their own, `import cupy` gives arrays on the device, and TVM
    has a "cuda" device, also in TVM's RPC servers. What was built without this environment does
    not run.
    arch: of the GPU, such as "90" for sm_90.  machine_code: the artifacts also hold real machine
    code, which is slow to make and is not run; without they hold a fatbin's headers.
    """
    paths = [str(FILES), str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    made = {
        **{name: value for name, value in os.environ.items() if name not in OF_STORES},
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TVM_QOPT_STORE": str(folder / "store"),
        "CUDA_ON_CPU_KERNELS": str(folder / "kernels"),
        "CUDA_ON_CPU_ARCH": arch,
    }
    return {**made, "CUDA_ON_CPU_CODE": "1"} if machine_code else made


def run(
    folder: Path, *arguments: str, arch: str = "90", machine_code: bool = False
) -> subprocess.CompletedProcess[str]:
    """Python with arguments (a script and its own, or "-c" and text) in such a process."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(folder, arch=arch, machine_code=machine_code),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
