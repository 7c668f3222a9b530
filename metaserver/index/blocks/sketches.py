"""Sketches: one byte for each code of a column of integers or floats, for comparisons that read many rows.

The byte grows with the code: of integers it is the first byte, of floats their place between the least and the greatest
of the block. A comparison reads a sketch in place of codes of four or eight bytes, and only the codes whose byte is
that of the literal (`_scan.pyx`). A plan of millions of files waits for memory more than for anything else. Sketches
are made in memory when a view first compares the column, and belong to the block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.packing import Form, Packed
from seamark.metaserver.index.kernels import _scan

WIDTH_MIN = 4
"""Narrower codes are read without a sketch."""
ROWS_MIN = 512
_SCALE_BYTES = 16
"""Before a sketch of floats."""
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
    The column must be verified, of integers or floats, with codes of 4 or 8 bytes."""
    sketches = block.derived.get(Sketches) or block.keep(Sketches())
    if packed.start not in sketches.by_start:
        made = _made(block, packed)
        if sketches.by_start.setdefault(packed.start, made) is made and made is not None:
            block.memory.add(block.rows + _BYTES)
    kept = sketches.by_start[packed.start]
    if kept is None:
        return 0, 0
    address = int(kept[0].__array_interface__["data"][0])
    return address + (_SCALE_BYTES if packed.form == Form.FLOATS else 0), kept[1]


def _made(block: Block, packed: Packed) -> tuple[npt.NDArray[np.uint8], int] | None:
    address = block.address + packed.codes
    if packed.form != Form.FLOATS:
        return _scan.sketch(address, packed.width, block.rows)
    made = _scan.sketch_floats(address, packed.width, block.rows)
    return None if made is None else (made, 0)
