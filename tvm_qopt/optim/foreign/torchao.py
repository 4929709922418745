"""Checkpoints of torchao: Adam and AdamW in 8 bits, 4 bits and FP8.

A moment is a tensor subclass with codes, scale, and but for FP8 a qmap; one of fewer than 4096
elements, or with a last block that is short, is a plain tensor.  Reading asks for no torchao.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch, ToolMissing
from tvm_qopt.formats import FORMATS
from tvm_qopt.optim.foreign.kind import Kind, Moments, Options, refuse_unlike
from tvm_qopt.optim.foreign.moment import (
    FP8,
    Codes,
    Floats,
    Moment,
    Note,
    coded,
    encode,
    floats,
    stored_text,
)

NAME = "torchao"
MODULES = {
    "OptimState8bit": "subclass_8bit",
    "OptimState4bit": "subclass_4bit",
    "OptimStateFp8": "subclass_fp8",
}
BLOCK = 256
SIGNED, UNSIGNED = "dynamic8s", "dynamic8u"
CLASS_OF = {
    "dynamic8s": "OptimState8bit",
    "dynamic8u": "OptimState8bit",
    "dynamic4s": "OptimState4bit",
    "linear4u": "OptimState4bit",
    FP8: "OptimStateFp8",
}
"""Format -> the class that has its levels."""

SLOTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad")


def _class_name(value: Any) -> str | None:
    name = type(value).__name__
    return name if name in MODULES else None


def _wrote(state: Options) -> bool:
    return any(_class_name(value) for value in state.values())


def _made(group: Options) -> bool:
    return "amsgrad" in group and "maximize" not in group


def _moments(
    label: str, rule: str, slots: Sequence[str], state: Options, param: torch.Tensor
) -> dict[str, Moment]:
    unknown = sorted(map(str, state.keys() - {*SLOTS, "step"}))
    if unknown:
        known = f"{', '.join(SLOTS)} and step"
        raise StateMismatch(label, expected=known, got=f"also {', '.join(unknown)}")
    return {slot: _moment(label, slot, state[slot], param) for slot in slots if slot in state}


def _moment(label: str, slot: str, value: Any, param: torch.Tensor) -> Moment:
    name, shape = _class_name(value), tuple(param.shape)
    if name is None:
        return floats(label, slot, value, shape)
    if tuple(value.shape) != shape:
        got = f"shape {tuple(value.shape)}"
        raise StateMismatch(label, expected=f"{slot} of shape {shape}", got=got)
    bits = 4 if name == "OptimState4bit" else 8
    codes = value.codes
    if name == "OptimStateFp8" and codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    block = int(value.block_size)
    if block < 1 or value.scale.numel() * block != param.numel():
        wanted = f"{slot} with a scale for each of whole blocks"
        got = f"{value.scale.numel()} scales of {block} for {param.numel()} elements"
        raise StateMismatch(label, expected=wanted, got=got)
    levels = None if name == "OptimStateFp8" else value.qmap
    return coded(label, slot, codes, value.scale, levels, block, shape, bits=bits)


def _options(rule: str, group: Options) -> dict[str, Any]:
    lr = group.get("lr")
    return {**group, **({"lr": float(lr)} if isinstance(lr, torch.Tensor) else {})}


def _state(
    label: str, rule: str, moments: Moments, step: int, param: torch.Tensor, notes: list[Note]
) -> dict[str, Any]:
    stored = {slot: _tensor(label, slot, each, param, notes) for slot, each in moments.items()}
    return {"step": torch.tensor(float(step)), **stored}


def _tensor(
    label: str, slot: str, moment: Moment, param: torch.Tensor, notes: list[Note]
) -> torch.Tensor:
    """Plain numbers, and what its blocks do not divide, as a plain tensor."""
    if isinstance(moment, Floats) and not moment.origin:
        return moment.decoded().clone()
    taken = isinstance(moment, Codes) and moment.format in CLASS_OF
    block = moment.block if isinstance(moment, Codes) and taken else BLOCK
    if param.numel() == 0 or param.numel() % block:
        return moment.decoded().clone()
    if not isinstance(moment, Codes) or not taken:
        format_ = SIGNED if slot == "exp_avg" else UNSIGNED
        notes.append(Note(label, slot, moment.text, stored_text(format_, block)))
        moment = encode(moment.decoded(), format_, block)
    return _subclass(moment, param)


def _subclass(moment: Codes, param: torch.Tensor) -> torch.Tensor:
    assert moment.format is not None
    made, codes, scale = _class(CLASS_OF[moment.format]), moment.codes.clone(), moment.scale.clone()
    if moment.format == FP8:
        shaped = codes.view(torch.float8_e4m3fn).view(moment.shape)
        return made(shaped, scale, dtype=param.dtype)
    signed, levels = FORMATS[moment.format].signed, moment.levels.clone()
    if moment.bits == 4:
        return made(codes, scale, levels, signed, moment.shape, dtype=param.dtype)
    return made(codes.view(moment.shape), scale, levels, signed, dtype=param.dtype)


def _class(name: str) -> Any:
    try:
        module = importlib.import_module(f"torchao.optim.{MODULES[name]}")
    except ImportError as error:
        reason = f"a state_dict for torchao needs it: pip install torchao ({error})"
        raise ToolMissing(reason) from error
    return getattr(module, name)


def _group(rule: str, options: Options) -> dict[str, Any]:
    refuse_unlike(f"export of {rule}", NAME, options, {"maximize": False})
    group: Mapping[str, Any] = {name: options[name] for name in OPTIONS}
    lr = torch.as_tensor(options["lr"], dtype=torch.float32).clone()
    return {**group, "betas": tuple(options["betas"]), "lr": lr}


TORCHAO = Kind(NAME, ("adam", "adamw"), _wrote, _made, _moments, _options, _state, _group)
