"""Parameters that are spread over processes: torch's DTensors, as `fully_shard` makes them.

Each process steps its own part.  May import torch only; torch.distributed once others have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tvm_qopt.errors import DeviceMismatch

Groups = tuple[Any, ...]
"""Process groups over which a parameter is split, one a dimension of its mesh; () where whole."""

Sums = dict[str, npt.NDArray[np.float64]]


def dtensor_class() -> type[Any] | None:
    """torch's DTensor; None while nothing has imported it, since then there is none to meet."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_spread(x: Any) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(x, kind)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The part of this process, a view without a history; x itself where it is no DTensor."""
    return x.detach().to_local() if is_spread(x) else x


def local_as(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The part of x that belongs to the part of `param` here, whatever x is laid out as.

    x: a DTensor, which is redistributed where it lies otherwise (all processes must come here), or
    a whole tensor that every process has.
    """
    from torch.distributed.tensor import distribute_tensor

    mesh, placements, x = param.device_mesh, param.placements, x.detach()
    if not is_spread(x):
        x = distribute_tensor(x.to(param.device), mesh, placements, src_data_rank=None)
    elif tuple(x.placements) != tuple(placements):
        x = x.redistribute(mesh, placements)
    return x.to_local()


def spread_as(local: torch.Tensor, param: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The DTensor of a shape whose parts lie as those of `param`; it shares their memory."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(*shape, device="meta").stride()
    mesh, placements = param.device_mesh, param.placements
    made: torch.Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return made


def split_dims(label: str, param: torch.Tensor) -> list[int]:
    """The dimensions of its mesh over which a DTensor is split; raises for what is no part."""
    dims = []
    for dim, placement in enumerate(param.placements):
        if placement.is_partial():
            wanted = "a parameter that is split or the same everywhere"
            raise DeviceMismatch(label, expected=wanted, got=str(placement))
        if not placement.is_replicate():
            dims.append(dim)
    return dims


def depth_of(param: torch.Tensor) -> int:
    """Below how many leading dimensions nothing is split: 0 where every process has all."""
    dims = [p.dim + 1 for p in param.placements if not p.is_replicate()]
    return max(dims, default=0)


def groups_of(label: str, param: torch.Tensor) -> Groups:
    if not is_spread(param):
        return ()
    return tuple(param.device_mesh.get_group(dim) for dim in split_dims(label, param))


def part_number(param: torch.Tensor) -> int:
    """Which part of a parameter this process has: 0 is first (and that of what is whole)."""
    number = 0
    if is_spread(param):
        mesh = param.device_mesh
        for dim in split_dims("param", param):
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number


def add_up(sums: Sums, groups: Sequence[Groups], device: torch.device) -> Sums:
    """Sums of squares of whole parameters from those of the parts here.

    sums: name -> one a member.  groups: of each member.  Every process must come here with the
    same members, those included whose part is empty.
    """
    if not any(groups):
        return sums
    names, values = list(sums), np.stack(list(sums.values()))
    for each in dict.fromkeys(groups):
        columns = [i for i, other in enumerate(groups) if other == each]
        part = torch.from_numpy(values[:, columns]).to(device)
        for group in each:
            torch.distributed.all_reduce(part, group=group)
        values[:, columns] = part.cpu().numpy()
    return dict(zip(names, values, strict=True))


def largest(value: float, params: Iterable[torch.Tensor]) -> float:
    """The largest value of all processes that share a parameter with this one."""
    found: dict[Groups, torch.device] = {}
    for param in params:
        if is_spread(param):
            found.setdefault(groups_of("param", param), param.device)
    for groups, device in found.items():
        part = torch.tensor(value, dtype=torch.float64, device=device)
        for group in groups:
            torch.distributed.all_reduce(part, torch.distributed.ReduceOp.MAX, group=group)
        value = float(part)
    return value
