"""The state of a parameter: what it consists of, its beginning, and what of a saved one fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch
from tvm_qopt.optim.layout import Layout
from tvm_qopt.params import get_param_format
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.spec import BESIDE, COUNTER, STATE, KernelSpec, TensorSpec

STEP, FORMAT, COUNT = "step", "format", "nonfinite_count"
"""Entries: the number of updates; in a saved state, how it is stored; the kernel's counter."""

MASTER = "param_master"

State = dict[str, Any]


def tensors_of(spec: KernelSpec) -> list[TensorSpec]:
    """The kernel's arguments that make up the state."""
    return [t for t in spec.tensors if t.role in (STATE, BESIDE, COUNTER)]


def shape_of(t: TensorSpec, layout: Layout, spec: KernelSpec) -> tuple[int, ...]:
    held = t.held(math.prod(layout.shape), spec.block_size)
    return layout.shape if held is None else held


def bytes_of(spec: KernelSpec, size: int) -> int:
    """Bytes of the state of a parameter of `size` elements."""
    total = 0
    for t in tensors_of(spec):
        held = t.held(size, spec.block_size)
        elements = size if held is None else math.prod(held)
        total += elements * getattr(torch, t.dtype).itemsize
    return total


def fill(
    state: State,
    kernel: Kernel,
    layout: Layout,
    param: torch.Tensor,
    initial: Mapping[str, float],
) -> None:
    """Add to a state what the kernel needs and it lacks; param: the weights, contiguous."""
    state.setdefault(STEP, 0)
    text = format_text(kernel.spec, layout)
    if FORMAT in state:  # ZeroRedundancyOptimizer puts what it read in the place of the state
        check_format("state", state, text)
    state[FORMAT] = format_tensor(text).to(param.device)  # torch saves the entries that are here
    missing = [t for t in tensors_of(kernel.spec) if t.name not in state]
    if not missing:
        return
    _check_slots(kernel.spec, state)
    slots = {slot.name for slot, _ in kernel.spec.slots}
    start = {slot: value for slot, value in initial.items() if slot in slots}
    made = kernel.init_state(param, start)
    for t in missing:
        state[t.name] = layout.shaped(made[t.name]) if t.per_element else made[t.name]


def _check_slots(spec: KernelSpec, state: State) -> None:
    """Raise where a slot is there in another storage: it would start anew, and silently."""
    for slot, format_ in spec.slots:
        other = slot.name if format_.scaled else f"{slot.name}_codes"
        if other in state:
            wanted = f"{slot.name} in {format_.name}"
            raise StateMismatch("state", expected=wanted, got=f"the entry {other}")


def check_same_storage(label: str, before: KernelSpec, after: KernelSpec) -> None:
    """Raise where options that were changed after a step would read a state as what it is not."""
    formats = {slot.name: format_ for slot, format_ in before.slots}
    for slot, format_ in after.slots:
        old = formats.get(slot.name, format_)
        other_blocks = format_.scaled and before.block_size != after.block_size
        if old != format_ or (slot.name in formats and other_blocks):
            wanted = f"{slot.name} in {old.name}, blocks of {before.block_size}, as it is"
            got = f"options for {format_.name}, blocks of {after.block_size}"
            raise StateMismatch(label, expected=wanted, got=got)
    beside = get_param_format(before.param_format).beside
    if beside and before.param_format != after.param_format:
        wanted = f"{before.param_format} weights, as they are"
        raise StateMismatch(label, expected=wanted, got=f"options for {after.param_format} ones")


def adopt(param: torch.Tensor, master: torch.Tensor) -> None:
    """Take weights that were written outside into the master where it does not round to them."""
    changed = master.to(param.dtype) != param
    if changed.any():
        master.copy_(torch.where(changed, param.float(), master))


def format_text(spec: KernelSpec, layout: Layout) -> str:
    """How a state is stored, as a sentence that is compared when one is loaded."""
    slots = [f"{slot.name} in {format_.name}" for slot, format_ in spec.slots]
    if any(format_.scaled for _, format_ in spec.slots):
        slots.append(f"blocks of {spec.block_size}")
    if get_param_format(spec.param_format).beside:
        slots.append(f"{spec.param_format} weights of {spec.param}")
    if layout.order:
        slots.append(f"memory order {layout.order}")
    return ", ".join(slots) or "nothing"


def format_tensor(text: str) -> torch.Tensor:
    """The sentence as a tensor: every way of saving an optimizer takes those."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def checked(
    label: str,
    saved: Mapping[str, Any],
    spec: KernelSpec,
    layout: Layout,
    device: torch.device,
) -> State:
    """A copy of a saved state on a device, for a parameter; raises StateMismatch.

    The names, dtypes and shapes must be the kernel's and the format must be the same; nothing is
    cast.
    """
    check_format(label, saved, format_text(spec, layout))
    text = format_tensor(format_text(spec, layout))
    state: State = {STEP: step_of(label, saved), FORMAT: text.to(device)}
    wanted = {t.name: t for t in tensors_of(spec)}
    unknown = sorted(map(str, set(saved) - set(wanted) - {STEP, FORMAT}))
    if unknown:
        known = f"{', '.join(wanted)} and {STEP}"
        raise StateMismatch(label, expected=known, got=f"also {', '.join(unknown)}")
    for name, t in wanted.items():
        state[name] = _tensor(label, saved.get(name), t, spec, layout, device)
    return state


def check_format(label: str, saved: Mapping[str, Any], wanted: str) -> None:
    """Raise where the sentence that was saved is another."""
    stored = saved.get(FORMAT)
    if stored is None:
        got = f"{', '.join(map(str, saved)) or 'nothing'}, which another optimizer saved"
        raise StateMismatch(label, expected=f"a state of tvm_qopt: {wanted}", got=got)
    text = bytes(torch.as_tensor(stored).to("cpu", torch.uint8).tolist()).decode(errors="replace")
    if text != wanted:
        raise StateMismatch(label, expected=wanted, got=text)


def step_of(label: str, saved: Mapping[str, Any]) -> int:
    """The number of updates that a saved state counts."""
    step = saved.get(STEP)
    number = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != int(number):
        raise StateMismatch(label, expected="step, a whole number", got=repr(step))
    return int(number)


def _tensor(
    label: str,
    given: Any,
    t: TensorSpec,
    spec: KernelSpec,
    layout: Layout,
    device: torch.device,
) -> torch.Tensor:
    dtype, shape = getattr(torch, t.dtype), shape_of(t, layout, spec)
    wanted = f"{t.name}: {dtype} of shape {shape}"
    if not isinstance(given, torch.Tensor):
        raise StateMismatch(label, expected=wanted, got=type(given).__name__)
    if t.name == COUNT and given.dtype == dtype and given.ndim == 1:
        counts = torch.zeros(shape, dtype=dtype, device=device)  # blocks of floats may differ
        same = given.numel() == counts.numel()
        counts[: len(counts) if same else 1] = given.to(device) if same else given.sum().to(device)
        return counts
    if given.dtype != dtype or tuple(given.shape) != shape:
        got = f"{given.dtype} of shape {tuple(given.shape)}"
        raise StateMismatch(label, expected=wanted, got=got)
    if not t.per_element:
        return given.detach().to(device, copy=True).contiguous()
    if not layout.fits(given):
        raise StateMismatch(
            label, expected=f"{t.name} with strides {layout.strides}", got=f"{given.stride()}"
        )
    return layout.arranged(given.detach().to(device, copy=True))
