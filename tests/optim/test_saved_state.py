"""State that survives: saved, loaded in another process, copied, pickled; and what is refused."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tvm_qopt import optim
from tvm_qopt.errors import ArtifactMissing, StateMismatch

SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("AdamW8bit", "float32", {}),
    ("AdamW8bit", "bfloat16", {}),
    ("AdamW8bit", "bfloat16", {"master_weights": "split"}),
    ("AdamW8bit", "bfloat16", {"master_weights": "float32"}),
    ("AdamW8bit", "bfloat16", {"bf16_stochastic_round": True}),
    ("AdamW4bit", "float32", {}),
    ("AdamWFp8", "float32", {}),
    ("AdamW", "float32", {}),
    ("AdamW", "bfloat16", {"master_weights": "split"}),
    ("LAMB8bit", "float32", {}),
    ("SGD8bit", "float32", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
]
IDS = [
    f"{name}-{dtype}-{'-'.join(map(str, options.values()))}" for name, dtype, options in SETTINGS
]


def model(dtype: str = "float32") -> list[Any]:
    torch.manual_seed(1)
    shapes = ((70, 70), (8229,), (7,), ())
    params = [torch.nn.Parameter(torch.randn(s).to(getattr(torch, dtype))) for s in shapes]
    turned = torch.randn(60, 90).to(getattr(torch, dtype)).t()
    return [*params, torch.nn.Parameter(turned)]


def train(optimizer: Any, params: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(tuple(p.shape), generator=generator).to(p.dtype)
        optimizer.step()


def bits(params: list[Any], optimizer: Any) -> list[Any]:
    found = []
    for p in params:
        state = optimizer.state[p]
        found += [(k, v if k == "step" else raw(v)) for k, v in sorted(state.items())]
        found.append(("param", raw(p)))
    return found


def raw(x: Any) -> bytes:
    return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def whole(name: str, dtype: str, options: dict[str, Any], steps: int = 10) -> list[Any]:
    params = model(dtype)
    optimizer = getattr(optim, name)(params, **options)
    train(optimizer, params, 0, steps)
    return bits(params, optimizer)


@pytest.mark.parametrize("name, dtype, options", SETTINGS, ids=IDS)
def test_saved_and_loaded_goes_on_to_the_bit(
    name: str, dtype: str, options: dict[str, Any]
) -> None:
    params = model(dtype)
    optimizer = getattr(optim, name)(params, **options)
    train(optimizer, params, 0, 5)
    file = io.BytesIO()
    torch.save({"params": [p.data for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = model(dtype)
    for p, data in zip(fresh, saved["params"], strict=True):
        p.data.copy_(data)
    other = getattr(optim, name)(fresh, **{**options, "lr": 123.0})
    other.load_state_dict(saved["optimizer"])
    kinds = {k: v.dtype for k, v in optimizer.state[params[0]].items() if torch.is_tensor(v)}
    loaded = {k: v.dtype for k, v in other.state[fresh[0]].items() if torch.is_tensor(v)}
    assert loaded == kinds and {torch.uint8, torch.float32} & {*kinds.values()}
    train(other, fresh, 5, 10)
    assert bits(fresh, other) == whole(name, dtype, options)


CHILD = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_saved_state import bits, model, train
from tvm_qopt import optim
import tvm_qopt
tvm_qopt.set_num_threads(2)
saved = torch.load({file!r}, weights_only=True)
params = model("bfloat16")
for p, data in zip(params, saved["params"]):
    p.data.copy_(data)
optimizer = optim.AdamW8bit(params, master_weights="split")
optimizer.load_state_dict(saved["optimizer"])
train(optimizer, params, 5, 10)
torch.save(bits(params, optimizer), {out!r})
"""


def test_another_process_with_other_threads_goes_on_to_the_bit(tmp_path: Path) -> None:
    import tvm_qopt

    before = tvm_qopt.get_num_threads()
    tvm_qopt.set_num_threads(1)
    try:
        params = model("bfloat16")
        optimizer = optim.AdamW8bit(params, master_weights="split")
        train(optimizer, params, 0, 5)
        file, out = tmp_path / "saved.pt", tmp_path / "bits.pt"
        saved = {"params": [p.data for p in params], "optimizer": optimizer.state_dict()}
        torch.save(saved, file)
        expected = whole("AdamW8bit", "bfloat16", {"master_weights": "split"})
    finally:
        tvm_qopt.set_num_threads(before)
    code = CHILD.format(tests=str(Path(__file__).parent), file=str(file), out=str(out))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.load(out, weights_only=True) == expected


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=("deep", "pickle")
)
@pytest.mark.parametrize("name, dtype, options", SETTINGS[::3], ids=IDS[::3])
def test_copies_go_on_alone(copied: Any, name: str, dtype: str, options: dict[str, Any]) -> None:
    params = model(dtype)
    optimizer = getattr(optim, name)(params, **options)
    train(optimizer, params, 0, 5)
    theirs, other = copied((params, optimizer))
    train(optimizer, params, 5, 10)
    train(other, theirs, 5, 10)
    assert bits(theirs, other) == bits(params, optimizer) == whole(name, dtype, options)
    assert type(other) is type(optimizer) and not other.last_step_skipped


def test_a_loaded_state_is_a_copy() -> None:
    params, others = model(), model()
    optimizer, other = optim.AdamW8bit(params), optim.AdamW8bit(others)
    train(optimizer, params, 0, 5)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(optimizer.state_dict())
    train(other, others, 5, 7)
    assert optimizer.state[params[0]]["step"] == 5
    train(optimizer, params, 5, 10)
    assert bits(params, optimizer) == whole("AdamW8bit", "float32", {})


def test_numbers_come_from_the_file_and_storage_from_the_optimizer() -> None:
    """As torch has it for lr, betas and the rest; a group's own parameters stay."""
    params = model()
    optimizer = optim.AdamW8bit(
        params, lr=0.5, betas=(0.1, 0.2), overrides={params[0]: {"lr": 7.0}}
    )
    train(optimizer, params, 0, 2)
    saved = optimizer.state_dict()
    other = optim.AdamW8bit(model(), state="dynamic8")  # another name of the same format
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["lr"], group["betas"], group["state"]) == (0.5, (0.1, 0.2), "dynamic8")
    assert group["overrides"] == {0: {"lr": 7.0}}
    assert group["params"][0] is not params[0]


def test_hooks_of_loading_and_saving_are_called() -> None:
    params, seen = model(), []
    optimizer = optim.AdamW8bit(params)
    train(optimizer, params, 0, 1)
    optimizer.register_state_dict_post_hook(lambda o, d: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, d: {**d, "state": {}})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loaded"] and not optimizer.state


def change(saved: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    state = {**saved["state"], 1: {**saved["state"][1], key: value}}
    return {**saved, "state": state}


def drop(saved: dict[str, Any], key: str) -> dict[str, Any]:
    kept = {k: v for k, v in saved["state"][1].items() if k != key}
    return {**saved, "state": {**saved["state"], 1: kept}}


BROKEN: list[tuple[Any, str]] = [
    (lambda s: drop(s, "exp_avg_scale"), "parameter 1 of group 0: expected exp_avg_scale"),
    (lambda s: drop(s, "step"), "parameter 1 of group 0: expected step"),
    (lambda s: drop(s, "format"), "another optimizer saved"),
    (lambda s: change(s, "step", 1.5), "expected step, a whole number"),
    (
        lambda s: change(s, "exp_avg_codes", torch.zeros(8229)),
        "expected exp_avg_codes: torch.uint8",
    ),
    (lambda s: change(s, "exp_avg_scale", torch.zeros(3)), r"shape \(33,\), got .*shape \(3,\)"),
    (lambda s: change(s, "exp_avg_scale", None), "got NoneType"),
    (lambda s: change(s, "extra", torch.zeros(3)), "got also extra"),
    (lambda s: {"state": s["state"]}, "'param_groups'"),
    (lambda s: {**s, "param_groups": []}, "param_groups: expected 1"),
    (lambda s: {**s, "state": {**s["state"], 99: {}}}, "parameter 99"),
    (
        lambda s: {**s, "param_groups": [{**s["param_groups"][0], "params": [0, 1]}]},
        r"param_groups: expected 1 of \[5\] parameters, got 1 of \[2\]",
    ),
]


@pytest.mark.parametrize("broken, says", BROKEN, ids=[says for _, says in BROKEN])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(broken: Any, says: str) -> None:
    params = model()
    optimizer = optim.AdamW8bit(params)
    train(optimizer, params, 0, 3)
    saved = broken(copy.deepcopy(optimizer.state_dict()))
    before = bits(params, optimizer)
    with pytest.raises(StateMismatch, match=says):
        optimizer.load_state_dict(saved)
    assert bits(params, optimizer) == before
    train(optimizer, params, 3, 10)
    assert bits(params, optimizer) == whole("AdamW8bit", "float32", {})


@pytest.mark.parametrize(
    "other, says",
    [
        ({"block_size": 64}, "blocks of 64, got .*blocks of 256"),
        ({"state": "linear8s+linear8u"}, "exp_avg in linear8s, .*got exp_avg in dynamic8s"),
        ({"state": "float32"}, "exp_avg in float32, .*got exp_avg in dynamic8s"),
        ({"min_8bit_size": 10_000}, "parameter 0 of group 0"),
    ],
    ids=str,
)
def test_a_state_of_another_format_is_refused(other: dict[str, Any], says: str) -> None:
    params = model()
    optimizer = optim.AdamW8bit(params)
    train(optimizer, params, 0, 1)
    with pytest.raises(StateMismatch, match=says):
        optim.AdamW8bit(model(), **other).load_state_dict(optimizer.state_dict())


def test_states_of_other_weights_and_orders_are_refused() -> None:
    params = model("bfloat16")
    optimizer = optim.AdamW8bit(params, master_weights="split")
    train(optimizer, params, 0, 1)
    with pytest.raises(StateMismatch, match="split weights of bfloat16"):
        optim.AdamW8bit(model("bfloat16")).load_state_dict(optimizer.state_dict())
    with pytest.raises(StateMismatch, match="split"):
        optim.AdamW8bit(model("float32")).load_state_dict(optimizer.state_dict())
    rows = model("bfloat16")
    rows[4] = torch.nn.Parameter(rows[4].detach().contiguous())
    other = optim.AdamW8bit(rows, master_weights="split")
    with pytest.raises(StateMismatch, match="memory order 1 0"):
        other.load_state_dict(optimizer.state_dict())


def test_codes_that_lost_their_memory_order_are_refused() -> None:
    """Some files keep values but not strides; blocks follow memory, so these would be misread."""
    params = model()
    optimizer = optim.AdamW8bit(params)
    train(optimizer, params, 0, 1)
    saved = optimizer.state_dict()
    codes = saved["state"][4]["exp_avg_codes"].contiguous()
    saved["state"][4] = {**saved["state"][4], "exp_avg_codes": codes}
    with pytest.raises(StateMismatch, match=r"exp_avg_codes with strides \(1, 90\), got \(60, 1\)"):
        optim.AdamW8bit(model()).load_state_dict(saved)


def test_saved_numbers_out_of_range_are_refused_and_change_nothing() -> None:
    params = model()
    optimizer = optim.AdamW8bit(params, overrides={params[0]: {"lr": 1.0}})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["overrides"] = {0: {"lr": 2.0}}
    saved["param_groups"][0]["betas"] = (2.0, 0.5)
    with pytest.raises(ValueError, match="betas"):
        optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert group["betas"] == (0.9, 0.999) and group["overrides"] == {0: {"lr": 1.0}}


def test_counts_of_another_block_size_are_kept_where_state_is_float32() -> None:
    params = model()
    optimizer = optim.AdamW(params)
    params[0].grad = torch.full_like(params[0], float("nan"))
    optimizer.step()
    other = optim.AdamW(model(), block_size=64)
    other.load_state_dict(optimizer.state_dict())
    assert other.nonfinite_count() == optimizer.nonfinite_count() == 4900


def test_what_is_not_in_the_store_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_QOPT_STORE", str(tmp_path))
    monkeypatch.setenv("TVM_QOPT_POLICY", "cached")
    params = model()
    optimizer = optim.AdamW8bit(params)
    before = [raw(p) for p in params]
    with pytest.raises(ArtifactMissing, match="tvm-qopt build adamw-dynamic8-b256") as found:
        train(optimizer, params, 0, 1)
    assert "adamw-float32-b256-p_f32-g_f32" in str(found.value) and "--store" in str(found.value)
    assert [raw(p) for p in params] == before
