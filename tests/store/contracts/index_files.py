"""The contract of pointer stores for the registry of index files."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import CommitConflict, NoSuchTable, NotFound
from seamark.metaserver.store.model import DroppedEntry, IndexFileState, RegisteredIndexFile
from seamark.metaserver.store.operations import (
    CreateEntry,
    DropEntry,
    ForgetDropped,
    ForgetIndexFile,
    QuarantineIndexFile,
    RenameEntry,
    ReplaceIndexFiles,
    RestoreEntry,
)
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import NS, TABLE, get_outcome, make_entry
from tests.store.store_pair import StorePair

UUID = "uuid-of-t"
LIVE, SUPERSEDED, QUARANTINED = IndexFileState.LIVE, IndexFileState.SUPERSEDED, IndexFileState.QUARANTINED


def make_file(name: str, **fields: Any) -> RegisteredIndexFile:
    options: dict[str, Any] = {
        "uuid": UUID,
        "definition": "d",
        "kind": "bloom",
        "level": 0,
        "files": 2,
        "rows": 30,
        "size_bytes": 400,
        "snapshot_id": 7,
        "created_ms": 5,
        "changed_ms": 5,
    } | fields
    return RegisteredIndexFile(location=f"file:///w/{name}", **options)


def make_replacement(add: str, remove: str = "", **fields: Any) -> ReplaceIndexFiles:
    """Return a replacement of index files whose names are single letters.

    `add` and `remove` are texts of such letters.
    """
    options: dict[str, Any] = {"uuid": UUID, "definition": "d", "now_ms": 9} | fields
    files = tuple(make_file(name, uuid=options["uuid"], definition=options["definition"]) for name in add)
    return ReplaceIndexFiles(add=files, remove=tuple(f"file:///w/{name}" for name in remove), **options)


async def read_states(store: GeneratorStore, uuid: str = UUID) -> dict[str, IndexFileState]:
    return {file.location.rpartition("/")[2]: file.state for file in await store.index_files(uuid)}


async def read_index_version(store: GeneratorStore, name: str = "t") -> int:
    entry = await store.load_entry(TABLE, NS, name)
    assert entry is not None
    return entry.index_version


class IndexFilesContract(StorePair):
    """The tests of registered index files that each store passes."""

    @pytest.fixture
    async def store_with_table(self, store: GeneratorStore) -> GeneratorStore:
        await store.transact([CreateEntry(make_entry("t"))])
        return store

    async def test_stored_index_files_equal_the_added_files(self, store_with_table: GeneratorStore) -> None:
        first_file = make_file("a", snapshot_id=None, level=3, created_ms=6)
        second_file = make_file("b", rows=2**40, created_ms=4)
        await store_with_table.transact([ReplaceIndexFiles(UUID, "d", (first_file, second_file), (), 1)])
        assert await store_with_table.index_files(UUID) == [second_file, first_file]
        assert await store_with_table.index_files("another") == []

    async def test_more_files_than_fit_into_one_statement_are_added_in_one_transaction(
        self, store_with_table: GeneratorStore
    ) -> None:
        files = tuple(make_file(f"{number:03}") for number in range(201))
        await store_with_table.transact([ReplaceIndexFiles(UUID, "d", files, (), 1)])
        assert await store_with_table.index_files(UUID) == list(files)

    async def test_index_version_is_part_of_the_entry_and_rises_with_each_change(
        self, store_with_table: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        assert await read_index_version(store_with_table) == 0
        versions = [0]
        for change in (
            make_replacement("ab"),
            make_replacement("c", "ab"),
            QuarantineIndexFile(UUID, "file:///w/c", "flipped", 9),
            ForgetIndexFile(UUID, "file:///w/a", 9),
        ):
            (index_version,) = await store_with_table.transact([change])
            assert await read_index_version(other_store) == index_version
            assert [entry.index_version for entry in await other_store.list_entries(TABLE, NS, None, 9)] == [
                index_version
            ]
            versions.append(index_version)
        assert versions == sorted(set(versions))

    async def test_removed_file_is_superseded_with_its_time(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([make_replacement("ab")])
        await store_with_table.transact([make_replacement("c", "a", now_ms=77)])
        assert await read_states(store_with_table) == {"a": SUPERSEDED, "b": LIVE, "c": LIVE}
        assert [file.changed_ms for file in await store_with_table.index_files(UUID)] == [77, 5, 5]

    async def test_unused_files_are_listed_with_the_oldest_change_first(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([make_replacement("abc")])
        await store_with_table.transact(
            [make_replacement("d", "b", now_ms=20), QuarantineIndexFile(UUID, "file:///w/a", "flipped", 10)]
        )
        unused_names = [file.location[-1] for file in await store_with_table.list_unused_index_files(21, 9)]
        assert unused_names == ["a", "b"]
        assert [file.location[-1] for file in await store_with_table.list_unused_index_files(20, 9)] == ["a"]
        assert [file.location[-1] for file in await store_with_table.list_unused_index_files(21, 1)] == ["a"]
        assert await store_with_table.list_unused_index_files(10, 9) == []

    async def test_tables_with_indexes_are_listed_with_all_their_names(self, store_with_table: GeneratorStore) -> None:
        entries = [make_entry(name, uuid="uuid-of-u") for name in ("u", "v")]
        await store_with_table.transact(
            [*map(CreateEntry, entries), CreateEntry(make_entry("plain", uuid="uuid-of-plain"))]
        )
        await store_with_table.transact([make_replacement("a"), make_replacement("b", uuid="uuid-of-u")])
        indexed_tables = await store_with_table.list_indexed_tables(None, 9)
        assert [(entry.uuid, entry.name) for entry in indexed_tables] == [
            (UUID, "t"),
            ("uuid-of-u", "u"),
            ("uuid-of-u", "v"),
        ]
        assert all(entry.index_version > 0 for entry in indexed_tables)
        assert [entry.name for entry in await store_with_table.list_indexed_tables(None, 1)] == ["t"]
        assert [entry.name for entry in await store_with_table.list_indexed_tables(UUID, 1)] == ["u", "v"]
        assert await store_with_table.list_indexed_tables("uuid-of-u", 9) == []

    async def test_replacing_a_file_that_is_not_live_is_a_conflict_without_changes(
        self, store_with_table: GeneratorStore
    ) -> None:
        await store_with_table.transact([make_replacement("ab"), make_replacement("c", "b")])
        state_before = await read_states(store_with_table), await read_index_version(store_with_table)
        for remove in ("b", "ab", "x"):
            with pytest.raises(CommitConflict, match="no longer live"):
                await store_with_table.transact([make_replacement("d", remove)])
        with pytest.raises(CommitConflict, match="file:///w/a is no longer live"):
            await store_with_table.transact([make_replacement("d", "a", definition="another")])
        assert (await read_states(store_with_table), await read_index_version(store_with_table)) == state_before

    async def test_repeated_replacement_changes_nothing(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([make_replacement("ab")])
        await store_with_table.transact([make_replacement("c", "ab")])
        states_before = await read_states(store_with_table)
        await store_with_table.transact([make_replacement("c", "ab")])
        await store_with_table.transact([make_replacement("ab")])
        assert await read_states(store_with_table) == states_before

    async def test_index_file_can_be_registered_for_only_one_definition(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([make_replacement("a")])
        with pytest.raises(CommitConflict, match="registered for another index: d"):
            await store_with_table.transact([make_replacement("ab", definition="another")])
        assert await read_states(store_with_table) == {"a": LIVE}

    async def test_only_one_of_two_replacements_of_a_file_succeeds(
        self, store_with_table: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for step in range(10):
            merged_name, left, right = (f"{step}{file_role}" for file_role in ("merged", "left", "right"))
            await store_with_table.transact([_build_replacement([merged_name])])
            results = await asyncio.gather(
                get_outcome(store_with_table.transact([_build_replacement([left], [merged_name])])),
                get_outcome(other_store.transact([_build_replacement([right], [merged_name])])),
            )
            assert sorted(results) == ["commit_conflict", "won"]
            live_names = {name for name, state in (await read_states(store_with_table)).items() if state is LIVE}
            assert len(live_names & {left, right}) == 1
            assert merged_name not in live_names

    async def test_registrations_and_commits_do_not_block_each_other(
        self, store_with_table: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        names = [f"{number:02}" for number in range(20)]
        await asyncio.gather(
            *(
                replica.transact([_build_replacement([name]), CreateEntry(make_entry(name))])
                for replica, name in zip([store_with_table, other_store] * 10, names, strict=True)
            )
        )
        assert await read_states(store_with_table) == dict.fromkeys(names, LIVE)

    async def test_table_without_a_name_gets_no_index_files(
        self, store_with_table: GeneratorStore, clock: SimulatedClock
    ) -> None:
        with pytest.raises(NoSuchTable, match="uuid nobody"):
            await store_with_table.transact([make_replacement("a", uuid="nobody")])
        await store_with_table.transact([DropEntry(TABLE, NS, "t", keep=_build_dropped_entry(clock))])
        with pytest.raises(NoSuchTable):
            await store_with_table.transact([make_replacement("a")])

    async def test_damaged_file_is_quarantined_with_its_reason_once(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([make_replacement("ab"), make_replacement("c", "b")])
        for reason in ("crc of blob 1", "again"):
            await store_with_table.transact([QuarantineIndexFile(UUID, "file:///w/a", reason, 50)])
        await store_with_table.transact([QuarantineIndexFile(UUID, "file:///w/b", "superseded anyway", 50)])
        assert await read_states(store_with_table) == {"a": QUARANTINED, "b": SUPERSEDED, "c": LIVE}
        reasons = {file.location: (file.reason, file.changed_ms) for file in await store_with_table.index_files(UUID)}
        assert reasons["file:///w/a"] == ("crc of blob 1", 50)
        assert reasons["file:///w/b"][0] is None
        with pytest.raises(NotFound, match="file:///w/x"):
            await store_with_table.transact([QuarantineIndexFile(UUID, "file:///w/x", "?", 50)])

    async def test_live_index_file_is_not_forgotten(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([make_replacement("ab"), make_replacement("c", "a")])
        with pytest.raises(CommitConflict, match="is live"):
            await store_with_table.transact([ForgetIndexFile(UUID, "file:///w/c", 1)])
        for _ in range(2):
            await store_with_table.transact([ForgetIndexFile(UUID, "file:///w/a", 1)])
        assert await read_states(store_with_table) == {"b": LIVE, "c": LIVE}

    async def test_index_files_follow_a_rename(self, store_with_table: GeneratorStore) -> None:
        (index_version,) = await store_with_table.transact([make_replacement("a")])
        await store_with_table.transact([RenameEntry(TABLE, NS, "t", NS, "u")])
        assert await read_index_version(store_with_table, "u") == index_version
        await store_with_table.transact([make_replacement("b")])
        assert await read_states(store_with_table) == {"a": LIVE, "b": LIVE}

    async def test_index_files_stay_until_a_drop_can_no_longer_be_undone(
        self, store_with_table: GeneratorStore, clock: SimulatedClock
    ) -> None:
        (index_version,) = await store_with_table.transact([make_replacement("a")])
        await store_with_table.transact([DropEntry(TABLE, NS, "t", keep=_build_dropped_entry(clock))])
        assert await read_states(store_with_table) == {"a": LIVE}
        await store_with_table.transact([RestoreEntry("kept", NS, "back")])
        assert await read_index_version(store_with_table, "back") == index_version
        await store_with_table.transact([DropEntry(TABLE, NS, "back", keep=_build_dropped_entry(clock))])
        await store_with_table.transact([ForgetDropped("kept")])
        assert await read_states(store_with_table) == {}

    async def test_index_files_are_deleted_with_the_last_name(self, store_with_table: GeneratorStore) -> None:
        await store_with_table.transact([CreateEntry(make_entry("twin", uuid=UUID)), make_replacement("a")])
        await store_with_table.transact([DropEntry(TABLE, NS, "t")])
        assert await read_states(store_with_table) == {"a": LIVE}
        index_version_before = await read_index_version(store_with_table, "twin")
        await store_with_table.transact([DropEntry(TABLE, NS, "twin")])
        assert await read_states(store_with_table) == {}
        await store_with_table.transact(
            [CreateEntry(make_entry("t")), make_replacement("b", now_ms=index_version_before + 1)]
        )
        assert await read_index_version(store_with_table) > index_version_before

    async def test_concurrent_drop_and_registration_leave_no_index_file_without_a_table(
        self, store_with_table: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for step in range(10):
            name = f"n{step}"
            await store_with_table.transact([CreateEntry(make_entry(name))])
            register_outcome, drop_outcome = await asyncio.gather(
                get_outcome(store_with_table.transact([make_replacement("ab", uuid=f"uuid-of-{name}")])),
                get_outcome(other_store.transact([DropEntry(TABLE, NS, name)])),
            )
            assert drop_outcome == "won"
            assert register_outcome in ("won", "no_such_table")
            assert await read_states(store_with_table, f"uuid-of-{name}") == {}


def _build_replacement(add: list[str], remove: list[str] | None = None) -> ReplaceIndexFiles:
    removed_locations = tuple(f"file:///w/{name}" for name in remove or ())
    return ReplaceIndexFiles(UUID, "d", tuple(make_file(name) for name in add), removed_locations, 9)


def _build_dropped_entry(clock: SimulatedClock) -> DroppedEntry:
    return DroppedEntry("kept", make_entry("t"), False, 0, clock.now_ms() + 100, "ann")
