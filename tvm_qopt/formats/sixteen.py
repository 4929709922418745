"""Maps of 16 levels where a look-up among 16 numbers is one instruction (AVX-512, CUDA)."""

from __future__ import annotations

import numpy as np

from tvm_qopt.xp import WHOLE, ArrayNamespace, Table, Value, code_of


def encode(xp: ArrayNamespace, x: Value, levels: Table, name: str) -> Value:
    """The code (uint8) of the level nearest x, the lower on a tie.

    Four rounds of halving; the code is kept as a float32 since that addition can be masked.
    """
    exact = levels.astype(np.float64)
    between: Table = np.append((exact[1:] + exact[:-1]) / 2, np.inf).astype(np.float32)
    code: Value = WHOLE
    for half in (8, 4, 2, 1):
        table = between[(np.arange(16) + half - 1) % 16]
        if half == 8:
            code = xp.where(x > float(table[0]), WHOLE + half, WHOLE)
        else:
            above = xp.permute(table, xp.reinterpret(code, "int32"))
            code = xp.where(x > above, code + float(half), code)
        code = xp.bind(code, f"{name}_{half}")
    return code_of(xp, code)
