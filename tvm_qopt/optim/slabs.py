"""The saved state of a parameter that is spread over processes, for any other number of them.

A slab is what no process splits: a row, where dimension 0 is split.  Codes are saved one an element
(those of 4 bits one a byte), so that torch can share them out as it does the parameter.  Blocks
begin anew in each process; so scales are saved by slab: those of the blocks that reach into it, and
where in its first block it starts.  Every process of a later run can read its slabs from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvm_qopt.errors import StateMismatch, UnsupportedSpec
from tvm_qopt.formats import StateFormat
from tvm_qopt.ops import quantize
from tvm_qopt.optim.layout import DENSE, Layout
from tvm_qopt.optim.shards import (
    depth_of,
    is_spread,
    local_as,
    local_of,
    part_number,
    spread_as,
)
from tvm_qopt.optim.state import COUNT, State, check_format, format_text, tensors_of
from tvm_qopt.runtime.state import to_numpy
from tvm_qopt.spec import KernelSpec
from tvm_qopt.xp import NUMPY

STARTS = "block_starts"
"""Entry of a saved state: the number of each slab's first element within its block."""


@dataclass(frozen=True)
class Slabs:
    """lead: how many slabs there are, by dimension.  size: elements of each."""

    lead: tuple[int, ...]
    size: int
    block: int

    @classmethod
    def of(cls, shape: Sequence[int], depth: int, block: int) -> Slabs:
        return cls(tuple(shape[:depth]), math.prod(shape[depth:]), block)

    @property
    def cells(self) -> int:
        """The most blocks that reach into a slab."""
        latest = self.block - math.gcd(self.block, self.size)
        return (latest + self.size - 1) // self.block + 1

    def _first(self) -> torch.Tensor:
        return torch.arange(math.prod(self.lead)) * self.size

    def starts(self) -> torch.Tensor:
        return (self._first() % self.block).to(torch.int32).view(self.lead)

    def table(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales of blocks by slab, the last repeated where fewer reach into it."""
        cell = (self._first() // self.block)[:, None] + torch.arange(self.cells)
        last = max(scale.numel() - 1, 0)
        return scale[cell.clamp(max=last).to(scale.device)].view(*self.lead, self.cells)

    def scale(self, table: torch.Tensor) -> torch.Tensor:
        """The inverse, of a table whose slabs start where these do."""
        count = math.prod(self.lead) * self.size
        first = torch.arange(-(-count // self.block)) * self.block
        slab = first // max(self.size, 1)
        cell = (first - slab * self.size + self.starts().view(-1)[slab]) // self.block
        return table.reshape(-1, self.cells)[slab.to(table.device), cell.to(table.device)]

    def by_element(self, table: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The scale of each element, flat, of slabs that start anywhere."""
        place = starts.reshape(-1, 1).long() + torch.arange(self.size, device=starts.device)
        return table.reshape(-1, self.cells).gather(1, place // self.block).reshape(-1)


def spread_state(state: State, spec: KernelSpec, param: torch.Tensor) -> State:
    """The state of the part of `param` here as DTensors, which torch saves and shares out."""
    local, depth = local_of(param), depth_of(param)
    if Layout.of(local).kind == DENSE:
        wanted = "parts that lie row after row"
        raise UnsupportedSpec(f"state_dict of a DTensor: {wanted}, got strides {local.stride()}")
    slabs = Slabs.of(local.shape, depth, spec.block_size)
    lead = tuple(param.shape[:depth])
    saved = dict(state)
    for slot, format_ in spec.slots:
        if format_.scaled and depth:
            codes, scale = f"{slot.name}_codes", f"{slot.name}_scale"
            saved[codes] = _unpacked(state[codes], format_, local.shape)
            saved[scale] = spread_as(slabs.table(state[scale]), param, (*lead, slabs.cells))
            starts = slabs.starts().to(local.device)
            saved[STARTS] = spread_as(starts, param, lead)
    if COUNT in state and depth:
        counts = torch.zeros(slabs.lead, dtype=state[COUNT].dtype, device=local.device)
        counts.view(-1)[:1] = state[COUNT].sum()
        saved[COUNT] = spread_as(counts, param, lead)
    for t in tensors_of(spec):
        x = saved[t.name]
        if not is_spread(x):
            whole = tuple(param.shape) if x.shape == local.shape else tuple(x.shape)
            saved[t.name] = spread_as(x, param, whole)
    return saved


def mark(state: State, spec: KernelSpec, param: torch.Tensor) -> None:
    """Have the entry that only saved states fill: torch's flat state dicts read back the entries
    that an optimizer has."""
    if is_spread(param) and depth_of(param) and any(f.scaled for _, f in spec.slots):
        state[STARTS] = torch.empty(0, dtype=torch.int32, device=param.device)


def _unpacked(codes: torch.Tensor, format_: StateFormat, shape: Sequence[int]) -> torch.Tensor:
    """One code an element, in the shape of the parameter."""
    if format_.bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], -1).view(-1)[: math.prod(shape)]
    return codes.view(tuple(shape))


def _packed(codes: torch.Tensor, format_: StateFormat) -> torch.Tensor:
    if format_.bits != 4:
        return codes.contiguous()
    flat = torch.nn.functional.pad(codes.reshape(-1), (0, codes.numel() % 2))
    return (flat[::2] << 4) | flat[1::2]


def part_of_state(
    label: str, saved: Mapping[str, Any], spec: KernelSpec, param: torch.Tensor
) -> tuple[Mapping[str, Any], bool]:
    """What of a saved state belongs to the part of `param` here, as an optimizer keeps it.

    saved: of a parameter that was spread over any number of processes, or whole.  Returns also
    whether values had to be encoded anew, since the blocks here start where none did: each is then
    within half a step of its format, at the largest value of its new block, of what it was.
    """
    if not is_spread(param) and STARTS not in saved:
        return saved, False
    local = local_of(param)
    check_format(label, saved, format_text(spec, Layout.of(local)))
    depth = depth_of(param) if is_spread(param) else saved[STARTS].ndim
    found, anew = dict(saved), False
    starts = found.pop(STARTS, None)
    slabs = Slabs.of(param.shape, depth, spec.block_size)
    part = Slabs.of(local.shape, depth, spec.block_size)
    for slot, format_ in spec.slots if depth else ():
        if format_.scaled:
            where = [f"{slot.name}_codes", f"{slot.name}_scale"]
            given = [found.get(name) for name in where]
            read = [*_by_slab(label, where, given, format_, slabs, param), starts]
            if read[1] is not given[1] or starts is None:
                read[2] = slabs.starts()
            stored = [_here(x, param) for x in read]
            found[where[0]], found[where[1]], other = _own(stored, format_, part)
            anew |= other
    for t in tensors_of(spec):
        x = found.get(t.name)
        if t.name == COUNT and isinstance(x, torch.Tensor):
            found[COUNT] = _counts(x, param)
        elif isinstance(x, torch.Tensor) and t.per_element and x.shape == param.shape:
            found[t.name] = _here(x, param)
    return found, anew


def _by_slab(
    label: str,
    names: Sequence[str],
    given: Sequence[Any],
    format_: StateFormat,
    slabs: Slabs,
    param: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes by element and scales by slab of the whole parameter; raises StateMismatch."""
    codes, scale = given
    size, shape = param.numel(), tuple(param.shape)
    blocks = (-(-size // slabs.block),)
    for name, x, dtype in zip(names, given, (torch.uint8, torch.float32), strict=True):
        if not isinstance(x, torch.Tensor) or x.dtype != dtype:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise StateMismatch(label, expected=f"{name} of {dtype}", got=str(got))
    table = (*slabs.lead, slabs.cells)
    if tuple(scale.shape) == blocks:  # of an optimizer that has all of it
        codes, scale = (x.full_tensor() if is_spread(x) else x for x in given)
        packed = ((size + 1) // 2,) if format_.bits == 4 else shape
        if tuple(codes.shape) == packed:
            return _unpacked(codes, format_, shape), slabs.table(scale)
    elif tuple(codes.shape) == shape and tuple(scale.shape) == table:
        return codes, scale
    wanted = f"{names[0]} of shape {shape}, {names[1]} of shape {table} or {blocks}"
    raise StateMismatch(label, expected=wanted, got=f"{[tuple(x.shape) for x in given]}")


def _here(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return local_as(x, param) if is_spread(param) else x


def _own(
    stored: Sequence[torch.Tensor], format_: StateFormat, part: Slabs
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The codes and scales of blocks that start with the part; encoded anew where others do."""
    codes, table, starts = stored
    if torch.equal(starts.cpu(), part.starts()):
        return _packed(codes, format_), part.scale(table).contiguous(), False
    flat = to_numpy(codes.reshape(-1)).astype("int32")
    level = format_.decode(NUMPY, flat, None, format_.name)
    value = torch.from_numpy(level).to(codes.device) * part.by_element(table, starts)
    value = value * value if format_.root else value
    fresh, scale = quantize(value.view(codes.shape), format_.name, part.block)
    return fresh, scale, True


def _counts(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """One number: that of the part that the saved one was of, or all of them in the first."""
    if is_spread(x) and x.ndim == depth_of(param):
        return _here(x, param).sum().view(1).to(x.dtype)
    whole = x.full_tensor() if is_spread(x) else x
    return (whole.sum() * (part_number(param) == 0)).view(1).to(x.dtype)
