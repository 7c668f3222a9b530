"""A stream table without a server. The log is in memory, and the catalog and the storage are dictionaries.

Rows are numbers. A payload is the JSON of the numbers, and a file is the list of its numbers, so that a test can read
files as a reader would.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, RetryLater
from seamark.metaserver.log.port import Batch
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.store.model import Entry, EntryKind
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams.row_files import EncodedFile, EncodedIndexFile, RowKey, RowSlice
from seamark.metaserver.streams.stream_table import FlushedBefore, StreamLimits, StreamTable
from tests.log.memory import MemoryLog, open_memory_log

UUID = "uuid-of-t"


class NumberFiles:
    """Encodes rows, in place of `RowFiles`. The content of a file is the JSON of its numbers."""

    def __init__(self) -> None:
        self.file_count = 0

    def encode(self, rows: Sequence[RowSlice], metadata: TableMetadata, folder: str | None) -> list[EncodedFile]:
        numbers: list[int] = []
        for row_slice in rows:
            numbers += json.loads(row_slice.payload)[row_slice.first : row_slice.first + row_slice.rows]
        self.file_count += 1
        location = f"{folder or 'data'}/{self.file_count}"
        return [EncodedFile(location, json.dumps(numbers).encode(), b"{}", len(numbers))]

    def list_keys(self, rows: Sequence[RowSlice], metadata: TableMetadata) -> frozenset[RowKey]:
        return frozenset([()])  # The table has no key columns, so the key is empty.

    def encode_index_files(self, files: Sequence[EncodedFile], metadata: TableMetadata) -> list[EncodedIndexFile]:
        return []


class StreamWorld:
    """The table's files, its flushed offsets, and the storage."""

    def __init__(self, log: MemoryLog, clock: Clock, rng: Random, *, shards: int = 1) -> None:
        self.log, self._clock, self.rng = log, clock, rng
        self.objects: dict[str, bytes] = {}
        self.files: tuple[str, ...] = ()
        self.flushed = dict.fromkeys(range(shards), 0)
        self.busy_chance = 0.0
        self.scripted_outcomes: list[str] = []
        """The faults of the next commits, the last fault first.
        `refused` is a conflict. `lost` and `found` are unknown outcomes: the commit failed, or it succeeded.
        """
        self.row_files = NumberFiles()

    def entry(self) -> Entry:
        flushed_text = ",".join(f"{number}:{offset}" for number, offset in self.flushed.items())
        return Entry(EntryKind.TABLE, ("db",), "t", UUID, "|".join(self.files), flushed=flushed_text)

    def open(self, *, interval_s: float = 0.0, part_bytes_max: int = 64 << 20) -> StreamTable:
        """Open the table as another owner does, for example after a restart.

        Fresh files have rows that are not flushed yet. `interval_s` is the shortest time between two writes of them.
        """
        return StreamTable(
            self.entry(),
            self.log,
            self,
            cast("Any", self.row_files),
            cast("ObjectStore", self),
            self._clock,
            StreamLimits(fresh_interval_s=interval_s, fresh_retention_s=0.0, part_bytes_max=part_bytes_max),
            fresh_folder="fresh",
            run_in_thread=_run_now,
        )

    # The methods of the storage

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        assert location not in self.objects
        if self.rng.random() < self.busy_chance:
            raise RetryLater("the storage is busy")
        self.objects[location] = data

    async def delete(self, location: str) -> None:
        self.objects.pop(location, None)

    # The methods of the catalog

    async def load(self, uuid: str) -> tuple[Entry, TableMetadata]:
        assert uuid == UUID
        return self.entry(), cast("TableMetadata", None)

    async def commit(
        self,
        entry: Entry,
        metadata: TableMetadata,
        files: Sequence[EncodedFile],
        ranges: Sequence[FlushedRange],
        index_files: Sequence[EncodedIndexFile] = (),
    ) -> None:
        """Record the files and ranges unless the next scripted outcome is `refused` or `lost`.

        Raises:
            CommitConflict: The outcome is `refused`, or a range does not begin at the flushed offset of its shard.
            CommitUnknown: The outcome is another text, for example `lost`.
        """
        outcome = self.scripted_outcomes.pop() if self.scripted_outcomes else ""
        if outcome == "refused" or any(self.flushed[moved_range.shard] != moved_range.start for moved_range in ranges):
            raise CommitConflict("another flush has moved the offsets")
        if outcome != "lost":
            self.files += tuple(file.location for file in files)
            self.flushed |= {moved_range.shard: moved_range.end for moved_range in ranges}
        if outcome:
            raise CommitUnknown("the outcome of the commit is unknown")

    def find_key_columns(self, metadata: TableMetadata) -> tuple[str, ...]:
        return ()

    # The methods of a reader

    def read_files(self, locations: Sequence[str]) -> list[int]:
        return [number for location in locations for number in json.loads(self.objects[location])]

    async def read(self, table: StreamTable) -> list[int]:
        """Return the rows that a plan of this owner reads.

        The plan loads the files and the flushed offsets of the table, and then the rows after these offsets.
        """
        for _ in range(50):
            files, flushed_offsets = self.files, dict(self.flushed)
            try:
                fresh_rows = await table.get_fresh_rows(flushed_offsets)
            except FlushedBefore:
                continue
            return self.read_files([*files, *(file.location for part in fresh_rows.parts for file in part.files)])
        raise AssertionError("a flush moved the offsets during each read")


async def _run_now(work: Any) -> Any:
    return work()


def build_batch(*numbers: int) -> Batch:
    return Batch(len(numbers), json.dumps(numbers).encode())


@asynccontextmanager
async def open_world(seed: int = 1, *, shards: int = 1) -> AsyncIterator[StreamWorld]:
    clock = SystemClock()
    async with open_memory_log(clock) as log:
        yield StreamWorld(log, clock, Random(seed), shards=shards)
