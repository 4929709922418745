"""The checkpoints of torch, bitsandbytes and torchao: which is which, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_qopt.optim.foreign.bitsandbytes import BITSANDBYTES
from tvm_qopt.optim.foreign.kind import Kind
from tvm_qopt.optim.foreign.plain import TORCH
from tvm_qopt.optim.foreign.torchao import TORCHAO
from tvm_qopt.optim.state import FORMAT

KINDS = {kind.name: kind for kind in (BITSANDBYTES, TORCHAO, TORCH)}


def kind_of(saved: Mapping[str, Any]) -> Kind | None:
    """Whose a state_dict is; None: ours, or nothing that could be told."""
    groups, states = saved.get("param_groups"), saved.get("state")
    if not groups or not isinstance(states, Mapping):
        return None
    kept = [state for state in states.values() if isinstance(state, Mapping) and state]
    if any("overrides" in group for group in groups) or any(FORMAT in state for state in kept):
        return None
    for kind in (BITSANDBYTES, TORCHAO):
        if any(kind.wrote(state) for state in kept) or (not kept and kind.made(groups[0])):
            return kind
    return TORCH
