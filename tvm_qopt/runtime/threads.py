"""How many threads a step uses, and the one thread that makes parallel calls for all others.

By itself TVM's pool takes half the processors, pins the calling thread and spins after a call.  A
pool belongs to the thread that made its first parallel call, with as many workers as it was made
with, and joins them when that thread ends: in a forked child, where they do not exist, a process
whose main thread owned one would hang at its exit.  So no thread of the user's owns one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from tvm_qopt.errors import HyperOutOfRange

SHARED = -3  # TVM's affinity mode in which all workers share the given processors: none is pinned
ENVIRONMENT = "TVM_NUM_THREADS"
MOST = 4096

Call = tuple[Any, tuple[Any, ...]]
"""A function and its arguments."""

_requested: int | None = None


def set_num_threads(n: int) -> None:
    """Use n threads in every step from now on, in the whole process.

    The default is TVM_NUM_THREADS where set, else every processor this process may run on.
    Results are the same bits for any number.
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
        return len(_processors())
    valid = given.isascii() and given.isdecimal() and len(given) <= len(str(MOST))
    if not valid or not 1 <= int(given) <= MOST:
        wanted = f"an integer from 1 to {MOST}"
        raise HyperOutOfRange(ENVIRONMENT, expected=wanted, got=repr(given))
    return int(given)


def call_parallel(calls: Sequence[Call], keep: object) -> None:
    """Make calls whose loops are parallel, all of them even where Ctrl-C comes between.

    keep: what the calls need alive; it stays so until they are done, whatever happens here.
    """
    global _caller
    threads = get_num_threads()
    with _making:
        if _caller is None or _caller.capacity < threads:
            _caller = _Caller(threads)
        caller = _caller
    caller.make(calls, threads, keep)


class _Caller:
    """A thread that owns a pool; it takes one job at a time and ends with the process."""

    def __init__(self, threads: int) -> None:
        self.capacity = max(threads, len(_processors()))
        _check_that_threads_start(self.capacity)
        self._turn = threading.Lock()
        self._ready, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._job: tuple[Sequence[Call], int, object] | None = None
        self._picked_up = self._finished = True
        self._error: BaseException | None = None
        self._in_use = 0
        threading.Thread(target=self._serve, name="tvm_qopt", daemon=True).start()

    def make(self, calls: Sequence[Call], threads: int, keep: object) -> None:
        """Have the calls made; an interrupt is raised when they are."""
        with self._turn:
            self._error, self._picked_up, self._finished = None, False, False
            self._job = calls, threads, keep
            interrupt = None
            while not self._finished:
                interrupt = self._await() or interrupt
            self._job = None
        if interrupt or self._error:
            raise interrupt or self._error

    def _await(self) -> BaseException | None:
        try:
            if not self._picked_up:
                self._ready.release()
            while not self._finished:
                self._done.acquire(timeout=60)
        except BaseException as error:  # Ctrl-C: the kernel is running and cannot be stopped
            return error
        return None

    def _serve(self) -> None:
        while True:
            self._ready.acquire()
            if self._finished or self._job is None:  # asked twice, by way of an interrupt
                continue
            calls, threads, _ = self._job
            self._picked_up = True
            try:
                self._configure(threads)
                for function, arguments in calls:
                    function(*arguments)
            except BaseException as error:  # for the thread that asked
                self._error = error
            calls = ()
            self._finished = True
            self._done.release()

    def _configure(self, threads: int) -> None:
        if self._in_use == threads:
            return
        import tvm_ffi

        processors = [str(cpu) for cpu in _processors()]
        shared = [processors[i % len(processors)] for i in range(self.capacity)]
        tvm_ffi.get_global_func("runtime.config_threadpool")(SHARED, threads, shared)
        self._in_use = threads


def _check_that_threads_start(number: int) -> None:
    """Raise where this process cannot have so many threads: TVM would abort it."""
    go, started = threading.Event(), []
    try:
        for _ in range(number):
            thread = threading.Thread(target=go.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        wanted = f"at most {len(started)}, which is what this process can start"
        raise HyperOutOfRange("number of threads", expected=wanted, got=str(number)) from None
    finally:
        go.set()
        for thread in started:
            thread.join()


def _processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _after_fork() -> None:
    """A forked child has neither the thread nor its pool, and perhaps a lock that nobody frees."""
    global _caller, _making
    _caller, _making = None, threading.Lock()


_caller: _Caller | None = None
_making = threading.Lock()
os.register_at_fork(after_in_child=_after_fork)
