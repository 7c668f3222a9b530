"""A few rows of a row group from the pages that hold them (Parquet: "Page Index", `OffsetIndex` and `PageLocation`).

pyarrow reads a column chunk whole. So of each column the pages with a wanted row, and its dictionary, are read as they
are, and laid behind one another as a Parquet file of one row group, in memory, whose footer is the file's own but for
where this chunk lies and how many rows it has. pyarrow reads that, and the rows are taken from it. Nothing is decoded
that it does not decode.

The rule it keeps: doubt reads the row group whole (None). Every page that is read must say in its header what the page
index says of it; nested columns, whose pages do not say rows, and encrypted ones are not for this.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from seamark.metaserver.iceberg.files import thrift
from seamark.metaserver.iceberg.files.thrift import I64, Fields

ROWS_A_STEP = 1024
"""Whether rows are far enough apart is told by how many stretches of so many they are in."""
STRETCHES_MAX = 0.5
"""Of all stretches, those with a wanted row; where there are more, pages are not asked for."""
BYTES_MAX = 0.7
"""Of the columns' bytes, those of wanted pages; where they are more, the row group is read whole."""
COLUMNS_MAX = 20_000
"""Column chunks of one file; to read a larger footer takes longer than is saved."""
_MAGIC = b"PAR1"
# parquet.thrift: fields of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData, OffsetIndex, PageLocation, PageHeader.
_ROWS, _ROW_GROUPS = 3, 4
_CHUNKS, _GROUP_BYTES, _GROUP_ROWS = 1, 2, 3
_CHUNK_AT, _META, _OFFSETS_AT, _OFFSETS_SIZE = 2, 3, 4, 5
_VALUES, _PACKED, _DATA_AT, _DICTIONARY_AT = 5, 7, 9, 11
_META_KEPT = (1, 2, 3, 4, 5, 6, 7, 9)
"""Type, encodings, path, codec, and what is said anew."""
_LOCATIONS = 1
_PAGE_AT, _PAGE_SIZE, _PAGE_ROW = 1, 2, 3
_PAGE_TYPE, _PAGE_PACKED, _DATA, _DATA_2 = 1, 3, 5, 8
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_BY_DICTIONARY = (2, 8)
"""Encodings PLAIN_DICTIONARY and RLE_DICTIONARY."""

Longs = npt.NDArray[np.int64]


class _Chunk(NamedTuple):
    """Of one column in a row group. Data page i is at `starts[i]`, and has the rows from `rows[i]` to `rows[i + 1]`."""

    name: str
    number: int
    begin: int
    starts: Longs
    sizes: Longs
    rows: Longs

    def pages_of(self, wanted: Longs) -> Longs:
        return np.unique(np.searchsorted(self.rows, wanted, "right") - 1)

    def size_of(self, pages: Longs) -> int:
        return int(self.starts[0]) - self.begin + int(self.sizes[pages].sum())


class Pages:
    """Of one open file."""

    def __init__(self, source: pa.NativeFile, file: pq.ParquetFile, *, hole_bytes: int) -> None:
        """Pages that are no further apart than `hole_bytes` are read at once."""
        self._source, self._file, self._hole_bytes = source, file, hole_bytes
        self._bared: dict[int, tuple[int, list[Fields]]] = {}

    def read(self, number: int, names: Sequence[str], wanted: Longs) -> pa.RecordBatch | None:
        """These columns, at the top level, of these rows of the row group: int64[] ascending, of the group. None where
        that is not worth it, or cannot be done."""
        group = self._file.metadata.row_group(number)
        stretches = np.count_nonzero(np.diff(wanted // ROWS_A_STEP)) + 1
        if stretches * ROWS_A_STEP > STRETCHES_MAX * group.num_rows:
            return None
        try:
            return self._read(number, group, names, wanted)
        except (ValueError, KeyError, TypeError, IndexError, pa.ArrowException):
            return None  # where the file is broken, reading it whole says so

    def _read(
        self, number: int, group: pq.RowGroupMetaData, names: Sequence[str], wanted: Longs
    ) -> pa.RecordBatch | None:
        places = [self._places.get(name) for name in names]
        if None in places or self._file.metadata.num_columns * self._file.metadata.num_row_groups > COLUMNS_MAX:
            return None
        chunks = self._chunks(number, group.num_rows, [(name, self._places[name]) for name in names])
        if chunks is None:
            return None
        pages = [one.pages_of(wanted) for one in chunks]
        whole = sum(int(one.starts[-1] + one.sizes[-1]) - one.begin for one in chunks)
        if sum(one.size_of(some) for one, some in zip(chunks, pages, strict=True)) > BYTES_MAX * whole:
            return None
        alike: defaultdict[bytes, list[tuple[_Chunk, Longs]]] = defaultdict(list)
        for chunk, some in zip(chunks, pages, strict=True):
            alike[chunk.rows[some].tobytes() + chunk.rows[some + 1].tobytes()].append((chunk, some))
        found: dict[str, pa.Array] = {}
        for each in alike.values():  # pages of the same rows, mostly all of them, make one file
            columns = self._columns(number, [chunk for chunk, _ in each], [some for _, some in each], wanted)
            if columns is None:
                return None
            found |= columns
        return pa.RecordBatch.from_arrays([found[name] for name in names], list(names))

    @cached_property
    def _places(self) -> dict[str, int]:
        """The leaf of each column at the top level that is not nested, and whose name no other has."""
        schema, found = self._file.metadata.schema, {}
        for number in range(len(schema)):
            column = schema.column(number)
            flat = column.max_repetition_level == 0 and column.max_definition_level <= 1
            found[column.path] = number if flat and column.path == column.name and column.path not in found else -1
        return {path: number for path, number in found.items() if number >= 0}

    @cached_property
    def _footer(self) -> Fields:
        out = io.BytesIO()
        self._file.metadata.write_metadata_file(out)  # the very bytes of the file's footer, which it holds anyway
        return thrift.read(out.getvalue(), len(_MAGIC))[0]

    def _group(self, number: int) -> Fields:
        group: Fields = self._footer[_ROW_GROUPS][1][1][number]
        return group

    def _chunks(self, number: int, rows: int, places: Iterable[tuple[str, int]]) -> list[_Chunk] | None:
        found = []
        for name, place in places:
            told: Fields = self._group(number)[_CHUNKS][1][1][place]
            if _OFFSETS_AT not in told or _META not in told:
                return None
            at, size = told[_OFFSETS_AT][1], told[_OFFSETS_SIZE][1]
            found.append((name, place, told[_META][1], at, size))
        indexes = self._ranges([(at, size) for *_, at, size in found])
        chunks = []
        for (name, place, meta, _, _), index in zip(found, indexes, strict=True):
            locations = thrift.read(index)[0][_LOCATIONS][1][1]
            of = [[one[each][1] for one in locations] for each in (_PAGE_AT, _PAGE_SIZE, _PAGE_ROW)]
            starts, sizes, first = (np.array(one, dtype=np.int64) for one in of)
            begin = min(meta[_DATA_AT][1], meta[_DICTIONARY_AT][1] if _DICTIONARY_AT in meta else meta[_DATA_AT][1])
            chunk = _Chunk(name, place, begin, starts, sizes, np.append(first, rows))
            if not _is_sound(chunk, begin + meta[_PACKED][1]):
                return None
            chunks.append(chunk)
        return chunks

    def _columns(
        self, number: int, chunks: Sequence[_Chunk], pages: Sequence[Longs], wanted: Longs
    ) -> dict[str, pa.Array] | None:
        """Of chunks whose `pages` have the same rows."""
        spans = [
            [(int(chunk.starts[one]), int(chunk.sizes[one])) for one in some]
            for chunk, some in zip(chunks, pages, strict=True)
        ]
        read = iter(self._ranges([one for each in spans for one in each]))
        parts = [[next(read) for _ in each] for each in spans]
        first, last = chunks[0].rows[pages[0]], chunks[0].rows[pages[0] + 1]
        laid: list[tuple[_Chunk, bytes, list[bytes]]] = []
        for chunk, each in zip(chunks, parts, strict=True):
            told = [_told(part) for part in each]
            if [one.rows for one in told] != (last - first).tolist():
                return None
            dictionary = b""
            if any(one.encoding in _BY_DICTIONARY for one in told):  # writers that gave it up go on without
                (dictionary,) = self._ranges([(chunk.begin, int(chunk.starts[0]) - chunk.begin)])
                if _page(dictionary)[_PAGE_TYPE][1] != _DICTIONARY_PAGE:
                    return None
            laid.append((chunk, dictionary, each))
        rows = int((last - first).sum())
        with pq.ParquetFile(pa.BufferReader(self._laid(number, laid, rows)), coerce_int96_timestamp_unit="us") as file:
            table = file.read(columns=[chunk.name for chunk in chunks], use_threads=False)
        if table.num_rows != rows:
            return None
        # Where a wanted row lies among those of the pages that were read.
        page = np.searchsorted(first, wanted, "right") - 1
        spots = (np.cumsum(last - first) - (last - first))[page] + wanted - first[page]
        taken = table.take(pa.array(spots)).combine_chunks()
        return {chunk.name: _array(taken.column(chunk.name)) for chunk in chunks}

    def _laid(self, number: int, parts: Sequence[tuple[_Chunk, bytes, list[bytes]]], rows: int) -> bytes:
        """A file of these chunks, each a dictionary and pages. Its footer is the file's own, with this row group
        alone."""
        kind, bare = self._bare(number)
        chunks, body = list(bare), [_MAGIC]
        at = len(_MAGIC)
        for chunk, dictionary, pages in parts:
            size = len(dictionary) + sum(map(len, pages))
            meta = bare[chunk.number][_META][1] | {
                _VALUES: (I64, rows),
                _PACKED: (I64, size),
                _DATA_AT: (I64, at + len(dictionary)),
            }
            if dictionary:
                meta[_DICTIONARY_AT] = I64, at
            chunks[chunk.number] = bare[chunk.number] | {_META: (thrift.STRUCT, meta)}
            body += dictionary, *pages
            at += size
        group = {
            _CHUNKS: (thrift.LIST, (kind, chunks)),
            _GROUP_BYTES: (I64, at - len(_MAGIC)),
            _GROUP_ROWS: (I64, rows),
        }
        groups = thrift.LIST, (thrift.STRUCT, [group])
        footer = thrift.write(self._footer | {_ROWS: (I64, rows), _ROW_GROUPS: groups})
        return b"".join((*body, footer, len(footer).to_bytes(4, "little"), _MAGIC))

    def _bare(self, number: int) -> tuple[int, list[Fields]]:
        """The chunks of a row group without what is of all its rows, or lies elsewhere."""
        found = self._bared.get(number)
        if found is None:
            kind, chunks = self._group(number)[_CHUNKS][1]
            bare = []
            for one in chunks:
                meta = {field: told for field, told in one[_META][1].items() if field in _META_KEPT}
                bare.append({_CHUNK_AT: (I64, 0), _META: (one[_META][0], meta)})
            found = self._bared[number] = kind, bare
        return found

    def _ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """(offset, length) each; neighbours are read at once."""
        joined: list[tuple[int, int]] = []
        for at, size in sorted(ranges):
            if joined and at <= joined[-1][1] + self._hole_bytes:
                joined[-1] = joined[-1][0], max(joined[-1][1], at + size)
            else:
                joined.append((at, at + size))
        read = [(start, self._source.read_at(end - start, start)) for start, end in joined]
        found = []
        for at, size in ranges:
            start, data = next(one for one in reversed(read) if one[0] <= at)
            part = data[at - start : at - start + size]
            if len(part) != size:
                raise ValueError(f"{size} bytes at {at} are not all there")
            found.append(part)
        return found


def _is_sound(chunk: _Chunk, end: int) -> bool:
    """Whether the page index can be true."""
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


def _page(data: bytes) -> Fields:
    """The header of the one page that these bytes are. ValueError where they are something else."""
    header, at = thrift.read(data)
    if at + header[_PAGE_PACKED][1] != len(data):
        raise ValueError("a page ends elsewhere than the page index says")
    return header


def _array(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


class _Told(NamedTuple):
    """By a data page's header."""

    rows: int
    encoding: int


def _told(data: bytes) -> _Told:
    """Of a data page of a flat column. KeyError for another page."""
    header = _page(data)
    if header[_PAGE_TYPE][1] == _DATA_PAGE:
        page = header[_DATA][1]
        return _Told(page[1][1], page[2][1])
    page = header[_DATA_2][1]
    return _Told(page[3][1], page[4][1])
