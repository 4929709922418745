"""Arrays into the codes and scales of a state format, and back, as kernels of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm_qopt.errors import HyperOutOfRange, ShapeMismatch, UnknownName, UnsupportedSpec
from tvm_qopt.formats import FORMATS, StateFormat
from tvm_qopt.ops.call import dtype_of, plan_of
from tvm_qopt.params import STORAGE
from tvm_qopt.runtime.arrays import ArrayView, full_like, view_of
from tvm_qopt.spec import KernelSpec

BF16_MINUS_ZERO, BF16_MINUS_INFINITY = 0x8000, 0xFF80


def quantize(
    x: Any, format: str, block_size: int = 256, *, qmap: Any = None, out: Any = None
) -> tuple[Any, Any]:
    """The codes of x in a state format, and the scale of each block of its flattened elements.

    Parameters
    ----------
    x : float32, float16 or bfloat16 (NumPy: ml_dtypes' or bits as uint16), any shape; read only.
    format : a state format with codes, such as "dynamic8s" (`tvm-qopt list`).
    block_size : elements that share a scale, a power of two from 64 to 4096.
    qmap : for "codebook8" its map, 256 ascending float32 levels.
    out : codes and scale to write, of the shapes below; new ones cost more than the work on a CPU.

    Returns codes (uint8: of x's shape, or for 4 bits flat, ceil(n / 2) bytes with the even element
    in the high half) and scale (float32, ceil(n / block_size)), of x's library and device.

    What is not finite is stored as 0 (the least level in `linear4u`, whose map has no 0) and does
    no harm to its block.  A format without a sign takes no negative value: x is checked for one,
    which on a GPU waits.

    Examples
    --------
    >>> import numpy as np
    >>> from tvm_qopt import ops
    >>> codes, scale = ops.quantize(np.linspace(-1, 1, 300, dtype=np.float32), "dynamic8s")
    >>> y = ops.dequantize(codes, scale, "dynamic8s")
    """
    coded = _format(format, qmap)
    view = view_of("x", x)
    param = dtype_of("x", view)
    spec = KernelSpec.of("quantize", format, block_size=block_size, param=param)
    if out is None:
        held = view.shape if coded.bits == 8 else (_held(view.size),)
        blocks = -(-view.size // block_size)
        out = full_like(x, held, "uint8", None), full_like(x, (blocks,), "float32", None)
    codes, scale = _pair(out)
    plan = plan_of(spec, {"param": ("x", x), **_stored(coded, codes, scale, qmap)})
    if not coded.signed and _has_negative(x, view):
        expected = f"no negative value, since {format} has no sign"
        raise HyperOutOfRange("x", expected=expected, got="one")
    plan.step(step=1)
    return codes, scale


def dequantize(
    codes: Any,
    scale: Any,
    format: str,
    block_size: int = 256,
    *,
    shape: Sequence[int] | None = None,
    dtype: str = "float32",
    qmap: Any = None,
    out: Any = None,
) -> Any:
    """The values that `quantize` stored, rounded to a dtype.

    Parameters
    ----------
    codes, scale : as `quantize` returns them; read only.
    shape : of the result; by default that of codes, for 4 bits (2 * len(codes),).
    dtype : "float32", "float16" or "bfloat16" (NumPy: its bits as uint16).
    out : an array of that shape and dtype to write, in place of a new one.
    """
    coded = _format(format, qmap)
    if dtype not in STORAGE:
        raise UnsupportedSpec(f"dtype: one of {', '.join(STORAGE)}, got {dtype!r}")
    view = view_of("codes", codes)
    wanted = _shape(shape, view, coded)
    spec = KernelSpec.of("dequantize", format, block_size=block_size, param=dtype)
    held = view.shape if coded.bits == 8 else (math.prod(wanted),)
    values = full_like(codes, held, dtype, None) if out is None else _flat(out, wanted, held)
    stored = _stored(coded, codes, scale, qmap)
    plan_of(spec, {"param": ("out", values), **stored}).step(step=1)
    return values.reshape(wanted) if out is None else out


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise ShapeMismatch("out", expected="a pair of codes and scale", got=type(out).__name__)
    return out


def _flat(out: Any, wanted: tuple[int, ...], held: tuple[int, ...]) -> Any:
    """`out`, which must be of the shape wanted, in the shape that the kernel takes."""
    view = view_of("out", out)
    if view.shape != wanted:
        raise ShapeMismatch("out", expected=f"shape {wanted}", got=str(view.shape))
    return out.reshape(held) if view.contiguous else out  # another is refused with the rest


def _format(name: str, qmap: Any) -> StateFormat:
    coded = {key: each for key, each in FORMATS.items() if each.scaled}
    if name not in [*coded]:
        raise UnknownName("format with codes", name, coded)
    if qmap is not None and not coded[name].runtime_map:
        expected = f"nothing, since {name} has its own map"
        raise ShapeMismatch("qmap", expected=expected, got=type(qmap).__name__)
    return coded[name]


def _held(size: int) -> int:
    """Bytes of 4-bit codes for a number of elements."""
    return (size + 1) // 2


def _stored(coded: StateFormat, codes: Any, scale: Any, qmap: Any) -> dict[str, tuple[str, Any]]:
    """The kernel's arguments with their names here."""
    bound = {"value_codes": ("codes", codes), "value_scale": ("scale", scale)}
    return bound | ({"value_qmap": ("qmap", qmap)} if coded.runtime_map else {})


def _shape(given: Sequence[int] | None, codes: ArrayView, coded: StateFormat) -> tuple[int, ...]:
    """The shape of the values behind some codes."""
    if given is None:
        return codes.shape if coded.bits == 8 else (2 * codes.size,)
    sizes = isinstance(given, Sequence) and all(isinstance(n, int) and n >= 0 for n in given)
    size = math.prod(given) if sizes else -1
    if (size if coded.bits == 8 else _held(size)) != codes.size:
        most = codes.size if coded.bits == 8 else 2 * codes.size
        less = "" if coded.bits == 8 else " or one less"
        expected = f"a shape of {most} elements{less}, as there are codes"
        raise ShapeMismatch("shape", expected=expected, got=repr(given))
    return tuple(given)


def _has_negative(x: Any, view: ArrayView) -> bool:
    if view.dtype == "uint16":
        return bool(((x > BF16_MINUS_ZERO) & (x <= BF16_MINUS_INFINITY)).any())
    return bool((x < 0).any())
