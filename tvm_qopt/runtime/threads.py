"""How many threads a step uses, and TVM's pools made to behave.

By itself TVM's pool takes half the processors, pins the calling thread and spins after a call.
Every calling thread has a pool of its own, made at its first parallel call with a fixed number of
workers, and a forked child inherits pools whose workers are gone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tvm_qopt.errors import HyperOutOfRange

SHARED = -3  # TVM's affinity mode in which all workers share the given processors: none is pinned
ENVIRONMENT = "TVM_NUM_THREADS"


class _Pool(threading.local):
    """The pool of this thread: its workers, how many are in use, and who calls in its stead."""

    workers = 0
    in_use = 0
    stand_in: ThreadPoolExecutor | None = None


_pool = _Pool()
_requested: int | None = None


def set_num_threads(n: int) -> None:
    """Use n threads in every step from now on, in the whole process.

    The default is TVM_NUM_THREADS where set, else every processor this process may run on.
    Results are the same bits for any number.
    """
    global _requested
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 4096:
        raise HyperOutOfRange("n", expected="an integer from 1 to 4096", got=repr(n))
    _requested = n


def get_num_threads() -> int:
    """The number of threads that a step uses."""
    if _requested is not None:
        return _requested
    given = os.environ.get(ENVIRONMENT, "")
    return int(given) if given.isdecimal() and int(given) > 0 else len(_processors())


def call_parallel(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call a function whose parallel loops use this thread's pool."""
    threads = get_num_threads()
    if _pool.in_use != threads:
        _configure(threads)
    if _pool.stand_in is None:
        function(*arguments)
    else:
        _pool.stand_in.submit(call_parallel, function, arguments).result()


def _configure(threads: int) -> None:
    """Set the number in use; where this thread's pool cannot give it, let a new thread call."""
    if _pool.stand_in is None and _pool.workers == 0:
        _pool.workers = max(threads, len(_processors()))
    if threads > _pool.workers or _pool.stand_in is not None:
        _pool.stand_in = ThreadPoolExecutor(1, thread_name_prefix="tvm_qopt")
    else:
        import tvm_ffi

        processors = [str(cpu) for cpu in _processors()]
        shared = [processors[i % len(processors)] for i in range(_pool.workers)]
        tvm_ffi.get_global_func("runtime.config_threadpool")(SHARED, threads, shared)
    _pool.in_use = threads


def _processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _after_fork() -> None:
    """In a forked child the workers of this thread's pool do not exist."""
    if _pool.workers:
        _pool.in_use = 0
        _pool.stand_in = ThreadPoolExecutor(1, thread_name_prefix="tvm_qopt")


os.register_at_fork(after_in_child=_after_fork)
