"""How kernels are timed and called, on any machine: here, on a server, with or without a compiler.

A `Machine` is what is sent to the process that measures; there it opens a `Session`.  Those of TVM
are in compiler.measure, those of the runtime in devices.session.  May import layer 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import UnsupportedSpec
from tvm_qopt.targets import TargetPreset, cuda_code, runs_on

Array = npt.NDArray[Any]
REPEATS = 7  # of a trial
REPEAT_SECONDS = 0.01  # at least, of a repeat
ROUNDS = 15  # of an interleaved run


@dataclass(frozen=True)
class Device:
    """What kernels run on.

    code: what its code is called: LLVM's name of the CPU, a GPU's architecture ("sm_90"), or "".
    threads: of a step on a CPU, else 0.
    """

    name: str
    code: str
    threads: int = 0


@dataclass(frozen=True)
class Arguments:
    """The arguments of a kernel as a sample that is repeated: cheap to send to another process.

    arrays: in the order of the kernel's arguments.  shapes: what each is to become.
    """

    arrays: tuple[Array, ...]
    shapes: tuple[tuple[int, ...], ...]

    def on(self, session: Session) -> list[Any]:
        """Tensors on a device, one after the other: the host holds one at a time."""
        return [
            session.put(np.resize(array, shape))
            for array, shape in zip(self.arrays, self.shapes, strict=True)
        ]


@dataclass(frozen=True)
class Step:
    """What is timed: entry points of a kernel, one after the other, and their arguments."""

    entries: tuple[str, ...]
    arguments: Arguments


@dataclass(frozen=True)
class Call:
    """One call of an entry point: its arguments, in order."""

    entry: str
    arguments: tuple[Array, ...]


class Session(Protocol):
    """A machine while kernels run there."""

    def load(self, path: str) -> Any:
        """The kernel that was built at a path of this machine's."""

    def put(self, array: Array) -> Any:
        """A tensor on the device."""

    def get(self, tensor: Any) -> Array:
        """The values of a tensor that `put` made."""

    def call(self, kernel: Any, entry: str, tensors: Sequence[Any]) -> None:
        """Run an entry point."""

    def seconds(
        self, kernel: Any, entries: Sequence[str], tensors: Sequence[Any], repeat: int
    ) -> list[float]:
        """Of a step, the entry points added up: a mean of REPEAT_SECONDS or more, each repeat."""

    def describe(self) -> Device | None:
        """None where there is no such device."""


class Machine(Protocol):
    """Where kernels are to run; picklable."""

    def count(self) -> int:
        """How many kernels may run at once, each on a device of its own."""

    def open(self, seconds: float) -> Session:
        """A session for some seconds at most."""


def time_step(machine: Machine, path: str, step: Step, seconds: float) -> tuple[float, ...]:
    session = machine.open(seconds)
    kernel, tensors = session.load(path), step.arguments.on(session)
    return tuple(session.seconds(kernel, step.entries, tensors, REPEATS))


def interleave(
    machine: Machine, paths: Sequence[str], step: Step, rounds: int, seconds: float
) -> list[list[float]]:
    """Seconds of a step by round, each kernel once a round."""
    session = machine.open(seconds)
    kernels, tensors = [session.load(path) for path in paths], step.arguments.on(session)

    def one_round() -> list[float]:
        return [session.seconds(kernel, step.entries, tensors, 1)[0] for kernel in kernels]

    one_round()  # page tables, pools, clocks
    return [one_round() for _ in range(rounds)]


def make_calls(
    machine: Machine, path: str, calls: Sequence[Call], seconds: float
) -> list[list[Array]]:
    """The arguments of each call after it."""
    session = machine.open(seconds)
    kernel, results = session.load(path), []
    for call in calls:
        tensors = [session.put(array) for array in call.arguments]
        session.call(kernel, call.entry, tensors)
        results.append([session.get(tensor) for tensor in tensors])
    return results


def describe(machine: Machine, seconds: float) -> Device | None:
    return machine.open(seconds).describe()


def check_code(preset: TargetPreset, device: Device) -> None:
    """Raise UnsupportedSpec where a GPU does not run what is built for a target."""
    if preset.kind == "cuda" and not any(
        runs_on(code, device.code) for code in cuda_code(preset.archs)
    ):
        raise UnsupportedSpec(
            f"--target: {preset.name} is code for {', '.join(preset.archs)}, and the GPU is "
            f"{device.name} ({device.code})"
        )
