"""Tensors that move, are replaced, change their dtype or are of a kind that no kernel takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import Param, bits, grads, param

from tvm_qopt import optim
from tvm_qopt.errors import DeviceMismatch, DtypeMismatch, ShapeMismatch, StateMismatch
from tvm_qopt.runtime.batch import Batch


def reference(steps: int, start: Any, gradients: list[Any], **options: Any) -> Any:
    p = torch.nn.Parameter(start.clone())
    optimizer = optim.AdamW8bit([p], **options)
    for step in range(steps):
        p.grad = gradients[step].clone()
        optimizer.step()
    return bits(optimizer)


def weights_move(optimizer: Any, p: Param) -> None:
    p.data = p.data.clone()


def entries_are_replaced(optimizer: Any, p: Param) -> None:
    """What people do who send states to another device and back."""
    state = optimizer.state[p]
    for name in [name for name, value in state.items() if torch.is_tensor(value)]:
        state[name] = state[name].clone()


def data_of_states_moves(optimizer: Any, p: Param) -> None:
    """What others do for the same."""
    for value in optimizer.state[p].values():
        if torch.is_tensor(value):
            value.data = value.data.clone()


def one_tensor_moves(optimizer: Any, p: Param) -> None:
    codes = optimizer.state[p]["exp_avg_codes"]
    codes.data = codes.data.clone()


def the_dict_is_replaced(optimizer: Any, p: Param) -> None:
    optimizer.state[p] = dict(optimizer.state[p])


def state_is_loaded(optimizer: Any, p: Param) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


MOVES = [
    weights_move,
    entries_are_replaced,
    data_of_states_moves,
    one_tensor_moves,
    the_dict_is_replaced,
    state_is_loaded,
]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
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


def test_weights_that_the_options_do_not_fit_are_named() -> None:
    p = torch.nn.Parameter(torch.ones(300, dtype=torch.float16))
    grads(p)
    optimizer = optim.AdamW8bit([("head.weight", p)], master_weights="split")
    with pytest.raises(ValueError, match=r"head\.weight: param: split weights"):
        optimizer.step()


def test_an_interrupt_leaves_weights_and_count_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the kernels of a group are done; what it comes after is a whole step."""
    p, gaps, late = param(5000), torch.nn.Parameter(torch.randn(40, 20)[:, ::2]), param(300)
    optimizer = optim.AdamW8bit([{"params": [p, gaps]}, {"params": [late]}])
    grads(p, gaps, late)
    optimizer.step()
    before = gaps.detach().clone(), late.detach().clone()
    original = Batch.step

    def interrupted(self: Batch, *args: Any, **options: Any) -> Any:
        ran = original(self, *args, **options)
        if self.kernel.spec.state_name == "float32":
            raise KeyboardInterrupt
        return ran

    monkeypatch.setattr(Batch, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    steps = [optimizer.state[each]["step"] for each in (p, gaps, late)]
    assert steps == [2, 2, 1]
    assert not torch.equal(gaps, before[0]) and torch.equal(late, before[1])


def test_a_gradient_that_becomes_its_weight_is_found() -> None:
    p = param(300)
    optimizer = optim.AdamW8bit([p])
    grads(p)
    optimizer.step()
    p.grad = p.data
    with pytest.raises(ShapeMismatch, match="the memory of the weights"):
        optimizer.step()


@pytest.mark.parametrize("alone", [True, False])
def test_memory_that_stays_but_is_another_tensor_is_found(alone: bool) -> None:
    """Cut or transposed in place, weights begin where they did; a freed gradient is nowhere."""

    def after(change: Any) -> None:
        p, other = param(20, 20), param(300)
        base = torch.zeros(600)
        optimizer = optim.AdamW([p] if alone else [p, other.requires_grad_()])
        grads(p)
        if not alone:
            other.data = base[::2]  # gaps: no step is taken for one like the last
            grads(other)
        for _ in range(2):
            optimizer.step()
        whole, before = p.data, p.detach().clone()
        change(p)
        with pytest.raises((ShapeMismatch, StateMismatch)):
            optimizer.step()
        assert torch.equal(whole, before)

    def cut(p: Param) -> None:
        p.data = p.data[:10]

    def transpose(p: Param) -> None:
        p.data = p.data.t()

    def free(p: Param) -> None:
        p.grad.untyped_storage().resize_(0)

    for change in (cut, transpose, free):
        after(change)


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


def one_has_no_gradient(optimizer: Any, params: list[Param]) -> None:
    params[1].grad = None


def one_gradient_is_transposed(optimizer: Any, params: list[Param]) -> None:
    params[0].grad = params[0].grad.t().contiguous().t()


def one_gradient_is_a_negative_view(optimizer: Any, params: list[Param]) -> None:
    params[0].grad = torch._neg_view(params[0].grad)


def one_has_options_of_its_own(optimizer: Any, params: list[Param]) -> None:
    optimizer.override(params[1], lr=0.5)


def parameters_change_places(optimizer: Any, params: list[Param]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def there_is_one_more(optimizer: Any, params: list[Param]) -> None:
    params.append(torch.nn.Parameter(torch.ones(300)))
    params[-1].grad = torch.ones(300)
    optimizer.add_param_group({"params": params[-1:], "lr": 0.1})


def weights_with_a_master_are_written(optimizer: Any, params: list[Param]) -> None:
    with torch.no_grad():
        params[2].fill_(3.0)


EVENTS = [
    one_has_no_gradient,
    one_gradient_is_transposed,
    one_gradient_is_a_negative_view,
    one_has_options_of_its_own,
    parameters_change_places,
    there_is_one_more,
    weights_with_a_master_are_written,
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_step_unlike_the_last_is_what_it_would_be_without_one(event: Any) -> None:
    """What an optimizer remembers of its last step changes no bit: here beside one that forgets."""
    found = []
    for forgets in (False, True):
        torch.manual_seed(1)
        half = torch.nn.Parameter(torch.randn(300).half())
        params = [param(70, 80), param(500), half, torch.nn.Parameter(torch.ones(2))]
        optimizer = optim.AdamW8bit(params[:3], master_weights="float32", lr=0.1)
        for step in range(5):
            grads(*params[:3])
            if step == 2:
                event(optimizer, params)
            if forgets:
                optimizer._bind_anew()
            optimizer.step()
        found.append(bits(optimizer))
    assert found[0] == found[1]
