"""Sketches: one byte for each code of a column, for comparisons that read many rows.

A greater code has a greater or equal byte. For integers, the byte is the first byte of the code. For floats, it is
the position of the code between the least and the greatest value of the block. For strings, the first bytes are too
often equal. Therefore, 127 codes divide a sample of the block evenly, and the byte of a code is the number of these
127 codes that are not greater.

A comparison reads a sketch instead of codes of four or eight bytes. It reads codes only if their byte is equal to
the byte of the literal (`_scan.pyx`). This is faster, because a plan of millions of files mostly waits for memory.
Sketches are made in memory when a view first compares the column, and belong to the block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _scan
from seamark.formats.index.packing import Form, Packed
from seamark.metaserver.index.blocks.block import Block

WIDTH_MIN = 4
"""The minimum size in bytes of codes for which a sketch is made."""
ROWS_MIN = 512
"""The minimum number of rows of a block with sketches."""
STRING_ROWS_MIN = 2048
"""The minimum number of rows of a string column with a sketch. A sketch of strings needs 1 KiB besides its bytes."""
_SKETCH_BOUNDS = 127
_BEFORE_BYTES = {Form.INTEGERS: 0, Form.FLOATS: 16, Form.STRINGS: 8 * _SKETCH_BOUNDS}
"""The number of bytes before the sketch itself, by form. These bytes describe how the sketch was made."""
_SAMPLE_ROWS = 2048
"""The number of rows of which the bounds of a sketch of strings are chosen."""
_OBJECT_BYTES = 400
"""The measured memory of a sketch besides its bytes."""


class Sketches:
    """The sketches of one block, by the offset of the column.

    A sketch has one byte for each row, so a scan can decide most rows without their codes of 4 or 8 bytes. It consists
    of its bytes and the shift that turns a code into its byte. It is None if reading the codes is faster.
    """

    __slots__ = ("by_start",)
    size_bytes = 300
    """The memory of the object without the sketches, which are counted one by one."""

    def __init__(self) -> None:
        self.by_start: dict[int, tuple[npt.NDArray[np.uint8], int] | None] = {}


def find_sketch(block: Block, packed_column: Packed) -> tuple[int, int]:
    """Return the address of a column's sketch and its shift, or (0, 0) if reading the codes is faster.

    The sketch is built at the first call.

    The address is valid as long as the block exists. The column must be verified, with codes of 4 or 8 bytes.
    """
    sketches = block.derived.get(Sketches) or block.keep(Sketches())
    if packed_column.start not in sketches.by_start:
        new_sketch = _build_sketch(block, packed_column)
        if sketches.by_start.setdefault(packed_column.start, new_sketch) is new_sketch and new_sketch is not None:
            new_bytes, _ = new_sketch
            block.memory.add(new_bytes.nbytes + _OBJECT_BYTES)
    sketch = sketches.by_start[packed_column.start]
    if sketch is None:
        return 0, 0
    sketch_bytes, shift = sketch
    address, _ = sketch_bytes.__array_interface__["data"]
    return int(address) + _BEFORE_BYTES[Form(packed_column.form)], shift


def _build_sketch(block: Block, packed_column: Packed) -> tuple[npt.NDArray[np.uint8], int] | None:
    """Build the sketch of a column, or return None if a sketch is not useful.

    Only integers have a shift. The sketch of strings numbers the intervals between bounds, which are taken from a
    sample of the codes so that each interval has about as many rows.
    """
    address = block.address + packed_column.codes
    if packed_column.form == Form.INTEGERS:
        return _scan.sketch(address, packed_column.width, block.rows)
    if packed_column.form == Form.FLOATS:
        sketch = _scan.sketch_floats(address, packed_column.width, block.rows)
    else:
        codes = block.read_column(packed_column).read_array(packed_column.codes, f"<u{packed_column.width}", block.rows)
        sample = np.sort(codes[:: max(1, block.rows // _SAMPLE_ROWS)]).astype(np.uint64)
        bounds = sample[np.arange(1, _SKETCH_BOUNDS + 1) * len(sample) // (_SKETCH_BOUNDS + 1)]
        sketch = _scan.sketch_strings(address, packed_column.width, block.rows, bounds)
    return None if sketch is None else (sketch, 0)
