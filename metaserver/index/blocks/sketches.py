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
STRING_ROWS_MIN = 2048
"""The minimum number of rows of a string column with a sketch. A sketch of strings needs 1 KiB besides its bytes."""
_SKETCH_BOUNDS = 127
_BEFORE_BYTES = {Form.INTEGERS: 0, Form.FLOATS: 16, Form.STRINGS: 8 * _SKETCH_BOUNDS}
"""The number of bytes before the sketch itself, by form. These bytes describe how the sketch was made."""
_SAMPLE_ROWS = 2048
_BYTES = 400
"""The measured memory of a sketch besides its bytes."""


class Sketches:
    """The sketches of one block, by the offset of the column.

    A sketch consists of its bytes and the shift of a code. It is None if reading the codes is faster.
    """

    __slots__ = ("by_start",)
    size_bytes = 300
    """The memory of the object without the sketches, which are counted one by one."""

    def __init__(self) -> None:
        self.by_start: dict[int, tuple[npt.NDArray[np.uint8], int] | None] = {}


def find_sketch(block: Block, packed: Packed) -> tuple[int, int]:
    """Return the address of a sketch and its shift, or (0, 0) if reading the codes is faster.

    The address is valid as long as the block exists. The column must be verified, with codes of 4 or 8 bytes.
    """
    sketches = block.derived.get(Sketches) or block.keep(Sketches())
    if packed.start not in sketches.by_start:
        new_sketch = _build_sketch(block, packed)
        if sketches.by_start.setdefault(packed.start, new_sketch) is new_sketch and new_sketch is not None:
            block.memory.add(new_sketch[0].nbytes + _BYTES)
    sketch = sketches.by_start[packed.start]
    if sketch is None:
        return 0, 0
    address = int(sketch[0].__array_interface__["data"][0])
    return address + _BEFORE_BYTES[Form(packed.form)], sketch[1]


def _build_sketch(block: Block, packed: Packed) -> tuple[npt.NDArray[np.uint8], int] | None:
    """Build the sketch of a column, or return None if a sketch is not useful."""
    address = block.address + packed.codes
    if packed.form == Form.INTEGERS:
        return _scan.sketch(address, packed.width, block.rows)
    if packed.form == Form.FLOATS:
        sketch = _scan.sketch_floats(address, packed.width, block.rows)
    else:
        codes = block.read_column(packed).read_array(packed.codes, f"<u{packed.width}", block.rows)
        sample = np.sort(codes[:: max(1, block.rows // _SAMPLE_ROWS)]).astype(np.uint64)
        bounds = sample[np.arange(1, _SKETCH_BOUNDS + 1) * len(sample) // (_SKETCH_BOUNDS + 1)]
        sketch = _scan.sketch_strings(address, packed.width, block.rows, bounds)
    return None if sketch is None else (sketch, 0)
