"""Functions for the scalars of a step: of numbers on the host, and of the expressions from which
`compiler.advance` makes a kernel that forms them on the device.

May import the standard library only.
"""

from __future__ import annotations

import math
from typing import Any


def sqrt(x: Any) -> Any:
    return x.sqrt() if hasattr(x, "sqrt") else math.sqrt(x)


def log(x: Any) -> Any:
    return x.log() if hasattr(x, "log") else math.log(x)


def exp(x: Any) -> Any:
    return x.exp() if hasattr(x, "exp") else math.exp(x)
