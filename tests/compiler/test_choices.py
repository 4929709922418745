"""What a schedule leaves to the tuner: `Placement.choose`, and the decisions of `lower`."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm import tirx

from tvm_qopt.compiler.build import lower
from tvm_qopt.compiler.define import define
from tvm_qopt.compiler.schedule import MAIN, SERIAL, TAIL, Choice, Placement
from tvm_qopt.compiler.stages import order_by_pass
from tvm_qopt.errors import DecisionMismatch
from tvm_qopt.spec import KernelSpec, norms_entry
from tvm_qopt.targets import get_target

SPEC = KernelSpec.of("adamw")


def same(a: tirx.PrimFunc, b: tirx.PrimFunc) -> bool:
    return bool(tvm_ffi.structural_equal(a, b))


def placement(**decisions: int) -> Placement:
    return Placement.of(order_by_pass(define(SPEC)), MAIN, decisions)


def test_the_default_unless_a_decision_names_another() -> None:
    plain, decided = placement(), placement(lanes=64)
    assert plain.choose("lanes", (16, 32, 64), 16) == 16
    assert decided.choose("lanes", (16, 32, 64), 16) == 64
    assert decided.choose("unroll", (1, 2), 1) == 1
    assert list(decided.choices) == ["lanes", "unroll"]
    assert decided.choices["lanes"] == Choice((16, 32, 64), 64)


def test_a_choice_is_a_sampled_value_of_the_trace() -> None:
    decided = placement(lanes=32)
    decided.choose("lanes", (16, 32, 64), 16)
    (instruction,) = decided.sch.trace.insts
    assert "sample_categorical(candidates=[16, 32, 64]" in str(decided.sch.trace)
    assert int(decided.sch.trace.decisions[instruction]) == 1


@pytest.mark.parametrize("default", [8, 16])
def test_a_schedule_that_chooses_badly_is_caught(default: int) -> None:
    made = placement()
    with pytest.raises(ValueError, match="lanes: chosen twice, or its default"):
        made.choose("lanes", (16, 32), default)
        made.choose("lanes", (16, 32), default)


def test_decisions_that_a_schedule_does_not_know_are_refused() -> None:
    known = list(lower(SPEC, get_target("llvm-x86-64-v3"), MAIN).choices)
    with pytest.raises(DecisionMismatch, match=rf"{known[0]}: one of \(.*\), got 48"):
        lower(SPEC, get_target("llvm-x86-64-v3"), MAIN, {known[0]: 48})
    said = f"lines: no choice of this schedule; there are: {', '.join(known)}"
    with pytest.raises(DecisionMismatch, match=said):
        lower(SPEC, get_target("llvm-x86-64-v3"), MAIN, {"lines": 16})


@pytest.mark.parametrize("name", ["adamw-4bit-b64", "lamb-float32-b64", "sgd-bfloat16-b4096"])
def test_names_and_candidates_are_one_space_for_every_entry_and_decision(name: str) -> None:
    """So that decisions found for one entry point serve them all."""
    spec = KernelSpec.parse(name)
    space = {
        n: c.candidates for n, c in lower(spec, get_target("llvm-x86-64-v3"), MAIN).choices.items()
    }
    assert space
    norms = [norms_entry(number, MAIN) for number in range(len(spec.rule_.norms))]
    for end in (0, -1):
        decisions = {n: candidates[end] for n, candidates in space.items()}
        for entry in (MAIN, SERIAL, *norms):
            choices = lower(spec, get_target("llvm-x86-64-v3"), entry, decisions).choices
            assert {n: c.value for n, c in choices.items()} == decisions
            assert {n: c.candidates for n, c in choices.items()} == space


@pytest.mark.parametrize("name", list(lower(SPEC, get_target("llvm-x86-64-v3"), MAIN).choices))
def test_another_decision_is_another_kernel_but_for_the_tail(name: str) -> None:
    choice = lower(SPEC, get_target("llvm-x86-64-v3"), MAIN).choices[name]
    decided = {name: next(v for v in reversed(choice.candidates) if v != choice.value)}
    for entry in (MAIN, SERIAL, TAIL):
        default, tuned = (
            lower(SPEC, get_target("llvm-x86-64-v3"), entry, d).final for d in (None, decided)
        )
        assert same(default, tuned) == (entry == TAIL)
