"""The port to the files of rows: encodes rows for the log, and as Parquet files of a table.

The implementation is in the connector, which the server does not import (`metaserver/runtime/extensions.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata


class RowSlice(NamedTuple):
    """Consecutive rows of a batch of the log.

    Attributes:
        payload: The batch, as `RowFiles.pack` returns it.
        first: The number of the first row in the batch.
    """

    payload: bytes
    first: int
    rows: int


class EncodedFile(msgspec.Struct, frozen=True):
    """A Parquet file that is not stored yet.

    Attributes:
        content_file: The ContentFile of the REST specification, as JSON.
    """

    location: str
    data: bytes
    content_file: bytes
    rows: int


class RowFiles(Protocol):
    """The port to the files of rows. Every method is pure, runs in any thread, and may take long for many rows."""

    def conform(self, rows: pa.RecordBatch, metadata: TableMetadata) -> pa.RecordBatch:
        """Return the rows with the columns of the table's current schema.

        Raises:
            BadRequest: A row does not fit the schema; the message names the column, the row and the value.
        """

    def pack(self, rows: pa.RecordBatch, metadata: TableMetadata) -> bytes:
        """Return rows of `conform` as a payload of the log, which states their schema."""

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


class ImportedRowFiles:
    """Implements `RowFiles` by the functions of a module, which is imported when they are first needed."""

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name

    @cached_property
    def _module(self) -> Any:
        return importlib.import_module(self._module_name)

    def conform(self, rows: pa.RecordBatch, metadata: TableMetadata) -> pa.RecordBatch:
        return self._module.conform_rows(rows, metadata)

    def pack(self, rows: pa.RecordBatch, metadata: TableMetadata) -> bytes:
        packed: bytes = self._module.pack_rows(rows, metadata)
        return packed

    def decode(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> list[pa.RecordBatch]:
        return list(self._module.decode_rows(rows, metadata))

    def encode(self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None) -> list[EncodedFile]:
        return [EncodedFile(*file) for file in self._module.encode_rows(rows, metadata, folder)]


def decode_content_json(file: EncodedFile) -> Any:
    """Return the ContentFile as a JSON object."""
    return msgspec.json.decode(file.content_file)
