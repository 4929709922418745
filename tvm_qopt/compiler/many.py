"""One launch for many tensors: kernels whose groups of threads look up where they work.

They are made in the text, from the kernels of one tensor: their pointers move to the tensor of the
group (`spec.PLACES`), and its number there (`spec.CHUNKS`) takes the place of the group's own.  The
body is the same text, so the bits are, too, and loads stay as wide as they were.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
from tvm import tirx

from tvm_qopt.compiler import cuda_text, opencl
from tvm_qopt.compiler.launch import blocks_of_group, gpu_function, thread_loop, threads_of
from tvm_qopt.errors import BuildError
from tvm_qopt.manifest import OPENCL_MANY, Launch
from tvm_qopt.spec import CHUNKS, MANY, PLACES, many_entry

_OPENCL_GROUP = "get_group_id(0)"
_CUDA_GROUP = "blockIdx.x"


def many_of(source: str, launches: Mapping[str, Launch]) -> tuple[str, dict[str, Launch]]:
    """OpenCL C for many tensors from that with offsets (`launches.with_offsets`), its launches."""
    bodies = {found["name"]: found for found in opencl.KERNEL.finditer(source)}
    texts, made = [], {}
    for entry, launch in launches.items():
        kernel = f"{many_entry(entry)}_kernel"
        texts.append(_opencl_text(bodies[launch.kernel], kernel, launch))
        arguments = (*launch.arguments[:-1], CHUNKS, PLACES)
        made[many_entry(entry)] = dataclasses.replace(
            launch, kernel=kernel, arguments=arguments, source=OPENCL_MANY
        )
    return "\n".join(texts), made


def _opencl_text(found: re.Match[str], kernel: str, launch: Launch) -> str:
    *names, size = launch.arguments
    pointers = [each for each in found["arguments"].split(",") if "*" in each]
    moves = "".join(f"  {name}_ptr += {name}_at;\n" for name in names)
    if len(pointers) != len(names) or not found["body"].startswith(moves):
        raise BuildError(f"{found['name']}: its OpenCL C has another form than expected")
    tables = [
        f" __global const long* restrict {name}_ptr, long {name}_at" for name in (CHUNKS, PLACES)
    ]
    start = (
        f"  const long chunk = {CHUNKS}_ptr[{CHUNKS}_at + {_OPENCL_GROUP}];\n"
        f"  const __global long* place = {PLACES}_ptr + {PLACES}_at + (chunk >> 32);\n"
        "  const long group = chunk & 0xffffffff;\n"
    )
    body = _moved(names, size, "long") + found["body"].removeprefix(moves)
    head = f"__kernel void {kernel}({','.join((*pointers, *tables))}) {{\n"
    return f"{head}{start}{body.replace(_OPENCL_GROUP, 'group')}}}\n"


def many_function(func: tirx.PrimFunc, entry: str) -> tirx.PrimFunc:
    """What TVM needs to make the host's part of a CUDA entry point for many tensors: it launches a
    group for each of `chunks` and hands over the arguments of `func`, of any size.  `with_bodies`
    gives it its work.

    Raises BuildError where a group of `func` has more than one quantisation block.
    """
    if blocks_of_group(func) != 1:
        raise BuildError(f"{entry}: expected one quantisation block for a group of threads")
    names = [param.name for param in func.params]
    dtypes = [str(param.ty.dtype) for param in func.params]
    buffers = [_buffer(*each) for each in zip(names, dtypes, strict=True)]
    chunks, places = _buffer(CHUNKS, "int64"), _buffer(PLACES, "int64")
    zero = tirx.const(0, "int64")
    used = [tirx.Cast("int64", buffer[zero]) for buffer in (*buffers, places)]
    group, thread = tirx.Var("group", "int64"), tirx.Var("thread", "int64")
    body = tirx.BufferStore(chunks, reduce(lambda x, y: x + y, used), [group])
    body = thread_loop("threadIdx.x", thread, tirx.const(threads_of(func), "int64"), body)
    body = thread_loop("blockIdx.x", group, chunks.shape[0], body)
    return gpu_function(entry, [*buffers, chunks, places], body)


def _buffer(name: str, dtype: str) -> tirx.Buffer:
    size = tirx.Var(f"{name}_size", "int64")
    alignment = np.dtype(dtype).itemsize
    return tirx.decl_buffer((size,), dtype, name=name, data_alignment=alignment)


def with_bodies(source: str) -> str:
    """CUDA source in which kernels for many tensors do what those for one tensor do."""
    kernels = {found["name"]: found for found in cuda_text.KERNEL.finditer(source)}

    def filled(found: re.Match[str]) -> str:
        one = kernels.get(found["name"].replace(f"{MANY}_kernel", "_kernel"))
        if one is None or one["name"] == found["name"]:
            return found[0]
        names = sorted(set(_pointers(found["arguments"])) - {CHUNKS, PLACES})
        size = re.search(r"int64_t (\w+)$", one["arguments"])
        if not set(_pointers(one["arguments"])) <= set(names):
            raise BuildError(f"{one['name']}: its CUDA source has another form than expected")
        start = (
            f"  const int64_t chunk = {CHUNKS}_ptr[{_CUDA_GROUP}];\n"
            f"  const int64_t* __restrict__ place = {PLACES}_ptr + (chunk >> 32);\n"
            "  const int64_t group = chunk & 0xffffffff;\n"
        )
        body = _moved(names, size[1] if size else None, "int64_t") + one["body"]
        return f"{found['head']}{start}{body.replace(_CUDA_GROUP, 'group')}}}\n"

    return cuda_text.KERNEL.sub(filled, source)


def _pointers(arguments: str) -> list[str]:
    return re.findall(r"\* __restrict__ (\w+)_ptr", arguments)


def _moved(names: Sequence[str], size: str | None, kind: str) -> str:
    """The statements that move pointers to a group's tensor, and give its size."""
    places = "".join(f"  {name}_ptr += place[{i}];\n" for i, name in enumerate(names))
    return places + (f"  const {kind} {size} = place[{len(names)}];\n" if size else "")
