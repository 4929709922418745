"""The manifest of an artifact: all that the runtime needs to know of a kernel, as JSON.

May import layer 0 only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tvm_qopt.errors import ArtifactInvalid, UnsupportedSpec
from tvm_qopt.records import records_hash
from tvm_qopt.spec import KernelSpec, TensorSpec
from tvm_qopt.targets import TargetPreset
from tvm_qopt.version import TVM_VERSION, __version__

SCHEMA = 3
MANIFEST, LIBRARY, OBJECT = "manifest.json", "kernel.so", "kernel.o"
OPENCL_SOURCE, OPENCL_MANY, OPENCL_DOUBLES = "kernel.cl", "many.cl", "advance.cl"


@dataclass(frozen=True)
class Launch:
    """How an entry point is launched where the runtime does it itself: from source.

    kernel: its name in the file `source`.  arguments: in order; names of tensors, after each of
    which comes the place of its first element in the memory object, and of sizes (nb, B).
    threads: of a group, by axis.  blocks: quantisation blocks of a group; the last may have fewer.
    """

    kernel: str
    arguments: tuple[str, ...]
    threads: tuple[int, ...]
    blocks: int
    source: str = OPENCL_SOURCE


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    entries: the entry points of the module.  files: name -> SHA-256 of each file of the artifact.
    serial_below: elements of a step under which one thread is sooner done than others wake up.
    launches: entry point -> its launch, for kernels that are source (OpenCL); else empty.
    schedule: {"kind": "default"}, {"kind": "tuned", "record": hash} or, of the tuner's candidates,
    {"kind": "tried", "decisions": JSON}.
    """

    spec: str
    target: str
    kind: str
    machine: str
    features: tuple[str, ...]
    archs: tuple[str, ...]
    scalars: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    entries: tuple[str, ...]
    files: Mapping[str, str]
    key: str
    serial_below: int = 0
    workspace: int = 0
    launches: Mapping[str, Launch] = field(default_factory=dict)
    schedule: Mapping[str, str] = field(default_factory=lambda: {"kind": "default"})
    versions: Mapping[str, str] = field(
        default_factory=lambda: {"tvm": TVM_VERSION, "tvm_qopt": __version__}
    )
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Manifest:
        """Raises ArtifactInvalid, with `where` in its message, for anything but a manifest."""
        try:
            data = json.loads(text)
            schema = data["schema"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArtifactInvalid(f"{where}: not a manifest ({error!r})") from None
        if schema != SCHEMA:
            raise ArtifactInvalid(
                f"{where}: manifest of schema {schema!r}, tvm_qopt {__version__} reads {SCHEMA}; "
                "build it again with this version, or use the version that built it"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if set(data) != names:
            wrong = sorted(names ^ set(data))
            raise ArtifactInvalid(f"{where}: manifest with missing or unknown fields {wrong}")
        return _typed(data, where)


def _typed(data: dict[str, Any], where: str) -> Manifest:
    try:
        _check_types(data)
        data["tensors"] = tuple(
            TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"]
        )
        data["launches"] = {name: _launch(given) for name, given in data["launches"].items()}
        spec = KernelSpec.parse(data["spec"])
    except (TypeError, KeyError, ValueError) as error:
        raise ArtifactInvalid(f"{where}: damaged, or of rules unknown here ({error!r})") from None
    if (spec.tensors, spec.scalars) != (data["tensors"], data["scalars"]):
        raise ArtifactInvalid(
            f"{where}: {spec.name} takes other arguments in this version of tvm_qopt; build again"
        )
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in data["files"]):
        raise ArtifactInvalid(f"{where}: a file of the manifest lies outside the artifact")
    return Manifest(**data)


def _check_types(data: dict[str, Any]) -> None:
    """Raise TypeError for a field of another type; make tuples of the lists of texts."""
    for name in ("features", "archs", "scalars", "entries"):
        data[name] = tuple(checked(text, str, name) for text in checked(data[name], list, name))
    for name in ("spec", "target", "kind", "machine", "key"):
        checked(data[name], str, name)
    for name in ("serial_below", "workspace"):
        checked(data[name], int, name)
    for name in ("files", "schedule", "versions"):
        for text in checked(data[name], dict, name).values():
            checked(text, str, name)
    for launch in checked(data["launches"], dict, "launches").values():
        checked(launch, dict, "launches")


def _launch(given: dict[str, Any]) -> Launch:
    lists = {name: tuple(checked(given[name], list, name)) for name in ("arguments", "threads")}
    launch = Launch(**{**given, **lists})
    texts = ((launch.kernel, str), (launch.source, str))
    for value, kind in (*texts, (launch.blocks, int)):
        checked(value, kind, "launches")
    for values, kind in ((launch.arguments, str), (launch.threads, int)):
        for value in values:
            checked(value, kind, "launches")
    return launch


def checked(value: Any, kind: type, name: str) -> Any:
    """The value; raises TypeError unless it is of this very type."""
    if type(value) is not kind:
        raise TypeError(f"{name}: expected {kind.__name__}, got {value!r}")
    return value


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def artifact_key(spec: KernelSpec, target: TargetPreset) -> str:
    """What an artifact was made from, as a hash: the same key, the same kernel.

    Spec, target with all its attributes, the text of everything that makes kernels (and of the
    files that define the rule and the formats, which may be a user's), the tuning logs that may
    hold its schedule, TVM, and the schema.
    """
    own = [_source_of(f"rule {spec.rule}", spec.rule_.update)]
    own += [_source_of(f"format {format_.name}", type(format_)) for _, format_ in spec.slots]
    what = {
        "schema": SCHEMA,
        "spec": spec.name,
        "target": dataclasses.asdict(target),
        "tvm": TVM_VERSION,
        "tvm_qopt": __version__,
        "source": _source_hash(),
        "records": records_hash(spec.name, target),
        "definitions": _hash_files(Path(path) for path in sorted({str(path) for path in own})),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _source_of(what: str, definition: Any) -> str:
    file = inspect.getsourcefile(definition)
    if file is None or not Path(file).is_file():
        raise UnsupportedSpec(f"{what}: defined in no file; write it in a module and import that")
    return file


@cache
def _source_hash() -> str:
    """Of the description layer, the compiler and the schedules: what a kernel is made by."""
    package = Path(__file__).parent
    parts = (".", "rules", "formats", "compiler", "schedules", "schedules/llvm", "schedules/gpu")
    folders = [package / part for part in parts]
    return _hash_files(
        path for ending in ("py", "c") for f in folders for path in sorted(f.glob(f"*.{ending}"))
    )


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
