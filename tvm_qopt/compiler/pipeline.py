"""TVM's own pipeline of passes, with buffers of a block on the stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from tvm_qopt.compiler import intrinsics as intrinsics  # registers its operations
from tvm_qopt.compiler.realign import on_stack

NAME = "tvm_qopt"


def pipeline() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """What TVM's build takes: the passes on both sides, those of the host, those of the device."""
    passes, host, device = tirx.get_tir_pipeline("default")
    stack = tvm.transform.module_pass(lambda module, _: on_stack(module), opt_level=0)
    return passes, lambda: tvm.transform.Sequential([stack, host()]), device


tirx.register_tir_pipeline(NAME, pipeline)


def compile_module(module: tvm.IRModule, target: tvm.target.Target) -> Any:
    """tvm.compile by this pipeline, for a CPU; by TVM's own for other kinds.

    There common subexpressions are left to the device's compiler: TVM would hand those of sizes to
    the kernel as arguments more.
    """
    if target.kind.name == "llvm":
        return tvm.compile(module, target=target, tir_pipeline=NAME)
    with tvm.transform.PassContext(config={"tirx.disable_cse_tir": True}):
        return tvm.compile(module, target=target, tir_pipeline="default")
