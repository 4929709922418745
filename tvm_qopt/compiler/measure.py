"""Builds candidate kernels and times, compares and checks them in processes of their own, here or
on RPC servers: a kernel that crashes or hangs costs one result.

What runs is the very kernel that a user gets: for any number of blocks, in place, with the entry
points of norm passes.  MetaSchedule's runners have none of these; nor do its pools survive Ctrl-C
(their threads race for the processes and deadlock), and its builder starts them anew for each
batch.  So this rests on what they are made of: TVM's workers, time evaluator, RPC tracker and
servers.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import rpc

from tvm_qopt.compiler.build import linked_by, tvm_target
from tvm_qopt.compiler.crew import Crew, Outcome, last_line
from tvm_qopt.compiler.pipeline import compile_module
from tvm_qopt.errors import BuildError, ToolMissing
from tvm_qopt.targets import TargetPreset, find_linker

Array = npt.NDArray[Any]
SHARED = -3  # TVM's affinity mode that pins no thread: as the runtime has it
BUILD_SECONDS = 120.0  # that a build, a check or a comparison may take
CONNECT_SECONDS = 5.0
REPEATS = 7  # of a trial
REPEAT_MS = 10  # at least, of a repeat


@dataclass(frozen=True)
class Arguments:
    """The arguments of a kernel as a sample that is repeated: cheap to send to another process.

    arrays: in the order of the kernel's arguments.  shapes: what each is to become.
    """

    arrays: tuple[Array, ...]
    shapes: tuple[tuple[int, ...], ...]

    def on(self, device: Any) -> list[Any]:
        """Tensors on a device."""
        return [
            tvm.runtime.tensor(np.resize(array, shape), device=device)
            for array, shape in zip(self.arrays, self.shapes, strict=True)
        ]


@dataclass(frozen=True)
class Step:
    """What is timed: entry points of a kernel, one after the other, and their arguments."""

    entries: tuple[str, ...]
    arguments: Arguments

    def seconds(self, module: Any, device: Any, tensors: Sequence[Any], repeat: int) -> list[float]:
        """Of each repeat, the entry points added up."""
        runs = []
        for entry in self.entries:
            evaluate = module.time_evaluator(
                entry, device, number=1, repeat=repeat, min_repeat_ms=REPEAT_MS
            )
            runs.append(evaluate(*tensors).results)
        return [float(sum(times)) for times in zip(*runs, strict=True)]


@dataclass(frozen=True)
class Call:
    """One call of an entry point: its arguments, in order."""

    entry: str
    arguments: tuple[Array, ...]


@dataclass(frozen=True)
class Remote:
    """The servers of a key, by the tracker that knows them."""

    host: str
    port: int
    key: str

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

    def session(self, seconds: float) -> Any:
        """Waits for a server that is free; the server ends the session after some seconds."""
        tracker = rpc.connect_tracker(self.host, self.port)
        return tracker.request(self.key, session_timeout=math.ceil(seconds))


class Laboratory:
    """Builds and runs kernels for a target.  Close it: it has a temporary folder and processes."""

    def __init__(
        self,
        preset: TargetPreset,
        step: Step,
        *,
        threads: int,
        seconds: float,
        remote: Remote | None = None,
    ) -> None:
        """threads: of a step, here (a server has its own).  seconds: that a trial may take."""
        linker = find_linker(preset)
        if linker is None:
            raise ToolMissing(f"no linker for {preset.name}: {preset.linker} is not installed")
        self.preset, self.step, self.remote, self._seconds = preset, step, remote, seconds
        self.servers = remote.count() if remote else 1
        self._folder = tempfile.TemporaryDirectory(prefix="tvm_qopt-tune-")
        self._build = partial(build_library, linker, self._folder.name, tvm_target(preset))
        self._builders = Crew(len(os.sched_getaffinity(0)))
        self._runners = Crew(self.servers, partial(use_threads, threads))

    def close(self) -> None:
        self._builders.close()
        self._runners.close()
        self._folder.cleanup()

    def build(self, modules: Sequence[tvm.IRModule]) -> list[Outcome]:
        """The path of a shared library for each."""
        return self._builders.map(self._build, [(module,) for module in modules], BUILD_SECONDS)

    def time(self, paths: Sequence[str]) -> list[Outcome]:
        """Seconds of the repeats of a step, for each library; on all servers at once."""
        tasks = [(self.remote, path, self.step, self._seconds) for path in paths]
        return self._runners.map(time_library, tasks, self._seconds)

    def interleave(self, paths: Sequence[str], rounds: int) -> npt.NDArray[np.float64]:
        """Seconds of a step, (rounds, libraries): each once a round, so that a busy moment falls on
        all alike; on one server.  Raises BuildError."""
        return np.array(self._run(interleave_libraries, paths, self.step, rounds))

    def call(self, path: str, calls: Sequence[Call]) -> list[list[Array]]:
        """The arguments of each call after it.  Raises BuildError."""
        found: list[list[Array]] = self._run(call_library, path, calls)
        return found

    def describe(self) -> tuple[str, int]:
        """LLVM's name of the CPU that kernels run on, and the threads of a step there."""
        found: tuple[str, int] = self._run(describe_machine)
        return found

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        task = (self.remote, *arguments)
        (outcome,) = self._runners.map(function, [task], BUILD_SECONDS)
        if outcome.error:
            raise BuildError(f"{self.preset.name}: {outcome.error}")
        return outcome.value


# --- in the other process ---


def use_threads(threads: int) -> None:
    """As many threads as a step has, awake during a step only and pinned to no processor."""
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
    processors = sorted(os.sched_getaffinity(0))
    shared = [str(processors[i % len(processors)]) for i in range(threads)]
    tvm_ffi.get_global_func("runtime.config_threadpool")(SHARED, threads, shared)


def build_library(linker: str, folder: str, target: tvm.target.Target, module: tvm.IRModule) -> str:
    """The path of a shared library with the functions of a module."""
    handle, path = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    compile_module(module, target).export_library(path, fcompile=linked_by(linker))
    return path


def time_library(remote: Remote | None, path: str, step: Step, seconds: float) -> tuple[float, ...]:
    load, device, _ = _machine(remote, seconds)
    return tuple(step.seconds(load(path), device, step.arguments.on(device), REPEATS))


def interleave_libraries(
    remote: Remote | None, paths: Sequence[str], step: Step, rounds: int
) -> list[list[float]]:
    load, device, _ = _machine(remote, BUILD_SECONDS)
    modules, tensors = [load(path) for path in paths], step.arguments.on(device)

    def one_round() -> list[float]:
        return [step.seconds(module, device, tensors, 1)[0] for module in modules]

    one_round()  # page tables, pools, clocks
    return [one_round() for _ in range(rounds)]


def call_library(remote: Remote | None, path: str, calls: Sequence[Call]) -> list[list[Array]]:
    load, device, _ = _machine(remote, BUILD_SECONDS)
    module, results = load(path), []
    for call in calls:
        tensors = [tvm.runtime.tensor(array, device=device) for array in call.arguments]
        module[call.entry](*tensors)
        results.append([tensor.numpy() for tensor in tensors])
    return results


def describe_machine(remote: Remote | None) -> tuple[str, int]:
    _, _, function = _machine(remote, BUILD_SECONDS)
    return str(function("target.llvm_get_system_cpu")()), int(function("runtime.NumThreads")())


def _machine(
    remote: Remote | None, seconds: float
) -> tuple[Callable[[str], Any], Any, Callable[[str], Any]]:
    """How to load a library, the device, and how to find TVM's functions: here or on a server."""
    if remote is None:
        return tvm.runtime.load_module, tvm.cpu(0), tvm_ffi.get_global_func
    session = remote.session(seconds)

    def load(path: str) -> Any:
        session.upload(path)
        return session.load_module(Path(path).name)

    return load, session.cpu(0), session.get_function
