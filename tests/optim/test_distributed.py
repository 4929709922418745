"""Several processes: DDP, fully_shard, ZeroRedundancyOptimizer, and checkpoints between them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from tvm_qopt import optim
from tvm_qopt.errors import StateMismatch, StateReencoded
from tvm_qopt.optim.checkpoint import spec_at
from tvm_qopt.runtime.state import decode

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch is built without gloo",
)

FEW = (100,)
SAME = ((48, 256), (64, 128), FEW)
"""Shapes whose blocks begin where they do in one process, on 2 and on 3 processes."""

EMPTY, OTHER = (1, 5000), ((130, 64), (5001,))
"""A shape of which the last process has nothing; and shapes whose blocks lie otherwise."""

SHAPES = (*SAME, EMPTY, *OTHER)

LAST_BIT = 1.2e-7
"""Relative: what a norm whose sum is taken in another order may change."""


NO_WORSE = 1.3
"""Of the distance between one process with a low-bit state and one with float32 state."""


class Bag(nn.Module):
    """Parameters alone: their gradients are given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.each = nn.ParameterList(nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES)


def spread(bag: Bag) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    fully_shard(bag)
    return list(bag.parameters())


def train(optimizer: Any, params: list[Any], first: int, last: int) -> None:
    """Steps with gradients that depend on the step alone."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            grad = torch.randn(tuple(p.shape), generator=generator).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def values(optimizer: Any, position: int) -> dict[str, torch.Tensor]:
    """The float32 values of a parameter's slots, of all processes."""
    from torch.distributed.tensor import DTensor

    p = optimizer.param_groups[0]["params"][position]
    spec = spec_at(optimizer.rule, optimizer.form, optimizer.param_groups, 0, position)
    found = {}
    for slot, decoded in decode(spec, optimizer.state[p]).items():
        size = (p.to_local() if isinstance(p, DTensor) else p).numel()
        value = decoded.reshape(-1)[:size]  # of an odd number of 4-bit codes one is spare
        if isinstance(p, DTensor):
            local = torch.from_numpy(value).view(p.to_local().shape)
            stride = torch.empty(p.shape).stride()
            kept = dict(shape=p.shape, stride=stride, run_check=False)
            found[slot] = DTensor.from_local(local, p.device_mesh, p.placements, **kept)
        else:
            found[slot] = torch.from_numpy(value).view(p.shape)
    return {slot: whole(x) for slot, x in found.items()}


def assert_near(params: list[Any], alone: list[Any], exact: list[Any]) -> None:
    """Blocks that coincide: the bits of one process; else as near as it to float32 state."""
    for p, q, r in zip(params, alone, exact, strict=True):
        here, one, best = whole(p).float(), q.detach().float(), r.detach().float()
        if tuple(p.shape) == FEW:  # a norm of one block is summed in other parts
            torch.testing.assert_close(here, one, rtol=1e-6, atol=1e-6)
        elif tuple(p.shape) in (*SAME, EMPTY):
            assert torch.equal(here, one), (tuple(p.shape), float((here - one).abs().max()))
        else:
            gap, usual = (here - best).norm(), (one - best).norm()
            assert 0 < gap < NO_WORSE * usual, (tuple(p.shape), float(gap), float(usual))


OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("AdamW8bit", "float32", {}),
    ("AdamW8bit", "bfloat16", {"master_weights": "split"}),
    ("AdamW4bit", "float32", {"block_size": 128}),
    ("LAMB8bit", "float32", {}),
    ("LARS8bit", "float32", {}),
    ("LANS8bit", "float32", {}),
]


def steps_of_each_class(rank: int, world: int) -> None:
    for name, dtype, options in OPTIONS[:: world - 1]:
        made = getattr(optim, name)
        options = {"lr": 1e-2, **options}
        bag, alone, exact = (Bag(getattr(torch, dtype)) for _ in range(3))
        params = spread(bag)
        assert sum(p.to_local().numel() == 0 for p in params) == (rank > 0)
        train(made(params, **options), params, 0, 4)
        one = list(alone.parameters())
        train(made(one, **options), one, 0, 4)
        best = list(exact.parameters())
        train(made(best, **{**options, "state": "float32"}), best, 0, 4)
        assert_near(params, one, best)
    clipped_and_skipped(rank)


def clipped_and_skipped(rank: int) -> None:
    """The norm is of all parts, and what one process found holds for all."""
    bag, alone = Bag(), Bag()
    params, one = spread(bag), list(alone.parameters())
    optimizer, other = (optim.AdamW8bit(each, lr=1e-2, max_grad_norm=0.5) for each in (params, one))
    train(optimizer, params, 0, 2)
    train(other, one, 0, 2)
    assert optimizer.last_grad_norm == pytest.approx(other.last_grad_norm, rel=LAST_BIT)
    for p, q in zip(params, one, strict=True):
        if tuple(p.shape) in SAME:
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-6, atol=1e-7)
    before = [whole(p).clone() for p in params]
    optimizer.found_inf = torch.tensor(float(rank == 0))
    train(optimizer, params, 2, 3)
    assert optimizer.last_step_skipped
    assert all(torch.equal(whole(p), b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_fully_shard_steps_as_one_process_does(world: int, tmp_path: Path) -> None:
    run(steps_of_each_class, world, tmp_path)


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh())


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def train_replicas(rank: int, world: int) -> None:
    """The mean of two gradients is the same number in any order: so are all bits."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    alone = small()
    other = optim.AdamW8bit(alone.parameters(), lr=1e-2)
    plain = DistributedDataParallel(small(), gradient_as_bucket_view=True)
    zero = DistributedDataParallel(small())
    sharded = fully_shard(small())
    made = [
        (plain, optim.AdamW8bit(plain.parameters(), lr=1e-2)),
        (zero, ZeroRedundancyOptimizer(zero.parameters(), optim.AdamW8bit, lr=1e-2)),
        (sharded, optim.AdamW8bit(sharded.parameters(), lr=1e-2)),
    ]
    for step in range(4):
        for model, optimizer in made:
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for each in range(world):
            (alone(batch(step, each)).square().mean() / world).backward()
        other.step()
        other.zero_grad()
    for model, _ in made:
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(whole(p), q.detach()), type(model).__name__
    states_of_others_are_refused(made[2][1])
    resume_zero(rank, zero, made[1][1], alone, other)


def states_of_others_are_refused(sharded: Any) -> None:
    """Where parameters are spread, torch's state comes and goes by way of one process."""
    with pytest.raises(StateMismatch, match="param: expected a whole parameter"):
        optim.export_state_dict(sharded, "torch")
    theirs = torch.optim.AdamW(sharded.param_groups[0]["params"])
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    theirs.step()
    with pytest.raises(StateMismatch, match="parameter 0 of group 0: expected a whole parameter"):
        optim.from_torch(theirs)
    sharded.zero_grad()


def resume_zero(rank: int, model: nn.Module, zero: Any, alone: nn.Module, other: Any) -> None:
    """Its state is consolidated in one process, and read back by all."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero.consolidate_state_dict(to=0)
    found = [zero.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(found, src=0)
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW8bit, lr=9.0)
    resumed.load_state_dict(found[0])
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    resumed.step()
    other.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


def test_ddp_zero_and_fully_shard_train_as_one_process_does(tmp_path: Path) -> None:
    run(train_replicas, 2, tmp_path)


SAVED: list[tuple[str, dict[str, Any]]] = [
    ("AdamW8bit", {"lr": 1e-2}),
    ("AdamW4bit", {"lr": 1e-2}),
    ("LAMB", {"lr": 1e-2}),
]
FLAT = {
    name: StateDictOptions(flatten_optimizer_state_dict=name == "AdamW8bit") for name, _ in SAVED
}
HALF_STEP = {"AdamW8bit": 0.0071, "AdamW4bit": 0.15, "LAMB": 0.0}
"""Of the largest value of a block: half the widest gap between levels."""


def save(rank: int, world: int, folder: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as torch_state

    for name, options in SAVED:
        bag = Bag()
        params = spread(bag)
        optimizer = getattr(optim, name)(params, **options)
        train(optimizer, params, 0, 3)
        model, state = torch_state.get_state_dict(bag, optimizer, options=FLAT[name])
        checkpoint.save({"model": model, "optim": state}, checkpoint_id=f"{folder}/{name}")
        full = torch_state.StateDictOptions(full_state_dict=True)
        gathered = torch_state.get_optimizer_state_dict(bag, optimizer, options=full)
        held = [values(optimizer, i) for i in range(len(params))]
        train(optimizer, params, 3, 5)
        after = [whole(p) for p in params]
        if rank == 0:
            torch.save([held, after, gathered], f"{folder}/{name}.pt")


def load(rank: int, world: int, folder: str) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as torch_state

    for name, options in SAVED:
        held, after, gathered = torch.load(f"{folder}/{name}.pt", weights_only=True)
        bag = Bag()
        params = spread(bag)
        optimizer = getattr(optim, name)(params, **{**options, "lr": 7.0})
        model, state = torch_state.get_state_dict(bag, optimizer, options=FLAT[name])
        state = {"model": model, "optim": state}
        checkpoint.load(state, checkpoint_id=f"{folder}/{name}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_state.set_state_dict(
                bag,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
                options=FLAT[name],
            )
        moved = [str(w.message) for w in caught if w.category is StateReencoded]
        expected = world == 3 and name != "LAMB" and rank > 0
        assert len(moved) == expected, moved
        assert optimizer.param_groups[0]["lr"] == options["lr"]
        for i, p in enumerate(params):
            same = tuple(p.shape) in (*SAME, EMPTY) or world == 2 or name == "LAMB"
            bound = 0.0 if same else HALF_STEP[name]
            for slot, value in values(optimizer, i).items():
                gap = (value - held[i][slot]).abs().max()
                assert gap <= bound * held[i][slot].abs().max(), (tuple(p.shape), slot)
        train(optimizer, params, 3, 5)
        for p, q in zip(params, after, strict=True):
            if tuple(p.shape) in (*SAME, EMPTY) or world == 2:
                assert torch.equal(whole(p), q), (name, tuple(p.shape))
        check_full_state(bag, name, options, gathered, held)


def check_full_state(bag: Bag, name: str, options: Any, gathered: Any, held: Any) -> None:
    """A state that was gathered in one process goes out to any number again."""
    from torch.distributed.checkpoint import state_dict as torch_state

    optimizer = getattr(optim, name)(bag.parameters(), **options)
    optimizer.zero_grad()  # else torch does not begin a state for it to be read into
    full = torch_state.StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_state.set_optimizer_state_dict(bag, optimizer, gathered, options=full)
    for i, shape in enumerate(SHAPES):
        if shape in SAME:
            for slot, value in values(optimizer, i).items():
                assert torch.equal(value, held[i][slot]), (name, shape, slot)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two processes."""
    made = tmp_path_factory.mktemp("saved")
    run(save, 2, made, str(made))
    return made


@pytest.mark.parametrize("world", [2, 3])
def test_checkpoint_of_two_processes_goes_on(world: int, folder: Path) -> None:
    run(load, world, folder, str(folder))


@pytest.mark.parametrize("name, options", SAVED)
def test_checkpoint_of_two_processes_in_one(
    name: str, options: dict[str, Any], folder: Path
) -> None:
    """Gathered, it is read by an optimizer of whole parameters, to the bit where blocks coincide;
    and a state of one that is stored otherwise is refused."""
    from torch.distributed.checkpoint import state_dict as torch_state

    held, _, gathered = torch.load(f"{folder}/{name}.pt", weights_only=True)
    bag = Bag()
    optimizer = getattr(optim, name)(bag.parameters(), **options)
    full = torch_state.StateDictOptions(full_state_dict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_state.set_optimizer_state_dict(bag, optimizer, gathered, options=full)
    for i, shape in enumerate(SHAPES):
        bound = 0.0 if shape in SAME else HALF_STEP[name]
        for slot, value in values(optimizer, i).items():
            gap = (value - held[i][slot]).abs().max()
            assert gap <= bound * held[i][slot].abs().max(), (name, shape, slot)
    other = optim.AdamWFp8(Bag().parameters())
    with pytest.raises(StateMismatch, match="parameter 0 of group 0"):
        other.load_state_dict(gathered)
