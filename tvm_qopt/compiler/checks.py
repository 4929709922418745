"""Checks of a definition and of its scheduled form, at build time.

They guard what in-place updates need: a kernel reads an argument before it overwrites it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.s_tir.stmt import SBlockRealize
from tvm.tirx.analysis import undefined_vars

from tvm_qopt.compiler.define import OUT
from tvm_qopt.compiler.stages import passes, stages_of
from tvm_qopt.spec import KernelSpec


def check_stages(func: tirx.PrimFunc, spec: KernelSpec, norms: int | None = None) -> None:
    """The unscheduled definition: every output has its stage, none is read, the parameter is last.

    "Last" among the stages that wait for no scale of this step: those of later passes read kept
    values, never an argument.  Raises AssertionError: a fault of a rule, a format or the package.
    """
    stages = stages_of(func)
    number = passes(stages)
    outputs = [t.name + OUT for t in spec.outputs(norms)]
    missing = set(outputs) - set(number)
    assert not missing, f"outputs with no stage: {sorted(missing)}"
    read = {name for stage in stages for name in stage.reads if name.endswith(OUT)}
    assert not read, f"stages read outputs, which are leaves: {sorted(read)}"
    if "param" + OUT not in outputs:
        return
    first_pass = [stage.name for stage in stages if number[stage.name] == 0]
    assert first_pass[-1] == "param" + OUT, f"the parameter's output is not last: {first_pass[-3:]}"


@dataclass(frozen=True)
class _Access:
    """A stage that touches an argument: its place in the text, the loops around it, and which of
    them move the index."""

    stage: str
    position: int
    loops: frozenset[tirx.Var]
    moved_by: frozenset[tirx.Var]


def check_in_place(func: tirx.PrimFunc) -> None:
    """The scheduled function before its outputs become its inputs: no read after the overwrite, and
    no stage ahead of what it reads (TVM's merge of loops looks for neither).

    For each stage that reads X and the stage that writes X_out: the reader stands before the
    writer, and every loop around both moves the writer's index, so that no later turn of the loop
    reads what an earlier one wrote.  Raises AssertionError.
    """
    _check_order(func)
    reads, writes = _accesses(func)
    for name, writer in writes.items():
        for reader in reads.get(name, ()):
            before = reader.position <= writer.position
            assert before, f"{reader.stage} reads {name} after {writer.stage} wrote it"
            fixed = (reader.loops & writer.loops) - writer.moved_by
            assert not fixed, (
                f"{writer.stage} writes {name} in a loop ({', '.join(v.name for v in fixed)}) in "
                f"which {reader.stage} still reads it"
            )


def _check_order(func: tirx.PrimFunc) -> None:
    """Each stage stands after the one that makes what it reads."""
    made = {param.name for param in func.params}
    for realize, _ in _leaves(func.body.block.body, frozenset()):
        own = {region.source.name for region in realize.block.writes}
        for region in realize.block.reads:
            name = region.source.name
            assert name in made | own, f"{realize.block.name_hint} reads {name} before it is made"
        made |= own


def _accesses(func: tirx.PrimFunc) -> tuple[dict[str, list[_Access]], dict[str, _Access]]:
    """Who reads each argument, and who writes it through its output."""
    reads: dict[str, list[_Access]] = {}
    writes: dict[str, _Access] = {}
    for position, (realize, loops) in enumerate(_leaves(func.body.block.body, frozenset())):
        for region in realize.block.reads:
            access = _access(realize, region, position, loops)
            reads.setdefault(region.source.name, []).append(access)
        for region in realize.block.writes:
            if region.source.name.endswith(OUT):
                access = _access(realize, region, position, loops)
                writes[region.source.name.removesuffix(OUT)] = access
    return reads, writes


def _access(
    realize: SBlockRealize, region: ir.TensorRegion, position: int, loops: frozenset[tirx.Var]
) -> _Access:
    bound = {
        iterator.var: value
        for iterator, value in zip(realize.block.iter_vars, realize.iter_values, strict=True)
    }
    used = {var for rng in region.region for var in undefined_vars(rng.min)}
    moved_by = {loop for var in used & set(bound) for loop in undefined_vars(bound[var])}
    return _Access(realize.block.name_hint, position, loops, frozenset(moved_by))


def _leaves(
    statement: tirx.Stmt, loops: frozenset[tirx.Var]
) -> Iterator[tuple[SBlockRealize, frozenset[tirx.Var]]]:
    """The stages in the order of the text, each with the loops around it."""
    if isinstance(statement, tirx.For):
        yield from _leaves(statement.body, loops | {statement.loop_var})
    elif isinstance(statement, tirx.SeqStmt):
        for child in statement.seq:
            yield from _leaves(child, loops)
    else:
        assert isinstance(statement, SBlockRealize), type(statement)
        yield statement, loops
