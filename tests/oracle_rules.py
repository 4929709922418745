"""Independent oracles of the update rules: one float64 step each, from the semantics document.

Imports NumPy and the standard library only, never the package under test.  Every rule is a
function (p, g, state, *, hyper-parameters and settings, step) -> (p, state) on whole tensors;
`state` maps a slot's name to a float64 array and is left as it is.  The first update has step = 1.
Section numbers are those of the semantics document; bias corrections are written as m / (1 - b^t).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
State = Mapping[str, F64]
Result = tuple[F64, dict[str, F64]]

NONNEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
"""The slots that hold sums of squares."""


def slots(rule: str, **settings: Any) -> tuple[str, ...]:
    """The state of a rule under torch's names (those of the papers' rules by analogy)."""
    adam = ("exp_avg", "exp_avg_sq")
    if rule in ("adam", "adamw"):
        return (*adam, "max_exp_avg_sq") if settings.get("amsgrad") else adam
    if rule in ("adam_fp16", "adamw_mxnet", "lamb", "lans"):
        return adam
    if rule == "rmsprop":
        centered = ("grad_avg",) if settings.get("centered") else ()
        return (
            "square_avg",
            *centered,
            *(("momentum_buffer",) if settings.get("momentum") else ()),
        )
    if rule == "sgd":
        return () if settings.get("momentum") == "off" else ("momentum_buffer",)
    return {
        "lion": ("exp_avg",),
        "adagrad": ("sum",),
        "ademamix": ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
        "lars": ("momentum_buffer",),
    }[rule]


def zero_rule(state: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Section 8: where the stored second moment is exactly 0, the first moments count as 0.

    The second moment is the one that the update divides by: with amsgrad the largest so far.
    """
    roots = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
    root = next((name for name in roots if name in state), None)
    divided = () if root is None else ("exp_avg", "exp_avg_slow", "grad_avg")
    return {
        name: np.where(state[root] == 0, 0.0, x) if root and name in divided else x
        for name, x in state.items()
    }


def _norm(x: F64) -> float:
    return math.sqrt(math.fsum((x * x).ravel()))


# torch's rules (section 8)


def sgd(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    step: int,
) -> Result:
    g = g + weight_decay * p
    if "momentum_buffer" not in state:
        return p - lr * g, {}
    old = state["momentum_buffer"]
    buffer = g if step == 1 else momentum * old + (1 - dampening) * g
    direction = g + momentum * buffer if nesterov else buffer
    return p - lr * direction, {"momentum_buffer": buffer}


def _adam_moments(g: F64, state: State, beta1: float, beta2: float) -> tuple[F64, F64]:
    m = beta1 * state["exp_avg"] + (1 - beta1) * g
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * g**2
    return m, v


def _adam_update(
    g: F64,
    state: State,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    eps_beside: str,
    step: int,
) -> tuple[F64, dict[str, F64]]:
    """What lr multiplies: section 8; eps beside the uncorrected root: section 3.1, optimized."""
    m, v = _adam_moments(g, state, beta1, beta2)
    new = {"exp_avg": m, "exp_avg_sq": v}
    if "max_exp_avg_sq" in state:
        v = np.maximum(state["max_exp_avg_sq"], v)
        new["max_exp_avg_sq"] = v
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    if eps_beside == "corrected":
        return (m / c1) / (np.sqrt(v / c2) + eps), new
    assert eps_beside == "uncorrected"
    return math.sqrt(c2) / c1 * m / (np.sqrt(v) + eps), new


def adam(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_beside: str = "corrected",
    step: int,
) -> Result:
    """amsgrad where the state has its slot."""
    update, new = _adam_update(
        g + weight_decay * p,
        state,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        eps_beside=eps_beside,
        step=step,
    )
    return p - lr * update, new


def adam_fp16(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    form: str = "optimized",
    decay: str = "decoupled",
    step: int,
) -> Result:
    """Section 3.1, on the float32 copy: decay first, then the moments, then the step."""
    if decay == "decoupled":
        p = p * (1 - lr * weight_decay)
    elif decay == "absolute":
        p = p * (1 - weight_decay)
    else:
        g = g + weight_decay * p
    m, v = _adam_moments(g, state, beta1, beta2)
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    if form == "optimized":
        moved = lr * math.sqrt(c2) / c1 * m / (np.sqrt(v) + eps)
    else:
        moved = lr / c1 * m / (np.sqrt(v) / math.sqrt(c2) + eps)
    return p - moved, {"exp_avg": m, "exp_avg_sq": v}


def adamw(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_beside: str = "corrected",
    decay: str = "before",
    scalars: str = "float64",
    step: int,
) -> Result:
    """Decay before: section 8; after: section 1.5. scalars "ascend": t = step + 1 (section 1.4)."""
    update, new = _adam_update(
        g,
        state,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        eps_beside=eps_beside,
        step=step + (scalars == "ascend"),
    )
    if decay == "before":
        return p - lr * weight_decay * p - lr * update, new
    assert decay == "after"
    moved = p - lr * update
    return moved - lr * weight_decay * moved, new


def rmsprop(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float = 0.0,
    step: int,
) -> Result:
    """Centered, and with momentum, where the state has the slot. A variance of a state that was
    rounded may be below 0; it then counts as 0."""
    g = g + weight_decay * p
    v = alpha * state["square_avg"] + (1 - alpha) * g**2
    new, variance = {"square_avg": v}, v
    if "grad_avg" in state:
        a = state["grad_avg"] + (1 - alpha) * (g - state["grad_avg"])
        new["grad_avg"] = a
        variance = np.where(v > a**2, v - a**2, 0.0)
    move = g / (np.sqrt(variance) + eps)
    if "momentum_buffer" in state:
        move = momentum * state["momentum_buffer"] + move
        new["momentum_buffer"] = move
    return p - lr * move, new


def adagrad(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Result:
    g = g + weight_decay * p
    total = state["sum"] + g**2
    return p - lr / (1 + (step - 1) * lr_decay) * g / (np.sqrt(total) + eps), {"sum": total}


# Rules of papers (section 8)


def lion(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int,
) -> Result:
    m = state["exp_avg"]
    direction = np.sign(beta1 * m + (1 - beta1) * g)
    return p - lr * weight_decay * p - lr * direction, {"exp_avg": beta2 * m + (1 - beta2) * g}


def ademamix_schedule(
    step: int, *, beta1: float, beta3: float, alpha: float, t_alpha: float, t_beta3: float
) -> tuple[float, float]:
    """alpha(t) and beta3(t) of the warm-up."""
    part = step / t_beta3
    log1, log3 = math.log(beta1), math.log(beta3)
    warm = math.exp(log1 * log3 / ((1 - part) * log3 + part * log1)) if part < 1 else beta3
    return min(step * alpha / t_alpha, alpha), min(warm, beta3)


def ademamix(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    t_alpha: float | None = None,
    t_beta3: float | None = None,
    step: int,
) -> Result:
    if t_alpha is not None and t_beta3 is not None:
        alpha, beta3 = ademamix_schedule(
            step, beta1=beta1, beta3=beta3, alpha=alpha, t_alpha=t_alpha, t_beta3=t_beta3
        )
    m1, v = _adam_moments(g, state, beta1, beta2)
    m2 = beta3 * state["exp_avg_slow"] + (1 - beta3) * g
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    update = (m1 / c1 + alpha * m2) / (np.sqrt(v / c2) + eps)
    new = {"exp_avg": m1, "exp_avg_slow": m2, "exp_avg_sq": v}
    return p - lr * (update + weight_decay * p), new


def lars(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    eps: float,
    trust_coefficient: float = 1e-3,
    step: int,
) -> Result:
    size, pull = _norm(p), _norm(g)
    ratio = 1.0
    if size > 0 and pull > 0:
        ratio = trust_coefficient * size / (pull + weight_decay * size + eps)
    buffer = momentum * state["momentum_buffer"] + lr * ratio * (g + weight_decay * p)
    return p - buffer, {"momentum_buffer": buffer}


# MXNet's operators (section 2)


def adamw_mxnet(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    eta: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int = 1,
) -> Result:
    """Section 2.7: no bias correction, the decay times eta but not lr."""
    m, v = _adam_moments(g, state, beta1, beta2)
    moved = p - eta * (lr * m / (np.sqrt(v) + eps) + weight_decay * p)
    return moved, {"exp_avg": m, "exp_avg_sq": v}


def bound(norm: float, lower: float, upper: float) -> float:
    """Section 2.2: a bound below 0 is off; the upper one is a min, and wins."""
    if lower >= 0:
        norm = max(norm, lower)
    if upper >= 0:
        norm = min(norm, upper)
    return norm


def lamb_phase1(
    p: F64,
    g: F64,
    state: State,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool = True,
    step: int,
) -> Result:
    """Section 2.1: the direction in place of the weight."""
    m, v = _adam_moments(g, state, beta1, beta2)
    m_hat, v_hat = (m / (1 - beta1**step), v / (1 - beta2**step)) if bias_correction else (m, v)
    direction = m_hat / (np.sqrt(v_hat) + eps) + weight_decay * p
    return direction, {"exp_avg": m, "exp_avg_sq": v}


def lamb_phase2(
    p: F64,
    direction: F64,
    r1: float,
    r2: float,
    *,
    lr: float,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
) -> tuple[F64, float]:
    """Section 2.2: the weight and the rate that moved it."""
    n = bound(r1, lower_bound, upper_bound)
    rate = lr if n == 0 or r2 == 0 else lr * n / r2
    return p - rate * direction, rate


def lamb(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    step: int,
    **phase1: Any,
) -> Result:
    direction, new = lamb_phase1(p, g, state, step=step, **phase1)
    r1, r2 = _norm(p), _norm(direction)
    moved, _ = lamb_phase2(
        p, direction, r1, r2, lr=lr, lower_bound=lower_bound, upper_bound=upper_bound
    )
    return moved, new


def lans(
    p: F64,
    g: F64,
    state: State,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    lower_bound: float = -1.0,
    upper_bound: float = -1.0,
    step: int,
) -> Result:
    """Section 2.6, fused; a gradient of zeros stays one (section 8)."""
    total = _norm(g)
    g = g / total if total > 0 else np.zeros_like(g)
    m, v = _adam_moments(g, state, beta1, beta2)
    s = np.sqrt(v / (1 - beta2**step)) + eps
    moment = (m / (1 - beta1**step)) / s + weight_decay * p
    gradient = g / s + weight_decay * p
    n = bound(_norm(p), lower_bound, upper_bound)
    rates = [1.0 if n == 0 or _norm(d) == 0 else n / _norm(d) for d in (moment, gradient)]
    moved = p - lr * beta1 * rates[0] * moment - lr * (1 - beta1) * rates[1] * gradient
    return moved, {"exp_avg": m, "exp_avg_sq": v}


RULES: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        adagrad,
        adam,
        adam_fp16,
        adamw,
        adamw_mxnet,
        ademamix,
        lamb,
        lans,
        lars,
        lion,
        rmsprop,
        sgd,
    )
}
"""Rule -> its step."""
