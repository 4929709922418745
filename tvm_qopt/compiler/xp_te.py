"""The array namespace on TVM tensor expressions: values are functions of (block, element)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, te, tirx

from tvm_qopt.compiler.intrinsics import byte_of_pair, pack_pair, permute, whole_of_byte
from tvm_qopt.xp import Table, Value

Index = Callable[[Any, Any], Any]


class Expr:
    """A value before it has a place: given a block and an element it is a TVM expression.

    per_block: it does not depend on the element (a scale, a scalar of the step).  packed: what it
    calls an element is a byte of two.
    """

    def __init__(self, at: Index, *, per_block: bool, packed: bool = False) -> None:
        self.at = at
        self.per_block = per_block
        self.packed = packed

    def __add__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x + y, self, other)

    __radd__ = __add__

    def __sub__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x - y, self, other)

    def __rsub__(self, other: Value) -> Expr:
        return _lift(lambda x, y: y - x, self, other)

    def __mul__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x * y, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x / y, self, other)

    def __rtruediv__(self, other: Value) -> Expr:
        return _lift(lambda x, y: y / x, self, other)

    def __neg__(self) -> Expr:
        return _lift(lambda x: -x, self)

    def __and__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x & y, self, other)

    def __or__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x | y, self, other)

    def __xor__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x ^ y, self, other)

    def __lshift__(self, other: int) -> Expr:
        return _lift(lambda x, y: x << y, self, other)

    def __rshift__(self, other: int) -> Expr:
        return _lift(lambda x, y: x >> y, self, other)

    def __lt__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x < y, self, other)

    def __le__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x <= y, self, other)

    def __gt__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x > y, self, other)

    def __ge__(self, other: Value) -> Expr:
        return _lift(lambda x, y: x >= y, self, other)

    def __eq__(self, other: Value) -> Expr:  # type: ignore[override]
        return _lift(lambda x, y: tirx.EQ(x, y), self, other)

    def __ne__(self, other: Value) -> Expr:  # type: ignore[override]
        return _lift(lambda x, y: tirx.NE(x, y), self, other)

    __hash__ = None  # type: ignore[assignment]  # == builds an expression


def _lift(operation: Callable[..., Any], *operands: Value) -> Expr:
    """Apply an operation on TVM expressions; a Python number takes the dtype of its partner."""

    def at(b: Any, i: Any) -> Any:
        values = [x.at(b, i) if isinstance(x, Expr) else x for x in operands]
        dtype = next(str(v.ty) for v in values if isinstance(v, ir.Expr) and str(v.ty) != "bool")
        return operation(*(v if isinstance(v, ir.Expr) else tirx.const(v, dtype) for v in values))

    return Expr(at, per_block=all(x.per_block for x in operands if isinstance(x, Expr)))


def packed_size(block_size: Any) -> Any:
    """Bytes that hold a block's 4-bit codes."""
    return tirx.floordiv(block_size + 1, 2)


class TeNamespace:
    """The array namespace whose stages are te tensors: (nb, B), or (nb,) for per-block values."""

    def __init__(
        self,
        nb: Any,
        block_size: Any,
        *,
        permutes: bool = False,
        pairs: bool = False,
        predicates: bool = False,
    ) -> None:
        self.nb, self.block_size, self.predicates = nb, block_size, predicates
        self.permutes, self.pairs = permutes, pairs
        self.odd = not isinstance(block_size, tirx.IntImm)  # a last block of any size
        self.packed_size = packed_size(block_size)

    def read(self, tensor: te.Tensor) -> Expr:
        """The value of a placeholder or stage: per element, or per block if it has one axis."""
        if tensor.ndim == 2:
            return Expr(lambda b, i: tensor(b, i), per_block=False)
        return Expr(lambda b, i: tensor(b), per_block=True)

    def scalar(self, tensor: te.Tensor, index: int) -> Expr:
        """Element `index` of a tensor that all blocks share."""
        return Expr(lambda b, i: tensor(tirx.const(index, "int64")), per_block=True)

    def compute(self, x: Expr, name: str) -> te.Tensor:
        """The te stage that holds a value."""
        if x.per_block:
            return te.compute((self.nb,), lambda b: x.at(b, None), name=name)
        size = self.packed_size if x.packed else self.block_size
        return te.compute((self.nb, size), x.at, name=name)

    def bind(self, x: Value, name: str) -> Expr:
        return self.read(self.compute(x, name))

    def where(self, condition: Value, x: Value, y: Value) -> Expr:
        if not isinstance(x, Expr) and not isinstance(y, Expr):
            dtype = "float32" if isinstance(x, float) else "int32"
            x = self._lifted_const(x, dtype)
        return _lift(tirx.Select, condition, x, y)

    def sqrt(self, x: Value) -> Expr:
        return _lift(tirx.sqrt, x)

    def abs(self, x: Value) -> Expr:
        return _lift(tirx.abs, x)

    def ceil(self, x: Value) -> Expr:
        return _lift(tirx.ceil, x)

    def minimum(self, x: Value, y: Value) -> Expr:
        return _lift(tirx.min, x, y)

    def maximum(self, x: Value, y: Value) -> Expr:
        return _lift(tirx.max, x, y)

    def all_of(self, *conditions: Value) -> Expr:
        return _lift_conditions(conditions)

    def cast(self, x: Value, dtype: str) -> Expr:
        return _lift(lambda v: tirx.Cast(dtype, v), x)

    def reinterpret(self, x: Value, dtype: str) -> Expr:
        return _lift(lambda v: tirx.reinterpret(dtype, v), x)

    def unpack4(self, packed: Value) -> Expr:
        def at(b: Any, i: Any) -> Any:
            byte = packed.at(b, tirx.floordiv(i, 2))
            byte = tirx.Cast("int32", byte_of_pair(byte) if self.pairs else byte)
            return (byte >> tirx.Cast("int32", (1 - tirx.floormod(i, 2)) * 4)) & 15

        return Expr(at, per_block=False)

    def pack4(self, codes: Value) -> Expr:
        def at(b: Any, j: Any) -> Any:
            if self.pairs and not self.odd:
                return pack_pair(codes.at(b, j * 2))
            odd = codes.at(b, j * 2 + 1)
            if self.odd:
                zero = tirx.const(0, "uint8")
                odd = tirx.if_then_else(j * 2 + 1 < self.block_size, odd, zero)
            return (codes.at(b, j * 2) << 4) | odd

        return Expr(at, per_block=False, packed=True)

    def element_index(self) -> Expr:
        return Expr(lambda b, i: tirx.Cast("int32", i), per_block=False)

    def constant(self, value: int, dtype: str) -> Expr:
        return self._lifted_const(value, dtype)

    def take(self, table: te.Tensor, index: Value) -> Expr:
        if not isinstance(index, Expr):
            return self.scalar(table, index)
        return Expr(
            lambda b, i: table(tirx.Cast("int64", index.at(b, i))), per_block=index.per_block
        )

    def permute(self, table: Table, index: Value) -> Expr:
        alone = self.odd and self.predicates  # threads of a short block leave its loop in turn
        return _lift(lambda i: permute(table.tolist(), i, alone=alone), index)

    def whole(self, code: Value) -> Expr:
        return _lift(whole_of_byte, code)

    def block_max(self, x: Value, name: str) -> Expr:
        return self._reduce(te.max, x, name)

    def block_sum(self, x: Value, name: str) -> Expr:
        return self._reduce(te.sum, x, name)

    def _reduce(self, reduction: Callable[..., Any], x: Expr, name: str) -> Expr:
        k = te.reduce_axis((0, self.block_size), name=f"{name}_k")
        stage = te.compute((self.nb,), lambda b: reduction(x.at(b, k), axis=k), name=name)
        return self.read(stage)

    @staticmethod
    def _lifted_const(value: float, dtype: str) -> Expr:
        return Expr(lambda b, i: tirx.const(value, dtype), per_block=True)


def _lift_conditions(conditions: tuple[Value, ...]) -> Expr:
    def at(b: Any, i: Any) -> Any:
        return tirx.all(*(condition.at(b, i) for condition in conditions))

    return Expr(at, per_block=all(condition.per_block for condition in conditions))
