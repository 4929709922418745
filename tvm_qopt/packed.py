"""What the tuner packs for a machine without a compiler, and what comes back from there, as JSON.

FOLDER/pack.json lists the searches and their candidates, artifacts beside it; FOLDER/measured.json
has the seconds of each.  May import layer 0 only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_qopt.errors import ArtifactInvalid, RecordInvalid, StoreError
from tvm_qopt.manifest import MANIFEST, checked, sha256_of
from tvm_qopt.measure import Device
from tvm_qopt.records import check_seconds

SCHEMA = 1
PACK, MEASURED, SCRIPT = "pack.json", "measured.json", "measure.py"


@dataclass(frozen=True)
class Candidate:
    """A kernel to measure.

    kernel: a hash of its scheduled functions.  artifact: its folder in the pack, whose manifest has
    the hash `manifest`; None where it could not be built, which `error` tells.
    """

    decisions: dict[str, int]
    kernel: str
    artifact: str | None = None
    manifest: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Search:
    """The candidates of a spec, the default first.

    header: what the search is of.  exhausted: these are all kernels of the space.
    """

    header: Mapping[str, Any]
    seed: int
    exhausted: bool
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Pack:
    """target: the name of the preset.  searches: by the name of the spec."""

    target: str
    kind: str
    searches: Mapping[str, Search]
    schema: int = SCHEMA


@dataclass(frozen=True)
class Result:
    """Of a candidate: seconds of a step, by round of one interleaved run of all, or why none."""

    seconds: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Measured:
    """pack: the hash of pack.json.  results: by spec, in the order of its candidates."""

    pack: str
    device: Device
    results: Mapping[str, tuple[Result, ...]]
    schema: int = SCHEMA


def write_json(what: Pack | Measured, folder: Path) -> None:
    """Whole, or not at all."""
    path = folder / (PACK if isinstance(what, Pack) else MEASURED)
    written = path.with_suffix(".new")
    try:
        written.write_text(json.dumps(dataclasses.asdict(what), indent=1) + "\n", encoding="utf-8")
        written.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error}") from error


def read_pack(folder: Path) -> Pack:
    """Raises RecordInvalid."""

    def candidate(data: dict[str, Any]) -> Candidate:
        for value in checked(data["decisions"], dict, "decisions").values():
            checked(value, int, "decisions")
        return Candidate(**data)

    def search(data: dict[str, Any]) -> Search:
        if checked(data["header"]["elements"], int, "elements") < 1:
            raise ValueError("elements: expected at least 1")
        checked(data["seed"], int, "seed")
        candidates = tuple(map(candidate, checked(data["candidates"], list, "candidates")))
        if not candidates:
            raise ValueError("candidates: expected one at least")
        return Search(**{**data, "candidates": candidates})

    def pack(data: dict[str, Any]) -> Pack:
        for name in ("target", "kind"):
            checked(data[name], str, name)
        searches = {name: search(each) for name, each in data["searches"].items()}
        return Pack(**{**data, "searches": searches})

    found: Pack = _read(folder / PACK, pack, "not a folder that tvm-qopt tune --pack made")
    return found


def read_measured(folder: Path) -> Measured:
    """What was measured of the folder's pack.  Raises RecordInvalid."""

    def result(data: dict[str, Any]) -> Result:
        seconds, error = checked(data["seconds"], list, "seconds"), data["error"]
        for each in seconds:
            check_seconds("seconds", checked(each, float, "seconds"))
        if bool(seconds) == bool(error):
            raise ValueError("expected either seconds or an error")
        return Result(tuple(seconds), error and checked(error, str, "error"))

    def of_spec(data: list[Any]) -> tuple[Result, ...]:
        results = tuple(map(result, data))
        rounds = {len(each.seconds) for each in results if each.seconds}
        if len(rounds) > 1:
            raise ValueError(f"seconds: expected as many rounds of each, got {sorted(rounds)}")
        return results

    def measured(data: dict[str, Any]) -> Measured:
        for name in ("name", "code"):
            checked(data["device"][name], str, name)
        results = {name: of_spec(each) for name, each in data["results"].items()}
        return Measured(**{**data, "device": Device(**data["device"]), "results": results})

    first = f"run python {SCRIPT} of that folder on the machine first"
    found: Measured = _read(folder / MEASURED, measured, first)
    if found.pack != sha256_of(folder / PACK):
        raise RecordInvalid(f"{folder / MEASURED}: measured with another {PACK}; {first}")
    counts = {name: len(search.candidates) for name, search in read_pack(folder).searches.items()}
    if {name: len(results) for name, results in found.results.items()} != counts:
        raise RecordInvalid(f"{folder / MEASURED}: lacks candidates of {PACK}; {first}")
    return found


def _read(path: Path, make: Any, advice: str) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, this version reads {SCHEMA}")
        return make(data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RecordInvalid(f"{path}: cannot be read ({error!r}); {advice}") from None


def check_candidate(folder: Path, candidate: Candidate) -> Path:
    """The folder of a candidate's artifact; raises ArtifactInvalid where it is not what was packed.

    The artifact's other files are checked by its manifest, when it is loaded.
    """
    at = folder / str(candidate.artifact)
    manifest = at / MANIFEST
    if not manifest.is_file() or sha256_of(manifest) != candidate.manifest:
        raise ArtifactInvalid(f"{at}: missing, or not the one that was packed; pack again")
    return at
