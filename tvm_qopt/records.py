"""Tuning records and the files that hold them: the fastest decisions found for a spec on a machine.

`<folder>/<preset>/<spec name>.jsonl` has a record a line, the best first.  The preset is a target's
name, or for this machine's own CPU `llvm-` and LLVM's name of it (llvm-znver4).  May import layer 0
only: the runtime has to know which files a build will look at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_qopt.errors import RecordInvalid, StoreError
from tvm_qopt.targets import NATIVE, PRESETS, TargetPreset

SCHEMA = 1
ENVIRONMENT = "TVM_QOPT_RECORDS"
SHIPPED = Path(__file__).parent / "tuning_logs"


@dataclass(frozen=True)
class TuningRecord:
    """One line of a log.

    workload: hash of the definition that was tuned.  decisions: what the schedule is to choose, by
    name.  threads: of a step on a CPU, 0 on a GPU.  seconds, default_seconds: medians of a step of
    `elements` parameters with these decisions and with the default schedule, interleaved in one
    run.  trials: kernels timed to find it.
    """

    spec: str
    preset: str
    device: str
    tvm: str
    workload: str
    decisions: Mapping[str, int]
    elements: int
    threads: int
    seconds: float
    default_seconds: float
    trials: int
    seed: int
    date: str
    schema: int = SCHEMA

    @property
    def ns(self) -> float:
        """Nanoseconds a parameter."""
        return self.seconds / self.elements * 1e9

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, *, where: str) -> TuningRecord:
        """Raises RecordInvalid, with `where` in its message, for anything but a record."""
        try:
            data = json.loads(text)
            _check(data)
        except (ValueError, TypeError, RecursionError) as error:
            raise RecordInvalid(f"{where}: not a tuning record ({error})") from None
        return cls(**data)


def _check(data: Any) -> None:
    """Raise TypeError or ValueError for what is not the data of a record."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"expected an object of schema {SCHEMA}")
    kinds = {"decisions": dict, "seconds": float, "default_seconds": float}
    kinds |= dict.fromkeys(("elements", "threads", "trials", "seed", "schema"), int)
    names = [field.name for field in dataclasses.fields(TuningRecord)]
    if set(data) != set(names):
        raise ValueError(f"missing or unknown fields {sorted(set(names) ^ set(data))}")
    for name in names:
        kind = kinds.get(name, str)
        if type(data[name]) is not kind:
            raise TypeError(f"{name}: expected {kind.__name__}, got {data[name]!r}")
    for name, value in data["decisions"].items():
        if type(value) is not int:
            raise TypeError(f"decisions: {name}: expected int, got {value!r}")
    if data["elements"] < 1:
        raise ValueError("elements: expected at least 1")
    for name in ("seconds", "default_seconds"):
        check_seconds(name, data[name])


def check_seconds(name: str, value: float) -> None:
    """Raise ValueError for what no clock says."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")


def read_log(path: Path) -> list[TuningRecord]:
    """The records of a file, in its order.  Raises RecordInvalid, with the line's number."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return [TuningRecord.from_json(line, where=f"{path}:{n}") for n, line in numbered]


def log_path(folder: Path, preset: str, spec: str) -> Path:
    return folder / preset / f"{spec}.jsonl"


def save(record: TuningRecord, folder: Path) -> Path:
    """Add a record to its log, which becomes whole or stays as it was; the log's path.

    Other records of the same definition stay where they are slower: what claims to be faster was
    measured on another day, and lost today.
    """
    path = log_path(folder, record.preset, record.spec)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = read_log(path) if path.is_file() else []
        others = [
            old
            for old in before
            if old.workload == record.workload
            and old.decisions != record.decisions
            and old.ns > record.ns
        ]
        written = path.with_suffix(".new")
        written.write_text(
            "".join(f"{each.to_json()}\n" for each in (record, *others)), encoding="utf-8"
        )
        written.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: the tuning record cannot be written: {error}") from error
    return path


def user_folder() -> Path | None:
    """Where a user's own records lie: TVM_QOPT_RECORDS, else in the data folder of the user; None
    where there is no home folder."""
    given = os.environ.get(ENVIRONMENT)
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    try:
        return (Path(given) if given else Path(data, "tvm_qopt", "tuning_logs")).expanduser()
    except RuntimeError:
        return None


def record_folders() -> tuple[Path, ...]:
    """The user's own records, which go first, and those that are shipped."""
    own = user_folder()
    return (SHIPPED,) if own is None else (own, SHIPPED)


def presets_for(target: TargetPreset) -> tuple[str, ...]:
    """The presets whose records fit a target, the closest first: itself, then those that ask less
    of the CPU.  Without the name of the host's CPU, which only LLVM knows.

    A GPU's are of exactly its preset: what was best on sm_90 says little of the other cards that
    `cuda-all` has code for, and one schedule serves all of an artifact.
    """
    own = () if target.name == NATIVE else (target.name,)
    if not target.on_cpu:
        return own
    less = [
        preset
        for preset in PRESETS.values()
        if preset.on_cpu
        and preset.name != target.name
        and preset.machine == target.machine
        and set(preset.features) <= set(target.features)
    ]
    less.sort(key=lambda preset: len(preset.features), reverse=True)
    return (*own, *(preset.name for preset in less))


def records_hash(spec: str, target: TargetPreset) -> str:
    """Of the text of every log that a build of a spec for a target may look at."""
    digest = hashlib.sha256()
    for path in _logs_for(spec, target):
        digest.update(f"{path.parent.name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _logs_for(spec: str, target: TargetPreset) -> Iterator[Path]:
    """For this machine also the logs of CPUs by name, of which one may be it."""
    fitting = presets_for(target)
    for folder in filter(Path.is_dir, record_folders()):
        for path in sorted(folder.glob(f"{target.kind}*/{spec}.jsonl")):
            by_cpu = path.parent.name not in PRESETS
            if path.parent.name in fitting or (by_cpu and target.name == NATIVE):
                yield path
