"""How a parameter's elements lie in memory, and views of it as a kernel takes them: contiguous."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROWS, DENSE, GAPS = "rows", "dense", "gaps"


@dataclass(frozen=True)
class Layout:
    """rows: contiguous.  dense: without gaps, in another order (transposed, channels last): state
    lies in the parameter's order.  gaps: a strided view; it is stepped as a contiguous copy."""

    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> Layout:
        if x.is_contiguous():
            return cls(ROWS, tuple(x.shape), tuple(x.stride()))
        like = torch.empty_like(x, device="meta")  # keeps the strides of what is dense
        kind = DENSE if like.stride() == x.stride() else GAPS
        return cls(kind, tuple(x.shape), tuple(like.stride()))

    @property
    def order(self) -> str:
        """The dimensions from the slowest to the fastest, where they are not in order."""
        if self.kind != DENSE:
            return ""
        by_stride = sorted(range(len(self.shape)), key=lambda i: -self.strides[i])
        return " ".join(str(i) for i in by_stride if self.shape[i] != 1)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether x lies as the parameter's state does."""
        if self.kind == DENSE:
            return tuple(x.stride()) == self.strides
        return bool(x.is_contiguous())

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a copy that lies as the parameter's state does."""
        if self.fits(x):
            return x
        if self.kind == DENSE:
            return torch.empty_strided(
                self.shape, self.strides, dtype=x.dtype, device=x.device
            ).copy_(x)
        return x.contiguous()

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous view of what `arranged` gives (or of anything contiguous)."""
        if x.is_contiguous():
            return x
        return x.detach().as_strided((math.prod(self.shape),), (1,), x.storage_offset())

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of a contiguous tensor, one value an element, in the parameter's shape."""
        if self.kind == DENSE:
            return flat.as_strided(self.shape, self.strides, flat.storage_offset())
        return flat.view(self.shape)
