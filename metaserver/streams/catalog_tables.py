"""The tables of the catalog, as stream tables use them: loads and commits by the UUID, under any name."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Raw, structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import FLUSH_MARK, FLUSH_OFFSETS, FLUSH_TABLE
from seamark.formats.runtime.errors import BadRequest, NoSuchTable
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.pointers import check_uuid
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.change_requests.change import read_request
from seamark.metaserver.commit.change_requests.change_body import APPEND, ChangeBody, ChangeScope, Remove
from seamark.metaserver.commit.changes.group_commit import Commits
from seamark.metaserver.store.model import Entry, EntryKind, RegisteredIndexFile
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams.keys import key_of
from seamark.metaserver.streams.positions import encode_ranges
from seamark.metaserver.streams.row_files import EncodedDeletes, EncodedFile
from seamark.metaserver.streams.stored_rows import RowSearch, StoredRows

FLUSHER = Caller(who="seamark-streams", request_id="")
_FILES_MAX = 1_000_000


class CatalogTables:
    """Implements `StreamTables`."""

    def __init__(self, catalog: Catalog, commits: Commits, search: RowSearch) -> None:
        self._context = catalog.context
        self._commits = commits
        self._search = search

    async def load(self, uuid: str) -> tuple[Entry, TableMetadata]:
        """Return the table, with the flushed offsets that belong to its pointer.

        Raises:
            NoSuchTable: No name refers to the table.
            BadRequest: Several names refer to the table: only one of their pointers would get the rows.
        """
        entries = await self._context.store.entries_of(uuid)
        tables = [entry for entry in entries if entry.kind is EntryKind.TABLE]
        if not tables:
            raise NoSuchTable(f"No table has the uuid {uuid}")
        if len(tables) > 1:
            raise BadRequest(
                f"Several names refer to the table {uuid}, so it cannot be a stream table; unregister all but one"
            )
        metadata = await self._context.documents.table(tables[0].metadata_location)
        check_uuid(tables[0], metadata)
        return tables[0], metadata

    async def commit(
        self,
        entry: Entry,
        metadata: TableMetadata,
        files: Sequence[EncodedFile],
        ranges: Sequence[FlushedRange],
        deletes: EncodedDeletes | None = None,
    ) -> Entry:
        """Add stored files to the table and move the flushed offsets, in one transaction; return the pointer."""
        added = [Raw(file.content_file) for file in files]
        body = ChangeBody(
            table_uuid=entry.uuid,
            operation=APPEND,
            format_version=metadata.format_version,
            read_snapshot_id=UNSET,
            add=added,
            summary={FLUSH_MARK: "true", FLUSH_OFFSETS: encode_ranges(ranges), FLUSH_TABLE: entry.uuid},
        )
        if deletes is not None and deletes.scope:
            body = structs.replace(
                body,
                operation=None,
                change_id=str(self._context.clock.uuid4()),
                schema_id=metadata.current_schema_id,
                read_snapshot_id=metadata.current_snapshot_id,
                scope=ChangeScope(filter=Raw(deletes.scope)),
                add=[*added, *map(Raw, deletes.content_files)],
                remove=tuple(Remove(path, offset) for path, offset in deletes.removed),
            )
        request = read_request(body, files_max=_FILES_MAX, flushed=ranges)
        await self._commits.commit(FLUSHER, entry.namespace, entry.name, request, _without_index_files)
        return entry

    def key_of(self, metadata: TableMetadata) -> tuple[str, ...]:
        """Return the names of the key columns; empty for a table without a valid key.

        Rows that wait state the key that was valid when they were accepted.
        """
        try:
            return key_of(metadata)
        except BadRequest:
            return ()

    def stored_rows(self, entry: Entry, metadata: TableMetadata) -> StoredRows:
        """Return the rows in the files of the current snapshot."""
        return self._search.open(entry, metadata)


def is_flush(snapshot: Snapshot, table_uuid: str | None) -> bool:
    """Return whether a flush of the table's stream has made the snapshot."""
    if FLUSH_MARK.encode() not in bytes(snapshot.summary):
        return False
    summary = snapshot.summary_map()
    return summary.get(FLUSH_MARK) == "true" and summary.get(FLUSH_TABLE) == table_uuid


async def _without_index_files(_: Entry, __: TableMetadata) -> Sequence[RegisteredIndexFile]:
    return ()
