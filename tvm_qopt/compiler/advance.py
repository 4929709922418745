"""The kernels of one thread that let a step be replayed on a GPU with no work of the host.

`advance` is a rule's `derive` run on expressions (`compiler.tracing`), so no rule is written twice,
and where the host would refuse the scalars of a step the device updates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from tvm import tirx

from tvm_qopt.compiler.launch import gpu_function, thread_loop
from tvm_qopt.compiler.tracing import Path, expression, paths
from tvm_qopt.rules import CLIP_SCALAR
from tvm_qopt.spec import (
    ADVANCE,
    CLIP_GRADIENT,
    GATE,
    GNORM_SCALE,
    GRAD_SCALE,
    RNG_SCALARS,
    KernelSpec,
)

FLOAT32_MAX = float.fromhex("0x1.fffffep127")


def step_functions(spec: KernelSpec) -> dict[str, tirx.PrimFunc]:
    """`gate`, and `advance` where the scalars of a rule can be formed on the device.

    They cannot where norms have to be finished on the host, nor where `derive` converts to another
    type or calls functions that are not those of `rules.arithmetic`.
    """
    hyper, found_inf = _buffer("hyper", len(spec.scalars)), _buffer("found_inf", 1)
    skip = tirx.BufferStore(hyper, tirx.const(float("nan"), "float32"), [_index(0)])
    go = tirx.EQ(found_inf[0], tirx.const(0.0, "float32"))
    functions = {
        GATE: _function(GATE, [hyper, found_inf], tirx.IfThenElse(tirx.Not(go), skip, None))
    }
    clock = _buffer("clock", len(spec.clock), "float64")
    try:
        ways = [] if spec.rule_.norms else list(paths(lambda path: _scalars(spec, clock, path)))
    except TypeError:
        ways = []
    if ways:
        scalars = _select(ways)
        held = [tirx.abs(each) <= FLOAT32_MAX for each in scalars]
        if CLIP_SCALAR in spec.scalars:
            del held[spec.scalars.index(CLIP_SCALAR)]  # infinite where there is no clip
        valid = reduce(tirx.And, held, reduce(tirx.Or, [taken for taken, _ in ways]))
        stores = [
            tirx.BufferStore(hyper, tirx.Cast("float32", each), [_index(i)])
            for i, each in enumerate(scalars)
        ]
        buffers, step = [clock, found_inf, hyper], clock[0] + 1.0
        if "rng" in spec.step_arguments(ADVANCE):
            buffers.append(_buffer("rng", len(RNG_SCALARS), "int32"))
            low = tirx.Cast("int32", tirx.Cast("int64", step))
            stores.append(tirx.BufferStore(buffers[-1], low, [_index(RNG_SCALARS.index("step"))]))
        stores.append(tirx.BufferStore(clock, step, [_index(0)]))  # last: the others read it
        body = tirx.IfThenElse(tirx.And(go, valid), tirx.SeqStmt(stores), skip)
        functions[ADVANCE] = _function(ADVANCE, buffers, body)
    return functions


def _scalars(spec: KernelSpec, clock: Any, path: Path) -> list[Any]:
    """`hyper` in float64, for the step after the one that `clock` holds: what Scalars.of forms."""
    h = {name: path.number(clock[i]) for i, name in enumerate(spec.clock)}
    step = h["step"] + 1.0
    derived = spec.rule_.derive(h, step, spec.all_settings)  # type: ignore[arg-type]
    factor = h[GNORM_SCALE.name] / h[GRAD_SCALE.name]
    scalars: list[Any] = [factor, *(derived.get(name, 0.0) for name in spec.rule_.scalars)]
    if CLIP_SCALAR in spec.scalars:
        clip = h[CLIP_GRADIENT.name]
        scalars.insert(1, clip if clip >= 0 else float("inf"))
    return [expression(each) for each in scalars]


def _select(ways: Sequence[tuple[Any, list[Any]]]) -> list[Any]:
    """The scalars of the path that is taken."""
    scalars: list[Any]
    (_, scalars), *others = reversed(ways)
    for taken, values in others:
        scalars = [tirx.Select(taken, *pair) for pair in zip(values, scalars, strict=True)]
    return scalars


def _buffer(name: str, size: int, dtype: str = "float32") -> Any:
    return tirx.decl_buffer((_index(size),), dtype, name=name, data_alignment=4)


def _index(i: int) -> Any:
    return tirx.const(i, "int64")


def _function(name: str, buffers: list[Any], body: Any) -> tirx.PrimFunc:
    """A function of one thread."""
    for axis in ("threadIdx.x", "blockIdx.x"):
        number = tirx.Var(axis.removesuffix(".x"), "int32")
        body = thread_loop(axis, number, tirx.const(1, "int32"), body)
    return gpu_function(name, buffers, body)
