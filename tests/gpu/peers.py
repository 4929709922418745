"""torch's fused AdamW, and bitsandbytes' where it is, beside ours in the table of check.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence

from tvm_qopt.devices.arrays import Cuda


def peer_rows(
    device: Cuda, layouts: Mapping[str, Sequence[int]], copy: float
) -> Iterator[tuple[str, str, str]]:
    """torch's fused AdamW, which moves 28 bytes an element, and bitsandbytes' where it is."""
    makers = {"torch AdamW, fused": (lambda p: device.torch.optim.AdamW(p, fused=True), 28.0)}
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        makers["bitsandbytes AdamW8bit"] = (bitsandbytes.optim.AdamW8bit, 16.06)
    for name, (make, bytes_) in makers.items():
        for words, sizes in layouts.items():
            params = [device.full(n, "float32", 1.0).requires_grad_() for n in sizes]
            for param in params:
                param.grad = device.full(param.numel(), "float32", 1e-3)
            took = device.seconds(make(params).step)
            share = bytes_ * sum(sizes) / took / copy
            yield name, f"{share:.0%} of the copy", f"{words}: {took * 1e3:.3f} ms"
            del params
            device.free()
