"""An update under MXNet's conventions: its names, an `out`, lists of tensors; checked, then run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_qopt.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch
from tvm_qopt.ops.call import dtype_of, new_like, plan_of, renamed
from tvm_qopt.rules import Hyper
from tvm_qopt.runtime.arguments import check_overlap
from tvm_qopt.runtime.arrays import ArrayView, view_of
from tvm_qopt.runtime.plan import Plan
from tvm_qopt.spec import KernelSpec

PLAIN = ("float32", "float16")
MIXED = ("float16", "bfloat16")
"""Dtypes of weight; mixed: beside a float32 weight32, with float32 mean and var."""

TENSORS = {  # MXNet's tensor -> argument of the kernel
    "grad": "grad",
    "g": "grad",
    "mean": "exp_avg",
    "var": "exp_avg_sq",
    "weight32": "param_master",
}
SCALARS = {"t": "step", "epsilon": "eps", "wd": "weight_decay", "rescale_grad": "gnorm_scale"}
RESCALE_GRAD = Hyper("rescale_grad", low=-math.inf)


@dataclass(frozen=True)
class Names:
    """How errors call the arguments: of a single operator, or of tensor `index` of a list.

    lists: a scalar -> the list that holds it ("lr" -> "learning_rates").
    """

    index: int | None = None
    lists: Mapping[str, str] | None = None

    def tensor(self, name: str) -> str:
        return name if self.index is None else f"{name}[{self.index}]"

    def scalar(self, name: str) -> str:
        in_list = (self.lists or {}).get(name)
        return name if in_list is None else f"{in_list}[{self.index}]"


SINGLE = Names()


@dataclass(frozen=True)
class Update:
    """The checked update of one tensor; until `run` nothing is written.

    copy: of the weight into `out`, where that is another array.  given: `out` is the caller's.
    """

    plan: Plan
    scalars: Mapping[str, Any]
    out: Any
    copy: Plan | None
    given: bool

    def run(self) -> Any:
        if self.copy is not None:
            self.copy.step(step=1)
        self.plan.step(**self.scalars)
        return self.out

    def skip(self) -> Any:
        """Change nothing; a new `out` is the weight's copy."""
        if self.copy is not None and not self.given:
            self.copy.step(step=1)
        return self.out


def update(
    rule: str,
    tensors: Mapping[str, Any],
    scalars: Mapping[str, Any],
    *,
    out: Any,
    names: Names = SINGLE,
    **settings: Any,
) -> Update:
    """Check an update of `weight` into `out` (None: a new array), with all under MXNet's names.

    With a weight32 the low-precision weight is only ever written.
    """
    shown, weight = names.tensor("weight"), tensors["weight"]
    view, mixed = view_of(shown, weight), "weight32" in tensors
    dtype = dtype_of(shown, view, MIXED if mixed else PLAIN)
    written = new_like(weight) if out is None else out
    out_view = like(names.tensor("out"), written, view, dtype)
    in_place = out_view.address == view.address
    spec = KernelSpec.of(
        rule,
        "float32" if mixed else dtype,
        param=dtype,
        grad="float32" if mixed and "g" in tensors else dtype,
        param_format="master" if mixed else "plain",
        nonfinite="propagate",
        **settings,
    )
    bound = {"param": (names.tensor("weight" if in_place else "out"), written)}
    plan = plan_of(spec, bound | bind(tensors, names))
    ready = checked(plan, scalars, names)
    copy = None if in_place else _copy(dtype, shown, weight, names.tensor("out"), written)
    return Update(plan, ready, written, copy, out is not None)


def bind(tensors: Mapping[str, Any], names: Names = SINGLE) -> dict[str, tuple[str, Any]]:
    """The tensors beside weight, by the kernel's names."""
    return {
        TENSORS[name]: (names.tensor(name), array)
        for name, array in tensors.items()
        if name != "weight"
    }


def checked(plan: Plan, scalars: Mapping[str, Any], names: Names = SINGLE) -> dict[str, Any]:
    """The scalars as `Plan.step` takes them; raises what it would, under MXNet's names."""
    ready = {SCALARS.get(name, name): value for name, value in scalars.items()}
    back = {SCALARS.get(name, name): names.scalar(name) for name in scalars}
    rescale = RESCALE_GRAD.check(ready.pop("gnorm_scale", 1.0))
    with renamed({"grad_factor": "rescale_grad", "step_size": names.scalar("lr")} | back):
        plan.check(gnorm_scale=abs(rescale), **ready)
    return {**ready, "gnorm_scale": abs(rescale), "maximize": rescale < 0}


def like(name: str, array: Any, weight: ArrayView, dtype: str) -> ArrayView:
    """The view of an array that must have the weight's shape and device, and a dtype."""
    view = view_of(name, array)
    if view.dtype not in (dtype, "uint16" if dtype == "bfloat16" else dtype):
        raise DtypeMismatch(name, expected=dtype, got=view.dtype)
    if view.shape != weight.shape:
        raise ShapeMismatch(name, expected=f"shape {weight.shape}, as weight", got=f"{view.shape}")
    if view.device != weight.device:
        expected = f"{weight.device_name}, as weight"
        raise DeviceMismatch(name, expected=expected, got=view.device_name)
    return view


def updates(
    rule: str,
    kinds: Sequence[str],
    arrays: Sequence[Any],
    lists: Mapping[str, tuple[str, Any]],
    scalars: Mapping[str, Any],
    *,
    out: Any,
    count: tuple[str, int | None],
    **settings: Any,
) -> list[Update]:
    """Check the updates of many tensors, none of which may write what another one uses.

    arrays: for each tensor one of each kind, in turn.  lists: a list's name -> the scalar that it
    holds for each tensor, and its values.  out: None, or an array for each.  count: the number of
    tensors as the caller has it, with its name.
    """
    if len(arrays) % len(kinds):
        expected = f"{', '.join(kinds)} for each tensor, a multiple of {len(kinds)}"
        raise ShapeMismatch("arrays", expected=expected, got=f"{len(arrays)} arrays")
    tensors = len(arrays) // len(kinds)
    if count[1] not in (None, tensors):
        expected = f"{tensors} for {len(arrays)} arrays, or None"
        raise ShapeMismatch(count[0], expected=expected, got=repr(count[1]))
    columns = {scalar: _each(name, values, tensors) for name, (scalar, values) in lists.items()}
    outs = [None] * tensors if out is None else _each("out", out, tensors)
    holders = {scalar: name for name, (scalar, _) in lists.items()}
    named = [Names(i, holders) for i in range(tensors)]
    given = [dict(zip(kinds, arrays[i * len(kinds) :], strict=False)) for i in range(tensors)]
    ready = [
        update(
            rule,
            given[i],
            {**scalars, **{scalar: values[i] for scalar, values in columns.items()}},
            out=outs[i],
            names=named[i],
            **settings,
        )
        for i in range(tensors)
    ]
    check_overlap(used for i in range(tensors) for used in _used(given[i], ready[i].out, named[i]))
    return ready


def _used(
    tensors: Mapping[str, Any], out: Any, names: Names
) -> Iterator[tuple[ArrayView, str, bool]]:
    """The view of each array of an update, its name, and whether the update writes it."""
    views = {names.tensor(name): view_of(name, array) for name, array in tensors.items()}
    written = view_of("out", out)
    if written.address != views[names.tensor("weight")].address:
        yield written, names.tensor("out"), True
        yield views.pop(names.tensor("weight")), names.tensor("weight"), False
    for name, view in views.items():
        yield view, name, name != names.tensor("grad")


def _each(name: str, values: Any, count: int) -> list[Any]:
    """A list that must have one entry for each tensor."""
    if not isinstance(values, (list, tuple)):
        got = type(values).__name__
        raise ShapeMismatch(name, expected=f"a list of {count}, one for each tensor", got=got)
    if len(values) != count:
        raise ShapeMismatch(name, expected=f"{count}, one for each tensor", got=f"{len(values)}")
    return list(values)


def _copy(dtype: str, shown: str, weight: Any, out_shown: str, out: Any) -> Plan:
    """The copy of weight into out, for arrays of any library and device."""
    bound = {"param": (out_shown, out), "value": (shown, weight)}
    return plan_of(KernelSpec.of("dequantize", dtype, param=dtype), bound)
