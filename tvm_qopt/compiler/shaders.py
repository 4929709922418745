"""Metal and WGSL as TVM writes them, one text a kernel, with what is wrong in them put right.

Barriers: as for OpenCL, TVM's order the memory of a thread group alone, and in-place kernels need
the device's too.  The least 32-bit integer as TVM writes it is no literal of WGSL, and in Metal a
long, whose bits are no float's.  WGSL has no storage of less than 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvm_qopt.errors import BuildError, UnsupportedSpec
from tvm_qopt.spec import KernelSpec

SUFFIX = {"metal": ".metal", "webgpu": ".wgsl"}
_MENDED = {
    "metal": {
        "threadgroup_barrier(mem_flags::mem_threadgroup)": (
            "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device)"
        ),
        "-2147483648": "int(-2147483648)",
    },
    "webgpu": {
        "workgroupBarrier();": "storageBarrier(); workgroupBarrier();",
        "-2147483648i": "i32(-2147483648)",
    },
}
_HEADS = {
    "metal": (
        "// One threadgroup of {threads} threads for each quantisation block.\n"
        "// Compile it without fast-math: codes are exact only with IEEE division and root.\n"
    ),
    "webgpu": (
        "// One workgroup for each quantisation block; packGridDimX is their number less one.\n"
        "// WGSL may divide within 2.5 units in the last place and ignore NaN and infinity: what\n"
        "// is not finite need not be caught here.\n"
    ),
}


def check_storage(spec: KernelSpec) -> None:
    """Raise UnsupportedSpec for tensors that WGSL cannot store: 8 and 16 bits wide."""
    narrow = [t for t in spec.tensors if np.dtype(t.storage).itemsize < 4]
    if narrow:
        held = ", ".join(f"{t.name} ({t.dtype})" for t in narrow)
        raise UnsupportedSpec(
            f"webgpu: WGSL has no storage of 8 or 16 bits, which {held} need; float32 weights, "
            "gradients and state build (--state float32)"
        )


def shaders(executable: Any, kind: str, threads: Mapping[str, int]) -> dict[str, str]:
    """Kernel name -> its source for "metal" or "webgpu".

    threads: of a group of each entry point.  A kernel is named `<entry>_kernel`; its buffers are
    the arguments by name, sorted, then the symbolic size (nb, or B of a tail).
    Raises BuildError where TVM's source has another form than is known here.
    """
    imports = list(executable.mod.imports)
    kinds = [module.kind for module in imports]
    if kinds != [kind]:
        raise BuildError(f"expected one {kind} module below the host module, got {kinds or 'none'}")
    parts = re.split(r"^// Function: (\w+)\n", str(imports[0].inspect_source()), flags=re.MULTILINE)
    texts: dict[str, str] = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        texts[name] = texts.get(name, "") + text.removeprefix(f"//{'-' * 40}\n")
    if set(texts) != {f"{entry}_kernel" for entry in threads}:
        raise BuildError(f"expected a {kind} kernel for each of {list(threads)}, got {list(texts)}")
    return {
        f"{entry}_kernel": _HEADS[kind].format(threads=number)
        + _mended(texts[f"{entry}_kernel"], kind)
        for entry, number in threads.items()
    }


def _mended(text: str, kind: str) -> str:
    for wrong, right in _MENDED[kind].items():
        text = text.replace(wrong, right)
    return text
