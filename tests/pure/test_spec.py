"""KernelSpec: names that parse back, and errors that list what exists."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tvm_qopt.errors import QoptError, UnknownName, UnsupportedSpec
from tvm_qopt.formats import FAMILIES, FORMATS, get_format
from tvm_qopt.params import SHORT
from tvm_qopt.rules import RULES, Slot
from tvm_qopt.spec import BLOCK_SIZES, KernelSpec
from tvm_qopt.targets import get_target, known_targets

DTYPES = tuple(SHORT)


def fits(slot: Slot, format_: str) -> bool:
    return slot.nonnegative or get_format(format_).signed


def states(rule: str) -> list[str]:
    """Every assignment of formats to a rule's slots by default, thinned to some hundreds."""
    slots = RULES[rule].slots(RULES[rule].defaults)
    joined = [
        "+".join(names)
        for names in itertools.product(FORMATS, repeat=len(slots))
        if all(map(fits, slots, names))
    ]
    stride = 1 + len(joined) // 300
    return [*FAMILIES, *filter(None, joined[::stride])]


def settings_of(spec: KernelSpec) -> list[dict[str, Any]]:
    names, choices = list(spec.choices), list(spec.choices.values())
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


def assert_names_itself(spec: KernelSpec) -> None:
    assert KernelSpec.parse(spec.name) == spec
    assert hash(KernelSpec.parse(spec.name)) == hash(spec)
    assert re.fullmatch(r"[a-z0-9_+-]+", spec.name), "a name is a file name and a test id"


@pytest.mark.parametrize("rule", sorted(RULES))
def test_names_parse_back_for_every_state_and_setting(rule: str) -> None:
    specs = set()
    for state in states(rule):
        assert_names_itself(KernelSpec.of(rule, state))
    for state in ("dynamic8", "codebook8"):  # the latter has a setting of its own
        for settings in settings_of(KernelSpec.of(rule, state)):
            own = {name: settings[name] for name in RULES[rule].settings}
            known = KernelSpec.of(
                rule, state, **own
            ).choices  # a rule without slots has no formats'
            settings = {name: value for name, value in settings.items() if name in known}
            spec = KernelSpec.of(rule, state, **settings)
            assert_names_itself(spec)
            assert spec.all_settings == settings
            specs.add(spec)
    assert len({spec.name for spec in specs}) == len(specs) > 1


@pytest.mark.parametrize("rule", sorted(RULES))
def test_names_parse_back_for_every_dtype_and_block_size(rule: str) -> None:
    names = set()
    for param, grad, block_size in itertools.product(DTYPES, DTYPES, BLOCK_SIZES):
        spec = KernelSpec.of(rule, param=param, grad=grad, block_size=block_size)
        assert_names_itself(spec)
        assert (spec.param, spec.grad, spec.block_size) == (param, grad, block_size)
        names.add(spec.name)
    assert len(names) == len(DTYPES) ** 2 * len(BLOCK_SIZES)


def test_a_name_as_printed_in_the_documents() -> None:
    spec = KernelSpec.of("adamw", param="bfloat16", nonfinite="propagate", zero_rule=False)
    assert spec.name == "adamw-dynamic8-b256-p_bf16-g_bf16-nonfinite_propagate-zero_rule_off"
    assert spec.state == ("dynamic8s", "dynamic8u")


def test_a_name_may_leave_out_what_has_a_default() -> None:
    plain = KernelSpec.of("adamw")
    assert KernelSpec.parse("adamw") == KernelSpec.parse("adamw-dynamic8") == plain
    assert KernelSpec.parse("adamw-dynamic8s+dynamic8u-g_f32") == plain
    assert KernelSpec.parse("adamw-float32-p_f16-g_f16-b64") == KernelSpec.of(
        "adamw", "float32", param="float16", block_size=64
    )


def test_the_gradient_has_the_parameters_dtype_by_default() -> None:
    assert KernelSpec.of("adamw", param="float16").grad == "float16"


def test_one_format_serves_all_slots_and_the_name_is_the_shortest() -> None:
    assert KernelSpec.of("adamw", "codebook8").state == ("codebook8", "codebook8")
    assert KernelSpec.of("adamw", "codebook8+codebook8").state_name == "codebook8"
    assert KernelSpec.of("adamw", "dynamic8s+dynamic8u").state_name == "dynamic8"
    assert KernelSpec.of("adamw", "dynamic8s+float32").state_name == "dynamic8s+float32"


def test_settings_at_their_default_are_dropped() -> None:
    plain = KernelSpec.of("adamw")
    spelled = KernelSpec.of("adamw", zero_rule=True, nonfinite="skip", decay="before")
    assert spelled == plain and spelled.settings == () and spelled.name == plain.name
    mixed = KernelSpec.of("adamw", zero_rule=False, decay="after", nonfinite="skip")
    assert mixed.settings == (("decay", "after"), ("zero_rule", False)), "sorted, no default"


def test_arguments_in_order_with_outputs_marked() -> None:
    tensors = KernelSpec.of("adamw", "dynamic8s+codebook8", param="bfloat16").tensors
    assert [t.name for t in tensors] == [
        "hyper",
        "param",
        "grad",
        "exp_avg_codes",
        "exp_avg_scale",
        "exp_avg_sq_codes",
        "exp_avg_sq_scale",
        "exp_avg_sq_qmap",
        "nonfinite_count",
    ]
    assert {t.name for t in tensors if not t.output} == {"hyper", "grad", "exp_avg_sq_qmap"}
    by_name = {t.name: t for t in tensors}
    assert (by_name["param"].dtype, by_name["param"].storage) == ("bfloat16", "uint16")
    assert by_name["exp_avg_sq_qmap"].shape == (256,)
    assert by_name["exp_avg_scale"].shape == ("nb",)
    assert not by_name["exp_avg_scale"].per_element and by_name["grad"].per_element


UNKNOWN = [
    (lambda: KernelSpec.of("adamv"), "rule", "adamv", RULES),
    (lambda: KernelSpec.parse("adamv-dynamic8"), "rule", "adamv", RULES),
    (lambda: KernelSpec.of("adamw", "dynamic9"), "state", "dynamic9", (*FORMATS, *FAMILIES)),
    (lambda: KernelSpec.of("adamw", "dynamic8s+int3"), "state", "int3", (*FORMATS, *FAMILIES)),
    (lambda: KernelSpec.parse("adamw-nope-b256"), "state", "nope", (*FORMATS, *FAMILIES)),
    (lambda: KernelSpec.of("adamw", centered=True), "setting", "centered", ("decay", "nonfinite")),
    (lambda: KernelSpec.parse("adamw-dynamic8-centered_on"), "setting", "centered", ("decay",)),
    (lambda: KernelSpec.parse("adamw-dynamic8-decay_never"), "value", "never", ("after", "before")),
    (lambda: KernelSpec.parse("adamw-dynamic8-p_f64"), "dtype", "f64", ("f32", "f16", "bf16")),
    (lambda: KernelSpec.parse("adamw-dynamic8-nonsense"), "part", "nonsense", ("p_<dtype>",)),
    (lambda: get_target("cuda-sm99"), "target", "cuda-sm99", known_targets()),
    (lambda: get_target("llvm-sparc"), "target", "llvm-sparc", known_targets()),
]


@pytest.mark.parametrize(
    ("make", "kind", "name", "known"), UNKNOWN, ids=[f"{kind}-{n}" for _, kind, n, _ in UNKNOWN]
)
def test_an_unknown_name_is_an_error_that_lists_what_exists(
    make: Any, kind: str, name: str, known: Any
) -> None:
    with pytest.raises(UnknownName) as caught:
        make()
    message = str(caught.value)
    assert message.startswith(f"unknown {kind}") and repr(name) in message
    assert all(each in message for each in known)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, QoptError)


@pytest.mark.parametrize("block_size", [0, 1, 32, 100, 255, 8192, -256, 256.0, "256", True, None])
def test_an_unsupported_block_size_lists_those_that_are(block_size: Any) -> None:
    with pytest.raises(UnsupportedSpec, match="block_size: one of") as caught:
        KernelSpec.of("adamw", block_size=block_size)
    assert "4096" in str(caught.value) and repr(block_size) in str(caught.value)


@pytest.mark.parametrize("role", ["param", "grad"])
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int8", "f32", ""])
def test_an_unsupported_dtype_lists_those_that_are(role: str, dtype: str) -> None:
    dtypes: dict[str, Any] = {"param": "float32", "grad": "float32", role: dtype}
    with pytest.raises(UnsupportedSpec, match=f"{role}: one of .*bfloat16.*{dtype!r}"):
        KernelSpec.of("adamw", **dtypes)


def test_a_signed_slot_refuses_an_unsigned_format() -> None:
    for state in ("dynamic8u", "dynamic8u+dynamic8u", "dynamic8u+dynamic8s"):
        with pytest.raises(UnsupportedSpec, match="exp_avg is signed, dynamic8u is not"):
            KernelSpec.of("adamw", state)
    KernelSpec.of("adamw", "dynamic8s+dynamic8s")  # a signed format serves a nonnegative slot


def test_the_number_of_formats_is_the_number_of_slots() -> None:
    with pytest.raises(UnsupportedSpec, match="adamw has 2 slots, got 3 formats"):
        KernelSpec.of("adamw", "dynamic8s+dynamic8u+float32")
    with pytest.raises(UnsupportedSpec, match="adamw has 2 slots, got 1 formats"):
        KernelSpec("adamw", ("float32",), 256, "float32", "float32")


@pytest.mark.parametrize(
    "settings",
    [
        {"nonfinite": "ignore"},
        {"decay": True},
        {"zero_rule": 1},  # equal to True, but another name
        {"zero_rule": "on"},
        {"zero_rule": None},
    ],
)
def test_a_setting_has_the_values_it_lists(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(UnsupportedSpec, match=f"{name}: one of") as caught:
        KernelSpec.of("adamw", **settings)
    assert repr(value) in str(caught.value)


def test_a_setting_of_another_format_is_unknown() -> None:
    assert KernelSpec.of("adamw", "codebook8", sign_repair=True).all_settings["sign_repair"]
    with pytest.raises(UnknownName, match="unknown setting of adamw 'sign_repair'"):
        KernelSpec.of("adamw", "dynamic8", sign_repair=True)


@pytest.mark.parametrize("state", ["4bit+dynamic8u", "dynamic8s+4bit"])
def test_a_family_stands_alone(state: str) -> None:
    said = r"'4bit' stands alone.* write dynamic4s \(or linear4u for a slot that is never negative"
    for make in (
        lambda: KernelSpec.of("adamw", state),
        lambda: KernelSpec.parse(f"adamw-{state}-nonfinite_skip"),
    ):
        with pytest.raises(UnsupportedSpec, match=said):
            make()
