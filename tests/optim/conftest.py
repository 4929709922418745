"""What the tests of the torch optimizers share: torch, and every kernel built by one child."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tvm_qopt

if importlib.util.find_spec("torch") is None:  # it is an extra
    collect_ignore_glob = ["test_*.py"]

FLOAT32 = "-p_f32-g_f32"
SPECS = (
    *(
        f"{rule}-{state}-b256{FLOAT32}"
        for rule in ("adamw", "lamb")
        for state in ("dynamic8", "float32")
    ),
    *(
        f"adamw-{state}-b256-p_bf16{how}-g_bf16"
        for state in ("dynamic8", "float32")
        for how in ("", "_split")
    ),
    "adamw-dynamic8-b256-p_bf16_master-g_bf16",
    "adamw-dynamic8-b256-p_bf16_stochastic-g_bf16",
    "adamw-float32-b256-p_f16_master-g_f16",
    f"adamw-dynamic8-b64{FLOAT32}",
    f"adamw-4bit-b128{FLOAT32}",
    f"adamw-fp8-b256{FLOAT32}",
    f"adamw-linear8s+linear8u-b256{FLOAT32}",
    f"adamw-float32-b256{FLOAT32}-amsgrad_on",
    f"adamw-float32-b256{FLOAT32}-nonfinite_propagate",
    f"adam-float32-b256{FLOAT32}",
    f"sgd-float32-b256{FLOAT32}",
    f"sgd-dynamic8-b256{FLOAT32}",
    f"sgd-float32-b256{FLOAT32}-momentum_nesterov",
    f"sgd-float32-b256{FLOAT32}-momentum_off",
    f"sgd-dynamic8-b256{FLOAT32}-momentum_off",
    f"rmsprop-float32-b256{FLOAT32}-centered_on-momentum_on",
    f"rmsprop-float32-b256{FLOAT32}",
    f"adagrad-float32-b256{FLOAT32}",
    f"lion-float32-b256{FLOAT32}",
    f"ademamix-float32-b256{FLOAT32}-warm_up_on",
    f"sum_sq-dynamic8-b256{FLOAT32}",
    *(
        f"adamw-{state}{FLOAT32}-zero_rule_off"
        for state in ("dynamic8-b256", "4bit-b128", "fp8-b256")
    ),
    "adam_fp16-float32-b256-p_f16_master-g_f16",
    "adam_fp16-float32-b256-p_f16_master-g_f32",
    "adamw-float32-b256-p_bf16_master-g_bf16",
    "adamw-float32-b256-p_bf16_stochastic-g_bf16",
    f"adamw-float32-b128{FLOAT32}",
    f"adamw-float32-b64{FLOAT32}",
    *(
        f"quantize-{state}-b{block}{FLOAT32}"
        for state in ("dynamic8", "dynamic8s")
        for block in (64, 256)
    ),
    *(f"quantize-{state}-b256{FLOAT32}" for state in ("linear8s", "linear8u")),
    *(f"adamw-{state}-p_bf16-g_bf16" for state in ("4bit-b128", "float32-b128", "fp8-b256")),
    f"quantize-fp8-b256{FLOAT32}",
    f"quantize-dynamic8u-b256{FLOAT32}",
    f"quantize-dynamic4s-b128{FLOAT32}",
    f"quantize-linear4u-b128{FLOAT32}",
)


def defaults_of_classes() -> list[str]:
    """The kernel that each class takes for a large float32 parameter."""
    import torch

    from tvm_qopt import optim

    made = [each for each in vars(optim).values() if isinstance(each, type)]
    classes = [each for each in made if issubclass(each, optim.QoptOptimizer) and each.rule]
    param = torch.nn.Parameter(torch.ones(5000))
    return [each([param], lr=1e-3).describe().rows[0].spec for each in classes]


@pytest.fixture(scope="session", autouse=True)
def built(store: Path) -> None:
    """Kernels that many tests need: a process of its own for each would take minutes."""
    tvm_qopt.load_many([*SPECS, *defaults_of_classes()])


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed (the extra `peers`)")
    return importlib.import_module("bitsandbytes.optim")


@pytest.fixture(scope="module")
def torchao() -> Iterator[Any]:
    """Its step is torch.compile's; here it runs as it is written."""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed (the extra `peers`)")
    package = importlib.import_module("torchao.optim")
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield package
