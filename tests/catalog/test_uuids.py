"""Tests that a UUID belongs to one table for ever.

The UUID identifies the table's timeline even after the table is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import BadRequest, CommitUnknown, RetryLater
from seamark.metaserver.catalog.values import Caller, CreateTable, TableChange
from seamark.metaserver.store.operations import CreateEntry, Operation
from seamark.metaserver.store.port import InstantFilter, PointerStore
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, open_rig

CONFINED_CALLER = Caller(principal_name="wa", request_id="r", confined_to=(("a",),))


async def _stage_with_uuid(rig: CatalogRig, uuid: str | None = None) -> TableChange:
    """Return the change that creates a staged table of namespace `a` with this UUID."""
    staged_metadata = (
        await rig.catalog.tables.stage(CONFINED_CALLER, ("a",), CreateTable(name="t", schema=SCHEMA))
    ).metadata
    updates: list[dict[str, Any]] = [
        {"action": "assign-uuid", "uuid": uuid or staged_metadata.table_uuid},
        {"action": "add-schema", "schema": SCHEMA},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "set-location", "location": staged_metadata.location},
    ]
    return TableChange(namespace=("a",), name="t", requirements=[{"type": "assert-create"}], updates=updates)


@pytest.mark.parametrize("ending", ["purged", "unregistered"])
async def test_uuid_of_a_purged_table_cannot_be_reused(tmp_path: Path, ending: str) -> None:
    async with open_rig(tmp_path) as rig:
        for path in (("a",), ("b",)):
            await rig.catalog.namespaces.create(CALLER, path, {})
        other_table = await rig.catalog.tables.create(CALLER, ("b",), CreateTable(name="t", schema=SCHEMA))
        victim_uuid = other_table.metadata.table_uuid
        if ending == "purged":
            await rig.catalog.tables.drop(CALLER, ("b",), "t", purge=True)
            dropped_entry = (await rig.catalog.dropped.list(("b",), page_token=None, page_size=None)).items[0]
            await rig.catalog.dropped.purge(CALLER, dropped_entry.id)
        else:
            await rig.catalog.tables.unregister(CALLER, ("b",), "t")
        with pytest.raises(BadRequest, match="UUID"):
            await rig.commits.commit_transaction(CONFINED_CALLER, [await _stage_with_uuid(rig, victim_uuid)])
        assert not await rig.catalog.tables.exists(("a",), "t")
        assert {
            instant.namespace for instant in await rig.store.list_instants(InstantFilter(uuid=victim_uuid), limit=100)
        } == {("b",)}
        await rig.commits.commit_transaction(CONFINED_CALLER, [await _stage_with_uuid(rig)])
        if ending == "unregistered":  # A caller who may register restores the table with its own UUID.
            location = other_table.entry.metadata_location if other_table.entry else ""
            registered_entry = await rig.catalog.tables.register(CALLER, ("b",), "again", location, overwrite=False)
            assert registered_entry.metadata.table_uuid == victim_uuid


class _CreateLosingStore:
    """A database that loses the first transaction with a create, before it executes it."""

    def __init__(self, store: PointerStore) -> None:
        self._store = store
        self.lost_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        if not self.lost_count and any(isinstance(operation, CreateEntry) for operation in operations):
            self.lost_count += 1
            raise CommitUnknown("the connection broke before the commit arrived")
        return await self._store.transact(operations)


async def test_create_that_the_database_lost_can_be_repeated_with_its_uuid(tmp_path: Path) -> None:
    """The history records the first attempt as rolled back, with the UUID that the second attempt uses again."""
    async with open_rig(tmp_path, wrap_store=_CreateLosingStore) as rig:
        await rig.catalog.namespaces.create(CALLER, ("a",), {})
        change = await _stage_with_uuid(rig)
        with pytest.raises(RetryLater):
            await rig.commits.commit_transaction(CONFINED_CALLER, [change])
        uuid = change.updates[0]["uuid"]
        assert [
            instant.state.value for instant in await rig.store.list_instants(InstantFilter(uuid=uuid), limit=9)
        ] == ["rolled_back"]
        await rig.commits.commit_transaction(CONFINED_CALLER, [change])
        assert await rig.catalog.tables.exists(("a",), "t")
