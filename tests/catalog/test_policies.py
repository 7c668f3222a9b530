"""Tests of policies of tables and namespaces: who set them, and that none publishes an encrypted column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.catalog.policies import SETTERS, find_effective_setters, load_policies, parse_setters
from seamark.metaserver.catalog.values import Caller, CreateTable, TableChange
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, open_rig

WENDY, OTTO = Caller(principal_name="wendy", request_id="r"), Caller(principal_name="otto", request_id="r")
COLUMNS, SWITCH = "seamark.clustering.columns", "seamark.compaction.enabled"
FORGED_SETTERS = {SETTERS: f'{{"{SWITCH}": "admin"}}'}
ENCRYPTED_COLUMNS = "seamark.encrypted-columns"


async def commit_updates(rig: CatalogRig, caller: Caller, *updates: dict[str, Any]) -> dict[str, str]:
    change = TableChange(namespace=("db",), name="t", requirements=[], updates=list(updates))
    (loaded_table,) = await rig.commits.commit(caller, [change], is_single=True)
    return loaded_table.metadata.properties


async def test_server_records_who_set_each_property_of_a_policy(tmp_path: Path) -> None:
    """No client can state who set a property: not in a new table, in a change, or in a namespace."""
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(
            OTTO, ("db",), {"history.expire.max-snapshot-age-ms": "1", **FORGED_SETTERS}
        )
        request = CreateTable(name="t", schema=SCHEMA, properties={COLUMNS: "id", "comment": "c", **FORGED_SETTERS})
        created_table = await rig.catalog.tables.create(WENDY, ("db",), request)
        assert parse_setters(created_table.metadata.properties) == {COLUMNS: "wendy"}
        properties = await commit_updates(
            rig, OTTO, {"action": "set-properties", "updates": {SWITCH: "true", **FORGED_SETTERS}}
        )
        assert parse_setters(properties) == {COLUMNS: "wendy", SWITCH: "otto"}
        properties = await commit_updates(
            rig, OTTO, {"action": "set-properties", "updates": {"comment": "d", **FORGED_SETTERS}}
        )
        assert parse_setters(properties) == {COLUMNS: "wendy", SWITCH: "otto"}
        removal = {"action": "remove-properties", "removals": [SETTERS, COLUMNS]}
        assert parse_setters(await commit_updates(rig, OTTO, removal)) == {SWITCH: "otto"}
        loaded_table = await rig.catalog.tables.load(("db",), "t")
        policies = await load_policies(rig.store, ("db",))
        assert find_effective_setters(loaded_table.metadata, policies) == {
            SWITCH: "otto",
            "history.expire.max-snapshot-age-ms": "otto",
        }
        await rig.catalog.namespaces.update_properties(WENDY, ("db",), [], {SWITCH: "false", **FORGED_SETTERS})
        policies = await load_policies(rig.store, ("db",))
        assert policies[SWITCH].principal_name == "wendy"
        # The policy of the table takes precedence.
        assert find_effective_setters(loaded_table.metadata, policies)[SWITCH] == "otto"


async def test_no_names_are_recorded_without_logins(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        anonymous = Caller(principal_name="anonymous", request_id="r")
        await rig.catalog.namespaces.create(anonymous, ("db",), {})
        request = CreateTable(name="t", schema=SCHEMA, properties={COLUMNS: "id", **FORGED_SETTERS})
        assert SETTERS not in (await rig.catalog.tables.create(anonymous, ("db",), request)).metadata.properties


FIELD = {"source-id": 2, "field-id": 1000, "name": "leak", "transform": "bucket[4]"}
ORDER = {"source-id": 2, "transform": "identity", "direction": "asc", "null-order": "nulls-first"}
PUBLISHING_UPDATES: list[list[dict[str, Any]]] = [
    [
        {"action": "add-spec", "spec": {"spec-id": 1, "fields": [FIELD]}},
        {"action": "set-default-spec", "spec-id": -1},
    ],
    [
        {"action": "add-sort-order", "sort-order": {"order-id": 1, "fields": [ORDER]}},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    ],
    [{"action": "set-properties", "updates": {COLUMNS: "id, data"}}],
    [
        {
            "action": "set-properties",
            "updates": {
                COLUMNS: "other.x",
                "seamark.clustering.joins": '{"other": {"table": "db.o", "on": {"data": "x"}}}',
            },
        }
    ],
    [{"action": "set-properties", "updates": {"seamark.statistics.columns": "data"}}],
    [{"action": "set-properties", "updates": {"seamark.index.i": "bloom(lower(data))"}}],
]
"""Updates after which the table would publish values of the column `data`."""


@pytest.mark.parametrize("declaration", [{ENCRYPTED_COLUMNS: "data"}, {"parquet.encryption.column.keys": "k1: data"}])
async def test_commit_cannot_publish_values_of_a_declared_encrypted_column(
    tmp_path: Path, declaration: dict[str, str]
) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, ("db",), {})
        await rig.catalog.tables.create(CALLER, ("db",), CreateTable(name="t", schema=SCHEMA, properties=declaration))
        for updates in PUBLISHING_UPDATES:
            with pytest.raises(BadRequest, match=r"The column data is encrypted, and .* would publish its values"):
                await commit_updates(rig, CALLER, *updates)
        await commit_updates(rig, CALLER, {"action": "set-properties", "updates": {COLUMNS: "id"}})
        request = CreateTable(name="u", schema=SCHEMA, properties={**declaration, COLUMNS: "data"})
        with pytest.raises(BadRequest, match="data is encrypted"):
            await rig.catalog.tables.create(CALLER, ("db",), request)


async def test_published_column_cannot_be_declared_as_encrypted(tmp_path: Path) -> None:
    """The property that publishes columns and the property that encrypts them must not name the same column."""
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, ("db",), {})
        await rig.catalog.tables.create(
            CALLER, ("db",), CreateTable(name="t", schema=SCHEMA, properties={COLUMNS: "data"})
        )
        with pytest.raises(BadRequest, match="data is encrypted"):
            await commit_updates(rig, CALLER, {"action": "set-properties", "updates": {ENCRYPTED_COLUMNS: "data"}})
        with pytest.raises(BadRequest, match="'dat', but the table has no such column"):
            await commit_updates(rig, CALLER, {"action": "set-properties", "updates": {ENCRYPTED_COLUMNS: "id, dat"}})
        properties = await commit_updates(
            rig, CALLER, {"action": "set-properties", "updates": {ENCRYPTED_COLUMNS: "id"}}
        )
        assert properties[COLUMNS] == "data"
