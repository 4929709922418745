"""A step of all parameters: bind what is new or has moved, clip, and call each kernel once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tvm_qopt.errors import UnsupportedSpec
from tvm_qopt.optim.clip import GradNorm
from tvm_qopt.optim.entry import Entry, Held, check_kind, dtype_name, naming
from tvm_qopt.optim.forms import Form, Options, number_of, settings_of
from tvm_qopt.optim.options import STORAGE, options_of, spec_of
from tvm_qopt.optim.shards import add_up, dtensor_class, groups_of, local_as, part_number
from tvm_qopt.optim.slabs import mark
from tvm_qopt.optim.state import STEP, check_same_storage, tensors_of
from tvm_qopt.optim.steady import Steady
from tvm_qopt.rules import get_rule
from tvm_qopt.runtime.arrays import target_of, view_of
from tvm_qopt.runtime.batch import Batch
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.runtime.store import load_many
from tvm_qopt.spec import RNG, KernelSpec

CLIP_EPS = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm

Groups = Sequence[dict[str, Any]]
States = defaultdict[torch.Tensor, dict[str, Any]]


class Source:
    """Options that parameters share: those of a group, or those of one that overrides some."""

    def __init__(self, rule: str, form: Form, options: Options) -> None:
        self.form, self.structure = form, structure_of(form, options)
        declared = get_rule(rule)
        settings = {**declared.defaults, **settings_of(rule, form, options)}
        self._names = [h.name for h in declared.hyper(settings)]
        self.initial = {slot: float(options[name]) for slot, name in form.initial.items()}
        self.lanes: dict[tuple[str, torch.device], Lane] = {}

    def refresh(self, options: Options) -> None:
        """Take the numbers of this step."""
        self.hyper = {name: number_of(name, self.form, options) for name in self._names}
        self.maximize, self.max_grad_norm = options["maximize"], options["max_grad_norm"]
        self.seed = options["seed"]

    def lane(self, kernel: Kernel, device: torch.device) -> Lane:
        key = kernel.spec.name, device
        if key not in self.lanes:
            self.lanes[key] = Lane(self, Batch(kernel))
        return self.lanes[key]


def structure_of(form: Form, options: Options) -> tuple[Any, ...]:
    """What of the options decides which kernels are called; the rest are numbers."""
    named = [options[name] for name in (*STORAGE, "nonfinite", "settings")]
    switches = [options[name] for name, value in form.arguments.items() if isinstance(value, bool)]
    return (*named, *switches, form.settings(options))


class Lane:
    """The parameters of one source that one kernel updates."""

    def __init__(self, source: Source, batch: Batch) -> None:
        self.source, self.batch, self.initial = source, batch, source.initial
        spec = batch.kernel.spec
        self.names = tuple(t.name for t in tensors_of(spec))
        self.random = any(t.role == RNG for t in spec.tensors)


@dataclass
class Outcome:
    """skipped: a parameter with a gradient stayed as it was.  grad_norm: of all gradients, where
    one was asked for."""

    skipped: bool = False
    grad_norm: float | None = None


@dataclass(frozen=True)
class Fresh:
    """A parameter that is to be bound.  local: what is stepped, the part of this process (all of
    it, unless it is a DTensor).  index: its number in the whole optimizer."""

    param: torch.Tensor
    local: torch.Tensor
    grad: torch.Tensor
    source: Source
    spec: KernelSpec
    label: str
    index: int


@dataclass
class Job:
    """Parameters of one lane that are at the same step."""

    lane: Lane
    step: int
    entries: list[Entry]
    scalars: list[float] = field(default_factory=list)


def label_of(groups: Groups, number: int, position: int) -> str:
    """What errors and tables call a parameter."""
    group = groups[number]
    if "param_names" in group:
        return str(group["param_names"][position])
    return f"parameter {position} of group {number}"


class Engine:
    """What an optimizer remembers between steps; all of it can be made again from its state."""

    def __init__(self, rule: str, form: Form) -> None:
        self.rule, self.form = rule, form
        self.entries: dict[torch.Tensor, Entry] = {}
        self._sources: dict[Any, Source] = {}
        self._norm = GradNorm()
        self._steady: Steady | None = None
        self._tick = 0

    def step(self, groups: Groups, states: States, grad_scale: float) -> Outcome:
        """Update every parameter that has a gradient; nothing is written where this raises."""
        held = Held()
        lanes = self._collect(groups, states, held)
        outcome = Outcome()
        if any(lane.source.max_grad_norm is not None for lane in lanes):
            entries = [entry for each in lanes.values() for entry in each]
            outcome.grad_norm = self._norm.total(entries) / grad_scale
            outcome.skipped = not outcome.grad_norm < float("inf")
            if outcome.skipped:
                return outcome
        jobs = [job for lane, entries in lanes.items() for job in _jobs(lane, entries)]
        for job in jobs:
            source = job.lane.source
            job.scalars = job.lane.batch.scalars(
                source.hyper,
                step=job.step,
                grad_scale=grad_scale,
                gnorm_scale=_clip(source.max_grad_norm, outcome.grad_norm),
                maximize=source.maximize,
            )
        written: list[Entry] = []
        try:
            for job in jobs:
                written += job.entries
                outcome.skipped |= not self._run(job)
        finally:  # Ctrl-C comes when a job is done
            held.write_back()
            torch.autograd.graph.increment_version([entry.param for entry in written])
            for entry in written:
                entry.written()
        return outcome

    def _run(self, job: Job) -> bool:
        """Update the parameters of a job; returns whether all of them were."""
        lane, entries = job.lane, job.entries
        if lane.random:
            for entry in entries:
                entry.member.seed(lane.source.seed + entry.seed, job.step)
        for entry in entries:
            entry.state[STEP] = job.step  # ahead of what an interrupt may follow
        spread, device = [entry.groups for entry in entries], entries[0].param.device
        ran = lane.batch.step(
            [entry.member for entry in entries],
            job.scalars,
            reduce=partial(add_up, groups=spread, device=device),
        )
        for entry, runs in zip(entries, ran, strict=True):
            if not runs:
                entry.state[STEP] = job.step - 1
        return all(ran)

    def _collect(self, groups: Groups, states: States, held: Held) -> Mapping[Lane, list[Entry]]:
        """The parameters that have a gradient, by lane, each reading the gradient of now."""
        sources, steady = self._sources_of(groups), self._steady
        params = [param for group in groups for param in group["params"]]
        if steady is not None and sources == steady.sources and steady.take(params, states):
            return steady.lanes
        self._tick += 1
        lanes: dict[Lane, list[Entry]] = defaultdict(list)
        fresh = []
        for number, position, source, param, local, grad in _present(groups, sources, held):
            entry = self.entries.get(param)
            state = states.get(param)
            if (
                entry is None
                or state is None
                or entry.lane.source is not source
                or entry.param is not local
                or not entry.take(state, grad, held)
            ):
                fresh.append(self._fresh(groups, number, position, source, local, grad))
            elif entry.tick != self._tick:  # listed twice, it is stepped once
                entry.tick = self._tick
                lanes[entry.lane].append(entry)
        for entry, grad in self._bind(fresh, states):
            entry.tick = self._tick
            entry.take(entry.state, grad, held)
            lanes[entry.lane].append(entry)
        self._steady = Steady.of(sources, params, lanes)
        return lanes

    def _sources_of(self, groups: Groups) -> dict[Any, Source]:
        """The options of this step: of each group, by number, and of parameters with their own."""
        found: dict[Any, Source] = {}
        for number, group in enumerate(groups):
            found[number] = self._source(number, group)
            for position, own in group["overrides"].items():
                key = number, position
                found[key] = self._source(key, {**group, **own})
        return found

    def _source(self, key: Any, options: Options) -> Source:
        """The source of a group (or parameter), anew where what decides the kernels has changed."""
        source = self._sources.get(key)
        if source is None or source.structure != structure_of(self.form, options):
            source = self._sources[key] = Source(self.rule, self.form, options)
        source.refresh(options)
        return source

    def _fresh(
        self,
        groups: Groups,
        number: int,
        position: int,
        source: Source,
        local: torch.Tensor,
        grad: torch.Tensor,
    ) -> Fresh:
        """What a parameter is to be bound with; raises for what no kernel takes."""
        param = groups[number]["params"][position]
        label = label_of(groups, number, position)
        check_kind(label, local, grad)
        options = options_of(groups[number], position)
        dtypes = {"param": dtype_name(param.dtype), "grad": dtype_name(grad.dtype)}
        try:
            spec = spec_of(self.rule, self.form, options, size=param.numel(), **dtypes)
        except UnsupportedSpec as error:
            raise UnsupportedSpec(f"{label}: {error}") from error
        sizes = [len(group["params"]) for group in groups]
        index = sum(sizes[:number]) + position + sum(sizes) * part_number(param)
        return Fresh(param, local, grad, source, spec, label, index)

    def _bind(self, fresh: Sequence[Fresh], states: States) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Bind parameters to kernels; what the store lacks is built in one process a target."""
        targets = {each.param.device: "" for each in fresh}
        for each in fresh:
            with naming(each.label):
                targets[each.param.device] = target_of(view_of("param", each.local))
        kernels: dict[tuple[str, KernelSpec], Kernel] = {}
        for target in sorted(set(targets.values())):
            specs = {each.spec: None for each in fresh if targets[each.param.device] == target}
            for spec, kernel in zip(specs, load_many(list(specs), target=target), strict=True):
                kernels[target, spec] = kernel
        for each in fresh:
            param, before = each.param, self.entries.get(each.param)
            if before is not None and before.tick == self._tick:
                continue  # listed twice
            state = states[param]
            if before is not None and state:
                check_same_storage(each.label, before.spec, each.spec)
            lane = each.source.lane(kernels[targets[param.device], each.spec], param.device)
            groups = groups_of(each.label, param)
            entry = Entry(
                each.local,
                each.grad,
                state,
                lane,
                label=each.label,
                seed=each.index,
                groups=groups,
            )
            mark(state, entry.spec, param)
            self.entries[param] = entry
            yield entry, each.grad


def _present(
    groups: Groups, sources: Mapping[Any, Source], held: Held
) -> Iterator[tuple[int, int, Source, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Every parameter that has a gradient: its place, its options, itself, and what of it and its
    gradient is here."""
    dtensor = dtensor_class()
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            source = sources.get((number, position), sources[number])
            local = param
            if dtensor is not None and isinstance(param, dtensor):
                local, grad = param.to_local(), local_as(grad, param)
                held.copies.append(grad)
            yield number, position, source, param, local, grad


def _jobs(lane: Lane, entries: Sequence[Entry]) -> list[Job]:
    """The parameters of a lane by the number of their update."""
    by_step: dict[int, Job] = {}
    for entry in entries:
        step = entry.state[STEP] + 1
        if step not in by_step:
            by_step[step] = Job(lane, step, [])
        by_step[step].entries.append(entry)
    return list(by_step.values())


def _clip(limit: float | None, norm: float | None) -> float:
    """The factor of `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if limit is None or norm is None else min(1.0, limit / (norm + CLIP_EPS))
