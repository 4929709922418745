"""Checkpoints of bitsandbytes: blockwise 8-bit optimizers and its 32-bit ones.

A state is `step`, `state1` and `state2`, and in 8 bits `absmax1`, `qmap1`, `absmax2`, `qmap2`;
0.49 and later put all but the step under one key.  Blocks have 256 elements, before 0.44 they had
2048.  Its groups do not say which optimizer they are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch
from tvm_qopt.formats import FORMATS
from tvm_qopt.optim.foreign.kind import Kind, Moments, Options, refuse_unlike
from tvm_qopt.optim.foreign.moment import (
    Codes,
    Floats,
    Moment,
    Note,
    coded,
    encode,
    floats,
    stored_text,
)

NAME = "bitsandbytes"
WRAPPED = "__bnb_optimizer_quant_state__"
PARTS = ("state", "absmax", "qmap")
BESIDE = (WRAPPED, "gnorm_vec", "unorm_vec")
"""Entries that have no moment: the key around the others, histories of norms that it clipped by."""

BLOCK = 256
BLOCKS = (256, 2048)
"""Sizes that a number of scales is tried against: those that its versions had."""

HELD: dict[str, tuple[tuple[str, ...], ...]] = {
    "adam": (("exp_avg",), ("exp_avg_sq",)),
    "adamw": (("exp_avg",), ("exp_avg_sq",)),
    "ademamix": (("exp_avg", "exp_avg_slow"), ("exp_avg_sq",)),
    "lion": (("exp_avg",),),
    "sgd": (("momentum_buffer",),),
    "rmsprop": (("square_avg",),),
    "adagrad": (("sum",),),
}
"""Rule -> what its state1 and state2 hold.  Its LAMB and LARS are other updates than ours."""

OWN = ("alpha", "betas", "eps", "t_alpha", "t_beta3")
TAKEN: dict[str, tuple[str, ...]] = {
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
    "ademamix": OWN,
    "lion": ("betas",),
    "sgd": (),
    "rmsprop": ("eps",),
    "adagrad": ("eps",),
}
LACKING: dict[str, dict[str, Any]] = {
    "adam": {"amsgrad": False},
    "adamw": {"amsgrad": False},
    "sgd": {"dampening": 0.0, "nesterov": False},
    "rmsprop": {"momentum": 0.0, "centered": False},
    "adagrad": {"lr_decay": 0.0},
}
"""Our options that its kernels do without, and the value that comes to that."""


def _unwrapped(state: Options) -> dict[str, Any]:
    inner = state.get(WRAPPED)
    return {**state, **inner} if isinstance(inner, Mapping) else dict(state)


def _wrote(state: Options) -> bool:
    return WRAPPED in state or "state1" in state


def _made(group: Options) -> bool:
    """torch and torchao have one of these in all groups that have betas."""
    return "betas" in group and not {"amsgrad", "maximize"} & group.keys()


def _moments(
    label: str, rule: str, slots: Sequence[str], state: Options, param: torch.Tensor
) -> dict[str, Moment]:
    saved = _unwrapped(state)
    known = [f"{part}{i + 1}" for part in PARTS for i in range(len(HELD[rule]))]
    unknown = sorted(map(str, saved.keys() - {*known, *BESIDE, "step"}))
    if unknown:
        wanted = f"{', '.join(known)} and step"
        raise StateMismatch(label, expected=wanted, got=f"also {', '.join(unknown)}")
    found = {}
    for number, held in enumerate(HELD[rule], start=1):
        for slot in (slot for slot in held if slot in slots):
            part = held.index(slot) if len(held) > 1 else None
            found[slot] = _moment(label, slot, saved, number, part, param)
    return found


def _moment(
    label: str, slot: str, saved: Options, number: int, part: int | None, param: torch.Tensor
) -> Moment:
    """state1 or state2 of a parameter; part: of AdEMAMix, which stacks two moments."""
    name, shape = f"state{number}", tuple(param.shape)
    values, absmax = _part(saved.get(name), part), _part(saved.get(f"absmax{number}"), part)
    named = f"{slot} ({name})"
    if not isinstance(values, torch.Tensor):
        got = ", ".join(map(str, saved)) or "nothing"
        raise StateMismatch(label, expected=f"{name}, which has {slot}", got=got)
    if tuple(values.shape) != shape:
        got = f"shape {tuple(values.shape)}"
        raise StateMismatch(label, expected=f"{named} of shape {shape}", got=got)
    if not values.is_contiguous():
        got = f"strides {values.stride()}, whose order its kernels do not keep"
        raise StateMismatch(label, expected=f"{named} in row-major order", got=got)
    if values.dtype != torch.uint8:
        return floats(label, named, values, shape)
    levels = saved.get(f"qmap{number}")
    if not isinstance(levels, torch.Tensor) or not isinstance(absmax, torch.Tensor):
        missing = f"qmap{number}" if not isinstance(levels, torch.Tensor) else f"absmax{number}"
        raise StateMismatch(label, expected=f"{named} with {missing}", got=", ".join(saved))
    scales, size = absmax.numel(), param.numel()
    fitting = [block for block in BLOCKS if -(-size // block) == scales]
    if not fitting:
        wanted = f"absmax{number} of a scale a block of {BLOCK} or 2048"
        raise StateMismatch(label, expected=wanted, got=f"{scales} for {size} elements")
    return coded(label, named, values, absmax, levels, fitting[0], shape)


def _part(stacked: Any, part: int | None) -> Any:
    """A half of what AdEMAMix stacks; what is not stacked is refused by its shape later."""
    if part is None or not isinstance(stacked, torch.Tensor) or stacked.shape[:1] != (2,):
        return stacked
    return stacked[part]


def _options(rule: str, group: Options) -> dict[str, Any]:
    if rule == "adam" and group.get("weight_decay"):
        wanted = "0, or the class AdamW: bitsandbytes' Adam decays the weights themselves"
        raise StateMismatch("weight_decay", expected=wanted, got=repr(group["weight_decay"]))
    kept = {name: value for name, value in group.items() if name not in OWN}
    taken = {name: group[name] for name in TAKEN[rule] if name in group}
    if "betas" in taken:
        taken["betas"] = tuple(taken["betas"])
    if rule in ("sgd", "rmsprop") and "betas" in group:
        taken["momentum" if rule == "sgd" else "alpha"] = float(group["betas"][0])
    return {**LACKING.get(rule, {}), **kept, **taken}


def _state(
    label: str, rule: str, moments: Moments, step: int, param: torch.Tensor, notes: list[Note]
) -> dict[str, Any]:
    """The flat form, which every version reads.  8 bits unless all moments are plain numbers."""
    if not moments:
        return {}
    plain = all(isinstance(each, Floats) and not each.origin for each in moments.values())
    state: dict[str, Any] = {"step": step}
    for number, held in enumerate(HELD[rule], start=1):
        if plain:
            parts = [moments[slot].decoded().clone() for slot in held]
        else:
            format_ = "dynamic8s" if number == 1 else "dynamic8u"
            codes = [_in_blocks(label, slot, moments[slot], format_, notes) for slot in held]
            parts = [each.codes.clone().view(each.shape) for each in codes]
            scales = [each.scale.clone() for each in codes]
            state[f"qmap{number}"] = codes[0].levels.clone()
            state[f"absmax{number}"] = torch.stack(scales) if len(held) > 1 else scales[0]
        state[f"state{number}"] = torch.stack(parts) if len(held) > 1 else parts[0]
    return state


def _in_blocks(label: str, slot: str, moment: Moment, format_: str, notes: list[Note]) -> Codes:
    if isinstance(moment, Codes) and moment.is_in(FORMATS[format_], BLOCK):
        return moment
    notes.append(Note(label, slot, moment.text, stored_text(format_, BLOCK)))
    return encode(moment.decoded(), format_, BLOCK)


def _group(rule: str, options: Options) -> dict[str, Any]:
    refuse_unlike(f"export of {rule}", NAME, options, {"maximize": False, **LACKING.get(rule, {})})
    if rule == "adam":
        refuse_unlike("export of adam", f"{NAME}' AdamW", options, {"weight_decay": 0.0})
    first = {"sgd": "momentum", "rmsprop": "alpha"}.get(rule)
    betas = (float(options[first]), 0.0) if first else tuple(options.get("betas", (0.0, 0.0)))
    group = {
        "lr": float(options["lr"]),
        "betas": betas,
        "eps": float(options.get("eps", 0.0)),
        "weight_decay": float(options["weight_decay"]),
    }
    if len(HELD[rule]) > 1:
        mix = rule == "ademamix"
        group["alpha"] = float(options["alpha"]) if mix else 0.0
        group |= {name: options[name] if mix else None for name in ("t_alpha", "t_beta3")}
    return group


BITSANDBYTES = Kind(NAME, HELD.keys(), _wrote, _made, _moments, _options, _state, _group)
