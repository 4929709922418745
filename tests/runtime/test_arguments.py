"""Bad arguments of load, plan and step: each is an error that names the argument, what was expected
and what came, and changes nothing.  And the unusual ones that are right."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tvm_qopt
from tvm_qopt.errors import (
    ArtifactInvalid,
    DeviceMismatch,
    DtypeMismatch,
    HyperOutOfRange,
    QoptError,
    ShapeMismatch,
    UnknownName,
)

Array = npt.NDArray[Any]

SIZE = 1000  # three full blocks and a tail
HYPER: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
of = functools.partial(tvm_qopt.KernelSpec.of, "adamw")
F32, MAPPED, WHOLE = of("dynamic8"), of("codebook8"), of("float32")
HALF, BRAIN = of("dynamic8", param="float16"), of("dynamic8", param="bfloat16")
MIXED = of("dynamic8", param="bfloat16", grad="float16")
SPECS = [F32, MAPPED, WHOLE, HALF, BRAIN, MIXED]
BY_DTYPE = {"float32": F32, "float16": HALF, "bfloat16": BRAIN}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Every kernel of this file, built in one child."""
    tvm_qopt.load_many(SPECS)


def linear_map() -> Array:
    return np.linspace(-1, 1, 256, dtype=np.float32)


def normal(size: int | tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def arguments(
    spec: tvm_qopt.KernelSpec = F32, size: int | tuple[int, ...] = SIZE
) -> dict[str, Any]:
    """Good arguments for `plan` of a kernel of float32 or float16."""
    param, grad = (normal(size, seed).astype(spec.param) for seed in (1, 2))
    given: dict[str, Any] = {"param": param, "grad": grad}
    given["state"] = tvm_qopt.load(spec).init_state(param)
    if spec is MAPPED:
        given["qmap"] = {"exp_avg": linear_map(), "exp_avg_sq": linear_map()}
    return given


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        arrays.update(value if isinstance(value, dict) else {name: value})
    return arrays


def bits(given: Mapping[str, Any]) -> dict[str, bytes]:
    return {n: a.tobytes() for n, a in flat(given).items() if isinstance(a, np.ndarray)}


def put(given: dict[str, Any], name: str, value: Any) -> None:
    """Replace an argument by the name that messages give it."""
    if name in ("param", "grad"):
        given[name] = value
    elif name.endswith("_qmap"):
        given["qmap"][name.removesuffix("_qmap")] = value
    else:
        given["state"][name] = value


def get(given: Mapping[str, Any], name: str) -> Any:
    if name in ("param", "grad"):
        return given[name]
    if name.endswith("_qmap"):
        return given["qmap"][name.removesuffix("_qmap")]
    return given["state"][name]


def refused(
    spec: tvm_qopt.KernelSpec, given: dict[str, Any], kind: type[Exception], name: str, said: str
) -> None:
    """plan raises `kind`, with "name: expected ..., got ..." that holds `said`; nothing changes."""
    before = bits(given)
    with pytest.raises(kind) as caught:
        tvm_qopt.load(spec).plan(**given)
    message = str(caught.value)
    assert isinstance(caught.value, QoptError)
    assert re.match(rf"{name}: expected .+, got .+", message), message
    assert said in message
    assert bits(given) == before


ALL = [
    "param",
    "grad",
    "exp_avg_codes",
    "exp_avg_scale",
    "exp_avg_qmap",
    "exp_avg_sq_codes",
    "exp_avg_sq_scale",
    "exp_avg_sq_qmap",
    "nonfinite_count",
]
OUTPUTS = [name for name in ALL if name != "grad" and not name.endswith("_qmap")]
VECTORS = [name for name in ALL if name not in ("param", "grad")]


# dtype


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int16", "bool", "object"])
def test_a_wrong_dtype_is_refused(name: str, dtype: str) -> None:
    given = arguments(MAPPED)
    put(given, name, np.zeros(get(given, name).shape, dtype))
    refused(MAPPED, given, TypeError, name, f"got {dtype}")


@pytest.mark.parametrize("name", ["param", "grad", "exp_avg_scale", "exp_avg_qmap"])
def test_foreign_byte_order_is_refused(name: str) -> None:
    given = arguments(MAPPED)
    put(given, name, get(given, name).astype(">f4"))
    refused(MAPPED, given, TypeError, name, "got >f4")


def test_the_gradients_dtype_is_the_kernels() -> None:
    given = arguments(F32)
    given["grad"] = given["grad"].astype(np.float16)
    refused(F32, given, DtypeMismatch, "grad", "expected float32, got float16")


@pytest.mark.parametrize("bad", [1.0, [1.0] * SIZE, "weights", b"0", np.float32(1)])
def test_what_is_no_array_is_refused(bad: Any) -> None:
    given = arguments()
    given["grad"] = bad
    refused(F32, given, (TypeError, ValueError), "grad", "expected")  # type: ignore[arg-type]


# shape and size


@pytest.mark.parametrize("name", [name for name in ALL if name != "param"])
@pytest.mark.parametrize("change", ["shorter", "longer", "column", "row", "scalar", "empty"])
def test_a_wrong_shape_is_refused(name: str, change: str) -> None:
    given = arguments(MAPPED)
    good = get(given, name)
    bad = {
        "shorter": good[:-1].copy(),
        "longer": np.append(good, good[-1:]),
        "column": good[:, None].copy(),
        "row": good[None].copy(),
        "scalar": good[0:1].reshape(()).copy(),
        "empty": good[:0].copy(),
    }[change]
    put(given, name, bad)
    refused(MAPPED, given, ValueError, name, f"got {bad.shape}")


def test_scales_are_one_a_block_the_short_last_one_too() -> None:
    for size, blocks in ((256, 1), (257, 2), (512, 2), (513, 3)):
        given = arguments(size=size)
        assert given["state"]["exp_avg_scale"].shape == (blocks,)
        given["state"]["exp_avg_scale"] = np.zeros(blocks + 1, np.float32)
        refused(F32, given, ShapeMismatch, "exp_avg_scale", f"shape ({blocks},)")


# layout


@pytest.mark.parametrize("name", VECTORS)
def test_a_strided_array_is_refused(name: str) -> None:
    given = arguments(MAPPED)
    good = get(given, name)
    put(given, name, np.repeat(good, 2)[::2])
    refused(MAPPED, given, ValueError, name, "contiguous")


@pytest.mark.parametrize("name", ["param", "grad", "exp_avg_codes"])
@pytest.mark.parametrize("layout", ["columns", "reversed", "broadcast"])
def test_an_array_that_is_not_row_major_is_refused(name: str, layout: str) -> None:
    given = arguments(size=(20, 50))
    good = get(given, name)
    bad = {
        "columns": np.asfortranarray(good),
        "reversed": good[::-1],
        "broadcast": np.broadcast_to(good[:1], good.shape),
    }[layout]
    put(given, name, bad)
    refused(F32, given, ValueError, name, "contiguous")


@pytest.mark.parametrize("name", ALL)
def test_read_only_outputs_are_refused_and_read_only_inputs_are_fine(name: str) -> None:
    given = arguments(MAPPED)
    get(given, name).flags.writeable = False
    if name in OUTPUTS:
        refused(MAPPED, given, ValueError, name, "got a read-only one")
    else:
        before = get(given, name).tobytes()
        assert tvm_qopt.load(MAPPED).plan(**given).step(step=1, **HYPER)
        assert get(given, name).tobytes() == before


def at_offset(array: Array, offset: int) -> Array:
    """A copy `offset` bytes behind a multiple of 64."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    moved = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("name", [name for name in ALL if not name.endswith("_codes")])
def test_an_address_off_its_elements_is_refused(name: str) -> None:
    given = arguments(MAPPED)
    put(given, name, at_offset(get(given, name), 1))
    refused(MAPPED, given, ValueError, name, "an address that is a multiple of 4")


@pytest.mark.parametrize("spec", SPECS[:4], ids=[spec.name for spec in SPECS[:4]])
@pytest.mark.parametrize("size", [1, 255, 4113, 135_537])
def test_any_element_aligned_address_gives_the_same_bits(
    spec: tvm_qopt.KernelSpec, size: int
) -> None:
    """Each array another number of elements behind a multiple of 64 bytes."""
    given = arguments(spec, size)
    moved = arguments(spec, size)
    for i, (name, array) in enumerate(flat(arguments(spec, size)).items()):
        key = f"{name}_qmap" if name in moved.get("qmap", {}) else name
        put(moved, key, at_offset(array, array.itemsize * (2 * i + 1)))
        assert get(moved, key).ctypes.data % (2 * array.itemsize)
    for each in (given, moved):
        plan = tvm_qopt.load(spec).plan(**each)
        for step in (1, 2):
            plan.step(step=step, **HYPER)
    assert bits(given) == bits(moved)


# overlap


def test_param_and_grad_may_not_be_one_array() -> None:
    given = arguments()
    given["grad"] = given["param"]
    refused(F32, given, ValueError, "(param|grad)", "memory shared with")


def test_codes_and_scale_may_not_share_memory() -> None:
    given = arguments()
    whole = given["state"]["exp_avg_codes"] = np.zeros(SIZE, np.uint8)
    given["state"]["exp_avg_scale"] = whole[16:32].view(np.float32)
    refused(F32, given, ValueError, "exp_avg_(codes|scale)", "memory shared with exp_avg_")


def test_two_slots_may_not_share_memory() -> None:
    given = arguments()
    for part in ("codes", "scale"):
        shared = arguments()
        shared["state"][f"exp_avg_{part}"] = shared["state"][f"exp_avg_sq_{part}"]
        refused(F32, shared, ValueError, f"exp_avg(_sq)?_{part}", "memory shared with exp_avg")
    given["state"]["exp_avg_codes"] = np.zeros(2 * SIZE, np.uint8)[:SIZE]
    given["state"]["exp_avg_sq_codes"] = given["state"]["exp_avg_codes"].base[SIZE - 1 : -1]
    refused(F32, given, ValueError, "exp_avg(_sq)?_codes", "memory shared with exp_avg")


def test_an_output_within_an_input_is_found_behind_another_input() -> None:
    """A gradient whose memory holds a map and, further on, a scale that the step writes."""
    given = arguments(MAPPED)
    whole = np.zeros(SIZE, np.float32)
    whole[100:356] = linear_map()
    given["grad"], given["qmap"]["exp_avg"] = whole, whole[100:356]
    given["state"]["exp_avg_scale"] = whole[600:604]
    refused(MAPPED, given, ValueError, "(grad|exp_avg_scale)", "memory shared with")


def test_neighbours_in_one_buffer_and_shared_inputs_are_fine() -> None:
    given = arguments(MAPPED)
    both = np.concatenate([given["param"], given["grad"]])
    given["param"], given["grad"] = both[:SIZE], both[SIZE:]
    given["qmap"]["exp_avg_sq"] = given["qmap"]["exp_avg"]
    assert tvm_qopt.load(MAPPED).plan(**given).step(step=1, **HYPER)


# maps


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q: q[::-1].copy(), "ascending"),
        (lambda q: np.where(np.arange(256) == 7, q[9], q), "at 7"),
        (lambda q: np.where(np.arange(256) == 3, np.float32(np.nan), q), "got nan at 3"),
        (lambda q: np.where(np.arange(256) == 255, np.float32(np.inf), q), "got inf at 255"),
        (lambda q: q[:255].copy(), "shape (256,)"),
        (lambda q: np.append(q, q[-1:]), "shape (256,)"),
        (lambda q: q.astype(np.float64), "got float64"),
        (lambda q: np.full_like(q, 0.5), "expected two different levels or more, got 0.5"),
    ],
    ids=["reversed", "swapped", "nan", "inf", "255", "257", "float64", "flat"],
)
def test_a_map_that_is_none_is_refused(
    slot: str, change: Callable[[Array], Array], said: str
) -> None:
    given = arguments(MAPPED)
    given["qmap"][slot] = change(linear_map())
    kind = TypeError if said == "got float64" else ValueError
    refused(MAPPED, given, kind, f"{slot}_qmap", said)


# missing and unknown arguments


@pytest.mark.parametrize("name", ALL)
def test_a_missing_argument_is_named(name: str) -> None:
    given = arguments(MAPPED)
    put(given, name, None)
    refused(MAPPED, given, ValueError, name, "got nothing")
    if name.endswith("_qmap"):
        del given["qmap"][name.removesuffix("_qmap")]
        refused(MAPPED, given, ValueError, "qmap", "'exp_avg': levels, 'exp_avg_sq': levels")
    elif name not in ("param", "grad"):
        del given["state"][name]
        refused(MAPPED, given, ValueError, name, "got nothing")


def test_an_unknown_argument_is_named() -> None:
    given = arguments()
    given["state"]["momentum"] = np.zeros(SIZE, np.float32)
    refused(F32, given, ValueError, "momentum", "got an unknown argument")
    known = arguments()
    known["qmap"] = {"exp_avg": linear_map()}  # the map of a dynamic format is built in
    refused(F32, known, ValueError, "qmap", "expected no maps, got ['exp_avg']")
    mapped = arguments(MAPPED)
    mapped["qmap"]["exp_avg_cube"] = linear_map()
    refused(MAPPED, mapped, ValueError, "qmap", "exp_avg_cube")


def test_a_state_may_not_stand_in_for_param_or_grad() -> None:
    """The state's keys are its own: one called "param" would replace the argument unseen."""
    given = arguments()
    given["state"]["param"] = np.ones(SIZE, np.float32)
    with pytest.raises(ValueError, match="param"):
        tvm_qopt.load(F32).plan(**given)


def test_the_state_of_another_format_is_refused() -> None:
    given = arguments()
    given["state"] = tvm_qopt.load(WHOLE).init_state(given["param"])
    refused(F32, given, ValueError, "exp_avg(_sq)?", "got an unknown argument")


# hyper-parameters

NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, Any]] = [
    *(("lr", x) for x in (-1e-3, NAN, INF, -INF, "0.1", None, [0.1], 1j, True)),
    *((f"beta{i}", x) for i in (1, 2) for x in (-0.1, 1.0, 1.5, NAN, INF, "0.9", None)),
    *(("eps", x) for x in (0, -1e-8, 1e-300, NAN, INF, "1e-8", None)),
    *(("weight_decay", x) for x in (-0.1, NAN, INF, "0", None)),
    *(("step", x) for x in (0, -1, 1.0, "1", True, None, NAN, 2**53, np.float32(1))),
    *(("grad_scale", x) for x in (0, -1, NAN, INF, "1", None, True)),
    *(("gnorm_scale", x) for x in (-1, NAN, INF, "1", None)),
    *(("found_inf", x) for x in ("yes", [0.0, 1.0], np.zeros(2))),
]


@pytest.mark.parametrize(
    ("name", "value"), OUT_OF_RANGE, ids=[f"{name}-{value!r}" for name, value in OUT_OF_RANGE]
)
def test_a_scalar_out_of_range_is_refused(name: str, value: Any) -> None:
    given = arguments()
    before, plan = bits(given), tvm_qopt.load(F32).plan(**given)
    with pytest.raises((ValueError, TypeError)) as caught:
        plan.step(**{"step": 1, **HYPER, name: value})
    assert isinstance(caught.value, QoptError)
    assert re.match(rf"{name}: expected .+, got .+", str(caught.value))
    assert bits(given) == before
    assert plan.step(step=1, **HYPER), "the plan is as good as before"


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 1e42), ("weight_decay", 1e42), ("grad_scale", 1e-300), ("gnorm_scale", 1e42)],
)
def test_a_scalar_that_float32_cannot_hold_is_refused(name: str, value: float) -> None:
    """What the kernel reads is made of several; all are in the message."""
    given = arguments()
    before, plan = bits(given), tvm_qopt.load(F32).plan(**given)
    with pytest.raises(
        HyperOutOfRange, match="expected a scalar that float32 can hold, got"
    ) as said:
        plan.step(**{"step": 1, **HYPER, name: value})
    assert f"{name}={value!r}" in str(said.value)
    assert bits(given) == before


def test_an_eps_that_float32_rounds_to_zero_is_refused_or_harmless() -> None:
    """eps is scaled by the root of 1 - beta2^t, which must not bring 0/0 back to lanes of zeros."""
    given = arguments()
    given["grad"][...] = 0
    plan = tvm_qopt.load(F32).plan(**given)
    small = {"eps": 1e-35, "beta2": np.nextafter(1.0, 0.0).item()}
    with contextlib.suppress(HyperOutOfRange):
        plan.step(step=1, **HYPER | small)
    assert np.isfinite(given["param"]).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0),
        ("lr", 0.0),
        ("lr", np.float64(1e-3)),
        ("lr", np.ones((), np.float32)),
        ("beta1", 0.0),
        ("beta2", 0),
        ("beta2", np.nextafter(1.0, 0.0)),
        ("eps", 1e-35),
        ("weight_decay", 0),
        ("step", np.int64(3)),
        ("step", 2**53 - 1),
        ("grad_scale", 2.0**100),
        ("gnorm_scale", 0.0),
        ("found_inf", 0),
    ],
)
def test_the_ends_of_the_ranges_are_legal(name: str, value: Any) -> None:
    given = arguments()
    assert tvm_qopt.load(F32).plan(**given).step(**{"step": 1, **HYPER, name: value})
    assert np.isfinite(given["param"]).all()


def test_lr_zero_moves_the_state_and_no_weight() -> None:
    given = arguments()
    before = given["param"].copy()
    tvm_qopt.load(F32).plan(**given).step(step=1, **HYPER | {"lr": 0})
    assert given["param"].tobytes() == before.tobytes()
    assert given["state"]["exp_avg_scale"].all()


def test_unknown_and_missing_scalars_are_named() -> None:
    given = arguments()
    before, plan = bits(given), tvm_qopt.load(F32).plan(**given)
    with pytest.raises(
        UnknownName, match="hyper-parameter of adamw 'momentum'; known: beta1, beta2"
    ):
        plan.step(step=1, momentum=0.9, **HYPER)
    for name in HYPER:
        with pytest.raises(HyperOutOfRange, match=f"^{name}: expected a number, got nothing"):
            plan.step(step=1, **{n: x for n, x in HYPER.items() if n != name})
    with pytest.raises(TypeError, match="step"):
        plan.step(**HYPER)
    assert bits(given) == before


# load


def test_load_lists_what_exists() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown rule, and no folder here, 'adamv-dynamic8'; known: .*adamw"
    ):
        tvm_qopt.load("adamv-dynamic8")
    with pytest.raises(UnknownName, match=r"unknown state 'dynamic9'; known: .*dynamic8s"):
        tvm_qopt.load("adamw-dynamic9")
    with pytest.raises(UnknownName, match=r"unknown target 'cuda-sm99'; known: .*llvm-native"):
        tvm_qopt.load(F32, target="cuda-sm99")
    with pytest.raises(UnknownName, match="unknown policy 'maybe'; known: build, cached, rebuild"):
        tvm_qopt.load(F32, policy="maybe")


def test_load_of_a_folder_that_is_no_artifact(tmp_path: Any) -> None:
    for path in (tmp_path, str(tmp_path / "none")):
        with pytest.raises(ArtifactInvalid, match="not an artifact"):
            tvm_qopt.load(path)


# empty tensors


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_tensor_is_a_step_that_succeeds(shape: tuple[int, ...]) -> None:
    given = arguments(size=shape)
    plan = tvm_qopt.load(F32).plan(**given)
    assert plan.step(step=1, **HYPER) is True
    assert given["state"]["exp_avg_codes"].shape == shape
    assert given["state"]["exp_avg_scale"].shape == (0,)
    with pytest.raises(HyperOutOfRange, match="lr"):
        plan.step(step=2, **HYPER | {"lr": NAN})
    given["grad"] = np.zeros((1, *shape), np.float32)
    refused(F32, given, ShapeMismatch, "grad", f"shape {shape}")


def test_a_tensor_of_rank_zero_is_one_element() -> None:
    given, one = arguments(size=()), arguments(size=1)
    for name in ("param", "grad"):
        given[name][...] = one[name][0]
    for each in (given, one):
        tvm_qopt.load(F32).plan(**each).step(step=1, **HYPER)
    assert bits(given) == bits(one)


# bfloat16 in NumPy


def steps_of(spec: tvm_qopt.KernelSpec, param: Any, grad: Any) -> dict[str, Any]:
    """Two steps; the arrays after."""
    kernel = tvm_qopt.load(spec)
    state = kernel.init_state(param)
    plan = kernel.plan(param=param, grad=grad, state=state)
    for step in (1, 2):
        assert plan.step(step=step, **HYPER)
    return {"param": param, "grad": grad, **state}


def test_bfloat16_may_be_ml_dtypes_or_its_bits() -> None:
    ml_dtypes = pytest.importorskip(
        "ml_dtypes", reason="ml_dtypes is not installed: it is an extra"
    )
    param, grad = (normal(SIZE, seed).astype(ml_dtypes.bfloat16) for seed in (1, 2))
    as_bits = steps_of(BRAIN, param.view(np.uint16).copy(), grad.view(np.uint16).copy())
    typed = steps_of(BRAIN, param, grad)
    mixed = steps_of(BRAIN, normal(SIZE, 1).astype(ml_dtypes.bfloat16), as_bits["grad"])
    assert bits(typed) == bits(as_bits) == bits(mixed)
    assert typed["exp_avg_codes"].dtype == np.uint8
    wrong = arguments(F32)
    wrong["grad"] = normal(SIZE).astype(ml_dtypes.bfloat16)
    refused(F32, wrong, TypeError, "grad", "expected float32, got bfloat16")


def test_bits_stand_for_bfloat16_only() -> None:
    given = arguments(HALF)
    given["grad"] = given["grad"].view(np.uint16)
    refused(HALF, given, TypeError, "grad", "expected float16, got uint16")


# torch, and whatever exports DLPack


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip(
        "torch", reason="torch is not installed: pip install tvm_qopt[torch]"
    )


def torch_bits(arrays: Mapping[str, Any], torch: Any) -> dict[str, bytes]:
    return {n: a.detach().view(torch.uint8).numpy().tobytes() for n, a in arrays.items()}


@pytest.mark.parametrize("dtype", sorted(BY_DTYPE))
@pytest.mark.parametrize("size", [SIZE, 135_537])
def test_torch_tensors_get_the_bits_of_numpy(torch: Any, dtype: str, size: int) -> None:
    spec = BY_DTYPE[dtype]
    param, grad = (torch.from_numpy(normal(size, s)).to(getattr(torch, dtype)) for s in (1, 2))
    ours = [x.view(torch.uint8).numpy().copy() for x in (param, grad)]
    numpy_dtype = "uint16" if dtype == "bfloat16" else dtype
    expected = steps_of(spec, *(x.view(numpy_dtype) for x in ours))
    address = param.data_ptr()
    got = steps_of(spec, param, grad)
    assert param.data_ptr() == address
    assert all(isinstance(x, torch.Tensor) for x in got.values())
    assert torch_bits(got, torch) == bits(expected)
    decoded = tvm_qopt.load(spec).decode_state({n: got[n] for n in got.keys() - {"param", "grad"}})
    assert all(isinstance(x, np.ndarray) and x.any() for x in decoded.values())


def test_a_torch_parameter_that_requires_a_gradient_is_updated_in_place(torch: Any) -> None:
    param = torch.nn.Parameter(torch.ones(30, 40))
    (param * 3).sum().backward()
    steps_of(F32, param, param.grad)
    assert param.requires_grad and (param < 1).all()
    leaf = torch.ones(8, requires_grad=True)
    steps_of(F32, leaf * 2, torch.ones(8))  # no leaf, with a graph


def test_torch_and_numpy_may_be_mixed(torch: Any) -> None:
    mixed = steps_of(F32, normal(SIZE, 1), torch.from_numpy(normal(SIZE, 2)))
    plain = steps_of(F32, normal(SIZE, 1), normal(SIZE, 2))
    assert mixed["param"].tobytes() == plain["param"].tobytes()
    assert bits(steps_of(MIXED, *mixed_halves()))


def mixed_halves() -> tuple[Array, Array]:
    return normal(SIZE, 1).view(np.uint16)[1::2].copy(), normal(SIZE, 2).astype(np.float16)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_is_refused_as_such(torch: Any, layout: str) -> None:
    given = arguments(size=(20, 50))
    dense = torch.ones(20, 50)
    given["grad"] = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    refused(F32, given, RuntimeError, "grad", "got a sparse one")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float64", TypeError),
        ("complex64", TypeError),
        ("float16", TypeError),
        ("int32", TypeError),
    ],
)
@pytest.mark.parametrize("name", ["param", "grad"])
def test_a_torch_tensor_of_another_dtype_is_refused(
    torch: Any, name: str, dtype: str, kind: type[Exception]
) -> None:
    given = arguments()
    given[name] = torch.zeros(SIZE, dtype=getattr(torch, dtype))
    refused(F32, given, kind, name, dtype.rstrip("64") if dtype == "complex64" else dtype)


def test_a_meta_tensor_is_refused(torch: Any) -> None:
    given = arguments()
    given["grad"] = torch.zeros(SIZE, device="meta")
    refused(F32, given, (TypeError, RuntimeError), "grad", "meta")  # type: ignore[arg-type]


def test_a_strided_torch_tensor_is_refused(torch: Any) -> None:
    given = arguments(size=(20, 50))
    for bad in (
        torch.ones(50, 20).t(),
        torch.ones(20, 1).expand(20, 50),
        torch.ones(20, 100)[:, ::2],
    ):
        given["grad"] = bad
        refused(F32, given, ValueError, "grad", "contiguous")


def test_torch_tensors_that_overlap_are_refused(torch: Any) -> None:
    whole = torch.ones(SIZE + 1)
    kernel = tvm_qopt.load(F32)
    given = {"param": whole[:-1], "grad": whole[1:], "state": kernel.init_state(whole[:-1])}
    with pytest.raises(ValueError, match=r"(param|grad): .*memory shared with"):
        kernel.plan(**given)
    assert (whole == 1).all()


class Exporter:
    """An array that is known by DLPack alone."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **given: Any) -> Any:
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_anything_that_exports_dlpack_will_do() -> None:
    given, plain = arguments(), arguments()
    before = given["grad"]
    given["grad"] = Exporter(before)
    for each in (given, plain):
        tvm_qopt.load(F32).plan(**each).step(step=1, **HYPER)
    assert given["param"].tobytes() == plain["param"].tobytes()


def test_an_exporter_that_fails_is_refused_by_name() -> None:
    given = arguments()
    read_only = normal(SIZE)
    read_only.flags.writeable = False
    given["grad"] = Exporter(read_only)  # NumPy exports no read-only array
    refused(F32, given, TypeError, "grad", "Exporter")


def test_a_tensor_on_another_device_is_refused() -> None:
    """As far as a machine without one can tell: by what the exporter says of itself."""

    class Elsewhere:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("on another device")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    given = arguments()
    given["grad"] = Elsewhere()
    with pytest.raises((DeviceMismatch, DtypeMismatch), match="grad: expected"):
        tvm_qopt.load(F32).plan(**given)
