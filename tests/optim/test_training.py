"""As a torch optimizer in a training loop: closures, groups, schedulers, hooks, parameters that
come late, are shared, move or are copied, gradients of every kind."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from tvm_qopt import optim
from tvm_qopt.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch, StateMismatch, UnknownName

Param = Any


def param(*shape: int) -> Param:
    return torch.nn.Parameter(torch.randn(*shape))


def grads(*params: Param) -> None:
    for p in params:
        p.grad = torch.randn_like(p)


def bits(optimizer: Any) -> list[bytes]:
    """Of all weights and states, in order."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            tensors = [p, *(state[k] for k in sorted(state) if k != "step")]
            found += [x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors]
            found.append(str(state.get("step")).encode())
    return found


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
        held = [x for x in optimizer.state[p].values() if isinstance(x, torch.Tensor)]
        assert row.state_bytes == sum(x.nbytes for x in held) and row.shape == tuple(p.shape)
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


def reference(steps: int, start: Any, gradients: list[Any], **options: Any) -> Any:
    p = torch.nn.Parameter(start.clone())
    optimizer = optim.AdamW8bit([p], **options)
    for step in range(steps):
        p.grad = gradients[step].clone()
        optimizer.step()
    return bits(optimizer)


@pytest.mark.parametrize(
    "move",
    [
        lambda o, p: setattr(p, "data", p.data.clone()),
        lambda o, p: [
            s.update({k: v.clone() for k, v in s.items() if torch.is_tensor(v)})
            for s in o.state.values()
        ],
        lambda o, p: [
            setattr(v, "data", v.data.clone())
            for s in o.state.values()
            for v in s.values()
            if torch.is_tensor(v)
        ],
        lambda o, p: o.state.update({p: dict(o.state[p])}),
        lambda o, p: setattr(
            o.state[p]["exp_avg_codes"], "data", o.state[p]["exp_avg_codes"].data.clone()
        ),
        lambda o, p: o.load_state_dict(o.state_dict()),
    ],
    ids=("weights", "states", "data of states", "the dict", "one tensor", "reload"),
)
def test_what_moves_between_steps_is_found_where_it_is(move: Any) -> None:
    """The old memory is overwritten: whoever still used it would be found out."""
    start, gradients = torch.randn(5000), [torch.randn(5000) for _ in range(4)]
    p = torch.nn.Parameter(start.clone())
    optimizer = optim.AdamW8bit([p])
    for step, gradient in enumerate(gradients):
        p.grad = gradient.clone()
        optimizer.step()
        if step in (0, 2):
            old = [p.data, *(v.data for v in optimizer.state[p].values() if torch.is_tensor(v))]
            pointers = [x.data_ptr() for x in old]
            move(optimizer, p)
            now = [p.data, *(v for v in optimizer.state[p].values() if torch.is_tensor(v))]
            for x, pointer, y in zip(old, pointers, now, strict=True):
                if y.data_ptr() != pointer:
                    x.fill_(77)
    assert bits(optimizer) == reference(4, start, gradients)


def test_weights_that_change_their_dtype_go_on_with_their_state() -> None:
    p = param(300)
    optimizer = optim.AdamW([p], lr=0.1)
    grads(p)
    optimizer.step()
    moment = optimizer.state[p]["exp_avg"].clone()
    p.grad = None
    p.data = p.data.bfloat16()
    p.grad = torch.zeros_like(p)
    before = p.detach().clone()
    optimizer.step()
    assert optimizer.state[p]["step"] == 2 and not torch.equal(p, before)
    assert torch.allclose(optimizer.state[p]["exp_avg"], 0.9 * moment)


def test_a_dtype_that_changes_where_the_memory_stays_is_noticed() -> None:
    """Of the gradient (a scaler that widens it), and of weights whose address is used again."""
    memory = torch.ones(600, dtype=torch.float16)
    p = torch.nn.Parameter(memory[:300])
    optimizer = optim.AdamW([p], lr=0.25, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad.data = torch.ones(300)
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((300,), 0.5, dtype=torch.float16))
    memory.view(torch.bfloat16)[:300] = 0.5
    p.data = memory.view(torch.bfloat16)[:300]
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((300,), 0.25, dtype=torch.bfloat16))


def test_weights_written_from_outside_are_taken_into_the_master() -> None:
    p = torch.nn.Parameter(torch.randn(5000).bfloat16())
    optimizer = optim.AdamW8bit([p], lr=1e-3, master_weights="float32")
    for _ in range(3):
        grads(p)
        optimizer.step()
    kept = optimizer.state[p]["param_master"].clone()
    with torch.no_grad():
        p[:2500] = 3.0
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    master = optimizer.state[p]["param_master"]
    assert torch.equal(p[:2500], torch.full_like(p[:2500], 3.0))
    assert torch.equal(master[:2500], torch.full((2500,), 3.0))
    assert torch.equal(master[2500:], kept[2500:])


def test_options_that_would_misread_a_state_are_refused_after_a_step() -> None:
    p = param(5000)
    optimizer = optim.AdamW8bit([p])
    grads(p)
    optimizer.step()
    before = bits(optimizer)
    for name, value in (("state", "linear8s+linear8u"), ("block_size", 64), ("state", "float32")):
        kept = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(StateMismatch, match="parameter 0 of group 0"):
            optimizer.step()
        optimizer.param_groups[0][name] = kept
    assert bits(optimizer) == before
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


def test_gradients_that_no_kernel_takes_are_refused_with_torchs_kinds() -> None:
    table = torch.nn.Embedding(10, 10, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = optim.AdamW8bit(table.parameters())
    sparse = table.weight.grad
    table.weight.grad = sparse.to_dense()
    optimizer.step()
    table.weight.grad = sparse
    with pytest.raises(RuntimeError, match="parameter 0 of group 0: expected a dense") as found:
        optimizer.step()
    assert isinstance(found.value, DeviceMismatch)
    for dtype in (torch.complex64, torch.float64):
        good, p = param(5000), torch.nn.Parameter(torch.ones(3, dtype=dtype))
        grads(good, p)
        optimizer = optim.AdamW8bit([good, p])
        before = good.detach().clone()
        with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")) as wrong:
            optimizer.step()
        assert isinstance(wrong.value, DtypeMismatch) and torch.equal(good, before)
    p = param(300)
    p.grad = p.data
    with pytest.raises(ShapeMismatch, match="parameter 0 of group 0"):
        optim.AdamW8bit([p]).step()
    p = torch.nn.Parameter(torch.ones(1).expand(300))
    p.grad = torch.ones(300)
    with pytest.raises(ShapeMismatch, match="each in its own place"):
        optim.AdamW8bit([p]).step()


def test_a_gradient_that_becomes_its_weight_is_found() -> None:
    p = param(300)
    optimizer = optim.AdamW8bit([p])
    grads(p)
    optimizer.step()
    p.grad = p.data
    with pytest.raises(ShapeMismatch, match="the memory of the weights"):
        optimizer.step()


def test_torch_is_told_that_weights_were_written() -> None:
    p = param(300)
    optimizer = optim.AdamW8bit([p])
    loss = (p * p).sum()
    grads(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_numbers_that_are_set_later_are_checked_before_anything_is_written() -> None:
    p, q = param(300), param(5000)
    optimizer = optim.AdamW8bit([{"params": [p]}, {"params": [q]}])
    grads(p, q)
    before = bits(optimizer)
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert [p.detach().numpy().tobytes(), q.detach().numpy().tobytes()] == [before[0], before[2]]


def test_frozen_weights_of_any_dtype_may_be_among_the_parameters() -> None:
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    p = param(300)
    optimizer = optim.AdamW8bit([frozen, p])
    grads(p)
    optimizer.step()
    assert frozen not in optimizer.state
    rows = optimizer.describe().rows
    assert rows[0].state_bytes == 0 and "none" in rows[0].spec and rows[1].state_bytes > 0


def test_lazily_negated_and_expanded_gradients_are_read_as_their_values() -> None:
    p, q = param(300), param(300)
    q.data.copy_(p.data)
    ours, twin = optim.AdamW([p]), optim.AdamW([q])
    values = torch.randn(300)
    lazy = torch.complex(values, values).conj().imag
    contiguous = torch._neg_view(values.clone())
    assert lazy.is_neg() and contiguous.is_neg() and contiguous.is_contiguous()
    for odd in (values, contiguous, lazy, torch.ones(1).expand(300), values):
        p.grad, q.grad = odd, odd.resolve_neg().contiguous().clone()
        ours.step()
        twin.step()
        assert torch.equal(p, q)


def test_one_nan_stops_one_weight_and_is_counted() -> None:
    p = torch.nn.Parameter(torch.ones(8192))
    optimizer = optim.AdamW8bit([p])
    for step in range(3):
        p.grad = torch.ones(8192)
        if step == 1:
            p.grad[7] = float("nan")
        optimizer.step()
    assert torch.isfinite(p).all() and optimizer.nonfinite_count() == 1
    assert float(p.detach()[7]) > float(p.detach()[8]) == float(p.detach()[255])
    lost = torch.nn.Parameter(torch.ones(300))
    lost.grad = torch.full((300,), float("nan"))
    optim.AdamW([lost], nonfinite="propagate").step()
    assert torch.isnan(lost).all()


def test_bfloat16_weights_stagnate_unless_something_is_done() -> None:
    ends = {}
    for name, options in {
        "plain": {},
        "float32": {"master_weights": "float32"},
        "split": {"master_weights": "split"},
        "stochastic": {"bf16_stochastic_round": True},
        "another seed": {"bf16_stochastic_round": True, "seed": 1},
    }.items():
        p = torch.nn.Parameter(torch.ones(8192, dtype=torch.bfloat16))
        optimizer = optim.AdamW8bit([p], lr=1e-3, weight_decay=0.0, **options)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends[name] = p.detach().float()
    assert torch.equal(ends["plain"], torch.ones(8192))
    assert float((ends["float32"] - 0.9).abs().max()) < 0.004
    assert torch.equal(ends["float32"], ends["split"])
    assert abs(float(ends["stochastic"].mean()) - 0.9) < 0.002
    assert not torch.equal(ends["stochastic"], ends["another seed"])


def test_two_parameters_round_by_numbers_of_their_own() -> None:
    p, q = (torch.nn.Parameter(torch.ones(8192, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = optim.AdamW8bit([p, q], bf16_stochastic_round=True)
    for each in (p, q):
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert not torch.equal(p, q)


def test_a_lamb_norm_beyond_float32_skips_its_own_tensor_and_is_seen() -> None:
    huge, p = torch.nn.Parameter(torch.full((300,), 1e30)), param(300)
    optimizer = optim.LAMB([huge, p])
    grads(huge, p)
    before = p.detach().clone()
    optimizer.step()
    assert optimizer.last_step_skipped and not torch.equal(p, before)
    assert torch.equal(huge, torch.full((300,), 1e30))
    assert (optimizer.state[huge]["step"], optimizer.state[p]["step"]) == (0, 1)
