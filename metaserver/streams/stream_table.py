"""The protocol of one stream table: append → rows in memory → fresh files → flush → release.

- A row is acknowledged after it is durable in the log. Rows in memory and fresh files only make durable rows readable.
- A reader gets the files of a pointer, and the fresh rows from the flushed offsets of this pointer up to the watermarks
  at one moment. So a flush neither hides nor repeats a row, and a reader sees either all rows of an append or none.
- A flush adds files with the rows from the flushed offset to a later offset, and moves the flushed offset there, in one
  transaction. Any process may flush, and each row is added once.
- Rows are removed from memory, and fresh files are no longer used, only after the flushed offset has passed them.

The class accesses sockets, databases and files only through ports, so that a simulation can run it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, OffsetOutOfRange, RetryLater, SeamarkError
from seamark.metaserver.log.port import Acknowledgement, Batch, Record, Shard, SharedLog, StreamLog, StreamProducer
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams.blocks import ShardBlocks
from seamark.metaserver.streams.fresh_parts import FreshPart, FreshParts
from seamark.metaserver.streams.row_files import (
    EncodedDeletes,
    EncodedFile,
    EncodedIndexFile,
    KeyedRows,
    RowFiles,
    RowKey,
    RowSlice,
)
from seamark.metaserver.streams.stored_rows import StoredRows

_log = structlog.get_logger("seamark.streams")


class FlushedBefore(CommitConflict):
    """Raised if a reader has loaded the table before rows were flushed. The reader must load the table again."""


class SeveralKeys(RetryLater):
    """Raised if waiting rows have different keys, because the key of the table has changed. A flush is necessary."""


class StreamTables(Protocol):
    """The interface to the tables of the catalog."""

    async def load(self, uuid: str) -> tuple[Entry, TableMetadata]:
        """Return the catalog entry of a table, with its flushed offsets, and the metadata to which the entry points.

        Raises:
            NoSuchTable: No name refers to the table.
        """

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

        Args:
            entry: The catalog entry of the table.
            metadata: The metadata to which the entry points, with which the files were written.
            files: The data files.
            ranges: The ranges of offsets of the rows in the files.
            deletes: The deletes of stored rows that the new rows replace, or None for a table without a key.
            index_files: The stored index files that describe the data files.

        Raises:
            CommitConflict: Nothing was committed: the offsets have moved, or the table has changed.
            CommitUnknown: The outcome is unknown.
        """

    def find_key_columns(self, metadata: TableMetadata) -> tuple[str, ...]:
        """Return the names of the key columns, or no names for a table without a valid key."""

    def open_stored_rows(self, entry: Entry, metadata: TableMetadata) -> StoredRows:
        """Return access to the rows in the files of the current snapshot."""


class StreamLimits(NamedTuple):
    """The limits of one stream table. A fresh file has rows that no commit has added to the table yet.

    Attributes:
        fresh_interval_s: The minimum time between two writes of fresh files.
        fresh_retention_s: The time for which fresh files that new plans no longer contain are kept for running queries.
        part_bytes_max: The maximum size of the rows that are written to fresh files together.
    """

    fresh_interval_s: float
    fresh_retention_s: float
    part_bytes_max: int = 64 << 20


class FreshRows(NamedTuple):
    """The rows that a plan adds to the files of the table's committed metadata, because no commit has added them yet.

    Attributes:
        parts: The files with these rows (fresh files), in the order of shards and offsets.
        offsets: The offset after the last fresh row, by shard.
    """

    parts: tuple[FreshPart, ...]
    offsets: Mapping[int, int]


T = TypeVar("T")
_SLOW_WRITE_S = 1.0
"""The duration of a failed write of fresh files from which on all waiting readers get its error."""
_CONCURRENT_PARTS_MAX = 4
"""The maximum number of parts of a shard that are written concurrently, each in a thread."""
KEYED_COMMITS_MAX = 20
"""The maximum number of attempts to commit a flush of a table with a key, if other commits change the same rows."""


class RunInThread(Protocol):
    """Runs a blocking function in a thread, so that it does not block the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class StreamTable:
    """One stream table. An instance belongs to one event loop."""

    def __init__(
        self,
        entry: Entry,
        log: StreamLog,
        tables: StreamTables,
        files: RowFiles,
        objects: ObjectStore,
        clock: Clock,
        limits: StreamLimits,
        *,
        fresh_folder: str,
        run_in_thread: RunInThread = asyncio.to_thread,
        logged_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Open the table in the state of its pointer.

        Args:
            entry: The pointer, with the flushed offset of each shard.
            log: The log.
            tables: The tables of the catalog.
            files: Encodes rows.
            objects: The storage.
            clock: The clock.
            limits: The limits.
            fresh_folder: The location of the folder for fresh files.
            run_in_thread: Runs the encoding of rows.
            logged_bytes: Returns the size of the unflushed rows of all processes, or 0 if the log does not count them.
        """
        self.uuid = entry.uuid
        self._log = log
        self._tables = tables
        self._files = files
        self._objects = objects
        self._clock = clock
        self._limits = limits
        self._fresh_folder = fresh_folder
        self._run_in_thread = run_in_thread
        self._flushed_offsets = entry.parse_flushed_offsets()
        self._blocks = {
            number: ShardBlocks(log, Shard(self.uuid, number), offset)
            for number, offset in self._flushed_offsets.items()
        }
        self._parts = {number: FreshParts() for number in self._flushed_offsets}
        self._flush_ends: Mapping[int, int] = {}
        """The offset of each shard at which the running flush ends. It is empty if no flush is running."""
        self._written_s = -limits.fresh_interval_s
        self._written_watermarks: Mapping[int, int] = {}
        """The watermarks at the moment when the last write of fresh files began, which the fresh files should reach.

        After a failure, or after a flush that crossed a part, only some shards reach them.
        """
        self._writes = self._failed_write = 0
        """The number of started writes of fresh files, and the number of the last failed write."""
        self._write_error: SeamarkError | None = None
        """The error of the last failed write that took at least `_SLOW_WRITE_S`."""
        self._fresh_lock, self._flush_lock = asyncio.Lock(), asyncio.Lock()
        self._unneeded_files: list[tuple[float, str]] = []
        """The files that new plans no longer contain: the time at which they are deleted, and their locations."""
        self._is_release_late = False
        """Whether a release of flushed rows has failed and must be repeated."""
        self.appending_bytes = 0
        self.reserved_bytes = 0
        """The total size of large bodies that are being prepared for an append."""
        self.arriving_bytes = 0
        """The total announced size of large bodies that are being received."""
        self.arrivals = asyncio.Lock()
        """A lock that the first large body holds that waits to be received. Later bodies wait for the lock."""
        self._logged_bytes = logged_bytes
        self.keeps_rows = True
        """Whether rows that this process appends are kept in memory. A different owner reads them from the log."""

    @property
    def shards(self) -> int:
        return len(self._blocks)

    @property
    def flushed(self) -> Mapping[int, int]:
        """The highest known flushed offset of each shard."""
        return self._flushed_offsets

    @property
    def size_bytes(self) -> int:
        """The size of the rows of running appends and of the unflushed rows.

        For the unflushed rows, the larger size counts: in memory, or in the log, which has the rows of all processes.
        """
        kept_bytes = sum(blocks.size_bytes for blocks in self._blocks.values())
        return self.appending_bytes + max(kept_bytes, self._logged_bytes())

    @property
    def oldest_ms(self) -> int | None:
        """The time at which the log received the oldest unflushed row, or None if all rows are flushed."""
        return min((blocks.oldest_ms for blocks in self._blocks.values() if blocks.oldest_ms is not None), default=None)

    @property
    def unflushed_rows(self) -> int:
        watermarks = self.read_watermarks()
        return sum(watermark - self._flushed_offsets[number] for number, watermark in watermarks.items())

    def read_watermarks(self) -> dict[int, int]:
        """Return the offset after the last durable row of each shard at one moment, or the flushed offset if larger."""
        watermarks = self._log.read_watermarks([Shard(self.uuid, number) for number in self._blocks])
        return {
            shard.number: max(watermark, self._flushed_offsets[shard.number]) for shard, watermark in watermarks.items()
        }

    async def load_watermarks(self) -> dict[int, int]:
        """Return watermarks that include all rows that any process acknowledged before the call."""
        await self._log.catch_up()
        return self.read_watermarks()

    def list_fresh_files(self) -> list[EncodedFile]:
        """Return the files of rows that no commit has added to the table yet (fresh files), for the next plan."""
        return [file for shard_parts in self._parts.values() for part in shard_parts.parts for file in part.files]

    async def append(
        self,
        batches: Mapping[int, Batch],
        producer: StreamProducer | None = None,
        gates: Mapping[str, int] | None = None,
    ) -> Acknowledgement:
        """Append all rows to the shards, or none, as `append_to_tables` does. The rows are durable on return.

        `gates` has, by UUID, the number of the table's gate when the rows were checked. The number rises when a commit
        that changes how rows are written begins or ends. Then the log refuses the append.
        """
        return await append_to_tables({self: batches}, producer, gates)

    async def get_fresh_rows(self, flushed_offsets: Mapping[int, int]) -> FreshRows:
        """Return fresh files with the rows that were acknowledged before the call, and are not in the reader's files.

        Fresh files are files with rows that no commit has added to the table yet. They are written at most once in
        `fresh_interval_s` for all readers. A reader waits for the next write if necessary, so that it gets all rows. If
        a slow write fails, all waiting readers get its error, because otherwise they would wait for the storage one
        after another.

        Args:
            flushed_offsets: For each shard, the offset up to which the files in the reader's metadata have the rows.

        Raises:
            FlushedBefore: A later flush has removed rows from memory. The caller must load the table again.
            SeveralKeys: The rows have several keys. The caller must flush the table, and load it again.
        """
        await self._log.catch_up()
        requested_offsets, last_write = self.read_watermarks(), self._writes
        async with self._fresh_lock:
            self._advance_to_reader(flushed_offsets)
            if self._is_behind(requested_offsets) or self._is_behind(self._written_watermarks):
                if self._write_error is not None and self._failed_write > last_write:
                    raise self._write_error
                pause_s = self._written_s + self._limits.fresh_interval_s - self._clock.monotonic()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                    self._advance_to_reader(flushed_offsets)
                self._writes += 1
                start_s = self._clock.monotonic()
                try:
                    await self._write_parts(self.read_watermarks())
                except FlushedBefore:
                    raise
                except SeamarkError as error:
                    if self._clock.monotonic() - start_s >= _SLOW_WRITE_S:
                        self._failed_write, self._write_error = self._writes, error
                    raise
            self._advance_to_reader(flushed_offsets)  # A flush may have ended meanwhile.
            if self._is_behind(requested_offsets):
                raise FlushedBefore("Fresh files were removed while others were written; load the table again")
            parts = tuple(part for number in sorted(self._parts) for part in self._parts[number].parts)
            return FreshRows(parts, {number: self._get_covered_offset(number) for number in self._parts})

    def _is_behind(self, watermarks: Mapping[int, int]) -> bool:
        """Return whether a shard has rows below its watermark that are in no file, not even a file without a commit."""
        return any(
            self._get_covered_offset(number) < max(watermark, self._flushed_offsets[number])
            for number, watermark in watermarks.items()
        )

    def _get_covered_offset(self, shard_number: int) -> int:
        return self._parts[shard_number].get_covered_offset(self._flushed_offsets[shard_number])

    def _advance_to_reader(self, flushed_offsets: Mapping[int, int]) -> None:
        """Remove rows that are already in the files of the metadata that a reader has loaded.

        Raises:
            FlushedBefore: The reader loaded the metadata before the last flush.
        """
        if any(flushed_offsets.get(number, 0) < offset for number, offset in self._flushed_offsets.items()):
            raise FlushedBefore("The table was flushed meanwhile; load it again")
        self._drop_flushed(flushed_offsets)

    async def _write_parts(self, watermarks: Mapping[int, int]) -> None:
        """Write the rows up to these offsets to fresh files, which plans read until a flush commits the rows.

        Raises:
            SeveralKeys: The rows have several keys.
        """
        entry, metadata = await self._tables.load(self.uuid)
        # First skip rows that another process has flushed, because they may not fit these metadata.
        self._drop_flushed(entry.parse_flushed_offsets())
        self._written_s = self._clock.monotonic()
        self._written_watermarks = watermarks
        key_columns = self._tables.find_key_columns(metadata)
        ranges_by_shard: dict[int, list[tuple[int, int]]] = {}
        for number, watermark in watermarks.items():
            await self._read_rows(number, watermark)
            ranges_by_shard[number] = self._choose_ranges(number, watermark)
        # Find the key before any file is written, because all parts must have the same key.
        all_ranges = [(number, start, end) for number, ranges in ranges_by_shard.items() for start, end in ranges]
        key = await self._find_key(all_ranges, metadata)
        for number, shard_ranges in ranges_by_shard.items():
            blocks, parts = self._blocks[number], self._parts[number]
            written_parts: list[FreshPart] = []
            try:
                for first in range(0, len(shard_ranges), _CONCURRENT_PARTS_MAX):
                    next_ranges = shard_ranges[first : first + _CONCURRENT_PARTS_MAX]
                    written_parts += await self._write_ranges(number, next_ranges, metadata, key, key_columns)
            finally:
                # After a failure, keep the written parts, because they are the first parts, and valid without the rest.
                if written_parts and parts.is_next(written_parts[0].start, blocks.start):
                    self._delete_parts_later(parts.replace(written_parts))
                else:  # A flush has ended meanwhile.
                    self._delete_parts_later(written_parts)

    def _choose_ranges(self, shard_number: int, watermark: int) -> list[tuple[int, int]]:
        """Return the ranges of the parts to write, so that the parts of a shard reach the watermark."""
        blocks, parts = self._blocks[shard_number], self._parts[shard_number]
        ranges: list[tuple[int, int]] = []
        for chosen_range in parts.choose_ranges(blocks.start, watermark, self._flush_ends.get(shard_number)):
            ranges += blocks.split(chosen_range.start, chosen_range.end, bytes_max=self._limits.part_bytes_max)
        return ranges

    async def _find_key(self, ranges: Sequence[tuple[int, int, int]], metadata: TableMetadata) -> RowKey:
        """Return the key columns of the rows in these ranges and in the existing fresh files.

        Raises:
            SeveralKeys: The rows have several keys. Shards and hashes depend on the key, so a part cannot delete rows
                of a part with a different key.
        """
        rows = [row_slice for number, start, end in ranges for row_slice in self._read_slices(number, start, end)]
        keys = {part.key for parts in self._parts.values() for part in parts.parts}
        # Each row of a table with a key has a kind: insert, update or delete. Rows without kinds have the empty key.
        if any(row_slice.kinds for row_slice in rows):
            keys |= await self._run_in_thread(partial(self._files.list_keys, rows, metadata))
        elif rows:
            keys.add(())
        if len(keys) > 1:
            raise SeveralKeys(
                "The key of the stream table has changed, and rows with several keys wait for a flush; try again"
            )
        return next(iter(keys), ())

    async def _write_ranges(
        self,
        number: int,
        ranges: Sequence[tuple[int, int]],
        metadata: TableMetadata,
        key: RowKey,
        key_columns: tuple[str, ...],
    ) -> list[FreshPart]:
        """Write the parts of several ranges of a shard concurrently. After a failure, delete their files."""

        async def write(start: int, end: int) -> FreshPart:
            rows = self._read_slices(number, start, end)
            files, keyed_rows = await self._store(rows, metadata, self._fresh_folder, key_columns)
            return FreshPart(number, start, end, tuple(map(_drop_data, files)), key, keyed_rows)

        outcomes = await asyncio.gather(*(write(start, end) for start, end in ranges), return_exceptions=True)
        written_parts = [outcome for outcome in outcomes if isinstance(outcome, FreshPart)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            self._delete_parts_later(written_parts)
            raise errors[0]
        return written_parts

    async def _read_rows(self, shard_number: int, end: int) -> None:
        """Read the rows of a shard into memory, up to the offset `end`.

        Raises:
            FlushedBefore: Another process has flushed some of the rows, and the log has removed them.
        """
        start = self._blocks[shard_number].start
        try:
            await self._blocks[shard_number].catch_up(end)
        except OffsetOutOfRange:
            await self.drop_flushed_rows()
            if self._blocks[shard_number].start == start:
                raise
            raise FlushedBefore("Another process has flushed these rows; load the table again") from None

    def _read_slices(self, shard_number: int, start: int, end: int) -> list[RowSlice]:
        """Return the rows of a shard in memory from `start` to `end` (exclusive).

        Raises:
            FlushedBefore: Another process has flushed some of the rows meanwhile.
        """
        if start < self._blocks[shard_number].start:
            raise FlushedBefore("Another process has flushed these rows; load the table again")
        return self._blocks[shard_number].list_slices(start, end)

    async def _store(
        self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None, key: tuple[str, ...]
    ) -> tuple[Sequence[EncodedFile], KeyedRows]:
        """Encode the rows, and store their files. After an error, schedule the files for deletion.

        Rows with kinds belong to a table with a key. Only the latest row of each key is stored.

        Args:
            rows: The rows.
            metadata: The metadata of the table.
            folder: The folder for fresh files, or None for a flush, whose files must be durable.
            key: The names of the current key columns.

        Returns:
            Two values: the files; and the rows with their keys, or None if the rows have no key.
        """
        keyed_rows: KeyedRows = None
        if any(part.kinds for part in rows):
            files, keyed_rows = await self._run_in_thread(
                partial(self._files.encode_keyed, rows, metadata, folder, key)
            )
        else:
            files = await self._run_in_thread(partial(self._files.encode, rows, metadata, folder))
        await self._create([(file.location, file.data) for file in files], durable=folder is None)
        return files, keyed_rows

    async def _store_index_files(
        self, files: Sequence[EncodedFile], metadata: TableMetadata
    ) -> Sequence[EncodedIndexFile]:
        """Store and return the index files of a flush, or return no files after an error: the indexer builds them."""
        try:
            index_files = await self._run_in_thread(partial(self._files.encode_index_files, files, metadata))
            await self._create(index_files, durable=True)
        except Exception as error:  # noqa: BLE001  a failed index must not delay the flush
            _log.warning("a flush has no index files", table=self.uuid, error=str(error))
            return ()
        return index_files

    async def _create(self, files: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Store files. After an error, schedule them for deletion.

        Fresh files need not be durable, because the log has their rows, and no plan contains the files after a restart.
        """
        results = await asyncio.gather(
            *(self._objects.create(location, data, durable=durable) for location, data in files),
            return_exceptions=True,
        )
        errors = [error for error in results if isinstance(error, BaseException)]
        if errors:
            self.delete_files_later([location for location, _ in files])
            raise errors[0]

    async def store_deletes(
        self, keyed_rows: Sequence[KeyedRows], entry: Entry, metadata: TableMetadata, *, fresh: bool
    ) -> EncodedDeletes:
        """Store delete files for the rows in the table's files that rows of the log with the same key replace.

        Args:
            keyed_rows: The rows of the log with their keys, in the order of the log.
            entry: The catalog entry of the table.
            metadata: The metadata to which the entry points.
            fresh: Whether the delete files are fresh files, which plans contain before a commit.
        """
        folder = self._fresh_folder if fresh else None
        stored_rows = self._tables.open_stored_rows(entry, metadata)
        deletes = await self._run_in_thread(
            partial(self._files.encode_deletes, keyed_rows, metadata, stored_rows, folder)
        )
        await self._create(deletes.files, durable=not fresh)
        return deletes

    async def flush(self, *, only_first: bool = False) -> int:
        """Add the rows in memory to the table's files, and return their number.

        Args:
            only_first: Whether to do nothing if an earlier flush has already added rows to the table.

        Raises:
            CommitConflict: Nothing was committed. The next flush tries again.
            CommitUnknown: The outcome is unknown. The next flush determines it.
        """
        async with self._flush_lock:
            # Read the watermarks first, so that the metadata contain the schemas of all rows.
            watermarks = await self.load_watermarks()
            entry, metadata = await self._tables.load(self.uuid)
            self._drop_flushed(entry.parse_flushed_offsets())
            if only_first and any(self._flushed_offsets.values()):
                return 0
            ranges = [
                FlushedRange(number, self._flushed_offsets[number], watermark)
                for number, watermark in sorted(watermarks.items())
                if watermark > self._flushed_offsets[number]
            ]
            if not ranges:
                return 0
            self._flush_ends = watermarks
            try:
                for flushed_range in ranges:
                    await self._read_rows(flushed_range.shard, flushed_range.end)
                rows = [
                    row_slice
                    for flushed_range in ranges
                    for row_slice in self._read_slices(flushed_range.shard, flushed_range.start, flushed_range.end)
                ]
                files, keyed_rows = await self._store(rows, metadata, None, self._tables.find_key_columns(metadata))
                index_files = await self._store_index_files(files, metadata)
                try:
                    if keyed_rows is None:
                        await self._tables.commit(entry, metadata, files, ranges, index_files=index_files)
                    else:
                        await self._commit_keyed(entry, metadata, files, ranges, keyed_rows, index_files)
                except CommitUnknown:
                    raise  # The files may be live.
                except SeamarkError:
                    locations = [file.location for file in files]
                    self.delete_files_later([*locations, *(file.location for file in index_files)])
                    raise
            finally:
                self._flush_ends = {}
            self._drop_flushed({flushed_range.shard: flushed_range.end for flushed_range in ranges})
            await self.release()
            return sum(flushed_range.end - flushed_range.start for flushed_range in ranges)

    async def _commit_keyed(
        self,
        entry: Entry,
        metadata: TableMetadata,
        files: Sequence[EncodedFile],
        ranges: Sequence[FlushedRange],
        keyed_rows: KeyedRows,
        index_files: Sequence[EncodedIndexFile],
    ) -> None:
        """Commit files, with the deletes of the stored rows that their rows replace.

        If another commit changes or moves these stored rows meanwhile, find them again, and write new delete files.

        Raises:
            CommitConflict: Another process has flushed the rows, or every attempt conflicted with other commits.
        """
        for attempt in range(1, KEYED_COMMITS_MAX + 1):
            deletes = await self.store_deletes([keyed_rows], entry, metadata, fresh=False)
            try:
                await self._tables.commit(entry, metadata, files, ranges, deletes, index_files)
            except CommitUnknown:
                raise  # The files may be live.
            except SeamarkError as error:
                self.delete_files_later([location for location, _ in deletes.files])
                if not isinstance(error, CommitConflict) or attempt == KEYED_COMMITS_MAX:
                    raise
                entry, metadata = await self._tables.load(self.uuid)
                flushed_offsets = entry.parse_flushed_offsets()
                # Another process has flushed some of the rows.
                if any(flushed_offsets.get(flushed_range.shard) != flushed_range.start for flushed_range in ranges):
                    raise
            else:
                return

    async def drop_flushed_rows(self) -> None:
        """Remove the rows from memory that the owner of the table has flushed."""
        entry, _ = await self._tables.load(self.uuid)
        self._drop_flushed(entry.parse_flushed_offsets())

    async def release(self) -> None:
        """Allow the log to remove flushed rows. If this fails, `clean` tries again."""
        try:
            await self._log.release(
                {Shard(self.uuid, number): offset for number, offset in self._flushed_offsets.items()}
            )
        except SeamarkError as error:
            self._is_release_late = True
            _log.warning("the log did not release flushed rows", table=self.uuid, error=error.message)
        else:
            self._is_release_late = False

    def _drop_flushed(self, flushed_offsets: Mapping[int, int]) -> None:
        """Remove rows from memory, and fresh files, whose rows are now in the table's files.

        Offsets that are not later than the known offsets, and shards that are not open, are ignored.
        """
        for number, offset in flushed_offsets.items():
            if offset <= self._flushed_offsets.get(number, offset):
                continue
            self._flushed_offsets[number] = offset
            self._blocks[number].release(offset)
            self._delete_parts_later(self._parts[number].drop_flushed(offset))

    def _delete_parts_later(self, parts: Sequence[FreshPart]) -> None:
        self.delete_files_later([file.location for part in parts for file in part.files])

    def delete_files_later(self, locations: Sequence[str]) -> None:
        """Schedule files for deletion at the end of their retention, when no running query can need them."""
        due_s = self._clock.monotonic() + self._limits.fresh_retention_s
        for location in locations:
            heapq.heappush(self._unneeded_files, (due_s, location))

    async def clean(self) -> int:
        """Delete the files whose retention has passed, and return their number. First repeat a failed `release`."""
        if self._is_release_late:
            await self.release()
        now_s, deleted_count = self._clock.monotonic(), 0
        while self._unneeded_files and self._unneeded_files[0][0] <= now_s:
            await self._objects.delete(self._unneeded_files[0][1])
            heapq.heappop(self._unneeded_files)
            deleted_count += 1
        return deleted_count

    def check_invariants(self) -> None:
        """Check that rows in memory, and files of rows that are not committed yet, begin at the flushed offsets."""
        for number, flushed_offset in self._flushed_offsets.items():
            self._blocks[number].check_invariants()
            self._parts[number].check_invariants()
            assert self._blocks[number].start == flushed_offset
            parts = self._parts[number].parts
            assert not parts or parts[0].start == flushed_offset


async def append_to_tables(
    batches: Mapping[StreamTable, Mapping[int, Batch]],
    producer: StreamProducer | None = None,
    gates: Mapping[str, int] | None = None,
) -> Acknowledgement:
    """Append all rows to shards of several tables with the same log, or none. The rows are durable on return.

    The acknowledged rows of a table are also kept in memory if this process flushes the table.

    A shared log has a gate for each table, which a commit closes while it changes how rows are written. See
    `StreamLog.append` and `SharedLog.append` for errors.

    Args:
        batches: The rows of each table, by shard.
        producer: The producer and the sequence number, by which the log recognises a repeated append.
        gates: The number of each table's gate when its rows were checked. It changes when the gate is closed or opened.
    """
    sizes = {table: sum(batch.size_bytes for batch in rows.values()) for table, rows in batches.items()}
    batch_by_shard = {
        Shard(table.uuid, number): batch for table, rows in batches.items() for number, batch in rows.items()
    }
    first_table = next(iter(batches))  # All tables have the same log and the same clock.
    for table, size_bytes in sizes.items():
        table.appending_bytes += size_bytes
    try:
        if gates:
            acknowledgement = await cast("SharedLog", first_table._log).append(batch_by_shard, producer, gates)
        else:
            acknowledgement = await first_table._log.append(batch_by_shard, producer)
    finally:
        for table, size_bytes in sizes.items():
            table.appending_bytes -= size_bytes
    if not acknowledgement.duplicate:
        table_by_uuid = {table.uuid: table for table in batches}
        now_ms = first_table._clock.now_ms()
        for position in acknowledgement.positions:
            table = table_by_uuid[position.shard.stream]
            if table.keeps_rows:
                record = Record(position.shard, position.offset, batch_by_shard[position.shard], now_ms)
                table._blocks[position.shard.number].offer(record)
    return acknowledgement


def _drop_data(file: EncodedFile) -> EncodedFile:
    return EncodedFile(file.location, b"", file.content_file, file.rows)
