"""The seeds' operators as functions, by their names, arguments and order; thin over the runtime."""

from __future__ import annotations

from tvm_qopt.ops.aclnn import (
    AclnnError,
    AclnnParamInvalid,
    AclnnParamNullptr,
    AclnnRuntimeError,
    apply_adamw_quant,
    apply_adamw_quant_get_workspace_size,
)

__all__ = [
    "AclnnError",
    "AclnnParamInvalid",
    "AclnnParamNullptr",
    "AclnnRuntimeError",
    "apply_adamw_quant",
    "apply_adamw_quant_get_workspace_size",
]
