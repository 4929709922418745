"""The registry of schedules and what a schedule function is given.

A schedule places the stages of a definition for one kind of target; it sees names of stages and
passes, never rules or formats.  The same function is the default schedule and, through its
sampled decisions, the search space of the tuner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tvm import s_tir, tirx

from tvm_qopt.compiler.stages import Stage, passes, stages_of
from tvm_qopt.errors import DecisionMismatch, UnsupportedSpec
from tvm_qopt.spec import ANY as ANY
from tvm_qopt.spec import MAIN as MAIN
from tvm_qopt.spec import SERIAL as SERIAL
from tvm_qopt.spec import TAIL as TAIL


@dataclass(frozen=True)
class Choice:
    """What a schedule chose from, and what it took."""

    candidates: tuple[int, ...]
    value: int


@dataclass(frozen=True)
class Placement:
    """A schedule in the making: TVM's schedule, the stages by pass, the entry point it is for.

    reductions[i] start pass i + 1; per_block[i], elements[i] and packed[i] (two elements a byte)
    are the other stages of pass i.  decisions: name -> value, for choices that are not to be the
    default.  choices: what was chosen so far, by name, in order.
    """

    sch: s_tir.Schedule
    entry: str
    elements: tuple[tuple[str, ...], ...]
    packed: tuple[tuple[str, ...], ...]
    per_block: tuple[tuple[str, ...], ...]
    reductions: tuple[tuple[str, ...], ...]
    decisions: Mapping[str, int] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    @classmethod
    def of(
        cls, func: tirx.PrimFunc, entry: str, decisions: Mapping[str, int] | None = None
    ) -> Placement:
        stages = stages_of(func)
        number = passes(stages)
        count = max(number.values()) + 1

        def pick(wanted: Callable[[Stage], bool]) -> tuple[tuple[str, ...], ...]:
            return tuple(
                tuple(s.name for s in stages if number[s.name] == i and wanted(s))
                for i in range(count)
            )

        return cls(
            sch=s_tir.Schedule(func),
            entry=entry,
            elements=pick(lambda s: s.axes == 2 and not s.reduction and not s.packed),
            packed=pick(lambda s: s.packed),
            per_block=pick(lambda s: s.axes == 1),
            reductions=pick(lambda s: s.reduction)[1:],
            decisions=decisions or {},
        )

    def choose(self, name: str, candidates: tuple[int, ...], default: int) -> int:
        """A value that the tuner may change: the default, unless the decisions name another.

        In the trace it is a sampled value.  The names and candidates of an entry point must not
        depend on values chosen before: their product is the search space.  Every candidate must
        give a right kernel.  Raises DecisionMismatch for a value that is no candidate.
        """
        value = self.decisions.get(name, default)
        if name in self.choices or default not in candidates:
            raise ValueError(f"{name}: chosen twice, or its default {default} is no candidate")
        if value not in candidates:
            raise DecisionMismatch(f"{name}: one of {candidates}, got {value!r}")
        probabilities = [1 / len(candidates)] * len(candidates)
        self.sch.sample_categorical(
            list(candidates), probabilities, decision=candidates.index(value)
        )
        self.choices[name] = Choice(candidates, value)
        return value


@dataclass(frozen=True)
class ScheduleFunction:
    """One file of schedules/<kind>: where it applies, its entry points, and the function itself."""

    kinds: tuple[str, ...]
    pattern: str
    entries: tuple[str, ...]
    place: Callable[[Placement], None]


SCHEDULES: dict[tuple[str, str], ScheduleFunction] = {}


def schedule(
    *kinds: str, pattern: str, entries: tuple[str, ...]
) -> Callable[[Callable[[Placement], None]], Callable[[Placement], None]]:
    """Register the decorated function for target kinds and a pattern."""

    def register(place: Callable[[Placement], None]) -> Callable[[Placement], None]:
        for kind in kinds:
            if (kind, pattern) in SCHEDULES:
                raise ValueError(f"a schedule for {pattern} on {kind} is registered twice")
            SCHEDULES[kind, pattern] = ScheduleFunction(kinds, pattern, entries, place)
        return place

    return register


def get_schedule(kind: str, pattern: str) -> ScheduleFunction:
    import tvm_qopt.schedules  # noqa: F401  fills the registry

    if (kind, pattern) not in SCHEDULES:
        known = ", ".join(sorted({kind for kind, _ in SCHEDULES}))
        raise UnsupportedSpec(f"target: no schedule of {pattern} for {kind}; there are: {known}")
    return SCHEDULES[kind, pattern]


def apply_schedule(
    func: tirx.PrimFunc,
    kind: str,
    pattern: str,
    entry: str,
    decisions: Mapping[str, int] | None = None,
) -> Placement:
    """The definition of an entry point, scheduled; by default where no decisions are given."""
    placement = Placement.of(func, entry, decisions)
    get_schedule(kind, pattern).place(placement)
    return placement
