"""Opens the stream tables with waiting rows in the log, so that the server flushes them without a request.

Each table is opened in its own task, so that a table whose storage does not answer does not delay other tables.

If several processes use the log, the owner of a table opens it. If the owner does not flush the rows, for example
because it cannot reach the storage of the table, another process opens the table as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import NoSuchTable, SeamarkError
from seamark.metaserver.log.port import SharedLog
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.streams.blocks import READ_BYTES
from seamark.metaserver.streams.catalog_tables import CatalogTables, load_returning_offsets
from seamark.metaserver.streams.log_opening import LogElsewhere, LogSource
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.row_files import RowFiles
from seamark.metaserver.streams.stream_properties import is_stream_table
from seamark.metaserver.streams.stream_table import StreamTable

_CHECK_INTERVAL_S = 1.0
"""The interval between two checks for waiting rows, if other processes append to the log, or after a failure."""
_UNSHARED_CHECK_INTERVAL_S = 60.0
"""The interval between two checks if no other process appends to the log. A check may find a restored table."""
_RETRY_S = 1.0
"""The pause after a table could not be opened. It doubles with each further failure."""
_RETRY_MAX_S = 30.0
_DOUBLINGS_MAX = 10
"""The maximum number of doublings of the pause."""
_OPENINGS_MAX = 32
"""The maximum number of tables that are opened concurrently."""
_log = structlog.get_logger("seamark.streams")


class _Failures(NamedTuple):
    """The number of failed attempts to open a table, and the time before which it is not opened again."""

    failed_count: int
    until_s: float


class TableOpenings:
    """Opens tables in the background. An instance belongs to one event loop."""

    def __init__(
        self,
        logs: LogSource,
        owners: StreamOwners,
        tables: CatalogTables,
        row_files: RowFiles,
        store: PointerStore,
        clock: Clock,
        open_tables: Mapping[str, StreamTable],
        open_table: Callable[[Entry, TableMetadata], Awaitable[StreamTable]],
        flush_interval_ms: int,
    ) -> None:
        """Create an instance without running tasks.

        Args:
            logs: Opens the log.
            owners: Determines which process flushes a table.
            tables: The tables of the catalog.
            row_files: Reads packed rows.
            store: The database, which knows the names of tables.
            clock: The clock.
            open_tables: The open tables by UUID. The mapping changes while the server runs.
            open_table: Opens the stream of a table, like `Streams._open`.
            flush_interval_ms: The default age at which rows are flushed.
        """
        self._logs = logs
        self._owners = owners
        self._tables = tables
        self._row_files = row_files
        self._store = store
        self._clock = clock
        self._open_tables = open_tables
        self._open_table = open_table
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_OPENINGS_MAX)
        self._flush_interval_ms = flush_interval_ms
        self._failures: dict[str, _Failures] = {}
        """The failures to open tables with waiting rows, by UUID."""
        self._waiting: set[str] = set()
        """The tables with waiting rows at the last check."""

    async def run(self) -> None:
        """Open tables, and remove the streams of purged tables, until the task is cancelled.

        A log that only this process uses gets new waiting rows only from open tables. So it is checked less often,
        unless an opening has failed.
        """
        checked_s = -_UNSHARED_CHECK_INTERVAL_S
        while True:
            is_due = self._clock.monotonic() - checked_s >= _UNSHARED_CHECK_INTERVAL_S
            if is_due or self._failures or self._logs.is_shared:
                await self.open_waiting_tables()
            if is_due:
                await self._remove_purged()
                checked_s = self._clock.monotonic()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def open_waiting_tables(self) -> None:
        """Start opening tables with waiting rows of an earlier process or of another process.

        Rows wait until they are in files of the table, and the log has released them. A table whose opening has failed
        is tried again after a pause.
        """
        if not self._logs.exists:
            return
        log, now_s, now_ms = await self._logs.open(), self._clock.monotonic(), self._clock.now_ms()
        # For tables with waiting rows, the released offset of each shard.
        waiting_offsets: dict[str, dict[int, int]] = {}
        for shard, state in log.list_shards().items():
            if state.watermark > state.released:
                waiting_offsets.setdefault(shard.stream, {})[shard.number] = state.released
        closed_tables = waiting_offsets.keys() - self._open_tables.keys()
        self._failures = {uuid: failures for uuid, failures in self._failures.items() if uuid in closed_tables}
        for uuid in self._waiting - waiting_offsets.keys() - self._open_tables.keys():
            self._owners.forget(uuid)
        self._waiting = set(waiting_offsets)
        for uuid in sorted(closed_tables - self._tasks.keys()):
            if uuid in self._failures and self._failures[uuid].until_s > now_s:
                continue
            if self._owners.may_flush(uuid, waiting_offsets[uuid], now_ms, owner_interval_ms=self._flush_interval_ms):
                self._tasks[uuid] = asyncio.create_task(self._open(uuid), name=f"open {uuid}")

    async def _open(self, uuid: str) -> None:
        async with self._slots:
            try:
                entry, metadata = await self._tables.load(uuid)
                await self._open_table(entry, metadata)
            except NoSuchTable:
                self._count_failure(uuid)
                _log.info("rows of a dropped table wait in the log", table=uuid)
            except SeamarkError as error:
                self._count_failure(uuid)
                _log.warning("rows of a table wait in the log", table=uuid, error=error.message)
            except Exception:  # noqa: BLE001  a bug of one table must not end the opening of all
                self._count_failure(uuid)
                _log.exception("rows of a table wait in the log after an unexpected error", table=uuid)
            finally:
                self._tasks.pop(uuid, None)

    def _count_failure(self, uuid: str) -> None:
        failed_count = self._failures[uuid].failed_count + 1 if uuid in self._failures else 1
        pause_s = min(_RETRY_MAX_S, _RETRY_S * 2 ** min(failed_count - 1, _DOUBLINGS_MAX))
        self._failures[uuid] = _Failures(failed_count, self._clock.monotonic() + pause_s)

    async def _remove_purged(self) -> None:
        """Remove the streams of purged tables.

        A stream with unflushed rows is kept, because its table may be missing only until a database is restored. The
        stream of a retained table, which can be restored after it was dropped, is kept as well, because its flushed
        offsets are kept.
        """
        if not self._logs.exists:
            return
        log = await self._logs.open()
        shards = log.list_shards()
        unflushed_uuids = {shard.stream for shard, state in shards.items() if state.watermark > state.released}
        streams = {shard.stream for shard in shards}
        if isinstance(log, SharedLog):
            # A commit may have closed the gate of a table, which blocks appends, before the first row was appended.
            streams.update(log.list_gates())
        for uuid in sorted(streams - self._open_tables.keys() - unflushed_uuids):
            try:
                if self._owners.is_owner(uuid) and not await self._store.count_names(uuid, retained=True):
                    await log.remove(uuid)
            except SeamarkError as error:
                _log.warning("the rows of a purged table were not removed", table=uuid, error=error.message)

    async def open_returned_table(self, entry: Entry, metadata: TableMetadata) -> None:
        """Open a stream table that was removed from the catalog and is registered again, if the log has rows of it.

        Plans of the open table include these rows.
        """
        try:
            # Other tables do not wait for a log that does not answer.
            if is_stream_table(metadata) and self._logs.exists and (await self._logs.open()).list_shards(entry.uuid):
                await self._open_table(entry, metadata)
        except SeamarkError as error:  # The next append opens the table.
            _log.warning("a table that has returned was not opened", table=entry.uuid, error=error.message)

    async def list_waiting_schemas(self, metadata: TableMetadata) -> set[int]:
        """Return the ids of the schemas of the rows in the log that wait for a table that is registered again.

        The table was dropped, with its flushed offsets, before its rows were flushed. Its metadata must still have
        these schemas. Otherwise the rows could not be flushed. If another server has the log, the set is empty.

        Raises:
            LogUnavailable: The log does not answer.
        """
        schema_ids: set[int] = set()
        if not self._logs.exists or metadata.table_uuid is None:
            return schema_ids
        try:
            log = await self._logs.open()
        except LogElsewhere:  # The rows of this table would wait in the log of another server.
            return schema_ids
        offsets = await load_returning_offsets(log, metadata.table_uuid, metadata)
        for shard, state in log.list_shards(metadata.table_uuid).items():
            # A shard without an offset has no waiting rows.
            offset = offsets.get(shard.number, state.watermark)
            while offset < state.watermark:
                records = await log.read(shard, offset, limit_bytes=READ_BYTES, end=state.watermark)
                schema_ids.update(self._row_files.read_schema_id(record.batch.payload) for record in records)
                offset = records[-1].end
        return schema_ids

    async def close(self) -> None:
        """Cancel the running tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
