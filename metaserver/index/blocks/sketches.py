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
    """The sketches of the columns of one block.

    A column stores an ordered number, its code, of 4 or 8 bytes for each row. A sketch has only one byte for each row,
    an approximation of the code. A scan reads the bytes, and needs the code only of the rows that a byte cannot decide.
    """

    __slots__ = ("by_offset",)
    size_bytes = 300
    """The memory of the object without the sketches, which are counted one by one."""

    def __init__(self) -> None:
        self.by_offset: dict[int, tuple[npt.NDArray[np.uint8], int] | None] = {}
        """The bytes of each sketch, and the number of bits by which a code is shifted to get its byte.

        The key is the offset of the column in the block. The value is None if reading the codes is faster.
        """


def find_sketch(block: Block, packed_column: Packed) -> tuple[int, int]:
    """Return the address of a column's sketch and its shift, or (0, 0) if reading the codes is faster.

    A sketch has one byte for each row, which approximates the row's code. For integers, the byte is the code shifted
    right by `shift` bits. The sketch is built at the first call. The address is that of the first row's byte, after the
    bytes that describe how the sketch was made.

    The address is valid as long as the block exists. The column must be verified, with codes of 4 or 8 bytes.
    """
    sketches = block.derived.get(Sketches) or block.keep(Sketches())
    if packed_column.start not in sketches.by_offset:
        new_sketch = _build_sketch(block, packed_column)
        if sketches.by_offset.setdefault(packed_column.start, new_sketch) is new_sketch and new_sketch is not None:
            new_bytes, _ = new_sketch
            block.memory.add(new_bytes.nbytes + _OBJECT_BYTES)
    sketch = sketches.by_offset[packed_column.start]
    if sketch is None:
        return 0, 0
    sketch_bytes, shift = sketch
    address, _ = sketch_bytes.__array_interface__["data"]
    return int(address) + _BEFORE_BYTES[Form(packed_column.form)], shift


def _build_sketch(block: Block, packed_column: Packed) -> tuple[npt.NDArray[np.uint8], int] | None:
    """Build the sketch of a column: one byte for each row, which approximates the row's code.

    For strings, a sample of the codes is divided into intervals with about as many rows each, and the byte is the
    number of the interval that contains the code.

    Returns:
        The bytes, and the number of bits by which the codes of integers are shifted. The number is 0 for other types.
        None if a sketch is not useful.
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
