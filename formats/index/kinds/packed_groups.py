"""Pack the groups of a cube's entry into a few bytes, as one row of an Arrow record batch.

A column of groups becomes three cells of the row:

    name         a list of values: the distinct values of a coded column, or all values of a plain column
    name_codes   bytes, or null for a plain column
    name_base    an integer, or null

A dimension is coded by the indexes of its distinct values. Counts, and sums that fit into 64 bits, are coded by their
distance from the smallest value, `name_base`. A code has as few bytes as the largest code needs. The first bytes of all
codes are followed by the second bytes, and so on, because neighbours among them compress well. The cell `groups` has
the number of groups. Floats stay plain, because 0.0 and -0.0, and NaNs with different bits, must not be joined. The
functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_GROUPS = "groups"
_CODES, _BASE = "_codes", "_base"
_CELLS_PER_COLUMN = 3
_CODE_BYTES_MAX = 8
_DECIMAL_WORDS = 2
"""The number of 64-bit words of a decimal128. The low word is first."""
_OFFSET_BYTES = 4
_CODED_GROUPS_MIN = 16
"""The minimum number of groups of a coded column. Fewer groups are smaller as plain values."""

_Longs = npt.NDArray[np.int64]


def make_packed_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of packed groups: one row with the number of groups, and three cells for each column.

    The cells are the values or distinct values, the codes that replace the values of groups, and the number to which
    the codes of integers are added.
    """
    fields = [pa.field(_GROUPS, pa.int64())]
    for field in schema:
        fields += [
            pa.field(field.name, pa.list_(field.type)),
            pa.field(field.name + _CODES, pa.large_binary()),
            pa.field(field.name + _BASE, pa.int64()),
        ]
    return pa.schema(fields)


def read_groups_schema(packed_schema: pa.Schema) -> pa.Schema:
    """Return the schema of the groups that a schema of packed groups describes.

    Raises:
        ValueError: The schema does not describe packed groups.
    """
    # The first cell has the number of groups. Then each column has three cells, of which the first has its values.
    names, types = packed_schema.names[1::_CELLS_PER_COLUMN], packed_schema.types[1::_CELLS_PER_COLUMN]
    if packed_schema.names[:1] != [_GROUPS] or not all(pa.types.is_list(kind) for kind in types):
        raise ValueError("an Arrow file has no packed groups")
    groups_schema = pa.schema([(name, kind.value_type) for name, kind in zip(names, types, strict=True)])
    if make_packed_schema(groups_schema) != packed_schema:
        raise ValueError("an Arrow file has no packed groups")
    return groups_schema


def list_packed_names(columns: Sequence[str]) -> list[str]:
    """Return the names of the cells that contain some columns of groups.

    The groups of a data file are packed into one row of an Arrow table. Each column of the groups becomes three cells
    of this row: its values, its codes (indexes of values), and the number to which integer codes are added. Another
    cell has the number of groups.
    """
    return [_GROUPS, *(name + end for name in columns for end in ("", _CODES, _BASE))]


def pack_groups(groups: pa.RecordBatch) -> pa.RecordBatch:
    """Pack groups into one row with the columns of `make_packed_schema`.

    A column is stored as distinct values and codes, or as codes and a base (`_code_column`). If there are fewer than
    `_CODED_GROUPS_MIN` groups, their values are stored without codes.
    """
    cells: list[pa.Array] = [pa.array([groups.num_rows], pa.int64())]
    for name, column in zip(groups.schema.names, groups.columns, strict=True):
        values, codes, base = (
            _code_column(name, column) if groups.num_rows >= _CODED_GROUPS_MIN else (column, None, None)
        )
        cells += [
            pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values),
            pa.array([codes], pa.large_binary()),
            pa.array([base], pa.int64()),
        ]
    return pa.RecordBatch.from_arrays(cells, schema=make_packed_schema(groups.schema))


def unpack_groups(packed_row: pa.RecordBatch, schema: pa.Schema, bytes_max: int) -> pa.RecordBatch:
    """Unpack the groups of a packed row.

    Args:
        packed_row: The row, whose buffers are valid, with the cells of the columns in `schema`.
        schema: The columns to return.
        bytes_max: The maximum number of bytes of the groups.

    Raises:
        ValueError: The row is damaged.
    """
    if packed_row.num_rows != 1 or not packed_row[_GROUPS][0].is_valid:
        raise ValueError("packed groups have no row")
    rows = packed_row[_GROUPS][0].as_py()
    if rows < 0:
        raise ValueError(f"packed groups state the invalid number of {rows:,} groups")
    columns = []
    size = 0
    for field in schema:
        values = packed_row[field.name].flatten()
        codes, base = packed_row[field.name + _CODES][0], packed_row[field.name + _BASE][0]
        code_numbers = _split_codes(codes.as_buffer(), rows) if codes.is_valid else None
        size += values.nbytes if code_numbers is None else _count_bytes(values, code_numbers, field.type)
        if size > bytes_max:
            raise ValueError(f"an entry of a cube has {size:,} bytes after unpacking; the maximum is {bytes_max:,}")
        if code_numbers is None:
            column = values
        elif base.is_valid:
            column = _decode_longs(code_numbers, base.as_py(), field.type)
        else:
            column = values.take(pa.array(code_numbers))
        if len(column) != rows:
            raise ValueError(f"the column {field.name} has {len(column):,} values, but there are {rows:,} groups")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _code_column(name: str, column: pa.Array) -> tuple[pa.Array, bytes | None, int | None]:
    """Return the values, the codes and the base of a column of groups.

    Dimensions have the names d0, d1, … A dimension has its distinct values, and a code for each group, which is the
    index of its value. For counts and sums that fit into 64 bits, the base is the lowest value, and the code of a group
    is the distance from the base. Floats and all other columns have only values.
    """
    if pa.types.is_floating(column.type):
        return column, None, None
    if name.startswith("d"):
        dictionary_array = pc.dictionary_encode(column, null_encoding="encode")
        return dictionary_array.dictionary, _join_codes(dictionary_array.indices.to_numpy().astype(np.uint64)), None
    longs = _to_longs(column)
    if longs is None:
        return column, None, None
    base = longs.min()
    # Unsigned numbers wrap around, so the subtraction does not overflow.
    return column.slice(0, 0), _join_codes(longs.view(np.uint64) - base.view(np.uint64)), int(base)


def _to_longs(column: pa.Array) -> _Longs | None:
    """Return counts or sums as integers, or None if some of them are null or do not fit into 64 bits.

    A decimal has two words of 64 bits. It fits if the high word only repeats the sign of the low word.
    """
    if column.null_count or not (pa.types.is_int64(column.type) or pa.types.is_decimal128(column.type)):
        return None
    if pa.types.is_int64(column.type):
        longs: _Longs = column.to_numpy()
        return longs
    words = np.frombuffer(column.buffers()[1], np.int64)
    words = words[_DECIMAL_WORDS * column.offset :][: _DECIMAL_WORDS * len(column)]
    low, high = words[::2], words[1::2]
    return np.ascontiguousarray(low) if np.array_equal(high, low >> 63) else None


def _decode_longs(codes: npt.NDArray[np.uint64], base: int, kind: pa.DataType) -> pa.Array:
    """Return the counts or sums whose distances from `base` are the codes.

    Unsigned numbers wrap around, so a negative base is added as its two's complement. A decimal has two words: the
    number, and its sign in all bits of the high word.

    Raises:
        ValueError: A column of this type cannot have a base.
    """
    longs = (codes + np.int64(base).view(np.uint64)).view(np.int64)
    if pa.types.is_int64(kind):
        return pa.array(longs)
    if not pa.types.is_decimal128(kind):
        raise ValueError(f"a column of the type {kind} has a base")
    words = np.empty(_DECIMAL_WORDS * len(longs), np.int64)
    words[::2], words[1::2] = longs, longs >> 63
    return pa.Array.from_buffers(kind, len(longs), [None, pa.py_buffer(words)])


def _count_bytes(values: pa.Array, codes: npt.NDArray[np.uint64], kind: pa.DataType) -> int:
    """Return the number of bytes of a coded column after it is decoded, without decoding it.

    Args:
        values: The distinct values.
        codes: The index in `values` of each group's value.
        kind: The type of the column.

    Raises:
        ValueError: A code has no value.
    """
    if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return len(codes) * max(1, int(kind.bit_width) // 8)
    if len(codes) and int(codes.max()) >= len(values):
        raise ValueError(f"a code is {int(codes.max()):,}, but the column has {len(values):,} distinct values")
    lengths = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return int(lengths[codes.astype(np.int64)].sum()) + _OFFSET_BYTES * len(codes)


def _join_codes(codes: npt.NDArray[np.uint64]) -> bytes:
    """Return the lowest byte of each code, then the second byte of each code, and so on.

    Only as many bytes of each code are kept as the largest code needs. Similar bytes are adjacent, and compress well.
    """
    width = max(1, -(-int(codes.max()).bit_length() // 8))
    return codes.astype("<u8").view(np.uint8).reshape(-1, _CODE_BYTES_MAX)[:, :width].T.tobytes()


def _split_codes(data: pa.Buffer, count: int) -> npt.NDArray[np.uint64]:
    """Return the codes from the bytes of `_join_codes`. Raise ValueError if the bytes do not have this form.

    The lowest bytes of all codes are first, then the second bytes of all codes, and so on.
    """
    width, remainder = divmod(data.size, count) if count else (0, data.size)
    if remainder or not (1 <= width <= _CODE_BYTES_MAX or not count):
        raise ValueError(f"{data.size:,} bytes cannot be the codes of {count:,} groups")
    bytes_by_position = np.frombuffer(data, np.uint8).reshape(width, count)
    codes = np.zeros((count, _CODE_BYTES_MAX), np.uint8)
    codes[:, :width] = bytes_by_position.T
    return codes.view("<u8").reshape(count).astype(np.uint64, copy=False)
