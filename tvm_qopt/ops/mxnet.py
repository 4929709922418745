"""MXNet's LAMB, LANS and AdamW operators, by their names and with their arguments and defaults.

Tensors are float32 or float16, all of one dtype; the mp_ forms take float16 or bfloat16 weight and
grad (MXNet: float16) and float32 for the rest.  mean, var and weight32 change in place; the new
weight is written to `out`, weight itself for a step in place, by default a new array.  Everything
is checked, for all tensors of a list, before anything is written.

Different from MXNet's kernels: the arithmetic is float32 also on float16 tensors; 1 - beta is
formed in float64 (theirs in float32, which for 0.999 is 1.3e-5 off); epsilon must be positive and
lr, eta and wd not negative; clip_gradient and the bounds are off only where negative, as in their
code, not their document; grad is never written; an element whose gradient or new state is not
finite becomes NaN in the weight and 0 in mean and var, and no norm counts it; a tensor with a norm
beyond float32 stays as it is; any number of tensors.

Sources: optimizer_op-inl.h, contrib/multi_lamb, contrib/multi_lans, contrib/adamw of Apache MXNet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm_qopt.errors import DtypeMismatch, HyperOutOfRange, ShapeMismatch
from tvm_qopt.ops.call import dtype_of, new_like, plan_of
from tvm_qopt.ops.mxnet_update import MIXED, PLAIN, bind, checked, like, update
from tvm_qopt.rules import LR
from tvm_qopt.rules.lamb import LOWER_BOUND, UPPER_BOUND, bounded, trust_ratio
from tvm_qopt.runtime.arrays import view_of
from tvm_qopt.runtime.state import read_number
from tvm_qopt.spec import KernelSpec

KINDS = ("weight", "grad", "mean", "var")
MP_KINDS = (*KINDS, "weight32")

MOMENTS: dict[str, Any] = {"clip_gradient": True, "zero_rule": False}
"""The settings of kernels with moments."""


def lamb_update_phase1(
    weight: Any,
    grad: Any,
    mean: Any,
    var: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    t: int,
    bias_correction: bool = True,
    wd: float,
    rescale_grad: float = 1.0,
    clip_gradient: float = -1.0,
    out: Any = None,
) -> Any:
    """LAMB's direction g, wd * weight included; mean and var change.  t is 1 at the first update.

    Examples
    --------
    >>> import numpy as np
    >>> from tvm_qopt import ops
    >>> w, grad = np.ones(4, np.float32), np.full(4, 0.5, np.float32)
    >>> mean, var = np.zeros_like(w), np.zeros_like(w)
    >>> g = ops.lamb_update_phase1(w, grad, mean, var, t=1, wd=0.01)
    >>> r1, r2 = (np.array([ops.global_norm([x])], np.float32) for x in (w, g))
    >>> w = ops.lamb_update_phase2(w, g, r1, r2, lr=0.1, out=w)
    """
    tensors = {"weight": weight, "grad": grad, "mean": mean, "var": var}
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "t": t, "wd": wd}
    scalars |= {"rescale_grad": rescale_grad, "clip_gradient": clip_gradient}
    return _phase1(tensors, scalars, bias_correction, out)


def lamb_update_phase2(
    weight: Any,
    g: Any,
    r1: Any,
    r2: Any,
    *,
    lr: float,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    out: Any = None,
) -> Any:
    """weight - lr * n / r2 * g, n the norm r1 of weight within its bounds, r2 the norm of g.

    r1, r2 : one number each, shape (1,), of weight's dtype or float32; where n or r2 is 0 the
        factor is lr.  The upper bound is a minimum (MXNet's document says maximum, its code not);
        with lower_bound > upper_bound the upper one holds.
    """
    tensors = {"weight": weight, "g": g}
    return _phase2(tensors, r1, r2, lr, lower_bound, upper_bound, out)


def mp_lamb_update_phase1(
    weight: Any,
    grad: Any,
    mean: Any,
    var: Any,
    weight32: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    t: int,
    bias_correction: bool = True,
    wd: float,
    rescale_grad: float = 1.0,
    clip_gradient: float = -1.0,
    out: Any = None,
) -> Any:
    """`lamb_update_phase1` with a float32 g; the decay is of weight32, and weight is not read."""
    tensors = {"weight": weight, "grad": grad, "mean": mean, "var": var, "weight32": weight32}
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "t": t, "wd": wd}
    scalars |= {"rescale_grad": rescale_grad, "clip_gradient": clip_gradient}
    return _phase1(tensors, scalars, bias_correction, out)


def mp_lamb_update_phase2(
    weight: Any,
    g: Any,
    r1: Any,
    r2: Any,
    weight32: Any,
    *,
    lr: float,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    out: Any = None,
) -> Any:
    """`lamb_update_phase2` of weight32, and `out` its rounding to weight's dtype.

    weight32 is written, as MXNet's document has it; their kernel never stores it, so that each of
    its steps starts from the first weights.  g, r1 and r2 are float32.
    """
    tensors = {"weight": weight, "g": g, "weight32": weight32}
    return _phase2(tensors, r1, r2, lr, lower_bound, upper_bound, out)


def _phase1(
    tensors: dict[str, Any], scalars: dict[str, Any], bias_correction: bool, out: Any
) -> Any:
    weight, mixed = tensors["weight"], "weight32" in tensors
    view = view_of("weight", weight)
    dtype = dtype_of("weight", view, MIXED if mixed else PLAIN)
    held = "float32" if mixed else dtype
    result = new_like(weight, held) if out is None else out
    like("out", result, view, held)
    bound = {"direction": ("out", result), "param": ("weight", weight), **bind(tensors)}
    if mixed:
        like("weight32", tensors["weight32"], view, held)
        bound["param"] = bound.pop("param_master")
    spec = KernelSpec.of(
        "lamb_phase1",
        held,
        param=held,
        grad=dtype,
        nonfinite="propagate",
        bias_correction=bias_correction,
        **MOMENTS,
    )
    plan = plan_of(spec, bound)
    plan.step(**checked(plan, scalars))
    return result


def _phase2(
    tensors: dict[str, Any], r1: Any, r2: Any, lr: float, lower: float, upper: float, out: Any
) -> Any:
    view = view_of("weight", tensors["weight"])
    kept = ("float32",) if "weight32" in tensors else (view.dtype, "float32")
    weight_norm, direction_norm = (_norm(n, r, kept) for n, r in (("r1", r1), ("r2", r2)))
    bounds = {"lower_bound": LOWER_BOUND.check(lower), "upper_bound": UPPER_BOUND.check(upper)}
    ratio = trust_ratio(bounded(weight_norm, bounds), direction_norm)
    scalars = {"t": 1, "lr": LR.check(lr) * ratio, "wd": 0.0}
    return update("sgd", tensors, scalars, out=out, momentum="off").run()


def _norm(name: str, array: Any, dtypes: Sequence[str]) -> float:
    """A norm that the caller gives, read on the host."""
    view = view_of(name, array)
    if view.dtype not in dtypes:
        raise DtypeMismatch(name, expected=f"one of {', '.join(dtypes)}", got=view.dtype)
    if view.shape[:1] != (1,) or view.size != 1:
        raise ShapeMismatch(name, expected="shape (1,)", got=f"{view.shape}")
    value = read_number(name, array)
    if not 0 <= value < math.inf:
        raise HyperOutOfRange(name, expected="a norm, finite and not negative", got=repr(value))
    return value
