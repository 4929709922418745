"""Kernels that are no updates: a value into a state format and back, and a sum of squares."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from tvm_qopt.rules import Norms, Settings, rule
from tvm_qopt.xp import ArrayNamespace, Value


def no_scalars(h: Mapping[str, float], step: int, settings: Settings) -> Mapping[str, float]:
    return {}


def no_finish(
    norms: Mapping[str, float], h: Mapping[str, float], settings: Settings
) -> Mapping[str, float]:
    return {}


def square_terms(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[dict[str, Value], dict[str, Value]]:
    return {"param": p}, {}


@rule(
    slots=("+value",),
    hyper=(),
    scalars=(),
    derive=no_scalars,
    settings={"nonfinite": ("propagate",)},
    result=None,
    reads_grad=False,
)
def quantize(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """`param` into the state `value`; what is not finite becomes 0 and is counted."""
    return None, {"value": p}


@rule(
    slots=("+value",),
    hyper=(),
    scalars=(),
    derive=no_scalars,
    reads_grad=False,
    writes_state=False,
)
def dequantize(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """The state `value` into `param`, rounded to its dtype."""
    return s["value"], {}


@rule(
    slots=(),
    hyper=(),
    scalars=(),
    derive=no_scalars,
    result=None,
    reads_grad=False,
    norms=(Norms(("param",), square_terms, (), no_finish, masked=False),),
)
def sum_sq(
    xp: ArrayNamespace,
    h: SimpleNamespace,
    p: Value,
    g: Value,
    s: dict[str, Value],
    settings: Settings,
) -> tuple[Value, dict[str, Value]]:
    """The Euclidean norm of `param` (norm pass 0); there is nothing to update."""
    return None, {}
