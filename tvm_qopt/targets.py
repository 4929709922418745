"""Target presets: a name for each kind of machine, what LLVM or nvcc is told, what it must have.

May import the standard library and layer 0 only.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tvm_qopt.errors import ToolMissing, UnknownName, UnsupportedSpec

X86_FEATURES = {  # LLVM's name -> the flag in /proc/cpuinfo
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "popcnt": "popcnt",
    "cx16": "cx16",
    "avx": "avx",
    "avx2": "avx2",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "lzcnt": "abm",
    "movbe": "movbe",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512ifma": "avx512ifma",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "gfni": "gfni",
    "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq",
    "avxvnni": "avx_vnni",
}
ARM_FEATURES = {"neon": "asimd", "fullfp16": "asimdhp", "sve": "sve", "sve2": "sve2"}

_X86_V2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
_X86_V3 = (*_X86_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_X86_V4 = (*_X86_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

_RVV = ("+zve64d", "+zvl128b", "+zfhmin")

CUDA_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Turing to Blackwell: T4, A100, A10, L4 and RTX 40, H100 and H200, B200, RTX 50."""


@dataclass(frozen=True)
class TargetPreset:
    """What to build for.

    attributes: of TVM's target of this kind.  machine: of the host (`uname -m`).  features: LLVM's
    names of what the CPU must have.  archs: the GPU architectures.  linker: the cross compiler that
    makes the shared library, None where the host's own does.  decisions: choices of the schedule,
    by name, that are to be others here than its defaults.
    """

    name: str
    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    machine: str = "x86_64"
    features: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    linker: str | None = None
    decisions: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def on_cpu(self) -> bool:
        return self.kind == "llvm"


def _x86(level: str, features: tuple[str, ...]) -> TargetPreset:
    attributes = {"mtriple": "x86_64-linux-gnu", "mcpu": f"x86-64-{level}"}
    return TargetPreset(f"llvm-x86-64-{level}", "llvm", attributes, features=features)


def _cross(
    name: str, machine: str, decisions: Mapping[str, int] | None = None, **attributes: Any
) -> TargetPreset:
    features = tuple(f.lstrip("+") for f in attributes["mattr"])
    attributes["mtriple"] = f"{machine}-linux-gnu"
    linker = f"{machine}-linux-gnu-gcc"
    return TargetPreset(name, "llvm", attributes, machine, features, (), linker, decisions or {})


PRESETS: dict[str, TargetPreset] = {
    preset.name: preset
    for preset in (
        _x86("v2", _X86_V2),
        _x86("v3", _X86_V3),
        _x86("v4", _X86_V4),
        _cross("llvm-aarch64", "aarch64", mattr=["+neon"]),
        _cross("llvm-aarch64-sve", "aarch64", mattr=["+neon", "+sve"]),
        # zve64d and zvl128b are what v stands for; TVM takes v itself for scalable vectors, which
        # its lowering of masked stores does not survive.  zfhmin: without it float16 is converted
        # by calls whose convention TVM gets wrong.  16 lanes are groups of four vector registers;
        # code with groups of eight ends QEMU 7.2, and no other machine was there to try it.
        _cross(
            "llvm-riscv64",
            "riscv64",
            decisions={"lanes": 16},
            mattr=["+m", "+a", "+f", "+d", "+c", *_RVV],
        ),
        *(
            TargetPreset(f"cuda-{arch.replace('_', '')}", "cuda", {"arch": arch}, archs=(arch,))
            for arch in CUDA_ARCHS
        ),
        TargetPreset("cuda-all", "cuda", {"arch": CUDA_ARCHS[0]}, archs=CUDA_ARCHS),
        TargetPreset("opencl", "opencl"),
        TargetPreset("metal", "metal"),
        TargetPreset("webgpu", "webgpu"),
    )
}
_LACKING = {
    "rocm": "TVM's wheel has no runtime for HIP, and needs of ROCm the device libraries (bitcode) "
    "and the linker ld.lld; AMD's OpenCL driver runs --target opencl",
    "vulkan": "TVM's wheel has no SPIR-V code generator; --target opencl gives OpenCL C",
}
NATIVE = "llvm-native"


def known_targets() -> tuple[str, ...]:
    return (NATIVE, *PRESETS)


def get_target(name: str) -> TargetPreset:
    """The preset of a name; cuda architectures may be joined: cuda-sm80+sm90."""
    if name == NATIVE:
        return native()
    if name in PRESETS:
        return PRESETS[name]
    archs = tuple(re.sub(r"^sm", "sm_", arch) for arch in name.removeprefix("cuda-").split("+"))
    if name.startswith("cuda-") and all(arch in CUDA_ARCHS for arch in archs):
        archs = tuple(sorted(set(archs), key=CUDA_ARCHS.index))
        joined = "+".join(arch.replace("_", "") for arch in archs)
        return TargetPreset(f"cuda-{joined}", "cuda", {"arch": archs[0]}, archs=archs)
    if name in _LACKING:
        raise UnsupportedSpec(f"target {name}: {_LACKING[name]}")
    raise UnknownName("target", name, known_targets())


def find_linker(preset: TargetPreset) -> str | None:
    """The compiler driver that links for a target; None where a cross compiler is not installed.

    Raises ToolMissing where this machine's own is missing.
    """
    if preset.linker and preset.machine != platform.machine():
        return shutil.which(preset.linker)
    for name in filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")):
        if found := shutil.which(name):
            return found
    raise ToolMissing("no C compiler found to link the module: apt install gcc, or set CC to one")


def cuda_code(archs: Sequence[str]) -> tuple[str, ...]:
    """What an artifact for `archs` holds: machine code for each ("sm_90"), and PTX ("compute_120")
    for cards later than this version where the newest architecture is among them."""
    newest = CUDA_ARCHS[-1]
    return (*archs, newest.replace("sm", "compute")) if newest in archs else tuple(archs)


def runs_on(code: str, gpu: str) -> bool:
    """Whether a GPU of architecture `gpu` runs a piece of CUDA code.

    Machine code runs on its own major version from its own minor version upwards, PTX on its own
    and every later version.
    """
    (major, minor), (has_major, has_minor) = (
        divmod(int(name.rpartition("_")[2]), 10) for name in (code, gpu)
    )
    if code.startswith("compute_"):
        return (major, minor) <= (has_major, has_minor)
    return major == has_major and minor <= has_minor


def cuda_target(arch: str) -> str:
    """The preset whose code a GPU of architecture `arch` ("sm_90") runs best."""
    fitting = [k for k in CUDA_ARCHS if any(runs_on(code, arch) for code in cuda_code((k,)))]
    if not fitting:
        raise UnknownName("GPU architecture", arch, CUDA_ARCHS)
    return f"cuda-{fitting[-1].replace('_', '')}"


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features this CPU has, among those that presets speak of."""
    known = X86_FEATURES if platform.machine() == "x86_64" else ARM_FEATURES
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, flags=re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return frozenset(name for name, flag in known.items() if flag in flags)


def cpu_model() -> str:
    """What this machine's CPU is called, by its kernel."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^model name\s*:\s*(.*)$", text, flags=re.MULTILINE)
    return found[1] if found else platform.machine()


@cache
def native() -> TargetPreset:
    """This machine, by the features that its kernel reports.

    LLVM is not asked for the CPU's name: a virtual machine may hide features that the name implies.
    """
    machine, features = platform.machine(), tuple(sorted(host_features()))
    known = X86_FEATURES if machine == "x86_64" else ARM_FEATURES
    mattr = [f"{'+' if name in features else '-'}{name}" for name in sorted(known)]
    attributes = {"mtriple": f"{machine}-linux-gnu", "mattr": mattr}
    return TargetPreset(NATIVE, "llvm", attributes, machine, features)
