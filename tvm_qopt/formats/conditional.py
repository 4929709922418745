"""The unsigned dynamic map where an operation under a condition is one instruction, and a look-up
among 16 numbers is not (OpenCL, Metal, WebGPU).

The same levels as the closed forms of `dynamic`, by fewer instructions: nothing is converted, since
adding a large whole number rounds and leaves a code in the last bits.  The signed map has the form
of CPUs there: encoding like this, PoCL 3 counted wrong in one kernel (Oclgrind found no fault), and
decoding alone took registers, and with them warps.
"""

from __future__ import annotations

from tvm_qopt.xp import WHOLE, ArrayNamespace, Value, code_of

EXPONENT = 0x7F800000
ROUNDS = 8999936.0
"""Added to a small number of either sign it rounds to a whole one, which ends in its bits: above
2^23 and below 2^24 with room for a code either way, and a multiple of 256."""
BELOW = -0.3
"""A midpoint between decades lies 0.2 steps above the upper one's edge, which is at -0.5."""


def decode(xp: ArrayNamespace, codes: Value, decades: int, name: str) -> Value:
    """The level of a code: (18 w + 9 - 16 n) 5^i / (40 10^(D-1)), n the power of two in w.

    Rounded once: all products before the last are exact.
    """
    w = xp.bind(xp.whole(codes) - (WHOLE - 1), f"{name}_w")
    bits = xp.bind(xp.reinterpret(w, "int32"), f"{name}_bits")
    level = (w * 18.0 + 9.0) - xp.reinterpret(bits & EXPONENT, "float32") * 16.0
    for bit, factor in ((23, 5.0), (24, 25.0)):
        level = xp.bind(level, f"{name}_times{factor:g}")
        level = xp.where((bits & (1 << bit)) == 0, level, level * factor)
    unit: Value = 1.0 / (40 * 10 ** (decades - 1))
    unit = xp.where((bits & (1 << 25)) == 0, unit, unit * 5**4)
    level = xp.bind(xp.minimum(level * unit, 1.0), f"{name}_level")
    return xp.where(w == 1.0, 0.0, level)


def encode(
    xp: ArrayNamespace, x: Value, decades: int, midpoints: tuple[float, float], name: str
) -> Value:
    """The code (uint8) of the unsigned level nearest x.  midpoints: above 0, and below 1.

    x is scaled into the top decade, and a ninth of the decade's n is kept beside it; the exponent
    of that is n's.
    """
    most = 2 ** (decades + 1)
    y = xp.bind(xp.maximum(x, 0.3 * 0.1 ** (decades - 1)), f"{name}_y")
    ninth: Value = most / 18
    for step in (4, 2, 1):
        small = y < 10.0**-step * (1 - 1e-6)
        ninth = xp.bind(xp.where(small, ninth * 0.5**step, ninth), f"{name}_n{step}")
        y = xp.bind(xp.where(small, y * 10.0**step, y), f"{name}_y{step}")
    step = xp.bind((y * 10.0 - 1.0) * ninth - 0.5, f"{name}_step")
    step = xp.where(step < BELOW, -1.0, step)
    rounded = xp.bind(step + (ROUNDS - 1), f"{name}_rounded")
    sixteenth = xp.reinterpret(xp.reinterpret(ninth, "int32") & EXPONENT, "float32")
    code = sixteenth * 16.0 + rounded
    code = xp.where(x > midpoints[1], ROUNDS - 1 + most, xp.bind(code, f"{name}_near"))
    code = xp.where(x > midpoints[0], xp.bind(code, f"{name}_low"), ROUNDS)
    return code_of(xp, code)
