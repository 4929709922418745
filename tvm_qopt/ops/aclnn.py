"""ApplyAdamWQuant, the block-quantised AdamW of Ascend's CANN, in its two phases.

Phase one checks everything and returns an executor; phase two runs it, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tvm_qopt.errors import ArgumentMismatch, DtypeMismatch, QoptError, ShapeMismatch
from tvm_qopt.ops.call import dtype_of, plan_of
from tvm_qopt.runtime.arrays import ArrayView, view_of
from tvm_qopt.runtime.plan import Plan
from tvm_qopt.runtime.state import to_numpy
from tvm_qopt.spec import KernelSpec

BLOCK_SIZE = 256
MAX_RANK = 8

SEMANTICS: dict[str, dict[str, Any]] = {
    "documented": {"decay": "before", "scalars": "float64", "sign_repair": False},
    "ascend": {"decay": "after", "scalars": "ascend", "sign_repair": True},
}

NAMES = {  # argument of the kernel -> argument of the operator
    "param": "var",
    "exp_avg_codes": "m",
    "exp_avg_sq_codes": "v",
    "exp_avg_qmap": "qmap_m",
    "exp_avg_sq_qmap": "qmap_v",
    "exp_avg_scale": "absmax_m",
    "exp_avg_sq_scale": "absmax_v",
}


class AclnnError(QoptError, ValueError):
    """An error of an aclnn operator; `code` is its aclnnStatus."""

    code = 561000


class AclnnParamNullptr(AclnnError):
    """A tensor that is missing (ACLNN_ERR_PARAM_NULLPTR)."""

    code = 161001


class AclnnParamInvalid(AclnnError):
    """A dtype, shape, format, block size or value that does not fit (ACLNN_ERR_PARAM_INVALID)."""

    code = 161002


class AclnnRuntimeError(AclnnError):
    """Phase two cannot run: a used executor, a workspace too small (ACLNN_ERR_RUNTIME_ERROR)."""

    code = 361001


@dataclass
class Executor:
    """What phase one hands to phase two: a checked call.  It keeps the tensors alive."""

    plan: Plan
    step: Any
    hyper: dict[str, Any]
    workspace_size: int
    used: bool = False


def apply_adamw_quant_get_workspace_size(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    qmap_m: Any,
    qmap_v: Any,
    absmax_m: Any,
    absmax_v: Any,
    step: Any,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    gnorm_scale: float,
    quant_mode: str = "BLOCKWISE",
    block_size: int = BLOCK_SIZE,
    semantics: Literal["documented", "ascend"] = "documented",
) -> tuple[int, Executor]:
    """Check an ApplyAdamWQuant step; the bytes of workspace it needs (0) and its executor.

    Parameters
    ----------
    var : float32, float16 or bfloat16, 1 to 8 dimensions, n elements; the weights, written.
    grad : of var's dtype and shape; the gradient.
    m, v : uint8, of var's shape; the moments as codes, written.
    qmap_m, qmap_v : float32 [256]; the level of each code, finite and ascending.
    absmax_m, absmax_v : float32 [ceil(n / 256)]; the scale of each block of 256, written.
    step : int64 [1]; not written.
    lr, beta1, beta2, weight_decay, eps, gnorm_scale : scalars; the last multiplies the gradient.
    quant_mode : "BLOCKWISE", the only mode.
    block_size : 256, the only size the operator has (`tvm_qopt.load` has others).
    semantics : "documented" is the operator's published formula: the weight decays before the
        step, `step` is the number of this update, at least 1.  "ascend" is its reference kernel:
        `step` counts the updates already done (t = step + 1), the updated weight decays, scalars
        are float32, and a code whose level has the opposite sign of the moment moves by one.

    A gradient that is not finite makes that weight NaN and stores 0 for its moments; the rest of
    its block is unharmed, where the reference operator loses the block's moments.  An empty tensor
    is a step that does nothing (the reference refuses it).  A zero moment with eps = 0 has no
    defined step, so eps must be positive.

    Raises AclnnParamNullptr (161001) or AclnnParamInvalid (161002).

    Source: aclnnApplyAdamWQuantGetWorkspaceSize of CANN.
    """
    tensors = {"var": var, "grad": grad, "m": m, "v": v, "qmap_m": qmap_m, "qmap_v": qmap_v}
    tensors |= {"absmax_m": absmax_m, "absmax_v": absmax_v, "step": step}
    for name, tensor in tensors.items():
        if tensor is None:
            raise AclnnParamNullptr(f"{name}: expected a tensor, got None")
    _check_options(quant_mode, block_size, semantics)
    hyper = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    try:
        plan = _plan(tensors, semantics)
        executor = Executor(plan, step, {**hyper, "gnorm_scale": gnorm_scale}, plan.workspace)
        plan.check(step=_read_step(step), **executor.hyper)
    except ArgumentMismatch as error:
        raise AclnnParamInvalid(str(error)) from error
    return executor.workspace_size, executor


def apply_adamw_quant(
    workspace: Any, workspace_size: int, executor: Executor, stream: int | None = None
) -> None:
    """Run what phase one checked; var, m, v and both absmax change in place.

    workspace : uint8 array of workspace_size bytes, None where that is 0.
    executor : from phase one; good for one call.
    stream : the handle of a CUDA stream; None is the caller's current one, and all that a CPU
        takes.  On a GPU the call returns when the step is queued.

    Raises AclnnParamNullptr, or AclnnRuntimeError (361001): a second use of the executor, or a
    workspace smaller than phase one asked for.
    """
    if executor is None:
        raise AclnnParamNullptr("executor: expected what phase one returned, got None")
    if not isinstance(executor, Executor):
        raise AclnnRuntimeError(f"executor: expected what phase one returned, got {executor!r}")
    if executor.used:
        raise AclnnRuntimeError("executor: it has run; call phase one again for another step")
    if not isinstance(workspace_size, int) or workspace_size < executor.workspace_size:
        wanted = f"at least {executor.workspace_size} bytes"
        raise AclnnRuntimeError(f"workspace_size: expected {wanted}, got {workspace_size}")
    try:
        step = _read_step(executor.step)
        executor.plan.check(step=step, **executor.hyper)
    except ArgumentMismatch as error:  # the step tensor was changed in between
        raise AclnnParamInvalid(str(error)) from error
    executor.used = True
    try:
        executor.plan.step(step=step, stream=stream, **executor.hyper)
    except ArgumentMismatch as error:  # a stream that the arrays' device does not have
        raise AclnnParamInvalid(str(error)) from error


def _check_options(quant_mode: object, block_size: object, semantics: object) -> None:
    if quant_mode != "BLOCKWISE":
        raise AclnnParamInvalid(f"quant_mode: expected 'BLOCKWISE', got {quant_mode!r}")
    if not isinstance(block_size, int) or block_size != BLOCK_SIZE:
        raise AclnnParamInvalid(f"block_size: expected {BLOCK_SIZE}, got {block_size!r}")
    if not isinstance(semantics, str) or semantics not in SEMANTICS:
        raise AclnnParamInvalid(f"semantics: expected one of {[*SEMANTICS]}, got {semantics!r}")


def _plan(tensors: dict[str, Any], semantics: str) -> Plan:
    var = view_of("var", tensors["var"])
    dtype = dtype_of("var", var)
    if not 1 <= len(var.shape) <= MAX_RANK:
        raise ShapeMismatch("var", expected=f"1 to {MAX_RANK} dimensions", got=f"{var.shape}")
    _check_step(view_of("step", tensors["step"]))
    settings = {"zero_rule": False, "nonfinite": "propagate", **SEMANTICS[semantics]}
    spec = KernelSpec.of("adamw", "codebook8", param=dtype, block_size=BLOCK_SIZE, **settings)
    bound = {kernel_name: (name, tensors[name]) for kernel_name, name in NAMES.items()}
    return plan_of(spec, bound | {"grad": ("grad", tensors["grad"])})


def _check_step(view: ArrayView) -> None:
    if view.dtype != "int64":
        raise DtypeMismatch("step", expected="int64", got=view.dtype)
    if view.shape != (1,):
        raise ShapeMismatch("step", expected="shape (1,)", got=f"{view.shape}")


def _read_step(step: Any) -> int:
    return int(to_numpy(step)[0])
