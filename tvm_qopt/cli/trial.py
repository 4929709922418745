"""One tiny build and run, compared with the reference: what `doctor` runs in a child process."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from tvm_qopt.errors import QoptError

if TYPE_CHECKING:
    from tvm_qopt.spec import KernelSpec

BLOCKS, REST = 40, 100  # enough for the parallel entry point, and a short last block
HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
}
P_TOLERANCE = 1e-6  # of weights near 1: contraction and the order of a division, a few ulp
CODE_TOLERANCE = 1  # a moment that lies at a midpoint of two levels


def main() -> int:
    """Print one line of JSON, or why it failed; the exit code says which."""
    try:
        print(json.dumps(run()))
    except QoptError as error:
        print(error)
        return 1
    return 0


def run() -> dict[str, Any]:
    """Build (into the store of the environment), step once, compare.  Raises QoptError."""
    import numpy as np

    import tvm_qopt

    spec = tvm_qopt.KernelSpec.of("adamw", "dynamic8")
    rng = np.random.default_rng(0)
    size = BLOCKS * spec.block_size + REST
    param, grad = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    start = time.perf_counter()
    kernel = tvm_qopt.load(spec)
    built = time.perf_counter()
    state = kernel.init_state(param)
    expected = _reference(spec, {"param": param, "grad": grad, **state})
    kernel.plan(param=param, grad=grad, state=state).step(step=1, **HYPER)
    _compare(expected, {"param": param, **state})
    return {"elements": size, "build_seconds": round(built - start, 2)}


def _reference(spec: KernelSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from tvm_qopt.reference import step

    scalars = spec.rule_.derive(HYPER, 1, spec.all_settings)
    hyper = np.array([1.0, *(scalars[name] for name in spec.rule_.scalars)], np.float32)
    return dict(step(spec, {"hyper": hyper, **arrays}))


def _compare(expected: dict[str, Any], got: dict[str, Any]) -> None:
    import numpy as np

    for name, values in expected.items():
        tolerance = P_TOLERANCE if values.dtype == np.float32 else CODE_TOLERANCE
        worst = float(np.max(np.abs(got[name].astype(float) - values.astype(float))))
        if not worst <= tolerance:
            raise QoptError(f"{name} is off by {worst:g} from the reference (at most {tolerance})")


if __name__ == "__main__":
    sys.exit(main())
