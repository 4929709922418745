"""The process of one peer: builds its contenders, and makes one step when asked to.

Run by its path with the peer's own interpreter, so it imports the standard library, NumPy and the
peer alone.  One JSON line in, one out: first {"peer": ..., "sizes": [...], "threads": ...}, then
{"build": row} or {"step": row}.  An error ends the process, with its traceback on stderr.
What the peer prints goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

ADAM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
LION: dict[str, Any] = {"lr": 1e-4, "weight_decay": 1e-2}
PIECE = 1 << 20
MAP = 256  # levels of a map
Built = tuple[Callable[[], object], float]
"""A step, and the bytes that it must move."""
Answer = Callable[[dict[str, Any]], None]


def torch_tensors(sizes: Sequence[int]) -> tuple[list[Any], int]:
    """Parameters with gradients, all filled, and the bytes of reading both and writing the first.

    All rows of a peer share them: a step is far longer than a cache, and memory is short.
    """
    import torch

    params = []
    for size in sizes:
        param = torch.nn.Parameter(torch.from_numpy(normal(size)))
        param.grad = torch.from_numpy(normal(size) * np.float32(1e-3))
        params.append(param)
    return params, 12 * sum(sizes)


def optimizer(
    make: Callable[[list[Any]], Any], tensors: tuple[list[Any], int], unused: Sequence[str] = ()
) -> Built:
    """A torch optimizer after its first step, which makes its state.

    unused: parts of the state that it makes and never reads.
    """
    params, moved = tensors
    made = make(params)
    made.step()
    states = (part for param in params for part in made.state[param].items())
    used = (value for name, value in states if name not in unused)
    return made.step, moved + 2 * sum(x.nbytes for value in used for x in plain(value))


def plain(value: Any) -> Iterator[Any]:
    """The tensors that a value of an optimizer's state consists of, small ones (counts of steps,
    maps of levels) apart."""
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from plain(getattr(value, name))
    elif hasattr(value, "data_ptr") and value.numel() > MAP:
        yield value


def torch_rows(tensors: tuple[list[Any], int]) -> dict[str, Callable[[], Built]]:
    import torch

    fused = partial(torch.optim.AdamW, fused=True, **ADAM)
    return {"torch AdamW, fused, float32": lambda: optimizer(fused, tensors)}


def deepspeed_rows(tensors: tuple[list[Any], int]) -> dict[str, Callable[[], Built]]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    return {
        "DeepSpeed CPUAdam, float32": lambda: optimizer(partial(DeepSpeedCPUAdam, **ADAM), tensors),
        "DeepSpeed CPULion, float32": lambda: optimizer(
            partial(DeepSpeedCPULion, **LION), tensors, unused=("exp_avg_sq",)
        ),
    }


def bitsandbytes_rows(
    tensors: tuple[list[Any], int], title: str = "bitsandbytes"
) -> dict[str, Callable[[], Built]]:
    from bitsandbytes import optim

    return {
        f"{title} AdamW8bit": lambda: optimizer(partial(optim.AdamW8bit, **ADAM), tensors),
        f"{title} Lion8bit": lambda: optimizer(partial(optim.Lion8bit, **LION), tensors),
    }


def upstream_rows(tensors: tuple[list[Any], int]) -> dict[str, Callable[[], Built]]:
    """With the operators: what they read and write is 4 bytes an element, a code and a scale."""
    from bitsandbytes import functional

    values = max(tensors[0], key=lambda tensor: tensor.numel()).detach()
    codes, state = functional.quantize_blockwise(values, blocksize=256)
    moved = values.nbytes + codes.nbytes + state.absmax.nbytes
    return bitsandbytes_rows(tensors) | {
        "bitsandbytes quantize_blockwise": lambda: (
            partial(functional.quantize_blockwise, values, blocksize=256),
            moved,
        ),
        "bitsandbytes dequantize_blockwise": lambda: (
            partial(functional.dequantize_blockwise, codes, state),
            moved,
        ),
    }


def fork_rows(tensors: tuple[list[Any], int]) -> dict[str, Callable[[], Built]]:
    from bitsandbytes import optim

    title = "bitsandbytes-cpu-fork"
    return bitsandbytes_rows(tensors, title) | {
        f"{title} AdamW4bit": lambda: optimizer(partial(optim.AdamW4bit, **ADAM), tensors)
    }


def torchao_rows(tensors: tuple[list[Any], int]) -> dict[str, Callable[[], Built]]:
    from torchao import optim

    names = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    return {
        f"torchao {name}": partial(optimizer, partial(getattr(optim, name), **ADAM), tensors)
        for name in names
    }


def optax_rows(sizes: Sequence[int]) -> dict[str, Callable[[], Built]]:
    return {"optax adamw, float32": lambda: optax_adamw(sizes)}


def optax_adamw(sizes: Sequence[int]) -> Built:
    """The update compiled whole, in place: parameters and state are donated."""
    import jax
    import optax

    rule = optax.adamw(ADAM["lr"], weight_decay=ADAM["weight_decay"])
    params = [jax.numpy.asarray(normal(size)) for size in sizes]
    grads = [jax.numpy.asarray(normal(size) * np.float32(1e-3)) for size in sizes]
    held: Any = (params, rule.init(params))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step() -> None:
        nonlocal held
        held = jax.block_until_ready(update(*held, grads))

    step()
    moments = [x.nbytes for x in jax.tree.leaves(held[1]) if x.ndim]
    return step, 12 * sum(sizes) + 2 * sum(moments)


PEERS: dict[str, tuple[tuple[str, ...], Callable[[Any], dict[str, Callable[[], Built]]]]] = {
    "torch": (("torch",), torch_rows),
    "bitsandbytes": (("bitsandbytes", "torch"), upstream_rows),
    "bitsandbytes-cpu-fork": (("bitsandbytes-cpu-fork", "torch"), fork_rows),
    "torchao": (("torchao", "torch"), torchao_rows),
    "deepspeed": (("deepspeed", "torch"), deepspeed_rows),
    "optax": (("optax", "jax"), optax_rows),
}
"""Name -> the distributions whose versions matter, and what gives its rows."""


def normal(size: int) -> Any:
    """Numbers as training sees them; a piece of them repeated, since making them takes long."""
    piece = np.random.default_rng(0).standard_normal(min(size, PIECE), dtype=np.float32)
    return np.resize(piece, size)


def serve(answer: Answer) -> None:
    """Answer the request that comes first, then each that follows."""
    request = json.loads(sys.stdin.readline())
    distributions, make = PEERS[request["peer"]]
    sizes = request["sizes"]
    if request["peer"] == "optax":  # XLA takes every processor it may run on
        allowed = sorted(os.sched_getaffinity(0))[-request["threads"] :]
        os.sched_setaffinity(0, allowed)
        rows = make(sizes)
    else:
        import torch

        torch.set_num_threads(request["threads"])
        rows = make(torch_tensors(sizes))
    versions = {name: importlib.metadata.version(name) for name in distributions}
    answer({"rows": list(rows), "versions": versions})
    steps: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "build" in asked:
            name = asked["build"]
            steps[name], moved = rows[name]()
            steps[name]()  # what cannot run fails here
            answer({"bytes": moved})
        else:
            step = steps[asked["step"]]
            start = time.perf_counter()
            step()
            answer({"seconds": time.perf_counter() - start})


def say_last(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End stderr with the error in one line, however long its message."""
    sys.__excepthook__(kind, error, trace)
    first = (str(error).strip().splitlines() or [""])[0]
    print(f"{kind.__name__}: {first}", file=sys.stderr)


def run(serve: Callable[[Answer], None]) -> None:
    """Serve with answers on stdout, and all else that is printed on stderr."""
    sys.excepthook = say_last
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(said: dict[str, Any]) -> None:
        replies.write(json.dumps(said) + "\n")
        replies.flush()

    serve(answer)


if __name__ == "__main__":
    run(serve)
