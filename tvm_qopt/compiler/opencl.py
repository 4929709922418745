"""OpenCL C as TVM writes it, with a few edits of the text.

TVM's barriers carry CLK_LOCAL_MEM_FENCE only, CUDA's `__syncthreads` orders all memory of the
block.  The blockwise kernel reads the old scales in all threads and writes the new ones in one, in
the same array, with a barrier between: that orders them only where the fence names global memory.
float16 comes and goes by the functions that every device has, where TVM asks for cl_khr_fp16.  The
bits of a constant (a NaN) are not read from its address, which C does not allow.
"""

from __future__ import annotations

import re
from typing import Any

import tvm_ffi

from tvm_qopt.errors import BuildError

KERNEL = re.compile(
    r"__kernel void (?P<name>\w+)\((?P<arguments>[^)]*)\) \{\n(?P<body>.*?\n)\}\n", re.DOTALL
)
_POSTPROC = "tvm_callback_opencl_postproc"  # TVM's code generator hands it each kernel's source
_LOCAL = "barrier(CLK_LOCAL_MEM_FENCE)"
_BOTH = "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)"
_EXTENSION = re.compile(r"#ifdef cl_khr_fp16.*?#endif\n", flags=re.DOTALL)
_CONSTANT = re.compile(r"\(\*\((\w+) \*\)\(&\((-?\d+)\)\)\)")
_FROM_HALF = re.compile(r"\(convert_float\(\(\*\(half \*\)\(&\((\w+)\)\)\)\)\)")
_TO_HALF = re.compile(r"half (\w+) = convert_half\((.*)\);")


def register_barrier_fence() -> None:
    """Make `tvm.compile` write barriers that fence global memory too; may be called again."""
    tvm_ffi.register_global_func(_POSTPROC, _edit, override=True)


def opencl_source(executable: Any) -> str:
    """The OpenCL C that `tvm.compile(..., target opencl)` made, with every kernel of it.

    A kernel is named `<entry>_kernel`; its arguments are the buffers by name (`param_ptr`), sorted,
    then the symbolic size (nb, or B of a tail).  Launch one group a block, of as many threads as
    `threadIdx.x` has in the scheduled function.
    Raises BuildError for another target, or where `register_barrier_fence` was not called before.
    """
    imports = list(executable.mod.imports)
    kinds = [module.kind for module in imports]
    if kinds != ["opencl"]:
        raise BuildError(f"expected one OpenCL module below the host module, got {kinds or 'none'}")
    source = str(imports[0].inspect_source())
    if _LOCAL in source:
        raise BuildError("barriers order local memory only: call register_barrier_fence first")
    return source


def _edit(code: str, target: object) -> str:
    code = code.replace(_LOCAL, _BOTH)
    code = _EXTENSION.sub("", code)
    code = _CONSTANT.sub(r"as_\1(\2)", code)
    code = _FROM_HALF.sub(r"vload_half(0, (half *)(&(\1)))", code)
    return _TO_HALF.sub(r"ushort \1; vstore_half_rte(\2, 0, (half *)(&(\1)));", code)
