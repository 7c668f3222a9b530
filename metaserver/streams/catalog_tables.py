"""The tables of the catalog, for stream tables: loads and commits a table by its UUID, whose name may change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog
from msgspec import UNSET, Raw, structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.index.definitions import parse_definition
from seamark.formats.protocol.wire import FLUSH_LOG, FLUSH_MARK, FLUSH_OFFSETS, FLUSH_TABLE, INDEX_FOLDER
from seamark.formats.runtime.errors import BadRequest, LogUnavailable, NoSuchTable, SeamarkError
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.pointers import check_uuid
from seamark.metaserver.catalog.values import Caller, LoadedTable
from seamark.metaserver.commit.change_requests.change import read_request
from seamark.metaserver.commit.change_requests.change_body import APPEND, ChangeBody, ChangeScope, Remove
from seamark.metaserver.commit.changes.group_commit import Commits
from seamark.metaserver.index.files.headers import IndexReader
from seamark.metaserver.index.files.registration import read_index_file
from seamark.metaserver.log.port import StreamLog
from seamark.metaserver.store.model import Entry, EntryKind, RegisteredIndexFile
from seamark.metaserver.store.operations import FlushedRange, OpenStream
from seamark.metaserver.streams.keys import find_key_columns
from seamark.metaserver.streams.log_opening import LogElsewhere, LogSource
from seamark.metaserver.streams.positions import encode_ranges, find_released_offset, find_returning_offsets, hash_log
from seamark.metaserver.streams.row_files import EncodedDeletes, EncodedFile, EncodedIndexFile
from seamark.metaserver.streams.stored_rows import RowSearch, StoredRows
from seamark.metaserver.streams.stream_properties import read_shard_count

FLUSHER = Caller(principal_name="seamark-streams", request_id="")
_FILES_MAX = 1_000_000
"""The maximum number of files of a flush. It is higher than that of requests, because the server makes the files."""
_log = structlog.get_logger("seamark.streams")


class CatalogTables:
    """An implementation of `StreamTables`."""

    def __init__(self, catalog: Catalog, commits: Commits, search: RowSearch, logs: LogSource) -> None:
        self._context = catalog.context
        self._commits = commits
        self._logs = logs
        self._search = search
        self._index_reader = IndexReader(search.objects)

    async def load(self, uuid: str) -> tuple[Entry, TableMetadata]:
        """Return the catalog entry of the table, with its flushed offsets, and the metadata to which the entry points.

        Raises:
            NoSuchTable: No name refers to the table.
            BadRequest: Several names refer to the table. A flush would add the rows under only one of the names.
        """
        entries = await self._context.store.list_entries_by_uuid(uuid)
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

    async def open_stream(self, entry: Entry, metadata: TableMetadata, log: StreamLog) -> None:
        """Make a table a stream table, unless it is one.

        Raises:
            LogElsewhere: The rows of the table are in another log.
            NoSuchTable: No name refers to the table.
            BadRequest: Several names refer to the table.
        """
        # The entry may have been read before the table became a stream table, or before its offsets were deleted with
        # its last name.
        current_entry, _ = await self.load(entry.uuid)
        starts = {} if current_entry.flushed else await load_returning_offsets(log, entry.uuid, metadata)
        # A table that was dropped and restored may have rows in shards with higher numbers than its settings now give.
        shards = max(read_shard_count(LoadedTable(current_entry, metadata)), 1 + max(starts, default=0))
        try:
            await self._context.store.transact([OpenStream(entry.uuid, shards, log.identity, starts)])
        except LogUnavailable as error:  # The store has recorded another log for the table.
            raise LogElsewhere(error.message) from None

    async def commit(
        self,
        entry: Entry,
        metadata: TableMetadata,
        files: Sequence[EncodedFile],
        ranges: Sequence[FlushedRange],
        deletes: EncodedDeletes | None = None,
        index_files: Sequence[EncodedIndexFile] = (),
    ) -> None:
        """Add stored files to the table, and move the flushed offsets, in one transaction.

        Without deletes, the commit is an append that never conflicts with other rows. With deletes, it is an overwrite
        that has read the rows in the scope. It has a change id, so that it can get priority after collisions.
        """
        content_files = [Raw(file.content_file) for file in files]
        body = ChangeBody(
            table_uuid=entry.uuid,
            operation=APPEND,
            format_version=metadata.format_version,
            read_snapshot_id=UNSET,
            add=content_files,
            summary={
                FLUSH_MARK: "true",
                FLUSH_OFFSETS: encode_ranges(ranges),
                FLUSH_TABLE: entry.uuid,
                FLUSH_LOG: hash_log((await self._logs.open()).identity),
            },
        )
        if deletes is not None and deletes.scope:
            body = structs.replace(
                body,
                operation=None,
                change_id=str(self._context.clock.uuid4()),
                schema_id=metadata.current_schema_id,
                read_snapshot_id=metadata.current_snapshot_id,
                scope=ChangeScope(filter=Raw(deletes.scope)),
                add=[*content_files, *map(Raw, deletes.content_files)],
                remove=tuple(Remove(path, offset) for path, offset in deletes.removed),
            )
        request = read_request(body, files_max=_FILES_MAX, flushed=ranges)
        await self._commits.commit(
            FLUSHER, entry.namespace, entry.name, request, partial(self._read_index_files, index_files)
        )

    async def _read_index_files(
        self, index_files: Sequence[EncodedIndexFile], entry: Entry, metadata: TableMetadata
    ) -> Sequence[RegisteredIndexFile]:
        """Return the stored index files as entries for the registry of indexes.

        A file that cannot be registered is left out with a warning, because a table can be read without its indexes.
        """
        registered_files = []
        for file in index_files:
            try:
                index_file = await read_index_file(
                    self._index_reader,
                    file.location,
                    len(file.data),
                    folder=f"{metadata.location.rstrip('/')}/{INDEX_FOLDER}",
                    table_uuid=entry.uuid,
                    snapshot_id=None,
                    now_ms=self._context.clock.now_ms(),
                )
                parse_definition(index_file.definition, metadata.current_schema, metadata.schemas)
            except SeamarkError as error:
                _log.warning("an index file of a flush is not used", table=entry.uuid, error=error.message)
                continue
            registered_files.append(index_file)
        return registered_files

    def find_key_columns(self, metadata: TableMetadata) -> tuple[str, ...]:
        """Return the names of the key columns, or no names for a table without a valid key.

        If the key has become invalid, waiting rows still contain the key with which they were accepted.
        """
        try:
            return find_key_columns(metadata)
        except BadRequest:
            return ()

    def open_stored_rows(self, entry: Entry, metadata: TableMetadata) -> StoredRows:
        """Return access to the rows in the files of the current snapshot."""
        return self._search.open(entry, metadata)


async def load_returning_offsets(log: StreamLog, uuid: str, metadata: TableMetadata) -> dict[int, int]:
    """Return, for each shard, the offset in the log below which the rows of a returning table are in files.

    A table returns if it was unregistered and is registered again. A row is released when
    it is in the table's files. `find_returning_offsets` also needs the time at which the log received the first row
    that is not released.
    """
    await log.catch_up()
    shards = log.list_shards(uuid)
    received_ms: dict[int, int] = {}
    for shard, state in shards.items():
        offset = find_released_offset(state)
        if offset < state.watermark:
            # Only the time of the first record is needed, and a read always returns at least one record.
            with suppress(SeamarkError):  # A damaged row must not prevent appends.
                received_ms[shard.number] = (await log.read(shard, offset, limit_bytes=1))[0].time_ms
    return find_returning_offsets(metadata, log.identity, shards, received_ms)


def is_flush(snapshot: Snapshot, table_uuid: str | None) -> bool:
    """Return whether a flush of the table's stream has made the snapshot.

    The summary of each flush has the key `FLUSH_MARK`, and the UUID of its table. The UUID differs if the table was
    registered with the files of another table. The summary of a flush by an earlier version of the server does not
    contain a UUID, and counts as a flush of this table.
    """
    if FLUSH_MARK.encode() not in bytes(snapshot.summary):
        return False
    summary = snapshot.build_summary_map()
    return summary.get(FLUSH_MARK) == "true" and summary.get(FLUSH_TABLE, table_uuid) == table_uuid
