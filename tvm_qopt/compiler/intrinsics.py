"""Operations that TVM lacks: a look-up among 16 numbers, two 4-bit codes a byte, a byte as a float.

On CPUs TVM emits a load with a computed index lane by lane; in CUDA it knows no table that lies in
the lanes of a warp, and takes a byte from a word by two instructions.  So each of these is an
operation of its own in TVM's IR, which vectorises like any other and is lowered once it has its
lanes.  What CUDA calls here, `compiler.cuda_text` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import ir, tirx
from tvm.ir import register_op_attr
from tvm.tirx.op import register_intrin_lowering

from tvm_qopt.xp import WHOLE_BITS

PERMUTES = "avx512f"
"""The CPU feature without which `permute` has no lowering there."""
PERMUTING = ("cuda",)
"""Kinds whose every target has a lowering of it."""

ENTRIES = 16
WORD = 4  # bytes
PURE = 1  # CallEffectKind
PERMUTE, ENTRY, WHOLE_OF_BYTE = "permute16", "entry16", "whole_of_byte"
BYTES_OF_PAIRS, PACK_PAIRS = "bytes_of_pairs", "pack_pairs"


def permute(table: Sequence[float], index: Any, *, alone: bool = False) -> Any:
    """The float32 entry of a table of 16 that the low 4 bits of an int32 index name.

    alone: the other threads of a warp may not be here.
    """
    entries = [tirx.const(float(entry), "float32") for entry in table]
    return _call("float32", ENTRY if alone else PERMUTE, index, *entries)


def whole_of_byte(code: Any) -> Any:
    """2^23 plus an int32 code below 256, as a float32."""
    return _call("float32", WHOLE_OF_BYTE, code)


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


def _look_up_on_cuda(name: str) -> Callable[[Any], Any]:
    def lower(call: Any) -> Any:
        index, *entries = call.args  # the table first: its text ends before the index begins
        return tirx.call_pure_extern("float32", f"qopt_{name}", *entries, _without_mask(index))

    return lower


def _without_mask(index: Any) -> Any:
    """x of x & 15, which shuffles and tables need not be told."""
    if isinstance(index, tirx.BitwiseAnd) and isinstance(index.b, tirx.IntImm):
        return index.a if int(index.b) == ENTRIES - 1 else index
    return index


def _lower_whole_of_byte(call: Any) -> Any:
    (code,) = call.args
    return tirx.reinterpret("float32", code | tirx.const(WHOLE_BITS, "int32"))


def _whole_of_byte_on_cuda(call: Any) -> Any:
    """By one instruction where the code lies in a word of a thread's own: PRMT moves any bytes."""
    byte = call.args[0].value if isinstance(call.args[0], tirx.Cast) else None
    if not isinstance(byte, ir.TensorLoad) or byte.source.scope() != "local":
        return _lower_whole_of_byte(call)
    (index,) = byte.indices
    if not isinstance(index, tirx.IntImm) or int(byte.source.shape[0]) % WORD:
        return _lower_whole_of_byte(call)
    first = int(index) // WORD * WORD
    run = tirx.BufferLoad(byte.source, [tirx.Ramp(tirx.const(first, "int64"), 1, WORD)])
    word, number = tirx.reinterpret("uint32", run), tirx.const(int(index) % WORD, "int32")
    return tirx.call_pure_extern("float32", f"qopt_{WHOLE_OF_BYTE}", word, number)


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


def _register(name: str, **lower: Callable[[Any], Any]) -> None:
    """lower: by the kind of target, or "default"."""
    operation = f"tirx.qopt_{name}"
    register_op_attr(operation, "TCallEffectKind", PURE)
    register_op_attr(operation, "TVectorizable", True)
    register_op_attr(operation, "TScriptPrinterName", f"qopt_{name}")
    for kind, function in lower.items():
        register_intrin_lowering(operation, target=kind, f=function)


_register(PERMUTE, llvm=_lower_permute, cuda=_look_up_on_cuda(PERMUTE))
_register(ENTRY, cuda=_look_up_on_cuda(ENTRY))
_register(WHOLE_OF_BYTE, default=_lower_whole_of_byte, cuda=_whole_of_byte_on_cuda)
_register(BYTES_OF_PAIRS, llvm=_lower_bytes_of_pairs)
_register(PACK_PAIRS, llvm=_lower_pack_pairs)
