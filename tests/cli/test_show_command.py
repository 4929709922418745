"""`tvm-qopt show`: each stage of a kernel as text."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from commands import SPEC, error_of, invoke

LOOKS_LIKE: dict[str, Callable[[str], bool]] = {
    "definition": lambda text: "exp_avg_new" in text and "T.prim_func" in text,
    "schedule": lambda text: "def apply_trace" in text and "T.parallel" in text,
    "source": lambda text: "target triple" in text and "define" in text,
    "asm": lambda text: ".text" in text and ".globl" in text,
}


@pytest.mark.parametrize("what", LOOKS_LIKE)
def test_show(what: str) -> None:
    result = invoke("show", SPEC, "--what", what)
    assert result.exit_code == 0, result.stderr
    assert LOOKS_LIKE[what](result.stdout)


@pytest.mark.parametrize(("what", "sign"), [("source", "__global__"), ("asm", ".target sm_90")])
def test_show_for_cuda(what: str, sign: str) -> None:
    if what == "asm":
        from tvm_qopt.compiler.cuda import find_cuda_compiler

        if find_cuda_compiler() is None:
            pytest.skip("no nvcc and no NVRTC: PTX needs one of them")
    result = invoke("show", SPEC, "--target", "cuda-sm90", "--what", what)
    assert result.exit_code == 0, result.stderr
    assert sign in result.stdout


def test_show_for_opencl() -> None:
    result = invoke("show", SPEC, "--target", "opencl", "--what", "source")
    assert result.exit_code == 0, result.stderr
    assert "__kernel" in result.stdout
    assert "--what source" in error_of(
        invoke("show", "adamw", "--target", "opencl", "--what", "asm"), 2
    )


def test_show_of_one_entry_as_json() -> None:
    arguments = ["show", "adamw", "--what", "source", "--entry", "tail", "--json"]
    data = json.loads(invoke(*arguments).stdout)
    assert (data["spec"], data["entry"], data["what"]) == (SPEC, "tail", "source")
    assert "__tvm_ffi_tail" in data["source"]
    assert "__tvm_ffi_main_serial" not in data["source"]
