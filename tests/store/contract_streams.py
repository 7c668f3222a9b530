"""What every pointer store promises about flushed offsets: they move by compare-and-swap, and with their pointer."""

from __future__ import annotations

import pytest

from seamark.formats.runtime.errors import CommitConflict, NoSuchTable
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.operations import (
    CreateEntry,
    DropEntry,
    FlushedRange,
    MoveFlushedOffsets,
    OpenStream,
    SwapPointer,
)
from seamark.metaserver.store.port import LostRace
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.opened import OpenedStores
from tests.store.samples import NS, TABLE, make_entry

UUID = "uuid-of-t"


def move(*ranges: tuple[int, int, int], uuid: str = UUID) -> MoveFlushedOffsets:
    return MoveFlushedOffsets(uuid, tuple(FlushedRange(*moved) for moved in ranges))


async def offsets(store: GeneratorStore) -> dict[int, int]:
    entry = await store.entry(TABLE, NS, "t")
    assert entry is not None
    (same,) = await store.entries_of(UUID)
    assert same == entry
    return entry.flushed_offsets()


class StreamsContract(OpenedStores):
    async def test_only_a_stream_table_has_flushed_offsets(self, store: GeneratorStore, other: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), CreateEntry(make_entry("u"))])
        assert await offsets(store) == {}
        await store.transact([OpenStream(UUID, 2)])
        await store.transact([move((1, 0, 7)), OpenStream(UUID, 3)])
        assert await offsets(other) == {0: 0, 1: 7, 2: 0}
        entry = await store.entry(TABLE, NS, "u")
        assert entry is not None
        assert entry.flushed == ""
        with pytest.raises(NoSuchTable):
            await store.transact([OpenStream("uuid-of-nothing", 1)])

    async def test_offsets_move_from_where_they_are_or_not_at_all(
        self, store: GeneratorStore, other: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t")), OpenStream(UUID, 2)])
        await store.transact([move((1, 0, 2**40), (0, 0, 5))])
        for ranges in (((0, 0, 5),), ((0, 4, 9),), ((0, 5, 9), (1, 0, 1)), ((7, 0, 1),)):
            with pytest.raises(CommitConflict, match="nothing was changed"):
                await other.transact([move(*ranges)])
        assert await offsets(store) == {0: 5, 1: 2**40}
        with pytest.raises(NoSuchTable):
            await store.transact([move((0, 0, 1), uuid="uuid-of-nothing")])

    async def test_a_pointer_and_its_offsets_move_together(self, store: GeneratorStore) -> None:
        entry = make_entry("t")
        await store.transact([CreateEntry(entry), OpenStream(UUID, 1)])
        swap = SwapPointer(EntryKind.TABLE, NS, "t", UUID, entry.metadata_location, "file:///next", now_ms=9)
        with pytest.raises(CommitConflict):
            await store.transact([swap, move((0, 3, 4))])
        lost = SwapPointer(EntryKind.TABLE, NS, "t", UUID, "file:///other", "file:///next", now_ms=9)
        with pytest.raises(LostRace):
            await store.transact([move((0, 0, 4)), lost])
        assert await offsets(store) == {0: 0}
        await store.transact([swap, move((0, 0, 4))])
        moved = await store.entry(TABLE, NS, "t")
        assert moved is not None
        assert (moved.metadata_location, moved.flushed) == ("file:///next", "0:4")

    async def test_offsets_go_with_the_last_name_of_the_table(self, store: GeneratorStore) -> None:
        await store.transact([CreateEntry(make_entry("t")), OpenStream(UUID, 1), move((0, 0, 4))])
        await store.transact([DropEntry(TABLE, NS, "t")])
        assert await store.entries_of(UUID) == []
        await store.transact([CreateEntry(make_entry("t"))])
        assert await offsets(store) == {}
