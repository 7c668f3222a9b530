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
from tests.catalog.rig import CALLER, SCHEMA, Rig, rig
from tests.catalog.test_claims import CONFINED, prepared, refused
from tests.catalog.test_confinement import VERSION


async def test_claims_of_older_entries_are_created_at_the_start(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        location = await prepared(it)
        await it.catalog.tables.create(CALLER, ("b",), CreateTable(name="gone", schema=SCHEMA))
        gone = (await it.catalog.tables.load(("b",), "gone")).metadata.location
        await it.catalog.tables.drop(CALLER, ("b",), "gone", purge=False)
    with sqlite3.connect(tmp_path / "seamark.db") as connection:
        connection.execute("DELETE FROM claims")
    async with rig(tmp_path) as it:
        for place in (location, gone):
            await refused(it, CONFINED, place)


class _Away:
    """Storage that may not answer, with files whose reads fail."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self.away = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def read(self, location: str, **more: Any) -> bytes:
        if self.away:
            raise RetryLater("the storage does not answer")
        return await self._objects.read(location, **more)


async def _upgraded(home: Path) -> dict[str, str]:
    """Prepare a server from before claims; return the locations of a table in `b`, and of a table with files
    elsewhere.
    """
    async with rig(home) as it:
        found = {"moved": await prepared(it)}
        apart = {"write.metadata.path": f"{it.settings.warehouse_uri()}/apart/meta"}
        made = await it.catalog.tables.create(
            CALLER, ("b",), CreateTable(name="apart", schema=SCHEMA, properties=apart)
        )
        found["apart"] = made.metadata.location
    with sqlite3.connect(home / "seamark.db") as connection:
        connection.execute("DELETE FROM claims")
    return found


async def test_no_location_is_guessed_or_assigned_while_the_storage_is_away(
    tmp_path: Path,
) -> None:
    places, clock, wrapped = await _upgraded(tmp_path), SimulatedClock(1), list[_Away]()

    def wrap(objects: ObjectStore) -> _Away:
        wrapped.append(_Away(objects))
        return wrapped[-1]

    async with rig(tmp_path, clock=clock, wrap_objects=wrap) as it:
        catalog = it.catalog
        assert await it.store.list_unclaimed("", 9), "no claim is better than a wrong one"
        create = CreateTable(name="x", schema=SCHEMA)
        view = CreateView(name="x", schema=SCHEMA, view_version=VERSION)
        doors: list[Any] = [
            lambda: catalog.tables.create(CALLER, ("a",), create),
            lambda: catalog.tables.stage(CONFINED, ("a",), create),
            lambda: catalog.views.create(CONFINED, ("a",), view),
            lambda: catalog.namespaces.create(CALLER, ("c",), {"location": f"{it.settings.warehouse_uri()}/c"}),
        ]
        for door in doors:
            with pytest.raises(RetryLater, match="cannot be checked"):
                await door()
        row = (await catalog.dropped.list(("b",), None, None)).items
        assert not row
        wrapped[0].away = False
        clock.advance(6000)
        await doors[0]()
        assert await it.store.list_unclaimed("", 9) == []
        for place in places.values():
            await _refused_table(it, place)
        await catalog.tables.create(CALLER, ("a",), CreateTable(name="y", schema=SCHEMA))


async def test_purge_waits_until_all_locations_are_known(tmp_path: Path) -> None:
    await _upgraded(tmp_path)
    wrapped: list[_Away] = []

    def wrap(objects: ObjectStore) -> _Away:
        wrapped.append(_Away(objects))
        return wrapped[-1]

    async with rig(tmp_path, wrap_objects=wrap) as it:
        name = (("b",), "apart")
        entry = await it.catalog.tables.entry(*name)
        await it.catalog.tables.drop(CALLER, *name, purge=False)
        (row,) = (await it.catalog.dropped.list(("b",), None, None)).items
        before = await it.files()
        wrapped[0].away = False
        document = await it.catalog.documents.table(entry.metadata_location)
        it.catalog.context.documents.remember_table(entry.metadata_location, document, b"{}")
        wrapped[0].away = True
        await it.catalog.dropped.purge(CALLER, row.id)
        assert await it.files() == before, "the storage gave nothing of the other tables"
        wrapped[0].away = False
        await it.catalog.dropped.purge_expired()
        assert entry.metadata_location not in await it.files()


async def test_possible_locations_of_a_table_with_lost_metadata_are_reserved(tmp_path: Path) -> None:
    places = await _upgraded(tmp_path)
    async with rig(tmp_path) as it:
        entry = (await it.catalog.tables.load(("b",), "moved")).entry
        assert entry is not None
    path = Path(parse_location(entry.metadata_location).file_path)
    kept = path.read_bytes()
    path.unlink()
    with sqlite3.connect(tmp_path / "seamark.db") as connection:
        connection.execute("DELETE FROM claims")
    clock = SimulatedClock(2)
    async with rig(tmp_path, clock=clock) as it:
        assert [one.uuid for one in await it.store.list_unclaimed("", 9)] == [entry.uuid]
        create = CreateTable(name="x", schema=SCHEMA, location=f"{places['moved']}/data")
        for caller in (CALLER, CONFINED):
            with pytest.raises(RetryLater, match="missing or broken"):
                await it.catalog.tables.create(caller, ("a",), create)
        await it.catalog.tables.create(CONFINED, ("a",), CreateTable(name="free", schema=SCHEMA))
        assert await create_remaining_claims(it.catalog.context) == 0
        path.write_bytes(kept)
        assert await create_remaining_claims(it.catalog.context) == 1
        assert await create_remaining_claims(it.catalog.context) == 0
        await _refused_table(it, places["moved"])


async def _refused_table(it: Rig, location: str) -> None:
    with pytest.raises(BadRequest, match="overlaps"):
        await it.catalog.tables.create(CALLER, ("a",), CreateTable(name="over", schema=SCHEMA, location=location))


async def test_entries_that_an_older_server_creates_concurrently_can_be_written(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        location = await prepared(it)
        with sqlite3.connect(tmp_path / "seamark.db") as connection:
            connection.execute("DELETE FROM claims")
        set_property = {"action": "set-properties", "updates": {"a": "b"}}
        await it.commits.commit_table(CALLER, ("b",), "moved", [], [set_property])
        assert await it.catalog.load_location(("b",), "moved") == location
        await refused(it, CONFINED, location)
