"""The contract of pointer stores for plan tables: one plan for a name, longer leases, and no file that is forgotten."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from seamark.metaserver.store.model import NamespacePath, PlanSnapshot, StoredPlanTable
from seamark.metaserver.store.operations import (
    CreateEntry,
    DropEntry,
    DropPlanSnapshots,
    ForgetPlanTable,
    KeepPlanTable,
    LeasePlanSnapshots,
    RenewPlanTable,
    RetirePlanTables,
)
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.store.samples import NS, TABLE, make_entry
from tests.store.store_pair import StorePair

NAME = "t~plan~" + "0" * 32
FIRST_SNAPSHOT_ID = 2**61


def build_plan(
    plan_id: str, name: str | None = NAME, *, expires_ms: int = 100, namespace: NamespacePath = NS
) -> StoredPlanTable:
    """Return a plan table whose text fields have characters that need escapes."""
    return StoredPlanTable(
        id=plan_id,
        namespace=namespace,
        name=name,
        of_name="T",
        uuid="uuid-of-T",
        location=f"file:///w/{plan_id}.metadata.json",
        files=(f"file:///w/{plan_id} \U0001f600,\"'.avro", f"file:///w/{plan_id}.metadata.json"),
        snapshot_id=2**62,
        file_count=3,
        size_bytes=2**40,
        considered_count=10,
        considered_bytes=None,
        expires_ms=expires_ms,
    )


def build_snapshot_plan(number: int, audience: str = "a", *, expires_ms: int = 100) -> StoredPlanTable:
    """Return a plan that engines of `audience` read as the snapshot `FIRST_SNAPSHOT_ID` + `number`.

    Its JSON has a character outside of the first 65,536 and a quotation mark, which databases must store unchanged.
    """
    name = f"t~plan~{audience}{number:031x}"
    return msgspec.structs.replace(
        build_plan(f"{audience}{number}", name, expires_ms=expires_ms),
        audience=audience,
        plan_snapshot_id=FIRST_SNAPSHOT_ID + number,
        snapshot_or_fingerprint=f'{{"snapshot-id": {FIRST_SNAPSHOT_ID + number}, "\U0001f600": "\'"}}',
    )


async def list_plan_ids(
    store: GeneratorStore, audience: str = "a", now_ms: int = 0, uuid: str = "uuid-of-T"
) -> list[int]:
    return [
        snapshot.id - FIRST_SNAPSHOT_ID
        for snapshot in await store.list_plan_snapshots(NS, "T", uuid, audience, now_ms, 100)
    ]


async def store_plan_table(store: GeneratorStore, stored_plan_table: StoredPlanTable) -> StoredPlanTable:
    (kept_plan_table,) = await store.transact([KeepPlanTable(stored_plan_table)])
    assert isinstance(kept_plan_table, StoredPlanTable)
    return kept_plan_table


async def retire_plans(store: GeneratorStore, before_ms: int, limit: int = 100) -> int:
    (count,) = await store.transact([RetirePlanTables(before_ms, limit)])
    assert isinstance(count, int)
    return count


class PlanTablesContract(StorePair):
    """The tests of stored plan tables and their leases that each store passes."""

    @pytest.mark.parametrize("considered_bytes", [None, 0, 2**50])
    async def test_loaded_plan_table_equals_the_stored_plan_table(
        self, store: GeneratorStore, other_store: GeneratorStore, considered_bytes: int | None
    ) -> None:
        plan = msgspec.structs.replace(build_plan("a"), considered_bytes=considered_bytes)
        assert await store.load_plan_table(NS, NAME) is None
        assert await store_plan_table(store, plan) == plan
        assert await other_store.load_plan_table(NS, NAME) == plan
        assert await other_store.load_plan_table(NS, NAME.upper()) is None
        assert await other_store.load_plan_table(("ns", "x"), NAME) is None

    async def test_first_plan_keeps_the_name_for_the_longer_of_both_leases(self, store: GeneratorStore) -> None:
        first_plan = build_plan("a", expires_ms=100)
        await store_plan_table(store, first_plan)
        assert await store_plan_table(store, build_plan("b", expires_ms=50)) == first_plan
        assert await store_plan_table(store, build_plan("c", expires_ms=150)) == msgspec.structs.replace(
            first_plan, expires_ms=150
        )
        assert await store.load_plan_table(NS, NAME) == msgspec.structs.replace(first_plan, expires_ms=150)
        plan_elsewhere = build_plan("d", namespace=("ns", "x"))
        assert await store_plan_table(store, plan_elsewhere) == plan_elsewhere

    async def test_concurrent_stores_of_one_name_all_return_the_same_plan(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for step in range(10):
            name = f"t~plan~{step:032x}"
            results = await asyncio.gather(
                *(
                    store_plan_table((store, other_store)[number % 2], build_plan(f"{step}-{number}", name))
                    for number in range(6)
                )
            )
            assert len({result.id for result in results}) == 1
            assert await store.load_plan_table(NS, name) == results[0]

    async def test_lease_can_be_extended_and_never_shortened(self, store: GeneratorStore) -> None:
        await store_plan_table(store, build_plan("a", expires_ms=100))
        for until_ms, expected_ms in ((90, 100), (110, 110), (100, 110)):
            assert await store.transact([RenewPlanTable("a", until_ms)]) == [True]
            table = await store.load_plan_table(NS, NAME)
            assert table is not None
            assert table.expires_ms == expected_ms
        assert await store.transact([RenewPlanTable("nobody", 500)]) == [False]

    async def test_plans_with_expired_leases_lose_their_names_oldest_first(self, store: GeneratorStore) -> None:
        for number in range(5):
            await store_plan_table(store, build_plan(f"p{number}", f"t~plan~{number:032x}", expires_ms=100 - number))
        assert await retire_plans(store, 96) == 0
        assert await retire_plans(store, 100, limit=2) == 2
        remaining_plans = [await store.load_plan_table(NS, f"t~plan~{number:032x}") for number in range(5)]
        assert [item is not None for item in remaining_plans] == [True, True, True, False, False]
        assert await retire_plans(store, 100) == 2
        assert await retire_plans(store, 100) == 0
        assert await store.plan_table_count(0) == 1, "only one plan is not retired"
        assert await store.plan_table_count(99) == 1
        assert await store.plan_table_count(100) == 0, "the lease of the last plan has ended"
        retired_plans = await store.list_retired_plan_tables(None, 3)
        assert [item.id for item in retired_plans] == ["p1", "p2", "p3"]
        assert retired_plans[0] == msgspec.structs.replace(build_plan("p1", None), expires_ms=99)
        assert [retired_plan_table.id for retired_plan_table in await store.list_retired_plan_tables("p3", 3)] == ["p4"]

    async def test_retired_plan_cannot_be_renewed_and_does_not_block_a_new_plan(self, store: GeneratorStore) -> None:
        await store_plan_table(store, build_plan("a"))
        await retire_plans(store, 1000)
        assert await store.transact([RenewPlanTable("a", 5000)]) == [False]
        assert await store_plan_table(store, build_plan("b")) == build_plan("b")
        assert await retire_plans(store, 1000) == 1
        assert [retired_plan_table.id for retired_plan_table in await store.list_retired_plan_tables(None, 10)] == [
            "a",
            "b",
        ]

    async def test_only_a_retired_plan_can_be_forgotten(self, store: GeneratorStore) -> None:
        await store_plan_table(store, build_plan("a"))
        await store.transact([ForgetPlanTable("a")])
        assert await store.load_plan_table(NS, NAME) == build_plan("a")
        await retire_plans(store, 1000)
        await store.transact([ForgetPlanTable("a"), ForgetPlanTable("nobody")])
        assert await store.list_retired_plan_tables(None, 10) == []
        assert await store.load_plan_table(NS, NAME) is None

    async def test_plan_cannot_be_both_renewed_and_retired(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for step in range(10):
            name = f"t~plan~{step:032x}"
            await store_plan_table(store, build_plan(f"p{step}", name, expires_ms=100))
            (is_renewed,), retired_count = await asyncio.gather(
                store.transact([RenewPlanTable(f"p{step}", 10_000)]), retire_plans(other_store, 1000)
            )
            assert is_renewed == (retired_count == 0)
            assert (await store.load_plan_table(NS, name) is not None) == is_renewed

    async def test_plans_stay_until_their_files_are_deleted_despite_changes_to_the_table(
        self, store: GeneratorStore
    ) -> None:
        await store.transact([CreateEntry(make_entry("T"))])
        await store_plan_table(store, build_plan("a"))
        await store.transact([DropEntry(TABLE, NS, "T")])
        await retire_plans(store, 1000)
        assert [retired_plan_table.id for retired_plan_table in await store.list_retired_plan_tables(None, 10)] == ["a"]

    async def test_plan_snapshots_are_shown_to_their_audience_until_their_leases_end(
        self, store: GeneratorStore, other_store: GeneratorStore
    ) -> None:
        for number in (2, 1, 3):
            plan = build_snapshot_plan(number, expires_ms=100 * number)
            assert await store_plan_table(store, plan) == plan
            assert await other_store.load_plan_table(NS, str(plan.name)) == plan
        await store_plan_table(store, build_snapshot_plan(4, "b"))
        await store_plan_table(store, build_plan("named"))
        assert await other_store.list_plan_snapshots(NS, "T", "uuid-of-T", "b", 0, 100) == [
            PlanSnapshot(FIRST_SNAPSHOT_ID + 4, str(build_snapshot_plan(4).snapshot_or_fingerprint))
        ]
        assert [await list_plan_ids(other_store, now_ms=now_ms) for now_ms in (0, 100, 250, 300)] == [
            [1, 2, 3],
            [2, 3],
            [3],
            [],
        ]
        assert await list_plan_ids(other_store, uuid="another") == []
        assert await other_store.list_plan_snapshots(("ns", "x"), "T", "uuid-of-T", "a", 0, 100) == []
        latest_plans = await other_store.list_plan_snapshots(NS, "T", "uuid-of-T", "a", 0, 2)
        assert [item.id - FIRST_SNAPSHOT_ID for item in latest_plans] == [2, 3]

    async def test_only_the_audience_renews_or_withdraws_leases_of_plan_snapshots(self, store: GeneratorStore) -> None:
        for number in (1, 2):
            await store_plan_table(store, build_snapshot_plan(number))
        await store_plan_table(store, build_snapshot_plan(1, "b"))

        async def lease_plans(
            numbers: tuple[int, ...], expires_ms: int, audience: str = "a", *, withdraw: bool = False
        ) -> int:
            ids = tuple(FIRST_SNAPSHOT_ID + number for number in numbers)
            (actual,) = await store.transact([LeasePlanSnapshots(NS, "T", audience, ids, expires_ms, withdraw)])
            assert isinstance(actual, int)
            return actual

        assert await lease_plans((1, 2, 9), 500) == 2
        assert await lease_plans((1,), 300) == 1
        assert await list_plan_ids(store, now_ms=400) == [1, 2]
        assert await list_plan_ids(store, "b", now_ms=400) == []
        assert await lease_plans((1,), 200, withdraw=True) == 1
        assert await list_plan_ids(store, now_ms=200) == [2]
        assert await lease_plans((1,), 600, "c") == 0
        await retire_plans(store, 1000)
        assert await lease_plans((1, 2), 5000) == 0

    async def test_dropped_plan_snapshot_of_any_principal_is_retired(self, store: GeneratorStore) -> None:
        for audience in ("a", "b"):
            for number in (1, 2):
                await store_plan_table(store, build_snapshot_plan(number, audience))
        await store_plan_table(store, build_plan("named"))
        drop_results = await store.transact([DropPlanSnapshots(NS, "T", (FIRST_SNAPSHOT_ID + 1, 2**62, 5))])
        assert drop_results == [2]
        assert await list_plan_ids(store) == await list_plan_ids(store, "b") == [2]
        assert [retired_plan_table.id for retired_plan_table in await store.list_retired_plan_tables(None, 10)] == [
            "a1",
            "b1",
        ]
        assert await store.load_plan_table(NS, NAME) == build_plan("named")
        assert await store.transact([DropPlanSnapshots(("ns", "x"), "T", (FIRST_SNAPSHOT_ID + 2,))]) == [0]
