"""The sizes of the tensors that a step updates."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE, GPT2 = "single", "gpt2"
LAYOUTS = (SINGLE, GPT2)


@dataclass(frozen=True)
class GPT:
    """The shape of a GPT-2; by default the small one: 148 tensors, 124,439,808 parameters."""

    vocabulary: int = 50257
    context: int = 1024
    layers: int = 12
    width: int = 768

    def sizes(self) -> list[int]:
        """Elements of each tensor, in the order of the model; the head is the embedding."""
        d = self.width
        norm = [d, d]
        attention = [3 * d * d, 3 * d, d * d, d]
        mlp = [4 * d * d, 4 * d, 4 * d * d, d]
        layer = [*norm, *attention, *norm, *mlp]
        return [self.vocabulary * d, self.context * d, *layer * self.layers, *norm]


def sizes_of(layout: str, size: int) -> list[int]:
    """The tensors of a layout; size: parameters of the single one."""
    return GPT().sizes() if layout == GPT2 else [size]
