"""Sketches: the first byte of each code of a column of integers, for comparisons that read many rows.

A comparison reads a sketch in place of codes of four or eight bytes, and only the codes whose byte is that of the
literal (`_scan.pyx`). A plan of millions of files waits for memory more than for anything else. Sketches are made in
memory when a view first compares the column, and belong to the block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.packing import Packed
from seamark.metaserver.index.kernels import _scan

WIDTH_MIN = 4
"""Narrower codes are read without a sketch."""
ROWS_MIN = 512
_BYTES = 400
"""Memory of a sketch besides its bytes (measured)."""


class Sketches:
    """Those of one block, by the offset of the column: (bytes, shift), or None if the codes are read faster."""

    __slots__ = ("by_start",)
    size_bytes = 300
    """Without the sketches, which are charged one by one."""

    def __init__(self) -> None:
        self.by_start: dict[int, tuple[npt.NDArray[np.uint8], int] | None] = {}


def sketch_of(block: Block, packed: Packed) -> tuple[int, int]:
    """(address, shift) of a sketch, which stays there as long as the block lives; (0, 0) if the codes are read faster.
    The column must be verified, of integers, with codes of 4 or 8 bytes."""
    sketches = block.derived.get(Sketches) or block.keep(Sketches())
    if packed.start not in sketches.by_start:
        made = _scan.sketch(block.address + packed.codes, packed.width, block.rows)
        if sketches.by_start.setdefault(packed.start, made) is made and made is not None:
            block.memory.add(block.rows + _BYTES)
    kept = sketches.by_start[packed.start]
    return (0, 0) if kept is None else (int(kept[0].__array_interface__["data"][0]), kept[1])
