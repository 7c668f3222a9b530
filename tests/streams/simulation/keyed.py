"""A simulated world with a keyed table.

Later rows replace earlier rows, flushes delete rows, and compactions move them.

A row is a line `key=value`, or `-key=value` for a row that deletes. The model is the log: a reader sees the replay of
the log up to the offsets of its plan.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from seamark.formats.runtime.errors import CommitConflict, NoSuchTable, RetryLater
from seamark.metaserver.log.kafka.kafka_log import open_log_over
from seamark.metaserver.log.port import Batch, RowKind, Shard, StreamLog
from seamark.metaserver.log.segments import SegmentLimits, open_segments
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams.row_files import EncodedDeletes, EncodedFile, RowSlice
from seamark.metaserver.streams.stream_table import FlushedBefore, FreshRows
from tests.log.disk import copy_disk
from tests.streams.simulation.ports import (
    FaultProbabilities,
    LineFiles,
    RemoteBroker,
    SimulatedCatalog,
    SimulatedNetwork,
    SimulatedStorage,
    SimulatedTable,
)
from tests.streams.simulation.world import (
    KAFKA_LIMITS,
    SHARDS,
    Append,
    InstantRunner,
    InvariantBroken,
    Process,
    SimulationWorld,
)

KEYS_PER_SHARD = 3
# With these limits, a log keeps all its rows.
UNTRIMMED_LIMITS = SegmentLimits(segment_bytes=1500)
UNTRIMMED_KAFKA_LIMITS = replace(KAFKA_LIMITS, retention_ms=1 << 60, batches_max=1 << 30)
NO_FAULTS = FaultProbabilities(lost_reply=0, repetition=0, refusal=0, crash=0, power_cut=0, pause=0, clock_jump=0)


class KeyedSnapshot(NamedTuple):
    """The files of one version of a table, with the positions of their deleted rows."""

    version: int
    files: Mapping[str, frozenset[int]]


@dataclass
class KeyedTable(SimulatedTable):
    deleted_positions: dict[str, frozenset[int]] = field(default_factory=dict)
    """The positions of the deleted rows, by file."""
    commits: set[Any] = field(default_factory=set)
    """The flushes that were committed."""

    @property
    def snapshot(self) -> KeyedSnapshot:
        none: frozenset[int] = frozenset()
        return KeyedSnapshot(self.version, {file: self.deleted_positions.get(file, none) for file in self.files})


class KeyedCatalog(SimulatedCatalog):
    """Tables whose commits delete rows. A commit with deletes for another version of the table is refused."""

    key = ("key",)

    def __init__(self) -> None:
        super().__init__()
        self.checks_versions = True
        """Whether a commit with deletes is refused if the table has another version. A mutation sets this to False."""

    def entry(self, uuid: str) -> tuple[Entry, Any]:
        entry, _ = super().entry(uuid)
        return entry, self._get_table(uuid).snapshot

    def _get_table(self, uuid: str) -> KeyedTable:
        table = self.tables[uuid]
        assert isinstance(table, KeyedTable)
        return table

    def commit_keyed(
        self, entry: Entry, files: Sequence[str], ranges: Sequence[FlushedRange], deletes: EncodedDeletes
    ) -> None:
        """Apply a commit of new files and deleted rows. A repeated commit has no effect.

        Raises:
            CommitConflict: The flushed offsets have moved (if `checks_offsets`), or the table has changed since it was
                read (if `checks_versions`).
            NoSuchTable: The table was dropped.
        """
        table = self._get_table(entry.uuid)
        if table.is_dropped:
            raise NoSuchTable(f"no table {entry.uuid}")
        commit = (tuple(files), tuple(ranges), tuple(deletes.content_files))
        if commit in table.commits:  # The same commit arrived earlier, so a conflict would be a wrong answer.
            return
        if self.checks_offsets and any(
            table.flushed_offsets[moved_range.shard] != moved_range.start for moved_range in ranges
        ):
            raise CommitConflict("the offsets have moved")
        if self.checks_versions and entry.metadata_location != f"v{table.version}":
            raise CommitConflict("rows were changed or moved")
        table.commits.add(commit)
        for moved_range in ranges:
            table.flushed_offsets[moved_range.shard] = moved_range.end
        table.files = (*table.files, *files)
        for file, positions in _decode(deletes).items():
            table.deleted_positions[file] = table.deleted_positions.get(file, frozenset()) | positions
        table.version += 1


class KeysOfRows(NamedTuple):
    """The keys of consecutive appended rows, and the key of each row in the files that were written from them."""

    keys: frozenset[bytes]
    files: Mapping[str, Sequence[bytes]]


def _decode(deletes: EncodedDeletes) -> dict[str, frozenset[int]]:
    return {file: frozenset(positions) for file, positions in json.loads(deletes.content_files[0]).items()}


def parse_key(line: bytes) -> bytes:
    return line.removeprefix(b"-").partition(b"=")[0]


class KeyedFiles(LineFiles):
    """Encodes rows that are lines with a key. A line that begins with "-" deletes the row with its key."""

    def __init__(self, storage: SimulatedStorage) -> None:
        super().__init__()
        self._storage = storage

    def encode_keyed(
        self, rows: Sequence[RowSlice], metadata: Any, folder: str | None, key: Sequence[str]
    ) -> tuple[list[EncodedFile], KeysOfRows]:
        latest_lines: dict[bytes, bytes] = {}
        for row_slice in rows:
            for line in row_slice.payload.split(b"\n")[row_slice.first : row_slice.first + row_slice.rows]:
                latest_lines[parse_key(line)] = line
        lines = [line for line in latest_lines.values() if not line.startswith(b"-")]
        files = []
        if lines:
            self._count += 1
            files = [EncodedFile(f"{folder or 'data'}/{self._count}", b"\n".join(lines), b"{}", len(lines))]
        keys = [parse_key(line) for line in lines]
        return files, KeysOfRows(frozenset(latest_lines), {file.location: keys for file in files})

    def encode_deletes(
        self, parts: Sequence[KeysOfRows], metadata: KeyedSnapshot, stored_table: Any, folder: str | None
    ) -> EncodedDeletes:
        """Return the positions that the keys delete in the stored files and in earlier parts."""
        keys = frozenset().union(*(part.keys for part in parts))
        deleted_positions: dict[str, list[int]] = {}
        for file, deleted_rows in metadata.files.items():
            lines = self._storage.objects[file].split(b"\n")
            deleted_positions[file] = [
                number for number, line in enumerate(lines) if number not in deleted_rows and parse_key(line) in keys
            ]
        for index, part in enumerate(parts):
            later_keys = frozenset().union(*(later_part.keys for later_part in parts[index + 1 :]))
            for file, file_keys in part.files.items():
                deleted_positions[file] = [number for number, key in enumerate(file_keys) if key in later_keys]
        content = json.dumps({file: positions for file, positions in deleted_positions.items() if positions})
        return EncodedDeletes(files=[], content_files=[content.encode()], removed=[], scope=b"all rows")


def replay(lines: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return the latest row of each key, after all rows are applied. A line that begins with "-" deletes a row."""
    rows: dict[bytes, bytes] = {}
    for line in lines:
        if line.startswith(b"-"):
            rows.pop(parse_key(line), None)
        else:
            rows[parse_key(line)] = line
    return rows


async def _continue() -> None:
    """Return at once, because no test pauses this reader."""


async def _run_at_once(work: Callable[[], list[bytes]]) -> list[bytes]:
    return work()


class KeyedWorld(SimulationWorld):
    """A world whose table has a key."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.catalog = KeyedCatalog()
        self.files = KeyedFiles(self.storage)
        # The test compares the table with the log, so the log must keep all rows.
        self.log_limits, self.kafka_limits = UNTRIMMED_LIMITS, UNTRIMMED_KAFKA_LIMITS
        self.compactions = self.replays = 0
        self._offsets: dict[object, Mapping[int, int]] = {}
        """The last offsets that each reader has seen, by (reader, process, table)."""

    def create_or_replace_table(self) -> None:
        super().create_or_replace_table()
        self.catalog.tables[self.uuid] = KeyedTable(self.uuid, dict.fromkeys(range(SHARDS), 0))

    def _make_append(self, producer: str, uuid: str, sequence: int) -> Append:
        append = super()._make_append(producer, uuid, sequence)
        for shard, lines in append.rows.items():
            append.rows[shard] = [
                b"%sk%d.%d=%s" % (self.rng.choice((b"", b"", b"-")), shard, self.rng.randrange(KEYS_PER_SHARD), line)
                for line in lines
            ]
        return append

    def _to_batch(self, rows: list[bytes]) -> Batch:
        row_kinds = bytes(RowKind.DELETE if line.startswith(b"-") else RowKind.UPDATE for line in rows)
        return Batch(len(rows), b"\n".join(rows), row_kinds)

    def commit_other_change(self) -> None:
        """Rewrite the remaining rows to another file, as a compaction does."""
        table = self.catalog.tables[self.uuid]
        assert isinstance(table, KeyedTable)
        lines = list(self._iterate_live_lines(table.snapshot.files))
        self.compactions += 1
        table.version += 1
        table.files = ()
        if lines:
            file = f"data/compacted-{self.compactions}"
            self.storage.objects[file] = b"\n".join(lines)
            table.files = (file,)

    def _iterate_live_lines(self, files: Mapping[str, frozenset[int]]) -> Iterable[bytes]:
        for file, deleted_positions in files.items():
            for number, line in enumerate(self.storage.objects[file].split(b"\n")):
                if number not in deleted_positions:
                    yield line

    async def _read(self, process: Process, uuid: str) -> Counter[bytes]:
        """Compare the rows of a plan with the replay of the log up to its offsets.

        A plan has the flushed files and the fresh rows, which are in the log and not flushed yet. A flush during the
        plan makes it start again. Return an empty counter, because the caller has no rows left to check.
        """
        required_appends = [append for append in self.appends if append.is_acknowledged and append.uuid == uuid]
        tables = self.make_tables()

        async def plan_fresh() -> tuple[Mapping[str, frozenset[int]], FreshRows]:
            await self.wait_while_paused(process)
            for _ in range(5):
                table = await self.table(process, uuid)
                entry, snapshot = await tables.load(uuid)
                with suppress(FlushedBefore):
                    fresh_rows = await table.get_fresh_rows(entry.parse_flushed_offsets())
                    files = dict(snapshot.files)
                    files |= {file.location: frozenset() for part in fresh_rows.parts for file in part.files}
                    if keyed_parts := [part.keyed for part in fresh_rows.parts]:
                        deletes = await table.store_deletes(keyed_parts, entry, snapshot, fresh=True)
                        for file, positions in _decode(deletes).items():
                            if file not in files:
                                raise InvariantBroken(f"a plan deletes rows of {file}, which is not in it")
                            files[file] |= positions
                    return files, fresh_rows
            raise RetryLater("another flush interrupted each attempt to read the table")

        files, fresh_rows = await self.call(process, plan_fresh)
        await self._check_durable(uuid, fresh_rows.offsets)
        reader = (asyncio.current_task(), process.number, uuid)
        last_offsets = self._offsets.get(reader, {})
        if any(offset < last_offsets.get(shard, 0) for shard, offset in fresh_rows.offsets.items()):
            raise InvariantBroken(f"the offsets of a reader went back from {last_offsets} to {fresh_rows.offsets}")
        self._offsets[reader] = fresh_rows.offsets
        if missing_files := [file for file in files if file not in self.storage.objects]:
            raise InvariantBroken(f"a plan names {missing_files[0]}, which has been deleted")
        lines = list(self._iterate_live_lines(files))
        await self._compare(uuid, fresh_rows.offsets, lines, required_appends)
        return Counter()

    async def _read_log(self, uuid: str, offsets: Mapping[int, int]) -> list[bytes]:
        """Return the rows of the log up to these offsets, as a process would read them after a power cut."""
        async with AsyncExitStack() as stack:
            log: StreamLog
            if self.is_fleet:
                broker = RemoteBroker(SimulatedNetwork(self.rng, NO_FAULTS), self.cluster, self.rng, _continue)
                log = await stack.enter_async_context(
                    open_log_over(broker, self.clock, self.kafka_limits, run_in_thread=_run_at_once)
                )
                stack.callback(lambda: broker.follow_task and broker.follow_task.cancel())
            else:
                disk = copy_disk(self.disk, durable=True)
                log = await stack.enter_async_context(open_segments(disk, InstantRunner(), self.clock, self.log_limits))
            lines: list[bytes] = []
            for number, end in offsets.items():
                position = 0
                while position < end:
                    for record in await log.read(Shard(uuid, number), position, limit_bytes=1 << 20, end=end):
                        lines += record.batch.payload.split(b"\n")
                        position = record.end
            return lines

    async def _compare(
        self, uuid: str, offsets: Mapping[int, int], lines: list[bytes], required_appends: list[Append]
    ) -> None:
        """Check that `lines` are the replay of the log up to `offsets`, and that the log has all `required_appends`."""
        logged_rows = await self._read_log(uuid, offsets)
        self.replays += 1
        keys = Counter(map(parse_key, lines))
        if repeated_keys := [key for key, count in keys.items() if count > 1]:
            raise InvariantBroken(
                f"a key has several rows: {[line for line in lines if parse_key(line) in repeated_keys]}"
            )
        expected = replay(logged_rows)
        if set(lines) != set(expected.values()):
            raise InvariantBroken(
                "the rows are not the replay of the log: "
                f"unexpected rows {sorted(set(lines) - set(expected.values()))[:3]}, "
                f"missing rows {sorted(set(expected.values()) - set(lines))[:3]}"
            )
        if lost_lines := [line for append in required_appends for line in append.lines if line not in logged_rows]:
            raise InvariantBroken(f"acknowledged rows are lost: {lost_lines[:5]}")

    def check_read(self, lines: Counter[bytes], uuid: str, required_appends: list[Append]) -> None:
        """Do nothing, because `_read` has compared the rows with the log."""

    async def check_table(self, table: SimulatedTable, acknowledged_appends: list[Append]) -> None:
        assert isinstance(table, KeyedTable)
        await self._compare(
            table.uuid,
            table.flushed_offsets,
            list(self._iterate_live_lines(table.snapshot.files)),
            acknowledged_appends,
        )
