"""Reader of the strings of a packed column for many rows, faster than `PackedColumn.read_key` for each row."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from seamark.formats.index.packing import NONE, Longs, PackedColumn

_END_BYTES = 4
"""The size of the end of a row's tail."""
_FEW_ROWS_MAX = 3
"""The maximum number of rows for which reading one by one is faster."""


def read_strings(column: PackedColumn | None, rows: Longs) -> list[bytes | None]:
    """Return the values at `rows`, int64[n], as bytes. The item is None for a row without a value.

    Few rows are read one by one, because decoding at once first reads the codes of the whole column.
    """
    if column is None:
        return [None] * len(rows)
    packed_values = column.packed
    if len(rows) <= _FEW_ROWS_MAX:
        return [cast("bytes | None", column.read_key(row)) for row in rows.tolist()]
    if packed_values.width == 0:  # All values are equal to the common prefix.
        values: list[bytes | None] = [packed_values.common] * len(rows)
    else:
        values = _decode_strings(column, rows)
    if packed_values.presence != NONE:
        for position in np.flatnonzero(~column.present()[rows]).tolist():
            values[position] = None
    return values


def read_codes(column: PackedColumn, rows: Longs) -> npt.NDArray[np.uint64]:
    """Return the first `packed.width` bytes after the common prefix of each value as a big-endian number, uint64[n].

    Shorter values are padded with zeros.
    """
    return _read_uints(column, column.packed.codes, column.packed.width)[rows].astype(np.uint64)


def _decode_strings(column: PackedColumn, rows: Longs) -> list[bytes | None]:
    """Return the strings at some rows.

    A string consists of the common prefix of the column, a head of at most `width` bytes, and a tail. Heads are stored
    as numbers, and the tails of all rows are stored one after the other. Rows without a value give any string.
    """
    packed_values = column.packed
    width, common = packed_values.width, packed_values.common
    heads = _read_uints(column, packed_values.codes, width)[rows].astype(f">u{width}").tobytes()
    lengths = _read_uints(column, packed_values.lengths, packed_values.lengths_width)[rows].astype(np.int64)
    if packed_values.ends == NONE:  # No string is longer than its head.
        return [
            common + heads[begin : begin + size]
            for begin, size in zip(_list_code_starts(width, rows), lengths.tolist(), strict=True)
        ]
    tail_ends = _read_uints(column, packed_values.ends, _END_BYTES)[rows].astype(np.int64)
    tail_starts = tail_ends - np.maximum(lengths - width, 0)
    # Read the tails of all rows with one read, which begins at the first of them.
    read_start = int(tail_starts.min())
    tails = column.read_array(packed_values.tails + read_start, "u1", int(tail_ends.max()) - read_start).tobytes()
    head_ends = np.arange(len(rows)) * width + np.minimum(lengths, width)
    return [
        common + heads[head_start:head_end] + tails[tail_start:tail_end]
        for head_start, head_end, tail_start, tail_end in zip(
            _list_code_starts(width, rows),
            head_ends.tolist(),
            (tail_starts - read_start).tolist(),
            (tail_ends - read_start).tolist(),
            strict=True,
        )
    ]


def _list_code_starts(width: int, rows: Longs) -> range:
    """Return where the code of each row starts, if the codes of all rows are joined to one text of bytes."""
    return range(0, width * len(rows), width)


def _read_uints(column: PackedColumn, offset: int, width: int) -> npt.NDArray[Any]:
    """Return an array of the column: one unsigned number of `width` bytes for each row, stored from `offset` on."""
    return column.read_array(offset, f"<u{width}", column.rows)
