"""Moments of others as the state of a parameter of ours, and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from tvm_qopt.errors import StateMismatch, StateReencoded
from tvm_qopt.formats import StateFormat
from tvm_qopt.ops import quantize
from tvm_qopt.optim.foreign.kind import Moments
from tvm_qopt.optim.foreign.moment import (
    Codes,
    Floats,
    Moment,
    Note,
    has_levels,
    levels_of,
    stored_text,
)
from tvm_qopt.optim.layout import GAPS, Layout
from tvm_qopt.optim.shards import is_spread
from tvm_qopt.optim.state import STEP, State, fill
from tvm_qopt.runtime.arrays import target_of, view_of
from tvm_qopt.runtime.state import decode
from tvm_qopt.runtime.store import load
from tvm_qopt.spec import KernelSpec


def placed(
    label: str,
    moments: Moments,
    step: int,
    spec: KernelSpec,
    param: torch.Tensor,
    notes: list[Note],
) -> State:
    """A state from one moment for each slot of the kernel, all of it copies.

    Codes are taken as they are where levels and blocks are the same; else they are encoded anew,
    and notes has a line more.
    """
    _check_whole(label, param)
    layout = Layout.of(param)
    state: State = {STEP: step}
    for slot, format_ in spec.slots:
        if slot.name not in moments:
            got = ", ".join(moments) or "none of its moments"
            raise StateMismatch(label, expected=f"{slot.name} in the saved state", got=got)
        moment = moments[slot.name]
        taken = isinstance(moment, Codes) and moment.is_in(format_, spec.block_size)
        if isinstance(moment, Codes) and taken and not layout.order:
            codes = moment.codes.to(param.device, copy=True)
            state[f"{slot.name}_codes"] = codes.view(layout.shape) if format_.bits == 8 else codes
            state[f"{slot.name}_scale"] = moment.scale.to(param.device, copy=True)
            continue
        values = layout.arranged(moment.decoded().to(param.device, copy=True))
        if slot.nonnegative and bool((values < 0).any()):
            raise StateMismatch(label, expected=f"{slot.name} from 0", got="a negative value")
        after = _text(format_, spec.block_size, layout)
        if _loses(moment, format_):
            notes.append(Note(label, slot.name, moment.text, after))
        state.update(_encoded(slot.name, values, format_, spec.block_size, layout))
    weights = param.detach()
    weights = weights.contiguous() if layout.kind == GAPS else layout.flat(weights)
    fill(state, load(spec, target=target_of(view_of("param", weights))), layout, weights, {})
    return state


def _check_whole(label: str, param: torch.Tensor) -> None:
    if is_spread(param):
        wanted = "a whole parameter: change over before fully_shard, or in one process"
        raise StateMismatch(label, expected=wanted, got="one that is spread over processes")


def _encoded(
    slot: str, values: torch.Tensor, format_: StateFormat, block: int, layout: Layout
) -> State:
    if format_.dtype is not None:
        return {slot: values.to(getattr(torch, format_.dtype))}
    codes, scale = quantize(layout.flat(values), format_.name, block)
    per_element = format_.bits == 8
    return {f"{slot}_codes": layout.shaped(codes) if per_element else codes, f"{slot}_scale": scale}


def _loses(moment: Moment, format_: StateFormat) -> bool:
    """Whether storing in a format rounds: float32 holds all that others store."""
    return format_.scaled or (format_.dtype != "float32" and moment.text != format_.dtype)


def _text(format_: StateFormat, block: int, layout: Layout) -> str:
    if format_.dtype is not None:
        return format_.dtype
    order = f", memory order {layout.order}" if layout.order else ""
    return stored_text(format_.name, block) + order


def moments_of(spec: KernelSpec, state: Mapping[str, torch.Tensor], param: torch.Tensor) -> Moments:
    """What a state of ours holds, in row-major order."""
    _check_whole("param", param)
    layout, shape = Layout.of(param), tuple(param.shape)
    flat = {name: layout.flat(x) for name, x in state.items() if isinstance(x, torch.Tensor)}
    moments: dict[str, Moment] = {}
    for slot, format_ in spec.slots:
        name = slot.name
        if format_.dtype is not None:
            moments[name] = Floats(state[name].contiguous())
        elif not layout.order and has_levels(format_):
            codes, scale = flat[f"{name}_codes"].reshape(-1), flat[f"{name}_scale"]
            levels = levels_of(format_).to(codes.device)
            block, bits = spec.block_size, format_.bits
            moments[name] = Codes(codes, scale, levels, block, shape, bits, format_.name)
        else:
            values = torch.from_numpy(decode(spec, flat)[name]).reshape(-1)[: param.numel()]
            shaped = layout.shaped(values.to(param.device)).contiguous()
            moments[name] = Floats(shaped, _text(format_, spec.block_size, layout))
    return moments


def warn(what: str, notes: Sequence[Note], stacklevel: int) -> None:
    """One warning for all moments that were re-encoded, each way once."""
    ways: dict[tuple[str, str, str], list[str]] = {}
    for note in notes:
        ways.setdefault((note.slot, note.before, note.after), []).append(note.label)
    if not ways:
        return
    lines = [
        f"{slot} from {before} to {after} ({labels[0]}"
        + (f" and {len(labels) - 1} more)" if len(labels) > 1 else ")")
        for (slot, before, after), labels in ways.items()
    ]
    message = f"{what} was re-encoded: {'; '.join(lines)}"
    warnings.warn(message, StateReencoded, stacklevel=stacklevel + 1)
