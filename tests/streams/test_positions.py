"""Tests of readers of random histories, without a server.

Each reader gets each row of the model once, or a clear error.

The model has a log with retention, flushes, appends of batch writers, compactions and expired snapshots. A reader
starts at any position, and stops and resumes at any position. It applies the steps of `choose_next_step` to the model's
log and files.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import cast

import msgspec
import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import FLUSH_LOG, FLUSH_MARK, FLUSH_OFFSETS, FLUSH_TABLE
from seamark.formats.runtime.errors import BadRequest, OffsetOutOfRange
from seamark.metaserver.log.port import ShardState
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams.catalog_tables import is_flush
from seamark.metaserver.streams.positions import (
    End,
    FilesStep,
    LogRows,
    ReaderTableState,
    ReadPosition,
    choose_next_step,
    encode_ranges,
    find_earliest_position,
    find_latest_position,
    find_position_after_snapshot,
    find_snapshot_at,
    hash_log,
    parse_position,
    parse_ranges,
)
from tests.seeds import first_seed, mark_fast

UUID = "00000000-0000-4000-8000-000000000001"
SEEDS_PER_TEST = 200


@dataclass
class SnapshotHistory:
    """The part of a table's metadata that positions use."""

    by_id: dict[int, Snapshot] = field(default_factory=dict)
    current_snapshot_id: int | None = None
    table_uuid: str = UUID

    def snapshot(self, snapshot_id: int) -> Snapshot | None:
        return self.by_id.get(snapshot_id)

    @property
    def current_snapshot(self) -> Snapshot | None:
        return None if self.current_snapshot_id is None else self.by_id.get(self.current_snapshot_id)


class PositionModel:
    """A table and its log. Rows are numbers."""

    def __init__(self, rng: Random, shards: int, *, rebuild_chance: float = 0.1) -> None:
        """Create a table without rows.

        Args:
            rng: The source of all random choices.
            shards: The number of shards of the log.
            rebuild_chance: The probability that a random change is a new log.
        """
        self.rng = rng
        self.rebuild_chance = rebuild_chance
        self.rows: list[int] = []
        """All rows, in the order in which they were acknowledged."""
        self.log: dict[int, list[int]] = {shard: [] for shard in range(shards)}
        """The rows of each shard in the log."""
        self.starts = dict.fromkeys(range(shards), 0)
        """The offset of the first row of each shard that retention has not removed from the log."""
        self.flushed_offsets = dict.fromkeys(range(shards), 0)
        self.log_hash = hash_log("log 0")
        """The identity of the log, by which positions of an earlier log are recognized."""
        self.history = SnapshotHistory()
        # The rows that each snapshot added, and all rows that it has.
        self.added_ids: dict[int, list[int]] = {}
        self.live_ids: dict[int | None, list[int]] = {None: []}
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)

    def make_table(self) -> ReaderTableState:
        shards = {
            shard: ShardState(self.starts[shard], len(rows), self.flushed_offsets[shard], 0)
            for shard, rows in self.log.items()
        }
        return ReaderTableState(cast("TableMetadata", self.history), dict(self.flushed_offsets), shards, self.log_hash)

    def commit(self, operation: str, added_ids: list[int], ranges: list[FlushedRange] | None = None) -> None:
        parent = self.history.current_snapshot_id
        snapshot_id = next(self._ids)
        summary = {"operation": operation}
        if ranges is not None:
            summary |= {FLUSH_OFFSETS: encode_ranges(ranges), FLUSH_TABLE: UUID, FLUSH_LOG: self.log_hash}
        raw = msgspec.Raw(json.dumps(summary).encode())
        snapshot = Snapshot(snapshot_id, snapshot_id, parent_snapshot_id=parent, summary=raw)
        self.history.by_id[snapshot_id] = snapshot
        self.history.current_snapshot_id = snapshot_id
        self.added_ids[snapshot_id], self.live_ids[snapshot_id] = added_ids, [*self.live_ids[parent], *added_ids]

    def draw_rows(self) -> list[int]:
        rows = [next(self._numbers) for _ in range(self.rng.randint(1, 3))]
        self.rows += rows
        return rows

    def flush(self, share: float) -> None:
        """Flush each shard with the probability `share`."""
        ranges, rows = [], []
        for shard, start in self.flushed_offsets.items():
            end = len(self.log[shard])
            if end > start and self.rng.random() < share:
                ranges.append(FlushedRange(shard, start, end))
                rows += self.log[shard][start:end]
                self.flushed_offsets[shard] = end
        if ranges:
            self.commit("append", self.rng.sample(rows, len(rows)), ranges)

    def rebuild(self) -> None:
        """Flush all rows, and give the table a new log in which its offsets begin at 0 again."""
        self.flush(share=1.0)
        self.log = {shard: [] for shard in self.log}
        self.starts, self.flushed_offsets = dict.fromkeys(self.log, 0), dict.fromkeys(self.log, 0)
        self.log_hash = hash_log(f"log after {len(self.history.by_id)} snapshots, {self.rng.random()}")

    def change_at_random(self) -> None:
        """Make one random change to the table or the log.

        Trims, expirations and rebuilds make readers fail, so they happen rarely.
        """
        rng = self.rng
        match rng.choice(("send", "send", "send", "append", "flush", "flush", "compact", "trim", "expire", "rebuild")):
            case "send":
                self.log[rng.randrange(len(self.log))] += self.draw_rows()
            case "append":
                self.commit("append", self.draw_rows())
            case "compact":
                self.commit("replace", [])
            case "flush":
                self.flush(share=0.8)
            case "rebuild":
                if rng.random() < self.rebuild_chance:
                    self.rebuild()
            case "trim":
                if rng.random() < 0.4:
                    shard = rng.randrange(len(self.log))
                    self.starts[shard] = rng.randint(self.starts[shard], self.flushed_offsets[shard])
            case "expire":
                if rng.random() < 0.2 and len(self.history.by_id) > 3:
                    del self.history.by_id[min(self.history.by_id)]


@dataclass
class TokenReader:
    """A reader that keeps only its token between reads."""

    token: str
    earlier_ids: list[int] = field(default_factory=list)
    """The rows before the position at which the reader started."""
    seen_counts: Counter[int] = field(default_factory=Counter)
    failure: str = ""

    def read(self, model: PositionModel, steps_max: int) -> bool:
        """Read at most `steps_max` steps. Return True if the reader has reached the end of the rows or has failed.

        After a failure, `failure` has its message.
        """
        for _ in range(steps_max):
            try:
                step = choose_next_step(parse_position(self.token, UUID), model.make_table())
            except (OffsetOutOfRange, BadRequest) as error:
                self.failure = error.message
                return True
            match step:
                case End():
                    self.token = step.position.encode()
                    return True
                case FilesStep():
                    rows = model.live_ids[step.snapshot_id] if step.is_scan else model.added_ids[step.snapshot_id]
                    self.seen_counts.update(rows)
                    self.token = step.position.encode()
                case LogRows():
                    offsets = {}
                    for shard, (start, end) in step.ranges.items():
                        assert model.starts[shard] <= start < end <= len(model.log[shard])
                        # A reader may stop within a range. It reads at least one row if the step has only one range.
                        offsets[shard] = model.rng.randint(start + (len(step.ranges) == 1), end)
                        self.seen_counts.update(model.log[shard][start : offsets[shard]])
                    self.token = step.position.advance(offsets).encode()
        return False


def start_reader(model: PositionModel) -> TokenReader | None:
    """Return a reader at a random kind of start position.

    Return None if the log does not have the position any more, or if there is no snapshot to start from.
    """
    table = model.make_table()
    match model.rng.choice(("earliest", "latest", "snapshot", "time")):
        case "earliest":
            return TokenReader(find_earliest_position(UUID, table).encode())
        case "latest":
            return TokenReader(find_latest_position(UUID, table).encode(), list(model.rows))
        case "snapshot" if model.history.by_id:
            snapshot_id = model.rng.choice(list(model.history.by_id))
            position = find_position_after_snapshot(UUID, table, snapshot_id)
            return TokenReader(position.encode(), list(model.live_ids[snapshot_id]))
        case "time" if model.history.by_id:
            try:
                # The time of a snapshot is its id.
                snapshot = find_snapshot_at(table, model.rng.choice(list(model.history.by_id)))
                position = find_position_after_snapshot(UUID, table, snapshot)
            except OffsetOutOfRange:
                return None
            return TokenReader(position.encode(), list(model.live_ids[snapshot]))
    return None


@pytest.mark.parametrize("start_seed", mark_fast(range(first_seed(), first_seed() + 4000, SEEDS_PER_TEST), 1))
def test_readers_of_random_histories_get_each_row_once(start_seed: int) -> None:
    for seed in range(start_seed, start_seed + SEEDS_PER_TEST):
        check_readers(seed)


def check_readers(seed: int) -> None:
    """Run readers of one random history, and compare their rows with the model."""
    rng = Random(seed)
    model = PositionModel(rng, rng.choice((1, 2, 3)))
    readers: list[TokenReader] = []
    for _ in range(rng.randint(10, 60)):
        if rng.random() < 0.15 and (reader := start_reader(model)) is not None:
            readers.append(reader)
        for reader in readers:
            if not reader.failure and rng.random() < 0.3:
                reader.read(model, rng.randint(1, 4))
        model.change_at_random()
    for reader in readers:
        while not reader.failure and not reader.read(model, steps_max=1):
            pass
        expected = Counter(model.rows) - Counter(reader.earlier_ids)
        if reader.failure:
            # A reader may fail only if rows were trimmed, a snapshot expired, or the log was rebuilt.
            assert any(text in reader.failure for text in ("removed", "expired", "another log")), (seed, reader.failure)
            assert reader.seen_counts <= expected, f"seed {seed}: a reader has repeated a row before it failed"
        else:
            assert reader.seen_counts == expected, seed


def test_most_random_readers_do_not_fail() -> None:
    outcomes: Counter[bool] = Counter()
    for seed in range(200):
        rng = Random(seed)
        model = PositionModel(rng, 2, rebuild_chance=0)
        reader = TokenReader(find_earliest_position(UUID, model.make_table()).encode())
        for _ in range(30):
            model.change_at_random()
            reader.read(model, 2)
        outcomes[bool(reader.failure)] += 1
    assert outcomes[False] > 150


def test_rows_of_a_rolled_back_flush_are_refused_or_skipped() -> None:
    model = PositionModel(Random(1), 1)
    model.commit("append", model.draw_rows())
    base = model.history.current_snapshot_id
    position_before = find_position_after_snapshot(UUID, model.make_table(), base)
    model.log[0] += [100, 101]
    model.commit("append", [100, 101], [FlushedRange(shard=0, start=0, end=2)])
    model.flushed_offsets[0] = 2
    model.history.current_snapshot_id = base
    model.log[0].append(102)
    with pytest.raises(BadRequest, match="a rollback has removed"):
        choose_next_step(position_before, model.make_table())
    step = choose_next_step(position_before, model.make_table(), skips_changes=True)
    assert isinstance(step, LogRows)
    assert step.ranges == {0: (2, 3)}
    position_after = ReadPosition(UUID, 2, (2,))
    with pytest.raises(BadRequest, match="not an ancestor"):
        choose_next_step(position_after, model.make_table())


def test_read_ends_at_its_until_position() -> None:
    model = PositionModel(Random(1), 2)
    model.log[0] += [1, 2]
    start = find_earliest_position(UUID, model.make_table())
    until = find_latest_position(UUID, model.make_table())
    model.log[0].append(3)
    model.log[1].append(4)
    step = choose_next_step(start, model.make_table(), until=until)
    assert isinstance(step, LogRows)
    assert step.ranges == {0: (0, 2)}
    assert isinstance(choose_next_step(step.position.advance({0: 2}), model.make_table(), until=until), End)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "1",
        "2.x.none..after",
        f"1.{UUID}.-1..after",
        f"1.{UUID}.1.1-x.scan",
        f"1.{UUID}.1..later",
        f"2.{UUID}.1..after",
        f"1.{UUID}.1..after.0123456789abcdef",
        f"2.{UUID}.1..after.not hexadecimal",
    ],
)
def test_invalid_token_is_refused(token: str) -> None:
    with pytest.raises(BadRequest, match="was not issued"):
        parse_position(token, UUID)


@pytest.mark.parametrize(
    ("offsets", "table_uuid"),
    [
        ("0:x-2", UUID),
        ("1000000000:0-1", UUID),
        ("0:0-1,9223372036854775807:0-1", UUID),
        ("0:0-3", UUID),
        ("0:2-1", UUID),
        ("0:0-2", "00000000-0000-4000-8000-000000000002"),
    ],
    ids=["no number", "no such shard", "huge shard", "never flushed", "backwards", "other table"],
)
def test_snapshot_whose_summary_is_no_flush_of_this_table_is_read_as_an_append(offsets: str, table_uuid: str) -> None:
    summary = {"operation": "append", FLUSH_OFFSETS: offsets, FLUSH_TABLE: table_uuid}
    snapshot = Snapshot(1, 1, summary=msgspec.Raw(json.dumps(summary).encode()))
    table = ReaderTableState(cast("TableMetadata", SnapshotHistory({1: snapshot}, 1)), {0: 2}, {})
    assert parse_ranges(snapshot, table) is None
    step = choose_next_step(ReadPosition(UUID, None, ()), table, skips_changes=True)
    assert isinstance(step, FilesStep)
    assert step.position.offsets == ()


def test_flushes_before_a_rebuild_are_read_as_appends() -> None:
    model = PositionModel(Random(1), 1)
    model.log[0] += [1, 2]
    old_position = find_latest_position(UUID, model.make_table())
    model.rebuild()
    model.log[0] += [3, 4, 5]
    model.flush(1.0)
    first_snapshot_id, second_snapshot_id = model.history.by_id
    start = find_position_after_snapshot(UUID, model.make_table(), None)
    step = choose_next_step(parse_position(start.encode(), UUID), model.make_table())
    assert isinstance(step, FilesStep)
    assert (step.snapshot_id, step.position.offsets) == (first_snapshot_id, (0,))
    step = choose_next_step(step.position, model.make_table())
    assert isinstance(step, LogRows)
    assert step.ranges == {0: (0, 3)}
    later_position = step.position.advance({0: 3})
    assert choose_next_step(later_position, model.make_table()) == End(
        msgspec.structs.replace(later_position, snapshot_id=second_snapshot_id)
    )
    with pytest.raises(BadRequest, match="offsets of another log"):
        choose_next_step(old_position, model.make_table())


def test_flush_of_an_earlier_server_is_a_flush_of_the_table() -> None:
    summary = {"operation": "append", FLUSH_MARK: "true", FLUSH_OFFSETS: "0:0-2"}
    snapshot = Snapshot(1, 1, summary=msgspec.Raw(json.dumps(summary).encode()))
    table = ReaderTableState(
        cast("TableMetadata", SnapshotHistory({1: snapshot}, 1)), {0: 2}, {0: ShardState(0, 2, 2, 0)}
    )
    assert parse_ranges(snapshot, table) == (FlushedRange(shard=0, start=0, end=2),)
    assert choose_next_step(ReadPosition(UUID, None, (2,)), table) == End(ReadPosition(UUID, 1, (2,)))
    assert is_flush(snapshot, UUID)
