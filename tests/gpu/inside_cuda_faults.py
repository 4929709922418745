"""What the device of tests/cuda_on_cpu is for: kernels that are wrong, and hosts, are caught.

Not collected by itself: test_cuda_runs.py runs this file where that device is.  Every case is a
process of its own, since a device that has failed stays so.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import nvcc
import pytest
from inside_cuda import HYPER, PLAIN, adamw, captured, load

from tvm_qopt.manifest import LIBRARY
from tvm_qopt.spec import KernelSpec

FATBIN = bytes.fromhex("50ed55ba")
BARRIER = "__syncthreads();"
WEIGHTS = "*(float4*)(param_ptr + ("
SCALE = "exp_avg_scale_ptr[((int64_t)blockIdx.x)] ="
EDITS = {
    "another thread reads|another thread writes": (BARRIER, ""),
    "wait for each other for ever": (BARRIER, f"if (threadIdx.x < 7) {BARRIER} else\n{BARRIER}"),
    "has ended": (BARRIER, "if (threadIdx.x == 0) return; __syncthreads();"),
    "past the end of an allocation|not allocated": (WEIGHTS, WEIGHTS + "4 + "),
    "not aligned": (WEIGHTS, WEIGHTS + "1 + "),
    "another thread writes": (SCALE, "exp_avg_scale_ptr[0] ="),
    "which lacks it": ("0xffffffffu", "0x7fffffffu"),
}


def apart(work: Callable[[], None]) -> tuple[int | None, str]:
    """The exit code of a copy of this process that does some work, and what the work raised."""

    def child(connection: Any) -> None:
        try:
            work()
            connection.send("")
        except (RuntimeError, cupy.CUDARuntimeError) as error:
            connection.send(str(error))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    process.join()
    try:
        said = ours.recv()
    except EOFError:
        said = ""
    return process.exitcode, said


def kernels() -> Path:
    return Path(os.environ["CUDA_ON_CPU_KERNELS"])


@pytest.fixture(scope="module")
def ours() -> Path:
    """The library of the plain kernel; the text that the compiler got lies beside it."""
    module = (load().folder / LIBRARY).read_bytes()
    return kernels() / nvcc.name_of(module[module.index(FATBIN) :])


def edited(text: str, edit: tuple[str, str]) -> str:
    """With an edit in the body of `main`, and without the kernels behind it."""
    start = text.index("main_kernel(", text.index("main_kernel(") + 1)
    end = text.index("\n}\n", start)
    body = text[start:end]
    assert edit[0] in body
    return text[:start] + body.replace(*edit) + text[end : end + len("\n}\n")]


@pytest.mark.parametrize("words", EDITS)
def test_a_wrong_kernel_is_caught(words: str, ours: Path) -> None:
    plan, held = adamw(3 * KernelSpec.parse(PLAIN).block_size)
    folder = kernels().parent / f"spoiled{list(EDITS).index(words)}"
    folder.mkdir()
    text = ours.with_suffix(".cu").read_text()
    nvcc.compile_here(edited(text, EDITS[words]), folder / ours.name)

    def work() -> None:
        os.environ["CUDA_ON_CPU_KERNELS"] = str(folder)
        plan.step(step=1, **HYPER)
        held["param"].get()

    # The device reads the variable as C does; a module is read at a kernel's first launch.
    code, said = apart(work)
    assert code == 0 and "main_kernel" in said
    assert any(each in said for each in words.split("|")), said


def test_the_kernel_itself_is_right() -> None:
    plan, held = adamw(3 * KernelSpec.parse(PLAIN).block_size)

    def work() -> None:
        plan.step(step=1, **HYPER)
        held["param"].get()

    assert apart(work) == (0, "")


def test_a_host_that_reads_device_memory_ends(capfd: Any) -> None:
    x = cupy.full(4, 1.0, "float32")
    address = x.__cuda_array_interface__["data"][0]
    code, _ = apart(lambda: print(ctypes.string_at(address, 16)))
    assert code == -11
    assert "the host touched device memory" in capfd.readouterr().err


def test_memory_that_was_freed_is_out_of_reach() -> None:
    """What a captured step reads has to live as long as its graph is replayed."""
    plan, held = adamw()
    replay = captured(plan.capturable(**HYPER).step)

    def work() -> None:
        replay()
        held["param"].get()

    code, said = apart(work)
    assert code == 0 and "not allocated" in said
