"""Where a kernel keeps what it computes between its sweeps."""

from __future__ import annotations

import pytest

from tvm_qopt.compiler.build import compile_spec
from tvm_qopt.compiler.schedule import MAIN, SERIAL
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import PRESETS, get_target


@pytest.mark.parametrize("target", ["llvm-x86-64-v3", "llvm-aarch64"])
@pytest.mark.parametrize("block_size", [64, 256, 4096])
def test_full_blocks_take_no_memory_from_the_pool(target: str, block_size: int) -> None:
    """Threads that ask TVM's pool for memory once a block wait for each other."""
    assert target in PRESETS
    spec = KernelSpec.of("adamw", "4bit", block_size=block_size, amsgrad=True)
    module = compile_spec(spec, get_target(target), [MAIN, SERIAL]).mod
    assert "AllocWorkspace" not in module.inspect_source("asm")
