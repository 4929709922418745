"""Operations that TVM lacks: a look-up among 16 numbers, and two 4-bit codes a byte.

TVM emits a load with a computed index lane by lane.  So each of these is an operation of its own in
TVM's IR, which vectorises like any other and is lowered once it has its lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import register_op_attr
from tvm.tirx.op import register_intrin_lowering

PERMUTES = "avx512f"
"""The CPU feature without which `permute` has no lowering."""

ENTRIES = 16
PURE = 1  # CallEffectKind
PERMUTE, BYTES_OF_PAIRS, PACK_PAIRS = "permute16", "bytes_of_pairs", "pack_pairs"


def permute(table: Sequence[float], index: Any) -> Any:
    """The float32 entry of a table of 16 that the low 4 bits of an int32 index name."""
    entries = [tirx.const(float(entry), "float32") for entry in table]
    return _call("float32", PERMUTE, index, *entries)


def byte_of_pair(byte: Any) -> Any:
    """Its argument, a load of byte i // 2 where i is an element: one load for all lanes."""
    return _call("uint8", BYTES_OF_PAIRS, byte)


def pack_pair(even: Any) -> Any:
    """Codes 2 j and 2 j + 1 in one byte, the even one high, from a load of code 2 j (uint8).

    The odd code must stand in the same buffer.
    """
    return _call("uint8", PACK_PAIRS, even)


def _call(dtype: str, name: str, *arguments: Any) -> Any:
    return tirx.call_intrin(dtype, f"tirx.qopt_{name}", *arguments)


def _lower_permute(call: Any) -> Any:
    index, *entries = call.args
    scalars = [e.value if isinstance(e, tirx.Broadcast) else e for e in entries]
    table, lanes = tirx.Shuffle(scalars, list(range(ENTRIES))), _lanes(index)

    def permuted(of: Any) -> Any:
        intrinsic = "llvm.x86.avx512.permvar.sf.512"
        return tirx.call_llvm_pure_intrin("float32x16", intrinsic, table, of)

    if lanes == 1:  # the short last block
        return _lane(permuted(tirx.Broadcast(index, ENTRIES)), 0)
    if lanes < ENTRIES:
        wide = permuted(tirx.Shuffle([index] * (ENTRIES // lanes), list(range(ENTRIES))))
        return tirx.Shuffle([wide], list(range(lanes)))
    firsts = range(0, lanes, ENTRIES)
    parts = [permuted(tirx.Shuffle([index], list(range(i, i + ENTRIES)))) for i in firsts]
    return tirx.Shuffle(parts, list(range(lanes)))


def _lower_bytes_of_pairs(call: Any) -> Any:
    (byte,) = call.args
    lanes = _lanes(byte)
    if lanes == 1:
        return byte
    run = _run(byte, lanes // 2)
    return tirx.Shuffle([run, run], [lane // 2 for lane in range(lanes)])


def _lower_pack_pairs(call: Any) -> Any:
    (even,) = call.args
    lanes = _lanes(even)
    pairs = tirx.reinterpret(_vector("uint16", lanes), _run(even, 2 * lanes))
    return tirx.Cast(_vector("uint8", lanes), (pairs << 4) | (pairs >> 8))


def _run(load: Any, length: int) -> Any:
    """The elements that follow the one which the first lane of a load reads, in one load."""
    (indices,) = load.indices
    first = _lane(indices, 0) if _lanes(load) > 1 else indices
    return tirx.BufferLoad(load.source, [tirx.Ramp(first, 1, length)])


def _lane(vector: Any, lane: int) -> Any:
    return tirx.Shuffle([vector], [lane])


def _lanes(x: Any) -> int:
    return int(x.ty.dtype.lanes)


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _register(name: str, lower: Callable[[Any], Any]) -> None:
    operation = f"tirx.qopt_{name}"
    register_op_attr(operation, "TCallEffectKind", PURE)
    register_op_attr(operation, "TVectorizable", True)
    register_op_attr(operation, "TScriptPrinterName", f"qopt_{name}")
    register_intrin_lowering(operation, target="llvm", f=lower)


_register(PERMUTE, _lower_permute)
_register(BYTES_OF_PAIRS, _lower_bytes_of_pairs)
_register(PACK_PAIRS, _lower_pack_pairs)
