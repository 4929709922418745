"""Checkpoints of torch, bitsandbytes and torchao without those packages: made by hand."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tvm_qopt import optim
from tvm_qopt.errors import HyperOutOfRange, StateMismatch, StateReencoded, ToolMissing, UnknownName
from tvm_qopt.formats import get_format

SIGNED, UNSIGNED = (
    torch.from_numpy(np.array(get_format(f).qmap)) for f in ("dynamic8s", "dynamic8u")
)
WRAPPED = "__bnb_optimizer_quant_state__"


def params() -> list[Any]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s)) for s in ((70, 128), (7,))]


def codes(shape: tuple[int, ...], block: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = -(-int(np.prod(shape)) // block)
    return torch.randint(0, 256, shape, dtype=torch.uint8), torch.rand(blocks) + 0.5


def of_bitsandbytes(block: int = 256, *, wrapped: bool = False, lr: float = 0.02) -> dict[str, Any]:
    """After five steps of its AdamW8bit, of `params`."""
    (s1, a1), (s2, a2) = codes((70, 128), block), codes((70, 128), block)
    big = {"state1": s1, "absmax1": a1, "qmap1": SIGNED.clone()}
    big |= {"state2": s2, "absmax2": a2, "qmap2": UNSIGNED.clone()}
    small = {"state1": torch.randn(7), "state2": torch.rand(7)}
    group = {"lr": lr, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1, "initial_lr": 0.5}
    group |= {"alpha": 0.0, "t_alpha": None, "t_beta3": None, "params": [0, 1]}
    states = [{WRAPPED: big} if wrapped else big, {WRAPPED: small} if wrapped else small]
    return {
        "state": {i: {"step": 5, **state} for i, state in enumerate(states)},
        "param_groups": [group],
    }


def loaded(saved: dict[str, Any], name: str = "AdamW8bit", **options: Any) -> Any:
    """Into a new optimizer; no warning is let through."""
    optimizer = getattr(optim, name)(params(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)
    return optimizer


def state_of(optimizer: Any, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = optimizer.state[optimizer.param_groups[0]["params"][number]]
    return found


def values(saved: dict[str, Any], number: int, block: int) -> torch.Tensor:
    """What state1 or state2 of the large parameter stands for."""
    state = saved["state"][0]
    scale = state[f"absmax{number}"].repeat_interleave(block)[: 70 * 128].view(70, 128)
    levels = state[f"qmap{number}"][state[f"state{number}"].long()]
    return (levels * scale).float()


@pytest.mark.parametrize("wrapped", [False, True])
def test_dynamic_codes_of_bitsandbytes_are_taken_as_they_are(wrapped: bool) -> None:
    saved = of_bitsandbytes(wrapped=wrapped)
    optimizer = loaded(saved, state="dynamic8")
    theirs = saved["state"][0].get(WRAPPED, saved["state"][0])
    ours = state_of(optimizer)
    for number, slot in enumerate(("exp_avg", "exp_avg_sq"), start=1):
        assert torch.equal(ours[f"{slot}_codes"], theirs[f"state{number}"])
        assert torch.equal(ours[f"{slot}_scale"], theirs[f"absmax{number}"])
        assert ours[f"{slot}_codes"].data_ptr() != theirs[f"state{number}"].data_ptr()
    small = saved["state"][1].get(WRAPPED, saved["state"][1])
    assert torch.equal(state_of(optimizer, 1)["exp_avg"], small["state1"])
    assert ours["step"] == state_of(optimizer, 1)["step"] == 5
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-7)
    assert group["initial_lr"] == 0.5 and not {"t_alpha", "alpha"} & group.keys()
    optimizer.load_state_dict(optimizer.state_dict())  # nothing is missing


def test_a_map_that_differs_in_the_last_place_is_the_same_map() -> None:
    saved = of_bitsandbytes()
    nudged = torch.nextafter(SIGNED, torch.full_like(SIGNED, 2.0))
    saved["state"][0]["qmap1"] = torch.where(SIGNED == 0, SIGNED, nudged)
    optimizer = loaded(saved)
    assert torch.equal(state_of(optimizer)["exp_avg_codes"], saved["state"][0]["state1"])


REENCODED: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 2048, "dynamic8s in blocks of 2048", "dynamic8s in blocks of 256"),
    ({"block_size": 64}, 256, "dynamic8s in blocks of 256", "dynamic8s in blocks of 64"),
    ({"state": "linear8s+linear8u"}, 256, "dynamic8s in", "linear8s in blocks of 256"),
]


@pytest.mark.parametrize("options, block, before, after", REENCODED, ids=str)
def test_other_levels_or_blocks_are_encoded_anew_with_a_word(
    options: dict[str, Any], block: int, before: str, after: str
) -> None:
    saved = of_bitsandbytes(block)
    optimizer = optim.AdamW8bit(params(), **options)
    with pytest.warns(StateReencoded, match=f"exp_avg from {before}.* to {after}") as found:
        optimizer.load_state_dict(saved)
    assert len(found) == 1 and "parameter 0 of group 0" in str(found[0].message)
    assert found[0].filename == __file__
    back = optim.export_state_dict(optimizer, "torch")["state"][0]
    for number, slot in enumerate(("exp_avg", "exp_avg_sq"), start=1):
        wanted = values(saved, number, block)
        assert float((back[slot] - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


def test_float32_state_takes_the_values_exactly() -> None:
    for block in (256, 2048):
        saved = of_bitsandbytes(block)
        ours = state_of(loaded(saved, "AdamW"))
        assert torch.equal(ours["exp_avg"], values(saved, 1, block))
        assert torch.equal(ours["exp_avg_sq"], values(saved, 2, block))


def test_a_map_of_its_own_is_read_by_that_map() -> None:
    """As that of 0.36 to 0.41, of whose 524 levels the first 256 were used."""
    saved = of_bitsandbytes()
    saved["state"][0]["qmap2"] = torch.linspace(0.0, 0.1, 524)
    assert torch.equal(state_of(loaded(saved, "AdamW"))["exp_avg_sq"], values(saved, 2, 256))
    with pytest.warns(StateReencoded, match="exp_avg_sq from a map of its own in blocks of 256"):
        optim.AdamW8bit(params()).load_state_dict(saved)


def test_a_parameter_in_another_memory_order_keeps_each_value_with_its_weight() -> None:
    saved = of_bitsandbytes()
    turned = [torch.nn.Parameter(torch.randn(128, 70).t()), torch.nn.Parameter(torch.ones(7))]
    optimizer = optim.AdamW(turned)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[turned[0]]["exp_avg"], values(saved, 1, 256))
    small = optim.AdamW8bit(turned)
    with pytest.warns(StateReencoded, match="memory order 1 0"):
        small.load_state_dict(saved)
    with pytest.warns(StateReencoded, match="memory order 1 0 to dynamic8s in blocks of 256"):
        back = optim.export_state_dict(small, "bitsandbytes")
    error = (values(back, 1, 256) - values(saved, 1, 256)).abs().max()
    assert float(error) < 0.04 * 1.5


class OptimState8bit:
    """What reading one needs of torchao's tensors."""

    def __init__(self, codes: Any, scale: Any, qmap: Any = None, *, per: int = 1) -> None:
        self.codes, self.scale, self.qmap, self.shape = codes, scale, qmap, (70, 128)
        self.block_size = codes.numel() * per // scale.numel()


class OptimState4bit(OptimState8bit):
    pass


class OptimStateFp8(OptimState8bit):
    pass


def of_torchao(kind: type) -> dict[str, Any]:
    per, block = (2, 128) if kind is OptimState4bit else (1, 256)
    shape = (70 * 64,) if per == 2 else (70, 128)
    state: dict[str, Any] = {"step": torch.tensor(5.0)}
    maps = ("dynamic4s", "linear4u") if per == 2 else ("dynamic8s", "dynamic8u")
    for slot, name in zip(("exp_avg", "exp_avg_sq"), maps, strict=True):
        each, scale = torch.randint(0, 126, shape, dtype=torch.uint8), torch.rand(8960 // block)
        if kind is OptimStateFp8:
            state[slot] = kind(each.view(torch.float8_e4m3fn), scale)
        else:
            state[slot] = kind(each, scale, torch.from_numpy(get_format(name).qmap), per=per)
    small = {"step": torch.tensor(5.0), "exp_avg": torch.randn(7), "exp_avg_sq": torch.rand(7)}
    group = {"lr": torch.tensor(0.25), "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1}
    group |= {"amsgrad": False, "params": [0, 1]}
    return {"state": {0: state, 1: small}, "param_groups": [group]}


KINDS = [(OptimState8bit, "AdamW8bit"), (OptimState4bit, "AdamW4bit"), (OptimStateFp8, "AdamWFp8")]


@pytest.mark.parametrize("kind, name", KINDS)
def test_codes_of_torchao_are_taken_as_they_are(kind: type, name: str) -> None:
    saved = of_torchao(kind)
    optimizer = loaded(saved, name)
    ours = state_of(optimizer)
    for slot in ("exp_avg", "exp_avg_sq"):
        theirs = saved["state"][0][slot]
        assert torch.equal(ours[f"{slot}_codes"], theirs.codes.view(torch.uint8))
        assert torch.equal(ours[f"{slot}_scale"], theirs.scale)
    assert torch.equal(state_of(optimizer, 1)["exp_avg"], saved["state"][1]["exp_avg"])
    assert ours["step"] == 5 and optimizer.param_groups[0]["lr"] == 0.25


def test_4_bits_are_read_with_the_even_element_in_the_high_half() -> None:
    saved = of_torchao(OptimState4bit)
    stored = saved["state"][0]["exp_avg"]
    stored.codes[0], stored.scale[0] = 0xF7, 0.5  # 1.0 and 0
    found = state_of(loaded(saved, "AdamW"))["exp_avg"].reshape(-1)
    assert found[:2].tolist() == [0.5, 0.0]
    with pytest.warns(StateReencoded, match="exp_avg from dynamic4s in blocks of 128 to dynamic8s"):
        optim.AdamW8bit(params()).load_state_dict(saved)


def trained(name: str, **options: Any) -> tuple[Any, list[Any]]:
    made = params()
    optimizer = getattr(torch.optim, name)(made, **options)
    for step in range(3):
        for p in made:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return optimizer, made


@pytest.mark.parametrize(
    "name, options",
    [
        ("AdamW", {"amsgrad": True}),
        ("Adam", {"weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
        ("Adagrad", {}),
    ],
)
def test_torchs_own_goes_in_and_out_unchanged(name: str, options: dict[str, Any]) -> None:
    theirs, _ = trained(name, **options)
    saved = theirs.state_dict()
    optimizer = loaded(saved, name)
    written = optim.export_state_dict(optimizer, "torch")
    assert written["param_groups"] == saved["param_groups"]
    for index, state in saved["state"].items():
        assert written["state"][index].keys() == state.keys()
        assert all(torch.equal(written["state"][index][key], x) for key, x in state.items())
    getattr(torch.optim, name)(params(), lr=9.0).load_state_dict(written)


def test_torchs_float32_is_encoded_with_a_word() -> None:
    theirs, made = trained("AdamW")
    optimizer = optim.AdamW8bit(params())
    with pytest.warns(StateReencoded, match="state of torch .*exp_avg from float32 to dynamic8s"):
        optimizer.load_state_dict(theirs.state_dict())
    assert torch.equal(state_of(optimizer, 1)["exp_avg"], theirs.state[made[1]]["exp_avg"])


def change(saved: dict[str, Any], **entries: Any) -> dict[str, Any]:
    saved["state"][0].update(entries)
    return saved


def without(saved: dict[str, Any], key: str) -> dict[str, Any]:
    del saved["state"][0][key]
    return saved


def damaged_scale(bad: float) -> dict[str, Any]:
    saved = of_bitsandbytes()
    saved["state"][0]["absmax1"][3] = bad
    return saved


BROKEN: list[tuple[str, Any, str]] = [
    ("AdamW8bit", lambda: without(of_bitsandbytes(), "absmax1"), "expected .*absmax1"),
    ("AdamW8bit", lambda: without(of_bitsandbytes(), "state2"), "expected state2, which has exp_"),
    ("AdamW8bit", lambda: without(of_bitsandbytes(), "step"), "expected step"),
    ("AdamW8bit", lambda: change(of_bitsandbytes(), step=1.5), "expected step, a whole"),
    ("AdamW8bit", lambda: change(of_bitsandbytes(), absmax1=torch.ones(9)), "9 for 8960"),
    ("AdamW8bit", lambda: change(of_bitsandbytes(), state1=torch.ones(8960)), r"got shape \(8960"),
    ("AdamW8bit", lambda: change(of_bitsandbytes(), qmap1=torch.ones(16)), "map of 256 levels"),
    ("AdamW8bit", lambda: change(of_bitsandbytes(), more=torch.ones(1)), "got also more"),
    ("AdamW8bit", lambda: damaged_scale(float("nan")), "scales from 0, finite, got nan"),
    ("AdamW", lambda: damaged_scale(-1.0), "scales from 0, finite, got -1"),
    (
        "AdamW",
        lambda: change(of_bitsandbytes(), state1=torch.full((70, 128), float("inf"))),
        "NaN or Inf in 8960",
    ),
    (
        "AdamW",
        lambda: change(of_bitsandbytes(), state2=-torch.ones(70, 128)),
        "exp_avg_sq from 0, got a negative value",
    ),
    (
        "AdamW8bit",
        lambda: change(of_bitsandbytes(), state1=torch.ones(128, 70).t()),
        r"row-major order, got strides \(1, 70\)",
    ),
    ("Lion8bit", of_bitsandbytes, "got also absmax2, qmap2, state2"),
    ("AdamWFp8", lambda: without(of_torchao(OptimStateFp8), "exp_avg"), "expected exp_avg"),
    (
        "AdamWFp8",
        lambda: change(
            of_torchao(OptimStateFp8),
            exp_avg=OptimStateFp8(
                torch.full((70, 128), 127, dtype=torch.uint8).view(torch.float8_e4m3fn),
                torch.ones(35),
            ),
        ),
        "finite values, got NaN",
    ),
    ("AdamW8bit", lambda: trained("SGD", momentum=0.9)[0].state_dict(), "also momentum_buffer"),
    ("AdamW8bit", lambda: trained("NAdam")[0].state_dict(), "also mu_product"),
]


@pytest.mark.parametrize("name, broken, says", BROKEN, ids=[says for _, _, says in BROKEN])
def test_what_does_not_fit_names_the_parameter_and_changes_nothing(
    name: str, broken: Any, says: str
) -> None:
    made = params()
    optimizer = getattr(optim, name)(made)
    for p in made:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateMismatch, match=f"parameter 0 of group 0.*{says}"):
        optimizer.load_state_dict(broken())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        for key, value in state.items():
            same = after["state"][index][key]
            assert torch.equal(same, value) if torch.is_tensor(value) else same == value


def test_updates_that_differ_behind_one_name_are_refused() -> None:
    with pytest.raises(StateMismatch, match="bitsandbytes' Adam decays the weights themselves"):
        optim.Adam8bit(params()).load_state_dict(of_bitsandbytes())
    for name in ("LAMB8bit", "LARS8bit", "LANS8bit"):
        with pytest.raises(StateMismatch, match="whose state bitsandbytes has: adagrad, adam"):
            getattr(optim, name)(params(), lr=1e-3).load_state_dict(of_bitsandbytes())
    with pytest.raises(HyperOutOfRange, match="betas: expected 3 numbers"):
        optim.AdEMAMix8bit(params()).load_state_dict(of_bitsandbytes())
    theirs, _ = trained("Adam", weight_decay=0.1)
    with pytest.raises(StateMismatch, match="weights that decay as AdamW has it"):
        optim.AdamW(params()).load_state_dict(theirs.state_dict())


def test_groups_before_the_first_step_are_known_by_their_entries() -> None:
    saved = {**of_bitsandbytes(), "state": {}}
    assert loaded(saved).param_groups[0]["betas"] == (0.8, 0.9)
    group = {"lr": 0.1, "betas": (0.7, 0.0), "eps": 0.0, "weight_decay": 0.0, "params": [0, 1]}
    optimizer = loaded({"state": {}, "param_groups": [group]}, "SGD8bit", lr=1.0)
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["lr"]) == (0.7, 0.1)


def test_exporting_to_bitsandbytes_and_reading_it_keeps_the_bits() -> None:
    saved = of_bitsandbytes()
    written = optim.export_state_dict(loaded(saved), "bitsandbytes")
    assert written["param_groups"] == saved["param_groups"]
    for index, state in saved["state"].items():
        for key, value in state.items():
            same = written["state"][index][key]
            assert torch.equal(same, value) if torch.is_tensor(value) else same == value


def test_what_the_other_lacks_cannot_be_exported() -> None:
    with pytest.raises(UnknownName, match="state_dict 'apex'; known: bitsandbytes, torch, torchao"):
        optim.export_state_dict(optim.AdamW(params()), "apex")
    with pytest.raises(StateMismatch, match=r"whose state torch has: .* got lion"):
        optim.export_state_dict(optim.Lion(params()), "torch")
    with pytest.raises(StateMismatch, match="maximize: expected False"):
        optim.export_state_dict(optim.AdamW(params(), maximize=True), "bitsandbytes")
    nesterov = optim.SGD8bit(params(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(StateMismatch, match="nesterov: expected False, as bitsandbytes"):
        optim.export_state_dict(nesterov, "bitsandbytes")
    made = params()
    own = optim.AdamW(made, overrides={made[1]: {"lr": 0.5}})
    with pytest.raises(HyperOutOfRange, match="parameter 1 of group 0: lr"):
        optim.export_state_dict(own, "torch")


def test_torchao_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.optim", "torchao.optim.subclass_8bit"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ToolMissing, match="pip install torchao"):
        optim.export_state_dict(loaded(of_torchao(OptimState8bit)), "torchao")
