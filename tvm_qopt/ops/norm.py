"""The Euclidean norm of tensors, for clipping and for LAMB."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tvm_qopt.errors import DtypeMismatch
from tvm_qopt.ops.call import dtype_of, plan_of
from tvm_qopt.runtime.arrays import view_of
from tvm_qopt.spec import KernelSpec


def global_norm(tensors: Iterable[Any]) -> float:
    """The Euclidean norm of all elements of all tensors; 0.0 of none.

    tensors : float32, float16 or bfloat16, of any libraries and devices; read only.

    Sums of blocks are float32, their totals float64, in one order: the same bits for any number of
    threads.  A square that float32 cannot hold counts as infinite (an element beyond 1.8e19) or
    as 0 (below 1e-23).  NaN where an element is NaN, else infinite where one is.  Waits for a GPU.
    """
    if hasattr(tensors, "__dlpack__") or not isinstance(tensors, Iterable):
        got = type(tensors).__name__
        raise DtypeMismatch("tensors", expected="a list of arrays", got=got)
    norms = [norm(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors)]
    return math.sqrt(math.fsum(x * x for x in norms))


def norm(name: str, array: Any) -> float:
    """The norm of one array; `name` is for errors."""
    view = view_of(name, array)
    spec = KernelSpec.of("sum_sq", param=dtype_of(name, view))
    return plan_of(spec, {"param": (name, array)}).norms()["param"]
