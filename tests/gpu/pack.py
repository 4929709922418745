"""Everything that check.py needs on a machine with a GPU, in one folder of less than 64 MiB.

    python tests/gpu/pack.py FOLDER [--target cuda-sm90] [--python 3.12]

Artifacts (built here, no GPU needed), TVM's runtime libraries, this package without its compiler,
and apache-tvm-ffi for that Python, which pip downloads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from tvm_qopt.compiler.build import build  # noqa: E402
from tvm_qopt.devices.surroundings import add_surroundings, check_size  # noqa: E402
from tvm_qopt.errors import BuildError, UnsupportedSpec  # noqa: E402
from tvm_qopt.spec import KernelSpec  # noqa: E402
from tvm_qopt.targets import get_target  # noqa: E402

SPECS = [
    "adamw-dynamic8-b256-p_f32-g_f32",
    "quantize-dynamic8s-b256-p_f32-g_f32",
    "sum_sq-float32-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_bf16-g_bf16",
    "adamw-fp8-b256-p_f32-g_f32",
    "adamw-4bit-b128-p_f32-g_f32",
    "adamw-linear8s+sqrt8u-b256-p_f32-g_f32",
    "adamw-codebook8-b256-p_f32-g_f32",
    "adamw-float32-b256-p_f32-g_f32",
    "adamw-dynamic8-b256-p_bf16_split-g_bf16",
    "lion-dynamic8-b256-p_f32-g_f32",
    "lamb-dynamic8-b256-p_f32-g_f32",
    "lans-dynamic8-b256-p_f32-g_f32",
    "dequantize-dynamic8s-b256-p_f32-g_f32",
]
FEW = 3  # what a trial of the script itself needs
OURS = ("cases.py", "check.py", "peers.py")


def artifacts(folder: Path, target: str, specs: list[str]) -> None:
    """Build the specs; those that the target has no schedule for are noted."""
    left_out = {}
    for name in specs:
        try:
            build(KernelSpec.parse(name), get_target(target), folder / "artifacts" / name)
        except (BuildError, UnsupportedSpec) as error:
            left_out[name] = str(error)
    (folder / "left_out.json").write_text(json.dumps(left_out, indent=1))


def scripts(folder: Path) -> None:
    for path in (*(HERE / name for name in OURS), HERE.parent / "oracles.py"):
        shutil.copy2(path, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cuda-sm90")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--few", action="store_true", help=f"{FEW} artifacts and nothing else")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    artifacts(given.folder, given.target, SPECS[:FEW] if given.few else SPECS)
    if not given.few:
        scripts(given.folder)
        add_surroundings(given.folder, get_target(given.target).kind, given.python)
    print(f"{given.folder}: {check_size(given.folder) / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
