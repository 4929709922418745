"""`tvm-qopt demo --peers`: the transformer, trained by torch's AdamW, ours and those of peers.

Each with what it has by itself: small tensors in float32, blocks of its own size, its own threads.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm_qopt.demo.train import BETA1, BETA2, EPS, WEIGHT_DECAY, Run
from tvm_qopt.errors import UnknownName

BASELINE = "torch AdamW, float32"
SHARED = ("step", "format", "qmap", "qmap1", "qmap2")
"""Entries of a state that do not grow with the parameter."""

Tick = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """A class of a package and the options that it is made with, beside those all have."""

    title: str
    package: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        return importlib.util.find_spec(self.package) is None

    def make(self, weights: Mapping[str, Any]) -> TorchOptimizer:
        from tvm_qopt.demo.text import LR

        made = getattr(importlib.import_module(f"{self.package}.optim"), self.name)
        usual = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        return TorchOptimizer(made(list(weights.values()), **usual, **self.options))


ALWAYS = (
    Contender(BASELINE, "torch", "AdamW", {"fused": True}),
    Contender("ours AdamW, float32", "tvm_qopt", "AdamW"),
    Contender("ours AdamW8bit", "tvm_qopt", "AdamW8bit"),
    Contender("ours AdamWFp8", "tvm_qopt", "AdamWFp8"),
    Contender("ours AdamW4bit", "tvm_qopt", "AdamW4bit"),
)
PEERS = {
    "bitsandbytes": (Contender("bitsandbytes AdamW8bit", "bitsandbytes", "AdamW8bit"),),
    "torchao": tuple(
        Contender(f"torchao {name}", "torchao", name)
        for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit")
    ),
}


class TorchOptimizer:
    """Any optimizer of torch's interface, as the training loop has it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, t: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state_bytes(self) -> int:
        """Of what grows with the parameters; once a step was made."""
        return sum(
            bytes_of(value)
            for state in self.optimizer.state.values()
            for name, value in state.items()
            if name not in SHARED
        )


def bytes_of(x: Any) -> int:
    """Of a tensor, or of the tensors that one of torchao's consists of."""
    if hasattr(x, "__tensor_flatten__"):
        names, _ = x.__tensor_flatten__()
        return sum(bytes_of(getattr(x, name)) for name in names if name not in SHARED)
    return int(getattr(x, "nbytes", 0))


def chosen(names: str) -> list[Contender]:
    """What trains: torch and ours, and the peers that are named ("all": every one)."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in PEERS and name != "all":
            raise UnknownName("peer", name, [*PEERS, "all"])
    peers = PEERS if "all" in wanted else {name: PEERS[name] for name in wanted}
    return [*ALWAYS, *(each for of_peer in peers.values() for each in of_peer)]


def train_each(
    contenders: Sequence[Contender], *, steps: int, seed: int, tick: Callable[[str], Tick]
) -> tuple[list[Run], dict[str, str]]:
    """A run of each, and title -> why, of those that could not: one that is missing or fails."""
    from tvm_qopt.demo.text import train_text

    runs, left_out = [], {}
    for each in contenders:
        if each.missing:
            left_out[each.title] = (
                f"{each.package} is not installed (pip install 'tvm_qopt[peers]')"
            )
            continue
        try:
            run = train_text(each.title, each.make, steps=steps, seed=seed, tick=tick(each.title))
        except (ImportError, OSError, RuntimeError) as error:  # of a peer: no compiler, no library
            if each in ALWAYS:
                raise
            left_out[each.title] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        runs.append(run)
    return runs, left_out
