"""An index file: the entries of an index for some data files, in a self-describing Puffin file.

Blob 0 is the files table, which lists the data files in the order of blob 1. Blob 1 has the format of the index kind
(`index/kinds`). Properties contain the table and the definition, so that the list of index files in the pointer store
can be rebuilt from the files.

The checksums and lengths of the footer and of the files table are checked. If a check fails, Corrupt is raised with the
file's location. The kind's blob has its own checks. An unknown version, which another server wrote, is not damage and
has a separate error. `docs/reference/index-format.md` specifies every byte. The functions have no side effects.
"""

from __future__ import annotations

import importlib.metadata
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

from seamark.formats.iceberg.files.puffin import (
    MAGIC,
    Blob,
    Footer,
    Part,
    PuffinBlobMetadata,
    read_footer,
    read_footer_size,
    write_puffin,
)
from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.runtime.errors import Corrupt

Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

FILES_TYPE = "seamark-files-v1"
_FILES_VERSION = 1
PATHS_LIMIT_BYTES = 1 << 30
"""The maximum decompressed size of a files table in bytes."""

_CREATED_BY = "created-by"
_TABLE_UUID, _DEFINITION = "seamark.table-uuid", "seamark.definition"
_LEVEL, _ROWS, _FILES = "seamark.level", "seamark.rows", "seamark.files"
_CHECKSUM = "seamark.checksum"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_TYPE = re.compile(r"seamark-([a-z]+)-v([0-9]+)")
_HEAD = struct.Struct("<QQQQII16x")
"""The head of a files table.

Its fields are the number of files and of rows, the size of the decompressed and of the stored paths, the CRC-32
of the arrays and of the stored paths, and zeros.
"""
_HEAD_CHECKSUM = struct.Struct("<I")
"""The CRC-32 of the preceding head.

Together with the file's magic, the head fills a cache line, so that the arrays are aligned.
"""
_HEAD_BYTES = _HEAD.size + _HEAD_CHECKSUM.size
_ARRAY_BYTES_PER_FILE = 32
"""The size of a file's id, of two words, and of its row count and its size, of one word each."""
_SHOWN_MAX = 100


@dataclass(frozen=True, eq=False)
class FilesTable:
    """The data files of an index file, in the order of the kind's blob.

    The paths are decompressed at the first access.

    Attributes:
        ids: uint64[n, 2], the ids of the files (`hashing.compute_file_ids`).
        records: uint64[n], the row counts.
        sizes: uint64[n], the sizes in bytes.
        stored_paths: One zstd frame with the lengths, uint32[n], and the UTF-8 of all paths.
        paths_bytes: The decompressed size of the paths.
        location: The location of the index file, for messages.
    """

    ids: Words
    records: Words
    sizes: Words
    stored_paths: memoryview
    paths_bytes: int
    location: str

    @staticmethod
    def from_columns(ids: Words, records: Words, sizes: Words, paths: Sequence[str]) -> FilesTable:
        """Create a table of some data files. Each argument has a value for each file.

        Args:
            ids: The ids of the files, two numbers each (`compute_file_ids`).
            records: The numbers of rows.
            sizes: The sizes in bytes.
            paths: The paths. They are stored compressed, with their lengths before them.

        Raises:
            ValueError: The arguments have different lengths.
        """
        encoded_paths = [path.encode() for path in paths]
        lengths = np.array([len(path) for path in encoded_paths], dtype="<u4")
        heap = lengths.tobytes() + b"".join(encoded_paths)
        compressed_paths = memoryview(pa.Codec("zstd").compress(heap, asbytes=True))
        table = FilesTable(
            np.ascontiguousarray(ids, dtype="<u8").reshape(-1, 2),
            np.ascontiguousarray(records, dtype="<u8"),
            np.ascontiguousarray(sizes, dtype="<u8"),
            compressed_paths,
            len(heap),
            "a new index file",
        )
        if not len(table.ids) == len(table.records) == len(table.sizes) == len(encoded_paths):
            raise ValueError(
                f"{len(table.ids)} ids, {len(table.records)} record counts, {len(table.sizes)} sizes and "
                f"{len(encoded_paths)} paths do not describe the same data files"
            )
        return table

    def __len__(self) -> int:
        return len(self.records)

    @property
    def rows(self) -> int:
        return int(self.records.sum())

    @cached_property
    def paths(self) -> list[str]:
        """The paths of the data files.

        Raises:
            Corrupt: The decompressed data contradict the table.
        """
        try:
            heap = memoryview(pa.Codec("zstd").decompress(self.stored_paths, self.paths_bytes, asbytes=True))
            lengths = np.frombuffer(heap, dtype="<u4", count=len(self))
            lengths_bytes = lengths.nbytes  # The paths follow their lengths.
            ends = (lengths_bytes + np.cumsum(lengths, dtype=np.int64)).tolist()
            if len(heap) != (ends[-1] if ends else 0):
                raise ValueError(f"the paths have {len(heap)} bytes, but the lengths state {ends[-1] if ends else 0}")
            starts = [lengths_bytes, *ends]
            return [str(heap[start:end], "utf-8") for start, end in zip(starts, ends, strict=False)]
        except (OSError, ValueError) as error:
            raise Corrupt(f"{self.location}: the paths of the files table cannot be read: {error}") from None

    @staticmethod
    def merge(parts: Iterable[tuple[FilesTable, Mask]]) -> FilesTable:
        """Return a table with some files of each table, in order.

        Args:
            parts: The tables, each with the files to keep as bool[n].
        """
        kept_rows = [(table, np.flatnonzero(keep)) for table, keep in parts]
        no_words = np.empty(0, dtype="<u8")  # It makes the concatenation of no tables possible.
        return FilesTable.from_columns(
            np.concatenate([no_words.reshape(0, 2), *(table.ids[rows] for table, rows in kept_rows)]),
            np.concatenate([no_words, *(table.records[rows] for table, rows in kept_rows)]),
            np.concatenate([no_words, *(table.sizes[rows] for table, rows in kept_rows)]),
            [table.paths[row] for table, rows in kept_rows for row in rows.tolist()],
        )

    def encode(self, alignment: int) -> list[Part]:
        """Encode the table as blob 0, the first blob of an index file.

        Zeros follow the table, so that the next blob begins at a multiple of `alignment` bytes in the file.
        """
        arrays = [array.reshape(-1).view(np.uint8).data for array in (self.ids, self.records, self.sizes)]
        checksum = 0
        for array in arrays:
            checksum = isal_zlib.crc32(array, checksum)
        paths_checksum = isal_zlib.crc32(self.stored_paths)
        head = _HEAD.pack(len(self), self.rows, self.paths_bytes, len(self.stored_paths), checksum, paths_checksum)
        head += _HEAD_CHECKSUM.pack(isal_zlib.crc32(head))
        size = len(MAGIC) + len(head) + sum(map(len, arrays)) + len(self.stored_paths)
        return [head, *arrays, self.stored_paths, bytes(-size % alignment)]

    @staticmethod
    def decode(blob: Part, location: str) -> FilesTable:
        """Decode the table from blob 0, the first blob of an index file. The result refers to the bytes of the blob.

        Raises:
            Corrupt: A length or a checksum is wrong.
        """
        data = memoryview(blob)
        if len(data) < _HEAD_BYTES:
            raise Corrupt(f"{location}: a files table cannot have only {len(data)} bytes")
        if _HEAD_CHECKSUM.unpack_from(data, _HEAD.size)[0] != isal_zlib.crc32(data[: _HEAD.size]):
            raise Corrupt(f"{location}: the head of the files table does not match its checksum")
        files, rows, paths_bytes, stored_bytes, arrays_checksum, paths_checksum = _HEAD.unpack_from(data)
        arrays_end = _HEAD_BYTES + _ARRAY_BYTES_PER_FILE * files
        if arrays_end + stored_bytes > len(data) or paths_bytes > PATHS_LIMIT_BYTES:
            raise Corrupt(f"{location}: a files table of {files} files does not fit into {len(data)} bytes")
        arrays, compressed_paths = data[_HEAD_BYTES:arrays_end], data[arrays_end : arrays_end + stored_bytes]
        if isal_zlib.crc32(arrays) != arrays_checksum or isal_zlib.crc32(compressed_paths) != paths_checksum:
            raise Corrupt(f"{location}: the files table does not match its checksum")
        words = np.frombuffer(arrays, dtype="<u8")
        ids, records, sizes = words[: 2 * files].reshape(-1, 2), words[2 * files : 3 * files], words[3 * files :]
        table = FilesTable(ids, records, sizes, compressed_paths, paths_bytes, location)
        if table.rows != rows:
            raise Corrupt(f"{location}: the files table has {table.rows} rows instead of {rows}")
        return table


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The description of an index file, from its footer.

    Offsets and lengths are in bytes.
    """

    location: str
    kind: str
    table_uuid: str
    definition: str
    """The id of the index definition (`definitions.py`)."""
    field_ids: tuple[int, ...]
    level: int
    rows: int
    files: int
    created_by: str
    size_bytes: int
    """The size of the whole file."""
    files_offset: int
    files_length: int
    offset: int
    """The position of the kind's blob in the file."""
    length: int


@dataclass(frozen=True, slots=True)
class IndexFile:
    header: IndexHeader
    files: FilesTable
    blob: memoryview
    """The kind's blob: a slice of the opened memory that begins at the position `header.offset` of the file."""


def assemble_index_file(
    definition: str,
    kind: str,
    files: FilesTable,
    blob: Iterable[Part],
    *,
    table_uuid: str,
    field_ids: Sequence[int],
    level: int = 0,
) -> Iterator[Part]:
    """Yield the parts of an index file.

    Args:
        definition: The id of the index definition.
        kind: The name of the index kind.
        files: The data files.
        blob: The parts of the kind's blob, which are consumed while the file is written.
        table_uuid: The UUID of the table.
        field_ids: The field ids of the indexed columns.
        level: 0 for a new file. Each merge of files adds 1.
    """
    blob_type, fields = f"seamark-{kind}-v{KINDS[kind].version}", tuple(field_ids)
    properties = {
        _CREATED_BY: _describe_writer(),
        _TABLE_UUID: table_uuid,
        _DEFINITION: definition,
        _LEVEL: str(level),
        _ROWS: str(files.rows),
        _FILES: str(len(files)),
    }
    properties[_CHECKSUM] = _compute_checksum(properties, blob_type, fields)
    blobs = (Blob(FILES_TYPE, files.encode(KINDS[kind].alignment), fields), Blob(blob_type, blob, fields))
    return write_puffin(blobs, properties)


@cache
def _describe_writer() -> str:
    """Return the name and version of the program that writes the file.

    The result is cached, because reading the version parses the metadata of the Python package, which takes as long as
    writing a small file.
    """
    return f"Seamark {importlib.metadata.version('seamark')}"


def _compute_checksum(properties: dict[str, str], blob_type: str, fields: tuple[int, ...]) -> str:
    """Return the CRC-32 of the footer's properties, blob type and field ids, as 8 hexadecimal digits.

    Offsets and lengths are not included, because they are checked separately.
    """
    values = [f"{key}={properties[key]}" for key in sorted(properties) if key != _CHECKSUM]
    text = "\n".join([*values, blob_type, ",".join(map(str, fields))])
    return f"{isal_zlib.crc32(text.encode()):08x}"


def read_header(tail: Part, file_size: int, location: str) -> IndexHeader:
    """Read the header of an index file.

    Args:
        tail: The last bytes of the file, at least as many as `puffin.read_footer_size` returns.
        file_size: The size of the file in bytes.
        location: The location of the file, for errors.

    Raises:
        Corrupt: The bytes are not the footer of an index file.
        UnknownVersion: A server of another version wrote the file.
    """
    footer = read_footer(tail, file_size, location)
    if len(footer.blobs) != 2:
        raise Corrupt(f"{location}: an index file has two blobs, not {len(footer.blobs)}")
    table, blob = footer.blobs
    kind = _get_index_kind(table, blob, location)
    _check_layout(footer, file_size - read_footer_size(tail, location), location)
    properties = footer.properties
    missing = [
        name for name in (_CREATED_BY, _TABLE_UUID, _DEFINITION, _LEVEL, _ROWS, _FILES) if name not in properties
    ]
    if missing:
        raise Corrupt(f"{location}: the footer lacks {', '.join(missing)}")
    if properties.get(_CHECKSUM) != _compute_checksum(properties, blob.type, blob.fields):
        raise Corrupt(f"{location}: the footer does not match its checksum")
    return IndexHeader(
        location=location,
        kind=kind,
        table_uuid=properties[_TABLE_UUID],
        definition=properties[_DEFINITION],
        field_ids=blob.fields,
        level=_read_number(properties, _LEVEL, location),
        rows=_read_number(properties, _ROWS, location),
        files=_read_number(properties, _FILES, location),
        created_by=properties[_CREATED_BY],
        size_bytes=file_size,
        files_offset=table.offset,
        files_length=table.length,
        offset=blob.offset,
        length=blob.length,
    )


def _get_index_kind(table: PuffinBlobMetadata, blob: PuffinBlobMetadata, location: str) -> str:
    """Return the index kind of a file, after checking the types and versions of both blobs.

    Raises:
        Corrupt: A blob has a type that is not in index files.
        UnknownVersion: A server of another version wrote a blob.
    """
    for candidate in (table, blob):
        match = _TYPE.fullmatch(candidate.type)
        kind, version = (match[1], int(match[2])) if match else ("", 0)
        supported_version = _find_supported_version(kind, is_files_table=candidate is table)
        if supported_version is None:
            raise Corrupt(f"{location}: a blob of type {candidate.type!r} does not belong in an index file")
        if version != supported_version:
            raise UnknownVersion(
                f"{location}: {candidate.type!r} has version {version}; this server reads version {supported_version}"
            )
    return kind


def _find_supported_version(kind: str, *, is_files_table: bool) -> int | None:
    """Return the supported version of the files table or of a kind's blob, or None if the blob has another type."""
    if is_files_table:
        return _FILES_VERSION if kind == "files" else None
    return KINDS[kind].version if kind in KINDS else None


def _check_layout(footer: Footer, footer_offset: int, location: str) -> None:
    """Check that the two blobs of an index file follow each other and fill the file up to the footer.

    They must have no compression, and must be about the same columns.

    Raises:
        Corrupt: The file has another layout.
    """
    table, blob = footer.blobs
    edges = (table.offset, table.offset + table.length, blob.offset + blob.length)
    if edges != (len(MAGIC), blob.offset, footer_offset):
        raise Corrupt(f"{location}: its blobs do not fill it from byte {len(MAGIC)} to the footer at {footer_offset}")
    if codec := table.compression_codec or blob.compression_codec:
        raise Corrupt(f"{location}: a blob is compressed with {codec[:_SHOWN_MAX]!r}")
    if table.fields != blob.fields:
        table_fields, blob_fields = str(table.fields)[:_SHOWN_MAX], str(blob.fields)[:_SHOWN_MAX]
        raise Corrupt(f"{location}: its blobs have the fields {table_fields} and {blob_fields}")


def _read_number(properties: dict[str, str], name: str, location: str) -> int:
    if not _NUMBER.fullmatch(properties[name]):
        raise Corrupt(f"{location}: {name} is not a number: {properties[name]!r}")
    return int(properties[name])


def read_files(blob: Part, header: IndexHeader) -> FilesTable:
    """Read the table of data files from `blob`, the first blob of an index file, and compare it with the footer.

    Raises:
        Corrupt: The table is damaged, or its numbers of files and rows are not those of the footer.
    """
    table = FilesTable.decode(blob, header.location)
    if (len(table), table.rows) != (header.files, header.rows):
        counts = f"{len(table)} files of {table.rows} rows"
        raise Corrupt(
            f"{header.location}: the files table has {counts}, but the footer states "
            f"{header.files} files of {header.rows} rows"
        )
    return table


def open_index_file(data: Part, location: str) -> IndexFile:
    """Open a complete file, as bytes or memory-mapped. The result refers to `data`.

    Only the footer and the files table are read.
    """
    memory = memoryview(data).cast("B")
    header = read_header(memory, len(memory), location)
    files = read_files(memory[header.files_offset : header.files_offset + header.files_length], header)
    return IndexFile(header, files, memory[header.offset : header.offset + header.length])
