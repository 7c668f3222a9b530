"""Tests that a writer of one namespace cannot place anything over files of other namespaces, by any operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest, Forbidden
from seamark.metaserver.catalog.ownership.own_files import ALLOWED_LOCATIONS
from seamark.metaserver.catalog.staging import TTL_S, StagingPasses
from seamark.metaserver.catalog.values import Caller, CreateTable, CreateView, TableChange
from tests.access.keyrings import make_fixed_keyring
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, open_rig

CONFINED_CALLER = Caller(principal_name="wa", request_id="r", confined_to=(("a",),))
VERSION = {
    "version-id": 1,
    "timestamp-ms": 1_700_000_000_000,
    "schema-id": 0,
    "summary": {},
    "default-namespace": ["a"],
    "representations": [{"type": "sql", "sql": "select 1", "dialect": "spark"}],
}


async def _create_tenants(rig: CatalogRig) -> str:
    """Create two namespaces with a table each, and return the location of the table that the caller may not use."""
    for path in (("a",), ("b",)):
        await rig.catalog.namespaces.create(CALLER, path, {})
    await rig.catalog.tables.create(CONFINED_CALLER, ("a",), CreateTable(name="mine", schema=SCHEMA))
    other_table = await rig.catalog.tables.create(CALLER, ("b",), CreateTable(name="t", schema=SCHEMA))
    return other_table.metadata.location


async def test_every_operation_rejects_a_forbidden_location(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        forbidden_location = await _create_tenants(rig)
        tables, namespaces = rig.catalog.tables, rig.catalog.namespaces

        def commit_update(**update: Any) -> Any:
            return rig.commits.commit_table(CONFINED_CALLER, ("a",), "mine", [], [update])

        data_path = {"write.data.path": f"{forbidden_location}/data"}
        attempts = {
            "create": tables.create(
                CONFINED_CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, location=forbidden_location)
            ),
            "stage": tables.stage(
                CONFINED_CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, location=f"{forbidden_location}/x")
            ),
            "create with a path": tables.create(
                CONFINED_CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, properties=data_path)
            ),
            "move": commit_update(action="set-location", location=forbidden_location),
            "set a path": commit_update(action="set-properties", updates=data_path),
            "namespace": namespaces.create(CONFINED_CALLER, ("a", "x"), {"location": forbidden_location}),
            "namespace property": namespaces.update_properties(
                CONFINED_CALLER, ("a",), [], {"location": forbidden_location}
            ),
            "view": rig.catalog.views.create(
                CONFINED_CALLER,
                ("a",),
                CreateView(name="v", schema=SCHEMA, view_version=VERSION, location=forbidden_location),
            ),
            "the namespace's own folder": commit_update(
                action="set-location", location=rig.catalog.warehouse.make_namespace_location(("a",))
            ),
        }
        for description, attempt in attempts.items():
            with pytest.raises(Forbidden, match=CONFINED_CALLER.principal_name):  # noqa: PT012  the failure must name the operation
                await attempt
                pytest.fail(f"{description} was accepted")
        inside_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/elsewhere"
        await commit_update(action="set-location", location=inside_location)
        assert (await tables.load(("a",), "mine")).metadata.location == inside_location


async def test_caller_whom_a_policy_confines_registers_tables_only_inside_its_namespace(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_tenants(rig)
        tables, caller = rig.catalog.tables, Caller(principal_name="wa", request_id="r", confined_to=())
        own_table, foreign_table = await tables.load(("a",), "mine"), await tables.load(("b",), "t")
        assert own_table.entry is not None
        assert foreign_table.entry is not None
        for namespace, name in ((("a",), "mine"), (("b",), "t")):
            await tables.unregister(CALLER, namespace, name)
        registered_entry = await tables.register(
            caller, ("a",), "back", own_table.entry.metadata_location, overwrite=False
        )
        assert registered_entry.metadata.location == own_table.metadata.location
        with pytest.raises(Forbidden, match="outside the namespaces"):
            await tables.register(caller, ("a",), "x", foreign_table.entry.metadata_location, overwrite=False)
        allowing_update = {"action": "set-properties", "updates": {ALLOWED_LOCATIONS: foreign_table.metadata.location}}
        loaded_table = await rig.commits.commit_table(CALLER, ("a",), "back", [], [allowing_update])
        assert loaded_table.entry is not None
        await tables.unregister(CALLER, ("a",), "back")
        with pytest.raises(Forbidden, match="write the whole catalog"):
            await tables.register(caller, ("a",), "back", loaded_table.entry.metadata_location, overwrite=False)


def _make_staged_creation(metadata: TableMetadata, **changes: str) -> TableChange:
    """Return the change that a client sends to create a staged table."""
    document = {"uuid": metadata.table_uuid, "location": metadata.location, **changes}
    updates: list[dict[str, Any]] = [
        {"action": "assign-uuid", "uuid": document["uuid"]},
        {"action": "add-schema", "schema": SCHEMA},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "set-location", "location": document["location"]},
    ]
    return TableChange(namespace=("a", "sub"), name="t", requirements=[{"type": "assert-create"}], updates=updates)


async def test_staged_tables_use_the_location_that_an_admin_gave_the_namespace(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        forbidden_location = await _create_tenants(rig)
        outside_location = f"{rig.catalog.warehouse.uri}/far"
        await rig.catalog.namespaces.create(CALLER, ("a", "sub"), {"location": outside_location})
        staged_table = (
            await rig.catalog.tables.stage(CONFINED_CALLER, ("a", "sub"), CreateTable(name="t", schema=SCHEMA))
        ).metadata
        with pytest.raises(Forbidden, match="wa"):
            await rig.commits.commit_transaction(
                CONFINED_CALLER, [_make_staged_creation(staged_table, location=forbidden_location)]
            )
        await rig.commits.commit_transaction(CONFINED_CALLER, [_make_staged_creation(staged_table)])
        assert (await rig.catalog.tables.load(("a", "sub"), "t")).metadata.location.startswith(f"{outside_location}/t-")


async def test_table_cannot_take_the_uuid_and_history_of_another_table(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_tenants(rig)
        await rig.catalog.namespaces.create(CALLER, ("a", "sub"), {})
        staged_table = (
            await rig.catalog.tables.stage(CONFINED_CALLER, ("a", "sub"), CreateTable(name="t", schema=SCHEMA))
        ).metadata
        victim_uuid = (await rig.catalog.tables.load_entry(("b",), "t")).uuid
        for _ in range(2):  # The other table is live first, and dropped afterwards.
            with pytest.raises(BadRequest, match=victim_uuid):
                await rig.commits.commit_transaction(
                    CONFINED_CALLER, [_make_staged_creation(staged_table, uuid=victim_uuid)]
                )
            if await rig.catalog.tables.exists(("b",), "t"):
                await rig.catalog.tables.drop(CALLER, ("b",), "t", purge=False)


async def test_table_that_an_admin_placed_elsewhere_can_still_be_changed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_tenants(rig)
        outside_location = f"{rig.catalog.warehouse.uri}/far"
        request = CreateTable(
            name="far",
            schema=SCHEMA,
            location=outside_location,
            properties={"write.data.path": f"{outside_location}-data"},
        )
        await rig.catalog.tables.create(CALLER, ("a",), request)
        update = [{"action": "set-properties", "updates": {"x": "1"}}]
        table = await rig.commits.commit_table(CONFINED_CALLER, ("a",), "far", [], update)
        assert table.metadata.properties["x"] == "1"


def test_staging_pass_is_valid_for_one_table_and_a_limited_time() -> None:
    """A staging pass allows a client to use the location of its staged table until it commits the table."""
    clock = SimulatedClock(1)
    passes = StagingPasses(clock, make_fixed_keyring())
    token = passes.issue(("a", "b"), "t", "s3://lake/a/b/t-1")
    assert passes.read_location(token, ("a", "b"), "t") == "s3://lake/a/b/t-1"
    head, body, mac = token.split(".")
    forged_tokens = [f"{head}.{body}.{mac[:-4]}AAAA", "x", "", f"{head}.{body}.", token + "x", "a.b.c"]
    for forged_token in forged_tokens:
        with pytest.raises(Forbidden):
            passes.read_location(forged_token, ("a", "b"), "t")
    with pytest.raises(Forbidden):
        passes.read_location(token, ("a", "b"), "other")
    with pytest.raises(Forbidden):  # A server with another secret did not sign this pass.
        StagingPasses(clock, make_fixed_keyring(b"o")).read_location(token, ("a", "b"), "t")
    clock.advance(TTL_S * 1000 + 1000)  # The pass expired one second ago.
    with pytest.raises(Forbidden):
        passes.read_location(token, ("a", "b"), "t")
