"""The GPU kernels, run without a GPU: as OpenCL C on PoCL against the reference, and in the
simulator Oclgrind, which reports data races and accesses out of bounds.

CUDA kernels come from the same scheduled function.  float16 is left out: it needs cl_khr_fp16,
which PoCL on a CPU does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import opencl_runner
import pytest
import tvm_ffi
from opencl_runner import Launch

from tvm_qopt import reference
from tvm_qopt.compiler import opencl
from tvm_qopt.compiler.build import compile_spec, lower
from tvm_qopt.compiler.cuda import device_source
from tvm_qopt.errors import BuildError
from tvm_qopt.formats.dynamic import dynamic_map
from tvm_qopt.spec import CONST, COUNTER, GRAD, GRADIENT_SCALAR, HYPER, KernelSpec, TensorSpec
from tvm_qopt.targets import get_target

Array = npt.NDArray[Any]
MAIN, ANY, TAIL = "main", "main_any", "tail"
SPECS = [
    *(f"adamw-dynamic8-b{size}-p_{d}-g_{d}" for size in (64, 256, 4096) for d in ("f32", "bf16")),
    "adamw-dynamic8-b256-p_bf16-g_f32-nonfinite_propagate",
    "adamw-codebook8-b256",
    "adamw-float32-b256",
]
HYPER_VALUES = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture(scope="module")
def device() -> None:
    if why := opencl_runner.why_missing(oclgrind=False):
        pytest.skip(why)


@pytest.fixture(scope="module")
def oclgrind() -> None:
    if why := opencl_runner.why_missing(oclgrind=True):
        pytest.skip(why)


Decisions = tuple[tuple[str, int], ...]


@cache
def build(name: str, decisions: Decisions = ()) -> tuple[str, dict[str, int]]:
    """OpenCL C of a spec, and the threads of a group of each entry point."""
    spec, chosen = KernelSpec.parse(name), dict(decisions)
    executable = compile_spec(spec, get_target("opencl"), decisions=chosen)
    threads = {entry: _threads(spec, entry, chosen) for entry in (MAIN, ANY, TAIL)}
    return opencl.opencl_source(executable), threads


def _threads(spec: KernelSpec, entry: str, decisions: Mapping[str, int]) -> int:
    """The extent of threadIdx.x, one for all loops bound to it."""
    script = lower(spec, get_target("opencl"), entry, decisions).final.script()
    found = re.findall(r'thread_binding\((?:T\.int64\()?(\d+)\)?, thread="threadIdx.x"', script)
    (extent,) = set(found)
    return int(extent)


# --- arrays ---


def random_arrays(spec: KernelSpec, n: int) -> dict[str, Array]:
    """A state in mid-training: gradients over four decades, three that are not finite, and a block
    that has no state yet."""
    rng = np.random.default_rng(n)
    return {t.name: _random(rng, spec, t, n) for t in spec.tensors}


def _random(rng: np.random.Generator, spec: KernelSpec, t: TensorSpec, n: int) -> Array:
    blocks = -(-n // spec.block_size)
    if t.role == HYPER:
        scalars = spec.rule_.derive(HYPER_VALUES, 5, spec.all_settings)
        values = {**scalars, GRADIENT_SCALAR: 0.5}
        return np.array([values[name] for name in spec.scalars], np.float32)
    if t.role == CONST:
        return dynamic_map(signed="sq" not in t.name)
    if t.role == COUNTER:
        return rng.integers(0, 9, blocks, dtype=np.int32)
    if t.name.endswith("_scale"):
        scale = 10 ** rng.uniform(-6, 0, blocks)
        scale[-1] = 0
        return scale.astype(np.float32)
    if t.dtype == "uint8":
        return rng.integers(0, 256, n, dtype=np.uint8)
    return _stored(_random_floats(rng, t, n), t.dtype)


def _random_floats(rng: np.random.Generator, t: TensorSpec, n: int) -> Array:
    x = rng.normal(size=n)
    if t.role == GRAD:
        x *= 10 ** rng.uniform(-5, -1, n)
        bad = np.array([np.nan, np.inf, -np.inf])[: n // 8]
        x[rng.integers(n, size=bad.size)] = bad
    return np.abs(x) if "_sq" in t.name else x


def _stored(x: Array, dtype: str) -> Array:
    """As the kernel takes it: bfloat16 as its bits (truncated, which tests need not care about)."""
    x = x.astype(np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x


def _part(spec: KernelSpec, arrays: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    """Views of elements start to stop, and of the blocks in which they lie."""
    size = spec.block_size
    elements, blocks = slice(start, stop), slice(start // size, -(-stop // size))
    ranges: dict[tuple[int | str, ...], slice] = {("nb", "B"): elements, ("nb",): blocks}
    return {t.name: arrays[t.name][ranges.get(t.shape, slice(None))] for t in spec.tensors}


def launches_of(
    name: str, arrays: Mapping[str, Array], main: str = MAIN, decisions: Decisions = ()
) -> list[Launch]:
    """Full blocks by `main`, the rest by the tail, as a Plan launches them."""
    spec, (_, threads) = KernelSpec.parse(name), build(name, decisions)
    n = arrays["param"].size
    full = n // spec.block_size
    end = full * spec.block_size
    launches = []
    if full:
        part = _part(spec, arrays, 0, end)
        launches.append(Launch(f"{main}_kernel", full, threads[main], {"nb": full}, part))
    if end < n:
        part = _part(spec, arrays, end, n)
        launches.append(Launch(f"{TAIL}_kernel", 1, threads[TAIL], {"B": n - end}, part))
    return launches


# --- comparison ---


def assert_step(
    spec: KernelSpec, before: Mapping[str, Array], parts: list[dict[str, Array]]
) -> None:
    """The kernels' results are those of the reference, but for what contraction moves."""
    want = reference.step(spec, before)
    for t in spec.tensors:
        if t.output:
            got = np.concatenate([part[t.name] for part in parts])
            _assert_close(t, before[t.name], got, want[t.name])


def _assert_close(t: TensorSpec, before: Array, got: Array, want: Array) -> None:
    if t.role == COUNTER:
        np.testing.assert_array_equal(got, want, t.name)
    elif got.dtype != np.float32:
        # next to a midpoint between two levels (or two bfloat16) an ulp decides; bfloat16 gradients
        # of a block without state have few bits, so more of them lie there
        apart = np.abs(got.astype(np.int64) - want)
        assert apart.max(initial=0) <= 1, t.name
        assert np.count_nonzero(apart) <= 2 + got.size // 500, t.name
    else:
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), t.name)
        scaled = t.name.endswith("_scale")
        size = np.abs(want) if scaled else _largest(before, want)
        # fused or not, each of the two to four roundings differs by an ulp of the largest term
        assert np.all((np.abs(got - want) <= 4 * np.spacing(size)) | np.isnan(want)), t.name


def _largest(before: Array, after: Array) -> Array:
    """The largest of the terms that formed a value: the old one, and what was added to it."""
    with np.errstate(invalid="ignore"):
        terms = np.abs([before, after, after - before])
    largest: Array = terms.max(axis=0)
    return largest


# --- on PoCL ---


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", SPECS)
def test_kernels_equal_the_reference(name: str) -> None:
    spec = KernelSpec.parse(name)
    size = spec.block_size
    cases = [
        (n, main)
        for n in (1, size - 1, size, 3 * size + size // 2 + 1, 40 * size + 7)
        for main in ((MAIN, ANY) if n >= size else (MAIN,))
    ]
    before = [random_arrays(spec, n) for n, _ in cases]
    jobs = [launches_of(name, a, main) for a, (_, main) in zip(before, cases, strict=True)]
    source, _ = build(name)
    results = iter(opencl_runner.run(source, [job for jobs_ in jobs for job in jobs_]).arrays)
    for arrays, job in zip(before, jobs, strict=True):
        assert_step(spec, arrays, [next(results) for _ in job])


TILINGS = [
    ("adamw-dynamic8-b256", (("threads", 64), ("elements", 4))),
    ("adamw-dynamic8-b4096", (("threads", 64), ("elements", 8))),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "decisions"), TILINGS)
def test_kernels_with_other_tilings_equal_the_reference(name: str, decisions: Decisions) -> None:
    spec = KernelSpec.parse(name)
    arrays = random_arrays(spec, 5 * spec.block_size + 7)
    source, _ = build(name, decisions)
    assert source != build(name)[0]
    for main in (MAIN, ANY):
        outcome = opencl_runner.run(source, launches_of(name, arrays, main, decisions))
        assert_step(spec, arrays, outcome.arrays)


# --- in the simulator ---


@pytest.mark.usefixtures("oclgrind")
@pytest.mark.parametrize("name", SPECS)
def test_simulator_reports_nothing(name: str) -> None:
    spec = KernelSpec.parse(name)
    arrays = random_arrays(spec, 2 * spec.block_size + spec.block_size // 2 + 1)
    launches = [*launches_of(name, arrays), launches_of(name, arrays, ANY)[0]]
    outcome = opencl_runner.run(build(name)[0], launches, oclgrind=True)
    assert outcome.reports == ""
    assert_step(spec, arrays, outcome.arrays[:2])


@pytest.mark.usefixtures("oclgrind")
def test_simulator_reports_nothing_with_another_tiling() -> None:
    name, decisions = TILINGS[0]
    spec = KernelSpec.parse(name)
    arrays = random_arrays(spec, 2 * spec.block_size + 1)
    launches = launches_of(name, arrays, decisions=decisions)
    outcome = opencl_runner.run(build(name, decisions)[0], launches, oclgrind=True)
    assert outcome.reports == ""
    assert_step(spec, arrays, outcome.arrays)


def without_barriers(source: str) -> str:
    return re.sub(r"barrier\([^)]*\);", "", source)


def with_local_fences(source: str) -> str:
    return source.replace(" | CLK_GLOBAL_MEM_FENCE", "")


@pytest.mark.usefixtures("oclgrind")
@pytest.mark.parametrize("entry", [MAIN, TAIL])
@pytest.mark.parametrize("spoil", [without_barriers, with_local_fences])
def test_simulator_sees_what_barriers_are_for(spoil: Any, entry: str) -> None:
    name = SPECS[0]
    source, _ = build(name)
    assert spoil(source) != source
    launches = launches_of(name, random_arrays(KernelSpec.parse(name), 64 if entry == MAIN else 63))
    assert "data race" in opencl_runner.run(spoil(source), launches, oclgrind=True).reports


@pytest.mark.usefixtures("oclgrind")
def test_simulator_sees_a_block_too_many() -> None:
    name = SPECS[0]
    arrays = random_arrays(KernelSpec.parse(name), 64)
    launch = Launch("main_kernel", 2, build(name)[1][MAIN], {"nb": 1}, arrays)
    assert "Invalid" in opencl_runner.run(build(name)[0], [launch], oclgrind=True).reports


# --- the source ---


def test_every_barrier_fences_global_memory() -> None:
    source, _ = build(SPECS[0])
    barriers = set(re.findall(r"barrier\(([^)]*)\)", source))
    assert barriers == {"CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE"}


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_cuda_has_a_barrier_between_old_and_new_scales(size: int) -> None:
    """Also where a block is one warp, whose shuffles need no barrier."""
    spec = KernelSpec.of("adamw", block_size=size)
    source = device_source(compile_spec(spec, get_target("cuda-sm90")))
    kernels = [text for text in source.split('extern "C"') if "threadIdx.x" in text]
    assert len(kernels) == 3
    for kernel in kernels:
        body = kernel[kernel.index("{") :]
        reads, writes = (_places(body, rf"{sign}") for sign in (r"(?! = )", " = "))
        barrier = body.rindex("__syncthreads()")
        assert max(reads) < barrier < min(writes)


def _places(body: str, sign: str) -> list[int]:
    """Where a kernel mentions its blocks' scales and counts, by what follows."""
    arguments = r"(?:exp_avg_scale|exp_avg_sq_scale|nonfinite_count)_ptr"
    return [found.start() for found in re.finditer(rf"{arguments}\[[^\]]*?\]{sign}", body)]


def test_source_without_the_fence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencl, "_fence_all", lambda code, target: code)
    try:
        executable = compile_spec(KernelSpec.parse("adamw-float32"), get_target("opencl"))
        with pytest.raises(BuildError, match="register_barrier_fence"):
            opencl.opencl_source(executable)
    finally:
        monkeypatch.undo()
        opencl.register_barrier_fence()
    assert tvm_ffi.get_global_func("tvm_callback_opencl_postproc")("x", None) == "x"
