"""Opens the stream tables of a server, limits their memory, and flushes them.

One task checks all tables. It starts a separate task to flush each table that is due, so that a slow table
does not delay other tables. All tables share one limit of memory for rows. When a quarter of it is used, the largest
table is flushed immediately. Appends to a table are refused while it uses more bytes than are free.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import NamedTuple, TypeVar, cast

import structlog

from seamark.cache.single_flight import SingleFlight
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitConflict,
    Corrupt,
    NoSuchTable,
    RetryLater,
    SeamarkError,
    TooLarge,
    TooManyRequests,
)
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.ownership.claims import check_writable
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.commit.changes.group_commit import Commits
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.log.port import Acknowledgement, Batch, GateMoved, Shard, SharedLog, StreamLog, StreamProducer
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.settings.fleet import READ, refuse_change
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import CheckFence, RecordRemovalFlush, TakeRemovalFlush
from seamark.metaserver.store.sql.changes import open_commit_counter
from seamark.metaserver.streams.appends import ProducerKey, TableRows, TopicProducer
from seamark.metaserver.streams.catalog_tables import CatalogTables
from seamark.metaserver.streams.fresh_snapshots import with_fresh_snapshot
from seamark.metaserver.streams.incoming.body_room import BodyReservations
from seamark.metaserver.streams.incoming.current_tables import CurrentTables
from seamark.metaserver.streams.incoming.joined_appends import JoinedAppends
from seamark.metaserver.streams.incoming.table_gates import TableGates
from seamark.metaserver.streams.keyed_gets import KeyedGets
from seamark.metaserver.streams.keys import AcceptedKeys
from seamark.metaserver.streams.log_opening import LogElsewhere, LogSource, check_has_no_stream
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.pauses import Pauses
from seamark.metaserver.streams.row_files import RowFiles
from seamark.metaserver.streams.snapshots.named_snapshots import NamedSnapshots
from seamark.metaserver.streams.snapshots.shared_snapshots import SharedSnapshots
from seamark.metaserver.streams.stored_rows import RowSearch
from seamark.metaserver.streams.stream_counts import FlushReport, FlushState, StreamCounts, TopicCounts
from seamark.metaserver.streams.stream_properties import (
    is_stream_table,
    make_fresh_folder_location,
    read_interval_ms,
    read_shard_count,
)
from seamark.metaserver.streams.stream_table import (
    FlushedBefore,
    SeveralKeys,
    StreamLimits,
    StreamTable,
    append_to_tables,
)
from seamark.metaserver.streams.table_openings import TableOpenings

_TICK_S = 0.1
"""The interval between two checks for tables that are due."""
_RETRY_S = 1.0
"""The pause after a failed flush. It doubles with each further failure."""
_RETRY_MAX_S = 60.0
_DOUBLINGS_MAX = 10
"""The maximum number of doublings of the pause."""
_FLUSH_TRIES_MAX = 5
"""The maximum number of attempts of a flush for which a request waits."""
_GATE_TRIES_MAX = 3
"""The maximum number of attempts to append rows while commits change how rows of their tables are written."""
_STALE_TRIES_MAX = 20
"""The maximum number of attempts of a plan request to read fresh rows while flushes change the pointer."""
_FOREIGN_FILES_MS = 86_400_000
"""The age after which no plan of another process contains a fresh file."""
_CLEAN_INTERVAL_S = 5.0
"""The interval between two deletions of files that are no longer needed."""
_ENCODING_THREADS_MAX = 8
_CROWDED_FRACTION = 1 / 4
"""The share of the memory for rows above which the largest table is flushed immediately."""
_RETRY_AFTER_S = 1
"""The time after which the client of a refused append may send the rows again."""
T = TypeVar("T")
_log = structlog.get_logger("seamark.streams")


class FreshTable(NamedTuple):
    """A table with its fresh rows, which no commit has added to the table yet.

    Attributes:
        loaded: The catalog entry, and metadata whose current snapshot includes the fresh rows.
        snapshot: This snapshot, or None if the table has no fresh rows.
        offsets: The offset after the last row in the current snapshot, by shard.
    """

    loaded: LoadedTable
    snapshot: Snapshot | None
    offsets: Mapping[int, int]


class Streams:
    """The stream tables of a server. An instance belongs to one event loop."""

    def __init__(
        self,
        catalog: Catalog,
        commits: Commits,
        objects: ObjectStore,
        logs: LogSource,
        row_files: RowFiles,
        search: RowSearch,
        owners: StreamOwners,
        keyring: Keyring,
    ) -> None:
        self._context = catalog.context
        self._catalog = catalog
        self._objects = objects
        self._logs = logs
        self._owners = owners
        self.row_files = row_files
        self.gets = KeyedGets(row_files, search)
        self.stream_tables = CatalogTables(catalog, commits, search, logs)
        self._tables: dict[str, StreamTable] = {}
        self._opening: SingleFlight[str, StreamTable] = SingleFlight()
        self._flushes: dict[str, FlushState] = {}
        self._accepted_keys = AcceptedKeys()
        self._current = CurrentTables(
            self.stream_tables.load, open_commit_counter(catalog.context.settings.make_database_url())
        )
        self.snapshots = NamedSnapshots(
            objects,
            Manifests.from_settings(objects, catalog.context.settings),
            SharedSnapshots(objects, keyring, catalog.context.clock),
            catalog.context.clock,
            retention_s=catalog.context.settings.stream_fresh_retention_s,
        )
        store, clock = catalog.context.store, catalog.context.clock
        self.openings = TableOpenings(
            logs,
            owners,
            self.stream_tables,
            row_files,
            store,
            clock,
            open_tables=self._tables,
            open_table=self._open,
            flush_interval_ms=catalog.context.settings.stream_flush_interval_ms,
        )
        self.joined_appends = JoinedAppends(self.append, appends_max=logs.groups_max)
        self.gates = TableGates(store, clock)
        self.pauses = Pauses(clock)
        self.counts = StreamCounts()
        self.body_room = BodyReservations(
            catalog.context.settings, clock, self._tables, self._check_memory, self.pauses, self.counts
        )
        self.topic_counts = TopicCounts()
        self._next_shard = 0
        # Threads that encode rows may wait for plans, which need the threads of `asyncio.to_thread`.
        self._threads = ThreadPoolExecutor(_ENCODING_THREADS_MAX, thread_name_prefix="streams")
        self._cleaned_s = 0.0
        self._cleanup_task: asyncio.Task[None] | None = None

    @property
    def tables(self) -> Mapping[str, StreamTable]:
        """The open tables, by UUID."""
        return self._tables

    @property
    def size_bytes(self) -> int:
        """The size of all unflushed rows in bytes."""
        return sum(table.size_bytes for table in self._tables.values())

    def find_input_topic(self, uuid: str) -> str | None:
        """Return the name of the input topic of a table, or None if the log is not in Kafka."""
        return self._logs.find_input_topic(uuid)

    @property
    def has_log(self) -> bool:
        """Whether this server has, or had, rows of stream tables."""
        return self._logs.exists

    async def list_durable_offsets(self) -> dict[str, dict[int, int]]:
        """Return the offset after the last durable row of each shard in the log, by the UUID of the table.

        Raises:
            LogElsewhere: Another process has the log.
        """
        if not self._logs.exists:
            return {}
        log = await self._logs.open()
        await log.catch_up()
        offsets: dict[str, dict[int, int]] = {}
        for shard, state in log.list_shards().items():
            offsets.setdefault(shard.stream, {})[shard.number] = state.watermark
        return offsets

    async def append(
        self,
        appends: Sequence[TableRows],
        producer: ProducerKey | TopicProducer | None,
        arrived_s: float | None = None,
    ) -> Acknowledgement:
        """Append all rows to the tables, or none. The rows are durable on return.

        Args:
            appends: The rows of each table. Without rows, the append only records the sequence number of its producer.
            producer: The producer, and the sequence number of this append, or None.
            arrived_s: When the rows arrived, by the clock of the event loop. It limits the wait. The default is now.

        Raises:
            StreamPaused: The table is paused.
            TooManyRequests: The memory for rows is full.
            TooLarge: The rows are larger than the memory that a table may use.
            SequenceGap: The sequence number does not follow the producer's last sequence number.
            RetryLater: The number of shards, the key or the schema of a table has changed since it was loaded.
        """
        try:
            return await self._append(appends, producer, arrived_s)
        except RetryLater:
            self.counts.refused += 1
            raise

    async def _append(
        self, appends: Sequence[TableRows], producer: ProducerKey | TopicProducer | None, arrived_s: float | None
    ) -> Acknowledgement:
        """Append rows. If a commit changes how a table's rows are written meanwhile, check and append them again."""
        named_producer = None if producer is None else producer.to_producer()
        if not appends:
            return await (await self._logs.open()).append({}, named_producer)
        batches: dict[StreamTable, Mapping[int, Batch]] = {}
        for loaded_table, rows in appends:
            assert loaded_table.entry is not None
            table = await self._open(loaded_table.entry, loaded_table.metadata)
            self.pauses.check(
                table.uuid, loaded_table.metadata, format_path(loaded_table.entry.namespace, loaded_table.entry.name)
            )
            if isinstance(rows, Batch):
                batches[table] = {self._choose_shard(table, named_producer): rows}
            elif read_shard_count(loaded_table) == table.shards:
                batches[table] = rows
            else:
                raise RetryLater("The number of shards of the table has changed; send the rows again")
        for attempt in range(1, _GATE_TRIES_MAX + 1):
            try:
                acknowledgement = await self._append_checked(appends, batches, named_producer, arrived_s)
                break
            except GateMoved:  # A commit has changed the table meanwhile. The rows may also fit the changed table.
                if attempt == _GATE_TRIES_MAX:
                    raise
        if not acknowledgement.duplicate:
            self.counts.rows += sum(batch.rows for rows in batches.values() for batch in rows.values())
            self.counts.size_bytes += sum(append.size_bytes for append in appends)
        for loaded_table, _ in appends:
            assert loaded_table.entry is not None
            state = self._flushes.get(loaded_table.entry.uuid)
            if state is not None:  # else the table was dropped meanwhile
                state.interval_ms = read_interval_ms(loaded_table.metadata)
                # Flush the first rows immediately, because engines do not plan scans of a table without a snapshot.
                if loaded_table.metadata.current_snapshot_id is None and state.task is None:
                    state.is_due = True
        return acknowledgement

    async def _append_checked(
        self,
        appends: Sequence[TableRows],
        batches: Mapping[StreamTable, Mapping[int, Batch]],
        producer: StreamProducer | None,
        arrived_s: float | None,
    ) -> Acknowledgement:
        """Append rows that fit the metadata of their tables. Commits that change how rows are written wait meanwhile.

        Raises:
            GateMoved: A commit of another process has changed how rows of a table are written. Nothing was stored.
        """
        log, size_bytes = await self._open_shared_log(), sum(append.size_bytes for append in appends)
        async with self.gates.hold_commits(log, [table.uuid for table in batches], arrived_s) as gates:
            current_metadata = [await self._current.load(append.loaded) for append in appends]
            for (table, _), append, metadata in zip(batches.items(), appends, current_metadata, strict=True):
                entry = append.loaded.entry
                assert entry is not None
                self.pauses.check(table.uuid, metadata, format_path(entry.namespace, entry.name))
                self._check_memory(table, append.size_bytes, other_bytes=size_bytes - append.size_bytes)
                await self._accept_key(append.loaded)
            return await append_to_tables(batches, producer, gates)

    @asynccontextmanager
    async def hold_appends(self, uuids: Collection[str]) -> AsyncIterator[list[CheckFence]]:
        """Keep appends to tables away while the context is active, and yield the checks for the commit's transaction.

        Raises:
            RetryLater: Running appends or other commits take too long, or the log does not answer.
        """
        async with self.gates.hold_appends(await self._open_shared_log(), uuids) as fences:
            yield fences

    async def _open_shared_log(self) -> SharedLog | None:
        """Return the log if other processes append to it as well, otherwise None."""
        return cast("SharedLog", await self._logs.open()) if self._logs.is_shared else None

    async def _accept_key(self, loaded_table: LoadedTable) -> None:
        """Record the key of a table for later appends, unless a row with a newer key was accepted.

        Raises:
            RetryLater: The key has changed.
        """
        entry = loaded_table.entry
        assert entry is not None
        if not self._accepted_keys.accept(entry.uuid, entry.metadata_location, loaded_table.metadata):
            current_entry, _ = await self.stream_tables.load(entry.uuid)
            if current_entry.metadata_location != entry.metadata_location:
                raise RetryLater("The key of the stream table has changed; send the rows again")
            # The current metadata may have an earlier time, or the same time, because the table was replaced.
            self._accepted_keys.remember_current_key(entry.uuid, entry.metadata_location, loaded_table.metadata)

    async def find_last_sequence(self, producer: ProducerKey) -> int | None:
        """Return the sequence number of the producer's last append, if it is greater than that in `producer`.

        Otherwise return None. A greater number shows that the producer sends an earlier append again.
        """
        state = (await self._logs.open()).find_producer(producer.to_producer().name)
        return state.sequence if state is not None and state.sequence > producer.sequence else None

    def _choose_shard(self, table: StreamTable, producer: StreamProducer | None) -> int:
        """Return the shard for rows without a key. All rows of a producer go to one shard, which keeps their order."""
        if producer is None:  # Such rows go to the shards one after another.
            self._next_shard = (self._next_shard + 1) % table.shards
            return self._next_shard
        return int.from_bytes(hashlib.sha256(producer.name.encode()).digest()[:4], "big") % table.shards

    def _check_memory(self, table: StreamTable, size_bytes: int, reserved_bytes: int = 0, other_bytes: int = 0) -> None:
        """Check that there is memory for rows of a table.

        With the new rows, a table may use at most as much memory as remains free. So one table uses at most half of the
        memory, and tables that are not flushed leave memory for other tables.

        Args:
            table: The table.
            size_bytes: The size of the new rows.
            reserved_bytes: The bytes that are reserved for other rows of the table.
            other_bytes: The size of the rows of other tables in the same request.

        Raises:
            TooManyRequests: The memory is full.
            TooLarge: The rows are larger than the memory that they may ever use.
        """
        limit_bytes = self._context.settings.stream_memory_bytes
        if 2 * size_bytes + other_bytes > limit_bytes:
            remark = f", and the rows of the other tables take {other_bytes:,} bytes" if other_bytes else ""
            raise TooLarge(
                f"The rows take {size_bytes:,} bytes{remark}; a table may use half of the memory that other tables "
                f"leave free of {limit_bytes:,} bytes (stream_memory_bytes). Send fewer rows"
            )
        free_bytes = limit_bytes - self.size_bytes - size_bytes - reserved_bytes - other_bytes
        if table.size_bytes + size_bytes + reserved_bytes > free_bytes:
            reservation_text = f", and large bodies reserve {reserved_bytes:,} bytes" if reserved_bytes else ""
            raise TooManyRequests(
                f"The rows that wait for a flush take {self.size_bytes:,} bytes of {limit_bytes:,} "
                f"(stream_memory_bytes), {table.size_bytes:,} of them for this table{reservation_text}; send the rows "
                "again later",
                _RETRY_AFTER_S,
            )

    async def load_fresh(self, entry: Entry, metadata: TableMetadata | None = None) -> FreshTable:
        """Return the table with all rows that were acknowledged before the call.

        Args:
            entry: A recent pointer of the table, with flushed offsets.
            metadata: The metadata of this pointer, or None if they must be loaded.

        Raises:
            NoSuchTable: The table was dropped meanwhile.
            SeveralKeys: The waiting rows have several keys, and this server may not flush them.
        """
        documents = self._context.documents
        for _ in range(_STALE_TRIES_MAX):
            if metadata is None:
                metadata = await documents.table(entry.metadata_location)
            flushed_offsets = entry.parse_flushed_offsets()
            try:
                table = await self._open(entry, metadata)
                fresh_rows = await table.get_fresh_rows(flushed_offsets)
            except LogElsewhere:  # A replica without the log serves only flushed rows.
                return FreshTable(LoadedTable(entry, metadata), None, flushed_offsets)
            except (FlushedBefore, SeveralKeys) as error:  # Read the pointer again, if necessary after a flush.
                if isinstance(error, SeveralKeys):
                    if self._context.settings.role == READ:
                        raise
                    await self.flush(entry.uuid)
                namespace, name, uuid = entry.namespace, entry.name, entry.uuid
                entry, metadata = await self._catalog.tables.load_entry(namespace, name), None
                if entry.uuid != uuid:
                    raise NoSuchTable("The name refers to another table now; load the table again") from None
                continue
            if not fresh_rows.parts:
                return FreshTable(LoadedTable(entry, metadata), None, fresh_rows.offsets)
            snapshot = await self.snapshots.make(
                table, entry, metadata, fresh_rows, make_fresh_folder_location(metadata)
            )
            return FreshTable(LoadedTable(entry, with_fresh_snapshot(metadata, snapshot)), snapshot, fresh_rows.offsets)
        raise RetryLater("The table was flushed again and again while the plan was made; try again")

    async def find_fresh_snapshot(self, entry: Entry, metadata: TableMetadata, snapshot_id: int) -> Snapshot | None:
        """Return the snapshot with this id, which has rows that no commit has added yet. None if it is too old."""
        return await self.snapshots.find(entry.uuid, snapshot_id, make_fresh_folder_location(metadata))

    async def open(self, entry: Entry) -> StreamTable:
        """Open the stream of a table with flushed offsets, or return the open stream.

        Raises:
            LogElsewhere: Another process uses the log, or this process has a different log.
        """
        return await self._open(entry, await self._context.documents.table(entry.metadata_location))

    async def open_log(self, entry: Entry, metadata: TableMetadata) -> StreamLog:
        """Return the log that contains the rows of a table with flushed offsets.

        Raises:
            LogElsewhere: Another process uses the log, or this process has a different log.
        """
        await self._open(entry, metadata)
        return await self._logs.open()

    async def _open(self, entry: Entry, metadata: TableMetadata) -> StreamTable:
        """Return the open stream of a table, or open it, as `_make_table` does."""
        table = self._tables.get(entry.uuid)
        if table is not None:
            # An `entry` without offsets is older than the stream. If it still has none, the table was dropped.
            if entry.flushed or (await self.stream_tables.load(entry.uuid))[0].flushed:
                return table
            if self._tables.get(entry.uuid) is table:
                self._close_table(table)
        return await self._opening.run(entry.uuid, lambda: self._make_table(entry, metadata))

    async def _make_table(self, entry: Entry, metadata: TableMetadata) -> StreamTable:
        """Open the stream of a table. Raise LogElsewhere if this process cannot open the log of the table's rows."""
        log = await self._logs.open()
        await check_writable(self._context, entry.uuid, metadata)
        await self.stream_tables.open_stream(entry, metadata, log)
        entry, metadata = await self.stream_tables.load(entry.uuid)
        settings = self._context.settings
        folder = make_fresh_folder_location(metadata)
        table = StreamTable(
            entry,
            log,
            self.stream_tables,
            self.row_files,
            self._objects,
            self._context.clock,
            StreamLimits(
                settings.stream_fresh_interval_ms / 1000,
                # Keep files longer, because a request may name a fresh snapshot after its files were replaced.
                settings.stream_fresh_retention_s + self.snapshots.lifetime_s,
            ),
            fresh_folder=folder,
            run_in_thread=self._run_in_thread,
            logged_bytes=partial(log.count_unreleased_bytes, entry.uuid) if isinstance(log, SharedLog) else lambda: 0,
        )
        table.keeps_rows = self._owners.is_owner(entry.uuid)
        await log.catch_up()
        stored_watermarks = log.read_watermarks([Shard(entry.uuid, number) for number in table.flushed])
        for shard, watermark in stored_watermarks.items():
            if watermark < table.flushed[shard.number]:
                # Refuse this log: new rows would get the offsets of flushed rows, and no reader would see them.
                raise LogElsewhere(
                    f"The log of this server has {watermark} rows of shard {shard.number} of the table {entry.uuid}, "
                    f"and {table.flushed[shard.number]} were flushed: it is not the log that the rows of the table "
                    "were in. Restore that log"
                )
        # Schedule the fresh files of other processes for deletion. Another process may still have the table open.
        listed_files = [info async for info in self._objects.list(folder)]
        unused_files = [info.location for info in listed_files]
        if self._logs.is_shared:
            used_since_ms = self._context.clock.now_ms() - _FOREIGN_FILES_MS
            unused_files = [info.location for info in listed_files if info.modified_ms < used_since_ms]
        table.delete_files_later(unused_files)
        if table.keeps_rows:
            # Repeat the release, because the process that flushed the rows may have stopped before it.
            await table.release()
        self._tables[entry.uuid] = table
        state = self._flushes.setdefault(entry.uuid, FlushState())
        state.interval_ms = read_interval_ms(metadata)
        # Flush the first rows immediately, because engines do not plan scans of a table without a snapshot.
        has_first_rows = metadata.current_snapshot_id is None and table.unflushed_rows > 0
        state.is_due = has_first_rows and self._owners.is_owner(entry.uuid)
        return table

    def _run_in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)

    async def flush(self, uuid: str) -> int:
        """Flush a table now, and return the number of flushed rows.

        Raises:
            CommitConflict: Other commits were faster in all attempts.
            LogElsewhere: The table is a stream table, and this process does not have its log.
            ReadOnlyServer: This server has the role `read`.
        """
        if self._context.settings.role == READ:
            raise refuse_change(self._context.settings, "a statement or request that flushes a stream table")
        entry, metadata = await self.stream_tables.load(uuid)
        try:
            table = await self._open(entry, metadata)
        except LogElsewhere:
            if is_stream_table(metadata):
                raise
            return 0  # The log of a former stream table is lost, or its server flushes the last rows.
        if (state := self._flushes.get(uuid)) is not None:
            state.is_due = False
        for attempt in range(1, _FLUSH_TRIES_MAX + 1):
            try:
                return await self._flush_and_count(table)
            except CommitConflict:  # Another process has flushed the rows, or has committed at the same time.
                if attempt == _FLUSH_TRIES_MAX:
                    raise
            await asyncio.sleep(_TICK_S)
        raise AssertionError("the loop returns or raises")

    async def _flush_and_count(self, table: StreamTable, *, only_first: bool = False) -> int:
        rows = await table.flush(only_first=only_first)
        if (state := self._flushes.get(table.uuid)) is not None:
            state.failures, state.is_blocked = 0, False
        self.counts.flushes += rows > 0
        self.counts.flushed_rows += rows
        return rows

    async def drain(self, uuid: str) -> int:
        """Flush a paused table until no rows are waiting, and return the number of flushed rows.

        Raises:
            NoSuchTable: The table was dropped meanwhile.
        """
        rows = await self.flush(uuid)
        while (table := self._tables.get(uuid)) is None or table.appending_bytes or table.unflushed_rows:
            await asyncio.sleep(_TICK_S)
            rows += await self.flush(uuid)  # This also opens a table that was closed while it had no name.
        return rows

    async def flush_for_removal(self, entry: Entry, read_snapshot_id: int | None) -> None:
        """Flush a table before a commit that removes rows, so that the commit conflicts with rows that it has not read.

        Otherwise, the commit could miss rows that readers had already seen, but that were not in files yet. After the
        conflict, the client repeats the statement. The second commit has read the flush, and does not cause another
        flush. The flush is recorded in the database, so the second commit may be sent to a different process.

        Args:
            entry: The table.
            read_snapshot_id: The snapshot that the commit has read.

        Raises:
            BadRequest: Another server may have rows of the table that wait for a flush.
        """
        if not entry.flushed:  # The table has no stream.
            return
        current_entry, metadata = await self.stream_tables.load(entry.uuid)
        try:
            table = await self._open(current_entry, metadata)
        except LogElsewhere as error:
            check_has_no_stream(current_entry, metadata, error)
            return
        store = self._context.store
        await table.load_watermarks()
        (is_repeated,) = await store.transact([TakeRemovalFlush(entry.uuid, read_snapshot_id)])
        if not is_repeated and await self._flush_and_count(table):
            _, metadata = await self.stream_tables.load(entry.uuid)
            if metadata.current_snapshot_id is not None:
                await store.transact([RecordRemovalFlush(entry.uuid, metadata.current_snapshot_id)])

    async def run(self) -> None:
        """Flush tables that are due until the task is cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            await self.start_due_flushes()

    async def start_due_flushes(self) -> None:
        """Start the flushes that are due, and delete files that are no longer needed."""
        now_s, now_ms = self._context.clock.monotonic(), self._context.clock.now_ms()
        limit_bytes = self._context.settings.stream_memory_bytes
        due_tables = [
            table
            for uuid, table in self._tables.items()
            if self._flushes[uuid].task is None and now_s >= self._flushes[uuid].not_before_s
        ]
        largest_table = max(due_tables, key=lambda table: table.size_bytes, default=None)
        # Flush the largest table before it uses half of the memory, which is its limit (`_check_memory`).
        is_crowded = self.size_bytes > limit_bytes * _CROWDED_FRACTION
        for table in due_tables:
            state = self._flushes[table.uuid]
            table.keeps_rows = self._owners.is_owner(table.uuid)  # Only the owner needs the rows for flushes.
            if state.is_due or (is_crowded and table is largest_table) or self._record_and_check_age(table, now_ms):
                is_due, state.is_due = state.is_due, False
                work = self._flush(table, state, is_first_flush=is_due)
                state.task = asyncio.create_task(work, name=f"flush {table.uuid}")
        if now_s - self._cleaned_s >= _CLEAN_INTERVAL_S and (self._cleanup_task is None or self._cleanup_task.done()):
            self._cleaned_s = now_s
            self._cleanup_task = asyncio.create_task(self._clean(), name="clean fresh files")

    async def _clean(self) -> None:
        """Delete fresh files that are no longer needed. A separate task runs this method, as storage can be slow."""
        for table in list(self._tables.values()):
            try:
                await table.clean()
            except SeamarkError as error:  # A later round tries again.
                _log.warning("old fresh files were not deleted", table=table.uuid, error=error.message)

    def report_flushes(self, uuid: str) -> FlushReport | None:
        """Return the state of the flushes of a table, or None if the table is not open."""
        table, state = self._tables.get(uuid), self._flushes.get(uuid)
        if table is None or state is None:
            return None
        interval_ms = state.interval_ms or self._context.settings.stream_flush_interval_ms
        return FlushReport(table.oldest_ms, interval_ms, state.failures, state.error, state.is_blocked)

    def _record_and_check_age(self, table: StreamTable, now_ms: int) -> bool:
        """Return whether the oldest unflushed row is old enough for a flush. Record since when rows wait in the log."""
        state = self._flushes[table.uuid]
        oldest_ms = table.oldest_ms
        if oldest_ms is not None or not table.unflushed_rows:
            state.waiting_since_ms = None
        elif state.waiting_since_ms is None:
            # The rows belong to another process, or an append has just made them durable.
            state.waiting_since_ms = now_ms
        since_ms = oldest_ms if oldest_ms is not None else state.waiting_since_ms
        interval_ms = state.interval_ms or self._context.settings.stream_flush_interval_ms
        return since_ms is not None and now_ms - since_ms >= interval_ms

    async def _flush(self, table: StreamTable, state: FlushState, *, is_first_flush: bool) -> None:
        """Flush a table, or remove the rows from memory that its owner has flushed. Record a failure in `state`.

        Args:
            table: The table.
            state: The state of its flushes.
            is_first_flush: Whether to flush young rows, because engines do not read a table without a snapshot.
        """
        try:
            if not self._owners.is_owner(table.uuid):
                await table.drop_flushed_rows()
            if not table.unflushed_rows:
                self._owners.forget(table.uuid)
            elif is_first_flush or self._owners.may_flush(table.uuid, table.flushed, self._context.clock.now_ms()):
                # A flush of the first rows does nothing if another flush was faster.
                await self._flush_and_count(table, only_first=is_first_flush)
            state.waiting_since_ms = None
            state.failures, state.is_blocked = 0, False
        except NoSuchTable:  # The rows stay in the log until the table is restored or purged.
            self._close_table(table)
        except SeamarkError as error:
            state.failures += 1
            state.error, state.is_blocked = error.message, isinstance(error, BadRequest | Corrupt)
            state.is_due = state.is_due or is_first_flush
            self.counts.failed_flushes += 1
            pause_s = min(_RETRY_MAX_S, _RETRY_S * 2 ** min(state.failures - 1, _DOUBLINGS_MAX))
            state.not_before_s = self._context.clock.monotonic() + pause_s
            _log.warning("a flush failed; it is tried again", table=table.uuid, error=error.message, pause_s=pause_s)
        except Exception:  # noqa: BLE001  a bug of one table must not end the flushes of all
            state.failures += 1
            state.error, state.is_blocked = "an unexpected error; the log of the server has it", True
            self.counts.failed_flushes += 1
            state.not_before_s = self._context.clock.monotonic() + _RETRY_MAX_S
            _log.exception("a flush failed unexpectedly", table=table.uuid)
        finally:
            state.task = None

    def _close_table(self, table: StreamTable) -> None:
        self._tables.pop(table.uuid, None)
        self._flushes.pop(table.uuid, None)
        self.snapshots.forget(table.uuid)
        self._owners.forget(table.uuid)
        self._accepted_keys.forget(table.uuid)
        self._current.forget(table.uuid)

    async def close(self) -> None:
        """Wait for running flushes, and cancel the deletion of files."""
        if self._cleanup_task is not None:
            self._cleanup_task.cancel()
            await asyncio.gather(self._cleanup_task, return_exceptions=True)
        await self.openings.close()
        await self.gates.close()
        tasks = [state.task for state in self._flushes.values() if state.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)
        self._current.close()
        self.gets.close()
