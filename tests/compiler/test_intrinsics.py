"""The operations of our own in TVM's IR, at every width a schedule may give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx

from tvm_qopt.compiler.intrinsics import PERMUTES, byte_of_pair, pack_pair, permute
from tvm_qopt.targets import get_target, host_features

N = 64
TABLE = [1.5 * entry - 3 for entry in range(16)]


def compiled(inputs: te.Tensor, dtype: str, size: int, at: Any, lanes: int) -> tuple[Any, str]:
    """A function of one input whose output loop has `lanes` lanes, and its assembly."""
    output = te.compute((size,), at, name="out")
    sch = s_tir.Schedule(te.create_prim_func([inputs, output]))
    if lanes > 1:
        (loop,) = sch.get_loops(sch.get_sblock("out"))
        sch.vectorize(sch.split(loop, [None, lanes])[1])
    module = tvm.compile(sch.mod, target={"kind": "llvm", **get_target("llvm-native").attributes})

    def run(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        result = tvm.runtime.empty((size,), dtype)
        module["main"](tvm.runtime.tensor(x), result)
        return result.numpy()

    return run, module.mod.inspect_source("asm")


@pytest.mark.skipif(PERMUTES not in host_features(), reason=f"this CPU lacks {PERMUTES}")
@pytest.mark.parametrize("lanes", [1, 2, 8, 16, 32, 64])
def test_a_look_up_among_16_is_a_permutation(lanes: int) -> None:
    index = te.placeholder((N,), "int32", name="index")
    run, assembly = compiled(index, "float32", N, lambda i: permute(TABLE, index[i]), lanes)
    x = np.random.default_rng(0).integers(-(2**31), 2**31, N).astype(np.int32)
    np.testing.assert_array_equal(run(x), np.array(TABLE, np.float32)[x & 15])
    assert "vperm" in assembly


@pytest.mark.parametrize("lanes", [1, 2, 8, 16, 32])
def test_two_codes_of_a_byte_are_read_at_once(lanes: int) -> None:
    packed = te.placeholder((N // 2,), "uint8", name="packed")

    def at(i: Any) -> Any:
        byte = tirx.Cast("int32", byte_of_pair(packed[tirx.floordiv(i, 2)]))
        return tirx.Cast("uint8", byte >> tirx.Cast("int32", (1 - i % 2) * 4))

    run, assembly = compiled(packed, "uint8", N, at, lanes)
    x = np.random.default_rng(1).integers(0, 256, N // 2).astype(np.uint8)
    codes = run(x)
    np.testing.assert_array_equal(codes[::2], x >> 4)
    np.testing.assert_array_equal(codes[1::2] & 15, x & 15)
    assert lanes < 8 or "vpinsrb" not in assembly  # not one by one


@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
def test_two_codes_are_packed_at_once(lanes: int) -> None:
    codes = te.placeholder((N,), "uint8", name="codes")
    run, assembly = compiled(codes, "uint8", N // 2, lambda j: pack_pair(codes[j * 2]), lanes)
    x = np.random.default_rng(2).integers(0, 16, N).astype(np.uint8)
    np.testing.assert_array_equal(run(x), (x[::2] << 4) | x[1::2])
    assert lanes < 8 or "vpinsrb" not in assembly
