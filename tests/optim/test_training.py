"""As a torch optimizer in a training loop: closures, groups, schedulers, hooks, parameters that
come late or are shared."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from loops import Param, grads, param

from tvm_qopt import optim
from tvm_qopt.errors import ShapeMismatch, UnknownName


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    p = param(5000)
    optimizer = optim.AdamW8bit([p], lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert optimizer.step() is None


def test_groups_have_options_of_their_own() -> None:
    a, b, c = param(300), param(300), param(5000)
    optimizer = optim.AdamW8bit(
        [{"params": [a], "lr": 0.1}, {"params": b, "weight_decay": 0.5}], lr=0.01
    )
    optimizer.add_param_group({"params": [c], "state": "float32", "betas": (0.5, 0.5)})
    before = [x.detach().clone() for x in (a, b)]
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.allclose(a, before[0] * (1 - 0.1 * 0.01) - 0.1, atol=1e-6)
    assert torch.allclose(b, before[1] * (1 - 0.01 * 0.5) - 0.01, atol=1e-6)
    assert optimizer.state[c]["exp_avg"].dtype == torch.float32
    assert torch.allclose(optimizer.state[c]["exp_avg"], torch.tensor(0.5))
    with pytest.raises(ValueError, match="eps"):
        optimizer.add_param_group({"params": [param(3)], "eps": -1.0})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [a]})
    assert len(optimizer.param_groups) == 3


def test_a_parameter_may_override_its_groups_options() -> None:
    first, second = param(5000), param(5000)
    optimizer = optim.AdamW8bit([first, second], overrides={first: {"state": "float32", "lr": 0.5}})
    optimizer.override(second, block_size=64)
    grads(first, second)
    before = first.detach().clone()
    optimizer.step()
    assert "exp_avg" in optimizer.state[first] and "exp_avg_codes" in optimizer.state[second]
    assert optimizer.state[second]["exp_avg_scale"].numel() == -(-5000 // 64)
    assert float((first.detach() - before).abs().max()) > 0.4
    with pytest.raises(UnknownName, match="learning_rate"):
        optimizer.override(first, learning_rate=1.0)
    with pytest.raises(ValueError, match="lr"):
        optimizer.override(first, lr=-1.0)
    with pytest.raises(ShapeMismatch, match="a parameter of this optimizer"):
        optimizer.override(param(3), lr=1.0)


def test_small_parameters_keep_float32_state_and_the_table_says_so() -> None:
    small, large = param(4095), param(4096)
    optimizer = optim.AdamW8bit([("norm.weight", small), ("linear.weight", large)])
    grads(small, large)
    optimizer.step()
    for p, row in zip((small, large), optimizer.describe().rows, strict=True):
        held = {n: x for n, x in optimizer.state[p].items() if isinstance(x, torch.Tensor)}
        del held["format"]  # the sentence that is saved
        assert row.state_bytes == sum(x.nbytes for x in held.values()) and row.shape == tuple(
            p.shape
        )
    assert "exp_avg" in optimizer.state[small] and "exp_avg_codes" in optimizer.state[large]
    table = optimizer.describe()
    assert [row.parameter for row in table.rows] == ["norm.weight", "linear.weight"]
    assert "adamw-dynamic8-b256-p_f32-g_f32" in str(table)
    assert f"{table.state_bytes:,} bytes of state" in str(table)
    assert table.float32_adamw_bytes == 8 * (4095 + 4096)
    everything = optim.AdamW8bit([param(10)], min_8bit_size=0)
    assert everything.describe().rows[0].spec.startswith("adamw-dynamic8")


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 0.1, cycle_momentum=True),
        lambda o: torch.optim.lr_scheduler.LinearLR(o),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    ],
)
@pytest.mark.parametrize("tensor", (False, True))
def test_schedulers_do_to_ours_what_they_do_to_torchs(make: Any, tensor: bool) -> None:
    ours, theirs = param(300), param(300)
    theirs.data.copy_(ours.data)

    def run(optimizer: Any, p: Param) -> None:
        schedule = make(optimizer)
        torch.manual_seed(5)
        for _ in range(6):
            grads(p)
            optimizer.step()
            schedule.step()

    lr = torch.tensor(0.01) if tensor else 0.01
    run(optim.AdamW([ours], lr=copy.deepcopy(lr)), ours)
    run(torch.optim.AdamW([theirs], lr=copy.deepcopy(lr)), theirs)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_momentum_schedules_and_a_plateau_are_followed() -> None:
    ours, theirs = param(300), param(300)
    theirs.data.copy_(ours.data)
    for optimizer, p in (
        (optim.SGD([ours], lr=0.1, momentum=0.9), ours),
        (torch.optim.SGD([theirs], lr=0.1, momentum=0.9), theirs),
    ):
        cycle = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 0.1, step_size_up=2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        torch.manual_seed(5)
        for _ in range(6):
            grads(p)
            optimizer.step()
            cycle.step()
            plateau.step(1.0)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_step_hooks_are_called_around_a_step() -> None:
    p, seen = param(300), []
    optimizer = optim.AdamW8bit([p])
    start = p.detach().clone()
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.equal(p, start)))
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.equal(p, start)))
    grads(p)
    optimizer.step()
    assert seen == [True, False]


def test_parameters_without_a_gradient_wait_and_count_their_own_steps() -> None:
    early, late = param(5000), param(5000)
    optimizer = optim.AdamW8bit([early, late], lr=0.1)
    grads(early)
    optimizer.step()
    assert late not in optimizer.state
    late.grad = torch.ones_like(late)
    grads(early)
    before = late.detach().clone()
    optimizer.step()
    assert (optimizer.state[early]["step"], optimizer.state[late]["step"]) == (2, 1)
    assert torch.allclose(late, before * (1 - 0.1 * 0.01) - 0.1, atol=1e-5)  # its own t = 1


@pytest.mark.parametrize("set_to_none", (True, False))
def test_gradients_are_zeroed_and_none_is_kept_alive(set_to_none: bool) -> None:
    import weakref

    p = param(5000)
    optimizer = optim.AdamW8bit([p])
    for _ in range(3):
        (p * torch.randn_like(p)).sum().backward()
        kept = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert (p.grad is None) == set_to_none
    assert (kept() is None) == set_to_none


def test_accumulated_gradients_are_one_gradient() -> None:
    one, two = param(5000), param(5000)
    two.data.copy_(one.data)
    x = torch.randn(2, 5000)
    first, second = optim.AdamW8bit([one]), optim.AdamW8bit([two])
    for _ in range(2):
        for row in x:
            (one * row).sum().backward()
        (two * x.sum(0)).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    assert torch.equal(one, two)


def test_a_step_in_the_backward_pass() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Linear(70, 70))
    twin = copy.deepcopy(model)
    whole = optim.AdamW8bit(twin.parameters())
    each = {p: optim.AdamW8bit([p]) for p in model.parameters()}

    def hook(p: Param) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        x = torch.randn(4, 70)
        model(x).square().sum().backward()
        twin(x).square().sum().backward()
        whole.step()
        whole.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_shared_parameters_are_stepped_once_and_duplicates_too() -> None:
    p, q = param(5000), param(5000)
    q.data.copy_(p.data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about duplicates
        twice = optim.AdamW8bit([p, p])
    once = optim.AdamW8bit([q])
    for _ in range(2):
        grads(p)
        q.grad = p.grad.clone()
        twice.step()
        once.step()
    assert torch.equal(p, q)


def test_a_compiled_model_trains() -> None:
    model = torch.nn.Linear(70, 70)
    optimizer = optim.AdamW8bit(model.parameters(), lr=0.05)
    compiled = torch.compile(model, backend="aot_eager")  # inductor needs minutes
    step = torch.compile(optimizer.step, backend="aot_eager")
    x, losses = torch.randn(8, 70), []
    for _ in range(10):
        loss = compiled(x).square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.state[model.weight]["step"] == 10
