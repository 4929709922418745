"""What code a fatbin holds, read from its headers: neither a CUDA toolkit nor TVM is asked.

NVIDIA documents no fatbin header. These fields were read off files written by nvcc 13.0 and
nvFatbin 13.0 and 13.5: magic, version, header size, size of the entries; then for each entry its
kind, version, header size, size, four words on compression and the toolkit, architecture. They stay
plain when the code is compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_FATBIN = struct.Struct("<IHHQ")
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_ENTRY = struct.Struct("<HHIQ12xI")
_KIND_PTX, _KIND_CUBIN = 1, 2


def list_cubins(path: Path) -> list[str]:
    """The architectures with a cubin in `path`: a kernel.so or a bare fatbin; [] if there is none.

    PTX entries do not count.
    """
    return [f"sm_{number}" for number in _numbers(path, _KIND_CUBIN)]


def list_ptx(path: Path) -> list[str]:
    """The virtual architectures ("compute_120") with PTX in `path`."""
    return [f"compute_{number}" for number in _numbers(path, _KIND_PTX)]


def _numbers(path: Path, kind: int) -> list[int]:
    data = Path(path).read_bytes()
    found: set[int] = set()
    start = data.find(_FATBIN_MAGIC)
    while start >= 0:
        found |= {number for what, number in _entries_at(data, start) if what == kind}
        start = data.find(_FATBIN_MAGIC, start + 1)
    return sorted(found)


def _entries_at(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Kind and architecture number of the entries of the fatbin at `start`; none if it is none."""
    if start + _FATBIN.size > len(data):
        return
    _, version, header, size = _FATBIN.unpack_from(data, start)
    position, end = start + header, start + header + size
    if (version, header) != (1, _FATBIN.size) or end > len(data):
        return
    while position + _ENTRY.size <= end:
        kind, _, entry_header, entry_size, number = _ENTRY.unpack_from(data, position)
        yield kind, number
        position += entry_header + entry_size
