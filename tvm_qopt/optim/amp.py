"""A gradient scaler that unscales 16-bit gradients in float32."""

from __future__ import annotations

import torch

SIXTEEN = (torch.float16, torch.bfloat16)


class GradScalerFP16(torch.amp.GradScaler):
    """torch's GradScaler for 16-bit weights and gradients (labml's GradScalerFP16).

    torch refuses to unscale float16 gradients, since small ones would vanish.  Here `unscale_`
    makes the gradients float32 and then unscales them: they are what `clip_grad_norm_` sees after
    it and what the optimizer's step reads.  Without `unscale_` nothing is widened: the classes of
    `tvm_qopt.optim` unscale inside their step.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    grad = param.grad
                    if grad is not None and grad.dtype in SIXTEEN:
                        grad.data = grad.float()
        super().unscale_(optimizer)
