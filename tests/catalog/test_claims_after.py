"""Tests that a claim ends only with its files.

After an entry's last name is gone, its namespace keeps the locations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest, NotFound
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.values import Caller, CreateTable, CreateView, TableIdentifier
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.sql import names
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, open_rig
from tests.catalog.test_confinement import VERSION

CALLER_OF_A = Caller(principal_name="wa", request_id="r", confined_to=(("a",),), names_owners=False)

_DAY_MS = 86_400_000
_WEEK_MS = 7 * _DAY_MS


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "SQLite" else {"database": request.getfixturevalue("postgres_url")}


async def create_moved_table(rig: CatalogRig) -> str:
    """Create a table in `a`, move it to `b.t`, and return its location.

    The table has a data file that no metadata names.
    """
    for path in (("a",), ("b",)):
        await rig.catalog.namespaces.create(CALLER, path, {})
    created_table = await rig.catalog.tables.create(CALLER, ("a",), CreateTable(name="t", schema=SCHEMA))
    await rig.catalog.tables.rename(CALLER, TableIdentifier(("a",), "t"), TableIdentifier(("b",), "t"))
    await rig.objects.create(f"{created_table.metadata.location}/data/secret.parquet", b"secret")
    return created_table.metadata.location


async def run_housekeeping(rig: CatalogRig, clock: SimulatedClock, after_ms: int = _WEEK_MS + 1) -> None:
    clock.advance(after_ms)
    await rig.catalog.dropped.purge_expired()
    await rig.catalog.dropped.release_unused()


async def check_invariants(rig: CatalogRig) -> None:
    store: Any = rig.store
    await store.check_invariants()


def delete_files(location: str) -> None:
    for path in Path(parse_location(location).file_path).rglob("*"):
        if path.is_file():
            path.unlink()


async def check_location_is_refused(rig: CatalogRig, caller: Caller, namespace: str, location: str) -> None:
    """Check that no entry of the namespace gets the location, or a folder in it."""
    for new_location in (location, f"{location}/data", f"{location}/x/y"):
        request = CreateTable(name="x", schema=SCHEMA, location=new_location)
        with pytest.raises(BadRequest, match="overlaps"):
            await rig.catalog.tables.create(caller, (namespace,), request)
    request = CreateTable(name="x", schema=SCHEMA, properties={"write.data.path": f"{location}/data"})
    with pytest.raises(BadRequest, match="overlaps"):
        await rig.catalog.tables.create(caller, (namespace,), request)


async def _drop_table(rig: CatalogRig) -> None:
    await rig.catalog.tables.drop(CALLER, ("b",), "t", purge=False)


async def _purge_table(rig: CatalogRig) -> None:
    await rig.catalog.tables.drop(CALLER, ("b",), "t", purge=True)


async def _unregister_table(rig: CatalogRig) -> None:
    await rig.catalog.tables.unregister(CALLER, ("b",), "t")


@pytest.mark.each_value
@pytest.mark.parametrize("ending", [_drop_table, _purge_table, _unregister_table])
@pytest.mark.parametrize("retention_s", [7 * 86400, 0])
async def test_former_namespace_of_a_moved_table_does_not_get_its_location(
    tmp_path: Path, database: dict[str, Any], ending: Callable[[CatalogRig], Any], retention_s: int
) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, drop_retention_s=retention_s, **database) as rig:
        location = await create_moved_table(rig)
        await ending(rig)
        for _ in range(3):
            await run_housekeeping(rig, clock)
            await check_location_is_refused(rig, CALLER_OF_A, "a", location)
        await check_invariants(rig)
        (row,) = (await rig.catalog.dropped.list_retained(None, None, None)).items
        assert (row.entry.namespace, row.entry.name) == (("b",), "t")
        assert (await rig.catalog.dropped.list(None, page_token=None, page_size=None)).items == []
        with pytest.raises(NotFound, match="retention"):
            await rig.catalog.dropped.restore(CALLER, row.id, namespace=None, name=None)
        delete_files(location)
        await run_housekeeping(rig, clock, _DAY_MS)
        assert (await rig.catalog.dropped.list_retained(None, None, None)).items == []
        await rig.catalog.tables.create(CALLER_OF_A, ("a",), CreateTable(name="x", schema=SCHEMA, location=location))
        await check_invariants(rig)


async def test_namespace_that_had_the_dropped_table_may_use_its_location_again(
    tmp_path: Path, database: dict[str, Any]
) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, **database) as rig:
        location = await create_moved_table(rig)
        metadata_location = (await rig.catalog.tables.load_entry(("b",), "t")).metadata_location
        await _drop_table(rig)
        await run_housekeeping(rig, clock)
        await rig.catalog.tables.register(CALLER, ("b",), "back", metadata_location, overwrite=False)
        assert (await rig.catalog.dropped.list_retained(None, None, None)).items == []
        assert await rig.store.count_names((await rig.catalog.tables.load_entry(("b",), "back")).uuid) == 1
        await rig.catalog.tables.unregister(CALLER, ("b",), "back")
        await run_housekeeping(rig, clock)
        request = CreateTable(name="other", schema=SCHEMA, location=location)
        await rig.catalog.tables.create(CALLER, ("b",), request)
        await check_location_is_refused(rig, CALLER_OF_A, "a", location)
        await check_invariants(rig)


async def test_admin_can_purge_or_release_a_retained_location(tmp_path: Path, database: dict[str, Any]) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, **database) as rig:
        location = await create_moved_table(rig)
        await _drop_table(rig)
        (row,) = (await rig.catalog.dropped.list(None, page_token=None, page_size=None)).items
        with pytest.raises(BadRequest, match="can be restored"):
            await rig.catalog.dropped.release(row.id)
        await run_housekeeping(rig, clock)
        await rig.catalog.dropped.purge(CALLER, row.id)
        assert await rig.list_files() == {f"{location}/data/secret.parquet"}
        await check_location_is_refused(rig, CALLER_OF_A, "a", location)
        (row,) = (await rig.catalog.dropped.list_retained(("b",), None, None)).items
        assert (await rig.catalog.dropped.list_retained(("a",), None, None)).items == []
        await rig.catalog.dropped.release(row.id)
        assert await rig.list_files() == {f"{location}/data/secret.parquet"}
        await rig.catalog.tables.create(CALLER_OF_A, ("a",), CreateTable(name="x", schema=SCHEMA, location=location))
        with pytest.raises(NotFound):
            await rig.catalog.dropped.release(row.id)


async def test_release_works_before_housekeeping_has_processed_the_end_of_the_retention(
    tmp_path: Path, database: dict[str, Any]
) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, **database) as rig:
        location = await create_moved_table(rig)
        await _drop_table(rig)
        (row,) = (await rig.catalog.dropped.list(None, page_token=None, page_size=None)).items
        clock.advance(_WEEK_MS + 1)
        await rig.catalog.dropped.release(row.id)
        await rig.catalog.tables.create(CALLER_OF_A, ("a",), CreateTable(name="x", schema=SCHEMA, location=location))
        await check_invariants(rig)


async def test_views_keep_their_locations(tmp_path: Path, database: dict[str, Any]) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, **database) as rig:
        await create_moved_table(rig)
        view = await rig.catalog.views.create(CALLER, ("a",), CreateView(name="v", schema=SCHEMA, view_version=VERSION))
        await rig.catalog.views.rename(CALLER, TableIdentifier(("a",), "v"), TableIdentifier(("b",), "v"))
        await rig.catalog.views.drop(CALLER, ("b",), "v")
        await run_housekeeping(rig, clock)
        await check_location_is_refused(rig, CALLER_OF_A, "a", view.metadata.location)
        (row,) = (await rig.catalog.dropped.list_retained(None, None, None)).items
        assert row.entry.kind is EntryKind.VIEW
        await rig.catalog.dropped.purge(CALLER, row.id)
        request = CreateTable(name="x", schema=SCHEMA, location=view.metadata.location)
        await rig.catalog.tables.create(CALLER_OF_A, ("a",), request)


async def test_overwritten_metadata_file_does_not_end_a_claim(tmp_path: Path) -> None:
    """A writer of the former namespace can overwrite the file, and write another location or nothing into it.

    The table must still keep its claim, which reserves the location of its files.
    """
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock) as rig:
        location = await create_moved_table(rig)
        entry = await rig.catalog.tables.load_entry(("b",), "t")
        file = Path(parse_location(entry.metadata_location).file_path)
        for changed_location in (location.upper().replace("FILE:", "file:"), f"{location}-away", ""):
            file.write_text(file.read_text().replace(location, changed_location) if changed_location else "{}")
        await _drop_table(rig)
        for _ in range(2):
            await run_housekeeping(rig, clock)
        await check_location_is_refused(rig, CALLER_OF_A, "a", location)


async def test_link_in_place_of_the_files_does_not_end_a_claim(tmp_path: Path) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock) as rig:
        location = await create_moved_table(rig)
        await _drop_table(rig)
        folder = Path(parse_location(location).file_path)
        folder.rename(f"{folder}-away")
        (tmp_path / "empty").mkdir()
        folder.symlink_to(tmp_path / "empty")
        await run_housekeeping(rig, clock)
        folder.unlink()
        Path(f"{folder}-away").rename(folder)
        await check_location_is_refused(rig, CALLER_OF_A, "a", location)


async def test_number_of_dropped_entries_that_keep_their_locations_is_limited_per_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: dict[str, Any]
) -> None:
    monkeypatch.setattr(names, "DROPPED_MAX", 3)
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, **database) as rig:
        await rig.catalog.namespaces.create(CALLER, ("a",), {})
        for number in range(4):
            await rig.catalog.tables.create(CALLER, ("a",), CreateTable(name=f"t{number}", schema=SCHEMA))
        for number in range(3):
            await rig.catalog.tables.drop(CALLER, ("a",), f"t{number}", purge=False)
            await run_housekeeping(rig, clock)
        for purge in (False, True):
            with pytest.raises(BadRequest, match="purge or release some"):
                await rig.catalog.tables.drop(CALLER, ("a",), "t3", purge=purge)
        assert await rig.catalog.tables.exists(("a",), "t3")
        row, *_ = (await rig.catalog.dropped.list_retained(None, None, None)).items
        await rig.catalog.dropped.purge(CALLER, row.id)
        await rig.catalog.tables.drop(CALLER, ("a",), "t3", purge=False)
