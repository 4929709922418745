"""One launch for many tensors: kernels whose groups look up where they work in a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from tvm_qopt.errors import BuildError
from tvm_qopt.manifest import OPENCL_MANY, TABLE, Launch
from tvm_qopt.spec import many_entry

_KERNEL = re.compile(
    r"__kernel void (?P<name>\w+)\((?P<arguments>[^)]*)\) \{\n(?P<body>.*?\n)\}\n", re.DOTALL
)
_GROUP = "get_group_id(0)"


def many_of(source: str, launches: Mapping[str, Launch]) -> tuple[str, dict[str, Launch]]:
    """Kernels for tables from kernels with offsets (`launches.with_offsets`), and their launches.

    A row of the table has, for a group, the place of the first element of each argument, in the
    order of the launch, and the size (nb or B).  The body is the same text, with group 0 in place
    of the group's number: so the bits are, too.
    """
    bodies = {found["name"]: found for found in _KERNEL.finditer(source)}
    texts, made = [], {}
    for entry, launch in launches.items():
        kernel = f"{many_entry(entry)}_kernel"
        texts.append(_text(bodies[launch.kernel], kernel, launch))
        made[many_entry(entry)] = dataclasses.replace(
            launch, kernel=kernel, arguments=(*launch.arguments[:-1], TABLE), source=OPENCL_MANY
        )
    return "\n".join(texts), made


def _text(found: re.Match[str], kernel: str, launch: Launch) -> str:
    *names, size = launch.arguments
    pointers = [each for each in found["arguments"].split(",") if "*" in each]
    moves = "".join(f"  {name}_ptr += {name}_at;\n" for name in names)
    if len(pointers) != len(names) or not found["body"].startswith(moves):
        raise BuildError(f"{found['name']}: its OpenCL C has another form than expected")
    table = f" __global const long* restrict {TABLE}_ptr, long {TABLE}_at"
    row = f"  const __global long* row = {TABLE}_ptr + {TABLE}_at + {_GROUP} * {len(names) + 1};\n"
    places = "".join(f"  {name}_ptr += row[{i}];\n" for i, name in enumerate(names))
    count = f"  const long {size} = row[{len(names)}];\n"
    body = found["body"].removeprefix(moves).replace(_GROUP, "0")
    head = f"__kernel void {kernel}({','.join((*pointers, table))}) {{\n"
    return f"{head}{row}{places}{count}{body}}}\n"
