"""Modules for other processors: linked or left as objects, and run under an emulator or here.

Those for aarch64 and riscv64 are run by a small C program under qemu-user on what an x86-64 kernel
gets.
Codes and scales are compared bit for bit.  The weight may differ by contraction and division, so it
gets two units in the last place of the larger of weight and update (one rounding more or less in
each of the last two operations).
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt import reference
from tvm_qopt.compiler.build import build
from tvm_qopt.errors import ArtifactInvalid, ToolMissing
from tvm_qopt.manifest import LIBRARY, OBJECT, Manifest
from tvm_qopt.spec import COUNTER, GRAD, HYPER, PARAM, KernelSpec
from tvm_qopt.targets import TargetPreset, get_target, host_features

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

DRIVER = Path(__file__).with_name("aarch64_driver.c")
EMULATED = {  # target -> machine, the emulator's CPU
    "llvm-aarch64": ("aarch64", "cortex-a72"),
    "llvm-aarch64-sve": ("aarch64", "max,sve256=on"),
    "llvm-riscv64": ("riscv64", "rv64,v=true,vlen=128,vext_spec=v1.0,Zfhmin=true"),
}
TYPE_CODES = {"i": 0, "u": 1, "f": 2}  # of NumPy -> of DLPack
ELF_MACHINE = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
HYPERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
STEP = 7
SPECS = ("adamw-dynamic8-b256-p_f32-g_f32", "adamw-dynamic8-b64-p_f16-g_bf16")

on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64 code")


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def machine_of(path: Path) -> int:
    """e_machine of an ELF file."""
    header = path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    return int(struct.unpack_from("<H", header, 18)[0])


def inputs(spec: KernelSpec, size: int) -> Arrays:
    """Arguments in the middle of a training: weights, gradients, codes and scales of all sizes."""
    rng = np.random.default_rng(size)
    arrays: Arrays = {}
    for t in spec.tensors:
        n = size if t.per_element else -(-size // spec.block_size)
        if t.role == HYPER:
            arrays[t.name] = scalars(spec)
        elif t.role == COUNTER:
            arrays[t.name] = np.zeros(n, np.int32)
        elif t.role in (PARAM, GRAD):
            arrays[t.name] = stored(rng.normal(size=n).astype(np.float32), t.dtype)
        elif t.dtype == "uint8":
            arrays[t.name] = rng.integers(0, 256, n, dtype=np.uint8)
        else:
            arrays[t.name] = (10.0 ** rng.uniform(-6, 0, n)).astype(np.float32)
    return arrays


def scalars(spec: KernelSpec) -> npt.NDArray[np.float32]:
    """What the kernel reads of the hyper-parameters; the factor on the gradient is 1."""
    derived = spec.rule_.derive(HYPERS, STEP, spec.all_settings)
    return np.array([1.0, *(derived[name] for name in spec.rule_.scalars)], np.float32)


def stored(x: npt.NDArray[np.float32], dtype: str) -> Array:
    """Values as a tensor of the dtype holds them; bfloat16 as its bits."""
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype)


def values(x: Array, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def call_here(kernel: Any, arrays: Mapping[str, Array]) -> Arrays:
    """The arrays after a step of a loaded kernel."""
    after = {name: x.copy() for name, x in arrays.items()}
    state = {name: x for name, x in after.items() if name not in ("hyper", "param", "grad")}
    kernel.plan(param=after["param"], grad=after["grad"], state=state).step(step=STEP, **HYPERS)
    return after


def windows(spec: KernelSpec, arrays: Mapping[str, Array], first: int, blocks: int) -> Arrays:
    """The part of each array for `blocks` blocks from `first` on, in the shape of its argument."""
    block = spec.block_size
    size = arrays["param"].size
    length = min(block, size - first * block)
    parts: Arrays = {}
    for t in spec.tensors:
        x = arrays[t.name]
        if t.per_element:
            x = x[first * block : first * block + blocks * length].reshape(blocks, length)
        elif t.shape == ("nb",):
            x = x[first : first + blocks]
        parts[t.name] = x
    return parts


def write_arguments(path: Path, spec: KernelSpec, parts: Mapping[str, Array]) -> None:
    with path.open("wb") as file:
        for t in spec.tensors:
            x = parts[t.name].view(t.storage)
            extents = (*x.shape, *(0,) * (4 - x.ndim))
            kind = TYPE_CODES[x.dtype.kind]
            file.write(struct.pack("<8q", kind, x.itemsize * 8, x.ndim, *extents, x.nbytes))
            file.write(x.tobytes())


def read_arguments(path: Path, spec: KernelSpec, parts: Mapping[str, Array]) -> Arrays:
    """The arrays of an argument file, in one axis each."""
    data, offset, found = path.read_bytes(), 0, {}
    for t in spec.tensors:
        x = parts[t.name]
        offset += 8 * 8
        found[t.name] = np.frombuffer(data, x.dtype, x.size, offset)
        offset += x.nbytes
    return found


@dataclass(frozen=True)
class Emulator:
    """Runs the driver for a machine on an emulated CPU."""

    driver: Path
    machine: str
    cpu: str

    def call(self, module: Path, entry: str, spec: KernelSpec, parts: Arrays, file: Path) -> Arrays:
        """The arrays after a call of an entry point."""
        write_arguments(file, spec, parts)
        qemu = [f"qemu-{self.machine}", "-cpu", self.cpu, "-L", f"/usr/{self.machine}-linux-gnu"]
        command = [*qemu, str(self.driver), str(module), f"__tvm_ffi_{entry}", str(file)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert run.returncode == 0, f"{run.returncode}: {run.stderr}"
        return read_arguments(file, spec, parts)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulator]:
    """The emulator for a target; skips where it or the cross compiler is not installed."""

    @cache
    def driver(machine: str) -> Path:
        path = tmp_path_factory.mktemp("driver") / machine
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-rdynamic"]
        command = [f"{machine}-linux-gnu-gcc", *flags, "-o", str(path), str(DRIVER), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return path

    def get(target: str) -> Emulator:
        machine, cpu = EMULATED[target]
        needs(f"{machine}-linux-gnu-gcc", f"qemu-{machine}")
        if not Path(f"/usr/{machine}-linux-gnu/include/stdio.h").is_file():
            pytest.skip(f"the C library for {machine} is not installed")
        return Emulator(driver(machine), machine, cpu)

    return get


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds an artifact once: (spec name, target) -> folder and manifest."""
    root = tmp_path_factory.mktemp("artifacts")
    made: dict[tuple[str, str], tuple[Path, Manifest]] = {}

    def get(spec: str, target: str) -> tuple[Path, Manifest]:
        if (spec, target) not in made:
            folder = root / f"{len(made)}"
            made[spec, target] = folder, build(KernelSpec.parse(spec), get_target(target), folder)
        return made[spec, target]

    return get


def assert_same_step(spec: KernelSpec, got: Arrays, want: Arrays, before: Arrays) -> None:
    for t in spec.tensors:
        if t.output and t.role != PARAM:
            np.testing.assert_array_equal(got[t.name], want[t.name].reshape(-1), err_msg=t.name)
    p, reference, old = (values(x["param"].reshape(-1), spec.param) for x in (got, want, before))
    larger = np.maximum(np.maximum(np.abs(old), np.abs(reference)), np.abs(reference - old))
    digits = {"float32": 23, "float16": 10, "bfloat16": 7}[spec.param]
    ulp = 2.0 ** (np.floor(np.log2(larger)) - digits)
    assert (np.abs(p - reference) <= 2 * ulp).all()


@on_x86
@pytest.mark.parametrize("target", EMULATED)
@pytest.mark.parametrize("name", SPECS)
def test_a_foreign_module_does_what_x86_code_does(
    name: str,
    target: str,
    emulator: Callable[[str], Emulator],
    artifact: Any,
    tmp_path: Path,
) -> None:
    spec, emulated = KernelSpec.parse(name), emulator(target)
    folder, manifest = artifact(name, target)
    before = inputs(spec, 5 * spec.block_size + 37)
    after = call_here(tvm_qopt.load(spec, target=x86_level("v3").name), before)
    assert set(manifest.entries) == {"main", "main_serial", "tail"}
    for entry, first, blocks in (("main", 0, 5), ("main_serial", 0, 5), ("tail", 5, 1)):
        parts, want = (windows(spec, x, first, blocks) for x in (before, after))
        got = emulated.call(folder / LIBRARY, entry, spec, parts, tmp_path / entry)
        assert_same_step(spec, got, want, parts)
        assert not np.array_equal(got["param"], parts["param"].reshape(-1))


@on_x86
def test_a_foreign_module_counts_and_skips_what_is_not_finite(
    emulator: Callable[[str], Emulator], artifact: Any, tmp_path: Path
) -> None:
    spec, emulated = KernelSpec.parse(SPECS[0]), emulator("llvm-aarch64")
    folder, _ = artifact(SPECS[0], "llvm-aarch64")
    before = inputs(spec, 2 * spec.block_size)
    before["grad"][[3, 300]] = np.nan, np.inf
    after = call_here(tvm_qopt.load(spec, target=x86_level("v3").name), before)
    parts, want = windows(spec, before, 0, 2), windows(spec, after, 0, 2)
    got = emulated.call(folder / LIBRARY, "main", spec, parts, tmp_path / "arguments")
    assert_same_step(spec, got, want, parts)
    assert got["nonfinite_count"].tolist() == [1, 1]
    assert got["param"][[3, 300]].tolist() == before["param"][[3, 300]].tolist()


def x86_level(level: str) -> TargetPreset:
    preset = get_target(f"llvm-x86-64-{level}")
    if missing := sorted(set(preset.features) - host_features()):
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    return preset


@on_x86
def test_levels_with_fused_arithmetic_differ_by_an_ulp_of_the_decoded_state() -> None:
    """v4 looks up what v3 computes; both are within 2 ulp of the map's levels."""
    presets, spec = [x86_level("v3"), x86_level("v4")], KernelSpec.parse(SPECS[0])
    arrays = inputs(spec, 40 * spec.block_size + 11)
    kernels = [tvm_qopt.load(spec, target=preset.name) for preset in presets]
    assert [kernel.manifest.features for kernel in kernels] == [p.features for p in presets]
    v3, v4 = (call_here(kernel, arrays) for kernel in kernels)
    for name in ("exp_avg_scale", "exp_avg_sq_scale", "param"):
        np.testing.assert_allclose(v4[name], v3[name], rtol=5e-7, atol=1e-7, err_msg=name)
    for name in ("exp_avg_codes", "exp_avg_sq_codes"):
        apart = np.abs(v4[name].astype(int) - v3[name])
        assert apart.max() <= 1 and apart.mean() < 1e-3  # beside a midpoint


@on_x86
def test_level_v4_does_what_native_code_does() -> None:
    preset, spec = x86_level("v4"), KernelSpec.parse(SPECS[0])
    arrays = inputs(spec, 40 * spec.block_size + 11)
    got = call_here(tvm_qopt.load(spec, target=preset.name), arrays)
    assert_same_step(spec, got, call_here(tvm_qopt.load(spec), arrays), arrays)


@on_x86
@pytest.mark.parametrize("name", SPECS)
def test_x86_code_without_fused_arithmetic_is_the_reference_bit_for_bit(name: str) -> None:
    """Level v2 has no fused multiply-add, so every operation rounds as NumPy's does."""
    preset, spec = x86_level("v2"), KernelSpec.parse(name)
    arrays = inputs(spec, 40 * spec.block_size + 11)
    got = call_here(tvm_qopt.load(spec, target=preset.name), arrays)
    want = reference.step(spec, {t.name: arrays[t.name].view(t.storage) for t in spec.tensors})
    for t in spec.tensors:
        if t.output:
            np.testing.assert_array_equal(got[t.name].view(t.storage), want[t.name], t.name)


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("llvm-x86-64-v4", "x86_64"),
        ("llvm-aarch64", "aarch64"),
        ("llvm-aarch64-sve", "aarch64"),
        ("llvm-riscv64", "riscv64"),
    ],
)
def test_a_target_is_linked_where_its_linker_is(target: str, machine: str, artifact: Any) -> None:
    folder, manifest = artifact(SPECS[0], target)
    linker = get_target(target).linker
    native = machine == platform.machine()
    expected = LIBRARY if native or (linker and shutil.which(linker)) else OBJECT
    assert list(manifest.files) == [expected]
    assert machine_of(folder / expected) == ELF_MACHINE[machine]
    if not native:
        with pytest.raises(ArtifactInvalid, match=f"built for {target} .* this machine is"):
            tvm_qopt.load(folder)


@pytest.mark.parametrize("target", ["llvm-aarch64", "llvm-riscv64"])
def test_without_its_linker_a_target_is_an_object(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    preset = get_target(target)
    folder = tmp_path / "artifact"
    manifest = build(KernelSpec.parse(SPECS[0]), preset, folder)
    assert list(manifest.files) == [OBJECT]
    assert machine_of(folder / OBJECT) == ELF_MACHINE[preset.machine]
    assert sorted(path.name for path in folder.iterdir()) == [OBJECT, "manifest.json"]


def test_without_a_compiler_this_machine_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ToolMissing, match="apt install gcc, or set CC"):
        build(KernelSpec.parse(SPECS[0]), get_target("llvm-native"), tmp_path / "artifact")
    assert not list(tmp_path.iterdir())
