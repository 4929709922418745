"""Which schedule a build takes: a tuning record that fits, or the default."""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi

from tvm_qopt.compiler.define import define
from tvm_qopt.compiler.intrinsics import PERMUTING
from tvm_qopt.errors import DecisionMismatch, RecordInvalid, StaleRecord
from tvm_qopt.records import TuningRecord, log_path, presets_for, read_log, record_folders
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, TargetPreset


@dataclass(frozen=True)
class Selection:
    """A record, or None for the default schedule, and why, in words.

    given: in place of both, decisions to try.
    """

    record: TuningRecord | None
    why: str
    given: Mapping[str, int] | None = None

    @property
    def decisions(self) -> Mapping[str, int]:
        if self.given is not None:
            return self.given
        return self.record.decisions if self.record else {}

    def as_manifest(self) -> dict[str, str]:
        if self.given is not None:
            return {"kind": "tried", "decisions": json.dumps(self.given)}
        if self.record is None:
            return {"kind": "default"}
        return {"kind": "tuned", "record": self.record.hash}


def workload_hash(spec: KernelSpec, kind: str) -> str:
    """Of the unscheduled definitions of the update and its norm passes, in the forms of all targets
    of a kind and for any number of blocks; the same in every process."""
    if kind == "llvm":
        forms: tuple[dict[str, bool], ...] = ({}, {"permutes": True})
    else:
        forms = ({"permutes": kind in PERMUTING, "predicates": True},)
    passes = (None, *range(len(spec.rule_.norms)))
    definitions = [define(spec, norms=n, **form) for n, form in itertools.product(passes, forms)]
    hashes = [tvm_ffi.structural_hash(definition) for definition in definitions]
    return hashlib.sha256(" ".join(map(str, hashes)).encode()).hexdigest()[:16]


def record_preset(target: TargetPreset) -> str:
    """The name under which a target's own records lie; this machine's is that of its CPU."""
    if target.name != NATIVE:
        return target.name
    return f"{target.kind}-{tvm.target.codegen.llvm_get_system_cpu()}"


def find(
    spec: KernelSpec, target: TargetPreset, try_: Callable[[Mapping[str, int]], object]
) -> Selection:
    """The best record for a spec and a target.

    The closest preset that has one; there the user's records before those that are shipped, then
    the least time.  `try_` raises DecisionMismatch for decisions that the schedule does not know.
    What does not fit the definition or the schedule of today is a StaleRecord warning.
    """
    presets = tuple(dict.fromkeys((record_preset(target), *presets_for(target))))
    for preset in presets:
        for path, record in _records(spec, target, preset):
            try:
                try_(record.decisions)
            except DecisionMismatch as error:
                _warn(path, spec, target, f"of another schedule ({error})")
                continue
            gain = record.default_seconds / record.seconds
            said = f"{record.ns:.3f} ns a parameter, {gain:.2f} times as fast as the default"
            return Selection(record, f"record {record.hash} of {preset}: {said} ({path})")
    return Selection(None, f"the default: no record of {', '.join(presets)} fits")


def _records(
    spec: KernelSpec, target: TargetPreset, preset: str
) -> Iterator[tuple[Path, TuningRecord]]:
    """The records of a preset that are of today's definition."""
    for folder in record_folders():
        path = log_path(folder, preset, spec.name)
        if not path.is_file():
            continue
        try:
            records = read_log(path)
        except RecordInvalid as error:
            warnings.warn(f"{error}; it is not used", StaleRecord, stacklevel=4)
            continue
        workload = workload_hash(spec, target.kind)
        same = [record for record in records if record.workload == workload]
        if len(same) < len(records):
            _warn(path, spec, target, f"of another definition (this one is {workload})")
        for record in sorted(same, key=lambda record: record.ns):
            yield path, record


def _warn(path: Path, spec: KernelSpec, target: TargetPreset, what: str) -> None:
    again = f"tvm-qopt tune {spec.name} --target {target.name}"
    warnings.warn(f"{path}: a record {what} is not used; run: {again}", StaleRecord, stacklevel=4)
