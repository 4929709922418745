"""Kernels that leave everything as it is where `gate` or `advance` put NaN in place of the
gradient's factor, made so in their text: TVM refuses a condition around barriers.
"""

from __future__ import annotations

import re

from tvm_qopt.compiler import cuda_text, opencl
from tvm_qopt.errors import BuildError
from tvm_qopt.spec import STEP_ENTRIES

_STORE = re.compile(r"^( *)((\w+)_ptr\[.*\] = .*;|vstore\d+\(.*, 0, (\w+)_ptr \+ .*\);)$", re.M)


def leave_if_gated(source: str) -> str:
    """CUDA source whose kernels end at once; all threads do, so none is missed at a barrier."""

    def leave(found: re.Match[str]) -> str:
        gate = "  if (hyper_ptr[0] != hyper_ptr[0]) return;\n" if _reads_hyper(found) else ""
        return f"{found['head']}{gate}{found['body']}}}\n"

    return cuda_text.KERNEL.sub(leave, source)


def mask_if_gated(source: str) -> str:
    """OpenCL C whose kernels store nothing.  They run to their end: PoCL 3 loses a work item's
    arrays between barriers that stand behind a condition, also one that is the same for all.

    Raises BuildError where a kernel has no store of the known form.
    """
    return opencl.KERNEL.sub(_masked, source)


def _masked(found: re.Match[str]) -> str:
    if not _reads_hyper(found):
        return found[0]
    arguments = set(re.findall(r"(\w+)_ptr\b", found["arguments"]))

    def mask(store: re.Match[str]) -> str:
        target = store[3] or store[4]
        return f"{store[1]}if (go) {store[2]}" if target in arguments else store[0]

    body = _STORE.sub(mask, found["body"])
    if body == found["body"]:
        raise BuildError(f"{found['name']}: found no store in its OpenCL C")
    head = found[0][: -len(found["body"]) - len("}\n")]
    return f"{head}  const bool go = hyper_ptr[0] == hyper_ptr[0];\n{body}}}\n"


def _reads_hyper(found: re.Match[str]) -> bool:
    own = {f"{entry}_kernel" for entry in STEP_ENTRIES}
    return found["name"] not in own and "hyper_ptr" in found["arguments"]
