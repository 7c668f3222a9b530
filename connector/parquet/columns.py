"""Reads columns of a data file by Iceberg field id, for indexes. Rows keep their physical positions.

The module returns the values that all readers of the table see, or raises Unreadable, because an index of wrong values
would hide rows, while a data file without an index is only read more often. Columns are matched by the ids in the
Parquet schema (Iceberg spec: "Column Projection"). In a file without ids, for example an imported file, they are
matched by a name mapping. A column that the file does not have is null.

In an encrypted file, only unencrypted columns are read, because an index of an encrypted column would store its values
in an unencrypted file. Only the footer is decrypted.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import fs

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.copy.source import SourceFile
from seamark.connector.parquet.encryption.footers import SIGNATURE_BYTES, FileKeys, is_signed
from seamark.formats.iceberg.files.budget import create_decoding_budget
from seamark.formats.iceberg.files.footer import ENCRYPTED_MAGIC, END_BYTES, MAGIC
from seamark.formats.iceberg.files.parquet import AmbiguousColumn, Unreadable, apply_name_mapping, find_columns
from seamark.formats.iceberg.files.parquet_reading import FOOTER_LIMIT_BYTES, BoundedParquet
from seamark.formats.iceberg.metadata.name_mapping import NameMapping
from seamark.formats.iceberg.types.schema import Schema

DECODED_BYTES_MAX = 4 << 30
"""The maximum size of the decoded columns of one file in memory. A file that needs more memory is not indexed."""
_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class Projection:
    """The rules by which columns of a table are matched with the columns of its files.

    Attributes:
        partitioned: The ids of the columns with an identity field in the file's partition spec. If the file does not
            have one of these columns, readers take its values from the partition.
        mapping: The name mapping for files without field ids. If it is None, these files are not read.
    """

    schema: Schema
    partitioned: frozenset[int] = field(default_factory=frozenset)
    mapping: NameMapping | None = None


def read_columns(
    path: str,
    column_ids: Iterable[int],
    projection: Projection,
    *,
    filesystem: fs.FileSystem | Storage,
    rows: int,
    keys: Callable[[], FileKeys | None] = lambda: None,
    decoded_bytes_max: int | None = None,
) -> dict[int, pa.ChunkedArray]:
    """Return the columns by field id. Each column has `rows` rows in the order of the file.

    Args:
        path: The path on the file system, or a location if `filesystem` is a Storage.
        rows: The number of rows of the file, according to its manifest entry.
        keys: A function that returns the keys. It is called only for an encrypted file.
        decoded_bytes_max: The maximum size of the decoded columns in memory, or None for `DECODED_BYTES_MAX`.

    Raises:
        Unreadable: The file cannot be read, the number of rows differs, the columns exceed the memory limit, an id does
            not identify one column, one of the columns is encrypted, the footer is encrypted and there are no keys, or
            the file lacks a column for which readers do not see null.
    """
    distinct_ids = list(dict.fromkeys(column_ids))
    limit_bytes = DECODED_BYTES_MAX if decoded_bytes_max is None else decoded_bytes_max
    try:
        with filesystem.open_input_file(path) as source:
            try:
                columns = _read_plain_columns(source, path, distinct_ids, projection, rows, limit_bytes)
            except (Unreadable, pa.ArrowException, OSError):
                if not _is_encrypted(source):
                    raise
                with _open_with_plain_footer(source, path, distinct_ids, keys()) as plain_source:
                    columns = _read_plain_columns(plain_source, path, distinct_ids, projection, rows, limit_bytes)
    except AmbiguousColumn as error:
        raise Unreadable(path, str(error)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Unreadable(path, f"the file cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from error
    for column_id in distinct_ids:
        if column_id not in columns:
            if reason := _explain_non_null(column_id, projection):
                raise Unreadable(path, reason)
            columns[column_id] = pa.chunked_array([pa.nulls(rows)])
    return {column_id: columns[column_id] for column_id in distinct_ids}


def _read_plain_columns(
    source: pa.NativeFile, path: str, column_ids: list[int], projection: Projection, rows: int, limit_bytes: int
) -> dict[int, pa.ChunkedArray]:
    """Return those of the requested columns that the file has, by field id. The footer must not be encrypted."""
    file = BoundedParquet(source, path, create_decoding_budget(limit_bytes))
    if file.rows != rows:
        raise Unreadable(path, f"the file has {file.rows} rows; the manifest entry says {rows}")
    return file.read_plain_columns(find_columns(apply_name_mapping(list(file.schema), projection.mapping), column_ids))


def _is_encrypted(source: pa.NativeFile) -> bool:
    size = source.size()
    if size < END_BYTES:
        return False
    # A file ends with the length of the footer and a magic number, of 4 bytes each.
    end = source.read_at(END_BYTES, size - END_BYTES)
    footer_length, magic = end[: -len(MAGIC)], end[-len(MAGIC) :]
    if magic == ENCRYPTED_MAGIC:
        return True
    length = int.from_bytes(footer_length, "little")
    if magic != MAGIC or not SIGNATURE_BYTES < length <= min(FOOTER_LIMIT_BYTES, size - END_BYTES):
        return False  # The error is reported when the columns are read.
    try:
        return is_signed(source.read_at(length, size - END_BYTES - length))
    except ValueError:
        return False


def _open_with_plain_footer(
    source: pa.NativeFile, path: str, column_ids: Iterable[int], keys: FileKeys | None
) -> pa.PythonFile:
    """Return the file with a decrypted footer, after a check that these columns are not encrypted.

    The end of the file is replaced by the decrypted footer, its length and the magic number of unencrypted files.

    Raises:
        Unreadable: The file cannot be read, or one of the columns is encrypted or may be encrypted.
    """
    with SourceFile(path, source, keys=keys) as file:
        encryption, needed_ids = file.encryption, set(column_ids)
        assert encryption is not None
        for number, leaf in enumerate(file.leaves):
            is_secret = any(ciphers[number] is not None for ciphers in encryption.ciphers)
            if is_secret and (None in leaf.ids or needed_ids.intersection(leaf.ids)):
                raise Unreadable(
                    path,
                    f"the column {leaf.path} is encrypted, and an index would reveal its values"
                    if None not in leaf.ids
                    else "the file is encrypted and has no field ids",
                )
        footer = encryption.plain
        tail = footer + len(footer).to_bytes(4, "little") + MAGIC
        return pa.PythonFile(
            io.BufferedReader(_FileWithReplacedEnd(source, file.data_end, tail), _BLOCK_BYTES), mode="r"
        )


class _FileWithReplacedEnd(io.RawIOBase):
    """A read-only view of a file whose bytes from `start` on are replaced by `tail`."""

    def __init__(self, source: pa.NativeFile, start: int, tail: bytes) -> None:
        self._source, self._start, self._tail, self._position = source, start, tail, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._start + len(self._tail)}
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position < self._start:
            data = self._source.read_at(min(len(buffer), self._start - self._position), self._position)
        else:
            data = self._tail[self._position - self._start :][: len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _explain_non_null(column_id: int, projection: Projection) -> str:
    """Return the reason why readers do not see null for a column that the file lacks, or "" if they see null."""
    column = projection.schema.column(column_id)
    if column is None:
        return f"the table's schema has no column {column_id}"
    if column_id in projection.partitioned:
        return f"the file lacks column {column.name}, which readers take from its partition"
    if column.initial_default is not None:
        return f"the file lacks column {column.name}, which readers fill with its default"
    return ""
