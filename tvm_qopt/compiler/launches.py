"""What the runtime must know to launch a kernel from its OpenCL C: geometry, arguments, offsets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tvm import tirx

from tvm_qopt.compiler.launch import blocks_of_group, threads_of
from tvm_qopt.errors import BuildError
from tvm_qopt.manifest import Launch
from tvm_qopt.spec import STEP_ENTRIES

_KERNEL = re.compile(r"__kernel void (?P<name>\w+)\((?P<arguments>[^)]*)\)(?P<end>;| \{)")
_POINTER = re.compile(r"\s*(?P<type>__global [^,]*?)(?P<name>\w+)_ptr\s*")
_SIZES = ("nb", "B")


def with_offsets(source: str) -> str:
    """The same kernels with the place of its first element behind each buffer.

    `__global float* restrict x_ptr` becomes `__global float* restrict x_ptr, long x_at`.  An
    OpenCL kernel takes memory objects, and a sub-buffer of one may begin only where the device
    allows (every 128 to 512 bytes): the scales of a tail never do.
    """
    return _KERNEL.sub(_with_offsets, source)


def _with_offsets(found: re.Match[str]) -> str:
    arguments, moves = [], []
    for argument in found["arguments"].split(","):
        arguments.append(argument)
        if pointer := _POINTER.fullmatch(argument):
            arguments.append(f" long {pointer['name']}_at")
            moves.append(f"\n  {pointer['name']}_ptr += {pointer['name']}_at;")
    body = "".join(moves) if found["end"] != ";" else ""
    return f"__kernel void {found['name']}({','.join(arguments)}){found['end']}{body}"


def launches_of(
    functions: Mapping[str, tirx.PrimFunc], sources: Mapping[str, str]
) -> dict[str, Launch]:
    """The launch of each entry point, from its scheduled function and the OpenCL C by file.

    Raises BuildError for an entry point that is not one kernel on one axis of groups, and for one
    that keeps something between threads in memory that is no argument.
    """
    kernels = {
        found["name"]: (file, tuple(map(_name_of, found["arguments"].split(","))))
        for file, source in sources.items()
        for found in _KERNEL.finditer(source)
    }
    return {name: _launch(name, func, kernels) for name, func in functions.items()}


def _launch(
    name: str, func: tirx.PrimFunc, kernels: Mapping[str, tuple[str, tuple[str, ...]]]
) -> Launch:
    own = [kernel for kernel in kernels if re.fullmatch(rf"{name}_kernel(_\d+)?", kernel)]
    if own != [f"{name}_kernel"]:
        raise BuildError(f"{name}: expected one kernel in the OpenCL C, got {own}")
    file, arguments = kernels[own[0]]
    foreign = set(arguments) - {param.name for param in func.params} - set(_SIZES)
    if foreign:
        raise BuildError(f"{name}: its kernel needs memory beside its arguments: {sorted(foreign)}")
    blocks = 1 if name in STEP_ENTRIES else blocks_of_group(func)
    return Launch(own[0], arguments, (threads_of(func),), blocks, file)


def _name_of(argument: str) -> str:
    return argument.split()[-1].removesuffix("_ptr")
