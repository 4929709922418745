"""What a step takes beside the rule's numbers: a clip of the gradient, the sign of `maximize`, a
gradient that has moved; what it tells torch; and the maps that a state is read with."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt.errors import (
    DeviceMismatch,
    DtypeMismatch,
    HyperOutOfRange,
    QoptError,
    ShapeMismatch,
    UnknownName,
)
from tvm_qopt.runtime import threads

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

SIZE, BLOCK = 3 * 256 + 77, 256
HYPER: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
of = functools.partial(tvm_qopt.KernelSpec.of, "adamw")
PLAIN, MAPPED, HALF = of(), of("codebook8"), of(grad="float16")
MIXED = of("codebook8+float32")
CLIPPED = of(clip_gradient=True)
BARE = tvm_qopt.KernelSpec.of("sgd", "float32", momentum="off", clip_gradient=True)
BARE_HALF = tvm_qopt.KernelSpec.of(
    "sgd", "float32", momentum="off", clip_gradient=True, grad="float16"
)
LAMB, SGD = (tvm_qopt.KernelSpec.of(rule) for rule in ("lamb", "sgd"))
WITHOUT = tvm_qopt.KernelSpec.of("quantize", "dynamic8s")  # reads no gradient
SPECS = [PLAIN, MAPPED, HALF, MIXED, CLIPPED, BARE, BARE_HALF, LAMB, SGD, WITHOUT]
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel of this file, built in one child."""
    tvm_qopt.load_many(SPECS)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: it is an extra")


def normal(seed: int, size: int = SIZE) -> F32:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def linear_map() -> F32:
    return np.linspace(-1, 1, 256, dtype=np.float32)


class Run:
    """Weights, a gradient and a state under one kernel; `moved` gives each step a new gradient."""

    def __init__(self, spec: tvm_qopt.KernelSpec, param: Array | None = None, **given: Any) -> None:
        self.kernel = tvm_qopt.load(spec)
        self.param = normal(1) if param is None else param
        self.grad = normal(2, self.param.size).astype(spec.grad)
        self.state = self.kernel.init_state(self.param)
        self.plan = self.kernel.plan(param=self.param, grad=self.grad, state=self.state, **given)

    def bits(self) -> dict[str, bytes]:
        return {n: a.tobytes() for n, a in {"param": self.param, **self.state}.items()}


# clip_gradient


def plain_step(run: Run, grad: Any, clip: float, **given: Any) -> F32:
    """By how much lr = 1 moves weights of 0: the gradient as the rule gets it."""
    run.param[...] = 0
    run.grad[...] = grad
    assert run.plan.step(step=1, lr=1.0, weight_decay=0.0, clip_gradient=clip, **given)
    return -run.param


def bare(spec: tvm_qopt.KernelSpec = BARE, size: int = SIZE) -> Run:
    return Run(spec, np.zeros(size, np.float32))


@pytest.mark.parametrize("spec", [BARE, BARE_HALF], ids=lambda spec: spec.name)
@pytest.mark.parametrize("clip", [2.5, 1.0, 0.1, 1e-30, 1e30])
def test_each_element_is_clipped_to_the_bound(spec: tvm_qopt.KernelSpec, clip: float) -> None:
    run = bare(spec)
    grad = (normal(3) * 3).astype(spec.grad)
    edges = np.array([clip, -clip, np.nextafter(np.float32(clip), np.float32(INF)), 0.0, -0.0])
    grad[:5] = edges.astype(spec.grad) if clip < 1e4 else 0
    got = plain_step(run, grad, clip)
    np.testing.assert_array_equal(got, np.clip(grad.astype(np.float32), -clip, clip))
    if clip < 2:
        assert (np.abs(got) == np.float32(clip)).any() and np.abs(got).max() == np.float32(clip)


def test_zero_is_a_bound() -> None:
    """Not "off", which is what a negative number says."""
    run = bare()
    assert not plain_step(run, normal(3), 0.0).any()
    assert not plain_step(run, np.where(np.arange(SIZE) == 3, INF, 1), 0.0).any()
    assert not run.state["nonfinite_count"].any()
    for off in (-1.0, -1e-30, -1e30, -INF):
        np.testing.assert_array_equal(plain_step(run, normal(3), off), normal(3))


def test_inf_is_clipped_and_nan_is_not() -> None:
    run, grad = bare(), normal(3)
    grad[[0, 1, 300]] = INF, -INF, NAN
    got = plain_step(run, grad, 2.0)
    assert got[[0, 1]].tolist() == [2.0, -2.0]
    assert got[300] == 0, "skipped"
    assert run.state["nonfinite_count"].tolist() == [0, 1, 0, 0]
    rest = np.delete(np.arange(SIZE), [0, 1, 300])
    np.testing.assert_array_equal(got[rest], np.clip(grad, -2, 2)[rest])


def test_where_the_clip_is_off_inf_is_not_finite() -> None:
    run, grad = bare(), normal(3)
    grad[[0, 1, 300]] = INF, -INF, NAN
    got = plain_step(run, grad, -1.0)
    assert got[[0, 1, 300]].tolist() == [0, 0, 0]
    assert run.state["nonfinite_count"].tolist() == [2, 1, 0, 0]
    finite = np.isfinite(grad)
    np.testing.assert_array_equal(got[finite], grad[finite])


def test_the_clip_is_of_the_scaled_gradient() -> None:
    run, grad = bare(), normal(3)
    got = plain_step(run, grad, 0.5, grad_scale=4.0, gnorm_scale=0.5)
    np.testing.assert_array_equal(got, np.clip(grad / 8, -0.5, 0.5))
    assert (np.abs(got) < 0.5).any()
    big = plain_step(run, np.full(SIZE, 3e38), 7.0, gnorm_scale=8.0)  # Inf once it is scaled
    assert (big == 7).all()


def test_a_clip_of_adamw_is_that_of_its_gradient() -> None:
    """Moments and weights: the bits that a gradient clipped beforehand gives."""
    ours, theirs = Run(CLIPPED), Run(PLAIN)
    for step in range(1, 4):
        grad = normal(10 + step) * 3
        ours.grad[...], theirs.grad[...] = grad, np.clip(grad, -1, 1)
        assert ours.plan.step(step=step, clip_gradient=1.0, **HYPER)
        assert theirs.plan.step(step=step, **HYPER)
        assert ours.bits() == theirs.bits()


def test_the_bound_is_required_and_a_number() -> None:
    run = Run(CLIPPED)
    before = run.bits()
    with pytest.raises(HyperOutOfRange, match=r"^clip_gradient: expected a number, got nothing"):
        run.plan.step(step=1, **HYPER)
    for bad in (NAN, INF, "1", None, True):
        with pytest.raises(HyperOutOfRange, match=r"^clip_gradient: expected .+, got "):
            run.plan.step(step=1, **HYPER, clip_gradient=bad)  # type: ignore[arg-type]
    with pytest.raises(HyperOutOfRange, match="clip_gradient=1e"):
        run.plan.step(step=1, **HYPER, clip_gradient=1e39)
    with pytest.raises(UnknownName, match="'clip_gradient'"):
        Run(PLAIN).plan.step(step=1, **HYPER, clip_gradient=1.0)
    assert run.bits() == before


# maximize


@pytest.mark.parametrize(
    ("spec", "hyper"),
    [
        (PLAIN, HYPER),
        (HALF, HYPER),
        (LAMB, HYPER),
        (SGD, {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}),
        (CLIPPED, {**HYPER, "clip_gradient": 0.7}),
    ],
    ids=lambda x: x.name if isinstance(x, tvm_qopt.KernelSpec) else "",
)
def test_maximize_is_the_negated_gradient_bit_for_bit(
    spec: tvm_qopt.KernelSpec, hyper: Mapping[str, Any]
) -> None:
    ours, theirs = Run(spec), Run(spec)
    for step in range(1, 5):
        grad = normal(20 + step)
        grad[::16] = 0
        ours.grad[...], theirs.grad[...] = grad, -grad
        assert ours.plan.step(step=step, maximize=True, grad_scale=2.0, **hyper)
        assert theirs.plan.step(step=step, grad_scale=2.0, **hyper)
        assert ours.bits() == theirs.bits(), f"step {step}"
    theirs.grad[...] = ours.grad
    for run in (ours, theirs):  # it is a word of one step, not of the plan
        assert run.plan.step(step=5, **hyper)
    assert ours.bits() == theirs.bits()


# A gradient that has moved


@pytest.mark.parametrize("size", [1, 255, SIZE, 135_537])
@pytest.mark.parametrize("spec", [PLAIN, HALF, LAMB], ids=lambda spec: spec.name)
def test_a_moved_gradient_is_read_where_it_is(spec: tvm_qopt.KernelSpec, size: int) -> None:
    ours, theirs = Run(spec, normal(1, size)), Run(spec, normal(1, size))
    kept = []
    for step in range(1, 4):
        grad = normal(30 + step, size).astype(spec.grad)
        kept.append(grad)  # so that the next one lies elsewhere
        theirs.grad[...] = grad
        assert ours.plan.step(step=step, grad=grad, **HYPER)
        assert theirs.plan.step(step=step, **HYPER)
        assert ours.bits() == theirs.bits(), f"step {step}"
    kept[-1][...] = theirs.grad[...] = normal(40, size)
    for run in (ours, theirs):  # the last one given is the plan's from then on
        assert run.plan.step(step=4, **HYPER)
    assert ours.bits() == theirs.bits()


def test_a_gradient_that_is_freed_after_its_step_is_kept_by_the_plan() -> None:
    ours, theirs = Run(PLAIN), Run(PLAIN)
    for step in range(1, 4):
        theirs.grad[...] = normal(30)
        assert ours.plan.step(step=step, grad=normal(30) if step == 1 else None, **HYPER)
        assert theirs.plan.step(step=step, **HYPER)
        assert ours.bits() == theirs.bits()


def test_a_read_only_gradient_of_a_view_may_be_given() -> None:
    ours, theirs = Run(PLAIN), Run(PLAIN)
    wide = normal(31, SIZE + 3)
    wide.flags.writeable = False
    theirs.grad[...] = wide[3:]
    assert ours.plan.step(step=1, grad=wide[3:], **HYPER)
    assert theirs.plan.step(step=1, **HYPER)
    assert ours.bits() == theirs.bits()


def bad_gradients(run: Run) -> list[tuple[Any, type[Exception], str]]:
    odd = np.zeros(4 * SIZE + 1, np.uint8)[1:].view(np.float32)
    return [
        (normal(2, SIZE - 1), ShapeMismatch, f"shape ({SIZE},)"),
        (normal(2).reshape(1, SIZE), ShapeMismatch, f"shape ({SIZE},)"),
        (np.zeros(0, np.float32), ShapeMismatch, f"shape ({SIZE},)"),
        (normal(2).astype(np.float64), DtypeMismatch, "got float64"),
        (normal(2).astype(np.float16), DtypeMismatch, "got float16"),
        (normal(2).astype(">f4"), DtypeMismatch, "native byte order"),
        (normal(2, 2 * SIZE)[::2], ShapeMismatch, "contiguous"),
        (odd, ShapeMismatch, "multiple of 4"),
        (run.param, ShapeMismatch, "memory shared with"),
        ([0.0] * SIZE, DtypeMismatch, "got list"),
        (1.0, DtypeMismatch, "got float"),
        ("grad", DtypeMismatch, "got str"),
    ]


def test_a_gradient_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    run, clean = Run(PLAIN), Run(PLAIN)
    before = run.bits()
    for bad, kind, said in bad_gradients(run):
        with pytest.raises(kind) as caught:
            run.plan.step(step=1, grad=bad, **HYPER)
        message = str(caught.value)
        # of two that share memory either is named
        assert message.startswith(("grad: expected", "param: expected")) and said in message
        assert ("param:" not in message) or "shared with grad" in message
        assert isinstance(caught.value, QoptError) and run.bits() == before
    for each in (run, clean):  # and the gradient it had is still the plan's
        assert each.plan.step(step=1, **HYPER)
    assert run.bits() == clean.bits()


@pytest.mark.parametrize("slot", ["exp_avg_scale", "exp_avg_sq_scale"])
def test_a_gradient_may_not_lie_in_the_state(slot: str) -> None:
    whole = np.zeros(BLOCK + 8, np.float32)
    param, kernel = normal(1, BLOCK), tvm_qopt.load(PLAIN)
    state = kernel.init_state(param)
    state[slot] = whole[3:4]
    plan = kernel.plan(param=param, grad=normal(2, BLOCK), state=state)
    with pytest.raises(ShapeMismatch, match=rf"(grad|{slot}): .*memory shared with"):
        plan.step(step=1, grad=whole[:BLOCK], **HYPER)
    assert not whole.any()


def test_a_gradient_for_a_rule_that_reads_none_is_refused() -> None:
    kernel, param = tvm_qopt.load(WITHOUT), normal(1)
    state = kernel.init_state(param)
    plan = kernel.plan(param=param, state=state)
    with pytest.raises(QoptError, match="grad"):
        plan.step(step=1, grad=normal(2))
    assert not state["value_scale"].any()
    assert plan.step(step=1) and state["value_scale"].all()


def test_a_bad_scalar_is_said_before_the_gradient_is_taken() -> None:
    run, clean = Run(PLAIN), Run(PLAIN)
    with pytest.raises(HyperOutOfRange, match="lr"):
        run.plan.step(step=1, grad=normal(50), **HYPER | {"lr": -1})
    for each in (run, clean):
        assert each.plan.step(step=1, **HYPER)
    assert run.bits() == clean.bits()


# torch


def torch_loop(torch: Any, *, set_to_none: bool) -> Any:
    """Train three weights for a few steps, whose gradient torch makes anew where it was freed."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(40, 30, generator=generator))
    data = torch.randn(30, 16, generator=generator)
    kernel = tvm_qopt.load(PLAIN)
    param.grad = torch.zeros_like(param)
    state = kernel.init_state(param)
    plan = kernel.plan(param=param, grad=param.grad, state=state)
    optimizer, kept = torch.optim.SGD([param], lr=0.0), []
    for step in range(1, 7):
        optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none:
            kept.append(torch.empty(40, 30))  # of the size that was freed, so that it moves
        ((param @ data) ** 2).mean().backward()
        plan.step(step=step, **({"grad": param.grad} if set_to_none else {}), **HYPER)
    return param, state


def test_a_loop_that_frees_gradients_is_the_loop_that_does_not(torch: Any) -> None:
    (ours, state), (theirs, other) = (
        torch_loop(torch, set_to_none=set_to_none) for set_to_none in (True, False)
    )
    assert torch.equal(ours, theirs) and (ours != ours.detach()[0, 0]).any()
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_torch_refuses_a_gradient_of_another_shape(torch: Any) -> None:
    param = torch.ones(SIZE)
    kernel = tvm_qopt.load(PLAIN)
    plan = kernel.plan(param=param, grad=torch.ones(SIZE), state=kernel.init_state(param))
    for bad, kind in ((torch.ones(SIZE - 1), ShapeMismatch), (torch.ones(SIZE).half(), TypeError)):
        with pytest.raises(kind, match="grad"):
            plan.step(step=1, grad=bad, **HYPER)
    assert (param == 1).all()


def test_torch_is_told_that_a_weight_was_written(torch: Any) -> None:
    """A graph that was recorded before a step is stale after it; autograd says so."""
    param = torch.nn.Parameter(torch.ones(SIZE))
    kernel = tvm_qopt.load(PLAIN)
    grad = torch.ones(SIZE)
    plan = kernel.plan(param=param, grad=grad, state=kernel.init_state(param))
    loss = (param * param).sum()
    version = param._version
    assert plan.step(step=1, **HYPER)
    assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (param * param).sum().backward()
    assert torch.equal(param.grad, 2 * param)


def test_a_step_that_does_not_run_leaves_the_graph_as_it_is(torch: Any) -> None:
    param = torch.nn.Parameter(torch.ones(SIZE))
    kernel = tvm_qopt.load(PLAIN)
    plan = kernel.plan(param=param, grad=torch.ones(SIZE), state=kernel.init_state(param))
    loss = (param * param).sum()
    assert plan.step(step=1, found_inf=torch.ones(1), **HYPER) is False
    with pytest.raises(HyperOutOfRange):
        plan.step(step=1, **HYPER | {"lr": -1})
    loss.backward()
    assert (param.grad == 2).all()


# Maps given at run time

MAPS = {"exp_avg": linear_map(), "exp_avg_sq": np.linspace(0, 1, 256, dtype=np.float32) ** 2}


def test_a_state_is_read_with_its_maps() -> None:
    run = Run(MAPPED, qmap=MAPS)
    for step in range(1, 4):
        run.plan.step(step=step, **HYPER)
    decoded = run.kernel.decode_state(run.state, MAPS)
    assert sorted(decoded) == sorted(MAPS)
    for name, levels in MAPS.items():
        codes, scale = run.state[f"{name}_codes"], run.state[f"{name}_scale"]
        expected = levels[codes] * np.repeat(scale, BLOCK)[:SIZE]
        np.testing.assert_array_equal(decoded[name], expected)
        assert np.unique(codes).size > 50
    other = {**MAPS, "exp_avg": (linear_map() / 2).astype(np.float32)}
    halved = run.kernel.decode_state(run.state, other)
    np.testing.assert_allclose(halved["exp_avg"], decoded["exp_avg"] / 2, rtol=1e-6)


def test_only_the_slots_that_take_a_map_are_given_one() -> None:
    given = {"exp_avg": linear_map()}
    run = Run(MIXED, qmap=given)
    run.plan.step(step=1, **HYPER)
    decoded = run.kernel.decode_state(run.state, given)
    np.testing.assert_array_equal(decoded["exp_avg_sq"], run.state["exp_avg_sq"])


BOTH = "{'exp_avg': levels, 'exp_avg_sq': levels}"
BAD_MAPS: list[tuple[tvm_qopt.KernelSpec, Any, str, str]] = [
    (MAPPED, None, BOTH, "nothing"),
    (MAPPED, {}, BOTH, "dict"),
    (MAPPED, linear_map(), BOTH, "ndarray"),
    (MAPPED, [linear_map(), linear_map()], BOTH, "list"),
    (MAPPED, {"exp_avg": linear_map()}, BOTH, "['exp_avg']"),
    (MAPPED, {"exp_avg": linear_map(), "m": linear_map()}, BOTH, "['exp_avg', 'm']"),
    (
        *(MAPPED, {**MAPS, "max_exp_avg_sq": linear_map()}, BOTH),
        "['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']",
    ),
    (MAPPED, {0: linear_map(), "exp_avg": linear_map()}, BOTH, "exp_avg"),
    (MIXED, MAPS, "{'exp_avg': levels}", "['exp_avg', 'exp_avg_sq']"),
    (MIXED, None, "{'exp_avg': levels}", "nothing"),
    (PLAIN, MAPS, "no maps", "['exp_avg', 'exp_avg_sq']"),
    (PLAIN, linear_map(), "no maps", "ndarray"),
]


@pytest.mark.parametrize(
    ("spec", "qmap", "expected", "got"), BAD_MAPS, ids=map(str, range(len(BAD_MAPS)))
)
def test_maps_that_do_not_fit_are_refused(
    spec: tvm_qopt.KernelSpec, qmap: Any, expected: str, got: str
) -> None:
    kernel, param = tvm_qopt.load(spec), normal(1)
    state = kernel.init_state(param)
    for call in (
        lambda: kernel.plan(param=param, grad=normal(2), state=state, qmap=qmap),
        lambda: kernel.decode_state(state, qmap),
    ):
        with pytest.raises(ShapeMismatch) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"qmap: expected {expected}, got "), message
        assert got in message


@pytest.mark.parametrize(
    ("spec", "name"), [(PLAIN, "exp_avg_codes"), (MIXED, "exp_avg_sq"), (PLAIN, "exp_avg_sq_scale")]
)
def test_a_state_that_lacks_an_entry_is_not_read(spec: tvm_qopt.KernelSpec, name: str) -> None:
    kernel = tvm_qopt.load(spec)
    state = kernel.init_state(normal(1))
    del state[name]
    maps = {"exp_avg": linear_map()} if spec is MIXED else None
    with pytest.raises(ShapeMismatch, match=f"{name}: expected an array in state, got nothing"):
        kernel.decode_state(state, maps)
    with pytest.raises(DtypeMismatch, match="state: expected a dict of arrays, got int"):
        kernel.decode_state(5, maps)  # type: ignore[arg-type]


def test_no_maps_may_be_said_outright() -> None:
    nothing: tuple[Any, ...] = (None, {})
    for none in nothing:
        run = Run(PLAIN, qmap=none)
        assert run.kernel.decode_state(run.state, none).keys() == {"exp_avg", "exp_avg_sq"}


# The rest of a step


@pytest.mark.parametrize("value", [1, 0.0, "no", None, [], np.float32(1)])
def test_maximize_is_true_or_false(value: Any) -> None:
    run = Run(PLAIN)
    before = run.bits()
    with pytest.raises(HyperOutOfRange, match="maximize: expected True or False, got "):
        run.plan.step(step=1, maximize=value, **HYPER)
    assert run.bits() == before
    assert run.plan.step(step=1, maximize=np.True_, **HYPER)


def test_a_cpu_has_no_stream() -> None:
    run = Run(PLAIN)
    before = run.bits()
    with pytest.raises(DeviceMismatch, match="stream: expected None on a CPU, got 0"):
        run.plan.step(step=1, stream=0, **HYPER)
    assert run.bits() == before


@pytest.mark.parametrize("given", ["two", "0", "-1", "1.5", " ", "1e9"])
def test_a_number_of_threads_that_is_none_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_requested", None)
    run = Run(PLAIN, normal(1, 100_000))  # enough for threads to matter
    before = run.bits()
    monkeypatch.setenv("TVM_NUM_THREADS", given)
    with pytest.raises(HyperOutOfRange, match=r"^TVM_NUM_THREADS: expected .+, got ") as caught:
        run.plan.step(step=1, **HYPER)
    assert repr(given) in str(caught.value) and run.bits() == before
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    assert run.plan.step(step=1, **HYPER)


def test_a_number_of_threads_past_every_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As set_num_threads refuses it: a pool of that many workers would not be made."""
    monkeypatch.setattr(threads, "_requested", None)
    monkeypatch.setenv("TVM_NUM_THREADS", "1000000")
    with pytest.raises(HyperOutOfRange, match="TVM_NUM_THREADS"):
        tvm_qopt.get_num_threads()


@pytest.mark.parametrize("spec", [PLAIN, LAMB, SGD, BARE], ids=lambda spec: spec.name)
def test_a_step_without_hyper_parameters_names_the_first_that_lacks(
    spec: tvm_qopt.KernelSpec,
) -> None:
    run = Run(spec)
    before = run.bits()
    with pytest.raises(HyperOutOfRange, match=r"^\w+: expected a number, got nothing$") as caught:
        run.plan.step(step=1)
    assert caught.value.name in {hyper.name for hyper in spec.hyper}
    assert run.bits() == before
