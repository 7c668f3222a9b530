"""Read columns of Parquet files within a budget of bytes.

The memory of a page is determined before the page is decoded, and the footer is not trusted: page headers state the
inflated sizes (Parquet: "Data Pages"), which pyarrow allocates. String columns are read as dictionaries, so that a
repeated value is stored once. For delta encodings, which also repeat values, pyarrow has no dictionary. Then few rows
are decoded at a time, and each batch is charged to the budget.

If pyarrow cannot represent the metadata of a column chunk, it aborts the process, for example if the metadata are
encrypted, or if the sizes in the statistics do not fit the column. It also does not check the indices of dictionaries.
Therefore `footer.py` reads the chunks from the footer, pyarrow gets the same bytes of the footer, and indices are
validated before they are used.

If the budget is exhausted, if a column is inside a list, or if pages contradict their headers, Unreadable is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.formats.iceberg.files import _footer, thrift
from seamark.formats.iceberg.files.budget import Budget, compute_expanded_bytes
from seamark.formats.iceberg.files.footer import ENCRYPTED_MAGIC, MAGIC, RowGroup, read_footer
from seamark.formats.iceberg.files.parquet import ColumnPath, EncryptedFile, Unreadable, get_column, to_dotted_names
from seamark.formats.iceberg.types.values import INT_MAX

Longs = npt.NDArray[np.int64]

FOOTER_LIMIT_BYTES = 16 << 20
FOOTER_FREE_BYTES = 32 << 10
"""The maximum size in bytes of a footer whose memory is not estimated.

A footer of this size takes at most 40 MiB when it is decoded: 1,200 bytes for each byte, if it is a list of column
chunks.
"""
_FOOTER_WEIGHTS = {(0, 2): 896, (0, 4): 160 + 800, (0, 5): 192, (1, 1): 768 + 8 * _footer.WIDTH}
"""The bytes of memory for each item of a list, by (depth, field id) of the list, measured with pyarrow 25.

The items are schema elements, row groups, and key-value pairs of FileMetaData, and column chunks of RowGroup. The
weights of row groups and chunks include the memory that `footer.py` uses.
"""
_ITEM_BYTES = 72
"""The bytes of memory for each item of all other lists: paths, encodings, statistics of encodings, column orders."""
_FIELD_BYTES = 32
"""The bytes that are charged for each field, because estimating the memory of many fields takes time."""
PAGE_HEADER_MAX_BYTES = 256 << 10
"""The maximum size in bytes of a page header. It is decoded to dictionaries of about a hundred times its size."""
PAGES_MAX = 100_000
"""The maximum number of pages of a column chunk."""
BATCH_ROWS_MAX = 65_536
_BATCH_MEMORY_FACTOR = 8
"""The memory of a batch while it is decoded, as a multiple of its size.

A batch then exists twice, in buffers that double in size.
"""
TAIL_BYTES = 64 << 10
"""The number of bytes at the file's end that pyarrow reads first."""
_FOOTER_END_BYTES = 8
"""The size in bytes of the end of the file: the footer's length and the magic number."""
_SHOWN_MAX = 200
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3
_ALGORITHM, _KEY_METADATA = 8, 9
"""Field ids of FileMetaData (parquet.thrift) in files whose footer is signed."""
# Fields of PageHeader in parquet.thrift; the first field of a data page's header is its number of values.
_TYPE, _PLAIN_BYTES, _PACKED_BYTES, _DATA, _DATA_2, _VALUES = 1, 2, 3, 5, 8, 1
_OFFSET_BYTES = 8
"""The size of the offset or the index of a string, in bytes."""
_FIXED_BYTES_MIN = 16
"""The memory of a fixed-width value in bytes: the size of the widest number, a decimal."""
_READER_OPTIONS: dict[str, Any] = {
    "pre_buffer": False,
    "arrow_extensions_enabled": False,
    # Spark and Hive write INT96 timestamps. As nanoseconds, timestamps before 1677 would overflow.
    "coerce_int96_timestamp_unit": "us",
}
_DELTA_ENCODINGS = frozenset((5, 6, 7))
"""The encodings DELTA_BINARY_PACKED, DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY of parquet.thrift."""
_DICTIONARY_TYPES = frozenset({"NONE", "STRING", "JSON", "ENUM", "BSON"})
"""The logical types of the byte arrays that pyarrow can read as dictionaries."""


class _Pages(NamedTuple):
    """The pages of a column chunk: their total size without compression, and the size of the largest page."""

    plain_bytes: int
    largest_bytes: int


class _Leaf(NamedTuple):
    """A leaf column of the file that is read.

    Attributes:
        number: The index of the column in the file.
        path: The names of the column and of the columns that contain it, joined by dots.
        width: The memory of a value in bytes, without the bytes of a string.
        by_dictionary: Whether pyarrow reads the column as a dictionary.
        expands: Whether pyarrow copies a repeated value of variable length for each row. The memory of a batch is then
            not limited by the size of the pages.
    """

    number: int
    path: str
    width: int
    by_dictionary: bool
    expands: bool


class BoundedParquet:
    """An open file whose columns are read within a budget. Only one thread may use it."""

    def __init__(self, source: pa.NativeFile, path: str, budget: Budget) -> None:
        self._source, self._path, self._budget = source, path, budget
        footer = _read_footer_bytes(source, path)
        if not footer:
            raise Unreadable(path, "the file cannot be read: it has no Parquet footer at its end")
        budget.take(_estimate_footer_weight(footer, path, budget.left_bytes), path)
        try:
            self._footer = read_footer(footer)
        except ValueError as error:
            raise Unreadable(path, f"the footer is broken: {error}") from None
        # If the file is overwritten now, pyarrow could read a different footer.
        self._file = pq.ParquetFile(source, metadata=_read_metadata(footer), **_READER_OPTIONS)
        self.rows: int = self._file.metadata.num_rows

    @property
    def schema(self) -> pa.Schema:
        return self._file.schema_arrow

    def read_columns(self, column_paths: Mapping[int, ColumnPath]) -> dict[int, pa.ChunkedArray]:
        """Return complete columns by field id. Strings are dictionaries that all chunks share.

        The memory of the columns stays charged to the budget.
        """
        chunks: dict[int, list[pa.Array]] = {column_id: [] for column_id in column_paths}
        for _, table, _ in self._read_tables(column_paths, None):
            for column_id, column_path in column_paths.items():
                chunks[column_id] += [_validate_dictionary(chunk) for chunk in get_column(table, column_path).chunks]
        return {
            column_id: self._to_chunked_array(chunks[column_id], column_paths[column_id]).unify_dictionaries()
            for column_id in column_paths
        }

    def read_plain_columns(self, column_paths: Mapping[int, ColumnPath]) -> dict[int, pa.ChunkedArray]:
        """Return complete columns by field id. Strings are not dictionaries.

        The memory of the columns stays charged to the budget.
        """
        columns = self.read_columns(column_paths) if column_paths else {}
        plain_chunks = {
            column_id: [self._decode_dictionary(chunk) for chunk in column.chunks]
            for column_id, column in columns.items()
        }
        return {
            column_id: self._to_chunked_array(chunks, column_paths[column_id])
            for column_id, chunks in plain_chunks.items()
        }

    def read_columns_at(self, column_paths: Mapping[int, ColumnPath], rows: Longs) -> dict[int, pa.ChunkedArray]:
        """Return the columns of some rows by field id, without dictionaries.

        Args:
            column_paths: The paths of the columns by field id.
            rows: The positions of the rows in the file, int64[n], ascending.
        """
        chunks_by_column: dict[int, list[pa.Array]] = {column_id: [] for column_id in column_paths}
        for start, table, charged_bytes in self._read_tables(column_paths, rows):
            first, end = np.searchsorted(rows, (start, start + table.num_rows)).tolist()
            positions = pa.array(rows[first:end] - start)
            for column_id, column_path in column_paths.items():
                column = get_column(table, column_path)
                for chunk in (
                    pa.chunked_array([_validate_dictionary(chunk) for chunk in column.chunks], column.type)
                    .take(positions)
                    .chunks
                ):
                    self._budget.take(chunk.nbytes, self._path)
                    chunks_by_column[column_id].append(self._decode_dictionary(chunk))
            self._budget.give_back(charged_bytes)  # Only the copies of the requested rows stay in memory.
        return {
            column_id: self._to_chunked_array(chunks_by_column[column_id], column_paths[column_id])
            for column_id in column_paths
        }

    def _decode_dictionary(self, array: pa.Array) -> pa.Array:
        """Return an array without a dictionary. The memory of the result is charged to the budget."""
        if not pa.types.is_dictionary(array.type):
            return array
        self._budget.take(compute_expanded_bytes(array), self._path)
        return array.dictionary_decode()

    def _to_chunked_array(self, chunks: list[pa.Array], column_path: ColumnPath) -> pa.ChunkedArray:
        """Join the chunks of a column. Without chunks, the type is the type in the file's schema."""
        if chunks:
            return pa.chunked_array(chunks)
        kind = self._file.schema_arrow.field(column_path[0]).type
        for name in column_path[1:]:
            kind = kind.field(name).type
        return pa.chunked_array([], type=kind)

    def _read_tables(
        self, column_paths: Mapping[int, ColumnPath], rows: Longs | None
    ) -> Iterator[tuple[int, pa.Table, int]]:
        """Yield the first row, the columns and the charged bytes of each row group.

        If `rows` is set, skip the row groups that contain none of these rows.
        """
        names = to_dotted_names(column_paths.values())
        leaves = self._list_leaves(names)
        dictionary_paths = [leaf.path for leaf in leaves if leaf.by_dictionary]
        file = self._file
        if dictionary_paths:
            file = pq.ParquetFile(
                self._source,
                metadata=self._file.metadata,
                read_dictionary=dictionary_paths,
                **_READER_OPTIONS,
            )
        start = 0
        for number in range(file.metadata.num_row_groups):
            end = start + file.metadata.row_group(number).num_rows
            if rows is None or np.searchsorted(rows, start) < np.searchsorted(rows, end):
                table, charged_bytes = self._read_table(file, number, names, leaves)
                yield start, table, charged_bytes
            start = end

    def _read_table(
        self, file: pq.ParquetFile, number: int, names: list[str], leaves: Sequence[_Leaf]
    ) -> tuple[pa.Table, int]:
        """Return a row group, and the bytes of memory that were charged to the budget for it.

        The size of the pages is charged before pyarrow reads them, and the rest of the table's size after that. If
        pyarrow copies repeated values, the table can be much larger than the pages. In this case, it is read in batches
        that certainly fit into the rest of the budget.
        """
        group = self._footer.groups[number]
        pages = [self._read_pages(group, leaf.number) for leaf in leaves]
        charged_bytes = sum(column_pages.plain_bytes for column_pages in pages) + group.rows * sum(
            leaf.width for leaf in leaves
        )
        self._budget.take(charged_bytes, self._path)
        if not any(leaf.expands for leaf in leaves):
            table = file.read_row_group(number, columns=names, use_threads=False)
            self._budget.take(max(0, table.nbytes - charged_bytes), self._path)
            return table, max(charged_bytes, table.nbytes)
        # A row can repeat a value of the size of a page.
        row_bytes_max = max(
            1, *(column_pages.largest_bytes for leaf, column_pages in zip(leaves, pages, strict=True) if leaf.expands)
        )
        batch_rows = min(BATCH_ROWS_MAX, max(1, self._budget.left_bytes // (_BATCH_MEMORY_FACTOR * row_bytes_max)))
        batches = []
        for batch in file.iter_batches(batch_rows, row_groups=[number], columns=names, use_threads=False):
            self._budget.take(batch.nbytes, self._path)
            charged_bytes += batch.nbytes
            batches.append(batch)
        return pa.Table.from_batches(batches, schema=batches[0].schema if batches else None), charged_bytes

    def _list_leaves(self, names: Sequence[str]) -> list[_Leaf]:
        """Return the leaf columns that pyarrow reads for some column names, including everything inside a column.

        Columns inside lists are refused, because their number of values is not the number of rows. Byte arrays without
        a dictionary are marked, because pyarrow copies a repeated value for each row.

        Raises:
            Unreadable: A column is inside a list, or a row group has another number of columns than the schema.
        """
        schema, leaves = self._file.metadata.schema, []
        if any(len(group.chunks) != len(schema) for group in self._footer.groups):
            raise Unreadable(self._path, "the number of columns of a row group differs from the schema")
        for number in range(len(schema)):
            column = schema.column(number)
            if not any(column.path == name or column.path.startswith(name + ".") for name in names):
                continue
            if column.max_repetition_level:
                raise Unreadable(self._path, f"the column {column.path[:_SHOWN_MAX]!r} is inside a list")
            if column.physical_type == "BYTE_ARRAY":
                by_dictionary = self._has_dictionaries(number, column)
                leaves.append(
                    _Leaf(number, column.path, _OFFSET_BYTES, by_dictionary=by_dictionary, expands=not by_dictionary)
                )
            else:
                width = max(_FIXED_BYTES_MIN, column.length or 0)
                leaves.append(_Leaf(number, column.path, width, by_dictionary=False, expands=False))
        return leaves

    def _has_dictionaries(self, number: int, column: pq.ColumnSchema) -> bool:
        """Return whether pyarrow can read a byte array column as a dictionary.

        It cannot do this for some logical types, or if a row group of this file uses a delta encoding.

        Raises:
            Unreadable: The footer is invalid.
        """
        if column.logical_type.type not in _DICTIONARY_TYPES:
            return False
        try:
            return not any(
                _DELTA_ENCODINGS.intersection(self._footer.read_encodings(group, number))
                for group in self._footer.groups
            )
        except ValueError as error:
            raise Unreadable(self._path, f"the footer is broken: {error}") from None

    def _read_pages(self, group: RowGroup, number: int) -> _Pages:
        """Return the page sizes of the column chunk with the index `number` in its row group.

        The metadata of the chunk are read only to check them.

        Raises:
            EncryptedFile: The chunk is encrypted.
            Unreadable: The footer or a page header is invalid.
        """
        if group.has("encrypted")[number]:
            raise EncryptedFile(self._path, "the file has encrypted columns, and no keys were given")
        begin, size = int(group.begins[number]), int(group.read_values("packed_bytes")[number])
        if begin < 0 or size < 0:
            raise Unreadable(self._path, "the footer has a column of negative size")
        try:
            self._footer.read_column_metadata(group, number)
        except ValueError as error:
            raise Unreadable(self._path, f"the footer is broken: {error}") from None
        data = self._source.read_at(size, begin)
        try:
            return read_page_sizes(data, int(group.read_values("values")[number]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Unreadable(self._path, f"the page headers cannot be read: {error}") from None


def read_page_sizes(data: bytes, values: int) -> _Pages:
    """Return the page sizes of a column chunk, according to its page headers.

    Only the pages that pyarrow reads are counted: those that contain the first `values` values.

    Raises:
        ValueError, KeyError, TypeError: A header is invalid.
    """
    offset = counted_values = page_count = total_bytes = largest_bytes = 0
    view = memoryview(data)
    while counted_values < values and offset < len(data):
        header, size = thrift.read_structure(view[offset : offset + PAGE_HEADER_MAX_BYTES])
        header_end = offset + size
        kind, plain_bytes, packed_bytes = header[_TYPE][1], header[_PLAIN_BYTES][1], header[_PACKED_BYTES][1]
        if packed_bytes < 0 or plain_bytes < 0 or packed_bytes > len(data) - header_end:
            raise ValueError(
                f"the page at {offset} states {packed_bytes} bytes, {plain_bytes} inflated, "
                f"but the column chunk has {len(data)} bytes"
            )
        if kind in (_DATA_PAGE, _DATA_PAGE_2):
            page_values = header[_DATA if kind == _DATA_PAGE else _DATA_2][1][_VALUES][1]
            # pyarrow uses only the last 32 bits of the number, and would read more pages.
            if not 0 <= page_values <= INT_MAX:
                raise ValueError(f"the page at {offset} states {page_values} values; it must be from 0 to {INT_MAX}")
            counted_values += page_values
        page_count += 1
        if page_count > PAGES_MAX:
            raise ValueError(f"the column chunk has more than {PAGES_MAX:,} page headers")
        total_bytes += plain_bytes
        largest_bytes = max(largest_bytes, plain_bytes)
        offset = header_end + packed_bytes
    return _Pages(total_bytes, largest_bytes)


def read_plain_metadata(source: pa.NativeFile, path: str) -> pq.FileMetaData | None:
    """Return the footer of an unencrypted file, or None if the file is not Parquet.

    pyarrow refuses a file that is not Parquet when the caller opens it.

    Raises:
        Unreadable: The file is encrypted.
    """
    footer = _read_plain_footer(source, path)
    return _read_metadata(footer) if footer else None


def _read_metadata(footer: bytes) -> pq.FileMetaData:
    return pq.read_metadata(pa.BufferReader(b"".join((MAGIC, footer, len(footer).to_bytes(4, "little"), MAGIC))))


def _validate_dictionary(array: pa.Array) -> pa.Array:
    """Check that the indices of a dictionary array are valid, and return the array.

    Raises:
        ArrowInvalid: An index is outside the dictionary.
    """
    if pa.types.is_dictionary(array.type):
        array.validate(full=True)
    return array


def check_plain(source: pa.NativeFile, path: str) -> None:
    """Check that a file is not encrypted.

    The file must be in memory, so that it cannot change before pyarrow reads its footer.

    Raises:
        Unreadable: The file is encrypted.
    """
    _read_plain_footer(source, path)


def _read_plain_footer(source: pa.NativeFile, path: str) -> bytes:
    """Return the footer of an unencrypted file, or b"" if the file is not Parquet."""
    footer = _read_footer_bytes(source, path, limit_bytes=source.size())
    check_has_no_encrypted_columns(footer, path)
    return footer


def check_has_no_encrypted_columns(footer: bytes, path: str) -> None:
    """Check that a file with this footer has no encrypted columns.

    A file with encrypted columns and a plain footer has fields in its footer that describe the footer's signature.
    Without the keys of an encrypted column, pyarrow aborts the process when the column's metadata are requested.

    Raises:
        EncryptedFile: The file has encrypted columns.
        Unreadable: The footer is invalid.
    """
    try:
        fields = [number for number, *_ in _footer.spans(footer, 0)[0]] if footer else []
    except ValueError as error:
        raise Unreadable(path, f"the footer is broken: {error}") from None
    if _ALGORITHM in fields or _KEY_METADATA in fields:
        raise EncryptedFile(path, "the file has encrypted columns, and no keys were given")


def _read_footer_bytes(source: pa.NativeFile, path: str, limit_bytes: int = FOOTER_LIMIT_BYTES) -> bytes:
    """Return the footer, or b"" if the file does not end like a Parquet file.

    The end of the file is read first. It has the length of the footer, and usually contains the complete footer, so
    that a second read is not necessary.

    Raises:
        EncryptedFile: The footer is encrypted.
        Unreadable: The footer is larger than `limit_bytes`.
    """
    size = source.size()
    tail = source.read_at(min(TAIL_BYTES, size), max(0, size - TAIL_BYTES))
    magic = tail[-len(MAGIC) :]
    if magic == ENCRYPTED_MAGIC:
        raise EncryptedFile(path, "the footer is encrypted, and no keys were given")
    length = int.from_bytes(tail[-_FOOTER_END_BYTES : -len(MAGIC)], "little")
    if magic != MAGIC or length > size - _FOOTER_END_BYTES:
        return b""
    if length > limit_bytes:
        raise Unreadable(path, f"the footer has {length:,} bytes; the limit is {limit_bytes:,} bytes")
    if length + _FOOTER_END_BYTES <= len(tail):
        return bytes(tail[-_FOOTER_END_BYTES - length : -_FOOTER_END_BYTES])
    return bytes(source.read_at(length, size - _FOOTER_END_BYTES - length))


def _estimate_footer_weight(footer: bytes, path: str, limit_bytes: int) -> int:
    """Return the approximate memory in bytes that pyarrow needs to decode the footer, or 0 for a small footer.

    A malicious footer can state lists that are much larger than the footer itself, so the memory is estimated before
    pyarrow decodes the footer.

    Raises:
        EncryptedFile: The file has encrypted columns.
        Unreadable: The decoded footer takes more than `limit_bytes` bytes, or the footer is invalid.
    """
    check_has_no_encrypted_columns(footer, path)
    if len(footer) <= FOOTER_FREE_BYTES:
        return 0
    try:
        return thrift.estimate_decoded_memory(
            footer, _FOOTER_WEIGHTS, item=_ITEM_BYTES, field=_FIELD_BYTES, limit_bytes=limit_bytes
        )
    except thrift.MemoryEstimateExceeded:
        raise Unreadable(path, f"the footer takes more than {limit_bytes:,} bytes when it is decoded") from None
    except ValueError as error:
        raise Unreadable(path, f"the footer is broken: {error}") from None
