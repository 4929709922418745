"""Plays nvcc for tests: compiles a kernel's text for this CPU, where the device of this folder
finds it by the fatbin that it leaves.

The fatbin names the architectures and the text, and holds no machine code.  With CUDA_ON_CPU_CODE
it is that of a real compiler, nvcc further down PATH or NVRTC.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ABSENT = ("cuda.h", "cuda_fp16.h", "cuda_bf16.h", "math_constants.h")  # kernel.h is in their place
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\((\d+)\) )?(\w+)\([^)]*\) \{")
CODE = re.compile(r"^-gencode=.*code=(sm|compute)_(\d+)$")
OPTIONS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-nostdlib", "-fno-exceptions")
# Contracts as nvcc does, reads bits by casts of pointers as TVM's text does.
MEANING = ("-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-strict-aliasing")
CHECKS = ("-fsanitize=thread", "-fsanitize=alignment")


def stand_in(source: str, codes: list[tuple[str, str]]) -> bytes:
    """A fatbin as far as headers are read: an entry for each architecture."""
    payload = hashlib.sha256(source.encode()).digest()
    entries = b""
    for kind, number in codes:
        number_of_kind = 2 if kind == "sm" else 1
        header = struct.pack("<HHIQ12xI", number_of_kind, 0x101, 64, len(payload), int(number))
        entries += header.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def machine_code(source: str, codes: list[tuple[str, str]]) -> bytes:
    own = os.environ["PATH"].split(os.pathsep)[0]
    os.environ["PATH"] = os.environ["PATH"].removeprefix(own + os.pathsep)
    from tvm_qopt.compiler.cuda import compile_cuda

    return compile_cuda(source, [f"sm_{number}" for kind, number in codes if kind == "sm"])


def name_of(fatbin: bytes) -> str:
    """FNV-1a of a fatbin without what may stand behind it, as driver.cpp has it."""
    header, size = struct.unpack_from("<HQ", fatbin, 6)
    hashed = 0xCBF29CE484222325
    for byte in fatbin[: header + size]:
        hashed = (hashed ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{hashed:016x}.so"


def compile_here(source: str, out: Path) -> None:
    """The kernels of a text as a library, with a description of each for the driver."""
    described = "".join(f"KERNEL({name}, {most or 0})\n" for most, name in KERNEL.findall(source))
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        for name in ABSENT:
            (Path(folder) / name).touch()
        (Path(folder) / "kernel.cpp").write_text(f"{source}\n{described}")
        made = Path(folder) / out.name
        driver = out.parent.parent / "libcuda.so.1"
        command = ["g++", *OPTIONS, *MEANING, *CHECKS, "-I", folder, "-include", HERE / "kernel.h"]
        command += ["-o", made, Path(folder) / "kernel.cpp", "-lm", driver]
        subprocess.run(command, check=True)
        made.rename(out)


def main(arguments: list[str]) -> None:
    source = Path(arguments[-1]).read_text()
    codes = [found.groups() for each in arguments if (found := CODE.match(each))]
    out = next(each for each in arguments if each.startswith("--output-file=")).partition("=")[2]
    if "--fatbin" not in arguments:
        raise SystemExit("this nvcc makes fatbins only")
    make = machine_code if os.environ.get("CUDA_ON_CPU_CODE") else stand_in
    fatbin = make(source, codes)  # type: ignore[arg-type]
    library = Path(os.environ["CUDA_ON_CPU_KERNELS"]) / name_of(fatbin)
    if not library.exists():
        library.with_suffix(".cu").write_text(source)
        compile_here(source, library)
    Path(out).write_bytes(fatbin)


if __name__ == "__main__":
    main(sys.argv[1:])
