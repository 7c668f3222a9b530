"""The port to the files of rows: encodes rows for the log, and as Parquet files of a table.

The connector implements the port. The server does not import it (`metaserver/runtime/extensions.py`).
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
"""The ids of the columns of a key, and the families of their types; empty for rows without a key.

Rows with the same key and the same value of the key are in one shard.
"""


class RowSlice(NamedTuple):
    """Consecutive rows of a batch of the log.

    Attributes:
        payload: The batch, as `RowFiles.pack` returns it.
        first: The number of the first row in the batch.
        kinds: The kind of each of the rows (`RowKind`); empty if all are inserts.
    """

    payload: bytes
    first: int
    rows: int
    kinds: bytes = b""


class EncodedFile(msgspec.Struct, frozen=True):
    """A Parquet file that is not stored yet.

    Attributes:
        content_file: The ContentFile of the REST specification, as JSON.
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
"""The keys of rows of a keyed table, and the row of a file that has each key.

Only the implementation reads an instance.
"""


class EncodedDeletes(NamedTuple):
    """The deletes of the rows that rows of a keyed table replace.

    Attributes:
        files: The locations and the data of the files to store.
        content_files: The ContentFiles of the delete files as JSON. Several may be in one stored file.
        removed: The files that the deletes replace: the location and, for a deletion vector, its offset.
        scope: The filter of the rows that were read, as JSON; empty for deletes of fresh files.
    """

    files: list[tuple[str, bytes]]
    content_files: list[bytes]
    removed: list[tuple[str, int | None]]
    scope: bytes


class GetLimits(NamedTuple):
    """The limits of one request for the rows of keys.

    Attributes:
        rows_max: The maximum number of rows.
        bytes_max: The maximum size of the rows in memory.
        files_max: The maximum number of files that are read.
    """

    rows_max: int
    bytes_max: int
    files_max: int


class RowFiles(Protocol):
    """The port to the files of rows.

    Every method may run in any thread, and may take long for many rows. All methods except `encode_deletes` and `get`
    are pure.
    """

    def conform(
        self, rows: pa.RecordBatch, metadata: TableMetadata, kinds: bytes = b"", key: Sequence[str] = ()
    ) -> pa.RecordBatch:
        """Return the rows with the columns of the table's current schema.

        Args:
            rows: The rows.
            metadata: The table's metadata.
            kinds: The kind of each row; empty if all are inserts. A row that deletes needs its key columns only.
            key: The names of the key columns; empty for a table without a key.

        Raises:
            BadRequest: A row does not fit the schema or has no key; the message names the column, the row and the
                value.
        """

    def compute_shards(
        self, rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str], count: int
    ) -> list[int]:
        """Return the shard of each row of `conform`, from 0 to `count`: rows with the same key are in one shard."""

    def pack(self, rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str] = ()) -> bytes:
        """Return rows of `conform` as a payload of the log, which states their schema and their key."""

    def list_keys(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> frozenset[RowKey]:
        """Return the keys by which rows replace others: the keys that the table had when the rows were packed.

        Raises:
            BadRequest: The table no longer has the schema of a slice.
        """

    def decode(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> list[pa.RecordBatch]:
        """Return a batch for each slice, with the columns of the table's current schema and their field ids.

        Args:
            rows: Rows that were packed for this schema of the table or an earlier one.
            metadata: The table's metadata.

        Raises:
            BadRequest: The table no longer has the schema of a slice.
        """

    def encode(self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None) -> list[EncodedFile]:
        """Return the rows as files, at least one for each partition.

        Args:
            rows: Rows that were packed for this schema of the table or an earlier one.
            metadata: The table's metadata.
            folder: The folder of the files; None for the folders of the table's data files.

        Raises:
            BadRequest: The table has a property that writers do not support.
        """

    def encode_keyed(
        self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None, key: Sequence[str]
    ) -> tuple[list[EncodedFile], KeyedRows]:
        """Return the rows that no later row replaces as files, and the keys of all rows.

        Each row replaces others by the key that it states. Rows of an earlier key of the table are before the others.

        Args:
            rows: Rows that were packed for this schema of the table or an earlier one, those of each shard in the order
                of the log.
            metadata: The table's metadata.
            folder: The folder of fresh files, whose rows have one key; None for the folders of the table's data files.
            key: The names of the current key columns; empty for a table without a valid key.

        Raises:
            BadRequest: The table has a property that writers do not support, or the key is not valid.
        """

    def encode_index_files(self, files: Sequence[EncodedFile], metadata: TableMetadata) -> list[EncodedIndexFile]:
        """Return index files of files for a commit, for the indexes of the table.

        A file that cannot be indexed is left out.
        """

    def encode_deletes(
        self, parts: Sequence[KeyedRows], metadata: TableMetadata, stored: StoredRows, folder: str | None
    ) -> EncodedDeletes:
        """Return the deletes of the rows that keyed rows replace in the table's files and in earlier fresh files.

        Args:
            parts: The keyed rows, in the order of the log; they keep the rows that were located for later calls.
            metadata: The table's metadata.
            stored: Finds rows in the files of the current snapshot. It blocks, so this runs in another thread.
            folder: The folder of fresh files; None for a commit.

        Raises:
            BadRequest: The table does not support deletes.
            Corrupt: A file of the table cannot be read.
        """

    def get(
        self,
        keys: pa.RecordBatch,
        columns: Sequence[str],
        metadata: TableMetadata,
        stored: StoredRows,
        limits: GetLimits,
    ) -> tuple[pa.Table, list[int]]:
        """Return the rows that have one of the keys in the current snapshot, in the order of the keys.

        Args:
            keys: The keys, with the names of the key columns. A key may be repeated.
            columns: The names of the columns to return.
            metadata: The table's metadata.
            stored: Finds rows in the files of the current snapshot. It blocks, so this runs in another thread.
            limits: The limits.

        Returns:
            The rows, and the ascending numbers of the keys without a row. A key that is repeated has its first number.

        Raises:
            BadRequest: The keys do not fit the columns, or the rows are encrypted.
            TooLarge: A limit is exceeded.
            Corrupt: A file of the table cannot be read.
        """


class ImportedRowFiles:
    """Implements `RowFiles` with the functions of a module. The module is imported when a function is first needed."""

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
        packed: bytes = self._module.pack_rows(rows, metadata, key)
        return packed

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
        files, keyed = self._module.encode_keyed_rows(rows, metadata, folder, key)
        return [EncodedFile(*file) for file in files], keyed

    def encode_index_files(self, files: Sequence[EncodedFile], metadata: TableMetadata) -> list[EncodedIndexFile]:
        return [EncodedIndexFile(*file) for file in self._module.encode_index_files(files, metadata)]

    def encode_deletes(
        self, parts: Sequence[KeyedRows], metadata: TableMetadata, stored: StoredRows, folder: str | None
    ) -> EncodedDeletes:
        return EncodedDeletes(*self._module.encode_row_deletes(parts, metadata, stored, folder))

    def get(
        self,
        keys: pa.RecordBatch,
        columns: Sequence[str],
        metadata: TableMetadata,
        stored: StoredRows,
        limits: GetLimits,
    ) -> tuple[pa.Table, list[int]]:
        rows, missing = self._module.get_keyed_rows(keys, columns, metadata, stored, **limits._asdict())
        return rows, missing
