"""Reads some rows of a row group from the pages that contain them, with the Parquet page index (`OffsetIndex`).

pyarrow can only read whole column chunks. This module copies the encoded pages of the requested rows, and the
dictionary pages, to an in-memory Parquet file with one row group. Its footer is the footer of the original file with
adapted offsets and row counts. pyarrow decodes the in-memory file, and the requested rows are selected from the result.

If anything is uncertain, the result is None, and the caller reads the whole row group. The header of every page must
match the page index. Nested columns are not supported, because their pages do not contain row counts. Encrypted files
are not supported.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.arrow.arrays import Longs, combine_to_array
from seamark.formats.iceberg.files import thrift
from seamark.formats.iceberg.files.thrift import I64, Fields

STRETCH_ROWS = 1024
"""The number of rows in a stretch of consecutive rows. The fewer stretches have a requested row, the fewer pages do."""
STRETCHES_MAX_FRACTION = 0.5
"""The maximum fraction of a row group's stretches with a requested row for which the page index is read."""
BYTES_MAX_FRACTION = 0.7
"""The maximum fraction of the columns' bytes in needed pages for which pages are read instead of the row group."""
COLUMNS_MAX = 20_000
"""The maximum number of column chunks of a file that is read by pages.

If there are more chunks, decoding the footer takes more time than reading by pages saves.
"""
_MAGIC = b"PAR1"
# The fields of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, OffsetIndex, PageLocation, PageHeader,
# DataPageHeader and DataPageHeaderV2 in parquet.thrift. The value of a decoded field is the pair (type, value).
_ROWS, _ROW_GROUPS = 3, 4
_CHUNKS, _GROUP_BYTES, _GROUP_ROWS = 1, 2, 3
_CHUNK_AT, _META, _OFFSETS_AT, _OFFSETS_SIZE = 2, 3, 4, 5
_VALUES, _PACKED, _DATA_AT, _DICTIONARY_AT = 5, 7, 9, 11
_COPIED_METADATA_FIELDS = (1, 2, 3, 4, 5, 6, 7, 9)
"""The fields of ColumnMetaData that are copied: type, encodings, path, codec, and fields that are set later."""
_LOCATIONS = 1
_PAGE_AT, _PAGE_SIZE, _PAGE_ROW = 1, 2, 3
_PAGE_TYPE, _PAGE_PACKED, _DATA, _DATA_2 = 1, 3, 5, 8
_PAGE_VALUES, _PAGE_ENCODING = 1, 2
_PAGE_ROWS_2, _PAGE_ENCODING_2 = 3, 4
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_BY_DICTIONARY = (2, 8)
"""The encodings PLAIN_DICTIONARY and RLE_DICTIONARY."""


def _get_list(structure: Fields, field: int) -> list[Any]:
    """Return the elements of a list. The value of its field is the pair (type of the elements, elements)."""
    _, (_, elements) = structure[field]
    return list(elements)


class _Chunk(NamedTuple):
    """A column chunk and its pages.

    Data page i starts at byte `starts[i]`, has `sizes[i]` bytes, and contains the rows [rows[i], rows[i + 1]).

    Attributes:
        number: The ordinal of the leaf column.
        begin: The offset of the first page of the chunk, which may be a dictionary page.
    """

    name: str
    number: int
    begin: int
    starts: Longs
    sizes: Longs
    rows: Longs

    def find_pages(self, rows: Longs) -> Longs:
        return np.unique(np.searchsorted(self.rows, rows, "right") - 1)

    def sum_page_bytes(self, pages: Longs) -> int:
        return int(self.starts[0]) - self.begin + int(self.sizes[pages].sum())


class Pages:
    """Reads pages of one open file."""

    def __init__(
        self, source: pa.NativeFile, file: pq.ParquetFile, *, hole_bytes: int, encrypted: bool = False
    ) -> None:
        """Prepare reading from an open file.

        Args:
            source: The open file.
            file: The same file in pyarrow.
            hole_bytes: The maximum gap between pages that are read in one request.
            encrypted: Whether the file is encrypted. Pages of an encrypted file cannot be read separately.
        """
        self._is_encrypted = encrypted
        self._source, self._file, self._hole_bytes = source, file, hole_bytes
        self._stripped_chunks_by_group: dict[int, tuple[int, list[Fields]]] = {}

    def read(self, number: int, names: Sequence[str], rows: Longs) -> pa.RecordBatch | None:
        """Return some rows of a row group with these top-level columns.

        Return None if this is not possible, or not faster than reading the whole row group. It is not faster if the
        rows are in many parts (stretches) of the row group, because most pages are then needed.

        Args:
            number: The index of the row group.
            names: The names of the columns.
            rows: The ascending positions of the rows in the row group, as int64[rows].
        """
        if self._is_encrypted:
            return None
        group = self._file.metadata.row_group(number)
        stretches = np.count_nonzero(np.diff(rows // STRETCH_ROWS)) + 1
        if stretches * STRETCH_ROWS > STRETCHES_MAX_FRACTION * group.num_rows:
            return None
        try:
            return self._read_pages(number, group, names, rows)
        except (ValueError, KeyError, TypeError, IndexError, pa.ArrowException):
            return None  # If the file is damaged, reading the whole row group raises the error.

    def _read_pages(
        self, number: int, group: pq.RowGroupMetaData, names: Sequence[str], rows: Longs
    ) -> pa.RecordBatch | None:
        """Read the pages of a row group that contain some of its rows.

        The result is None if the whole row group should be read instead: a column is nested, the positions of the pages
        are unknown, the needed pages are most of the row group, or the file has more than `COLUMNS_MAX` column chunks,
        so that decoding its footer would take longer than reading pages saves.
        """
        leaves = [self._leaf_numbers.get(name) for name in names]
        if None in leaves or self._file.metadata.num_columns * self._file.metadata.num_row_groups > COLUMNS_MAX:
            return None
        chunks = self._read_chunks(number, group.num_rows, [(name, self._leaf_numbers[name]) for name in names])
        if chunks is None:
            return None
        pages = [chunk.find_pages(rows) for chunk in chunks]
        all_bytes = sum(int(chunk.starts[-1] + chunk.sizes[-1]) - chunk.begin for chunk in chunks)
        if (
            sum(chunk.sum_page_bytes(chunk_pages) for chunk, chunk_pages in zip(chunks, pages, strict=True))
            > BYTES_MAX_FRACTION * all_bytes
        ):
            return None
        by_rows: defaultdict[bytes, list[tuple[_Chunk, Longs]]] = defaultdict(list)
        for chunk, chunk_pages in zip(chunks, pages, strict=True):
            by_rows[chunk.rows[chunk_pages].tobytes() + chunk.rows[chunk_pages + 1].tobytes()].append(
                (chunk, chunk_pages)
            )
        columns_by_name: dict[str, pa.Array] = {}
        # Columns with the same page boundaries are decoded from one in-memory file.
        for chunks_with_pages in by_rows.values():
            columns = self._read_columns(
                number,
                [chunk for chunk, _ in chunks_with_pages],
                [chunk_pages for _, chunk_pages in chunks_with_pages],
                rows,
            )
            if columns is None:
                return None
            columns_by_name |= columns
        return pa.RecordBatch.from_arrays([columns_by_name[name] for name in names], list(names))

    @cached_property
    def _leaf_numbers(self) -> dict[str, int]:
        """The ordinals of the leaf columns of top-level columns that are not nested and have a unique name."""
        schema, leaves = self._file.metadata.schema, {}
        for number in range(len(schema)):
            column = schema.column(number)
            is_flat = column.max_repetition_level == 0 and column.max_definition_level <= 1
            leaves[column.path] = number if is_flat and column.path == column.name and column.path not in leaves else -1
        return {path: number for path, number in leaves.items() if number >= 0}

    @cached_property
    def _footer(self) -> Fields:
        buffer = io.BytesIO()
        self._file.metadata.write_metadata_file(buffer)  # It writes the original footer, which is in memory.
        return thrift.read_structure(buffer.getvalue(), len(_MAGIC))[0]

    def _get_group(self, number: int) -> Fields:
        group: Fields = _get_list(self._footer, _ROW_GROUPS)[number]
        return group

    def _read_chunks(self, group_number: int, rows: int, leaves: Iterable[tuple[str, int]]) -> list[_Chunk] | None:
        """Return the pages of the chunks by their page indexes, or None if a chunk has no page index.

        The footer is decoded as Thrift structures. A structure has a pair (type, value) for each field, so `[1]` is the
        value. The result is also None if a page index contradicts its chunk.

        Args:
            group_number: The index of the row group.
            rows: The number of rows of the row group.
            leaves: The name of each column, and its index among the leaf columns of the file.
        """
        chunk_infos = []
        for name, leaf in leaves:
            raw_chunk: Fields = _get_list(self._get_group(group_number), _CHUNKS)[leaf]
            if _OFFSETS_AT not in raw_chunk or _META not in raw_chunk:
                return None
            offset, size = raw_chunk[_OFFSETS_AT][1], raw_chunk[_OFFSETS_SIZE][1]
            chunk_infos.append((name, leaf, raw_chunk[_META][1], offset, size))
        indexes = self._read_ranges([(offset, size) for *_, offset, size in chunk_infos])
        chunks = []
        for (name, leaf, meta, _, _), index in zip(chunk_infos, indexes, strict=True):
            locations = _get_list(thrift.read_structure(index)[0], _LOCATIONS)
            columns = [[location[field][1] for location in locations] for field in (_PAGE_AT, _PAGE_SIZE, _PAGE_ROW)]
            starts, sizes, first_rows = (np.array(column, dtype=np.int64) for column in columns)
            begin = min(meta[_DATA_AT][1], meta[_DICTIONARY_AT][1] if _DICTIONARY_AT in meta else meta[_DATA_AT][1])
            chunk = _Chunk(name, leaf, begin, starts, sizes, np.append(first_rows, rows))
            if not _is_consistent(chunk, begin + meta[_PACKED][1]):
                return None
            chunks.append(chunk)
        return chunks

    def _read_columns(
        self, group_number: int, chunks: Sequence[_Chunk], pages: Sequence[Longs], wanted_rows: Longs
    ) -> dict[str, pa.Array] | None:
        """Read columns whose pages have the same row boundaries, and return the requested rows by column name.

        The pages are decoded from a Parquet file in memory that contains only these pages. Return None if a page has
        other rows than the page index states, or if its dictionary is not at the start of the chunk.

        Args:
            group_number: The index of the row group.
            chunks: The column chunks.
            pages: The indexes of the needed pages of each chunk.
            wanted_rows: The positions of the requested rows in the row group.
        """
        spans = [
            [(int(chunk.starts[page]), int(chunk.sizes[page])) for page in chunk_pages]
            for chunk, chunk_pages in zip(chunks, pages, strict=True)
        ]
        ranges_read = iter(self._read_ranges([span for chunk_spans in spans for span in chunk_spans]))
        page_bytes = [[next(ranges_read) for _ in chunk_spans] for chunk_spans in spans]
        first_rows, end_rows = chunks[0].rows[pages[0]], chunks[0].rows[pages[0] + 1]
        sources: list[tuple[_Chunk, bytes, list[bytes]]] = []
        for chunk, chunk_parts in zip(chunks, page_bytes, strict=True):
            headers = [_parse_data_page_header(part) for part in chunk_parts]
            if [header.rows for header in headers] != (end_rows - first_rows).tolist():
                return None
            dictionary = b""
            # The encoding may differ between the pages of a chunk.
            if any(header.encoding in _BY_DICTIONARY for header in headers):
                (dictionary,) = self._read_ranges([(chunk.begin, int(chunk.starts[0]) - chunk.begin)])
                if _parse_page_header(dictionary)[_PAGE_TYPE][1] != _DICTIONARY_PAGE:
                    return None
            sources.append((chunk, dictionary, chunk_parts))
        total_rows = int((end_rows - first_rows).sum())
        with pq.ParquetFile(
            pa.BufferReader(self._assemble_file(group_number, sources, total_rows)), coerce_int96_timestamp_unit="us"
        ) as file:
            table = file.read(columns=[chunk.name for chunk in chunks], use_threads=False)
        if table.num_rows != total_rows:
            return None
        # The positions of the requested rows among the rows of the pages.
        page_indexes = np.searchsorted(first_rows, wanted_rows, "right") - 1
        page_rows = end_rows - first_rows
        page_positions = np.cumsum(page_rows) - page_rows
        positions = page_positions[page_indexes] + wanted_rows - first_rows[page_indexes]
        selected_rows = table.take(pa.array(positions)).combine_chunks()
        return {chunk.name: combine_to_array(selected_rows.column(chunk.name)) for chunk in chunks}

    def _assemble_file(self, number: int, sources: Sequence[tuple[_Chunk, bytes, list[bytes]]], rows: int) -> bytes:
        """Return a Parquet file of one row group with these chunks.

        Args:
            number: The index of the row group in the original file.
            rows: The number of rows of all pages of a chunk.
            sources: For each column, the chunk, its dictionary page or b"", and its data pages.
        """
        kind, stripped_chunks = self._strip_chunks(number)
        chunks, body = list(stripped_chunks), [_MAGIC]
        offset = len(_MAGIC)
        for chunk, dictionary, pages in sources:
            size = len(dictionary) + sum(map(len, pages))
            meta = stripped_chunks[chunk.number][_META][1] | {
                _VALUES: (I64, rows),
                _PACKED: (I64, size),
                _DATA_AT: (I64, offset + len(dictionary)),
            }
            if dictionary:
                meta[_DICTIONARY_AT] = I64, offset
            chunks[chunk.number] = stripped_chunks[chunk.number] | {_META: (thrift.STRUCT, meta)}
            body += dictionary, *pages
            offset += size
        group = {
            _CHUNKS: (thrift.LIST, (kind, chunks)),
            _GROUP_BYTES: (I64, offset - len(_MAGIC)),
            _GROUP_ROWS: (I64, rows),
        }
        groups = thrift.LIST, (thrift.STRUCT, [group])
        footer = thrift.write_structure(self._footer | {_ROWS: (I64, rows), _ROW_GROUPS: groups})
        return b"".join((*body, footer, len(footer).to_bytes(4, "little"), _MAGIC))

    def _strip_chunks(self, row_group: int) -> tuple[int, list[Fields]]:
        """Return the Thrift type and the encoded chunks of a row group, without statistics, offsets and sizes."""
        cached_chunks = self._stripped_chunks_by_group.get(row_group)
        if cached_chunks is None:
            kind, chunks = self._get_group(row_group)[_CHUNKS][1]
            stripped_chunks = []
            for chunk in chunks:
                meta = {field: value for field, value in chunk[_META][1].items() if field in _COPIED_METADATA_FIELDS}
                stripped_chunks.append({_CHUNK_AT: (I64, 0), _META: (chunk[_META][0], meta)})
            cached_chunks = self._stripped_chunks_by_group[row_group] = kind, stripped_chunks
        return cached_chunks

    def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges (offset, length). Close ranges are read in one request.

        Raises:
            ValueError: The file ends before a range ends.
        """
        joined_ranges: list[tuple[int, int]] = []
        for offset, size in sorted(ranges):
            if joined_ranges and offset <= joined_ranges[-1][1] + self._hole_bytes:
                joined_ranges[-1] = joined_ranges[-1][0], max(joined_ranges[-1][1], offset + size)
            else:
                joined_ranges.append((offset, offset + size))
        chunks_read = [(start, self._source.read_at(end - start, start)) for start, end in joined_ranges]
        results = []
        for offset, size in ranges:
            start, data = next(span for span in reversed(chunks_read) if span[0] <= offset)
            part = data[offset - start : offset - start + size]
            if len(part) != size:
                raise ValueError(f"some of the {size} bytes at {offset} are missing")
            results.append(part)
        return results


def _is_consistent(chunk: _Chunk, end: int) -> bool:
    """Return whether the page index is consistent with the column chunk.

    The pages must not be empty or overlap, must be in the order of their rows, and must end before the byte `end`.
    """
    ends = chunk.starts + chunk.sizes
    return bool(
        len(chunk.starts)
        and chunk.rows[0] == 0
        and (np.diff(chunk.rows) > 0).all()
        and (chunk.sizes > 0).all()
        and chunk.begin <= chunk.starts[0]
        and (ends[:-1] <= chunk.starts[1:]).all()
        and ends[-1] <= end
    )


def _parse_page_header(data: bytes) -> Fields:
    """Return the header of a page.

    Raises:
        ValueError: `data` is not exactly one page.
    """
    header, end = thrift.read_structure(data)
    if end + header[_PAGE_PACKED][1] != len(data):
        raise ValueError("a page does not end at the offset in the page index")
    return header


class _PageHeader(NamedTuple):
    """The fields of a data page's header."""

    rows: int
    encoding: int


def _parse_data_page_header(data: bytes) -> _PageHeader:
    """Return the header of a data page of a flat column.

    Raises:
        KeyError: The page is not a data page.
    """
    header = _parse_page_header(data)
    if header[_PAGE_TYPE][1] == _DATA_PAGE:
        page = header[_DATA][1]
        # In a flat column, each row has one value.
        return _PageHeader(page[_PAGE_VALUES][1], page[_PAGE_ENCODING][1])
    page = header[_DATA_2][1]
    return _PageHeader(page[_PAGE_ROWS_2][1], page[_PAGE_ENCODING_2][1])
