"""Compiled optimizer updates for training with low-bit state.

    kernel = tvm_qopt.load(tvm_qopt.KernelSpec.of("adamw", "dynamic8"))
    state = kernel.init_state(param)
    plan = kernel.plan(param=param, grad=grad, state=state)
    plan.step(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)

Names are loaded when first used: `import tvm_qopt` needs the standard library alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tvm_qopt.version import __version__

if TYPE_CHECKING:
    from tvm_qopt import ops, optim
    from tvm_qopt.errors import QoptError
    from tvm_qopt.runtime.kernel import Kernel
    from tvm_qopt.runtime.plan import Plan
    from tvm_qopt.runtime.store import load, load_many
    from tvm_qopt.runtime.threads import get_num_threads, set_num_threads
    from tvm_qopt.spec import KernelSpec

_HOMES = {
    "Kernel": "runtime.kernel",
    "KernelSpec": "spec",
    "Plan": "runtime.plan",
    "QoptError": "errors",
    "get_num_threads": "runtime.threads",
    "load": "runtime.store",
    "load_many": "runtime.store",
    "ops": "",
    "optim": "",
    "set_num_threads": "runtime.threads",
}

__all__ = [
    "Kernel",
    "KernelSpec",
    "Plan",
    "QoptError",
    "__version__",
    "get_num_threads",
    "load",
    "load_many",
    "ops",
    "optim",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tvm_qopt' has no attribute {name!r}")
    if not _HOMES[name]:
        return importlib.import_module(f"tvm_qopt.{name}")
    return getattr(importlib.import_module(f"tvm_qopt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
