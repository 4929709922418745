"""How parameters and gradients are stored, and their way to float32 and back.

A parameter format is the parameter itself or 16-bit weights with what makes up for their rounding.
The 16-bit types travel as their bit patterns (uint16), so that a kernel needs no 16-bit arithmetic,
NumPy can carry bfloat16, and a weight that a step leaves alone keeps every bit, NaN payloads too.
May import layer 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tvm_qopt.errors import UnknownName
from tvm_qopt.xp import ArrayNamespace, Value

STORAGE = {"float32": "float32", "float16": "uint16", "bfloat16": "uint16"}
"""dtype of a parameter or gradient -> dtype of the kernel's argument."""

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""dtype -> its form in spec names."""


def load(xp: ArrayNamespace, raw: Value, dtype: str) -> Value:
    """The stored value as float32, exactly."""
    if dtype == "float32":
        return raw
    if dtype == "float16":
        return xp.cast(xp.reinterpret(raw, "float16"), "float32")
    return xp.reinterpret(xp.cast(raw, "int32") << 16, "float32")


def store(xp: ArrayNamespace, x: Value, dtype: str) -> Value:
    """A float32 value in its stored form: one rounding, to nearest even; a NaN stays a NaN."""
    if dtype == "float32":
        return x
    if dtype == "float16":
        return xp.reinterpret(xp.cast(x, "float16"), "uint16")
    bits = xp.reinterpret(x, "int32")
    rounded = bits + (0x7FFF + ((bits >> 16) & 1))
    return xp.cast((xp.where(is_number(x), rounded, bits | 0x400000) >> 16) & 0xFFFF, "uint16")


def is_number(x: Value) -> Value:
    """Whether a float32 is no NaN, as compilers do not know that it is."""
    return x <= math.inf


def nan(xp: ArrayNamespace, dtype: str) -> Value:
    """A quiet NaN in stored form."""
    if dtype == "float32":
        return xp.reinterpret(xp.constant(0x7FC00000, "int32"), "float32")
    return xp.constant({"float16": 0x7E00, "bfloat16": 0x7FC0}[dtype], "uint16")


INFINITY = 0x7F800000  # of a float32
Outputs = dict[str, Value]


@dataclass(frozen=True)
class ParamFormat:
    """How weights are stored: the tensor `param`, and `beside`: name -> dtype, written with it.

    dtypes: of `param` that the format is for.  random: it needs random numbers.
    """

    name: str
    dtypes: tuple[str, ...]
    beside: tuple[tuple[str, str], ...] = ()
    random: bool = False

    def load(self, xp: ArrayNamespace, a: Mapping[str, Value], dtype: str) -> Value:
        """The weights as float32."""
        return load(xp, a["param"], dtype)

    def store(self, xp: ArrayNamespace, x: Value, a: Mapping[str, Value], dtype: str) -> Outputs:
        """Tensor name -> stored form of float32 weights."""
        return {"param": store(xp, x, dtype)}

    def nan(self, xp: ArrayNamespace, dtype: str) -> Outputs:
        """Tensor name -> stored form of a NaN."""
        return {"param": nan(xp, dtype)}


class Plain(ParamFormat):
    """The weights themselves, rounded to nearest even at each step."""


class Master(ParamFormat):
    """A float32 master is the source of truth; `param` is its rounded copy (MXNet's mp_ operators,
    labml's fp32_copy).  6 bytes a weight."""

    def load(self, xp: ArrayNamespace, a: Mapping[str, Value], dtype: str) -> Value:
        return a["param_master"]

    def store(self, xp: ArrayNamespace, x: Value, a: Mapping[str, Value], dtype: str) -> Outputs:
        return {"param_master": x, "param": store(xp, x, dtype)}

    def nan(self, xp: ArrayNamespace, dtype: str) -> Outputs:
        return {"param_master": nan(xp, "float32"), "param": nan(xp, dtype)}


class Split(ParamFormat):
    """bfloat16 weights and the 16 bits that restore the float32 master exactly: 4 bytes a weight.

    The weight is the master rounded to nearest, ties away from zero: its bits plus half a unit,
    cut.  What that added or took is the low bits as a signed number.
    A NaN is stored as the quiet one, whose bits no rounding overflows.
    """

    def load(self, xp: ArrayNamespace, a: Mapping[str, Value], dtype: str) -> Value:
        low = xp.cast(xp.reinterpret(a["param_low"], "int16"), "int32")
        return xp.reinterpret((xp.cast(a["param"], "int32") << 16) + low, "float32")

    def store(self, xp: ArrayNamespace, x: Value, a: Mapping[str, Value], dtype: str) -> Outputs:
        bits = xp.where(is_number(x), xp.reinterpret(x, "int32"), 0x7FC00000)
        bits = xp.bind(bits, "param_bits")
        weight = ((bits + 0x8000) >> 16) & 0xFFFF
        return {
            "param_low": xp.cast(bits & 0xFFFF, "uint16"),
            "param": xp.cast(weight, "uint16"),
        }

    def nan(self, xp: ArrayNamespace, dtype: str) -> Outputs:
        return {"param_low": xp.constant(0, "uint16"), "param": nan(xp, dtype)}


class Stochastic(ParamFormat):
    """bfloat16 weights rounded up or down at random, so that the mean is right: 2 bytes a weight.

    Away from zero with probability low / 65536, low the 16 bits that are cut (torchao's rule); a
    finite weight never becomes infinite.  The numbers are a hash of seed, step, block and element:
    the same on any number of threads.
    """

    def store(self, xp: ArrayNamespace, x: Value, a: Mapping[str, Value], dtype: str) -> Outputs:
        bits = xp.bind(xp.reinterpret(x, "int32"), "param_bits")
        up = xp.cast(_random16(xp, a), "int32") < (bits & 0xFFFF)
        cut = bits & -0x10000
        rounded = xp.bind(xp.where(up, cut + 0x10000, cut), "param_rounded")
        overflows = xp.all_of((rounded & INFINITY) == INFINITY, (bits & INFINITY) != INFINITY)
        kept = xp.where(is_number(x), rounded, bits | 0x400000)
        kept = xp.where(overflows, cut, kept)
        return {"param": xp.cast((kept >> 16) & 0xFFFF, "uint16")}


def _random16(xp: ArrayNamespace, a: Mapping[str, Value]) -> Value:
    """16 random bits an element (uint32): a hash of the block, and of that and the element.

    The hash is MurmurHash3's finaliser (Appleby 2011), over a Weyl sequence of elements.
    """
    rng, golden = a["rng"], 0x9E3779B1
    key = xp.cast(a["block_number"], "uint32") * golden + xp.cast(rng.seed_low, "uint32")
    key = _hash(xp, key, "random_block")
    key = _hash(xp, key ^ xp.cast(rng.step, "uint32"), "random_step")
    key = _hash(xp, key ^ xp.cast(rng.seed_high, "uint32"), "random_key")
    # bound, since TVM folds products of an unrolled index without wrapping them at 32 bits
    element = xp.bind(xp.cast(xp.element_index(), "uint32"), "random_element")
    return _hash(xp, key + element * golden, "random") >> 16


def _hash(xp: ArrayNamespace, x: Value, name: str) -> Value:
    x = xp.bind(x, f"{name}_0")
    for number, (shift, factor) in enumerate(((16, 0x85EBCA6B), (13, 0xC2B2AE35))):
        x = xp.bind((x ^ (x >> shift)) * factor, f"{name}_{number + 1}")
    return xp.bind(x ^ (x >> 16), f"{name}_3")


PARAM_FORMATS: dict[str, ParamFormat] = {
    format_.name: format_
    for format_ in (
        Plain("plain", ("float32", "float16", "bfloat16")),
        Master("master", ("float16", "bfloat16"), (("param_master", "float32"),)),
        Split("split", ("bfloat16",), (("param_low", "uint16"),)),
        Stochastic("stochastic", ("bfloat16",), random=True),
    )
}


def get_param_format(name: str) -> ParamFormat:
    if name not in PARAM_FORMATS:
        raise UnknownName("parameter format", name, PARAM_FORMATS)
    return PARAM_FORMATS[name]
