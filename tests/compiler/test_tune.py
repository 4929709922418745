"""The search: its order, budget, log and end, on a laboratory that only pretends to run kernels;
and the real laboratory with kernels that crash, hang, or are wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import s_tir

from tvm_qopt.compiler import candidates
from tvm_qopt.compiler import tune as tuning
from tvm_qopt.compiler.build import PATTERN, compile_spec, lower, tvm_target
from tvm_qopt.compiler.crew import Outcome
from tvm_qopt.compiler.measure import Here, Laboratory, Remote, build_library
from tvm_qopt.compiler.record import record_preset, workload_hash
from tvm_qopt.compiler.schedule import get_schedule
from tvm_qopt.compiler.trials import Space, Trial, TrialLog
from tvm_qopt.compiler.tune import Found, Options, Progress, tune
from tvm_qopt.errors import BuildError, RecordInvalid, ToolMissing, UnsupportedSpec
from tvm_qopt.measure import Arguments, Call, Device, Step
from tvm_qopt.records import log_path, read_log
from tvm_qopt.spec import KernelSpec
from tvm_qopt.targets import NATIVE, cpu_model, get_target
from tvm_qopt.verify import Run, fault

SPEC = KernelSpec.of("adamw")
V2 = get_target("llvm-x86-64-v2")
SPACE = Space.of(lower(SPEC, get_target("llvm-x86-64-v3"), "main").choices)
FASTEST, SECOND = list(SPACE.in_order(0))[-1:-3:-1]


def seconds(decisions: Mapping[str, int]) -> float:
    """Of a pretended step."""
    faster = [SECOND, FASTEST]
    return 1e-3 / (1 + faster.index(decisions)) if decisions in faster else 2e-3


# --- what may be tried ---


def test_every_point_once_the_default_first_in_an_order_of_the_seed() -> None:
    points = list(SPACE.in_order(0))
    assert points[0] == SPACE.default
    assert len(points) == SPACE.size > 4
    wanted = {tuple(p) for p in itertools.product(*SPACE.candidates.values())}
    assert {tuple(point.values()) for point in points} == wanted
    assert points == list(SPACE.in_order(0)) != list(SPACE.in_order(1))


# --- the log ---

TRIAL = Trial({"lanes": 32}, "00ff", (2e-3, 1e-3, 3e-3))
FAILED = Trial({"lanes": 64}, "0100", error="it ended")


def test_a_log_gives_back_what_was_tried(tmp_path: Path) -> None:
    path = tmp_path / "a" / "log.jsonl"
    log = TrialLog(path, {"spec": "x"}, resume=False)
    for trial in (FAILED, TRIAL):
        log.append(trial)
    assert TRIAL.median == 2e-3 and FAILED.median == float("inf")
    with path.open("a") as file:
        file.write('{"decisions": {"lanes": 16}, "ker')  # the process died here
    again = TrialLog(path, {"spec": "x"}, resume=True)
    assert again.trials == [FAILED, TRIAL] and again.best(3) == [TRIAL]
    again.append(TRIAL)
    assert TrialLog(path, {"spec": "x"}, resume=True).trials == [FAILED, TRIAL, TRIAL]


def test_a_log_of_another_search_is_refused_and_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    TrialLog(path, {"spec": "x", "elements": 1}, resume=False).append(TRIAL)
    with pytest.raises(RecordInvalid, match=r"a search with another elements; without --resume"):
        TrialLog(path, {"spec": "x", "elements": 2}, resume=True)
    assert TrialLog(path, {"spec": "x", "elements": 2}, resume=False).trials == []
    old = path.with_suffix(".old").read_text().splitlines()
    assert json.loads(old[1])["seconds"] == list(TRIAL.seconds)


# --- the search ---


class Pretended:
    """A laboratory whose kernels take `seconds`; a path is the text of the decisions."""

    def __init__(self) -> None:
        self.servers, self.timed = 1, list[str]()
        self.broken: set[str] = set()
        self.wrong: Callable[[Any], str | None] = lambda decisions: None
        self.device = Device("a device", "servercpu", 7)
        self.interrupt_at = -1

    def close(self) -> None:
        pass

    def build(self, points: Sequence[Mapping[str, int]], entries: Any) -> list[Outcome]:
        return [Outcome(json.dumps(point)) for point in points]

    def time(self, paths: Sequence[str]) -> list[Outcome]:
        if len(self.timed) == self.interrupt_at:
            raise KeyboardInterrupt
        self.timed += paths
        return [
            Outcome(error="it ended the process")
            if path in self.broken
            else Outcome((seconds(json.loads(path)),) * 3)
            for path in paths
        ]

    def interleave(self, paths: Sequence[str], rounds: int) -> Any:
        return np.array([[seconds(json.loads(path)) for path in paths]] * rounds)

    def fault(self, spec: KernelSpec, parts: Sequence[str], path: str) -> str | None:
        return self.wrong(json.loads(path))

    def describe(self) -> Device:
        return self.device


@pytest.fixture
def laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Stands for the real one; kernels are their decisions, and right unless `broken`."""
    made = Pretended()
    monkeypatch.setenv("TVM_QOPT_RECORDS", str(tmp_path / "own"))
    monkeypatch.setattr(tuning, "OwnLaboratory", lambda *_, **__: made)
    monkeypatch.setattr(candidates, "kernel_module", lambda spec, preset, point, entries: point)
    monkeypatch.setattr(candidates, "_hash", json.dumps)
    return made


def search(folder: Path, **options: Any) -> Found:
    given = Options(**{"elements": 1000, "trials": None, **options})
    return tune(SPEC, V2, folder, given, lambda progress: None)


def tried(laboratory: Pretended) -> list[dict[str, int]]:
    return [json.loads(path) for path in laboratory.timed]


def test_a_small_space_is_exhausted_and_the_best_recorded(
    laboratory: Pretended, tmp_path: Path
) -> None:
    found = search(tmp_path, trials=10**6, seed=3)
    assert found.exhausted and tried(laboratory) == list(SPACE.in_order(3))
    record = found.record
    assert record.decisions == FASTEST and record.trials == SPACE.size
    assert (record.seconds, record.default_seconds) == (5e-4, 2e-3)
    assert found.speedup == (pytest.approx(4.0),) * 3
    assert (record.elements, record.seed) == (1024, 3)  # whole blocks
    assert (record.device, record.threads) == ("a device", 7)
    assert (record.preset, record.workload) == (V2.name, workload_hash(SPEC, "llvm"))
    assert read_log(found.path) == [record]
    assert found.path == log_path(tmp_path, V2.name, SPEC.name)


def test_the_budget_is_kept(laboratory: Pretended, tmp_path: Path) -> None:
    found = search(tmp_path, trials=4)
    assert not found.exhausted and tried(laboratory) == list(SPACE.in_order(0))[:4]
    search(tmp_path, trials=4, resume=True)
    assert len(laboratory.timed) == 4
    search(tmp_path, trials=5, resume=True)
    assert tried(laboratory) == list(SPACE.in_order(0))[:5]


def test_without_time_the_default_alone_is_tried(laboratory: Pretended, tmp_path: Path) -> None:
    found = search(tmp_path, seconds=0.0)
    assert tried(laboratory) == [SPACE.default]
    assert found.record.decisions == SPACE.default and found.speedup == (1.0, 1.0, 1.0)


def test_after_ctrl_c_it_goes_on_where_it_was(laboratory: Pretended, tmp_path: Path) -> None:
    laboratory.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path)
    assert not log_path(tmp_path, V2.name, SPEC.name).exists()
    laboratory.interrupt_at = -1
    found = search(tmp_path, resume=True)
    assert tried(laboratory) == list(SPACE.in_order(0)) and found.record.trials == SPACE.size


def test_what_crashes_is_logged_and_passed_over(laboratory: Pretended, tmp_path: Path) -> None:
    laboratory.broken = {json.dumps(FASTEST)}
    found = search(tmp_path)
    (failed,) = (trial for trial in found.trials if trial.error)
    assert failed == Trial(FASTEST, failed.kernel, error="it ended the process")
    assert found.record.decisions == SECOND and len(found.trials) == SPACE.size
    search(tmp_path, resume=True)
    assert len(laboratory.timed) == SPACE.size


def test_nothing_that_runs_is_an_error_with_its_reason(
    laboratory: Pretended, tmp_path: Path
) -> None:
    laboratory.broken = {json.dumps(point) for point in SPACE.in_order(0)}
    with pytest.raises(BuildError, match="none of the kernels ran; the default: it ended the proc"):
        search(tmp_path)


def test_a_wrong_kernel_does_not_win(laboratory: Pretended, tmp_path: Path) -> None:
    kernels: list[Any] = []

    def wrong(decisions: dict[str, int]) -> str | None:
        kernels.append(decisions)
        return "param: 9 differ" if decisions == FASTEST else None

    laboratory.wrong = wrong
    found = search(tmp_path)
    assert found.record.decisions == SECOND
    assert found.rejected == [f"{FASTEST}: param: 9 differ"]
    assert kernels[0] == SPACE.default and FASTEST in kernels
    laboratory.wrong = lambda decisions: "all wrong"
    with pytest.raises(BuildError, match="its default kernel is wrong: all wrong"):
        search(tmp_path)


def test_what_builds_take_today_is_in_the_comparison(
    laboratory: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this search did not come across it."""
    monkeypatch.setenv("TVM_QOPT_RECORDS", str(tmp_path))
    search(tmp_path)
    assert FASTEST not in list(SPACE.in_order(0))[:2]
    assert search(tmp_path, trials=2).record.decisions == FASTEST


def test_progress_says_how_far_and_how_long(laboratory: Pretended, tmp_path: Path) -> None:
    seen: list[tuple[str, int, Any, bool]] = []

    def report(now: Progress) -> None:
        seen.append((now.doing, len(now.trials), now.expected, now.left is None))

    tune(SPEC, V2, tmp_path, Options(elements=1000, trials=2), report)
    assert seen == [
        ("searching", 0, 2, True),
        ("searching", 1, 2, False),
        ("searching", 2, 2, False),
        ("comparing", 2, 2, False),
    ]


def test_on_servers_the_cpu_is_theirs(laboratory: Pretended, tmp_path: Path) -> None:
    here = record_preset(get_target(NATIVE)).removeprefix("llvm-")
    with pytest.raises(UnsupportedSpec, match=rf"this machine \({here}\) and the server is a serv"):
        tune(SPEC, get_target(NATIVE), tmp_path, Options(), lambda progress: None)


def test_a_gpu_must_run_the_targets_code(laboratory: Pretended, tmp_path: Path) -> None:
    laboratory.device = Device("NVIDIA A100", "sm_80")
    said = r"cuda-sm90 is code for sm_90, and the GPU is NVIDIA A100 \(sm_80\)"
    with pytest.raises(UnsupportedSpec, match=said):
        tune(SPEC, get_target("cuda-sm90"), tmp_path, Options(), lambda progress: None)
    found = tune(SPEC, get_target("cuda-sm80"), tmp_path, Options(), lambda progress: None)
    assert (found.record.device, found.record.threads) == ("NVIDIA A100", 0)
    assert found.path == log_path(tmp_path, "cuda-sm80", SPEC.name)


def test_kernels_that_are_the_same_are_tried_once(
    laboratory: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = [SECOND, FASTEST]
    monkeypatch.setattr(candidates, "_hash", lambda d: "same" if d in same else json.dumps(d))
    found = search(tmp_path)
    assert found.exhausted and len(found.trials) == SPACE.size - 1
    assert tried(laboratory) == [p for p in SPACE.in_order(0) if p != FASTEST]  # the later one


def test_what_cannot_be_scheduled_is_a_failed_trial(
    laboratory: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def module(spec: KernelSpec, preset: Any, point: Any, entries: Any) -> Any:
        if point == FASTEST:
            raise s_tir.ScheduleError("Traceback:\n ...\na loop is not there")
        return point

    monkeypatch.setattr(candidates, "kernel_module", module)
    found = search(tmp_path)
    (failed,) = (trial for trial in found.trials if trial.error)
    assert failed.decisions == FASTEST
    assert failed.error == "cannot be scheduled: a loop is not there"
    assert found.record.decisions == SECOND


# --- is it right? ---


def in_process(spec: KernelSpec, decisions: Mapping[str, int]) -> Run:
    kernel = compile_spec(spec, get_target(NATIVE), decisions=decisions)

    def run(calls: Sequence[Call]) -> list[Any]:
        results = []
        for call in calls:
            tensors = [tvm.runtime.tensor(array) for array in call.arguments]
            kernel[call.entry](*tensors)
            results.append([tensor.numpy() for tensor in tensors])
        return results

    return run


PARTS = get_schedule("llvm", PATTERN).entries
POINTS = [
    ("adamw-dynamic8", 1),
    ("adamw-dynamic8", -1),
    ("adamw-4bit-b64-p_bf16_split", -1),
    ("lamb-fp8-b128", 1),
]


@pytest.mark.parametrize(("name", "which"), POINTS)
def test_points_of_the_space_do_what_the_reference_does(name: str, which: int) -> None:
    spec = KernelSpec.parse(name)
    space = Space.of(lower(spec, get_target("llvm-x86-64-v3"), "main").choices)
    decisions = {choice: values[which] for choice, values in space.candidates.items()}
    assert fault(spec, PARTS, in_process(spec, decisions)) is None


@pytest.fixture(scope="module")
def right() -> Run:
    return in_process(SPEC, {})


@pytest.mark.parametrize("output", ["param", "exp_avg_codes", "nonfinite_count", "exp_avg_scale"])
def test_a_kernel_with_one_wrong_lane_is_found_out(output: str, right: Run) -> None:
    index = [t.name for t in SPEC.tensors].index(output)

    def run(calls: Sequence[Call]) -> list[Any]:
        results = right(calls)
        serial = results[1][index].reshape(-1)
        wrong = serial.view(np.uint32) if serial.dtype == np.float32 else serial
        wrong[::64] += 1 if serial.dtype != np.float32 else 1 << 8
        return results

    assert str(fault(SPEC, PARTS, run)).startswith(f"{output}: ")


# --- the real laboratory ---

MISBEHAVING = """
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((4,), "float32")):
        T.func_attr({{"global_symbol": "main"}})
        {body}
"""
BODIES = {
    "right": "x[0] = x[0] + T.float32(1)",
    "crashes": 'T.evaluate(T.call_extern("int32", "abort"))',
    "hangs": 'T.evaluate(T.call_extern("int32", "pause"))',
}


def test_a_kernel_that_crashes_or_hangs_costs_one_result(tmp_path: Path) -> None:
    step = Step(("main",), Arguments((np.zeros(2, np.float32),), ((4,),)))
    preset = get_target(NATIVE)
    laboratory = Laboratory(SPEC, preset, step, Here(), threads=2, seconds=1.0)
    target = tvm_target(get_target(NATIVE))
    paths = {
        name: build_library(
            "gcc",
            tmp_path / f"{name}.so",
            target,
            tvm.script.from_source(MISBEHAVING.format(body=body)),
        )
        for name, body in BODIES.items()
    }
    with closing(laboratory):
        timed = laboratory.time([*paths.values(), paths["right"]])
        assert [outcome.error for outcome in timed[1:3]] == [
            "it ended the process that it ran in",
            "no answer within 1 s",
        ]
        for outcome in (timed[0], timed[3]):
            assert outcome.error is None and len(outcome.value) > 1
        zeros = np.zeros(4, np.float32)
        ((after,),) = laboratory.call(paths["right"], [Call("main", (zeros,))])
        np.testing.assert_array_equal(after, [1, 0, 0, 0])
        with pytest.raises(BuildError, match=f"{NATIVE}: .*no_such_entry"):
            laboratory.call(paths["right"], [Call("no_such_entry", (zeros,))])
        cpu = record_preset(get_target(NATIVE)).removeprefix("llvm-")
        assert laboratory.describe() == Device(cpu_model(), cpu, 2)


def test_no_tracker_and_no_server_say_how_to_start_one() -> None:
    with pytest.raises(ToolMissing, match=r"no tracker at 127.0.0.1:9 .*tvm.exec.rpc_tracker"):
        Remote("127.0.0.1", 9, "key").count()
