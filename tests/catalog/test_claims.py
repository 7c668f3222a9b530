"""Tests that no two tables, views or functions overlap, and that each keeps its locations when it is renamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.runtime.errors import BadRequest, CommitConflict, Forbidden, SeamarkError
from seamark.formats.storage.locations import make_location_key, parse_location
from seamark.metaserver.catalog.values import Caller, CreateTable, CreateView, TableChange, TableIdentifier
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.port import InstantFilter
from tests.catalog.rig import (
    CALLER,
    SCHEMA,
    CatalogRig,
    build_creation_updates,
    open_rig,
    use_metadata_file_without_digest,
)
from tests.catalog.test_confinement import VERSION

CONFINED_CALLER = Caller(principal_name="wa", request_id="r", confined_to=(("a",),), names_owners=False)


async def move_table(rig: CatalogRig) -> str:
    """Create the table `a.t`, move it to `b.moved`, and return its location.

    The table `a.mine` and the view `a.view`, which are also created, stay in `a`.
    """
    for path in (("a",), ("b",)):
        await rig.catalog.namespaces.create(CALLER, path, {})
    await rig.catalog.tables.create(CONFINED_CALLER, ("a",), CreateTable(name="mine", schema=SCHEMA))
    await rig.catalog.views.create(
        CONFINED_CALLER, ("a",), CreateView(name="view", schema=SCHEMA, view_version=VERSION)
    )
    moved_table = await rig.catalog.tables.create(CALLER, ("a",), CreateTable(name="t", schema=SCHEMA))
    await rig.catalog.tables.rename(CALLER, TableIdentifier(("a",), "t"), TableIdentifier(("b",), "moved"))
    return moved_table.metadata.location


def _list_equivalent_locations(location: str) -> list[str]:
    """Return the location, a folder in it, and two texts that some storage or client takes for the location."""
    path = parse_location(location).file_path
    folder, _, name = path.rpartition("/")
    encoded_name = f"%25{ord(name[0]):02x}{name[1:]}"  # The first letter is percent-encoded twice.
    return [location, f"file:{path}/data/", f"FILE://{folder}/{encoded_name}", f"file://{folder}/{name.upper()}"]


def _build_creation_updates(uuid: str, location: str) -> list[dict[str, Any]]:
    return [
        *build_creation_updates(uuid, SCHEMA),
        {"action": "set-location", "location": location},
    ]


async def check_rejected(rig: CatalogRig, caller: Caller, location: str) -> None:
    """Check that every operation with a location rejects this location."""
    catalog = rig.catalog
    uuid = "11111111-2222-4333-8444-555555555555"
    create = CreateTable(name="x", schema=SCHEMA, location=location)
    creation = TableChange(
        namespace=("a",),
        name="x",
        requirements=[{"type": "assert-create"}],
        updates=_build_creation_updates(uuid, location),
    )
    operations: dict[str, Any] = {
        "create": lambda: catalog.tables.create(caller, ("a",), create),
        "stage": lambda: catalog.tables.stage(caller, ("a",), create),
        "commit of a staged table": lambda: rig.commits.commit_transaction(caller, [creation]),
        "view": lambda: catalog.views.create(
            caller, ("a",), CreateView(name="x", schema=SCHEMA, view_version=VERSION, location=location)
        ),
        "set-location": lambda: rig.commits.commit_table(
            caller, ("a",), "mine", [], [{"action": "set-location", "location": location}]
        ),
        "set-location of a view": lambda: catalog.views.replace(
            caller, ("a",), "view", [], [{"action": "set-location", "location": location}]
        ),
        "namespace": lambda: catalog.namespaces.create(caller, ("a", "x"), {"location": location}),
        "namespace property": lambda: catalog.namespaces.update_properties(caller, ("a",), [], {"location": location}),
    }
    for name in ("write.data.path", "write.metadata.path", "write.object-storage.path"):
        operations[f"create with {name}"] = lambda name=name: catalog.tables.create(
            caller, ("a",), CreateTable(name="x", schema=SCHEMA, properties={name: location})
        )
        operations[f"set {name}"] = lambda name=name: rig.commits.commit_table(
            caller, ("a",), "mine", [], [{"action": "set-properties", "updates": {name: location}}]
        )
    for description, run_operation in operations.items():
        with pytest.raises(SeamarkError) as error:
            await run_operation()
        assert isinstance(error.value, (BadRequest, Forbidden)), (description, error.value)
        assert not await catalog.tables.exists(("a",), "x"), description


@pytest.mark.parametrize("caller", [CONFINED_CALLER, CALLER])
async def test_location_inside_a_moved_table_is_rejected(tmp_path: Path, caller: Caller) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        for equivalent_location in _list_equivalent_locations(location):
            await check_rejected(rig, caller, equivalent_location)


async def test_location_that_contains_a_table_is_rejected(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/deep"
        await rig.catalog.tables.create(
            CONFINED_CALLER, ("a",), CreateTable(name="d", schema=SCHEMA, location=f"{new_location}/in/er")
        )
        with pytest.raises(BadRequest, match="overlaps"):
            await rig.catalog.tables.create(CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, location=new_location))
        await rig.catalog.tables.create(
            CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, location=f"{new_location}/in/e")
        )


async def test_dropped_table_keeps_its_location_until_it_is_purged(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        await rig.catalog.tables.drop(CALLER, ("b",), "moved", purge=False)
        await check_rejected(rig, CONFINED_CALLER, location)
        row = (await rig.catalog.dropped.list(("b",), page_token=None, page_size=None)).items[0]
        await rig.catalog.dropped.restore(CALLER, row.id, None, "again")
        await check_rejected(rig, CONFINED_CALLER, location)
        await rig.catalog.tables.drop(CALLER, ("b",), "again", purge=True)
        await check_rejected(rig, CONFINED_CALLER, location)
        row = (await rig.catalog.dropped.list(("b",), page_token=None, page_size=None)).items[0]
        await rig.catalog.dropped.purge(CALLER, row.id)
        await rig.catalog.tables.create(
            CONFINED_CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, location=location)
        )


async def test_moved_table_keeps_the_locations_of_its_older_files(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('b',))}/new"
        await rig.commits.commit_table(
            CALLER, ("b",), "moved", [], [{"action": "set-location", "location": new_location}]
        )
        for claimed_location in (location, new_location):
            await check_rejected(rig, CALLER, claimed_location)
        await rig.commits.commit_table(
            CALLER, ("b",), "moved", [], [{"action": "set-location", "location": f"{location}/back"}]
        )


async def test_only_one_of_two_concurrent_overlapping_claims_succeeds(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/race"
        staged_tables = [
            (
                await rig.catalog.tables.stage(
                    CALLER, ("a",), CreateTable(name=f"r{number}", schema=SCHEMA, location=location)
                )
            )
            for number, location in enumerate(
                (new_location, f"{new_location}/in", new_location, f"{new_location}/in/ner")
            )
        ]
        changes = [
            TableChange(
                namespace=("a",),
                name=f"r{number}",
                requirements=[{"type": "assert-create"}],
                updates=_build_creation_updates(
                    str(staged_change.metadata.table_uuid), staged_change.metadata.location
                ),
            )
            for number, staged_change in enumerate(staged_tables)
        ]
        outcomes = await asyncio.gather(
            *(rig.commits.commit_transaction(CALLER, [change]) for change in changes), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes].count(BadRequest) == 3, outcomes


async def test_staging_token_does_not_open_a_location_that_another_table_has_claimed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/staged"
        await rig.catalog.tables.stage(
            CONFINED_CALLER, ("a",), CreateTable(name="s", schema=SCHEMA, location=new_location)
        )
        token = rig.catalog.staging.issue(("a",), "s", new_location)
        assert await rig.catalog.find_staged_location(CONFINED_CALLER, token, ("a",), "s") == new_location
        await rig.catalog.tables.create(
            CONFINED_CALLER, ("a",), CreateTable(name="s", schema=SCHEMA, location=new_location)
        )
        assert await rig.catalog.find_staged_location(CONFINED_CALLER, token, ("a",), "s") == new_location
        await rig.catalog.tables.rename(CALLER, TableIdentifier(("a",), "s"), TableIdentifier(("b",), "s"))
        with pytest.raises(Forbidden, match="Another table has claimed"):
            await rig.catalog.find_staged_location(CONFINED_CALLER, token, ("a",), "s")


async def test_symbolic_link_does_not_bypass_a_claim(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        folder = Path(parse_location(rig.catalog.warehouse.make_namespace_location(("a",))).file_path)
        (folder / "link").symlink_to(parse_location(location).file_path)
        (folder / "other").symlink_to(folder.parent / "b")
        for caller in (CALLER, CONFINED_CALLER):
            for path in ("link", "link/x", "other", "other/x/y"):
                request = CreateTable(name="x", schema=SCHEMA, location=f"file://{folder}/{path}")
                with pytest.raises(BadRequest, match="symbolic link"):
                    await rig.catalog.tables.create(caller, ("a",), request)
            request = CreateTable(name="x", schema=SCHEMA, properties={"write.data.path": f"file://{folder}/other/x"})
            with pytest.raises(BadRequest, match="symbolic link"):
                await rig.catalog.tables.create(caller, ("a",), request)
        entry = await rig.catalog.tables.load_entry(("b",), "moved")
        spelling = entry.metadata_location.replace(location, f"file://{folder}/link")
        with pytest.raises(BadRequest, match="symbolic link"):
            await rig.catalog.tables.register(CALLER, ("b",), "x", spelling, overwrite=False)


async def test_claim_belongs_to_the_path_and_not_to_the_target_of_a_link(tmp_path: Path) -> None:
    """A claim records that a location belongs to a table, so that no other table may use it.

    If a folder becomes a link after its table was created, the table has no claim on the target.
    """
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        claims_before = await rig.catalog.context.store.claims(
            (await rig.catalog.tables.load_entry(("b",), "moved")).uuid
        )
        folder = Path(parse_location(location).file_path)
        folder.rename(f"{folder}-away")
        folder.symlink_to(parse_location(rig.catalog.warehouse.make_namespace_location(("b",))).file_path)
        assert [rig.catalog.warehouse.make_key(parse_location(location))] == [claims_before[0].location]
        await rig.catalog.tables.create(CALLER, ("b",), CreateTable(name="free", schema=SCHEMA))


async def test_tables_share_a_folder_only_if_an_unconfined_caller_allows_it(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        common_properties = {"write.data.path": f"{rig.catalog.warehouse.make_namespace_location(('a',))}/common"}
        for name in ("one", "two"):
            await rig.catalog.tables.create(
                CALLER, ("a",), CreateTable(name=name, schema=SCHEMA, properties=common_properties)
            )
        with pytest.raises(BadRequest, match="overlaps"):
            await rig.catalog.tables.create(
                CONFINED_CALLER, ("a",), CreateTable(name="x", schema=SCHEMA, properties=common_properties)
            )


async def test_purge_deletes_nothing_in_the_location_of_another_table(tmp_path: Path) -> None:
    """Older versions accepted overlapping locations, so a catalog can have a table in the location of another table."""
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/over"
        await rig.catalog.tables.create(CALLER, ("a",), CreateTable(name="outer", schema=SCHEMA, location=new_location))
        outer = (await rig.catalog.tables.load(("a",), "outer")).entry
        inner = (await rig.catalog.tables.load(("a",), "mine")).entry
        assert outer is not None
        assert inner is not None
    with sqlite3.connect(tmp_path / "seamark.db") as connection:
        key = make_location_key(parse_location(f"{new_location}/inner"))
        connection.execute("INSERT INTO claims (location, uuid, shared) VALUES (?, ?, 0)", (key, inner.uuid))
    live_path, own_location = f"{new_location}/inner/metadata/live.puffin", f"{new_location}/metadata/own.puffin"
    path = use_metadata_file_without_digest(outer.metadata_location)
    document = json.loads(path.read_text())
    document["statistics"] = [
        {
            "snapshot-id": number,
            "statistics-path": file,
            "file-size-in-bytes": 4,
            "file-footer-size-in-bytes": 1,
            "blob-metadata": [],
        }
        for number, file in enumerate((live_path, own_location), 1)
    ]
    path.write_text(json.dumps(document))
    async with open_rig(tmp_path) as rig:
        for file in (live_path, own_location):
            await rig.objects.create(file, b"live")
        await rig.catalog.tables.drop(CALLER, ("a",), "outer", purge=True)
        row = (await rig.catalog.dropped.list(("a",), page_token=None, page_size=None)).items[0]
        await rig.catalog.dropped.purge(CALLER, row.id)
        assert await rig.objects.exists(live_path)
        for file in (own_location, f"file://{path}"):
            assert not await rig.objects.exists(file)


async def test_location_from_an_overwritten_metadata_file_is_not_signed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        created_table = await rig.catalog.tables.create(
            CONFINED_CALLER, ("a",), CreateTable(name="forged", schema=SCHEMA)
        )
        assert await rig.catalog.load_location(("a",), "mine")
        assert created_table.entry is not None
        path = use_metadata_file_without_digest(created_table.entry.metadata_location)
        path.write_text(json.dumps({**json.loads(path.read_text()), "location": location}))
        with pytest.raises(Forbidden, match="which the table has not claimed"):
            await rig.catalog.load_location(("a",), "forged")


@pytest.mark.parametrize("moved", [False, True])
async def test_overwritten_metadata_log_deletes_no_file_of_another_table(tmp_path: Path, moved: bool) -> None:
    async with open_rig(tmp_path) as rig:
        moved_location = await move_table(rig)
        moved_entry = (await rig.catalog.tables.load(("b",), "moved")).entry
        forged_table = await rig.catalog.tables.create(
            CONFINED_CALLER, ("a",), CreateTable(name="forged", schema=SCHEMA)
        )
        assert moved_entry is not None
        assert forged_table.entry is not None
        path = use_metadata_file_without_digest(forged_table.entry.metadata_location)
        document = json.loads(path.read_text())
        document["properties"] = {
            "write.metadata.path": f"{forged_table.metadata.location}/metadata",
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "1",
        }
        log = [{"timestamp-ms": document["last-updated-ms"], "metadata-file": moved_entry.metadata_location}]
        location = moved_location if moved else document["location"]
        path.write_text(json.dumps({**document, "location": location, "metadata-log": log}))
        set_property = {"action": "set-properties", "updates": {"a": "b"}}
        with pytest.raises(Forbidden) if moved else contextlib.nullcontext():
            await rig.commits.commit_table(CONFINED_CALLER, ("a",), "forged", [], [set_property])
        await asyncio.sleep(0.5)
        assert await rig.objects.exists(moved_entry.metadata_location)


async def test_dropped_entry_can_be_recreated_only_with_its_name_and_location(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        tables, dropped_tables = rig.catalog.tables, rig.catalog.dropped
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/again"

        def create_table(name: str, location: str = new_location, caller: Caller = CONFINED_CALLER) -> Any:
            return tables.create(caller, ("a",), CreateTable(name=name, schema=SCHEMA, location=location))

        first_entry = (await create_table("again")).entry
        await tables.drop(CONFINED_CALLER, ("a",), "again", purge=True)
        for name, location in (("other", new_location), ("again", f"{new_location}/in")):
            with pytest.raises(BadRequest, match="overlaps"):
                await create_table(name, location)
        second_entry = (await create_table("again")).entry
        (row,) = (await dropped_tables.list(("a",), None, None)).items
        with pytest.raises(CommitConflict, match="since it was dropped"):
            await dropped_tables.restore(CONFINED_CALLER, row.id, None, "back")
        await dropped_tables.purge(CALLER, row.id)
        assert await rig.objects.exists(second_entry.metadata_location)
        assert await rig.objects.exists(first_entry.metadata_location), (
            "the file is in a location that another table has claimed"
        )
        assert (await tables.load(("a",), "again")).entry == second_entry


async def test_dropped_entry_cannot_be_registered_over_the_current_owner_of_its_location(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        tables, views = rig.catalog.tables, rig.catalog.views
        new_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/again"
        table = CreateTable(name="again", schema=SCHEMA, location=new_location)
        first_entry = (await tables.create(CALLER, ("a",), table)).entry
        await tables.drop(CALLER, ("a",), "again", purge=False)
        second_entry = (await tables.create(CALLER, ("a",), table)).entry
        assert first_entry is not None
        assert second_entry is not None
        for overwrite in (False, True):
            with pytest.raises(CommitConflict, match="since it was dropped"):
                await tables.register(CALLER, ("a",), "old", first_entry.metadata_location, overwrite=overwrite)
        assert (await tables.load(("a",), "again")).entry == second_entry
        # The first entry may replace the second entry, and then the second may replace the first.
        for entry in (first_entry, second_entry):
            name = "again"
            await tables.register(CALLER, ("a",), name, entry.metadata_location, overwrite=True)
            assert (await tables.load(("a",), name)).metadata.table_uuid == entry.uuid
        view = CreateView(name="seen", schema=SCHEMA, view_version=VERSION, location=f"{new_location}-view")
        seen_entry = (await views.create(CALLER, ("a",), view)).entry
        await views.drop(CALLER, ("a",), "seen")
        await views.create(CALLER, ("a",), view)
        with pytest.raises(CommitConflict, match="since it was dropped"):
            await views.register(CALLER, ("a",), "old", seen_entry.metadata_location)


async def test_registering_an_older_file_revokes_later_permissions_and_keeps_the_locations(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        tables, name = rig.catalog.tables, (("b",), "moved")
        first_entry = (await tables.load(*name)).entry
        assert first_entry is not None
        later_location, allowed_location = (
            f"{rig.settings.make_warehouse_uri()}/later",
            f"{rig.settings.make_warehouse_uri()}/lent",
        )
        updates = {"seamark.allowed-locations": allowed_location, "write.data.path": later_location}
        await rig.commits.commit_table(CALLER, *name, [], [{"action": "set-properties", "updates": updates}])
        second_entry = (await tables.load(*name)).entry
        assert second_entry is not None

        async def list_claimed_locations() -> tuple[set[str], set[str]]:
            claims = await rig.store.claims(first_entry.uuid)
            return {claim.location for claim in claims if not claim.allowed}, {
                claim.location for claim in claims if claim.allowed
            }

        own_locations, allowed_locations = await list_claimed_locations()
        assert allowed_locations == {make_location_key(parse_location(allowed_location))}
        await tables.register(CALLER, *name, first_entry.metadata_location, overwrite=True)
        assert await list_claimed_locations() == (own_locations, set()), "the table keeps the locations of its files"
        await tables.register(CALLER, *name, second_entry.metadata_location, overwrite=True)
        assert await list_claimed_locations() == (own_locations, allowed_locations)
        await check_rejected(rig, CALLER, location)


async def test_table_without_a_uuid_cannot_be_registered_in_another_namespace(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        tables = rig.catalog.tables
        metadata = (await tables.load(("a",), "mine")).metadata
        old_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/old"
        document = {**json.loads(encode_table(metadata)), "location": old_location, "format-version": 1}
        del document["table-uuid"]
        location = f"{old_location}/v1.metadata.json"
        await rig.objects.create(location, json.dumps(document).encode())
        await tables.register(CALLER, ("b",), "old", location, overwrite=False)
        with pytest.raises(Forbidden, match="of an entry of another namespace"):
            await tables.register(CONFINED_CALLER, ("a",), "old", location, overwrite=False)


async def test_table_is_identified_by_the_uuid_in_the_database(tmp_path: Path) -> None:
    """Metadata files of old writers have no UUID, and a commit or an overwritten file may give them any UUID.

    A table with the UUID of another table must not change that table's claims (its locations) or its history.
    """
    async with open_rig(tmp_path) as rig:
        await move_table(rig)
        tables, name = rig.catalog.tables, (("a",), "old")
        moved_entry = (await tables.load(("b",), "moved")).entry
        metadata = (await tables.load(("a",), "mine")).metadata
        assert moved_entry is not None
        claims, instants = (
            await rig.store.claims(moved_entry.uuid),
            await rig.store.list_instants(_filter_by_uuid(moved_entry.uuid), 100),
        )
        old_location = f"{rig.catalog.warehouse.make_namespace_location(('a',))}/old"
        old_metadata = {**json.loads(encode_table(metadata)), "location": old_location, "format-version": 1}
        del old_metadata["table-uuid"]
        await rig.objects.create(f"{old_location}/v1.metadata.json", json.dumps(old_metadata).encode())
        entry = (await tables.register(CALLER, *name, f"{old_location}/v1.metadata.json", overwrite=False)).entry
        assert entry is not None
        await rig.commits.commit_table(
            CONFINED_CALLER,
            *name,
            [],
            [
                {"action": "assign-uuid", "uuid": moved_entry.uuid},
                {"action": "set-properties", "updates": {"write.data.path": f"{old_location}-data"}},
            ],
        )
        snapshot = {"snapshot-id": 5, "timestamp-ms": metadata.last_updated_ms + 1, "summary": {"operation": "append"}}
        snapshot |= {"manifest-list": f"{_get_folder(moved_entry.metadata_location)}/snap.avro", "schema-id": 0}
        with pytest.raises(BadRequest, match="outside the table's folders"):
            await rig.commits.commit_table(
                CONFINED_CALLER, *name, [], [{"action": "add-snapshot", "snapshot": snapshot}]
            )
        assert await rig.store.claims(moved_entry.uuid) == claims
        assert await rig.store.list_instants(_filter_by_uuid(moved_entry.uuid), 100) == instants
        assert {instant.action for instant in await rig.store.list_instants(_filter_by_uuid(entry.uuid), 100)} == {
            "register",
            "commit",
        }
        stored_entry = await rig.store.load_entry(EntryKind.TABLE, *name)
        assert stored_entry is not None
        assert stored_entry.uuid == entry.uuid


async def test_view_with_the_metadata_file_of_another_view_is_neither_served_nor_changed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        views = rig.catalog.views
        moved_entry = (await rig.catalog.tables.load(("b",), "moved")).entry
        entry = (await views.load(("a",), "view")).entry
        assert moved_entry is not None
        claims = await rig.store.claims(moved_entry.uuid)
        path = use_metadata_file_without_digest(entry.metadata_location)
        forged_view = {**json.loads(path.read_bytes()), "view-uuid": moved_entry.uuid}
        path.write_text(json.dumps(forged_view))
        rig.catalog.documents.cache.clear()
        with pytest.raises(Forbidden, match="overwritten"):
            await views.load(("a",), "view")
        for update in (
            {"action": "set-location", "location": f"{location}/x"},
            {"action": "set-properties", "updates": {}},
        ):
            with pytest.raises(Forbidden, match="overwritten"):
                await views.replace(CONFINED_CALLER, ("a",), "view", [], [update])
        assert await rig.store.claims(moved_entry.uuid) == claims


def _filter_by_uuid(uuid: str) -> InstantFilter:
    return InstantFilter(uuid=uuid)


def _get_folder(location: str) -> str:
    return location.rpartition("/")[0]
