"""`tvm-qopt demo --compare`: tasks x states x seeds, and what became of the loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tvm_qopt.demo.train import CompiledAdamW, Run, train
from tvm_qopt.runtime.kernel import Kernel
from tvm_qopt.spec import KernelSpec

SEEDS = 3
BASELINE = "float32"
STATES: dict[str, KernelSpec] = {
    BASELINE: KernelSpec.of("adamw", "float32"),
    "8-bit (dynamic8)": KernelSpec.of("adamw", "dynamic8"),
    "fp8": KernelSpec.of("adamw", "fp8"),
    "4-bit, blocks of 128": KernelSpec.of("adamw", "4bit", block_size=128),
}

Tick = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """What is trained.  loss: what `final_loss` is over.  needs: a package beyond the demo's."""

    title: str
    loss: str
    run: Callable[[str, Kernel, int, int, Tick], Run]  # state, kernel, steps, seed, tick
    needs: str | None = None

    @property
    def missing(self) -> bool:
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


def _digits(name: str, kernel: Kernel, steps: int, seed: int, tick: Tick) -> Run:
    return train(name, CompiledAdamW, kernel, steps=steps, seed=seed, tick=tick)


def _text(name: str, kernel: Kernel, steps: int, seed: int, tick: Tick) -> Run:
    from tvm_qopt.demo.text import CompiledAdamW, train_text

    make = partial(CompiledAdamW, kernel=kernel)
    return train_text(name, make, steps=steps, seed=seed, tick=tick)


TASKS: dict[str, Task] = {
    "digits": Task("perceptron on digits", "all training samples", _digits),
    "text": Task("transformer on Python's documentation", "held-out text", _text, "torch"),
}

Runs = Mapping[str, Sequence[Run]]
"""Of one task: state -> a run a seed, in one order of the seeds."""


@dataclass(frozen=True)
class Spread:
    """Mean, least and largest over the seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(float(np.mean(values)), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """One state on one task.  gap: (loss - float32's of the same seed) / float32's."""

    state: str
    bytes_per_parameter: float
    final_loss: Spread
    gap: Spread
    accuracy: Spread


def summarise(runs: Runs) -> list[Summary]:
    base = [run.final_loss for run in runs[BASELINE]]
    found = []
    for state, of_state in runs.items():
        final = [run.final_loss for run in of_state]
        found.append(
            Summary(
                state=state,
                bytes_per_parameter=of_state[0].state_bytes / of_state[0].parameters,
                final_loss=Spread.of(final),
                gap=Spread.of([x / b - 1 for x, b in zip(final, base, strict=True)]),
                accuracy=Spread.of([run.accuracy for run in of_state]),
            )
        )
    return found
