"""Tests of tables and views that are older than claims: their locations come from their metadata, and never
from guesses.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest, RetryLater
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.ownership.claims import create_remaining_claims
from seamark.metaserver.catalog.values import CreateTable, CreateView
from seamark.metaserver.objects.port import ObjectStore
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, open_rig
from tests.catalog.test_claims import CONFINED_CALLER, check_rejected, move_table
from tests.catalog.test_confinement import VERSION
from tests.support.wrapper_capture import WrapperCapture


async def test_claims_of_older_entries_are_created_at_the_start(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        await rig.catalog.tables.create(CALLER, ("b",), CreateTable(name="gone", schema=SCHEMA))
        removed_location = (await rig.catalog.tables.load(("b",), "gone")).metadata.location
        await rig.catalog.tables.drop(CALLER, ("b",), "gone", purge=False)
    with sqlite3.connect(tmp_path / "seamark.db") as connection:
        connection.execute("DELETE FROM claims")
    async with open_rig(tmp_path) as rig:
        for claimed_location in (location, removed_location):
            await check_rejected(rig, CONFINED_CALLER, claimed_location)


class _UnavailableStorage:
    """Storage that fails to read files while `is_unavailable` is True."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.is_unavailable = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def read(self, location: str, **options: Any) -> bytes:
        if self.is_unavailable:
            raise RetryLater("the storage does not answer")
        return await self._objects.read(location, **options)


async def _prepare_old_server(home: Path) -> dict[str, str]:
    """Prepare the home of a server version without claims, and return the locations of two tables.

    A claim records that a location belongs to a table. The table `b.moved` was moved from another namespace, and the
    table `b.apart` has its metadata in another location.
    """
    async with open_rig(home) as rig:
        locations = {"moved": await move_table(rig)}
        other_location = {"write.metadata.path": f"{rig.settings.make_warehouse_uri()}/apart/meta"}
        apart_table = await rig.catalog.tables.create(
            CALLER, ("b",), CreateTable(name="apart", schema=SCHEMA, properties=other_location)
        )
        locations["apart"] = apart_table.metadata.location
    with sqlite3.connect(home / "seamark.db") as connection:
        connection.execute("DELETE FROM claims")
    return locations


async def test_no_location_is_assigned_while_older_metadata_cannot_be_read(
    tmp_path: Path,
) -> None:
    claimed_locations, clock = await _prepare_old_server(tmp_path), SimulatedClock(1)
    capture = WrapperCapture(_UnavailableStorage)
    async with open_rig(tmp_path, clock=clock, wrap_objects=capture) as rig:
        catalog = rig.catalog
        assert await rig.store.list_unclaimed("", 9), (
            "the table must stay without a claim, because its locations are unknown"
        )
        create = CreateTable(name="x", schema=SCHEMA)
        view = CreateView(name="x", schema=SCHEMA, view_version=VERSION)
        requests: list[Any] = [
            lambda: catalog.tables.create(CALLER, ("a",), create),
            lambda: catalog.tables.stage(CONFINED_CALLER, ("a",), create),
            lambda: catalog.views.create(CONFINED_CALLER, ("a",), view),
            lambda: catalog.namespaces.create(CALLER, ("c",), {"location": f"{rig.settings.make_warehouse_uri()}/c"}),
        ]
        for request in requests:
            with pytest.raises(RetryLater, match="cannot be checked"):
                await request()
        dropped_rows = (await catalog.dropped.list(("b",), page_token=None, page_size=None)).items
        assert not dropped_rows
        capture.wrapper.is_unavailable = False
        clock.advance(6000)
        await requests[0]()
        assert await rig.store.list_unclaimed("", 9) == []
        for claimed_location in claimed_locations.values():
            await _check_refused(rig, claimed_location)
        await catalog.tables.create(CALLER, ("a",), CreateTable(name="y", schema=SCHEMA))


async def test_purge_waits_until_all_locations_are_known(tmp_path: Path) -> None:
    await _prepare_old_server(tmp_path)
    capture = WrapperCapture(_UnavailableStorage)
    async with open_rig(tmp_path, wrap_objects=capture) as rig:
        name = (("b",), "apart")
        entry = await rig.catalog.tables.load_entry(*name)
        await rig.catalog.tables.drop(CALLER, *name, purge=False)
        (row,) = (await rig.catalog.dropped.list(("b",), page_token=None, page_size=None)).items
        files_before = await rig.list_files()
        capture.wrapper.is_unavailable = False
        document = await rig.catalog.documents.table(entry.metadata_location)
        rig.catalog.context.documents.remember_table(entry.metadata_location, document, b"{}")
        capture.wrapper.is_unavailable = True
        await rig.catalog.dropped.purge(CALLER, row.id)
        assert await rig.list_files() == files_before, (
            "the purge deleted nothing while the locations of other tables were unknown"
        )
        capture.wrapper.is_unavailable = False
        await rig.catalog.dropped.purge_expired()
        assert entry.metadata_location not in await rig.list_files()


async def test_possible_locations_of_a_table_with_lost_metadata_are_reserved(tmp_path: Path) -> None:
    locations = await _prepare_old_server(tmp_path)
    async with open_rig(tmp_path) as rig:
        entry = (await rig.catalog.tables.load(("b",), "moved")).entry
        assert entry is not None
    path = Path(parse_location(entry.metadata_location).file_path)
    content = path.read_bytes()
    path.unlink()
    with sqlite3.connect(tmp_path / "seamark.db") as connection:
        connection.execute("DELETE FROM claims")
    clock = SimulatedClock(2)
    async with open_rig(tmp_path, clock=clock) as rig:
        assert [unclaimed.uuid for unclaimed in await rig.store.list_unclaimed("", 9)] == [entry.uuid]
        create = CreateTable(name="x", schema=SCHEMA, location=f"{locations['moved']}/data")
        for caller in (CALLER, CONFINED_CALLER):
            with pytest.raises(RetryLater, match="missing or broken"):
                await rig.catalog.tables.create(caller, ("a",), create)
        await rig.catalog.tables.create(CONFINED_CALLER, ("a",), CreateTable(name="free", schema=SCHEMA))
        assert await create_remaining_claims(rig.catalog.context) == 0
        path.write_bytes(content)
        assert await create_remaining_claims(rig.catalog.context) == 1
        assert await create_remaining_claims(rig.catalog.context) == 0
        await _check_refused(rig, locations["moved"])


async def _check_refused(rig: CatalogRig, location: str) -> None:
    with pytest.raises(BadRequest, match="overlaps"):
        await rig.catalog.tables.create(CALLER, ("a",), CreateTable(name="over", schema=SCHEMA, location=location))


async def test_table_without_claims_from_an_older_server_accepts_commits(tmp_path: Path) -> None:
    """A claim records that a location belongs to a table. Without a claim, the location is protected too."""
    async with open_rig(tmp_path) as rig:
        location = await move_table(rig)
        with sqlite3.connect(tmp_path / "seamark.db") as connection:
            connection.execute("DELETE FROM claims")  # An older server would create the table without claims.
        set_property = {"action": "set-properties", "updates": {"a": "b"}}
        await rig.commits.commit_table(CALLER, ("b",), "moved", [], [set_property])
        assert await rig.catalog.load_location(("b",), "moved") == location
        await check_rejected(rig, CONFINED_CALLER, location)
