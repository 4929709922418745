"""The definition, its order, its checks, and the function that is compiled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import tvm
from tvm import tirx

from tvm_qopt.compiler.build import Lowered, compile_spec, lower
from tvm_qopt.compiler.checks import check_in_place, check_stages
from tvm_qopt.compiler.define import OUT, define
from tvm_qopt.compiler.schedule import MAIN, SERIAL, TAIL
from tvm_qopt.compiler.stages import order_by_pass, passes, stages_of
from tvm_qopt.rules import LR, RULES, rule
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import get_target

PORTABLE = get_target("llvm-x86-64-v3")
SPECS = [
    KernelSpec.of("adamw"),
    KernelSpec.of("adamw", block_size=64, param="bfloat16", grad="float32"),
    KernelSpec.of("adamw", block_size=4096, param="float16", nonfinite="propagate"),
    KernelSpec.of("adamw", "dynamic8s", grad="bfloat16", zero_rule=False),
    KernelSpec.of("adamw", "float32", decay="after"),
    KernelSpec.of("adamw", "dynamic8s+float32", grad="float16"),
    KernelSpec.of("adamw", "codebook8", scalars="ascend", sign_repair=True),
]
ENTRIES = (MAIN, TAIL, SERIAL)

Node = dict[str, Any]

BUFFER_FIELD = {"ir.TensorLoad": "source", "tirx.BufferStore": "buffer"}
ITEMSIZE = {"float32": 4, "int32": 4, "uint16": 2, "uint8": 1}

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@cache
def lowered(spec: KernelSpec, entry: str) -> Lowered:
    return lower(spec, PORTABLE, entry)


def ordered(spec: KernelSpec) -> tirx.PrimFunc:
    return order_by_pass(define(spec))


# --- what is defined -----------------------------------------------------------------------------


@every_spec
def test_arguments_are_those_of_the_spec_then_the_outputs(spec: KernelSpec) -> None:
    names = [param.name for param in define(spec).params]
    inputs = [t.name for t in spec.tensors]
    outputs = [t.name + OUT for t in spec.tensors if t.output]
    assert names[: len(inputs)] == inputs
    assert sorted(names[len(inputs) :]) == sorted(outputs)
    assert names[-1] == "param" + OUT


@every_spec
def test_stages_stand_by_pass_each_after_what_it_reads(spec: KernelSpec) -> None:
    stages = stages_of(ordered(spec))
    number = passes(stages)
    order = [number[stage.name] for stage in stages]
    assert order == sorted(order)
    assert {stage.name for stage in stages} == {stage.name for stage in stages_of(define(spec))}
    arguments = {t.name for t in spec.tensors}
    seen: set[str] = set()
    for stage in stages:
        assert stage.reads - arguments - {stage.name} <= seen, stage.name
        seen.add(stage.name)


def test_passes_count_the_block_reductions_before_a_stage() -> None:
    number = passes(stages_of(ordered(KernelSpec.of("adamw"))))
    assert max(number.values()) == 1
    for name in ("exp_avg_old", "exp_avg_new", "exp_avg_sq_kept", "param_out"):
        assert number[name] == 0, name
    for name in ("exp_avg_absmax", "exp_avg_scale_out", "exp_avg_sq_codes_out", "nonfinite_sum"):
        assert number[name] == 1, name


def test_within_a_pass_reductions_go_first_then_what_is_per_block() -> None:
    stages = stages_of(ordered(KernelSpec.of("adamw")))
    number = passes(stages)
    kinds = [(not s.reduction, s.axes) for s in stages if number[s.name] == 1]
    assert kinds == sorted(kinds)
    assert kinds[0] == (False, 2) and kinds[-1] == (True, 2)


@every_spec
def test_a_definition_is_the_same_each_time(spec: KernelSpec) -> None:
    tvm.ir.assert_structural_equal(define(spec), define(spec))


# --- what is compiled ----------------------------------------------------------------------------


@every_spec
@pytest.mark.parametrize("entry", ENTRIES)
def test_in_place_no_output_is_left(spec: KernelSpec, entry: str) -> None:
    final = lowered(spec, entry).final
    assert [param.name for param in final.params] == [t.name for t in spec.tensors]
    nodes = nodes_of(final)
    variables = [i for i, node in enumerate(nodes) if node["type"] == "ir.Var"]
    assert not [name for name in (name_of(nodes, i) for i in variables) if name.endswith(OUT)]


def test_a_step_of_adamw_on_codes_has_eight_arguments() -> None:
    assert len(lowered(SPECS[0], MAIN).final.params) == 8


@every_spec
@pytest.mark.parametrize("entry", ENTRIES)
def test_arguments_are_aligned_to_their_elements_only(spec: KernelSpec, entry: str) -> None:
    nodes = nodes_of(lowered(spec, entry).final)
    (func,) = (node["data"] for node in nodes if node["type"] == "tirx.PrimFunc")
    params = nodes[func["params"]]["data"]
    found = [nodes[nodes[param]["data"]["ty"]]["data"]["data_alignment"] for param in params]
    assert found == [ITEMSIZE[t.storage] for t in spec.tensors]


@every_spec
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_index_is_64_bit(spec: KernelSpec, entry: str) -> None:
    """Loops, and what addresses a buffer, before TVM's own passes."""
    nodes = nodes_of(lowered(spec, entry).final)
    loops = [node["data"]["loop_var"] for node in nodes if node["type"] == "tirx.For"]
    indices = [index for _, found in accesses(nodes) for index in found]
    assert loops and indices
    assert {scalar_dtype(nodes, i) for i in (*loops, *indices)} == {"int64"}


@pytest.mark.parametrize("spec", SPECS[:3], ids=lambda spec: spec.name)
def test_every_index_of_an_argument_is_64_bit_where_code_is_made(spec: KernelSpec) -> None:
    """After TVM's passes, one of which narrows what it can prove to be small."""
    modules: list[tvm.IRModule] = []

    @tvm.ir.instrument.pass_instrument
    class Keep:
        def run_after_pass(self, module: tvm.IRModule, _: object) -> None:
            modules.append(module)

    with tvm.transform.PassContext(instruments=[Keep()]):
        compile_spec(spec, get_target("llvm-x86-64-v2"))
    last = next(m for m in reversed(modules) if len(m.functions) >= len(ENTRIES))
    large = {t.name for t in spec.tensors if t.per_element}
    seen = set()
    for func in last.functions.values():
        nodes = nodes_of(func)
        for name, indices in accesses(nodes):
            argument = re.sub(r"_\d+$", "", name)  # TVM numbers what it declares again
            if argument in large:
                seen.add(argument)
                assert {scalar_dtype(nodes, index) for index in indices} == {"int64"}
    assert seen == large


@every_spec
def test_every_spec_compiles(spec: KernelSpec) -> None:
    module = compile_spec(spec, get_target("llvm-x86-64-v2")).mod
    for entry in ENTRIES:
        assert module.implements_function(entry, query_imports=False)


def test_json_does_not_crash_the_process() -> None:
    """With another pair of tvm and tvm_ffi it does, and every build rests on it."""
    script = (
        "import tvm\n"
        "from tvm_qopt.compiler.define import define\n"
        "from tvm_qopt.spec import KernelSpec\n"
        "func = define(KernelSpec.of('adamw'))\n"
        "again = tvm.ir.load_json(tvm.ir.save_json(func))\n"
        "tvm.ir.assert_structural_equal(func, again)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr


# --- the checks ----------------------------------------------------------------------------------


@every_spec
def test_a_sound_definition_passes(spec: KernelSpec) -> None:
    check_stages(ordered(spec), spec)
    for entry in ENTRIES:
        check_in_place(lowered(spec, entry).scheduled.mod["main"])


def with_body(func: tirx.PrimFunc, arrange: Callable[[list[Any]], list[Any]]) -> tirx.PrimFunc:
    """The function with the statements of its root arranged anew."""
    root = func.body.block
    body = tirx.SeqStmt(arrange(list(root.body.seq)))
    block = tvm.s_tir.stmt.SBlock(
        [], [], [], root.name_hint, body, alloc_buffers=root.alloc_buffers
    )
    return func.with_body(tvm.s_tir.stmt.SBlockRealize([], True, block))


def test_a_parameter_that_is_not_written_last_is_caught() -> None:
    spec = KernelSpec.of("adamw")
    func = ordered(spec)
    at = [stage.name for stage in stages_of(func)].index("param_out")

    def earlier(statements: list[Any]) -> list[Any]:
        param = statements.pop(at)
        return [*statements[: at - 2], param, *statements[at - 2 :]]

    with pytest.raises(AssertionError, match="the parameter's output is not last"):
        check_stages(with_body(func, earlier), spec)


def test_an_output_without_a_stage_is_caught() -> None:
    spec = KernelSpec.of("adamw")
    func = ordered(spec)
    at = [stage.name for stage in stages_of(func)].index("exp_avg_scale_out")
    broken = with_body(func, lambda statements: statements[:at] + statements[at + 1 :])
    with pytest.raises(AssertionError, match=r"outputs with no stage: \['exp_avg_scale_out'\]"):
        check_stages(broken, spec)


def test_a_rule_that_reads_what_is_named_as_an_output_is_caught() -> None:
    def greedy(xp: Any, h: Any, p: Any, g: Any, s: Any, settings: Any) -> Any:
        step = xp.bind(g * h.step_size, "step_out")
        return p + step, {"exp_avg": step}

    rule(
        slots=("exp_avg",),
        hyper=(LR,),
        scalars=("step_size",),
        derive=lambda h, step, settings: {"step_size": -h["lr"]},
    )(greedy)
    try:
        spec = KernelSpec.of("greedy", "dynamic8s")
        with pytest.raises(AssertionError, match=r"stages read outputs.*step_out"):
            lower(spec, PORTABLE, MAIN)
    finally:
        del RULES["greedy"]


SOUND = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((4, 16), "float32"), scale: T.Buffer((4,), "float32"),
         y_out: T.Buffer((4, 16), "float32"), scale_out: T.Buffer((4,), "float32")):
    for b in range(4):
        for i in range(16):
            with T.sblock("y_out"):
                vb, vi = T.axis.remap("SS", [b, i])
                y_out[vb, vi] = x[vb, vi] * scale[vb]
        with T.sblock("scale_out"):
            vb = T.axis.spatial(4, b)
            scale_out[vb] = scale[vb] * T.float32(2)
"""
WRITE_FIRST = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((4, 16), "float32"), scale: T.Buffer((4,), "float32"),
         y_out: T.Buffer((4, 16), "float32"), scale_out: T.Buffer((4,), "float32")):
    for b in range(4):
        with T.sblock("scale_out"):
            vb = T.axis.spatial(4, b)
            scale_out[vb] = scale[vb] * T.float32(2)
        for i in range(16):
            with T.sblock("y_out"):
                vb, vi = T.axis.remap("SS", [b, i])
                y_out[vb, vi] = x[vb, vi] * scale[vb]
"""
WRITE_IN_THE_READERS_LOOP = """
@T.prim_func(s_tir=True)
def main(x: T.Buffer((4, 16), "float32"), scale: T.Buffer((4,), "float32"),
         y_out: T.Buffer((4, 16), "float32"), scale_out: T.Buffer((4,), "float32")):
    for b, i in T.grid(4, 16):
        with T.sblock("y_out"):
            vb, vi = T.axis.remap("SS", [b, i])
            y_out[vb, vi] = x[vb, vi] * scale[vb]
        with T.sblock("scale_out"):
            vb = T.axis.spatial(4, b)
            scale_out[vb] = scale[vb] * T.float32(2)
"""


def test_a_scale_written_after_its_readers_passes() -> None:
    check_in_place(tvm.script.from_source(SOUND))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (WRITE_FIRST, "y_out reads scale after scale_out wrote it"),
        (WRITE_IN_THE_READERS_LOOP, r"scale_out writes scale in a loop \(i\) in which y_out still"),
    ],
    ids=["written first", "in the loop of its reader"],
)
def test_a_schedule_that_overwrites_what_is_still_read_is_caught(source: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_in_place(tvm.script.from_source(source))


def test_a_stage_ahead_of_what_it_reads_is_caught() -> None:
    """The new scale before the sweep that decodes with the old one, and that finds its maximum."""
    spec = KernelSpec.of("adamw", "dynamic8s+float32")
    func = ordered(spec)
    names = [stage.name for stage in stages_of(func)]
    reader = names.index("exp_avg_old")
    writer = names.index("exp_avg_scale_out")

    def swap(statements: list[Any]) -> list[Any]:
        scale = statements.pop(writer)
        return [*statements[:reader], scale, *statements[reader:]]

    with pytest.raises(AssertionError, match="exp_avg_scale_out reads exp_avg_absmax before"):
        check_in_place(with_body(func, swap))


# --- the JSON form of a function, which is the only one that can be walked -----------------------


def nodes_of(func: tirx.PrimFunc) -> list[Node]:
    nodes: list[Node] = json.loads(tvm.ir.save_json(func))["nodes"]
    return nodes


def name_of(nodes: list[Node], variable: int) -> str:
    name = nodes[variable]["data"]["name"]
    return str(nodes[name]["data"]) if isinstance(name, int) else str(name)


def scalar_dtype(nodes: list[Node], expression: int) -> str:
    """The dtype of an expression, of one lane where it is a vector."""
    type_ = nodes[nodes[expression]["data"]["ty"]]["data"]
    return str(type_["dtype"]).partition("x")[0]


def accesses(nodes: list[Node]) -> Iterator[tuple[str, list[int]]]:
    """The name of the buffer and the indices of each load and store."""
    for node in nodes:
        if field := BUFFER_FIELD.get(node["type"]):
            data = node["data"]
            yield name_of(nodes, data[field]), nodes[data["indices"]]["data"]
