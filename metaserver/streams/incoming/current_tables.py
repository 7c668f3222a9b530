"""Checks packed rows against the current metadata of their table, before the log stores them.

A request reads the metadata of a table, and packs its rows later. In between, a commit may promote a column or
remove the schema. Then the packed rows could never be added to the table's files.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.runtime.shared_reads import SharedReads
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.sql.changes import CommitCounter
from seamark.metaserver.streams.keys import identify_key


class CurrentTables:
    """Loads the current metadata of tables. An instance belongs to one event loop.

    Like `PointerCache`, it reads a pointer from the database only if a commit has changed the database. PostgreSQL does
    not count commits, so concurrent appends share a read.
    """

    def __init__(
        self, load: Callable[[str], Awaitable[tuple[Entry, TableMetadata]]], changes: CommitCounter | None
    ) -> None:
        """Create an empty cache.

        Args:
            load: Returns a table by its UUID, like `CatalogTables.load`.
            changes: Counts the commits to the database, or None if the database cannot count them.
        """
        self._reads = SharedReads(load)
        self._changes = changes
        self._commit_number: int | None = None
        self._locations: dict[str, str] = {}
        """The location of the metadata of each table, by UUID, which is current until the next commit."""

    async def load(self, loaded_table: LoadedTable) -> TableMetadata:
        """Return the current metadata of a table, after checking that packed rows fit them.

        If no commit was counted since the last read of the same metadata, the table is not read again.

        Args:
            loaded_table: The table, with the metadata with which the rows were packed.

        Raises:
            NoSuchTable: The table was dropped meanwhile.
            RetryLater: The rows may not fit the current schema.
        """
        assert loaded_table.entry is not None
        uuid, location = loaded_table.entry.uuid, loaded_table.entry.metadata_location
        commit_number = None if self._changes is None else self._changes.read_number()
        if commit_number != self._commit_number:
            self._locations.clear()
            self._commit_number = commit_number
        if commit_number is not None and self._locations.get(uuid) == location:
            return loaded_table.metadata
        entry, metadata = await self._reads.load(uuid)
        if (
            commit_number is not None and commit_number == self._commit_number
        ):  # No commit has cleared the cache during the read, so the location may be kept until the next commit.
            self._locations[uuid] = entry.metadata_location
        if entry.metadata_location != location:
            _check_schema(loaded_table.metadata, metadata)
        return metadata

    def forget(self, uuid: str) -> None:
        self._locations.pop(uuid, None)

    def close(self) -> None:
        self._reads.close()
        if self._changes is not None:
            self._changes.close()


def _check_schema(packing_metadata: TableMetadata, current: TableMetadata) -> None:
    """Check that rows that were packed with earlier metadata can be added to the table's files.

    Raises:
        RetryLater: The table no longer has the schema of the rows, its key or its encryption has changed, or a column
            has a new type or has become required.
    """
    if identify_key(packing_metadata) != identify_key(current):
        raise RetryLater("The key of the stream table has changed meanwhile; send the rows again")
    if _list_encryption(packing_metadata) != _list_encryption(current):
        raise RetryLater("The encryption of the table has changed meanwhile; send the rows again")
    schema = packing_metadata.current_schema
    if current.schema(schema.id) != schema:
        raise RetryLater("The table has removed the schema of the rows meanwhile; send the rows again")
    columns = {field.id: field for field in schema.fields}
    for field in current.current_schema.fields:
        column = columns.get(field.id)
        if column is not None and column.type != field.type:
            raise RetryLater(f"The type of the column {field.name} has changed meanwhile; send the rows again")
        # Rows without a column that was added later need a default. A column of the rows may have nulls if it was
        # optional.
        is_filled = field.initial_default is not None if column is None else column.required
        if field.required and not is_filled:
            raise RetryLater(f"The column {field.name} has become required meanwhile; send the rows again")


def _list_encryption(metadata: TableMetadata) -> dict[str, str]:
    """Return the table properties that state how files are encrypted."""
    return {name: text for name, text in metadata.properties.items() if name.startswith("encryption.")}
