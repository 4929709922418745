"""The state of an optimizer of ours as a state_dict that another one loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_qopt.errors import HyperOutOfRange, UnknownName
from tvm_qopt.optim.checkpoint import places, spec_at
from tvm_qopt.optim.engine import label_of
from tvm_qopt.optim.foreign import KINDS
from tvm_qopt.optim.foreign.moment import Note
from tvm_qopt.optim.foreign.place import moments_of, warn
from tvm_qopt.optim.options import COMMON, STORAGE
from tvm_qopt.optim.state import STEP

if TYPE_CHECKING:
    from tvm_qopt.optim.base import QoptOptimizer


def export_state_dict(optimizer: QoptOptimizer, to: str) -> dict[str, Any]:
    """A state_dict that an optimizer of "torch", "bitsandbytes" or "torchao" goes on from.

    Load it into the class of the same update, made over the same parameters and groups; their
    numbers (lr, betas ...) come with it.  8-bit dynamic state is handed over as it is, and to
    torchao 4-bit and FP8 state too; what the other has no levels for becomes its 8-bit state, with
    a warning (StateReencoded).  torch's state is float32.  What ours has beside the moments (master
    weights, counts of values that were not finite) is left out.

    Raises StateMismatch for an update that the other has not, HyperOutOfRange for an option of a
    single parameter, ToolMissing where torchao is asked for and not installed.

    Examples
    --------
    >>> theirs = bitsandbytes.optim.AdamW8bit(model.parameters())
    >>> theirs.load_state_dict(tvm_qopt.optim.export_state_dict(optimizer, "bitsandbytes"))
    """
    if to not in KINDS:
        raise UnknownName("kind of state_dict", to, KINDS)
    kind, rule, groups = KINDS[to], optimizer.rule, optimizer.param_groups
    kind.check_rule(rule)
    packed = optimizer.state_dict()["param_groups"]
    for number, group in enumerate(groups):
        for position, own in group["overrides"].items():
            for name in own.keys() - set(STORAGE):
                where = f"{label_of(groups, number, position)}: {name}"
                wanted = f"an option of the group, since {to} has none of a parameter"
                raise HyperOutOfRange(where, expected=wanted, got=repr(own[name]))
    ours = {*optimizer.form.arguments, *COMMON, "overrides"}
    written = []
    for group in packed:
        extra = {name: value for name, value in group.items() if name not in ours}
        written.append({**kind.group(rule, group), **extra})
    states: dict[Any, Any] = {}
    notes = list[Note]()
    indices = [index for group in packed for index in group["params"]]
    for (number, position, param), index in zip(places(groups), indices, strict=True):
        state = optimizer.state.get(param)
        if state and index not in states:
            spec = spec_at(rule, optimizer.form, groups, number, position)
            moments = moments_of(spec, state, param)
            label = label_of(groups, number, position)
            made = kind.state(label, rule, moments, state[STEP], param, notes)
            if made:
                states[index] = made
    warn(f"the state for {to}", notes, stacklevel=2)
    return {"state": states, "param_groups": written}
