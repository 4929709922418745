"""The end of the process: daemon threads that step are let out of their kernels first.

A thread that comes back from a kernel when the interpreter is gone is unwound by Python, and the
C++ frames of the call make of that an abort of the whole process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

PATIENCE = 60.0  # seconds; a kernel takes a few at most

_inside: set[int] = set()
_ending = False


def enter() -> None:
    """Say that this thread is about to call a kernel; at the end of the process wait for that."""
    _inside.add(threading.get_ident())
    if _ending and threading.current_thread().daemon:
        leave()
        threading.Event().wait()


def leave() -> None:
    _inside.discard(threading.get_ident())


def _let_out() -> None:
    """Have no other thread enter, and wait for those that are inside."""
    global _ending
    _ending = True
    end = time.monotonic() + PATIENCE
    own = threading.get_ident()
    while _inside - {own} and time.monotonic() < end:
        time.sleep(0.001)


atexit.register(_let_out)
os.register_at_fork(after_in_child=_inside.clear)
