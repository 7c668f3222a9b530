"""Reader of the strings of a packed column for many rows, faster than `PackedColumn.read_key` for each row."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from seamark.formats.index.packing import NONE, Longs, PackedColumn

_FEW_ROWS_MAX = 3
"""The maximum number of rows for which reading one by one is faster."""


def read_strings(column: PackedColumn | None, rows: Longs) -> list[bytes | None]:
    """Return the values at `rows`, int64[n], as bytes. The item is None for a row without a value."""
    if column is None:
        return [None] * len(rows)
    packed_values = column.packed
    if len(rows) <= _FEW_ROWS_MAX:
        return [cast("bytes | None", column.read_key(row)) for row in rows.tolist()]
    if packed_values.width == 0:
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
    """Return the strings at some rows, which all have values."""
    packed_values = column.packed
    width, common = packed_values.width, packed_values.common
    heads = _read_uints(column, packed_values.codes, width)[rows].astype(f">u{width}").tobytes()
    lengths = _read_uints(column, packed_values.lengths, packed_values.lengths_width)[rows].astype(np.int64)
    if packed_values.ends == NONE:
        return [
            common + heads[begin : begin + size]
            for begin, size in zip(_list_steps(width, rows), lengths.tolist(), strict=True)
        ]
    upto = _read_uints(column, packed_values.ends, 4)[rows].astype(np.int64)
    tail_starts = upto - np.maximum(lengths - width, 0)
    first = int(tail_starts.min())
    tails = column.read_array(packed_values.tails + first, "u1", int(upto.max()) - first).tobytes()
    stops = np.arange(len(rows)) * width + np.minimum(lengths, width)
    return [
        common + heads[begin:stop] + tails[start:end]
        for begin, stop, start, end in zip(
            _list_steps(width, rows),
            stops.tolist(),
            (tail_starts - first).tolist(),
            (upto - first).tolist(),
            strict=True,
        )
    ]


def _list_steps(width: int, rows: Longs) -> range:
    return range(0, width * len(rows), width)


def _read_uints(column: PackedColumn, offset: int, width: int) -> npt.NDArray[Any]:
    return column.read_array(offset, f"<u{width}", column.rows)
