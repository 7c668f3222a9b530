"""Tests of undrop and purge: a dropped table returns completely, and a purge deletes exactly the table's files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fastavro
import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, CommitConflict, NotFound, RetryLater, StorageError
from seamark.metaserver.catalog.values import TableIdentifier
from seamark.metaserver.store.model import InstantState
from seamark.metaserver.store.passed_time import read_passed_time
from seamark.metaserver.store.port import InstantFilter
from tests.catalog.rig import CALLER, CatalogRig, build_append, open_rig
from tests.support.wrapper_capture import WrapperCapture

DB = ("db",)
_MANIFEST = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [
        {
            "name": "data_file",
            "type": {"type": "record", "name": "r2", "fields": [{"name": "file_path", "type": "string"}]},
        }
    ],
}
_LIST = {"type": "record", "name": "manifest_file", "fields": [{"name": "manifest_path", "type": "string"}]}


def _encode_avro(schema: dict[str, Any], rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    fastavro.writer(buffer, fastavro.parse_schema(schema), rows)
    return buffer.getvalue()


async def _create_filled_table(rig: CatalogRig, name: str, foreign_file: str | None = None) -> set[str]:
    """Create a table with one snapshot of two data files and, if given, a file of another table.

    Return the files in the table's location.
    """
    await rig.create_table(name)
    table_location = (await rig.catalog.tables.load(DB, name)).metadata.location
    data = [f"{table_location}/data/a.parquet", f"{table_location}/data/b.parquet"]
    for location in data:
        await rig.objects.create(location, b"rows")
    listed_files = [*data, foreign_file] if foreign_file else data
    manifest, manifest_list = f"{table_location}/metadata/m.avro", f"{table_location}/metadata/snap-1.avro"
    await rig.objects.create(
        manifest, _encode_avro(_MANIFEST, [{"data_file": {"file_path": path}} for path in listed_files])
    )
    await rig.objects.create(manifest_list, _encode_avro(_LIST, [{"manifest_path": manifest}]))
    requirements, updates = build_append(1, parent=None, sequence=1)
    updates[0]["snapshot"]["manifest-list"] = manifest_list
    await rig.commits.commit_table(CALLER, DB, name, requirements, updates)
    return {location for location in await rig.list_files() if location.startswith(table_location)}


async def test_undrop_restores_the_table_with_its_history(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        files = await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        assert not await rig.catalog.tables.exists(DB, "t")
        row = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items[0]
        await rig.catalog.dropped.restore(CALLER, row.id, namespace=None, name=None)
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id == 1
        assert await rig.list_files() == files
        with pytest.raises(NotFound):
            await rig.catalog.dropped.restore(CALLER, row.id, namespace=None, name=None)


async def test_undrop_is_rejected_under_a_used_name_and_succeeds_under_a_free_name(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)
        await rig.create_table("t")
        row = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items[0]
        with pytest.raises(AlreadyExists):
            await rig.catalog.dropped.restore(CALLER, row.id, namespace=None, name=None)
        await rig.catalog.dropped.restore(CALLER, row.id, None, "old")
        assert (await rig.catalog.tables.load(DB, "old")).metadata.current_snapshot_id == 1
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id is None


async def test_purge_waits_for_the_retention_and_then_deletes_every_file(tmp_path: Path) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, drop_retention_s=100) as rig:
        files = await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        clock.advance(99_000)
        assert await rig.catalog.dropped.purge_expired() == 0
        assert await rig.list_files() == files
        clock.advance(2_000)
        assert await rig.catalog.dropped.purge_expired() == 1
        assert await rig.list_files() == set()
        instants = await rig.store.list_instants(InstantFilter(action="purge"), limit=10)
        assert [(instant.state, instant.summary["deleted-files"]) for instant in instants] == [
            (InstantState.COMPLETED, len(files))
        ]


async def test_drop_without_purge_never_deletes_a_file(tmp_path: Path) -> None:
    clock = SimulatedClock(1)
    async with open_rig(tmp_path, clock=clock, drop_retention_s=1) as rig:
        files = await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)
        clock.advance(10_000)
        assert await rig.catalog.dropped.purge_expired() == 1
        assert await rig.list_files() == files
        assert (await rig.catalog.dropped.list(None, page_token=None, page_size=None)).items == []


async def test_purge_keeps_files_outside_the_warehouse(tmp_path: Path) -> None:
    foreign = tmp_path / "precious.parquet"
    foreign.write_bytes(b"mine")
    async with open_rig(tmp_path, drop_retention_s=0) as rig:
        await _create_filled_table(rig, "t", foreign.as_uri())
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        await rig.catalog.dropped.purge_expired()
        assert await rig.list_files() == set()
        assert foreign.read_bytes() == b"mine"


async def test_purge_keeps_files_of_a_table_that_is_registered_from_them_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path, drop_retention_s=0) as rig:
        files = await _create_filled_table(rig, "t")
        location = (await rig.catalog.tables.load_entry(DB, "t")).metadata_location
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        await rig.catalog.tables.register(CALLER, DB, "saved", location, overwrite=False)
        await rig.catalog.dropped.purge_expired()
        assert await rig.list_files() == files
        assert (await rig.catalog.tables.load(DB, "saved")).metadata.current_snapshot_id == 1


async def test_interrupted_purge_is_finished_by_the_next_purge(tmp_path: Path) -> None:
    class DyingObjects:
        """Objects whose third deletion ends the process."""

        def __init__(self, objects: Any) -> None:
            self._objects = objects
            self.remaining_calls = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(self._objects, name)

        async def delete(self, location: str) -> None:
            if self.remaining_calls == 0:
                raise KeyboardInterrupt("injected: the process dies here")
            self.remaining_calls -= 1
            await self._objects.delete(location)

    with pytest.raises(KeyboardInterrupt):
        await _fail_while_purging(tmp_path / "a", DyingObjects)
    async with open_rig(tmp_path / "a", drop_retention_s=0) as rig:
        assert await rig.list_files() != set()
        assert await rig.catalog.dropped.purge_expired() == 1
        assert await rig.list_files() == set()
        assert await rig.catalog.dropped.purge_expired() == 0


async def _fail_while_purging(home: Path, wrap_objects: Any) -> None:
    async with open_rig(home, drop_retention_s=0) as rig:
        await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
    async with open_rig(home, drop_retention_s=0, wrap_objects=wrap_objects) as rig:
        await rig.catalog.dropped.purge_expired()


async def test_file_that_cannot_be_deleted_is_counted_and_the_rest_is_deleted(tmp_path: Path) -> None:
    class ObjectsWithDeniedDelete:
        def __init__(self, objects: Any) -> None:
            self._objects = objects

        def __getattr__(self, name: str) -> Any:
            return getattr(self._objects, name)

        async def delete(self, location: str) -> None:
            if location.endswith("a.parquet"):
                raise StorageError("injected: permission denied")
            await self._objects.delete(location)

    async with open_rig(tmp_path, drop_retention_s=0, wrap_objects=ObjectsWithDeniedDelete) as rig:
        await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        await rig.catalog.dropped.purge_expired()
        assert [location.rpartition("/")[2] for location in await rig.list_files()] == ["a.parquet"]
        instants = await rig.store.list_instants(InstantFilter(action="purge"), limit=10)
        assert instants[0].summary["failed-files"] == 1


async def test_table_that_shares_its_files_cannot_be_purged(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties={"gc.enabled": "false"})
        with pytest.raises(BadRequest, match=r"gc\.enabled"):
            await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)


async def test_table_marked_later_as_sharing_its_files_is_not_purged(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        files = await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        row = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items[0]
        await rig.catalog.dropped.restore(CALLER, row.id, namespace=None, name=None)
        sharing_updates = [{"action": "set-properties", "updates": {"gc.enabled": "false"}}]
        await rig.commits.commit_table(CALLER, DB, "t", [], sharing_updates)
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)
        row = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items[0]
        with pytest.raises(BadRequest, match=r"gc\.enabled"):
            await rig.catalog.dropped.purge(CALLER, row.id)
        assert files < await rig.list_files()
        assert (await rig.catalog.dropped.get(row.id)).purge is False


@pytest.mark.parametrize("kind", ["other fields", "not Avro", "broken block"])
async def test_broken_manifest_does_not_delay_other_purges(tmp_path: Path, kind: str) -> None:
    good_list = _encode_avro(_LIST, [{"manifest_path": "file:///x"}] * 9)
    broken = {
        "other fields": _encode_avro(
            {"type": "record", "name": "r", "fields": [{"name": "x", "type": "int"}]}, [{"x": 1}]
        ),
        "not Avro": b"rows",
        "broken block": good_list.replace(b"null", b"snap")[:-20],
    }[kind]
    async with open_rig(tmp_path, drop_retention_s=0) as rig:
        await rig.create_table("t")
        manifest_list = f"{(await rig.catalog.tables.load(DB, 't')).metadata.location}/metadata/snap-1.avro"
        await rig.objects.create(manifest_list, broken)
        requirements, updates = build_append(1, parent=None, sequence=1)
        updates[0]["snapshot"]["manifest-list"] = manifest_list
        await rig.commits.commit_table(CALLER, DB, "t", requirements, updates)
        await _create_filled_table(rig, "u")
        for name in ("t", "u"):
            await rig.catalog.tables.drop(CALLER, DB, name, purge=True)
        assert await rig.catalog.dropped.purge_expired() == 2
        assert await rig.list_files() == set()
        assert await rig.catalog.dropped.purge_expired() == 0


async def test_purge_waits_for_unavailable_storage(tmp_path: Path) -> None:
    class UnavailableObjects:
        """Objects whose reads of Avro files or deletion of one file fail, as the test chooses."""

        def __init__(self, objects: Any) -> None:
            self._objects = objects
            self.call = ""

        def __getattr__(self, name: str) -> Any:
            return getattr(self._objects, name)

        async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
            if self.call == "read" and location.endswith(".avro"):
                raise RetryLater("injected: slow down")
            return bytes(await self._objects.read(location, limit_bytes=limit_bytes))

        async def delete(self, location: str) -> None:
            if self.call == "delete" and location.endswith("b.parquet"):
                raise RetryLater("injected: slow down")
            await self._objects.delete(location)

    capture = WrapperCapture(UnavailableObjects)
    async with open_rig(tmp_path, drop_retention_s=0, wrap_objects=capture) as rig:
        await _create_filled_table(rig, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        for capture.wrapper.call in ("read", "delete"):
            await rig.catalog.dropped.purge_expired()
            assert await rig.list_files() != set()
            assert [
                instant.state for instant in await rig.store.list_instants(InstantFilter(action="purge"), limit=10)
            ] == [InstantState.INFLIGHT]
        capture.wrapper.call = ""
        assert await rig.catalog.dropped.purge_expired() == 1
        assert await rig.list_files() == set()


async def test_drop_and_rename_apply_to_the_requested_table_or_fail(tmp_path: Path) -> None:
    """After a request has looked up the name, and before its transaction, another request replaces the table."""

    class OvertakenStore:
        """A store that calls `run_before_transaction` once, directly before the next transaction."""

        def __init__(self, store: Any) -> None:
            self._store = store
            self.run_before_transaction: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def transact(self, operations: Any) -> Any:
            if self.run_before_transaction is not None:
                run_before_transaction, self.run_before_transaction = self.run_before_transaction, None
                await run_before_transaction()
            return await self._store.transact(operations)

    capture = WrapperCapture(OvertakenStore)
    async with open_rig(tmp_path / "a", wrap_store=capture) as rig, open_rig(tmp_path / "a") as other_rig:
        await rig.create_table()

        async def replace_table() -> None:
            await other_rig.catalog.tables.drop(CALLER, DB, "t", purge=False)
            await other_rig.create_table()

        tables = rig.catalog.tables
        for attempt in (
            lambda: tables.drop(CALLER, DB, "t", purge=True),
            lambda: tables.rename(CALLER, TableIdentifier(DB, "t"), TableIdentifier(DB, "u")),
        ):
            capture.wrapper.run_before_transaction = replace_table
            with pytest.raises(CommitConflict):
                await attempt()
            assert await other_rig.catalog.tables.exists(DB, "t")


@pytest.mark.parametrize("jump_ms", [86_400_000, 365 * 86_400_000, -365 * 86_400_000])
async def test_clock_jump_ends_no_retention(tmp_path: Path, jump_ms: int) -> None:
    clock = SimulatedClock(seed=1)
    async with open_rig(tmp_path, clock=clock, drop_retention_s=3600) as rig:
        files = await _create_filled_table(rig, "t")
        await read_passed_time(rig.store, clock)  # Housekeeping calls this each minute.
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        clock.jump(jump_ms)
        assert await rig.catalog.dropped.purge_expired() == 0
        assert await rig.list_files() >= files
        (row,) = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items
        await rig.catalog.dropped.restore(CALLER, row.id, namespace=None, name=None)
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id == 1
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=True)
        clock.advance(3_599_000)
        assert await rig.catalog.dropped.purge_expired() == 0
        clock.advance(2000)
        assert await rig.catalog.dropped.purge_expired() == 1
        assert not await rig.list_files() & files
