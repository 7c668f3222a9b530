"""The port that encodes rows for the log, and as Parquet files of a table.

The connector implements the port. The server does not depend on the connector (`metaserver/runtime/extensions.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.streams.stored_rows import StoredRows

RowKey: TypeAlias = tuple[tuple[int, str], ...]
"""The id and the family of the type of each key column. It is empty for rows without a key.

Rows with the same key columns and the same values in them are in the same shard.
"""


class RowSlice(NamedTuple):
    """Consecutive rows of a batch of the log.

    Attributes:
        payload: The batch, as `RowFiles.pack` returns it.
        first: The index of the first row in the batch.
        rows: The number of rows.
        kinds: The kind (`RowKind`) of each row. It is empty if all rows are inserts.
    """

    payload: bytes
    first: int
    rows: int
    kinds: bytes = b""


class EncodedFile(msgspec.Struct, frozen=True):
    """A Parquet file that is not stored yet.

    Attributes:
        content_file: The ContentFile of the REST specification as JSON.
        location: The location at which to store the file.
        data: The bytes of the file.
        rows: The number of rows.
    """

    location: str
    data: bytes
    content_file: bytes
    rows: int


class EncodedIndexFile(NamedTuple):
    """An index file that is not stored yet."""

    location: str
    data: bytes


KeyedRows: TypeAlias = Any
"""The keys of rows of a table with a key, and the position of each row in a file. Only the implementation reads it."""


class EncodedDeletes(NamedTuple):
    """The deletes of stored rows that new rows of a table with a key replace.

    Attributes:
        files: The locations and the data of the files to store.
        content_files: The ContentFiles of the delete files as JSON. A stored file may contain several of them.
        removed: The delete files and deletion vectors that the new deletes replace. Each is a location and, for a
            deletion vector, an offset in the file.
        scope: The filter of the rows in which replaced rows were searched, as JSON. The commit fails if another commit
            has changed such rows. It is empty for deletes of fresh files, which no commit contains.
    """

    files: list[tuple[str, bytes]]
    content_files: list[bytes]
    removed: list[tuple[str, int | None]]
    scope: bytes


class GetLimits(NamedTuple):
    """The limits of one request for rows by key.

    Attributes:
        rows_max: The maximum number of rows.
        bytes_max: The maximum size of the rows in memory.
        files_max: The maximum number of files to read.
    """

    rows_max: int
    bytes_max: int
    files_max: int


class RowFiles(Protocol):
    """The port that encodes and decodes rows.

    The methods can be called in any thread, and may take long for many rows. All methods except `encode_deletes` and
    `get` are pure.
    """

    def conform(
        self, rows: pa.RecordBatch, metadata: TableMetadata, kinds: bytes = b"", key: Sequence[str] = ()
    ) -> pa.RecordBatch:
        """Convert rows to the columns of the table's current schema.

        Args:
            rows: The rows.
            metadata: The table's metadata.
            kinds: The kind of each row. It is empty if all rows are inserts. A delete needs only the key columns.
            key: The names of the key columns. They are empty for a table without a key.

        Raises:
            BadRequest: A row does not fit the schema, or has no key. The message contains the column, the row and the
                value.
        """

    def compute_shards(
        self, rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str], count: int
    ) -> list[int]:
        """Return the shard, below `count`, of each conformed row. Rows with the same key are in the same shard.

        Args:
            rows: Rows from `conform`.
            metadata: The table's metadata.
            key: The names of the key columns.
            count: The number of shards.
        """

    def pack(self, rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str] = ()) -> bytes:
        """Encode conformed rows as a payload of the log, which contains the id of their schema and their key.

        Args:
            rows: Rows from `conform`.
            metadata: The table's metadata.
            key: The names of the key columns. They are empty for a table without a key.
        """

    def read_schema_id(self, payload: bytes) -> int:
        """Return the id of the table's schema with which rows were packed."""

    def list_keys(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> frozenset[RowKey]:
        """Return the keys by which the rows replace stored rows: those that the table had when the rows were packed.

        Raises:
            BadRequest: The table no longer has the schema of a slice.
        """

    def decode(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> list[pa.RecordBatch]:
        """Return a batch for each slice, with the columns of the table's current schema and their field ids.

        Args:
            rows: Rows that were packed with the current schema of the table, or with an earlier schema.
            metadata: The table's metadata.

        Raises:
            BadRequest: The table no longer has the schema of a slice.
        """

    def encode(self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None) -> list[EncodedFile]:
        """Encode rows as Parquet files, at least one for each partition.

        Args:
            rows: Rows that were packed with the current schema of the table, or with an earlier schema.
            metadata: The table's metadata.
            folder: The folder of the files, or None for the folders of the table's data files.

        Raises:
            BadRequest: The table has a property that writers do not support.
        """

    def encode_keyed(
        self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None, key: Sequence[str]
    ) -> tuple[list[EncodedFile], KeyedRows]:
        """Encode the rows that no later row replaces as Parquet files, and return the files and the keys of all rows.

        Each row replaces earlier rows by the key with which it was packed. Rows with an earlier key of the table
        precede rows with a later key.

        Args:
            rows: Rows that were packed with the current schema of the table, or with an earlier schema. The rows of
                each shard have the order of the log.
            metadata: The table's metadata.
            folder: The folder for fresh files (files of rows that no commit has added yet), or None for the folders of
                the table's data files. The rows of fresh files must all have the same key.
            key: The names of the current key columns. They are empty for a table without a valid key.

        Raises:
            BadRequest: The table has a property that writers do not support, or the key is invalid.
        """

    def encode_index_files(self, files: Sequence[EncodedFile], metadata: TableMetadata) -> list[EncodedIndexFile]:
        """Encode index files that describe new data files, for the indexes of the table.

        Files that cannot be indexed are skipped.
        """

    def encode_deletes(
        self, parts: Sequence[KeyedRows], metadata: TableMetadata, stored_rows: StoredRows, folder: str | None
    ) -> EncodedDeletes:
        """Encode the deletes of the rows that keyed rows replace in the table's files and in earlier fresh files.

        Args:
            parts: The keyed rows, in the order of the log. The call stores in them which rows they replace, so that
                later calls need not search again.
            metadata: The table's metadata.
            stored_rows: Finds rows in the files of the current snapshot. It blocks, so this method must not be called
                on the event loop.
            folder: The folder for fresh files, or None for a commit.

        Raises:
            BadRequest: The table does not support deletes.
            Corrupt: A file of the table cannot be read.
        """

    def get(
        self,
        keys: pa.RecordBatch,
        columns: Sequence[str],
        metadata: TableMetadata,
        stored_rows: StoredRows,
        limits: GetLimits,
    ) -> tuple[pa.Table, list[int]]:
        """Return the rows that have one of the keys in the current snapshot, in the order of the keys.

        Args:
            keys: The keys, with the names of the key columns. A key may be repeated.
            columns: The names of the columns to return.
            metadata: The table's metadata.
            stored_rows: Finds rows in the files of the current snapshot. It blocks, so this method must not be called
                on the event loop.
            limits: The maximum numbers of rows, bytes and files.

        Returns:
            The rows, and the indexes of the keys without a row in ascending order. A repeated key has its first index.

        Raises:
            BadRequest: The keys do not fit the columns, or the rows are encrypted.
            TooLarge: A limit is exceeded.
            Corrupt: A file of the table cannot be read.
        """


class ImportedRowFiles:
    """An implementation of `RowFiles` with the functions of a module, which the first call imports."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name

    @cached_property
    def _module(self) -> Any:
        return importlib.import_module(self._module_name)

    def conform(
        self, rows: pa.RecordBatch, metadata: TableMetadata, kinds: bytes = b"", key: Sequence[str] = ()
    ) -> pa.RecordBatch:
        return self._module.conform_rows(rows, metadata, kinds, key)

    def compute_shards(
        self, rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str], count: int
    ) -> list[int]:
        numbers: list[int] = self._module.shard_rows(rows, metadata, key, count)
        return numbers

    def pack(self, rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str] = ()) -> bytes:
        packed_rows: bytes = self._module.pack_rows(rows, metadata, key)
        return packed_rows

    def read_schema_id(self, payload: bytes) -> int:
        schema_id: int = self._module.read_schema_id(payload)
        return schema_id

    def list_keys(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> frozenset[RowKey]:
        keys: frozenset[RowKey] = self._module.list_keys(rows, metadata)
        return keys

    def decode(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> list[pa.RecordBatch]:
        return list(self._module.decode_rows(rows, metadata))

    def encode(self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None) -> list[EncodedFile]:
        return [EncodedFile(*file) for file in self._module.encode_rows(rows, metadata, folder)]

    def encode_keyed(
        self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None, key: Sequence[str]
    ) -> tuple[list[EncodedFile], KeyedRows]:
        files, keyed_rows = self._module.encode_keyed_rows(rows, metadata, folder, key)
        return [EncodedFile(*file) for file in files], keyed_rows

    def encode_index_files(self, files: Sequence[EncodedFile], metadata: TableMetadata) -> list[EncodedIndexFile]:
        return [EncodedIndexFile(*file) for file in self._module.encode_index_files(files, metadata)]

    def encode_deletes(
        self, parts: Sequence[KeyedRows], metadata: TableMetadata, stored_rows: StoredRows, folder: str | None
    ) -> EncodedDeletes:
        return EncodedDeletes(*self._module.encode_row_deletes(parts, metadata, stored_rows, folder))

    def get(
        self,
        keys: pa.RecordBatch,
        columns: Sequence[str],
        metadata: TableMetadata,
        stored_rows: StoredRows,
        limits: GetLimits,
    ) -> tuple[pa.Table, list[int]]:
        rows, missing = self._module.get_keyed_rows(keys, columns, metadata, stored_rows, **limits._asdict())
        return rows, missing
