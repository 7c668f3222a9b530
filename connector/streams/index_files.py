"""Builds the index files of a flush in memory. The server stores them, and registers them in the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import pyarrow as pa

from seamark.connector.streams.stored_files import MemoryStorage
from seamark.connector.write.table_writer import IndexBuilder
from seamark.connector.write.target import create_target
from seamark.formats.iceberg.metadata.metadata import TableMetadata


class _EncodedFile(Protocol):
    """A Parquet file in memory, and its ContentFile as JSON."""

    @property
    def location(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def content_file(self) -> bytes: ...


@dataclass(frozen=True)
class _EncodedStorage(MemoryStorage):
    """A storage that reads encoded files, and stores written files in memory.

    Attributes:
        encoded: The encoded files, by location.
    """

    encoded: dict[str, bytes] = field(default_factory=dict)

    def open_input_file(self, location: str) -> pa.NativeFile:
        return pa.BufferReader(self.encoded[location])


def encode_index_files(files: Sequence[_EncodedFile], metadata: TableMetadata) -> list[tuple[str, bytes]]:
    """Return the index files that writers of the table would build for these data files: locations and data.

    A data file that cannot be indexed is left out. The indexer covers it later.

    Raises:
        Unwritable: The table has encrypted files.
    """
    storage = _EncodedStorage(encoded={file.location: file.data for file in files})
    target = create_target(metadata, storage)
    if not target.indexes:
        return []
    builder = IndexBuilder([replace(task, storage=storage) for task in target.indexes])
    for file in files:
        builder.add(msgspec.json.decode(file.content_file), None)
    index_files, _ = builder.close()
    return [(file["location"], storage.read_data(file["location"])) for file in index_files]
