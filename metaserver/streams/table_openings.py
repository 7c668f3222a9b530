"""Opens the stream tables whose rows wait in the log, so that the server flushes them without a request for them.

Each table has its own task. So a table whose storage does not answer delays no other table, neither after
a restart with many tables nor later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import NoSuchTable, SeamarkError
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.streams.catalog_tables import CatalogTables
from seamark.metaserver.streams.log_opening import LogSource
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.stream_table import StreamTable

_OPEN_S = 60.0
"""The time between two checks for tables that have rows in the log and are not open, such as restored tables."""
_OPEN_SHARED_S = 1.0
"""The same where other processes append to the log."""
_OPENINGS_MAX = 32
"""The maximum number of tables that are opened at the same time."""
_log = structlog.get_logger("seamark.streams")


class TableOpenings:
    """Opens tables in the background. Belongs to one event loop."""

    def __init__(
        self,
        logs: LogSource,
        owners: StreamOwners,
        tables: CatalogTables,
        store: PointerStore,
        clock: Clock,
        open_tables: Mapping[str, StreamTable],
        open_table: Callable[[Entry, TableMetadata], Awaitable[StreamTable]],
    ) -> None:
        """Create the openings.

        Args:
            logs: The log.
            owners: The owners of tables. Only the owner opens a table.
            tables: The tables of the catalog.
            store: The database.
            clock: The clock.
            open_tables: The tables that are open, by UUID. It changes while the server runs.
            open_table: Opens a table.
        """
        self._logs = logs
        self._owners = owners
        self._tables = tables
        self._store = store
        self._clock = clock
        self._open_tables = open_tables
        self._open_table = open_table
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_OPENINGS_MAX)
        self._closed_until_s: dict[str, float] = {}
        """Until when a table with rows in the log is not opened again after a failure, by UUID."""

    async def run(self) -> None:
        """Open tables, and remove the streams of purged tables, until cancelled."""
        checked_s = -_OPEN_S
        while True:
            await self._open_unflushed()
            if self._clock.monotonic() - checked_s >= _OPEN_S:
                await self._remove_purged()
                checked_s = self._clock.monotonic()
            await asyncio.sleep(_OPEN_SHARED_S if self._logs.is_shared else _OPEN_S)

    async def _open_unflushed(self) -> None:
        """Begin to open tables with rows of an earlier process, or rows that another process appended."""
        if not self._logs.exists:
            return
        log, now_s = await self._logs.open(), self._clock.monotonic()
        unflushed = {shard.stream for shard, state in log.shards().items() if state.watermark > state.released}
        self._closed_until_s = {uuid: until_s for uuid, until_s in self._closed_until_s.items() if until_s > now_s}
        for uuid in sorted(unflushed - self._open_tables.keys() - self._closed_until_s.keys() - self._tasks.keys()):
            if self._owners.is_owner(uuid):
                self._tasks[uuid] = asyncio.create_task(self._open(uuid), name=f"open {uuid}")

    async def _open(self, uuid: str) -> None:
        async with self._slots:
            try:
                entry, metadata = await self._tables.load(uuid)
                await self._open_table(entry, metadata)
            except NoSuchTable:
                self._closed_until_s[uuid] = self._clock.monotonic() + _OPEN_S / 2
                _log.info("rows of a dropped table wait in the log", table=uuid)
            except SeamarkError as error:
                self._closed_until_s[uuid] = self._clock.monotonic() + _OPEN_S / 2
                _log.warning("rows of a table wait in the log", table=uuid, error=error.message)
            except Exception:  # noqa: BLE001  a bug of one table must not end the opening of all
                self._closed_until_s[uuid] = self._clock.monotonic() + _OPEN_S / 2
                _log.exception("rows of a table wait in the log after an unexpected error", table=uuid)
            finally:
                self._tasks.pop(uuid, None)

    async def _remove_purged(self) -> None:
        """Remove the streams of purged tables.

        A stream with rows that were not flushed stays: a database that lacks its table may be restored.
        """
        if not self._logs.exists:
            return
        log = await self._logs.open()
        shards = log.shards()
        unflushed = {shard.stream for shard, state in shards.items() if state.watermark > state.released}
        for uuid in sorted({shard.stream for shard in shards} - self._open_tables.keys() - unflushed):
            try:
                if self._owners.is_owner(uuid) and not await self._store.names_of(uuid):
                    await log.remove(uuid)
            except SeamarkError as error:
                _log.warning("the rows of a purged table were not removed", table=uuid, error=error.message)

    async def close(self) -> None:
        """End the openings that have not finished."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
