"""What the operators share: a kernel called under an operator's own argument names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tvm_qopt.errors import ArgumentMismatch, DtypeMismatch
from tvm_qopt.params import STORAGE
from tvm_qopt.runtime.arrays import ArrayView, full_like, target_of, view_of
from tvm_qopt.runtime.plan import Plan
from tvm_qopt.runtime.store import load
from tvm_qopt.spec import KernelSpec

Bound = Mapping[str, tuple[str, Any]]
"""The kernel's argument -> the operator's name of it, and the array."""


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raise what is raised inside under the operator's names of the kernel's arguments."""

    def rename(text: str) -> str:
        return " ".join(names.get(word, word) for word in text.split(" "))

    try:
        yield
    except ArgumentMismatch as error:
        name = names.get(error.name, error.name)
        expected, got = rename(error.expected), rename(error.got)
        raise type(error)(name, expected=expected, got=got) from error


def dtype_of(name: str, view: ArrayView, choices: Sequence[str] = tuple(STORAGE)) -> str:
    """The dtype of weights or gradients (NumPy's uint16 holds bfloat16), if it is among those."""
    dtype = "bfloat16" if view.dtype == "uint16" else view.dtype
    if dtype not in choices:
        raise DtypeMismatch(name, expected=f"one of {', '.join(choices)}", got=view.dtype)
    return dtype


def new_like(array: Any, dtype: str | None = None) -> Any:
    """A new array of the shape, library and device of another, and of its dtype or a given one."""
    if dtype is None and isinstance(array, np.ndarray):
        return np.zeros(array.shape, array.dtype)
    view = view_of("array", array)
    return full_like(array, view.shape, dtype or view.dtype, 0)


def plan_of(spec: KernelSpec, bound: Bound) -> Plan:
    """A checked call of the spec's kernel for the device of `param`; nothing has run."""
    name, param = bound["param"]
    view = view_of(name, param)
    given = {kernel_name: array for kernel_name, (_, array) in bound.items()}
    blocks = -(-view.size // spec.block_size)
    with renamed({"nonfinite_count": name} | {k: shown for k, (shown, _) in bound.items()}):
        kernel = load(spec, target=target_of(view))
        return Plan(kernel, {**given, "nonfinite_count": full_like(param, (blocks,), "int32", 0)})
