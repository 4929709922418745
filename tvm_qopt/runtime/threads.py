"""How many threads a step uses, and the pool that its loops run on (compiler/pool.c).

The pool is native and part of every kernel.so; a process uses that of the first one it loads.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tvm_qopt.errors import ArtifactInvalid, HyperOutOfRange

ENVIRONMENT = "TVM_NUM_THREADS"
MOST = 1024  # as in pool.c
LAUNCH = "__TVMBackendParallelLaunch"  # TVM's hook: a kernel's loops go where this points
TEAM_FROM = 1 << 20
"""Elements from which torch's threads do a step's work.  They spin for some 5 ms after an operation
and then keep others off the processor; but once asleep one of them was awaited for up to 6 ms."""

Call = tuple[Any, tuple[Any, ...]]
"""A function and its arguments."""

_requested: int | None = None
_pool: ctypes.PyDLL | None = None
_lock = threading.Lock()


def set_num_threads(n: int) -> None:
    """Use n threads in every step from now on, in the whole process.

    The default is TVM_NUM_THREADS where set, else torch's number where torch is loaded, else every
    processor this process may run on.  Where fewer can be started those do the work.  Results are
    the same bits for any number.
    """
    global _requested
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST:
        raise HyperOutOfRange("n", expected=f"an integer from 1 to {MOST}", got=repr(n))
    _requested = n


def get_num_threads() -> int:
    """The number of threads that a step uses."""
    if _requested is not None:
        return _requested
    given = os.environ.get(ENVIRONMENT)
    if not given:
        return min(_torch_threads() or len(os.sched_getaffinity(0)), MOST)
    valid = given.isascii() and given.isdecimal() and len(given) <= len(str(MOST))
    if not valid or not 1 <= int(given) <= MOST:
        wanted = f"an integer from 1 to {MOST}"
        raise HyperOutOfRange(ENVIRONMENT, expected=wanted, got=repr(given))
    return int(given)


def attach(path: Path) -> None:
    """Have the loops of the kernel.so at `path`, which is loaded, run on this process's pool.

    Raises ArtifactInvalid where the file is no longer the one that was loaded.
    """
    global _pool
    try:
        library = ctypes.PyDLL(str(path), os.RTLD_NOLOAD | os.RTLD_NOW)
        hook = ctypes.c_void_p.in_dll(library, LAUNCH)
        with _lock:
            _pool = _pool or library
            hook.value = ctypes.cast(_pool.qopt_launch, ctypes.c_void_p).value
    except (OSError, ValueError, AttributeError) as error:
        raise ArtifactInvalid(f"{path}: has no pool of threads: {error}") from None


def call_parallel(calls: Sequence[Call], elements: int) -> None:
    """Make calls whose loops are parallel, all of them even where Ctrl-C comes between.

    elements: how many all calls together update.
    """
    threads = get_num_threads()
    with_team = elements >= TEAM_FROM and threads == _torch_threads()
    assert _pool is not None, "kernels are attached as they are loaded"
    if with_team:
        _offer_team(_pool)
    try:
        _pool.qopt_begin(threads, with_team)
        call_in_turn(calls)
    finally:
        _pool.qopt_end()


def call_in_turn(calls: Sequence[Call]) -> None:
    """Make calls on this thread; Ctrl-C, which comes when one returns, waits for the rest."""
    rest = iter(calls)
    try:
        for function, arguments in rest:
            function(*arguments)
    finally:
        for function, arguments in rest:
            function(*arguments)


def _torch_threads() -> int | None:
    """The threads of a torch operation, where torch is loaded."""
    ask: Callable[[], int] | None = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return ask() if ask else None


@cache
def _offer_team(pool: ctypes.PyDLL) -> None:
    """Tell a pool of torch's own OpenMP library; where there is none it does without."""
    torch = Path(sys.modules["torch"].__file__ or "")
    try:
        library = ctypes.CDLL(
            str(torch.parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD | os.RTLD_NOW
        )
        pool.qopt_team(library.GOMP_parallel, library.omp_get_thread_num)
    except (OSError, AttributeError):  # linked otherwise, or built with other threads
        return
