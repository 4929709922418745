"""MXNet's LAMB and LANS over many tensors, as `tvm_qopt.ops.mxnet` has the rest.

The norms are taken inside, the direction is computed twice and never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_qopt.errors import ShapeMismatch
from tvm_qopt.ops.mxnet import KINDS, MOMENTS, MP_KINDS
from tvm_qopt.ops.mxnet_update import updates
from tvm_qopt.ops.norm import norm
from tvm_qopt.runtime.arrays import copy_from_host, full_like


def multi_lamb_update(
    *arrays: Any,
    learning_rates: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    wds: Sequence[float],
    rescale_grad: float = 1.0,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    clip_gradient: float = -1.0,
    bias_correction: bool = True,
    num_tensors: int | None = None,
    step_count: Sequence[int],
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """LAMB steps of many tensors: both phases, with the norms of weight and g.

    arrays : weight, grad, mean, var of the first tensor, then of the next.
    learning_rates, wds, step_count, out : lists, one entry for each tensor.
    num_tensors : what the number of arrays says, where given.

    The norms are summed as in `global_norm`; a tensor with one that overflows stays as it was.
    No array may be written for one tensor and used for another.

    Returns the list of outputs.
    """
    lists = (learning_rates, wds, step_count)
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "rescale_grad": rescale_grad}
    scalars |= {"lower_bound": lower_bound, "upper_bound": upper_bound}
    scalars |= {"clip_gradient": clip_gradient}
    return _multi(
        "lamb",
        KINDS,
        arrays,
        lists,
        scalars,
        out,
        num_tensors,
        {"bias_correction": bias_correction},
    )


def multi_mp_lamb_update(
    *arrays: Any,
    learning_rates: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    wds: Sequence[float],
    rescale_grad: float = 1.0,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    clip_gradient: float = -1.0,
    bias_correction: bool = True,
    num_tensors: int | None = None,
    step_count: Sequence[int],
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """`multi_lamb_update` of weight, grad, mean, var, weight32; the norm is that of weight32."""
    lists = (learning_rates, wds, step_count)
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "rescale_grad": rescale_grad}
    scalars |= {"lower_bound": lower_bound, "upper_bound": upper_bound}
    scalars |= {"clip_gradient": clip_gradient}
    return _multi(
        "lamb",
        MP_KINDS,
        arrays,
        lists,
        scalars,
        out,
        num_tensors,
        {"bias_correction": bias_correction},
    )


def multi_lans_update(
    *arrays: Any,
    learning_rates: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    wds: Sequence[float],
    rescale_grad: float = 1.0,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    clip_gradient: float = -1.0,
    num_tensors: int | None = None,
    step_count: Sequence[int],
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """LANS steps of many tensors, with arguments as `multi_lamb_update`.

    A gradient of zeros stays one (MXNet divides 0 by 0).  clip_gradient must be negative: MXNet
    clips what it has normalised, and the kernel would clip before.
    """
    lists = (learning_rates, wds, step_count)
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "rescale_grad": rescale_grad}
    scalars |= {"lower_bound": lower_bound, "upper_bound": upper_bound}
    scalars |= {"clip_gradient": clip_gradient}
    return _multi("lans", KINDS, arrays, lists, scalars, out, num_tensors, {})


def multi_mp_lans_update(
    *arrays: Any,
    learning_rates: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    wds: Sequence[float],
    rescale_grad: float = 1.0,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    clip_gradient: float = -1.0,
    num_tensors: int | None = None,
    step_count: Sequence[int],
    out: Sequence[Any] | None = None,
) -> list[Any]:
    """`multi_lans_update` of weight, grad, mean, var, weight32.

    The norm is that of weight32; MXNet takes the rounded weight's, which is within its rounding.
    """
    lists = (learning_rates, wds, step_count)
    scalars = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "rescale_grad": rescale_grad}
    scalars |= {"lower_bound": lower_bound, "upper_bound": upper_bound}
    scalars |= {"clip_gradient": clip_gradient}
    return _multi("lans", MP_KINDS, arrays, lists, scalars, out, num_tensors, {})


def multi_sum_sq(*arrays: Any, num_arrays: int | None = None) -> Any:
    """The sum of squares of each array, a float32 array of the first one's library and device.

    Sums of blocks are float32, their totals float64, the same bits for any number of threads;
    squares beyond float32 count as `global_norm` says.
    """
    if num_arrays not in (None, len(arrays)):
        expected = f"{len(arrays)}, as there are arrays, or None"
        raise ShapeMismatch("num_arrays", expected=expected, got=repr(num_arrays))
    norms = [norm(f"arrays[{i}]", array) for i, array in enumerate(arrays)]
    with np.errstate(over="ignore"):
        sums = np.array([x * x for x in norms], np.float64).astype(np.float32)
    if not arrays:
        return sums
    result = full_like(arrays[0], sums.shape, "float32", 0)
    copy_from_host(result, sums)
    return result


def _multi(
    rule: str,
    kinds: Sequence[str],
    arrays: Sequence[Any],
    lists: Sequence[Any],
    scalars: dict[str, Any],
    out: Any,
    num_tensors: int | None,
    settings: dict[str, Any],
) -> list[Any]:
    ready = updates(
        rule,
        kinds,
        arrays,
        {
            "learning_rates": ("lr", lists[0]),
            "wds": ("wd", lists[1]),
            "step_count": ("t", lists[2]),
        },
        scalars,
        out=out,
        count=("num_tensors", num_tensors),
        **MOMENTS,
        **settings,
    )
    return [each.run() for each in ready]
