"""Who is compared with: what each peer needs, and the interpreter that has it.

A peer runs in a process of its own, in this environment where it is installed here, else in one
that the user names or that `tvm-qopt bench --setup-peers` makes.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_qopt.bench.measure import LeftOut
from tvm_qopt.errors import QoptError, ToolMissing, UnknownName

TORCH = "torch==2.13.0"


class SetupFailed(QoptError, RuntimeError):
    """An environment that cannot be made; the message says what was tried and what was said."""


@dataclass(frozen=True)
class Peer:
    """requires: requirements, the first its own.  environment: the folder it is installed in with
    others.  builds_with: what its sdist needs beforehand.  environ: variables for pip and for
    it."""

    name: str
    requires: tuple[str, ...]
    environment: str = "common"
    builds_with: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()

    @property
    def distributions(self) -> list[str]:
        return [requirement.partition("==")[0] for requirement in self.requires]


_LIST = (
    Peer("torch", (TORCH,)),
    Peer("bitsandbytes", ("bitsandbytes==0.50.2", TORCH)),
    Peer(  # its library for AVX-512 has one thread only
        "bitsandbytes-cpu-fork",
        ("bitsandbytes-cpu-fork==0.50.2.dev9", TORCH),
        environment="cpu-fork",
        environ=(("BNB_CPU_DISABLE_AVX512", "1"),),
    ),
    Peer("torchao", ("torchao==0.18.0", TORCH)),
    Peer(
        "deepspeed",
        ("deepspeed==0.19.8", TORCH),
        builds_with=("ninja", "py-cpuinfo", "setuptools", "wheel"),
        environ=(("DS_BUILD_OPS", "0"), ("DS_ACCELERATOR", "cpu")),
    ),
    Peer("optax", ("optax==0.2.8", "jax==0.10.2")),
)
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _LIST}


def parse(text: str) -> list[Peer]:
    """The peers of a list with commas.  Raises UnknownName."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise UnknownName("peer", name, PEERS)
    return [PEERS[name] for name in dict.fromkeys(names)]


def default_folder() -> Path:
    """Where environments are made unless the user says where."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("tvm_qopt")) / "peers"


def find_python(peer: Peer, folder: Path, named: Mapping[str, Path]) -> Path:
    """The interpreter for a peer; raises LeftOut where there is none."""
    if peer.name in named:
        return named[peer.name]
    if all(map(_installed, peer.distributions)):
        return Path(sys.executable)
    python = _python_of(folder / peer.environment)
    if not python.exists():
        raise LeftOut(
            f"not installed here nor in {folder}: `tvm-qopt bench --setup-peers` installs it there"
        )
    return python


def environ(peer: Peer, python: Path, folder: Path, threads: int) -> dict[str, str]:
    """The variables of a peer's process: its threads, its programs, and where it keeps what it
    compiles."""
    number = str(threads)
    path = os.pathsep.join(filter(None, (str(python.parent), os.environ.get("PATH"))))
    return {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": number,
        "NPROC": number,
        "TORCH_EXTENSIONS_DIR": str(folder / "compiled" / "torch_extensions"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled" / "inductor"),
        **dict(peer.environ),
    }


def set_up(peer: Peer, folder: Path) -> None:
    """Install a peer into its environment, made where it is not there yet.

    Raises SetupFailed with the end of what the installer said.
    """
    place = folder / peer.environment
    python = _python_of(place)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(place)], {})
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if peer.builds_with:
        _run([*pip, *peer.builds_with], {})
    flags = ["--no-build-isolation"] if peer.builds_with else []
    _run([*pip, *flags, *peer.requires], dict(peer.environ))


def check_compiler(peers: Sequence[Peer]) -> None:
    """Two peers compile when they are first used."""
    compiling = [peer.name for peer in peers if peer.name in ("torchao", "deepspeed")]
    if compiling and not shutil.which("g++"):
        raise ToolMissing(f"{' and '.join(compiling)} compile with g++, which is not installed")


def _run(command: list[str], variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-1500:]
        raise SetupFailed(f"{' '.join(command)} failed:\n{said}")


def _python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
