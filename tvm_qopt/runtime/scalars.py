"""The scalars that a kernel reads at a step, made from what the user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_qopt.errors import HyperOutOfRange, UnknownName
from tvm_qopt.rules import CLIP_SCALAR
from tvm_qopt.spec import CLIP_GRADIENT, GNORM_SCALE, GRAD_SCALE, KernelSpec

FLOAT32_MAX = float(np.finfo(np.float32).max)
NO_CLIP = math.inf
MOST_STEPS = 2**53


class Scalars:
    """Check the hyper-parameters of one kernel and derive what it reads; one user at a time.

    What repeats from step to step is checked once.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.names = spec.scalars
        self._rule, self._settings, self._ranges = spec.rule_, spec.all_settings, spec.hyper
        self._first_step = self._rule.first_step(self._settings)
        self._given: dict[str, float] | None = None
        self.values: dict[str, float] = {}

    def of(
        self, step: int, grad_scale: float, gnorm_scale: float, hyper: dict[str, float]
    ) -> list[float]:
        """What the kernel reads, in its order; raises HyperOutOfRange or UnknownName."""
        if type(step) is not int or not self._first_step <= step < MOST_STEPS:
            self._check_step(step)
        # Often the same from step to step.  (Only numbers compare without a surprise.)
        if set(map(type, hyper.values())) != {float} or hyper != self._given:
            self.values = self._check(hyper)
            self._given = hyper
        values = self.values
        factor = 1.0
        scales = grad_scale, gnorm_scale
        if set(map(type, scales)) != {float} or scales != (1.0, 1.0):
            factor = GNORM_SCALE.check(gnorm_scale) / GRAD_SCALE.check(grad_scale)
        derived = self._rule.derive(values, step, self._settings)
        scalars = [factor, *map(derived.get, self._rule.scalars, repeat(0.0))]
        if CLIP_SCALAR in self.names:
            clip = values[CLIP_GRADIENT.name]
            scalars.insert(1, clip if clip >= 0 else NO_CLIP)
        if not sum(map(abs, scalars)) <= FLOAT32_MAX:
            scaled = {"grad_scale": grad_scale, "gnorm_scale": gnorm_scale}
            self._check_each(scalars, {**scaled, **values, "step": step})
        return scalars

    def _check_each(self, scalars: list[float], given: Mapping[str, float]) -> None:
        for name, scalar in zip(self.names, scalars, strict=True):
            if not abs(scalar) <= FLOAT32_MAX and scalar != NO_CLIP:
                got = ", ".join(f"{name}={value!r}" for name, value in given.items())
                raise HyperOutOfRange(name, expected="a scalar that float32 can hold", got=got)

    def finish(self, number: int, found: Mapping[str, float], scalars: list[float]) -> bool:
        """Put what norm pass `number` found into the scalars of this step.

        Returns False, and leaves them, where a norm or what follows from it is beyond float32.
        """
        if not all(map(math.isfinite, found.values())):
            return False
        made = self._rule.norms[number].finish(found, self.values, self._settings)
        if not all(abs(x) <= FLOAT32_MAX for x in made.values()):
            return False
        for name, value in made.items():
            scalars[self.names.index(name)] = value
        return True

    def _check_step(self, step: object) -> None:
        valid = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
        if not valid or not self._first_step <= step < MOST_STEPS:  # type: ignore[operator]
            wanted = f"an integer from {self._first_step} to 2^53 - 1"
            raise HyperOutOfRange("step", expected=wanted, got=repr(step))

    def _check(self, hyper: Mapping[str, float]) -> dict[str, float]:
        names = {h.name for h in self._ranges}
        for name in hyper.keys() - names:
            raise UnknownName(f"hyper-parameter of {self._rule.name}", name, names)
        defaults = {h.name: h.default for h in self._ranges if h.default is not None}
        given = {**defaults, **hyper}
        for name in sorted(names - given.keys()):
            raise HyperOutOfRange(name, expected="a number", got="nothing")
        return {h.name: h.check(given[h.name]) for h in self._ranges}


def check_flag(name: str, value: Any) -> None:
    """Raise HyperOutOfRange unless the value is a bool, Python's or NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise HyperOutOfRange(name, expected="True or False", got=repr(value))


def random_words(seed: int, step: int) -> npt.NDArray[np.int32]:
    """What the generator of stochastic weights starts from; raises HyperOutOfRange."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise HyperOutOfRange("seed", expected="an integer in [0, 2^64)", got=repr(seed))
    words = np.array([seed & 0xFFFFFFFF, seed >> 32, step & 0xFFFFFFFF], np.uint32)
    return words.view(np.int32)
