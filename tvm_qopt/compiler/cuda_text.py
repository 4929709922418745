"""CUDA C++ as TVM writes it, with a few edits of the text.

TVM names the lanes of a warp that happen to run together, which after a divergent loop need not be
all; every schedule launches whole warps.  It reads the bits of a constant (a NaN) from its address,
which C++ does not allow.  It adds up a warp by five shuffles, where sm_80 and later have one
instruction for integers.  And it has no table that lies in the lanes of a warp: look-ups among 16
numbers (`compiler.intrinsics`) get their tables and their shuffle here.
"""

from __future__ import annotations

import re

import numpy as np

from tvm_qopt.compiler.intrinsics import ENTRIES, ENTRY, PERMUTE, WHOLE_OF_BYTE
from tvm_qopt.errors import BuildError
from tvm_qopt.xp import WHOLE_BITS

KERNEL = re.compile(
    r'(?P<head>extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(?P<name>\w+)'
    r"\((?P<arguments>[^)]*)\) \{\n)(?P<body>.*?\n)\}\n",
    re.DOTALL,
)
_CONSTANT_BITS = re.compile(r"\(\*\(float \*\)\(&\((\d+)\)\)\)")
_KERNELS = 'extern "C" __global__'
_LOOK_UP = re.compile(rf"qopt_({PERMUTE}|{ENTRY})\(((?:[^,()]+, ){{{ENTRIES}}})")
WHOLE_CALL = f"qopt_{WHOLE_OF_BYTE}("


def edit(source: str) -> str:
    """The source that is compiled, from what TVM made under `cuda.source_only`."""
    source = source.replace("__activemask()", "0xffffffffu")
    source = _CONSTANT_BITS.sub(r"__int_as_float(\1)", source)
    return _with_tables(_with_reductions(source))


# --- reductions ---


def _step(lanes: int) -> str:
    return (
        rf"\s*(?P=other) = __shfl_down_sync\(\w+\[0\], (?P=own), {lanes}, 32\);"
        r"\n\s*(?P=own) = (?P=operation)(?P=own) ?[,+] (?P=other)\);\n"
    )


_REDUCTION = re.compile(
    r"(?P<indent> *)(?P<other>\w+\[0\]) = __shfl_down_sync\(\w+\[0\], (?P<own>\w+\[0\]), 16, 32\);"
    r"\n\s*(?P=own) = (?P<operation>(?:max)?\()(?P=own) ?[,+] (?P=other)\);\n"
    + "".join(_step(lanes) for lanes in (8, 4, 2, 1))
)
_OF_WARP = """\
static __device__ __forceinline__ int qopt_{name}_of_warp(int x) {{
#if __CUDA_ARCH__ >= 800
  return __reduce_{name}_sync(0xffffffffu, x);
#else
  for (int lanes = 16; lanes; lanes /= 2) {{
    const int other = __shfl_xor_sync(0xffffffffu, x, lanes);
    x = {result};
  }}
  return x;
#endif
}}
"""


def _with_reductions(source: str) -> str:
    """One call for the shuffles by which a warp finds the maximum or the sum of integers.

    (Without TVM's shuffle behind them, which hands the result to lanes that have it, ptxas keeps
    the result in a uniform register and moves it from there: two instructions an element more.)
    """
    edited = _KERNELS.join(map(_reduced, source.split(_KERNELS)))
    results = {"max": "max(x, other)", "add": "x + other"}
    needed = [name for name in results if f"qopt_{name}_of_warp" in edited]
    return _before_kernels(
        edited, "".join(_OF_WARP.format(name=name, result=results[name]) for name in needed)
    )


def _reduced(kernel: str) -> str:
    """Of one kernel, since another's buffer of the same name may hold floats."""
    integers = set(re.findall(r"\bint (\w+)\[1\];", kernel))

    def reduced(found: re.Match[str]) -> str:
        own = found["own"]
        if own.removesuffix("[0]") not in integers:
            return found[0]
        name = "max" if found["operation"].startswith("max") else "add"
        return f"{found['indent']}{own} = qopt_{name}_of_warp({own});\n"

    return _REDUCTION.sub(reduced, kernel)


# --- look-ups ---


def _with_tables(source: str) -> str:
    """Look-ups by a shuffle, each lane holding its entry of every table; where other threads may be
    elsewhere, by a load.  A byte moves into a register that holds the bits of 2^23, which the
    compiler must not know, or it holds what selects the byte in one instead, for every byte anew.

    The entries of a lane are one row.  (By 16 bytes they are loaded anew for each element: ptxas
    finds no four registers in a row for them.)
    """
    for kernel in source.split(_KERNELS)[1:]:
        _check_lanes(kernel)
    tables: dict[tuple[int, ...], int] = {}  # by the bits of entries
    if WHOLE_CALL in source:
        tables[(WHOLE_BITS,) * ENTRIES] = 0

    def named(found: re.Match[str]) -> str:
        values = [_number(entry) for entry in found[2].removesuffix(", ").split(", ")]
        bits = tuple(np.array(values, np.float32).view(np.uint32).tolist())
        return f"qopt_{found[1]}_{tables.setdefault(bits, len(tables))}("

    source = _LOOK_UP.sub(named, source)
    if not tables:
        return source
    rows = str(np.array(list(tables)).T.tolist()).replace("[", "{").replace("]", "}")
    head = f"static __device__ const unsigned qopt_tables[{ENTRIES}][{len(tables)}] = {rows};\n"
    if WHOLE_CALL in source:
        moved = f"__byte_perm(word, {_entry('threadIdx.x', 0)}, 0x7440 + number)"
        head += _function(WHOLE_OF_BYTE, "unsigned word, int number", moved)
    for number in tables.values():
        own = _entry("threadIdx.x", number)
        shuffled = f"__shfl_sync(0xffffffffu, {own}, index)"
        head += _function(f"{PERMUTE}_{number}", "int index", shuffled)
        head += _function(f"{ENTRY}_{number}", "int index", _entry("index", number))
    return _before_kernels(source, head)


def _check_lanes(kernel: str) -> None:
    """Raise BuildError for a shuffle under a condition, where lanes that it asks may be elsewhere:
    what a format looks up it must bind, not choose in a `where`."""
    conditions: list[bool] = []  # of the open braces
    for line in map(str.strip, kernel.splitlines()):
        if line.startswith("}"):
            conditions.pop()
        before, looks_up, _ = line.partition(f"qopt_{PERMUTE}(")
        if looks_up and (any(conditions) or "?" in before):
            raise BuildError(f"a look-up under a condition, which a warp cannot make: {line[:200]}")
        if line.endswith("{"):
            conditions.append(line.startswith(("if ", "} else")))


def _entry(lane: str, number: int) -> str:
    """The bits of an entry."""
    return f"qopt_tables[{lane} & {ENTRIES - 1}][{number}]"


def _function(name: str, arguments: str, bits: str) -> str:
    head = f"static __device__ __forceinline__ float qopt_{name}({arguments})"
    return f"{head} {{\n  return __uint_as_float({bits});\n}}\n"


def _number(literal: str) -> float:
    """The value of a float32 literal as TVM prints it: 0x1.8p+0f/*1.500000e+00*/."""
    if "INF" in literal.upper():
        return float("-inf" if literal.startswith("-") else "inf")
    return float.fromhex(literal.partition("/*")[0].rstrip("f"))


def _before_kernels(source: str, head: str) -> str:
    return source.replace(_KERNELS, f"{head}{_KERNELS}", 1)
