"""The scheduled functions that are compiled, against texts kept in tests/golden.

A golden is TVMScript of one entry point of one spec, after the schedule and with outputs made
inputs.  It is compared by structural equality, so names of variables and the text's form do not
matter; both sides are parsed, since some types (of the lower bounds of axes) are not in the text.

After a change of a definition, a format or a schedule that is meant:

    pytest tests/compiler/test_golden.py --update-golden

and read the difference before it is committed: it is what the change does to every kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from tvm_qopt.compiler.build import lower
from tvm_qopt.compiler.schedule import MAIN, SERIAL, TAIL
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

GOLDEN = Path(__file__).parent.parent / "golden"
V3, V4 = "llvm-x86-64-v3", "llvm-x86-64-v4"
KERNELS = [
    (V3, "adamw-dynamic8-b256-p_f32-g_f32", MAIN),
    (V3, "adamw-dynamic8-b256-p_f32-g_f32", SERIAL),
    (V3, "adamw-dynamic8-b256-p_f32-g_f32", TAIL),
    (V3, "adamw-dynamic8-b64-p_bf16-g_f16-nonfinite_propagate", MAIN),
    (V3, "adamw-float32-b256-p_f32-g_f32", MAIN),
    (V3, "adamw-codebook8-b256-p_f32-g_f32-sign_repair_on", MAIN),
    (V4, "adamw-dynamic8-b256-p_f32-g_f32", MAIN),
    (V4, "adamw-4bit-b128-p_f32-g_f32", MAIN),
]


def script(target: str, spec: str, entry: str) -> str:
    lowered = lower(KernelSpec.parse(spec), get_target(target), entry)
    text: str = lowered.final.script(show_meta=False)
    return text.rstrip() + "\n"


@pytest.mark.parametrize(("target", "spec", "entry"), KERNELS)
def test_a_kernel_is_scheduled_as_before(
    target: str, spec: str, entry: str, request: pytest.FixtureRequest
) -> None:
    path, now = GOLDEN / target / f"{spec}-{entry}.py", script(target, spec, entry)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now, encoding="utf-8")
    assert path.is_file(), f"{path} is missing: run this test with --update-golden"
    before = path.read_text(encoding="utf-8")
    if before == now:
        return  # parsing takes a second
    assert "qopt_" not in now, "another text, and TVM's parser does not know our own operations"
    tvm.ir.assert_structural_equal(tvm.script.from_source(now), tvm.script.from_source(before))


def test_every_golden_has_its_kernel() -> None:
    names = {f"{target}/{spec}-{entry}.py" for target, spec, entry in KERNELS}
    assert {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.py")} == names


def test_another_schedule_is_not_equal() -> None:
    """The comparison sees what it must: here the parallel loop."""
    target, spec, _ = KERNELS[0]
    parallel, serial = (tvm.script.from_source(script(target, spec, e)) for e in (MAIN, SERIAL))
    with pytest.raises(ValueError, match="StructuralEqual check failed"):
        tvm.ir.assert_structural_equal(parallel, serial.with_attr("global_symbol", MAIN))


def test_a_kernel_equals_its_own_text_with_other_names() -> None:
    target, spec, entry = KERNELS[0]
    text = script(target, spec, entry)
    renamed = text.replace("v_i", "element").replace("grad_scaled", "g")
    assert renamed != text
    tvm.ir.assert_structural_equal(tvm.script.from_source(text), tvm.script.from_source(renamed))
