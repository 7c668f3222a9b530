"""The contract of pointer stores for producers, and for flushed offsets of streams.

Each sequence and each range is recorded once, as long as the table has a name.
"""

from __future__ import annotations

import asyncio

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import CommitConflict, NoSuchTable
from seamark.metaserver.store.model import DroppedEntry, EntryKind, ProducerState
from seamark.metaserver.store.operations import (
    AdvanceProducer,
    CreateEntry,
    DropEntry,
    FlushedRange,
    ForgetDropped,
    MoveFlushedOffsets,
    OpenStream,
    RecordRemovalFlush,
    RenameEntry,
    RestoreEntry,
    SwapPointer,
    TakeRemovalFlush,
)
from seamark.metaserver.store.port import LostRace
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import NS, TABLE, get_outcome, make_entry, make_swap
from tests.store.store_pair import StorePair

UUID = "uuid-of-t"


def build_advance(
    sequence: int, snapshot_id: int | None = None, *, producer: str = "p", uuid: str = UUID, now_ms: int = 9
) -> AdvanceProducer:
    return AdvanceProducer(uuid, producer, sequence, snapshot_id, now_ms)


class ProducersContract(StorePair):
    """The tests of the committed sequences of producers that each store passes."""

    @pytest.fixture
    async def store_with_tables(self, store: GeneratorStore) -> GeneratorStore:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("u"))])
        return store

    async def test_stored_producer_equals_the_last_advance(
        self, store_with_tables: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        assert await store_with_tables.load_producer(UUID, "p") is None
        await store_with_tables.transact([build_advance(-3, 2**62, now_ms=1)])
        assert await other_store.load_producer(UUID, "p") == ProducerState(-3, 2**62, 1)
        await store_with_tables.transact([build_advance(2**63 - 1, None, now_ms=2)])
        assert await other_store.load_producer(UUID, "p") == ProducerState(2**63 - 1, None, 2)

    async def test_only_a_higher_sequence_advances_a_producer(self, store_with_tables: GeneratorStore) -> None:
        await store_with_tables.transact([build_advance(5, 50)])
        for sequence in (5, 4, -1):
            with pytest.raises(CommitConflict, match=f"producer p has already committed sequence {sequence}"):
                await store_with_tables.transact([build_advance(sequence, 60)])
        assert await store_with_tables.load_producer(UUID, "p") == ProducerState(5, 50, 9)
        await store_with_tables.transact([build_advance(9, 90)])
        assert await store_with_tables.load_producer(UUID, "p") == ProducerState(9, 90, 9)

    async def test_sequences_are_separate_for_each_producer_and_table(self, store_with_tables: GeneratorStore) -> None:
        await store_with_tables.transact(
            [build_advance(5, 1), build_advance(3, 2, producer="P"), build_advance(1, 3, uuid="uuid-of-u")]
        )
        assert await store_with_tables.load_producer(UUID, "P") == ProducerState(3, 2, 9)
        assert await store_with_tables.load_producer("uuid-of-u", "p") == ProducerState(1, 3, 9)
        assert await store_with_tables.load_producer("uuid-of-u", "P") is None

    async def test_repeated_sequence_of_a_producer_rolls_back_the_whole_transaction(
        self, store_with_tables: GeneratorStore
    ) -> None:
        swap = make_swap("t", "file:///w/t/0.json", "file:///w/t/1.json")
        await store_with_tables.transact([swap, build_advance(1, 10)])
        second_swap = make_swap("t", "file:///w/t/1.json", "file:///w/t/2.json")
        with pytest.raises(CommitConflict):
            await store_with_tables.transact([second_swap, build_advance(2, 20, producer="q"), build_advance(1, 20)])
        entry = await store_with_tables.load_entry(TABLE, NS, "t")
        assert entry is not None
        assert entry.metadata_location == "file:///w/t/1.json"
        assert await store_with_tables.load_producer(UUID, "q") is None
        with pytest.raises(CommitConflict):
            await store_with_tables.transact([build_advance(2, 20), swap])
        assert await store_with_tables.load_producer(UUID, "p") == ProducerState(1, 10, 9)

    async def test_only_one_of_two_commits_of_a_sequence_succeeds(
        self, store_with_tables: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for sequence in range(10):
            results = await asyncio.gather(
                get_outcome(store_with_tables.transact([build_advance(sequence, 1)])),
                get_outcome(other_store.transact([build_advance(sequence, 2)])),
            )
            assert sorted(results) == ["commit_conflict", "won"]
            state = await store_with_tables.load_producer(UUID, "p")
            assert state is not None
            assert (state.sequence, state.snapshot_id) == (sequence, 1 if results[0] == "won" else 2)

    async def test_producer_of_a_table_without_a_live_name_cannot_advance(
        self, store_with_tables: GeneratorStore, clock: SimulatedClock
    ) -> None:
        with pytest.raises(NoSuchTable, match="uuid nobody"):
            await store_with_tables.transact([build_advance(1, uuid="nobody")])
        await store_with_tables.transact([DropEntry(TABLE, NS, "t", keep=_build_dropped_entry(clock))])
        with pytest.raises(NoSuchTable):
            await store_with_tables.transact([build_advance(1)])

    async def test_producers_stay_until_the_table_has_no_name(
        self, store_with_tables: GeneratorStore, clock: SimulatedClock
    ) -> None:
        await store_with_tables.transact([build_advance(4, 40), build_advance(1, 2, uuid="uuid-of-u")])
        producer_state = ProducerState(4, 40, 9)
        await store_with_tables.transact([RenameEntry(TABLE, NS, "t", NS, "moved")])
        assert await store_with_tables.load_producer(UUID, "p") == producer_state
        await store_with_tables.transact([CreateEntry(make_entry("twin", uuid=UUID)), DropEntry(TABLE, NS, "moved")])
        assert await store_with_tables.load_producer(UUID, "p") == producer_state
        await store_with_tables.transact([DropEntry(TABLE, NS, "twin", keep=_build_dropped_entry(clock))])
        assert await store_with_tables.load_producer(UUID, "p") == producer_state
        await store_with_tables.transact([RestoreEntry("kept", NS, "back")])
        assert await store_with_tables.load_producer(UUID, "p") == producer_state
        await store_with_tables.transact(
            [DropEntry(TABLE, NS, "back", keep=_build_dropped_entry(clock)), ForgetDropped("kept")]
        )
        assert await store_with_tables.load_producer(UUID, "p") is None
        assert await store_with_tables.load_producer("uuid-of-u", "p") == ProducerState(1, 2, 9)
        await store_with_tables.transact([DropEntry(TABLE, NS, "u")])
        assert await store_with_tables.load_producer("uuid-of-u", "p") is None

    async def test_concurrent_drop_and_commit_leave_no_producer_without_a_table(
        self, store_with_tables: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for step in range(10):
            name = f"n{step}"
            await store_with_tables.transact([CreateEntry(make_entry(name))])
            advance_outcome, drop_outcome = await asyncio.gather(
                get_outcome(store_with_tables.transact([build_advance(1, uuid=f"uuid-of-{name}")])),
                get_outcome(other_store.transact([DropEntry(TABLE, NS, name)])),
            )
            assert drop_outcome == "won"
            assert advance_outcome in ("won", "no_such_table")
            assert await store_with_tables.load_producer(f"uuid-of-{name}", "p") is None


def _build_dropped_entry(clock: SimulatedClock) -> DroppedEntry:
    return DroppedEntry("kept", make_entry("t"), False, 0, clock.now_ms() + 100, "ann")


def build_offset_move(*ranges: tuple[int, int, int], uuid: str = UUID) -> MoveFlushedOffsets:
    return MoveFlushedOffsets(uuid, tuple(FlushedRange(*flushed_range) for flushed_range in ranges))


async def read_offsets(store: GeneratorStore) -> dict[int, int]:
    entry = await store.load_entry(TABLE, NS, "t")
    assert entry is not None
    (entry_by_uuid,) = await store.list_entries_by_uuid(UUID)
    assert entry_by_uuid == entry
    return entry.parse_flushed_offsets()


class StreamsContract(StorePair):
    """The tests of the flushed offsets of stream tables that each store passes."""

    async def test_only_a_stream_table_has_flushed_offsets(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("u"))])
        assert await read_offsets(store) == {}
        await store.transact([OpenStream(UUID, 2)])
        await store.transact([build_offset_move((1, 0, 7)), OpenStream(UUID, 3)])
        assert await read_offsets(other_store) == {0: 0, 1: 7, 2: 0}
        entry = await store.load_entry(TABLE, NS, "u")
        assert entry is not None
        assert entry.flushed == ""
        with pytest.raises(NoSuchTable):
            await store.transact([OpenStream("uuid-of-nothing", 1)])

    async def test_offsets_move_only_from_their_current_value(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t")), OpenStream(UUID, 2)])
        await store.transact([build_offset_move((1, 0, 2**40), (0, 0, 5))])
        for ranges in (((0, 0, 5),), ((0, 4, 9),), ((0, 5, 9), (1, 0, 1)), ((7, 0, 1),)):
            with pytest.raises(CommitConflict, match="nothing was changed"):
                await other_store.transact([build_offset_move(*ranges)])
        assert await read_offsets(store) == {0: 5, 1: 2**40}
        with pytest.raises(NoSuchTable):
            await store.transact([build_offset_move((0, 0, 1), uuid="uuid-of-nothing")])

    async def test_a_pointer_and_its_offsets_move_together(self, store: GeneratorStore) -> None:
        entry = make_entry("t")
        await store.transact([CreateEntry(entry), OpenStream(UUID, 1)])
        swap = SwapPointer(EntryKind.TABLE, NS, "t", UUID, entry.metadata_location, "file:///next", now_ms=9)
        with pytest.raises(CommitConflict):
            await store.transact([swap, build_offset_move((0, 3, 4))])
        losing_swap = SwapPointer(EntryKind.TABLE, NS, "t", UUID, "file:///other", "file:///next", now_ms=9)
        with pytest.raises(LostRace):
            await store.transact([build_offset_move((0, 0, 4)), losing_swap])
        assert await read_offsets(store) == {0: 0}
        await store.transact([swap, build_offset_move((0, 0, 4))])
        moved_entry = await store.load_entry(TABLE, NS, "t")
        assert moved_entry is not None
        assert (moved_entry.metadata_location, moved_entry.flushed) == ("file:///next", "0:4")

    async def test_only_one_caller_takes_the_last_flush_before_a_removal(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        """A flush precedes a commit that removes rows, so that the commit conflicts if it has not read all rows.

        The snapshot of the flush is recorded. If the repeated commit has read this snapshot, it takes the record, and
        no further flush is needed.
        """
        with pytest.raises(NoSuchTable):
            await store.transact([RecordRemovalFlush(UUID, 1)])
        await store.transact([CreateEntry(make_entry("t")), RecordRemovalFlush(UUID, 1), RecordRemovalFlush(UUID, 2)])
        assert await other_store.transact([TakeRemovalFlush(UUID, 2)]) == [True]
        assert await other_store.transact([TakeRemovalFlush(UUID, 2)]) == [False]
        # The repeated commit has read another snapshot, or the table without a snapshot.
        for read_snapshot_id in (1, None):
            await store.transact([RecordRemovalFlush(UUID, 2)])
            assert await other_store.transact([TakeRemovalFlush(UUID, read_snapshot_id)]) == [False]
        assert await store.transact([TakeRemovalFlush(UUID, 2)]) == [False]
        await store.transact([RecordRemovalFlush(UUID, 3), DropEntry(TABLE, NS, "t")])
        await store.transact([CreateEntry(make_entry("t"))])
        assert await store.transact([TakeRemovalFlush(UUID, 3)]) == [False]

    async def test_entries_of_several_tables_are_found_by_their_uuids(self, store: GeneratorStore) -> None:
        await store.transact([*(CreateEntry(make_entry(name)) for name in "tuv"), OpenStream("uuid-of-v", 2)])
        entries = await store.find_entries(["uuid-of-v", "uuid-of-missing", "uuid-of-t"])
        assert [entry.name for entry in entries] == ["t", "v"]
        assert entries[1].parse_flushed_offsets() == {0: 0, 1: 0}
        assert await store.find_entries([]) == []

    async def test_offsets_are_deleted_with_the_last_name_of_the_table(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), OpenStream(UUID, 1), build_offset_move((0, 0, 4))])
        await store.transact([DropEntry(TABLE, NS, "t")])
        assert await store.list_entries_by_uuid(UUID) == []
        await store.transact([CreateEntry(make_entry("t"))])
        assert await read_offsets(store) == {}
