"""What a step does to its process: how many threads, where they may run, and what stays behind.

Mostly in child processes, since a pool and a library last as long as their process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tvm_qopt
from tvm_qopt.errors import HyperOutOfRange

SPEC = "adamw-dynamic8-b256-p_f32-g_f32"

PRELUDE = f"""
import json, os, sys, threading, time
import tvm_qopt

SPEC = {SPEC!r}

def step(size=200_000, steps=3):  # 200,000 by our own threads, 2,000,000 by torch's where loaded
    import numpy as np
    kernel = tvm_qopt.load(SPEC, policy="cached")
    param, grad = np.ones(size, np.float32), np.ones(size, np.float32)
    plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
    for t in range(1, steps + 1):
        plan.step(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=t)

def affinities():
    time.sleep(0.05)  # a worker that was woken elsewhere sets its affinity back as it wakes
    return [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]

def say(value):
    print(json.dumps(value))
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    tvm_qopt.load(SPEC)


def child(code: str, **environment: str | None) -> Any:
    """What a fresh process says; a value of None takes a variable away."""
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = {**env, "TVM_NUM_THREADS": None, **environment}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env={name: value for name, value in env.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PROCESSORS = sorted(os.sched_getaffinity(0))


# What a step may not do


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_step_changes_no_threads_affinity(threads: int) -> None:
    code = f"tvm_qopt.set_num_threads({threads}); step(); say(affinities())"
    found = child(code)
    assert found == [PROCESSORS] * len(found)
    assert len(found) >= threads, "the pool has fewer threads than asked for"


def test_a_step_changes_no_affinity_that_the_caller_has_set() -> None:
    """The mask is narrowed before the first step; then another thread steps as well."""
    one = PROCESSORS[-1]
    found = child(f"""
os.sched_setaffinity(0, {{{one}}})
tvm_qopt.set_num_threads(2)
step()
other = threading.Thread(target=step)
other.start(); other.join()
say(affinities())
""")
    assert found == [[one]] * len(found)


def test_more_threads_later_change_no_affinity() -> None:
    found = child("""
for number in (1, 2, 5, 3):
    tvm_qopt.set_num_threads(number)
    step()
say(affinities())
""")
    assert found == [PROCESSORS] * len(found)


@pytest.mark.parametrize("threads", [2, 4])
def test_an_idle_process_uses_no_processor(threads: int) -> None:
    """TVM's own pool spins: 0.15 s of processor time a worker."""
    used = child(f"""
tvm_qopt.set_num_threads({threads})
step()
before = time.process_time()
time.sleep(0.5)
say(time.process_time() - before)
""")
    assert used < 0.02  # waking up from the sleep takes less than 1 ms


def test_a_stored_kernel_is_loaded_and_run_without_the_compiler() -> None:
    loaded, maps = child("""
step()
say([sorted(sys.modules), open("/proc/self/maps").read()])
""")
    names = {name.partition(".")[0] for name in loaded}
    assert {"numpy", "tvm_ffi"} <= names and "tvm" not in names
    assert not [name for name in loaded if name.startswith(("tvm_qopt.compiler", "tvm_qopt.cli"))]
    assert "libtvm_runtime" in maps and "kernel.so" in maps
    assert "libtvm_compiler" not in maps and "LLVM" not in maps


# Forks


def test_data_loaders_forked_after_a_step_work_and_so_does_the_parent() -> None:
    """Workers of a loader are forked from a process with a pool; both go on stepping at once."""
    pytest.importorskip("torch")
    batches = child("""
from torch.utils.data import DataLoader, Dataset

class Batches(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        step(steps=2)
        return index

tvm_qopt.set_num_threads(2)
seen = []
for epoch in range(2):
    step()
    step(2_000_000)
    for batch in DataLoader(Batches(), num_workers=2, multiprocessing_context="fork", timeout=30):
        seen.append(int(batch[0]))
        step()
say(seen)
""")
    assert batches == [*range(8)] * 2


# How many threads


def test_by_default_every_processor_of_the_affinity_mask() -> None:
    assert child("say(tvm_qopt.get_num_threads())") == len(PROCESSORS)
    narrowed = f"os.sched_setaffinity(0, {{{PROCESSORS[0]}}}); say(tvm_qopt.get_num_threads())"
    assert child(narrowed) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [("3", 3), ("1", 1), ("", len(PROCESSORS))],
)
def test_the_environment_may_say_how_many(given: str, expected: int) -> None:
    number, tasks = child(
        'step(); say([tvm_qopt.get_num_threads(), len(os.listdir("/proc/self/task"))])',
        TVM_NUM_THREADS=given,
    )
    assert number == expected and tasks >= expected


@pytest.mark.parametrize("given", ["0", "two", "-1", "2.0", "1025", "9" * 30, "\u0663"])
def test_what_the_environment_may_not_say_is_an_error(given: str) -> None:
    code = (
        "from tvm_qopt.errors import HyperOutOfRange\n"
        "try:\n    tvm_qopt.get_num_threads()\n"
        "except HyperOutOfRange as error:\n    say(str(error))"
    )
    assert child(code, TVM_NUM_THREADS=given).startswith(
        f"TVM_NUM_THREADS: expected an integer from 1 to 1024, got {given!r}"
    )


def test_what_is_set_wins_over_the_environment() -> None:
    code = "tvm_qopt.set_num_threads(2); step(); say(tvm_qopt.get_num_threads())"
    assert child(code, TVM_NUM_THREADS="3") == 2


@pytest.fixture
def threads() -> Iterator[int]:
    """The number before, which is put back."""
    number = tvm_qopt.get_num_threads()
    yield number
    tvm_qopt.set_num_threads(number)


@pytest.mark.parametrize("bad", [0, -1, 1025, 1.5, 2.0, "2", True, None])
def test_a_number_of_threads_that_is_none_is_refused(bad: Any, threads: int) -> None:
    with pytest.raises(HyperOutOfRange, match="n: expected an integer from 1 to 1024, got") as said:
        tvm_qopt.set_num_threads(bad)
    assert repr(bad) in str(said.value) and isinstance(said.value, ValueError)
    assert tvm_qopt.get_num_threads() == threads


def test_the_number_holds_in_every_thread(threads: int) -> None:
    assert child("""
tvm_qopt.set_num_threads(3)
seen = []
other = threading.Thread(target=lambda: seen.append(tvm_qopt.get_num_threads()))
other.start(); other.join()
say(seen)
""") == [3]


# The pool


def test_by_default_as_many_threads_as_torch_uses() -> None:
    pytest.importorskip("torch")
    assert child("import torch; torch.set_num_threads(3); say(tvm_qopt.get_num_threads())") == 3


def test_steps_of_several_threads_at_once_take_turns_in_the_pool() -> None:
    """Small ones, larger ones, and those for the threads of torch finish, with the same bits."""
    same = child("""
import numpy as np
tvm_qopt.set_num_threads(2)
kernel = tvm_qopt.load(SPEC, policy="cached")

def run(size, found):
    param, grad = np.ones(size, np.float32), np.linspace(-1, 1, size, dtype=np.float32)
    plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
    for t in range(1, 6):
        plan.step(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=t)
    found.append(param.tobytes())

found = {size: [] for size in (1000, 100_000, 1_500_000)}
threads = [threading.Thread(target=run, args=(s, f)) for s, f in found.items() for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say([len(each) for each in found.values()] + [len(set(each)) for each in found.values()])
""")
    assert same == [4, 4, 4, 1, 1, 1]


def test_a_process_that_may_start_no_more_threads_steps_with_those_it_has() -> None:
    """TVM's own pool aborts it.  Address space, which a thread's stack needs, is limited here."""
    assert child("""
import resource
import numpy as np
kernel = tvm_qopt.load(SPEC, policy="cached")
size = 200_000
param, grad = np.ones(size, np.float32), np.ones(size, np.float32)
plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
tvm_qopt.set_num_threads(100)
plan.step(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
say([len(os.listdir("/proc/self/task")) < 90, bool((param < 1).all())])
""") == [True, True]


def test_every_thread_works_in_the_callers_floating_point_mode() -> None:
    """Whether denormals are flushed does not depend on which thread meets them."""
    pytest.importorskip("torch")
    found = child("""
import torch
kernel = tvm_qopt.load(SPEC, policy="cached")
found = []
for size in (1000, 200_000, 3_000_000):
    for flush in (False, True):
        param, grad = torch.full((size,), 1.005e-36), torch.ones(size)
        plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
        torch.set_flush_denormal(flush)
        plan.step(lr=1e-36, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
        torch.set_flush_denormal(False)
        found.append([bool((param == 0).all()), bool((param > 0).all())])
say(found)
""")
    assert found == [[False, True], [True, False]] * 3
