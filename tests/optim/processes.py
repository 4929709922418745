"""Functions of tests run by several processes that talk over gloo, on this machine.

They are forked from a server, so they end without the interpreter's end.  In that, torch 2.13
aborts now and then ("terminate called without an active exception"), with its own optimizers as
well: a thread of gloo lets go of the last collective's tensor, for which it needs a Python that is
gone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMIT = 80  # seconds; a pass takes about 5

PRELOADED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "tvm_qopt.optim",
)
"""Imported once, by the server that processes are forked from: each would take seconds."""


def run(work: Callable[..., None], world: int, folder: Path, *args: Any) -> None:
    """Call work(rank, world, *args) in each process of a group; raises what one of them raises."""
    multiprocessing.set_forkserver_preload([*PRELOADED])
    meeting = folder / f"meeting-{work.__name__}-{world}"
    context = torch.multiprocessing.start_processes(
        _start,
        (world, str(meeting), work, args),
        nprocs=world,
        join=False,
        start_method="forkserver",
    )
    end = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"{work.__name__} takes more than {LIMIT} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _start(rank: int, world: int, meeting: str, work: Callable[..., None], args: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        work(rank, world, *args)
    finally:
        dist.destroy_process_group()
