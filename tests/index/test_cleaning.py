"""Tests of the housekeeping of index files: what it deletes, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.index.definitions import PREFIX, read_definitions
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.catalog.values import Caller, CreateTable
from seamark.metaserver.store.model import RegisteredIndexFile
from tests.catalog.rig import use_metadata_file_without_digest
from tests.server.rig import RunningServer, run_server

DAY_S = 86_400


class IndexedFilesTable:
    """A table `db.t`, and methods that add index files to it and read their states."""

    def __init__(self, server: RunningServer, entry: Any, metadata: Any) -> None:
        self.server = server
        self.entry = entry
        self.metadata = metadata
        self.folder = Path(metadata.location.removeprefix("file://")) / "_seamark" / "index"

    async def add(self, name: str, definition: str) -> None:
        """Write a file with this name, and register it as an index file of the definition."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"index")
        now_ms = self.server.components.clock.now_ms()
        file = RegisteredIndexFile(
            uuid=self.entry.uuid, location=path.as_uri(), definition=definition, kind="bloom", level=0, files=1, rows=1,
            size_bytes=len(b"index"), snapshot_id=None, created_ms=now_ms, changed_ms=now_ms,
        )  # fmt: skip
        await self.server.components.registry.replace(self.entry.uuid, definition, add=[file])

    async def read_states(self) -> dict[str, str]:
        files = await self.server.components.store.index_files(self.entry.uuid)
        return {file.location.rpartition("/")[2]: file.state.value for file in files}

    def make_location(self, name: str) -> str:
        return (self.folder / name).as_uri()


CALLER = Caller("tester", "test")


async def open_table(server: RunningServer, **properties: str) -> IndexedFilesTable:
    catalog = server.components.catalog
    schema = {"type": "struct", "fields": [{"id": 1, "name": "id", "required": True, "type": "long"}]}
    created_table = await catalog.tables.create(
        CALLER, ("db",), CreateTable(name="t", schema=schema, properties=properties)
    )
    return IndexedFilesTable(server, created_table.entry, created_table.metadata)


async def wait_for_retention() -> None:
    """Wait until a retention of 0 seconds is over. The clock must be later than the time of the last change."""
    await asyncio.sleep(0.01)


async def clean_index_files(server: RunningServer) -> int:
    return (await server.components.housekeeping.run_round())["index_files_cleaned"]


async def test_superseded_and_quarantined_files_are_deleted_after_their_retention_time(
    tmp_path: Path,
) -> None:
    async with run_server(tmp_path, index_retention_s=0) as server:
        table = await open_table(server, **{PREFIX + "i": "bloom(id)"})
        definition = read_definitions(table.metadata).by_name["i"].id
        for name in ("old", "broken", "live"):
            await table.add(name, definition)
        registry = server.components.registry
        await registry.replace(table.entry.uuid, definition, add=[], remove=[table.make_location("old")])
        await registry.quarantine_file(table.entry.uuid, table.make_location("broken"), "flipped")
        await wait_for_retention()
        assert await clean_index_files(server) == 2
        assert await table.read_states() == {"live": "live"}
        assert [path.name for path in table.folder.iterdir()] == ["live"]


async def test_superseded_files_stay_for_their_retention_time(tmp_path: Path) -> None:
    async with run_server(tmp_path, index_retention_s=3600) as server:
        table = await open_table(server)
        await table.add("old", "anything")
        await server.components.registry.replace(
            table.entry.uuid, "anything", add=[], remove=[table.make_location("old")]
        )
        assert await clean_index_files(server) == 0
        assert await table.read_states() == {"old": "superseded"}
        assert (table.folder / "old").exists()


async def test_files_of_a_dropped_index_are_superseded_and_then_deleted(tmp_path: Path) -> None:
    async with run_server(tmp_path, index_retention_s=0) as server:
        table = await open_table(server, **{PREFIX + "kept": '{"kind": "bloom", "columns": ["id"], "state": "paused"}'})
        kept_id = read_definitions(table.metadata).by_name["kept"].id
        await table.add("kept", kept_id)
        await table.add("gone", "of an index that was dropped")
        await wait_for_retention()
        assert await clean_index_files(server) == 1
        assert await table.read_states() == {"kept": "live", "gone": "superseded"}
        await wait_for_retention()
        assert await clean_index_files(server) == 1
        assert await table.read_states() == {"kept": "live"}


async def test_nothing_is_deleted_while_a_definition_is_unreadable(tmp_path: Path) -> None:
    async with run_server(tmp_path, index_retention_s=0) as server:
        table = await open_table(server, **{PREFIX + "i": "bloom(no_such_column)"})
        await table.add("x", "a file of the unreadable definition")
        await wait_for_retention()
        assert await clean_index_files(server) == 0
        assert await table.read_states() == {"x": "live"}


async def test_unregistered_file_is_deleted_when_it_is_old(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        table = await open_table(server, **{PREFIX + "i": "bloom(id)"})
        await table.add("live", read_definitions(table.metadata).by_name["i"].id)
        for name in ("fresh", "old"):
            (table.folder / "build").mkdir(exist_ok=True)
            (table.folder / "build" / name).write_bytes(b"left over")
        two_days_ago = server.components.clock.now_ms() / 1000 - 2 * DAY_S
        os.utime(table.folder / "build" / "old", (two_days_ago, two_days_ago))
        os.utime(table.folder / "live", (two_days_ago, two_days_ago))
        assert await clean_index_files(server) == 1
        assert sorted(path.name for path in table.folder.rglob("*") if path.is_file()) == ["fresh", "live"]


async def test_folder_of_another_table_is_not_cleaned(tmp_path: Path) -> None:
    """A writer has changed the location in the table's metadata file to a location of another catalog."""
    async with run_server(tmp_path) as server:
        table = await open_table(server, **{PREFIX + "i": "bloom(id)"})
        await table.add("live", read_definitions(table.metadata).by_name["i"].id)
        other_file = tmp_path / "warehouse" / "victim" / "_seamark" / "index" / "left"
        other_file.parent.mkdir(parents=True)
        other_file.write_bytes(b"an index file of another table")
        long_ago = server.components.clock.now_ms() / 1000 - 2 * DAY_S
        os.utime(other_file, (long_ago, long_ago))
        # The server would notice a change of a file whose name has a digest of the content.
        path = use_metadata_file_without_digest(table.entry.metadata_location)
        metadata_json = json.loads(path.read_text())
        path.write_text(json.dumps({**metadata_json, "location": other_file.parents[2].as_uri()}))
        server.components.catalog.documents.cache.clear()
        assert await clean_index_files(server) == 0
        assert other_file.exists()


async def test_file_that_cannot_be_deleted_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, index_retention_s=0) as server:
        table = await open_table(server, **{PREFIX + "i": "bloom(id)"})
        definition = read_definitions(table.metadata).by_name["i"].id
        await table.add("old", definition)
        await server.components.registry.replace(
            table.entry.uuid, definition, add=[], remove=[table.make_location("old")]
        )
        await wait_for_retention()
        delete = type(server.components.objects).delete

        async def fail(objects: object, location: str) -> None:
            raise RetryLater("the storage does not answer")

        monkeypatch.setattr(type(server.components.objects), "delete", fail)
        assert await clean_index_files(server) == 0
        assert await table.read_states() == {"old": "superseded"}
        monkeypatch.setattr(type(server.components.objects), "delete", delete)
        assert await clean_index_files(server) == 1
        assert await table.read_states() == {}
