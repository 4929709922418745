"""From what is typed to KernelSpecs and target presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tvm_qopt.spec import KernelSpec

SPEC_HELP = (
    "A rule, such as adamw (then --state, --param and the like apply), or the full name of a spec, "
    "such as adamw-dynamic8-b256-p_bf16-g_f32."
)
TARGET_HELP = (
    "What to compile for: llvm-native (this machine), llvm-x86-64-v3, llvm-aarch64, cuda-sm90, "
    "cuda-sm80+sm90 (both), cuda-all, opencl ... `tvm-qopt list` has them all."
)


@dataclass(frozen=True)
class SpecOptions:
    """The options that complete a rule's name; None where not given."""

    state: str | None = None
    param: str | None = None
    grad: str | None = None
    param_format: str | None = None
    block_size: int | None = None
    settings: tuple[str, ...] = ()

    def given(self) -> dict[str, Any]:
        names = ("state", "param", "grad", "param_format", "block_size")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def resolve(texts: Sequence[str], options: SpecOptions) -> list[KernelSpec]:
    """The specs meant, each once.  Raises UnknownName, UnsupportedSpec, and typer's BadParameter
    for options that no rule's name takes."""
    if all("-" in text for text in texts) and (options.given() or options.settings):
        raise typer.BadParameter(
            f"--state, --param, --grad, --block-size and --set complete the name of a rule; "
            f"{texts[0]} is a full spec"
        )
    return list(dict.fromkeys(_resolve(text, options) for text in texts))


def _resolve(text: str, options: SpecOptions) -> KernelSpec:
    from tvm_qopt.rules import get_rule
    from tvm_qopt.spec import DEFAULT_STATE, KernelSpec, parse_settings

    if "-" in text:
        return KernelSpec.parse(text)
    given = options.given()
    settings = dict(_split_setting(setting) for setting in options.settings)
    state = given.get("state", DEFAULT_STATE)
    return KernelSpec.of(text, **given, **parse_settings(get_rule(text), state, settings))


def _split_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise typer.BadParameter(f"--set takes NAME=VALUE, got {text!r}")
    return name, value
