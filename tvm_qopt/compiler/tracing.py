"""Python functions on floats, run on expressions: every comparison is followed both ways.

So the scalars of a step are formed on a device by the text that forms them on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from tvm import tirx

from tvm_qopt.errors import HyperOutOfRange

MOST_PATHS = 8


class Path:
    """One way through a function: the sides of comparisons to take first, and all it took."""

    def __init__(self, script: list[bool]) -> None:
        self._script = script
        self.taken: list[tuple[Any, bool]] = []

    def number(self, expr: Any) -> Number:
        return Number(expr, self)

    def decide(self, condition: Any) -> bool:
        step = len(self.taken)
        side = self._script[step] if step < len(self._script) else True
        self.taken.append((condition, side))
        return side


class Condition:
    """A comparison; asked for its truth it takes the side that its path follows."""

    def __init__(self, expr: Any, path: Path) -> None:
        self.expr, self.path = expr, path

    def __bool__(self) -> bool:
        return self.path.decide(self.expr)


class Number:
    """A float64 that the device forms; it has no value here, so it cannot become a float."""

    def __init__(self, expr: Any, path: Path) -> None:
        self.expr, self.path = expr, path

    def _with(self, other: Any, make: Callable[[Any, Any], Any], *, swap: bool = False) -> Number:
        x, y = self.expr, expression(other)
        return Number(make(y, x) if swap else make(x, y), self.path)

    def __add__(self, other: Any) -> Number:
        return self._with(other, lambda x, y: x + y)

    def __sub__(self, other: Any) -> Number:
        return self._with(other, lambda x, y: x - y)

    def __rsub__(self, other: Any) -> Number:
        return self._with(other, lambda x, y: x - y, swap=True)

    def __mul__(self, other: Any) -> Number:
        return self._with(other, lambda x, y: x * y)

    def __truediv__(self, other: Any) -> Number:
        return self._with(other, tirx.div)

    def __rtruediv__(self, other: Any) -> Number:
        return self._with(other, tirx.div, swap=True)

    def __pow__(self, other: Any) -> Number:
        return self._with(other, tirx.pow)

    def __rpow__(self, other: Any) -> Number:
        return self._with(other, tirx.pow, swap=True)

    def __neg__(self) -> Number:
        return Number(-self.expr, self.path)

    __radd__, __rmul__ = __add__, __mul__

    def sqrt(self) -> Number:
        return Number(tirx.sqrt(self.expr), self.path)

    def log(self) -> Number:
        return Number(tirx.log(self.expr), self.path)

    def exp(self) -> Number:
        return Number(tirx.exp(self.expr), self.path)

    def _compare(self, other: Any, make: Callable[[Any, Any], Any]) -> Condition:
        return Condition(make(self.expr, expression(other)), self.path)

    def __lt__(self, other: Any) -> Condition:
        return self._compare(other, lambda x, y: x < y)

    def __le__(self, other: Any) -> Condition:
        return self._compare(other, lambda x, y: x <= y)

    def __gt__(self, other: Any) -> Condition:
        return self._compare(other, lambda x, y: x > y)

    def __ge__(self, other: Any) -> Condition:
        return self._compare(other, lambda x, y: x >= y)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compare(other, tirx.EQ)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return self._compare(other, tirx.NE)

    def __bool__(self) -> bool:
        return bool(self != 0.0)

    __hash__ = None  # type: ignore[assignment]

    def __format__(self, form: str) -> str:
        return "a number on the device"


def expression(x: Any) -> Any:
    """The float64 expression of a Number or a float."""
    return x.expr if isinstance(x, Number) else tirx.const(float(x), "float64")


def paths(form: Callable[[Path], list[Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """Every path on which `form` has a result: the condition under which it is taken, the result.

    A path that ends in HyperOutOfRange has none.  Raises TypeError where `form` needs the value of
    a number, and where it has more than MOST_PATHS paths.
    """
    script: list[bool] = []
    for _ in range(MOST_PATHS):
        path = Path(script)
        try:
            result = form(path)
        except HyperOutOfRange:
            result = None
        if result is not None:
            sides = [each if side else tirx.Not(each) for each, side in path.taken]
            yield reduce(tirx.And, sides, tirx.const(True, "bool")), result
        script = [side for _, side in path.taken]
        while script and not script[-1]:
            script.pop()
        if not script:
            return
        script[-1] = False
    raise TypeError(f"more than {MOST_PATHS} paths")
