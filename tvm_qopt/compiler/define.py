"""KernelSpec -> PrimFunc: the blockwise update on tensor expressions, for any number of blocks."""

from __future__ import annotations

from tvm import te, tirx

from tvm_qopt.compiler.xp_te import TeNamespace, packed_size
from tvm_qopt.spec import CONST, SCALARS, KernelSpec, TensorSpec
from tvm_qopt.update import blockwise, namespace_of, partial_norms
from tvm_qopt.xp import Value

OUT = "_out"
"""Suffix of an output stage, and of the buffer that will alias the input of the same name."""


def define(
    spec: KernelSpec,
    *,
    norms: int | None = None,
    blocks: int | None = None,
    block_size: int | None = None,
    permutes: bool = False,
    pairs: bool = False,
    predicates: bool = False,
) -> tirx.PrimFunc:
    """The unscheduled kernel: inputs in the order of spec.tensors, then outputs `<input>_out`.

    norms: the number of a norm pass in place of the update; its outputs are the partial sums.
    blocks: a fixed number of blocks in place of the symbolic nb (MetaSchedule allocates arguments
    itself).  block_size: spec.block_size, or 0 for a symbolic size (the short last block).
    permutes, pairs: the target has the operations of `compiler.intrinsics`: a look-up among 16
    numbers; two 4-bit codes a byte.  predicates: a condition costs it nothing (GPUs).
    Sizes are int64, and with them every index: a tensor may have more than 2^31 elements.
    (create_prim_func's index_dtype_override would also widen the integer arithmetic of formats.)
    """
    nb = te.var("nb", "int64") if blocks is None else tirx.const(blocks, "int64")
    size = te.var("B", "int64") if block_size == 0 else tirx.const(spec.block_size, "int64")
    xp = TeNamespace(nb, size, permutes=permutes, pairs=pairs, predicates=predicates)
    placeholders = {t.name: _placeholder(t, nb, size) for t in spec.tensors}
    values = {t.name: _value(xp, spec, t, placeholders[t.name]) for t in spec.tensors}
    if norms is None:
        results = blockwise(xp, spec, values)
    else:
        results = partial_norms(xp, spec, values, norms)
    outputs = [xp.compute(results[t.name], t.name + OUT) for t in spec.outputs(norms)]
    outputs.sort(key=lambda tensor: (tensor.name == "param" + OUT, tensor.ndim))
    arguments = [*placeholders.values(), *outputs]
    return te.create_prim_func(arguments)


def _placeholder(t: TensorSpec, nb: tirx.Var, size: tirx.Var) -> te.Tensor:
    symbols = {"nb": nb, "B": size, "B/2": packed_size(size)}
    shape = tuple(symbols[s] if isinstance(s, str) else tirx.const(s, "int64") for s in t.shape)
    return te.placeholder(shape, t.storage, name=t.name)


def _value(xp: TeNamespace, spec: KernelSpec, t: TensorSpec, placeholder: te.Tensor) -> Value:
    if t.name in SCALARS:
        return namespace_of(spec, t, lambda i: xp.scalar(placeholder, i))
    return placeholder if t.role == CONST else xp.read(placeholder)
