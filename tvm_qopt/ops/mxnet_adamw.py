"""MXNet's AdamW operators, as `tvm_qopt.ops.mxnet` has the rest.

rescale_grad is the last tensor: one element, read on the host, or a number.  As float32 it
multiplies the gradient; where it is 0, NaN or infinite nothing at all changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_qopt.errors import ShapeMismatch
from tvm_qopt.ops.mxnet import KINDS, MOMENTS, MP_KINDS
from tvm_qopt.ops.mxnet_update import Update, update, updates
from tvm_qopt.runtime.state import read_number


def adamw_update(
    weight: Any,
    grad: Any,
    mean: Any,
    var: Any,
    rescale_grad: Any,
    *,
    lr: float,
    eta: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    wd: float = 0.0,
    clip_gradient: float = -1.0,
    out: Any = None,
) -> Any:
    """weight - eta * (lr * mean / (sqrt(var) + epsilon) + wd * weight), with no bias correction.

    A caller who wants one puts it into eta, which then moves the decay too.
    """
    tensors = {"weight": weight, "grad": grad, "mean": mean, "var": var}
    scalars = {"lr": lr, "eta": eta, "wd": wd, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return _single(tensors, rescale_grad, {**scalars, "clip_gradient": clip_gradient}, out)


def mp_adamw_update(
    weight: Any,
    grad: Any,
    mean: Any,
    var: Any,
    weight32: Any,
    rescale_grad: Any,
    *,
    lr: float,
    eta: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    wd: float = 0.0,
    clip_gradient: float = -1.0,
    out: Any = None,
) -> Any:
    """`adamw_update` of weight32, and `out` its rounding to weight's dtype."""
    tensors = {"weight": weight, "grad": grad, "mean": mean, "var": var, "weight32": weight32}
    scalars = {"lr": lr, "eta": eta, "wd": wd, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return _single(tensors, rescale_grad, {**scalars, "clip_gradient": clip_gradient}, out)


def multi_adamw_update(
    *arrays: Any,
    lrs: Sequence[float],
    wds: Sequence[float],
    etas: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    clip_gradient: float = -1.0,
    num_weights: int | None = None,
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """AdamW steps of many tensors: their weight, grad, mean, var in turn, then one rescale_grad.

    lrs, wds, etas, out : lists, one entry for each tensor.
    num_weights : what the number of arrays says, where given.

    Returns the list of outputs.
    """
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "clip_gradient": clip_gradient}
    return _multi(KINDS, arrays, (lrs, wds, etas), scalars, out, num_weights)


def multi_mp_adamw_update(
    *arrays: Any,
    lrs: Sequence[float],
    wds: Sequence[float],
    etas: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    clip_gradient: float = -1.0,
    num_weights: int | None = None,
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """`multi_adamw_update` of weight, grad, mean, var, weight32."""
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "clip_gradient": clip_gradient}
    return _multi(MP_KINDS, arrays, (lrs, wds, etas), scalars, out, num_weights)


def _single(tensors: dict[str, Any], rescale_grad: Any, scalars: dict[str, Any], out: Any) -> Any:
    scale = _read_scale(rescale_grad)
    scalars |= {"t": 1, "rescale_grad": scale or 1.0}
    return _run([update("adamw_mxnet", tensors, scalars, out=out, **MOMENTS)], scale)[0]


def _multi(
    kinds: Sequence[str],
    arrays: Sequence[Any],
    lists: Sequence[Any],
    scalars: dict[str, Any],
    out: Any,
    num_weights: int | None,
) -> list[Any]:
    if not arrays:
        raise ShapeMismatch("arrays", expected="rescale_grad after the tensors", got="nothing")
    scale = _read_scale(arrays[-1])
    ready = updates(
        "adamw_mxnet",
        kinds,
        arrays[:-1],
        {"lrs": ("lr", lists[0]), "wds": ("wd", lists[1]), "etas": ("eta", lists[2])},
        {**scalars, "t": 1, "rescale_grad": scale or 1.0},
        out=out,
        count=("num_weights", num_weights),
        **MOMENTS,
    )
    return _run(ready, scale)


def _read_scale(rescale_grad: Any) -> float:
    """The factor of the gradient; 0 where no update is to run."""
    with np.errstate(over="ignore"):
        scale = float(np.float32(read_number("rescale_grad", rescale_grad)))
    return scale if math.isfinite(scale) else 0.0


def _run(ready: Sequence[Update], scale: float) -> list[Any]:
    return [each.run() if scale else each.skip() for each in ready]
