"""A table of what each parameter's state is and costs."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_qopt.optim.checkpoint import places, spec_at
from tvm_qopt.optim.engine import Groups, label_of
from tvm_qopt.optim.entry import dtype_name
from tvm_qopt.optim.forms import Form
from tvm_qopt.optim.state import bytes_of
from tvm_qopt.params import STORAGE as PARAM_DTYPES

FLOAT32_ADAMW = 8
"""Bytes of state a parameter of float32 AdamW: two moments."""

NO_KERNEL = "none: it can have no gradient that a kernel takes"

HEAD = ("parameter", "shape", "spec", "state bytes")


@dataclass(frozen=True)
class Row:
    """parameter: its name or place.  spec: of its kernel.  state_bytes: of all its tensors."""

    parameter: str
    shape: tuple[int, ...]
    spec: str
    state_bytes: int


@dataclass(frozen=True)
class Description:
    """The rows of the table; str() and print() show it.  size: elements that have state."""

    rows: tuple[Row, ...]
    size: int

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    @property
    def float32_adamw_bytes(self) -> int:
        return FLOAT32_ADAMW * self.size

    def __str__(self) -> str:
        cells = [HEAD]
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            cells.append((row.parameter, shape, row.spec, f"{row.state_bytes:,}"))
        widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
        lines = [
            "  ".join((*map(str.ljust, line[:-1], widths), line[-1].rjust(widths[-1])))
            for line in cells
        ]
        total, plain = self.state_bytes, self.float32_adamw_bytes
        per = f", {total / self.size:.2f} bytes a parameter" if self.size else ""
        share = f" ({total / plain:.0%})" if plain else ""
        lines.append(f"{self.size:,} parameters: {total:,} bytes of state{per}")
        lines.append(f"float32 AdamW would take {plain:,} bytes{share}")
        return "\n".join(lines)

    __repr__ = __str__


def describe(rule: str, form: Form, groups: Groups) -> Description:
    rows, size = [], 0
    for number, position, param in places(groups):
        label, name, held = label_of(groups, number, position), NO_KERNEL, 0
        if dtype_name(param.dtype) in PARAM_DTYPES:
            spec = spec_at(rule, form, groups, number, position)
            name, held = spec.name, bytes_of(spec, param.numel())
            size += param.numel()
        rows.append(Row(label, tuple(param.shape), name, held))
    return Description(tuple(rows), size)
