"""Builds candidate kernels and times, compares and checks them in processes of their own, here or
on RPC servers: a kernel that crashes or hangs costs one result.

What runs is the very kernel that a user gets: for any number of blocks, in place, with the entry
points of norm passes.  MetaSchedule's runners have none of these; nor do its pools survive Ctrl-C
(their threads race for the processes and deadlock), and its builder starts them anew for each
batch.  So this rests on what they are made of: TVM's workers, time evaluator, RPC tracker and
servers.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import rpc

from tvm_qopt.compiler.build import build, linked_by, lower, tvm_target
from tvm_qopt.compiler.crew import Crew, Outcome, last_line
from tvm_qopt.compiler.cuda import choose_compiler
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.errors import BuildError, ToolMissing
from tvm_qopt.manifest import LIBRARY
from tvm_qopt.measure import (
    REPEAT_SECONDS,
    Array,
    Call,
    Device,
    Machine,
    Step,
    describe,
    interleave,
    make_calls,
    time_step,
)
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import TargetPreset, cpu_model, find_linker
from tvm_qopt.verify import fault

SHARED = -3  # TVM's affinity mode that pins no thread: as the runtime has it
BUILD_SECONDS = 600.0  # that a build may take
RUN_SECONDS = 120.0  # that a check or a comparison may take
CONNECT_SECONDS = 5.0
CPU = "cpu"


# --- TVM's machines ---


@dataclass(frozen=True)
class TvmSession:
    """A device of TVM's, here or on a server.

    load_file: loads a shared library under a name that no other one has.  function: finds a
    function of TVM's there.  cpu: what the CPU is called, None for LLVM's name of it.  suffix: of
    the device's name.
    """

    load_file: Callable[[str, str], Any]
    device: Any
    function: Callable[[str], Any]
    cpu: str | None = None
    suffix: str = ""

    def load(self, path: str) -> Any:
        """A shared library, or an artifact's."""
        at = Path(path)
        if at.is_dir():
            return self.load_file(str(at / LIBRARY), f"{at.name}.so")
        return self.load_file(path, at.name)

    def put(self, array: Array) -> Any:
        return tvm.runtime.tensor(array, device=self.device)

    def get(self, tensor: Any) -> Array:
        values: Array = tensor.numpy()
        return values

    def call(self, kernel: Any, entry: str, tensors: Sequence[Any]) -> None:
        kernel[entry](*tensors)

    def seconds(
        self, kernel: Any, entries: Sequence[str], tensors: Sequence[Any], repeat: int
    ) -> list[float]:
        least, runs = math.ceil(1e3 * REPEAT_SECONDS), []
        for entry in entries:
            evaluate = kernel.time_evaluator(
                entry, self.device, number=1, repeat=repeat, min_repeat_ms=least
            )
            runs.append(evaluate(*tensors).results)
        return [float(sum(times)) for times in zip(*runs, strict=True)]

    def describe(self) -> Device | None:
        if not self.device.exist:
            return None
        if self.device.dlpack_device_type() % RPC_MASK == tvm.cpu(0).dlpack_device_type():
            code = str(self.function("target.llvm_get_system_cpu")())
            threads = int(self.function("runtime.NumThreads")())
            return Device((self.cpu or code) + self.suffix, code, threads)
        arch = "sm_" + str(self.device.compute_version).replace(".", "")
        return Device(f"{self.device.device_name}{self.suffix}", arch)


RPC_MASK = 128  # what TVM adds to the type of a device on a server


@dataclass(frozen=True)
class Here:
    """This machine: "cpu" or "cuda"."""

    device: str = CPU

    def count(self) -> int:
        return 1

    def open(self, seconds: float) -> TvmSession:
        def load(path: str, name: str) -> Any:
            return tvm.runtime.load_module(path)

        find = tvm_ffi.get_global_func
        return TvmSession(load, tvm.device(self.device, 0), find, cpu_model())


@dataclass(frozen=True)
class Remote:
    """The servers of a key, by the tracker that knows them."""

    host: str
    port: int
    key: str
    device: str = CPU

    def count(self) -> int:
        """How many servers there are.  Raises ToolMissing where no tracker answers, or none is."""
        where = f"{self.host}:{self.port}"
        try:
            socket.create_connection((self.host, self.port), timeout=CONNECT_SECONDS).close()
            known = rpc.connect_tracker(self.host, self.port).summary()["server_info"]
        except (OSError, RuntimeError) as error:
            start = f"python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {self.port}"
            raise ToolMissing(
                f"--rpc: no tracker at {where} ({last_line(error)}); start it there: {start}"
            ) from error
        count = sum(str(server["key"]) == f"server:{self.key}" for server in known)
        if not count:
            start = f"python -m tvm.exec.rpc_server --tracker {where} --key {self.key}"
            raise ToolMissing(
                f"--key: the tracker has no server {self.key!r}; on each machine: {start}"
            )
        return count

    def open(self, seconds: float) -> TvmSession:
        """Waits for a server that is free; the server ends the session after some seconds."""
        tracker = rpc.connect_tracker(self.host, self.port)
        session = tracker.request(self.key, session_timeout=math.ceil(seconds))

        def load(path: str, name: str) -> Any:
            session.upload(path, target=name)
            return session.load_module(name)

        device = session.device(self.device, 0)
        return TvmSession(load, device, session.get_function, suffix=" (RPC)")


# --- processes that build, and processes that run ---


class Builders:
    """Builds candidates in processes, as many as there are processors.  Close it."""

    def __init__(self, spec: KernelSpec, preset: TargetPreset, modules: Sequence[str]) -> None:
        """modules: what defines the spec's rule and formats outside this package.

        Raises ToolMissing where something is missing that every build needs.
        """
        linker = find_linker(preset)
        if linker is None:
            raise ToolMissing(f"no linker for {preset.name}: {preset.linker} is not installed")
        if preset.kind == "cuda":
            choose_compiler()
        self._build = partial(build_candidate, spec.name, preset, linker)
        self._crew = Crew(len(os.sched_getaffinity(0)), prepared(modules))

    def close(self) -> None:
        self._crew.close()

    def build(
        self, points: Sequence[Mapping[str, int]], entries: Sequence[str], paths: Sequence[Path]
    ) -> list[Outcome]:
        """The path of each point's kernel: for CPUs a library with some entry points, for GPUs an
        artifact with all."""
        tasks = [(dict(p), tuple(entries), path) for p, path in zip(points, paths, strict=True)]
        return self._crew.map(self._build, tasks, BUILD_SECONDS)


class Laboratory:
    """Builds and runs kernels for a target.  Close it: it has a temporary folder and processes."""

    def __init__(
        self,
        spec: KernelSpec,
        preset: TargetPreset,
        step: Step,
        machine: Machine,
        *,
        threads: int,
        seconds: float,
        modules: Sequence[str] = (),
    ) -> None:
        """threads: of a step, here (a server has its own).  seconds: that a trial may take."""
        self.preset, self.step, self.machine, self._seconds = preset, step, machine, seconds
        self.servers = machine.count()
        self._builders = Builders(spec, preset, modules)
        self._folder = tempfile.TemporaryDirectory(prefix="tvm_qopt-tune-")
        self._runners = Crew(self.servers, prepared(modules, threads))
        self._built: dict[tuple[Any, ...], Outcome] = {}

    def close(self) -> None:
        self._builders.close()
        self._runners.close()
        self._folder.cleanup()

    def build(self, points: Sequence[Mapping[str, int]], entries: Sequence[str]) -> list[Outcome]:
        """The path of each point's kernel; one that was built before is not built again."""
        parts = tuple(entries) if self.preset.on_cpu else ()  # an artifact has all
        names = [(*sorted(point.items()), parts) for point in points]
        wanted = dict(zip(names, points, strict=True))
        new = {name: point for name, point in wanted.items() if name not in self._built}
        first = len(self._built)
        paths = [Path(self._folder.name) / f"kernel{first + i}" for i in range(len(new))]
        built = self._builders.build(list(new.values()), entries, paths)
        self._built |= zip(new, built, strict=True)
        return [self._built[name] for name in names]

    def time(self, paths: Sequence[str]) -> list[Outcome]:
        """Seconds of the repeats of a step, for each kernel; on all servers at once."""
        tasks = [(self.machine, path, self.step, self._seconds) for path in paths]
        return self._runners.map(time_step, tasks, self._seconds)

    def interleave(self, paths: Sequence[str], rounds: int) -> npt.NDArray[np.float64]:
        """Seconds of a step, (rounds, kernels): each once a round, so that a busy moment falls on
        all alike; on one server.  Raises BuildError."""
        return np.array(self._run(interleave, paths, self.step, rounds))

    def fault(self, spec: KernelSpec, parts: Sequence[str], path: str) -> str | None:
        """What is wrong with a kernel; None if nothing is."""
        try:
            return fault(spec, parts, lambda calls: self.call(path, calls))
        except BuildError as error:
            return str(error)

    def call(self, path: str, calls: Sequence[Call]) -> list[list[Array]]:
        """The arguments of each call after it.  Raises BuildError."""
        found: list[list[Array]] = self._run(make_calls, path, calls)
        return found

    def describe(self) -> Device:
        """What kernels run on.  Raises ToolMissing where there is no such device."""
        found: Device | None = self._run(describe)
        if found is None:
            kind = self.preset.kind
            raise ToolMissing(
                f"--target: {self.preset.name} needs a device of {kind}, and there is none where "
                "kernels are to run (or TVM does not find its driver)"
            )
        return found

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        (outcome,) = self._runners.map(
            function, [(self.machine, *arguments, RUN_SECONDS)], RUN_SECONDS
        )
        if outcome.error:
            raise BuildError(f"{self.preset.name}: {outcome.error}")
        return outcome.value


# --- in the other process ---


def prepared(modules: Sequence[str], threads: int | None = None) -> Callable[[], None]:
    """What another process does first: import modules where this one finds them, and have as many
    threads as a step has."""
    path = [os.path.abspath(folder) for folder in sys.path] if modules else []
    return partial(prepare, tuple(modules), path, threads)


def prepare(modules: Sequence[str], path: Sequence[str], threads: int | None) -> None:
    sys.path.extend(folder for folder in path if folder not in sys.path)
    for name in modules:
        importlib.import_module(name)
    if threads is not None:
        use_threads(threads)


def use_threads(threads: int) -> None:
    """Threads of TVM's pool that are awake during a step only and pinned to no processor."""
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
    processors = sorted(os.sched_getaffinity(0))
    shared = [str(processors[i % len(processors)]) for i in range(threads)]
    tvm_ffi.get_global_func("runtime.config_threadpool")(SHARED, threads, shared)


def build_candidate(
    name: str,
    preset: TargetPreset,
    linker: str,
    point: Mapping[str, int],
    entries: Sequence[str],
    path: Path,
) -> str:
    """The path of a kernel of the spec of a name."""
    spec = KernelSpec.parse(name)
    if preset.on_cpu:
        module = kernel_module(spec, preset, point, entries)
        return build_library(linker, path.with_suffix(".so"), tvm_target(preset), module)
    build(spec, preset, path, decisions=point)
    return str(path)


def kernel_module(
    spec: KernelSpec, preset: TargetPreset, decisions: Mapping[str, int], entries: Sequence[str]
) -> tvm.IRModule:
    """The scheduled functions of some entry points."""
    return tvm.IRModule({entry: lower(spec, preset, entry, decisions).final for entry in entries})


def build_library(linker: str, path: Path, target: tvm.target.Target, module: tvm.IRModule) -> str:
    """The path of a shared library with the functions of a module."""
    compile_module(module, target).export_library(str(path), fcompile=linked_by(linker))
    return str(path)
