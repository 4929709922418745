"""Counts of a GPU kernel's instructions by kind, from machine code or else from PTX.

Machine code is read as nvdisasm prints it.  Loops over a thread's elements are unrolled, so the
instructions that stand there are those that run, but for the slow paths of IEEE division, root and
reciprocal: subroutines for numbers at the ends of the range, told by the call inside a branch that
is jumped over elsewhere.  They are counted apart, as `seldom`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_qopt.compiler.nvrtc import wheel_folders
from tvm_qopt.errors import BuildError

_STEP = 16  # bytes of an instruction, from sm_70 on
_CONVERSIONS = ("F2I", "F2F", "I2F", "FRND")  # of the special function unit; I2FP and F2FP are not
_ARITHMETIC = ("FADD", "FFMA", "FMUL", "IMAD", "HFMA2")
_LOGIC = (
    *("FMNMX", "FSEL", "FSETP", "IADD3", "IABS", "IMNMX", "ISETP", "LEA", "LOP3", "P2R", "PLOP3"),
    *("PRMT", "R2P", "SEL", "SHF", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "I2FP", "F2FP"),
)  # of the unit for integers and bits
_PTX_SPECIAL = ("rcp", "rsqrt", "sqrt", "ex2", "lg2")
_PTX_ARITHMETIC = ("add", "sub", "mul", "fma", "mad", "neg")
_PTX_LOGIC = ("setp", "selp", "min", "max", "and", "or", "xor", "not", "shl", "shr", "prmt", "lop3")


@dataclass(frozen=True)
class Counts:
    """Instructions of one thread by kind.

    loads, stores: of global memory, those of 16 bytes and the narrower ones.  special: the special
    functions (rcp, rsqrt, sqrt, ex2 ...).  arithmetic: sums and products.  logic: comparisons,
    selections, operations on integers and bits.  total: all that stand in the common path, whatever
    their kind.  seldom: in slow paths; 0 for PTX, which has one instruction for a division.
    """

    loads_16: int
    loads_narrow: int
    stores_16: int
    stores_narrow: int
    shuffles: int
    divisions: int
    special: int
    conversions: int
    arithmetic: int
    logic: int
    barriers: int
    total: int
    seldom: int


def find_nvdisasm() -> str | None:
    """nvdisasm of a toolkit, or of NVIDIA's wheel."""
    places = [root / "bin" for root in (Path("/usr/local/cuda"), *wheel_folders())]
    found = (shutil.which("nvdisasm", path=str(place)) for place in places)
    return shutil.which("nvdisasm") or next(filter(None, found), None)


def count_machine_code(cubin: bytes, nvdisasm: str, *, timeout: float = 120.0) -> dict[str, Counts]:
    """Kernel name -> its counts.  Raises BuildError where nvdisasm does not read the cubin."""
    with tempfile.TemporaryDirectory(prefix="tvm_qopt-nvdisasm-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [nvdisasm, "--emit-json", str(path)]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{nvdisasm} took more than {timeout:g} s and was ended") from None
    try:
        _, functions = json.loads(run.stdout)
        return {f["function-name"]: _count(f["sass-instructions"]) for f in functions}
    except (ValueError, KeyError, TypeError) as error:
        said = run.stderr.strip() or repr(error)
        raise BuildError(f"{nvdisasm} does not read this cubin as expected: {said}") from error


def _count(instructions: Sequence[Mapping[str, Any]]) -> Counts:
    end = _end_of_body(instructions)
    skipped = _slow_paths(instructions, end)
    run = [
        each["opcode"].split(".") for i, each in enumerate(instructions[:end]) if i not in skipped
    ]
    loads = ["128" in parts or "256" in parts for parts in run if parts[0] == "LDG"]
    stores = ["128" in parts or "256" in parts for parts in run if parts[0] == "STG"]
    names = [parts[0] for parts in run]
    return Counts(
        **_by_width("loads", loads),
        **_by_width("stores", stores),
        shuffles=names.count("SHFL"),
        divisions=names.count("FCHK"),  # asks whether a division needs its slow path
        special=names.count("MUFU"),
        conversions=sum(name in _CONVERSIONS for name in names),
        arithmetic=sum(name in _ARITHMETIC for name in names),
        logic=sum(name in _LOGIC for name in names),
        barriers=names.count("BAR"),
        total=len(run),
        seldom=sum(each["opcode"] != "NOP" for each in instructions) - len(run),
    )


def _end_of_body(instructions: Sequence[Mapping[str, Any]]) -> int:
    """One past the kernel's last EXIT: what follows is jumped or called to, seldom.

    An EXIT that a branch jumps over is not the last.
    """
    reach = 0
    for i, each in enumerate(instructions):
        if each["opcode"] == "BRA":
            reach = max(reach, _target(each))
        if each["opcode"] == "EXIT" and "predicate" not in each and i >= reach:
            return i + 1
    raise BuildError("a kernel without an end in its machine code: nvdisasm prints another form")


def _slow_paths(instructions: Sequence[Mapping[str, Any]], end: int) -> set[int]:
    """The instructions that a branch jumps over and that call a subroutine come what may."""
    slow: set[int] = set()
    for i, each in enumerate(instructions[:end]):
        if each["opcode"] == "BRA" and "predicate" in each and i < _target(each) <= end:
            rest = instructions[i + 1 : _target(each)]
            parts = (r["opcode"].partition(".")[0] for r in rest if _moves_control(r))
            if next(parts, None) == "CALL":
                slow.update(range(i + 1, _target(each)))
    return slow


def _moves_control(instruction: Mapping[str, Any]) -> bool:
    return "control-flow" in instruction.get("other-attributes", {})


def _target(branch: Mapping[str, Any]) -> int:
    """The index of the instruction that a branch goes to."""
    found = re.search(r"0x([0-9a-f]+)$", branch["operands"])
    if found is None:
        raise BuildError(f"a branch to {branch['operands']!r}: nvdisasm prints another form")
    return int(found[1], 16) // _STEP


def count_ptx(ptx: str) -> dict[str, Counts]:
    """Kernel name -> its counts in PTX: as written, before ptxas makes machine code of it."""
    kernels = re.findall(r"\.entry (\w+)\(.*?^\{$(.*?)^\}$", ptx, flags=re.DOTALL | re.MULTILINE)
    return {name: _count_ptx(body) for name, body in kernels}


def _count_ptx(body: str) -> Counts:
    run = [
        found[1].split(".")
        for found in re.finditer(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s.*;$", body, re.MULTILINE)
    ]
    loads = [_ptx_bytes(parts) >= 16 for parts in run if parts[:2] == ["ld", "global"]]
    stores = [_ptx_bytes(parts) >= 16 for parts in run if parts[:2] == ["st", "global"]]
    names = [parts[0] for parts in run]
    return Counts(
        **_by_width("loads", loads),
        **_by_width("stores", stores),
        shuffles=names.count("shfl"),
        divisions=sum(parts[:2] == ["div", "rn"] for parts in run),
        special=sum(name in _PTX_SPECIAL for name in names),
        conversions=sum(parts[0] == "cvt" and "f32" in parts[-2:] for parts in run),
        arithmetic=sum(name in _PTX_ARITHMETIC for name in names),
        logic=sum(name in _PTX_LOGIC for name in names),
        barriers=sum(name in ("bar", "barrier") for name in names),
        total=len(run),
        seldom=0,
    )


def _by_width(name: str, wide: Sequence[bool]) -> dict[str, int]:
    """Accesses that are 16 bytes wide or not, as the fields of Counts."""
    return {f"{name}_16": sum(wide), f"{name}_narrow": len(wide) - sum(wide)}


def _ptx_bytes(parts: Sequence[str]) -> int:
    """16 of ld.global.nc.v4.f32."""
    lanes = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
    return lanes * int(parts[-1][1:]) // 8
