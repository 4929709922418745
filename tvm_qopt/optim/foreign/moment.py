"""One moment as somebody stores it: values, or codes with their levels and scales."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from tvm_qopt.errors import StateMismatch
from tvm_qopt.formats import FORMATS, StateFormat
from tvm_qopt.ops import quantize
from tvm_qopt.optim.entry import dtype_name

FP8 = "fp8_e4m3"
SAME_LEVELS = 1e-6
"""Relative: the maps that torch's versions make differ in the last place."""


@dataclass(frozen=True)
class Note:
    """That a moment was re-encoded: whose, which, and how it was and is stored."""

    label: str
    slot: str
    before: str
    after: str


@dataclass(frozen=True)
class Floats:
    """values: in the parameter's shape.  origin: how they were stored, where not as they are."""

    values: torch.Tensor
    origin: str = ""

    @property
    def text(self) -> str:
        return self.origin or dtype_name(self.values.dtype)

    def decoded(self) -> torch.Tensor:
        return self.values.float()


@dataclass(frozen=True)
class Codes:
    """value = levels[code] * scale of its block; blocks run over the row-major elements.

    codes: uint8, flat, for 4 bits two a byte with the even element in the high half.  format: ours
    with these levels, or None.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    levels: torch.Tensor
    block: int
    shape: tuple[int, ...]
    bits: int
    format: str | None

    @property
    def text(self) -> str:
        return stored_text(self.format or "a map of its own", self.block)

    def decoded(self) -> torch.Tensor:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1)
        size = int(np.prod(self.shape, dtype=np.int64))
        scale = self.scale.repeat_interleave(self.block)[:size]
        return (self.levels[codes[:size].long()] * scale).view(self.shape)

    def is_in(self, format_: StateFormat, block: int) -> bool:
        return self.format == format_.name and self.block == block


Moment = Floats | Codes


def stored_text(format: str, block: int) -> str:
    return f"{format} in blocks of {block}"


def floats(label: str, slot: str, values: object, shape: Collection[int]) -> Floats:
    """A moment of a parameter from a tensor; raises StateMismatch for another shape, or NaN."""
    wanted = f"{slot}, floats of shape {tuple(shape)}"
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        got = f"{values.dtype}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise StateMismatch(label, expected=wanted, got=got)
    if tuple(values.shape) != tuple(shape):
        raise StateMismatch(label, expected=wanted, got=f"shape {tuple(values.shape)}")
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        got = f"NaN or Inf in {bad} of {values.numel()}"
        raise StateMismatch(label, expected=f"{slot} of finite values", got=got)
    return Floats(values.detach())


def coded(
    label: str,
    slot: str,
    codes: object,
    scale: object,
    levels: torch.Tensor | None,
    block: int,
    shape: tuple[int, ...],
    *,
    bits: int = 8,
) -> Codes:
    """A moment from codes; levels: by code, None for FP8.  Raises StateMismatch for damage."""
    size = int(np.prod(shape, dtype=np.int64))
    held = ((size + 1) // 2,) if bits == 4 else shape
    for part, given, dtype, wanted in (
        ("codes", codes, torch.uint8, held),
        ("scales", scale, torch.float32, (-(-size // block),)),
    ):
        _check_tensor(f"{label}: {slot}", part, given, dtype, wanted)
    assert isinstance(codes, torch.Tensor) and isinstance(scale, torch.Tensor)
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        worst = scale[~(torch.isfinite(scale) & (scale >= 0))][0].item()
        raise StateMismatch(label, expected=f"{slot} with scales from 0, finite", got=f"{worst}")
    name = FP8 if levels is None else _format_of(levels, bits)
    table = _fp8_levels() if levels is None else levels.detach().float()
    if table.ndim != 1 or table.numel() < 2**bits:
        got = f"shape {tuple(table.shape)}"
        raise StateMismatch(label, expected=f"{slot} with a map of {2**bits} levels", got=got)
    flat, table = codes.detach().reshape(-1), table.to(codes.device)
    broken = ~torch.isfinite(table)
    if bool(broken.any()) and bool(broken[flat.long()].any()):
        raise StateMismatch(label, expected=f"{slot} of finite values", got="NaN")
    return Codes(flat, scale.detach(), table, block, shape, bits, name)


def _check_tensor(
    label: str, name: str, given: object, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    wanted = f"{name}: {dtype} of shape {shape}"
    if not isinstance(given, torch.Tensor):
        raise StateMismatch(label, expected=wanted, got=type(given).__name__)
    if given.dtype != dtype or tuple(given.shape) != shape:
        got = f"{given.dtype} of shape {tuple(given.shape)}"
        raise StateMismatch(label, expected=wanted, got=got)


def encode(values: torch.Tensor, format: str, block: int) -> Codes:
    """Row-major values in a format of ours."""
    codes, scale = quantize(values.contiguous(), format, block)
    shape, coded_as = tuple(values.shape), FORMATS[format]
    levels = levels_of(coded_as).to(values.device)
    return Codes(codes.reshape(-1), scale, levels, block, shape, coded_as.bits, format)


def has_levels(format_: StateFormat) -> bool:
    """Whether value = level * scale, with the levels of `levels_of`."""
    return format_.name == FP8 or (format_.qmap is not None and not format_.root)


def levels_of(format_: StateFormat) -> torch.Tensor:
    """The levels by code of a format that has a map or is FP8."""
    if format_.name == FP8:
        return _fp8_levels()
    return torch.from_numpy(np.array(format_.qmap, np.float32))


def _fp8_levels() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def _format_of(levels: torch.Tensor, bits: int) -> str | None:
    given = levels.detach().float().cpu().numpy()
    for known, table in _tables(bits).items():
        if given.shape == table.shape and np.allclose(given, table, rtol=SAME_LEVELS, atol=0):
            return known
    return None


@functools.cache
def _tables(bits: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    kept = {k: f for k, f in FORMATS.items() if f.scaled and f.bits == bits and not f.root}
    return {name: f.qmap for name, f in kept.items() if f.qmap is not None}
