"""The contract of pointer stores for transactions, alone and concurrent."""

from __future__ import annotations

import asyncio

import pytest

from seamark.formats.runtime.errors import (
    BadRequest,
    NoSuchTable,
)
from seamark.metaserver.store.operations import (
    CreateEntry,
    CreateNamespace,
    DropNamespace,
    RecordInstant,
    SaveAudit,
    TakeLease,
)
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import (
    NS,
    TABLE,
    VIEW,
    get_outcome,
    make_entry,
    make_instant,
    make_swap,
)
from tests.store.store_pair import StorePair


class TransactionsContract(StorePair):
    """The tests of the atomicity and order of operations that each store passes."""

    async def test_failed_operation_undoes_the_earlier_operations_of_its_transaction(
        self, store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        first_location = make_entry("t").metadata_location
        with pytest.raises(NoSuchTable):
            await store.transact(
                [
                    CreateNamespace(("b",), {}),
                    make_swap("t", first_location, "file:///1"),
                    RecordInstant(make_instant("i1")),
                    make_swap("missing", "x", "y"),
                ]
            )
        assert await store.load_namespace(("b",)) is None
        assert await store.load_entry(TABLE, NS, "t") == make_entry("t")
        assert await store.load_instant("i1") is None

    async def test_results_are_in_the_order_of_the_operations(self, store: GeneratorStore) -> None:
        results = await store.transact([CreateEntry(make_entry("t")), TakeLease("l", "me", 0, 10), SaveAudit(())])
        assert results == [None, 1, None]
        assert await store.transact([]) == []

    async def test_commit_is_visible_to_another_store_at_once(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        location = make_entry("t").metadata_location
        await store.transact([CreateEntry(make_entry("t"))])
        for step in range(50):
            writing_store, reading_store = (store, other_store) if step % 2 else (other_store, store)
            await writing_store.transact([make_swap("t", location, f"file:///{step}")])
            location = f"file:///{step}"
            read_entry = await reading_store.load_entry(TABLE, NS, "t")
            assert read_entry is not None
            assert read_entry.metadata_location == location
            assert [entry.metadata_location for entry in await reading_store.list_entries(TABLE, NS, None, 9)] == [
                location
            ]

    async def test_fifty_creates_of_one_name_have_one_winner(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        outcomes = await asyncio.gather(
            *(
                get_outcome(
                    (store, other_store)[n % 2].transact([CreateEntry(make_entry("t", (TABLE, VIEW)[n % 3 % 2]))])
                )
                for n in range(50)
            )
        )
        assert sorted(outcomes) == ["already_exists"] * 49 + ["won"]

    async def test_twenty_swaps_from_one_location_have_one_winner(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("t"))])
        first_location = make_entry("t").metadata_location
        outcomes = await asyncio.gather(
            *(
                get_outcome(
                    (store, other_store)[n % 2].transact(
                        [make_swap("t", first_location, f"file:///{n}"), RecordInstant(make_instant(f"i{n}"))]
                    )
                )
                for n in range(20)
            )
        )
        assert sorted(outcomes) == ["commit_conflict"] * 19 + ["won"]
        entry_after = await store.load_entry(TABLE, NS, "t")
        assert entry_after is not None
        assert entry_after.version == 2
        assert [n for n in range(20) if await store.load_instant(f"i{n}")] == [outcomes.index("won")]

    async def test_namespace_cannot_be_both_dropped_and_filled(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for step in range(20):
            path = (f"race{step}",)
            await store.transact([CreateNamespace(path, {})])
            fill = CreateEntry(make_entry("t", namespace=path)) if step % 2 else CreateNamespace((*path, "c"), {})
            outcomes = await asyncio.gather(
                get_outcome(store.transact([DropNamespace(path)])), get_outcome(other_store.transact([fill]))
            )
            assert tuple(outcomes) in {("won", "no_such_namespace"), ("namespace_not_empty", "won")}
            await store.check_invariants()

    async def test_swaps_of_two_tables_in_opposite_order_never_stay_deadlocked(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        locations = {}
        for name in ("t", "u"):
            await store.transact([CreateEntry(make_entry(name))])
            locations[name] = make_entry(name).metadata_location
        for step in range(3):
            new_location = f"file:///{step}"
            swaps = [make_swap(name, location, f"{new_location}/one") for name, location in locations.items()]
            other_swaps = [make_swap(name, location, f"{new_location}/two") for name, location in locations.items()]
            outcomes = await asyncio.gather(
                get_outcome(store.transact(swaps)), get_outcome(other_store.transact(other_swaps[::-1]))
            )
            assert sorted(outcomes) == ["commit_conflict", "won"]
            winner = f"{new_location}/{('one', 'two')[outcomes.index('won')]}"
            for name in locations:
                entry = await store.load_entry(TABLE, NS, name)
                assert entry is not None
                assert entry.metadata_location == winner
                locations[name] = winner

    # Tests of calls and values

    async def test_ping_of_a_reachable_store_raises_no_error(self, store: GeneratorStore) -> None:
        await store.ping()

    async def test_value_that_the_database_cannot_store_is_a_client_error(self, store: GeneratorStore) -> None:
        for bad_operation in (
            CreateEntry(make_entry("t", version=2**63)),
            RecordInstant(make_instant("i", snapshot_id=-(2**63) - 1)),
            CreateEntry(make_entry("t\ud800")),
        ):
            with pytest.raises(BadRequest):
                await store.transact([bad_operation])
        with pytest.raises(BadRequest):
            await store.load_entry(TABLE, NS, "t\ud800")
        with pytest.raises(BadRequest):
            await store.list_entries(TABLE, NS, "t\ud800", 10)
        await store.transact([CreateEntry(make_entry("t"))])

    async def test_names_with_sql_characters_are_stored_unchanged(self, store: GeneratorStore) -> None:
        names = ["'; DROP TABLE entries; --", '"', "$1", "?1", "{visible}", "%", "\\", "\\x00"]
        for name in names:
            await store.transact([CreateEntry(make_entry(name))])
            assert await store.load_entry(TABLE, NS, name) == make_entry(name)
        assert len(await store.list_entries(TABLE, NS, None, 99)) == len(names)
