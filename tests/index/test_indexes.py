"""Tests of opened index files: a file that is damaged, missing, too large, of another version or unreachable is not
used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from isal import isal_zlib

from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import define_index
from seamark.formats.index.index_file import FilesTable, assemble_index_file, open_index_file
from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.formats.index.kinds.cube import CUBE
from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import StorageError
from seamark.metaserver.index.files.indexes import RETRY_S, Indexes, open_indexes
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import IndexFileState, RegisteredIndexFile
from seamark.metaserver.store.open import open_store
from tests.planner.lakes.indexing import IndexedTable, create_namespace
from tests.planner.lakes.tables import RecordingObjects, Table

KINDS = ("bloom", "bitmap", "record")


class FailingStorage(RecordingObjects):
    """An object store that records reads, and fails while it is `is_unavailable`."""

    is_unavailable = False

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        if self.is_unavailable:
            self.reads.append(location.rpartition("/")[2])
            raise StorageError("injected: no answer")
        return await super().read(location, limit_bytes=limit_bytes)


class IndexEnvironment:
    """A table with an index file of each kind, and `Indexes` over a storage that may fail."""

    def __init__(self, folder: Path, table: IndexedTable, clock: SimulatedClock, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.table = table
        self.clock = clock
        self.storage: FailingStorage
        self._stack = stack

    async def open_indexes(self, **arguments: Any) -> Indexes:
        options: dict[str, Any] = {"index_disk_bytes": 0, **arguments}
        settings = Settings(home=self.folder / "home", warehouse=self.folder.as_uri(), **options)
        objects = await self._stack.enter_async_context(open_objects(settings, self.clock))
        self.storage = FailingStorage(objects)
        store: ObjectStore = self.storage
        indexes = open_indexes(settings, store, self.table.registry, self.clock)
        return await self._stack.enter_async_context(indexes)

    async def find_registered_file(self, path: Path) -> RegisteredIndexFile:
        (actual_file,) = [file for file in await self.table.list_files() if file.location == path.as_uri()]
        return actual_file


@pytest.fixture
async def environment(tmp_path: Path) -> AsyncIterator[IndexEnvironment]:
    async with AsyncExitStack() as stack:
        clock = SimulatedClock(seed=3)
        store = await stack.enter_async_context(open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=clock))
        await create_namespace(store)
        new_table = Table(tmp_path / "t")
        new_table.commit(1, [new_table.write_manifest("a", range(4))])
        table = IndexedTable(new_table, store, Registry(store, clock), {kind: f"{kind}(id)" for kind in KINDS})
        await table.register()
        yield IndexEnvironment(tmp_path, table, clock, stack)


@pytest.mark.parametrize("kind", KINDS)
async def test_index_file_is_read_once_and_cached(environment: IndexEnvironment, kind: str) -> None:
    path = await environment.table.index(kind, range(3))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    assert indexes.find_in_memory(file) is None
    opened_indexes = await asyncio.gather(*(indexes.open(file) for _ in range(5)))
    assert opened_indexes[0] is not None
    assert opened_indexes == [opened_indexes[0]] * 5
    assert indexes.find_in_memory(file) is opened_indexes[0]
    assert (opened_indexes[0].location, len(opened_indexes[0].files), opened_indexes[0].index.files) == (
        path.as_uri(),
        3,
        3,
    )
    assert environment.storage.reads == [path.name]


def damage_index_file(path: Path, damage_kind: str) -> None:
    """Remove, cut or empty the file, or flip a bit of the part that `damage_kind` names.

    Each number in the code selects a byte within the part. The head of a record index is at the end of its blob.
    """
    data = bytearray(path.read_bytes())
    header = open_index_file(bytes(data), "x").header
    if damage_kind == "missing":
        path.unlink()
        return
    if damage_kind == "truncated":
        del data[len(data) // 2 :]
    elif damage_kind == "empty":
        del data[:]
    elif damage_kind == "files table":
        data[header.files_offset + 70] ^= 1
    elif damage_kind == "footer":
        data[header.offset + header.length + 20] ^= 1
    elif damage_kind == "head of the blob":
        data[header.offset + (header.length - 40 if header.kind == "record" else 10)] ^= 1
    path.write_bytes(data)


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("damage_kind", ["missing", "truncated", "empty", "files table", "footer", "head of the blob"])
@pytest.mark.parametrize("kind", KINDS)
async def test_damaged_or_missing_file_is_quarantined_and_not_read_again(
    environment: IndexEnvironment, kind: str, damage_kind: str
) -> None:
    path = await environment.table.index(kind, range(3))
    damage_index_file(path, damage_kind)
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    assert await indexes.open(file) is None
    assert await indexes.open(file) is None
    assert environment.storage.reads == [path.name]
    assert (indexes.failures, indexes.quarantined) == (1, 1)
    index_file = await environment.find_registered_file(path)
    assert index_file.state is IndexFileState.QUARANTINED
    assert index_file.reason is not None
    assert path.name in index_file.reason
    assert (await environment.table.registry.load_files(await environment.table.build_entry())).list_live_files(
        file.definition
    ) == ()


async def test_index_file_of_another_table_or_definition_is_quarantined(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bitmap", range(3))
    other_index_file = await environment.table.index("bloom", range(3))
    path.write_bytes(other_index_file.read_bytes())
    indexes = await environment.open_indexes()
    assert await indexes.open(await environment.find_registered_file(path)) is None
    assert await indexes.open(await environment.find_registered_file(other_index_file)) is not None
    assert (await environment.find_registered_file(path)).state is IndexFileState.QUARANTINED
    assert (await environment.find_registered_file(other_index_file)).state is IndexFileState.LIVE


async def test_file_larger_than_allowed_is_quarantined_without_a_read(environment: IndexEnvironment) -> None:
    path = await environment.table.index("record", range(4))
    indexes = await environment.open_indexes(index_file_limit_bytes=1024)
    assert await indexes.open(await environment.find_registered_file(path)) is None
    assert (await environment.find_registered_file(path)).state is IndexFileState.QUARANTINED


async def test_file_of_an_unknown_version_is_ignored_and_stays_registered(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bloom", range(3))
    path.write_bytes(path.read_bytes().replace(b"seamark-bloom-v1", b"seamark-bloom-v9"))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    assert not indexes.is_unsupported(file)
    for _ in range(3):
        assert await indexes.open(file) is None
        environment.clock.advance(int(10_000 * RETRY_S))
    assert indexes.is_unsupported(file)
    assert environment.storage.reads == [path.name]
    assert (indexes.failures, indexes.quarantined) == (1, 0)
    assert (await environment.find_registered_file(path)).state is IndexFileState.LIVE


def build_cube_file(table_uuid: str, files: int) -> bytes:
    """Return an index file with a cube that has the same groups for each of the `files` data files."""
    schema = Schema((Field(1, "id", True, "long"),), schema_id=0)
    definition = define_index("c", "cube", ["id"], schema, measures=["count(*)"])
    groups = CUBE.build_entry_with_aggregates(
        definition.terms, definition.measures, {1: pa.chunked_array([[1, 2, 2]])}, definition.parameters
    )
    counts = np.full(files, 3, np.uint64)
    paths = [f"file:///{number}.parquet" for number in range(files)]
    table = FilesTable.from_columns(compute_file_ids(paths, counts, counts), counts, counts, paths)
    blob = CUBE.encode([groups] * files)
    parts = assemble_index_file(definition.id, "cube", table, blob, table_uuid=table_uuid, field_ids=[1], level=0)
    return b"".join(map(bytes, parts))


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("version_place", ["type", "layout"])
async def test_cube_of_another_version_stays_registered(
    environment: IndexEnvironment, version_place: str, version: int
) -> None:
    uuid = environment.table.metadata.table_uuid
    assert uuid is not None
    data = bytearray(build_cube_file(uuid, 2))
    header = open_index_file(bytes(data), "x").header
    if version_place == "type":
        data = data.replace(b"seamark-cube-v2", b"seamark-cube-v%d" % version)
    else:
        # The header of a cube has the layout at byte 8, and the checksum at byte 28.
        data[header.offset + 8] = version
        cube_header = data[header.offset : header.offset + 28]
        data[header.offset + 28 : header.offset + 32] = isal_zlib.crc32(cube_header).to_bytes(4, "little")
    path = environment.folder / "cube.puffin"
    path.write_bytes(data)
    row = RegisteredIndexFile(
        uuid, path.as_uri(), header.definition, "cube", 0, header.files, header.rows, len(data), None, 1
    )
    await environment.table.registry.replace(uuid, header.definition, add=[row], remove=())
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    assert await indexes.open(file) is None
    await indexes.verify_source([file], "it looked wrong")
    assert indexes.is_unsupported(file)
    assert indexes.quarantined == 0
    assert (await environment.find_registered_file(path)).state is IndexFileState.LIVE


async def test_storage_that_does_not_answer_is_tried_again_later(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bloom", range(3))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    environment.storage.is_unavailable = True
    assert await indexes.open(file) is None
    assert await indexes.open(file) is None
    assert len(environment.storage.reads) == 1
    assert not indexes.is_unsupported(file)
    environment.clock.advance(int(1000 * RETRY_S) + 1)
    environment.storage.is_unavailable = False
    assert await indexes.open(file) is not None
    assert (await environment.find_registered_file(path)).state is IndexFileState.LIVE


async def test_suspected_index_file_with_intact_content_stays_registered(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bitmap", range(3))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    first_index = await indexes.open(file)
    await indexes.verify_source([file], "it looked wrong")
    assert (await environment.find_registered_file(path)).state is IndexFileState.LIVE
    assert indexes.find_in_memory(file) is None
    reopened_file = await indexes.open(file)
    assert reopened_file is not None
    assert reopened_file is not first_index


@pytest.mark.parametrize("kind", KINDS)
async def test_suspected_index_file_with_damaged_content_is_quarantined_with_both_reasons(
    environment: IndexEnvironment, kind: str
) -> None:
    path = await environment.table.index(kind, range(3))
    data = bytearray(path.read_bytes())
    header = open_index_file(bytes(data), "x").header
    data[header.offset + (100 if kind == "record" else header.length - 10)] ^= 1
    path.write_bytes(data)
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    assert await indexes.open(file) is not None
    await indexes.verify_source([file], "it looked wrong")
    index_file = await environment.find_registered_file(path)
    assert index_file.state is IndexFileState.QUARANTINED
    assert index_file.reason is not None
    assert index_file.reason.startswith("it looked wrong; ")
    assert await indexes.open(file) is None


async def test_suspected_index_file_of_a_newer_version_stays_registered(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bitmap", range(3))
    path.write_bytes(path.read_bytes().replace(b"seamark-bitmap-v1", b"seamark-bitmap-v9"))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    await indexes.verify_source([file], "it looked wrong")
    assert (await environment.find_registered_file(path)).state is IndexFileState.LIVE
    assert indexes.is_unsupported(file)
    assert indexes.quarantined == 0


async def test_suspected_index_file_that_cannot_be_read_stays_registered(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bitmap", range(3))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    environment.storage.is_unavailable = True
    await indexes.verify_source([file], "it looked wrong")
    assert (await environment.find_registered_file(path)).state is IndexFileState.LIVE
    assert (indexes.failures, indexes.quarantined) == (1, 0)


async def test_damage_of_an_unregistered_file_has_no_consequence(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bitmap", range(3))
    indexes, file = await environment.open_indexes(), await environment.find_registered_file(path)
    await environment.table.index("bitmap", range(4), remove=[path.as_uri()])
    await environment.table.registry.forget(file.uuid, file.location)
    path.unlink()
    assert await indexes.open(file) is None
    assert (indexes.failures, indexes.quarantined) == (1, 0)


async def test_damaged_copies_on_the_local_disk_are_fetched_again(environment: IndexEnvironment) -> None:
    path = await environment.table.index("bitmap", range(4))
    file = await environment.find_registered_file(path)
    folder = environment.folder / "disk"
    options: dict[str, Any] = {"index_disk_bytes": 64 << 20, "index_disk_folder": str(folder)}
    settings = Settings(home=environment.folder / "home", warehouse=environment.folder.as_uri(), **options)
    for round_number in range(3):
        async with open_objects(settings, environment.clock) as objects:
            storage = FailingStorage(objects)
            store: ObjectStore = storage
            async with open_indexes(settings, store, environment.table.registry, environment.clock) as indexes:
                opened_index = await indexes.open(file)
                assert opened_index is not None
                await asyncio.to_thread(opened_index.index.verify)
                assert len(storage.reads) == (0 if round_number == 1 else 1), f"turn {round_number}"
                assert indexes.failures == 0
        if round_number == 1:
            (copy,) = [item for item in folder.rglob("*") if item.is_file() and path.read_bytes() in item.read_bytes()]
            data = bytearray(copy.read_bytes())
            data[-len(path.read_bytes()) // 2] ^= 1
            copy.write_bytes(data)
