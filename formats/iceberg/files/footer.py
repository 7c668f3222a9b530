"""Codec of Parquet footers that keeps unknown fields (parquet.thrift: FileMetaData, RowGroup, ColumnChunk).

Column chunks stay encoded. A table of numbers has the position of each of their offsets in the footer, and
`patch_chunks` replaces the offsets. All other fields are read without a schema (`thrift.py`). Therefore a footer of
thousands of chunks takes milliseconds, and fields of later Parquet versions are kept.

If the bytes are not a footer, the functions raise ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.files import _footer, thrift
from seamark.formats.iceberg.files.thrift import BINARY, I16, I32, I64, LIST, STRUCT, Fields

Longs = npt.NDArray[np.int64]

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
END_BYTES = 8
"""The size in bytes of the end of the file: the footer's length and the magic number."""
COLUMN = {name: 2 + 3 * number for number, name in enumerate(_footer.NAMES)}
"""The column of each field's value in a table of chunks, by field name.

The next two columns are the begin and the end of the value in the footer. The begin is -1 if the field is absent.
"""
PATCH = {name: number for number, name in enumerate(_footer.NAMES[: _footer.PATCHED_FIELDS])}
"""The column of each field that can be changed in the values of `patch_chunks`, by field name."""
# Field ids of FileMetaData.
_VERSION, _SCHEMA, _ROWS, _GROUPS, _KEY_VALUES, _CREATED_BY, _ORDERS = range(1, 8)
_KNOWN_FIELDS = frozenset(range(1, 8))
# Field ids of RowGroup.
COLUMNS, TOTAL_BYTES, _GROUP_ROWS, SORTING, GROUP_OFFSET, PACKED_TOTAL, ORDINAL = range(1, 8)
_METADATA, _ENCODINGS, _DICTIONARY_PAGE = 3, 2, 11
"""The field ids of the metadata in a ColumnChunk, and of the encodings and the dictionary page in its ColumnMetaData.
"""
_ORDINAL_MAX = 32_767
_SHORT_MAX = 15
"""The largest difference of field ids that fits into a header of one byte. A shorter list also has a short header."""


@dataclass(frozen=True)
class RowGroup:
    """A row group of the footer.

    Attributes:
        chunks: int64[columns, WIDTH], the table of the column chunks.
        fields: All fields except the chunks.
        ordinal: The index of the row group in the file.
    """

    chunks: Longs
    fields: Fields
    ordinal: int

    @property
    def rows(self) -> int:
        return int(self.fields[_GROUP_ROWS][1])

    def read_values(self, name: str) -> Longs:
        """Return a field of each column chunk, int64[columns]. If a chunk does not have the field, its value is -1.

        Args:
            name: The name of the field in `COLUMN`, which maps it to a column of the table of chunks.
        """
        values: Longs = self.chunks[:, COLUMN[name]]
        return values

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each column chunk has a field, bool[columns].

        In the table of chunks, the position of each field follows its value. It is negative if the field is absent.
        """
        has_field: npt.NDArray[np.bool_] = self.chunks[:, COLUMN[name] + 1] >= 0
        return has_field

    @cached_property
    def begins(self) -> Longs:
        """The position of the first byte of each chunk, int64[columns].

        A chunk begins with its dictionary page, or with its first data page if it has no dictionary.
        """
        first, dictionary = self.read_values("data_page"), self.read_values("dictionary_page")
        begins: Longs = np.where((dictionary > 0) & (dictionary < first), dictionary, first)
        return begins

    @cached_property
    def ends(self) -> Longs:
        ends: Longs = self.begins + self.read_values("packed_bytes")
        return ends

    @property
    def size_bytes(self) -> int:
        """The number of bytes of all chunks of the row group in the file."""
        return int(self.read_values("packed_bytes").sum())


@dataclass(frozen=True)
class ParquetFooter:
    """A decoded footer.

    Attributes:
        data: The encoded footer. The positions in the tables of chunks are positions in these bytes.
        version: The version of the Parquet format.
        rows: The number of rows.
        groups: The row groups.
        schema: The encoded list of schema elements.
        orders: The encoded list of column orders.
        key_values: The key-value metadata.
        created_by: The name of the writer.
        later_fields: The encoded fields of later Parquet versions, as (type, bytes) by id.
    """

    data: bytes
    version: int
    rows: int
    groups: Sequence[RowGroup]
    schema: bytes
    orders: bytes | None
    key_values: Sequence[tuple[bytes, bytes | None]]
    created_by: bytes | None
    later_fields: Mapping[int, tuple[int, bytes]]

    def read_column_metadata(self, group: RowGroup, number: int) -> Fields:
        """Return the ColumnMetaData of a column chunk.

        Raises:
            ValueError: The metadata are no structure, or the optional dictionary offset has the wrong type. pyarrow
                ignores an offset of another type, and would read other pages than those in the table of chunks.
        """
        chunk = thrift.read_structure(self.data, int(group.chunks[number, 0]))[0]
        kind, metadata = chunk.get(_METADATA, (STRUCT, {}))
        if kind != STRUCT:
            raise ValueError(f"the metadata of a column chunk must be a structure, but have the type {kind}")
        if (offset_type := metadata.get(_DICTIONARY_PAGE, (I64,))[0]) != I64:
            raise ValueError(f"the dictionary offset is no I64, but has the type {offset_type}")
        return dict(metadata)

    def read_encodings(self, group: RowGroup, number: int) -> list[int]:
        """Return the encodings of a column chunk, as the numbers in parquet.thrift."""
        kind, values = self.read_column_metadata(group, number).get(_ENCODINGS, (LIST, (I32, [])))
        if kind != LIST or any(type(value) is not int for value in values[1]):
            raise ValueError("the encodings of a column chunk are not a list of numbers")
        return list(values[1])

    @cached_property
    def elements(self) -> list[Fields]:
        """The schema elements: the root, then all columns depth first."""
        return read_structures(self.schema)


def read_structures(data: bytes) -> list[Fields]:
    return [thrift.read_structure(data, offset)[0] for offset in _footer.items(data, 0)[:-1]]


def read_footer(data: bytes) -> ParquetFooter:
    """Decode a footer.

    Args:
        data: The footer without its length and the magic number.

    Raises:
        ValueError: The bytes are not a valid footer.
    """
    spans, _ = _footer.spans(data, 0)
    # If there are two lists of row groups, pyarrow reads the last list.
    if len({number for number, *_ in spans}) < len(spans):
        raise ValueError("a field of the footer is repeated")
    raw = {number: (kind, data[begin:end]) for number, kind, begin, end in spans if number != _GROUPS}
    try:
        version, rows = _read_number(raw[_VERSION]), _read_number(raw[_ROWS])
        schema = _check_kind(raw[_SCHEMA], LIST)
        groups_offset = next(begin for number, kind, begin, _ in spans if number == _GROUPS and kind == LIST)
    except (KeyError, StopIteration):
        raise ValueError("a required field of the footer is missing") from None
    for number in (_SCHEMA, _KEY_VALUES, _ORDERS):
        kind, encoded_list = raw.get(number, (LIST, b"\0"))
        # The first byte of a list has its length and the type of its items.
        if kind == LIST and encoded_list[0] >> 4 and encoded_list[0] & 15 != STRUCT:
            # pyarrow ignores a list of other values.
            raise ValueError(f"the list in footer field {number} does not contain structures")
    groups = [
        _read_group(data, begin, ordinal) for ordinal, begin in enumerate(_footer.items(data, groups_offset)[:-1])
    ]
    pairs = read_structures(_check_kind(raw[_KEY_VALUES], LIST)) if _KEY_VALUES in raw else []
    key_values = [(_get_binary(pair, 1) or b"", _get_binary(pair, 2)) for pair in pairs]
    created_by = raw.get(_CREATED_BY)
    return ParquetFooter(
        data,
        version,
        rows,
        groups,
        schema,
        _check_kind(raw[_ORDERS], LIST) if _ORDERS in raw else None,
        key_values,
        None if created_by is None else _decode_binary(_check_kind(created_by, BINARY)),
        {number: value for number, value in raw.items() if number not in _KNOWN_FIELDS},
    )


def _read_group(data: bytes, offset: int, ordinal: int) -> RowGroup:
    """Decode the row group at the position `offset` of the footer.

    The column chunks are read by compiled code (`_footer.pyx`), because a row group can have thousands of columns. The
    list of columns must be the first field. The other fields are then decoded as a structure, after a made-up first
    field in its place.

    Args:
        data: The footer.
        offset: The position of the row group in the footer.
        ordinal: The index of the row group.

    Raises:
        ValueError: The row group is invalid.
    """
    spans, end = _footer.spans(data, offset)
    column_lists = [span for span in spans if span[0] == COLUMNS and span[1] == LIST]
    if len(column_lists) != 1:
        raise ValueError(f"row group {ordinal} has {len(column_lists)} lists of columns instead of one")
    _, _, begin, columns_end = column_lists[0]
    chunks: Longs = np.empty((_read_list_length(data, begin), _footer.WIDTH), dtype=np.int64)
    _footer.locate_chunks(data, begin, chunks)
    # The header of the first field is one byte, whose upper half is the field's id.
    if begin != offset + 1 or data[offset] >> 4 != 1:
        raise ValueError("the columns are not the first field of a row group")
    # Read the fields after the columns, beginning with a field header, because field ids are relative to the previous
    # field.
    other_fields, _ = thrift.read_structure(bytes([1 << 4 | thrift.TRUE]) + data[columns_end:end])
    fields = {number: value for number, value in other_fields.items() if number != COLUMNS}
    if SORTING in fields:
        kind, sorting = fields[SORTING]
        if kind == LIST:
            item_kind, items = sorting
            if items and item_kind != STRUCT:
                # pyarrow ignores a list of other values.
                raise ValueError("the list of sorting columns does not contain structures")
    if any(fields.get(number, (None,))[0] != I64 for number in (TOTAL_BYTES, _GROUP_ROWS)):
        raise ValueError("a row group has no size or no number of rows")
    return RowGroup(chunks, fields, ordinal)


def _read_list_length(data: bytes, offset: int) -> int:
    """Return the length of the list at the position `offset`. The caller has checked the encoding."""
    length = data[offset] >> 4
    if length < _SHORT_MAX:
        return length
    # The length follows in groups of seven bits. The highest bit of each byte states whether another byte follows.
    length, shift = 0, 0
    while True:
        offset += 1
        length |= (data[offset] & 0x7F) << shift
        if data[offset] < 0x80:
            return length
        shift += 7


def _check_kind(encoded_field: tuple[int, bytes], expected_kind: int) -> bytes:
    """Return the bytes of a field. Raise ValueError if it has another Thrift type."""
    kind, data = encoded_field
    if kind != expected_kind:
        raise ValueError(f"a field of the footer has the Thrift type {kind}, not {expected_kind}")
    return data


def _read_number(encoded_number: tuple[int, bytes]) -> int:
    kind, data = encoded_number
    if kind not in (I16, I32, I64):
        raise ValueError(f"a number of the footer has the Thrift type {kind}, not an integer type")
    return int(_decode_value(I64, data))


def _get_binary(fields: Fields, number: int) -> bytes | None:
    kind, value = fields.get(number, (BINARY, None))
    if kind != BINARY:
        raise ValueError(f"field {number} of a footer structure has the Thrift type {kind}, not BINARY")
    return value if value is None else bytes(value)


def _decode_binary(encoded_value: bytes) -> bytes:
    return bytes(_decode_value(BINARY, encoded_value))


def _decode_value(kind: int, encoded_value: bytes) -> Any:
    """Decode a value. The reader reads only structures, so make the value the only field of a structure."""
    fields, _ = thrift.read_structure(bytes([1 << 4 | kind]) + encoded_value + b"\0")
    _, value = fields[1]
    return value


def encode_path(names: Sequence[bytes]) -> bytes:
    """Encode the field `path_in_schema` of a chunk."""
    return _encode_value(LIST, (BINARY, list(names)))


def patch_chunks(footer: ParquetFooter, chunks: Longs, values: Longs, paths: Sequence[bytes | None]) -> list[bytes]:
    """Return some column chunks, encoded with new offsets.

    Args:
        footer: The footer.
        chunks: The chunks: some rows of `RowGroup.chunks`, which have the position of each chunk in the footer.
        values: The new values of the fields of each chunk, as int64[chunks, PATCHED_FIELDS]. `PATCH` has the column of
            each field. A field that a chunk does not have is not added.
        paths: The encoded path of each chunk, or None to keep the path of the chunk.
    """
    return _footer.patch_chunks(
        footer.data, np.ascontiguousarray(chunks), np.ascontiguousarray(values, dtype=np.int64), paths
    )


def encode_group(chunks: Sequence[bytes], fields: Fields) -> bytes:
    """Encode a row group.

    Args:
        chunks: The encoded column chunks.
        fields: All fields except the chunks. The total size is required.
    """
    other_fields = bytearray(
        thrift.write_structure({number: value for number, value in fields.items() if number != COLUMNS})
    )
    other_fields[0] -= 1 << 4  # Field ids are relative: the total size (field 2) now follows field 1.
    return bytes([1 << 4 | LIST]) + encode_structures(chunks) + bytes(other_fields)


def make_group_fields(
    base: Fields, *, rows: int, plain_bytes: int, packed_bytes: int, offset: int, ordinal: int, sorting: object
) -> Fields:
    """Return the fields of a row group: `base` with some values replaced.

    Args:
        base: The fields that are copied.
        rows: The number of rows.
        plain_bytes: The size of the row group without compression.
        packed_bytes: The size of the row group with compression.
        offset: The position of the row group in the file.
        ordinal: The index of the row group in the file.
        sorting: The list of sorting columns, or None.
    """
    fields = dict(base)
    fields[TOTAL_BYTES] = I64, plain_bytes
    fields[_GROUP_ROWS] = I64, rows
    fields[GROUP_OFFSET] = I64, offset
    fields[PACKED_TOTAL] = I64, packed_bytes
    # The ordinal is an optional number of 16 bits, so a later row group has none.
    fields.pop(ORDINAL, None)
    fields.pop(SORTING, None)
    if ordinal <= _ORDINAL_MAX:
        fields[ORDINAL] = I16, ordinal
    if sorting is not None:
        fields[SORTING] = LIST, sorting
    return fields


def encode_footer(
    *,
    version: int,
    schema: bytes,
    rows: int,
    groups: Sequence[bytes],
    key_values: Sequence[tuple[bytes, bytes | None]],
    created_by: bytes | None,
    orders: bytes | None,
    later_fields: Mapping[int, tuple[int, bytes]],
) -> bytes:
    """Encode a Parquet footer (FileMetaData), without its length and the magic number.

    Args:
        version: The version of the Parquet format.
        schema: The encoded list of schema elements.
        rows: The number of rows.
        groups: The row groups, encoded by `encode_group`.
        key_values: The keys and values of the file's metadata.
        created_by: The name of the writer, or None.
        orders: The encoded list of the orders of columns, or None.
        later_fields: Types and encoded values of further fields by id, which newer versions of the format may have.
    """
    fields: dict[int, tuple[int, bytes]] = {
        **later_fields,
        _VERSION: (I32, _encode_number(version)),
        _SCHEMA: (LIST, schema),
        _ROWS: (I64, _encode_number(rows)),
        _GROUPS: (LIST, encode_structures(groups)),
    }
    if key_values:
        pairs = [
            thrift.write_structure({1: (BINARY, key), **({} if value is None else {2: (BINARY, value)})})
            for key, value in key_values
        ]
        fields[_KEY_VALUES] = LIST, encode_structures(pairs)
    if created_by is not None:
        fields[_CREATED_BY] = BINARY, encode_binary(created_by)
    if orders is not None:
        fields[_ORDERS] = LIST, orders
    return encode_fields(fields)


def encode_fields(fields: Mapping[int, tuple[int, bytes]]) -> bytes:
    """Encode a structure in Thrift's compact protocol. Its fields are already encoded values: (type, value) by id.

    A header has the distance from the previous id in its upper half. If the distance does not fit, the half is zero,
    and the id follows. A zero byte ends the structure.
    """
    buffer, previous_number = bytearray(), 0
    for number, (kind, encoded_value) in sorted(fields.items()):
        if 0 < number - previous_number <= _SHORT_MAX:
            buffer.append(number - previous_number << 4 | kind)
        else:
            buffer.append(kind)
            buffer += _encode_number(number)
        buffer += encoded_value
        previous_number = number
    buffer.append(0)
    return bytes(buffer)


def encode_binary(value: bytes) -> bytes:
    """Encode a value of type BINARY."""
    return _encode_value(BINARY, value)


def _encode_value(kind: int, value: object) -> bytes:
    """Encode a value: write a structure with only this field, and remove the header of the field and the end."""
    return thrift.write_structure({1: (kind, value)})[1:-1]


def _encode_number(value: int) -> bytes:
    return _encode_value(I64, value)


def encode_structures(parts: Sequence[bytes]) -> bytes:
    """Encode a list of encoded structures.

    A length below 15 is in the header. A greater length follows the header, in groups of seven bits.
    """
    count = len(parts)
    if count < _SHORT_MAX:
        return b"".join((bytes([count << 4 | thrift.STRUCT]), *parts))
    buffer = bytearray([_SHORT_MAX << 4 | thrift.STRUCT])
    while count >= 0x80:
        buffer.append(count & 0x7F | 0x80)
        count >>= 7
    buffer.append(count)
    return b"".join((buffer, *parts))


def shift_offset_index(data: bytes, begin: int, end: int, distance: int) -> bytes:
    """Return an OffsetIndex whose pages are moved by `distance` bytes.

    Args:
        data: The OffsetIndex of a column chunk.
        begin: The first position of the chunk before the move.
        end: The position after the chunk before the move.
        distance: The distance of the move.

    Raises:
        ValueError: A page is outside the chunk.
    """
    return _footer.shift_pages(data, begin, end, distance)


PAGE_HEADER_MAX_BYTES = 256 << 10
_DATA_PAGES = (0, 3)
"""The types of data pages in parquet.thrift: DATA_PAGE and DATA_PAGE_V2."""


@dataclass
class PageWalk:
    """A walk over the page headers of a chunk, which compares them with the footer.

    The pages must fill the chunk, and must have the number of values in the footer.

    Attributes:
        position: The position of the next page header in the file.
        end: The position after the chunk.
        remaining_values: The number of values in the remaining pages, according to the footer. It is negative if the
            pages have more values than the footer states.
    """

    position: int
    end: int
    remaining_values: int

    def read_page_headers(self, view: memoryview, begin: int) -> None:
        """Read the page headers that are completely in `view`, which begins at the position `begin` of the file.

        Raises:
            ValueError: A header is invalid, or its page exceeds the chunk.
        """
        view_end = begin + len(view)
        while self.position < self.end and begin <= self.position < view_end:
            if view_end < self.end and view_end - self.position < PAGE_HEADER_MAX_BYTES:
                return  # The header may be cut.
            header_end, kind, _, packed_bytes, values = _footer.page_at(view, self.position - begin)
            self.position = begin + header_end + packed_bytes
            self.remaining_values -= values if kind in _DATA_PAGES else 0
            if self.position > self.end:
                raise ValueError(f"a page exceeds its column chunk, which ends at {self.end}")

    def check(self) -> None:
        """Check that the walk has reached the end of the chunk, and that the pages had all values.

        Raises:
            ValueError: The pages contradict the footer.
        """
        if self.position != self.end:
            raise ValueError(f"the pages of a column chunk end at {self.position}, but the chunk ends at {self.end}")
        if self.remaining_values:
            difference = f"{abs(self.remaining_values)} {'fewer' if self.remaining_values > 0 else 'more'}"
            raise ValueError(f"the pages of a column chunk have {difference} values than the footer states")
