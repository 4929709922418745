"""One look at a machine with a GPU: are the kernels right there, and how fast.

    python tests/gpu/pack.py FOLDER      # where the compiler is: artifacts and all that they need
    python FOLDER/check.py               # on the machine: Python, NumPy and torch, nothing else

Prints one table, in under four minutes; the exit code is 1 where something is wrong.
`--device cupy` takes CuPy in place of torch; `--device opencl` tries the script itself, on any
OpenCL device, with artifacts packed for it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# In a packed folder everything lies beside this file, in a clone one and two folders up.
sys.path[:0] = [str(folder) for folder in (HERE, HERE / "site", HERE.parent, HERE.parent.parent)]

import numpy as np  # noqa: E402
import oracles  # noqa: E402
from cases import expected, moved, random_arrays  # noqa: E402
from peers import peer_rows  # noqa: E402

from tvm_qopt import reference  # noqa: E402
from tvm_qopt.devices.arrays import DEVICES, Array, Cuda  # noqa: E402
from tvm_qopt.runtime.kernel import Kernel  # noqa: E402
from tvm_qopt.runtime.library import runtime_libraries  # noqa: E402
from tvm_qopt.runtime.store import load  # noqa: E402
from tvm_qopt.spec import KernelSpec  # noqa: E402

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
ADAMW = "adamw-dynamic8-b256-p_f32-g_f32"
TENSORS = 300
SANITIZER_SECONDS = 60

Row = tuple[str, str, str]
"""What was looked at; "right", "WRONG", "left out" or a speed; more about it."""


class Check:
    """The device, the kernels at hand, and the time that is left for speed."""

    def __init__(self, device: Any, folder: Path, seconds: float) -> None:
        self.device, self.ends = device, time.monotonic() + seconds
        if (folder / "lib").is_dir():
            runtime_libraries(device.target, folder / "lib")
        self.missing: dict[str, str] = json.loads((folder / "left_out.json").read_text())
        paths = sorted((folder / "artifacts").iterdir())
        self.kernels: dict[str, Kernel] = {path.name: load(path) for path in paths}

    def hyper(self, spec: KernelSpec) -> dict[str, float]:
        return {h.name: HYPER[h.name] for h in spec.hyper if h.default is None}


# --- right ---


def wrong(check: Check, kernel: Kernel, n: int, shift: int) -> str | None:
    """What a step on n elements, `shift` elements into their memory, does that it should not."""
    spec, device = kernel.spec, check.device
    arrays, dtypes = random_arrays(spec, n), {t.name: t.dtype for t in spec.tensors}

    def put(name: str, x: Array) -> Any:
        whole = np.zeros(x.size + shift, x.dtype)
        whole[shift:] = x
        return device.put(whole, dtypes[name])[shift:]

    held = {name: put(name, x) for name, x in arrays.items()}
    given = {name: held.pop(name) for name in ("param", "grad") if name in held}
    maps = {name: held.pop(name) for name in list(held) if name.endswith("_qmap")}
    qmap = {name.removesuffix("_qmap"): x for name, x in maps.items()}
    hyper = check.hyper(spec)
    kernel.plan(**given, state=held, qmap=qmap or None).step(step=2, **hyper)
    got = {name: device.get(x) for name, x in {**given, **held}.items()}
    return reference.disagreement(spec, arrays, expected(spec, arrays, hyper), got)


def right_rows(check: Check) -> Iterator[Row]:
    for name, kernel in check.kernels.items():
        block = kernel.spec.block_size
        cases = [(1, 0), (block - 1, 3), (block, 0), (3 * block + 5, 3), (40 * block + 7, 0)]
        found = [(n, why) for n, shift in cases if (why := wrong(check, kernel, n, shift))]
        detail = f"n = {found[0][0]}: {found[0][1]}" if found else f"{len(cases)} sizes"
        yield name, "WRONG" if found else "right", detail
    for name, why in check.missing.items():
        yield name, "left out", why


def oracle_row(check: Check) -> Row:
    """Quantisation beside the table of levels, written by another hand."""
    kernel = check.kernels["quantize-dynamic8s-b256-p_f32-g_f32"]
    x = np.random.default_rng(5).normal(size=256 * 1000 + 100).astype(np.float32)
    param = check.device.put(x, "float32")
    state = kernel.init_state(param)
    kernel.plan(param=param, state=state).step(step=1)
    codes, scale = oracles.quantize(x, oracles.dynamic_map(True), 256)
    got, absmax = (check.device.get(state[f"value_{part}"]) for part in ("codes", "scale"))
    apart = np.abs(got.astype(int) - codes)
    fine = apart.max() <= 1 and np.count_nonzero(apart) <= 3 and (absmax == scale).all()
    detail = f"{np.count_nonzero(apart)} of {x.size} codes apart, next to midpoints"
    return "quantize, by the oracle", "right" if fine else "WRONG", detail


def norm_row(check: Check) -> Row:
    kernel = check.kernels["sum_sq-float32-b256-p_f32-g_f32"]
    x = np.random.default_rng(6).normal(size=1_000_003).astype(np.float32)
    param = check.device.put(x, "float32")
    got = kernel.plan(param=param, state=kernel.init_state(param)).norms()["param"]
    error = abs(got / np.linalg.norm(x.astype(np.float64)) - 1)
    return "norm of a tensor", "right" if error < 1e-6 else "WRONG", f"off by {error:.1e}"


def replay_row(check: Check) -> Row:
    """Captured steps beside planned ones, to the bit; one of them held back by found_inf."""
    kernel, device, runs = check.kernels[ADAMW], check.device, []
    arrays = random_arrays(kernel.spec, 100_007)
    for captured in (True, False):
        held = {name: device.put(x, str(x.dtype)) for name, x in arrays.items()}
        given = {name: held.pop(name) for name in ("param", "grad")}
        plan = kernel.plan(**given, state=held)
        if captured:
            replay(device, plan)
        for step in () if captured else (1, 2, 3):
            plan.step(step=step, **HYPER)
        runs.append([device.get(x) for x in (*given.values(), *held.values())])
    same = all(a.tobytes() == b.tobytes() for a, b in zip(*runs, strict=True))
    how = "CUDA graph" if device.target == "cuda" else "no graphs here: queued"
    return "captured steps, replayed", "right" if same else "WRONG", how


def replay(device: Any, plan: Any) -> None:
    """Four steps, the second of them held back."""
    flag = device.put(np.zeros(1, np.float32), "float32")
    step = plan.capturable(found_inf=flag, **HYPER)
    again = device.captured(step.step)
    for found in (0.0, 1.0, 0.0, 0.0):
        device.fill(flag, found)
        again()


def sanitizer_row(device: str, folder: Path) -> Row:
    what, tool = "racecheck", shutil.which("compute-sanitizer")
    if tool is None:
        return what, "left out", "no compute-sanitizer on this machine"
    script = [sys.executable, str(Path(__file__)), "--device", device, "--folder", str(folder)]
    command = [tool, "--tool", "racecheck", "--error-exitcode", "9", *script, "--only", "race"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_SECONDS)
    except subprocess.TimeoutExpired:
        return what, "left out", f"not done in {SANITIZER_SECONDS} s"
    said = [line for line in run.stdout.splitlines() if "SUMMARY" in line] or [run.stderr[-200:]]
    return what, "WRONG" if run.returncode else "right", said[-1].strip("= ")


# --- fast ---


def speed_rows(check: Check, size: int) -> Iterator[Row]:
    device = check.device
    copy = device.copy_speed(size)
    yield f"copy of {size:,} float32", f"{copy / 1e9:.1f} GB/s", "read and written"
    largest = max(2000, 2 * size // TENSORS)
    layout = np.random.default_rng(1).integers(1000, largest, TENSORS).tolist()
    layouts = {"one tensor": [size], f"{TENSORS} tensors": layout}
    for name, kernel in check.kernels.items():
        spec = kernel.spec
        if not spec.rule_.reads_grad or any(format_.runtime_map for _, format_ in spec.slots):
            continue
        for words, sizes in layouts.items():
            if time.monotonic() > check.ends:
                yield name, "left out", f"{words}: no time"
                continue
            took = step_seconds(check, kernel, sizes)
            share = sum(moved(spec, n) for n in sizes) / took / copy
            yield name, f"{share:.0%} of the copy", f"{words}: {took * 1e3:.3f} ms"
            device.free()
    if isinstance(device, Cuda):
        yield from peer_rows(device, layouts, copy)


def step_seconds(check: Check, kernel: Kernel, sizes: list[int]) -> float:
    """A step of tensors of these sizes; captured, where steps can be."""
    spec, device = kernel.spec, check.device
    hyper = check.hyper(spec)
    steps: list[Callable[[], object]] = []
    for n in sizes:
        param, grad = device.full(n, spec.param, 1.0), device.full(n, spec.grad, 1e-3)
        plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
        if spec.rule_.norms:
            steps.append(lambda plan=plan: plan.step(step=9, **hyper))  # type: ignore[misc]
        else:
            steps.append(plan.capturable(**hyper).step)

    def work() -> None:
        for step in steps:
            step()

    seconds: float = device.seconds(work if spec.rule_.norms else device.captured(work))
    return seconds


# --- the table ---


def rows_of(check: Check, device: str, folder: Path, size: int) -> Iterator[Row]:
    yield from right_rows(check)
    yield oracle_row(check)
    yield norm_row(check)
    yield replay_row(check)
    yield from speed_rows(check, size)
    if check.device.target == "cuda":
        yield sanitizer_row(device, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--folder", type=Path, default=HERE, help="where pack.py put everything")
    parser.add_argument("--size", type=int, default=1 << 28, help="elements to time a step on")
    parser.add_argument("--seconds", type=float, default=120, help="of timing, at most")
    parser.add_argument("--only", choices=("all", "race"), default="all")
    given = parser.parse_args()
    check = Check(DEVICES[given.device](), given.folder, given.seconds)
    if given.only == "race":
        return int(any(wrong(check, kernel, 600, 0) for kernel in check.kernels.values()))
    print(f"tvm_qopt on {check.device.name}")
    begun, failed = time.monotonic(), False
    for what, result, detail in rows_of(check, given.device, given.folder, given.size):
        failed |= result == "WRONG"
        print(f"{what:60} {result:20} {detail}", flush=True)
    print(f"{time.monotonic() - begun:.0f} s")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
