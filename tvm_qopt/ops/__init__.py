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
from tvm_qopt.ops.codes import dequantize, quantize
from tvm_qopt.ops.mxnet import (
    lamb_update_phase1,
    lamb_update_phase2,
    mp_lamb_update_phase1,
    mp_lamb_update_phase2,
)
from tvm_qopt.ops.mxnet_adamw import (
    adamw_update,
    mp_adamw_update,
    multi_adamw_update,
    multi_mp_adamw_update,
)
from tvm_qopt.ops.mxnet_multi import (
    multi_lamb_update,
    multi_lans_update,
    multi_mp_lamb_update,
    multi_mp_lans_update,
    multi_sum_sq,
)
from tvm_qopt.ops.norm import global_norm

__all__ = [
    "AclnnError",
    "AclnnParamInvalid",
    "AclnnParamNullptr",
    "AclnnRuntimeError",
    "adamw_update",
    "apply_adamw_quant",
    "apply_adamw_quant_get_workspace_size",
    "dequantize",
    "global_norm",
    "lamb_update_phase1",
    "lamb_update_phase2",
    "mp_adamw_update",
    "mp_lamb_update_phase1",
    "mp_lamb_update_phase2",
    "multi_adamw_update",
    "multi_lamb_update",
    "multi_lans_update",
    "multi_mp_adamw_update",
    "multi_mp_lamb_update",
    "multi_mp_lans_update",
    "multi_sum_sq",
    "quantize",
]
