"""Tests that the registry reads from the store once per change, and never serves data older than the given entry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, NotFound
from seamark.metaserver.index.files.registry import IndexFiles, Registry
from seamark.metaserver.store.model import Entry, IndexFileState, RegisteredIndexFile
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, DropEntry, Operation
from seamark.metaserver.store.port import PointerStore
from tests.store.contracts.index_files import make_file
from tests.store.samples import NS, TABLE, make_entry

UUID = "uuid-of-t"


class CountingStore:
    """A store that counts the calls of `index_files`, and loses the replies to the next `lost_replies` transactions.

    The transactions are executed.
    """

    def __init__(self, store: PointerStore) -> None:
        self._store = store
        self.list_count = 0
        self.lost_replies = 0

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        self.list_count += 1
        await asyncio.sleep(0)
        return await self._store.index_files(uuid)

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        results = await self._store.transact(operations)
        if self.lost_replies:
            self.lost_replies -= 1
            raise CommitUnknown("injected: the reply is lost")
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[CountingStore]:
    async with open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=SimulatedClock(seed=1)) as store:
        await store.transact([CreateNamespace(NS, {}), CreateEntry(make_entry("t"))])
        yield CountingStore(store)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(seed=2)


@pytest.fixture
def registry(store: CountingStore, clock: SimulatedClock) -> Registry:
    return Registry(store, clock)


async def load_entry(store: CountingStore) -> Entry:
    entry: Entry | None = await store.load_entry(TABLE, NS, "t")
    assert entry is not None
    return entry


def list_names(files: Sequence[RegisteredIndexFile]) -> list[str]:
    return [file.location.rpartition("/")[2] for file in files]


async def test_table_without_index_files_needs_no_read(store: CountingStore, registry: Registry) -> None:
    files = await registry.load_files(await load_entry(store))
    assert (files.files, files.definition_ids, files.list_live_files("d")) == ((), (), ())
    assert store.list_count == 0


async def test_concurrent_and_later_plans_read_the_store_once(store: CountingStore, registry: Registry) -> None:
    await registry.replace(UUID, "d", add=[make_file("a")])
    entry = await load_entry(store)
    answers = await asyncio.gather(*(registry.load_files(entry) for _ in range(20)))
    answers.append(await registry.load_files(entry))
    assert [list_names(answer.list_live_files("d")) for answer in answers] == [["a"]] * 21
    assert store.list_count == 1


async def test_change_is_visible_to_readers_of_the_later_entry(store: CountingStore, registry: Registry) -> None:
    other_registry = Registry(store, SimulatedClock(seed=3))
    await registry.replace(UUID, "d", add=[make_file("a"), make_file("b", created_ms=6)])
    await registry.replace(UUID, "e", add=[make_file("c", definition="e", created_ms=7)])
    files_before = await other_registry.load_files(await load_entry(store))
    assert (list_names(files_before.list_live_files("d")), list_names(files_before.list_live_files("e"))) == (
        ["a", "b"],
        ["c"],
    )
    assert set(files_before.definition_ids) == {"d", "e"}
    await registry.replace(UUID, "d", add=[make_file("m", created_ms=8)], remove=["file:///w/a"])
    await registry.quarantine_file(UUID, "file:///w/b", "crc")
    files_after = await other_registry.load_files(await load_entry(store))
    assert files_after.version > files_before.version
    assert list_names(files_after.list_live_files("d")) == ["m"]
    assert list_names(files_after.files) == ["a", "b", "c", "m"]
    await registry.forget(UUID, "file:///w/a")
    assert list_names((await other_registry.load_files(await load_entry(store))).files) == ["b", "c", "m"]


async def test_addition_with_a_lost_reply_is_repeated(store: CountingStore, registry: Registry) -> None:
    await registry.replace(UUID, "d", add=[make_file("a")])
    store.lost_replies = 1
    version = await registry.replace(UUID, "d", add=[make_file("b")], remove=["file:///w/a"])
    entry = await load_entry(store)
    assert entry.index_version == version
    assert list_names((await registry.load_files(entry)).list_live_files("d")) == ["b"]


async def test_lost_reply_is_reported_if_a_repeat_could_affect_a_later_change(
    store: CountingStore, registry: Registry
) -> None:
    await registry.replace(UUID, "d", add=[make_file("a")])
    store.lost_replies = 1
    with pytest.raises(CommitUnknown):
        await registry.replace(UUID, "d", add=[], remove=["file:///w/a"])


async def test_only_one_of_two_merges_of_the_same_files_succeeds(store: CountingStore, registry: Registry) -> None:
    other_registry = Registry(store, SimulatedClock(seed=3))
    await registry.replace(UUID, "d", add=[make_file("a"), make_file("b")])
    outcomes = await asyncio.gather(
        registry.replace(UUID, "d", add=[make_file("x")], remove=["file:///w/a", "file:///w/b"]),
        other_registry.replace(UUID, "d", add=[make_file("y")], remove=["file:///w/b"]),
        return_exceptions=True,
    )
    assert [isinstance(result, CommitConflict) for result in outcomes].count(True) == 1
    live_names = list_names((await registry.load_files(await load_entry(store))).list_live_files("d"))
    assert live_names in (["x"], ["a", "y"])


async def test_unregistered_file_cannot_be_quarantined(registry: Registry) -> None:
    with pytest.raises(NotFound, match="not registered"):
        await registry.quarantine_file(UUID, "file:///w/none", "?")


async def test_forgotten_table_starts_empty_when_it_is_registered_again(
    store: CountingStore, registry: Registry, clock: SimulatedClock
) -> None:
    await registry.replace(UUID, "d", add=[make_file("a")])
    files = await registry.load_files(await load_entry(store))
    await store.transact([DropEntry(TABLE, NS, "t")])
    await store.transact([CreateEntry(make_entry("t"))])
    assert (await registry.load_files(await load_entry(store))).files == ()
    clock.advance(1)
    await registry.replace(UUID, "d", add=[make_file("z")])
    entry = await load_entry(store)
    assert entry.index_version > files.version
    assert list_names((await registry.load_files(entry)).list_live_files("d")) == ["z"]


def test_superseded_and_quarantined_files_are_listed_and_not_live() -> None:
    files = [make_file(state.value, state=state) for state in IndexFileState]
    index_files = IndexFiles(3, files)
    assert list(index_files.files) == files
    assert index_files.list_live_files("d") == (files[0],)
    assert index_files.definition_ids == ("d",)
