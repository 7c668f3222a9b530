"""Tests that the size that a cache accounts for its entries is within a tenth of the memory allocated for them."""

from __future__ import annotations

import gc
import hashlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.cache.admission import AdmittingCache
from seamark.cache.frequency import FrequencySketch
from seamark.cache.memory import measure_named_caches
from seamark.connector.index.files import DataFile, encode_index_file
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import DeleteFile
from seamark.formats.index.packing import MISSING
from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.metaserver.commit.snapshots.manifests import Manifests, PathHashes, hash_paths
from seamark.metaserver.gateway.caching.blocks import ObjectBlocks, Owner
from seamark.metaserver.gateway.caching.records import Records, parse_record
from seamark.metaserver.gateway.caching.store import StoreAnswer
from seamark.metaserver.gateway.caching.write_versions import WriteVersions
from seamark.metaserver.index.files.headers import IndexReader
from seamark.metaserver.index.files.indexes import open_indexes
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.deletes.delete_files import DeleteFiles
from seamark.metaserver.planner.lookup.prefix import PrefixCache, parse_prefix
from seamark.metaserver.planner.plan.manifest_lists import ManifestLists
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import RegisteredIndexFile
from tests.iceberg.manifests.test_manifest import SCHEMA, build_entry, build_manifest
from tests.planner.lakes.indexing import build_part
from tests.planner.lakes.tables import Table, open_test_planner, to_path
from tests.server.test_memory_account import build_table_json

Fill = Callable[[], Awaitable[object]]
"""A function that fills a cache, and returns an object that keeps the cache alive.

The function's inputs exist before the measurement.
"""
MIB = 1 << 20
LAST_READ_BYTES = 16 << 10
"""The size of memory to which the thread of the last read may still refer."""
ATTEMPTS = 3
CASES: list[tuple[str, Callable[[Path], AbstractAsyncContextManager[Fill]]]] = []


def register_case(cache: str) -> Callable[[Callable[[Path], AsyncIterator[Fill]]], None]:
    """Return a decorator that adds a function as a case for the cache with this name.

    The function prepares the inputs in a folder, and yields a function that fills the cache.
    """

    def add_case(open_case: Callable[[Path], AsyncIterator[Fill]]) -> None:
        CASES.append((cache, asynccontextmanager(open_case)))

    return add_case


@register_case("manifest-lists")
async def fill_manifest_lists(folder: Path) -> AsyncIterator[Fill]:
    """Yield a function that fills a new cache with 8 decoded manifest lists. Each list has 400 manifests."""
    table = Table(folder / "t")
    manifests = [table.write_manifest(f"m{number}", [number]) for number in range(40)]
    for snapshot in range(1, 9):
        table.commit(snapshot, manifests * 10)
    async with open_test_planner(folder) as planner:

        async def fill_cache() -> object:
            lists = ManifestLists(planner._blocks, 64 * MIB)
            for snapshot in table.metadata.snapshots:
                await lists._find(snapshot, str(snapshot.snapshot_id))
            return lists

        yield fill_cache


@register_case("commits")
async def fill_decoded_manifests_of_commits(folder: Path) -> AsyncIterator[Fill]:
    table = Table(folder / "t")
    new_manifests = [table.write_manifest(f"m{number}", range(500 * number, 500 * number + 500)) for number in range(6)]
    table.commit(1, new_manifests)
    settings = Settings(home=folder / "home", warehouse=folder.as_uri())
    async with open_objects(settings, SystemClock()) as objects:

        async def fill_cache() -> object:
            manifests = Manifests(objects, budget_bytes=256 * MIB, limit_bytes=64 * MIB)
            await manifests.read_blocks(await manifests.read_list(table.metadata.snapshots[0]))
            return manifests

        yield fill_cache


@register_case("commits")
async def fill_decoded_manifests_of_wide_tables(folder: Path) -> AsyncIterator[Fill]:
    """Yield a function that fills a new cache with three decoded manifests.

    Each manifest has 50 files with statistics of 200 columns.
    """
    counts = [{"key": column, "value": column} for column in range(1, 201)]
    bounds = [{"key": column, "value": b"%08d" % column} for column in range(1, 201)]
    statistics = {"value_counts": counts, "null_value_counts": counts}
    statistics |= {"lower_bounds": bounds, "upper_bounds": bounds}
    rows = [
        build_entry(SCHEMA, day=1, file_path=f"{folder.as_uri()}/{number}.parquet", **statistics)
        for number in range(50)
    ]
    fields = [{"id": column, "name": f"c{column}", "required": False, "type": "long"} for column in range(1, 203)]
    header = {
        "schema": json.dumps({"type": "struct", "schema-id": 0, "fields": fields}),
        "partition-spec": json.dumps([{"source-id": 2, "field-id": 1000, "name": "day", "transform": "identity"}]),
        "partition-spec-id": "0",
    }
    table = Table(folder / "t")
    new_manifests = [table.write_manifest(f"m{number}", [number]) for number in range(3)]
    data = build_manifest(SCHEMA, *rows, metadata=header)
    for new_manifest in new_manifests:
        to_path(new_manifest).write_bytes(data)
    table.commit(1, [replace(new_manifest, length=len(data)) for new_manifest in new_manifests])
    settings = Settings(home=folder / "home", warehouse=folder.as_uri())
    async with open_objects(settings, SystemClock()) as objects:

        async def fill_cache() -> object:
            manifests = Manifests(objects, budget_bytes=256 * MIB, limit_bytes=64 * MIB)
            await manifests.read_blocks(await manifests.read_list(table.metadata.snapshots[0]))
            return manifests

        yield fill_cache


@register_case("commits")
async def fill_written_manifests_of_commits(folder: Path) -> AsyncIterator[Fill]:
    settings = Settings(home=folder / "home", warehouse=folder.as_uri())
    async with open_objects(settings, SystemClock()) as objects:

        async def fill_cache() -> object:
            manifests = Manifests(objects, budget_bytes=256 * MIB, limit_bytes=64 * MIB)
            for number in range(20):
                paths = hash_paths(f"s3://bucket/{number}/{file}.parquet" for file in range(500))
                manifests.remember(
                    f"s3://bucket/{number:060d}.avro", bytes(20_000 + number), PathHashes(paths, paths[:0])
                )
            return manifests

        yield fill_cache


@register_case("delete-files")
async def open_delete_files(folder: Path) -> AsyncIterator[Fill]:
    """Yield a function that fills a new cache with six decoded position delete files of 100 data files each."""
    paths = [f"{folder.as_uri()}/data/{number:06d}.parquet" for number in range(100)]
    rows = pa.table({"file_path": pa.array(paths * 50).sort(), "pos": pa.array([*range(50)] * 100, pa.int64())})
    files = []
    for number in range(6):
        path = folder / f"d{number}.parquet"
        pq.write_table(rows, path)
        size = path.stat().st_size
        files.append(DeleteFile(path.as_uri(), "parquet", 1, size, len(rows), None, MISSING, MISSING, ()))
    settings = Settings(home=folder / "home", warehouse=folder.as_uri())
    async with open_objects(settings, SystemClock()) as objects:

        async def fill_cache() -> object:
            reader = DeleteFiles(objects, 64 * MIB)
            for file in files:
                await reader._get_content(file, ())
            return reader

        yield fill_cache


def write_index_files(folder: Path, kind: str, files: int, keys: int) -> list[RegisteredIndexFile]:
    """Write six index files of `files` data files with `keys` random keys each, and return their registrations."""
    metadata = decode_table(build_table_json(5, 1), "t")
    metadata = msgspec.structs.replace(metadata, properties={"seamark.index.i": f"{kind}(column_1)"})
    (definition,) = read_definitions(metadata).enabled
    new_index_files = []
    for number in range(6):
        entries = []
        for file in range(files):
            values = np.random.default_rng(files * number + file).integers(0, 10 * keys, keys)
            path = f"s3://bucket/warehouse/db/table/data/{number}-{file:05d}.parquet"
            entries.append(
                (DataFile(path, 1000 + file, keys), build_part(definition, [convert_to_keys(pa.array(values), "long")]))
            )
        parts = encode_index_file(
            metadata.table_uuid, definition, [data_file for data_file, _ in entries], [index for _, index in entries]
        )
        index_path = folder / f"{kind}-{number}.puffin"
        index_path.write_bytes(b"".join(parts))
        new_index_files.append(
            RegisteredIndexFile(
                uuid=metadata.table_uuid,
                location=index_path.as_uri(),
                definition=definition.id,
                kind=kind,
                level=0,
                files=files,
                rows=keys * files,
                size_bytes=index_path.stat().st_size,
                snapshot_id=None,
                created_ms=number,
            )
        )
    return new_index_files


def fill_index(kind: str, files: int, keys: int, *, remote: bool) -> Callable[[Path], AsyncIterator[Fill]]:
    """Return a test case: a function that opens a server's indexes, and yields a function which fills their cache.

    The first fill reads one index file, and the second fill reads the other five.

    Args:
        kind: The kind of the index.
        files: The number of data files in each index file.
        keys: The number of keys of each data file.
        remote: Whether the server reads the index by ranges instead of copying the whole file.
    """

    async def open_case(folder: Path) -> AsyncIterator[Fill]:
        encoded_files = write_index_files(folder, kind, files, keys)
        settings = Settings(home=folder / "home", warehouse=folder.as_uri(), index_disk_bytes=0)
        clock = SimulatedClock(seed=1)
        async with (
            open_objects(settings, clock) as objects,
            open_indexes(settings, objects, Registry(None, clock), clock) as indexes,  # type: ignore[arg-type]
        ):
            batches = iter((encoded_files[:1], encoded_files[1:]))

            async def fill_cache() -> object:
                opened_indexes = [
                    await (indexes.open_remote if remote else indexes.open)(file) for file in next(batches)
                ]
                assert all(opened_indexes)
                return None

            yield fill_cache

    open_case.__name__ = f"{kind}_remote_indexes" if remote else f"{kind}_index_files"
    return open_case


for _kind in ("bloom", "bitmap", "record"):
    register_case("indexes")(fill_index(_kind, 100, 1000, remote=False))
for _kind in ("bloom", "record"):  # The bitmap of a remote index is in mapped memory, which tracemalloc does not count.
    register_case("remote-indexes")(fill_index(_kind, 400, 100, remote=True))


@register_case("index-headers")
async def open_index_headers(folder: Path) -> AsyncIterator[Fill]:
    files = write_index_files(folder, "bloom", 300, 10)
    settings = Settings(home=folder / "home", warehouse=folder.as_uri())
    async with open_objects(settings, SystemClock()) as objects:

        async def fill_cache() -> object:
            reader = IndexReader(objects)
            for file in files:
                await reader.describe(file.location, file.size_bytes)
            return reader

        yield fill_cache


class _IndexListing:
    """An index store that lists 200 index files for each table.

    Their numbers are too large for Python's cached small integers, as in real tables.
    """

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        return [
            RegisteredIndexFile(
                uuid="".join(uuid),  # A new text for each file, as a database returns it.
                location=f"s3://bucket/lake/db/table/_seamark/index/{hashlib.md5(b'%d' % number).hexdigest()}.puffin",
                definition=hashlib.sha256(b"%d" % (number % 3)).hexdigest(),
                kind="bitmap",
                level=1,
                files=300 + number,
                rows=1_000_000 + number,
                size_bytes=2_000_000 + number,
                snapshot_id=10**18 + number,
                created_ms=1_760_000_000_000 + number,
            )
            for number in range(200)
        ]


class _Entry(msgspec.Struct):
    uuid: str
    index_version: int


@register_case("index-registry")
async def open_index_registry(folder: Path) -> AsyncIterator[Fill]:
    async def fill_cache() -> object:
        registry: Any = Registry(_IndexListing(), SimulatedClock(seed=1))  # type: ignore[arg-type]
        for number in range(5):
            await registry.load_files(_Entry(f"uuid-{number}", 1))
        return registry

    yield fill_cache


@register_case("gateway-records")
async def open_gateway_records(folder: Path) -> AsyncIterator[Fill]:
    """Yield a function that fills a new cache with 1,000 object records of the gateway."""
    versions = WriteVersions(folder / "versions", SystemClock())
    with ThreadPoolExecutor(1) as executor:

        async def fill_cache() -> object:
            # Both limits are larger than the 1,000 records, so the cache evicts nothing.
            records = Records(64 * MIB, 64 * MIB, None, versions, SystemClock(), executor, recheck_s=60)
            for number in range(1000):
                headers = {
                    "etag": f'"{hashlib.md5(b"%d" % number).hexdigest()}"',
                    "last-modified": f"Mon, 24 Nov 2025 10:00:{number % 60:02d} GMT",
                    "content-length": f"{10_000_000 + number}",
                    "content-type": f"application/octet-stream-{number}",
                    "x-amz-meta-writer": f"writer {number}",
                }
                location = f"s3://bucket/warehouse/db/table/data/day=2025-11-24/{number:06d}.parquet"
                record = parse_record(StoreAnswer(200, headers, None), location, version=1, now_ms=1_760_000_000_000)  # type: ignore[arg-type]
                assert record is not None
                records.keep(record, "tenant")
            return records

        yield fill_cache
    versions.close()


@register_case("gateway-blocks")
async def open_gateway_blocks(folder: Path) -> AsyncIterator[Fill]:
    with ThreadPoolExecutor(1) as executor:

        async def fill_cache() -> object:
            memory: AdmittingCache[str, memoryview] = AdmittingCache(
                64 * MIB, FrequencySketch(1000), name="gateway-blocks"
            )
            blocks = ObjectBlocks(memory, None, None, executor, executor, block_bytes=16384, pending_bytes_max=0)
            for number in range(100):
                block = memoryview(bytearray(16384)).toreadonly()
                blocks.keep_in_memory(f"{number:032d}", number, block, Owner("tenant", False))
            return blocks

        yield fill_cache


@register_case("partition-prefixes")
async def open_partition_prefixes(folder: Path) -> AsyncIterator[Fill]:
    table = Table(folder / "t")
    table.commit(1, [table.write_manifest("m", [1])])
    metadata = table.metadata

    async def fill_cache() -> object:
        cache = PrefixCache(64 * MIB)
        for number in range(500):
            parse_prefix(f"day={1000 + number}", metadata, cache)
        return cache

    yield fill_cache


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("cache", "open_case"),
    # A third of the caches is in the fast tier.
    [pytest.param(*case, marks=[] if number % 3 == 0 else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_cache_accounts_the_memory_of_its_entries(
    cache: str, open_case: Callable[[Path], AbstractAsyncContextManager[Fill]], tmp_path: Path
) -> None:
    # A measurement is repeated, because it includes allocations of other threads of the process.
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        charged_bytes, held_bytes = await _measure_charged_and_held(cache, open_case(folder))
        # The accounted bytes may differ by a tenth from the allocated bytes.
        if abs(charged_bytes - held_bytes) < held_bytes / 10 + LAST_READ_BYTES:
            return
    pytest.fail(f"the cache accounts {charged_bytes:,} bytes, but {held_bytes:,} are allocated")


async def _measure_charged_and_held(cache: str, filled_cache: AbstractAsyncContextManager[Fill]) -> tuple[int, int]:
    """Fill a cache, and return (bytes that the cache accounts for, bytes that Python has allocated)."""
    async with filled_cache as fill_cache:
        cached_values = await fill_cache()  # The first call imports modules and creates objects that all entries share.
        del cached_values
        gc.collect()
        charged_bytes = measure_named_caches().get(cache, 0)
        tracemalloc.start()
        try:
            cached_values = await fill_cache()
            gc.collect()
            held_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        charged_bytes = measure_named_caches()[cache] - charged_bytes
        del cached_values
        return charged_bytes, held_bytes
