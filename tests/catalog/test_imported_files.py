"""Tests of the check of the files that the metadata of an imported table name."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MetadataLogEntry
from seamark.formats.runtime.errors import BadRequest, NotFound, TooLarge
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog import imports
from seamark.metaserver.catalog.documents import METADATA_BYTES_MAX
from seamark.metaserver.objects.warehouse import Warehouse
from tests.catalog.rig import CALLER, CatalogRig, open_rig
from tests.seeds import examples, first_seed
from tests.warehouses.world import run_server_with_warehouses

ROOTS = ("s3://lake/t", "file:///lake/t", "abfss://lake@account.dfs.core.windows.net/t", "hdfs://lake/t")
FOLDERS = ("", "/", "/m", "/m/", "/m/..", "/%2e%2e", "/m%2f", "2", "/..", "/m/.", "/m?x", "//m", "/.snapshot")
NAMES = (
    "a.avro",
    "b-1_c.json",
    "..",
    ".",
    "",
    "a.",
    ".snapshot",
    "%2e%2e",
    "a%2Favro",
    "a?b",
    "a#",
    "a\\b",
    "a:b",
    "a\n",
)


def build_metadata(location: str, metadata_files: list[str]) -> TableMetadata:
    """Return metadata of a table without snapshots, whose log has these earlier metadata files."""
    return TableMetadata(
        format_version=2,
        table_uuid="00000000-0000-4000-8000-000000000000",
        location=location,
        last_updated_ms=0,
        last_column_id=0,
        schemas=(),
        current_schema_id=0,
        partition_specs=(),
        default_spec_id=0,
        last_partition_id=0,
        sort_orders=(),
        default_sort_order_id=0,
        metadata_log=tuple(MetadataLogEntry(0, file) for file in metadata_files),
    )


def is_own_file(location: str, file: str) -> bool:
    root = parse_location(location)
    try:
        parsed_file = parse_location(file)
    except BadRequest:
        return False
    return root.holds(parsed_file) and root != parsed_file


def test_files_of_one_folder_are_checked_like_each_file_alone() -> None:
    seed = first_seed()
    accepted_count = 0
    for number in range(seed, seed + examples(20_000, 2000)):
        rng = random.Random(number)
        root = rng.choice(ROOTS)
        bucket = root.partition("://")[2]
        warehouse = Warehouse(root.removesuffix("/t"))
        files = []
        for _ in range(rng.randint(1, 4)):
            # Most folders and names are valid, so that some lists have only valid files.
            folder = rng.choice((*[root] * 12, root.upper().replace(bucket.upper(), bucket), "s3://lake/u"))
            # The long name makes the location longer than `LOCATION_CHARS_MAX`.
            name = rng.choice((*NAMES, *["a.avro"] * 20, *["x" * 4090] * 2))
            files.append(f"{folder}{rng.choice((*FOLDERS, *['/m'] * 20))}/{name}")
        expected = all(is_own_file(root, file) for file in files)
        accepted_count += expected
        try:
            imports.check_table_locations(warehouse, build_metadata(root, files), f"{root}/m/v1.metadata.json")
        except BadRequest:
            assert not expected, (number, files)
        else:
            assert expected, (number, files)
    assert accepted_count


def test_metadata_with_too_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "FILE_NAMES_MAX", 3)
    files = [f"s3://lake/t/m/{number}.json" for number in range(4)]
    location = "s3://lake/t/m/v1.metadata.json"
    imports.check_table_locations(Warehouse("s3://lake"), build_metadata("s3://lake/t", files[:3]), location)
    with pytest.raises(BadRequest, match="more than 3 files"):
        imports.check_table_locations(Warehouse("s3://lake"), build_metadata("s3://lake/t", files), location)


async def write_table(rig: CatalogRig, name: str, file_count: int) -> str:
    """Write a metadata file that names `file_count` earlier metadata files, and return its location."""
    await rig.create_table(name)
    loaded_table = await rig.catalog.tables.load(("db",), name)
    assert loaded_table.entry is not None
    location = loaded_table.entry.metadata_location
    document: dict[str, Any] = json.loads(await rig.objects.read(location))
    table_location = f"{document['location']}-{file_count}"
    log = [
        {"metadata-file": f"{table_location}/metadata/{number}.json", "timestamp-ms": 1} for number in range(file_count)
    ]
    document |= {"location": table_location, "table-uuid": str(rig.catalog.context.clock.uuid4()), "metadata-log": log}
    new_location = f"{table_location}/metadata/v1.metadata.json"
    await rig.objects.create(new_location, json.dumps(document).encode())
    return new_location


async def test_many_files_are_checked_outside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    are_in_main_thread: list[bool] = []
    check = imports.check_table_locations

    def record_thread(warehouse: Warehouse, metadata: TableMetadata, location: str) -> None:
        are_in_main_thread.append(threading.current_thread() is threading.main_thread())
        check(warehouse, metadata, location)

    monkeypatch.setattr(imports, "check_table_locations", record_thread)
    async with open_rig(tmp_path) as rig:
        for files in (10, 1000):
            location = await write_table(rig, f"t{files}", files)
            await rig.catalog.imports.import_table(CALLER, ("db",), f"i{files}", location, dry_run=False)
    assert are_in_main_thread == [True, False]


async def test_all_warehouses_together_read_one_large_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_reads = 0
    running_reads: list[str] = []
    has_overlap = False

    async def read(self: imports.Imports, location: str, limit_bytes: int) -> TableMetadata:
        nonlocal small_reads, has_overlap
        if limit_bytes < METADATA_BYTES_MAX:
            small_reads += 1
            raise TooLarge("The file is large")
        running_reads.append(location)
        while small_reads < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # The other import now reads the large file, or waits.
        has_overlap |= len(running_reads) > 1
        running_reads.remove(location)
        raise NotFound("The file does not exist")

    monkeypatch.setattr(imports.Imports, "_read_table", read)
    async with run_server_with_warehouses(tmp_path, "sales", "stock") as world:
        for name in ("sales", "stock"):
            assert (await world.send("POST", f"/v1/{name}/namespaces", {"namespace": ["db"]}))[0] == 200
        answers = await asyncio.gather(
            *(
                world.send(
                    "PUT",
                    f"/warehouses/{name}/api/v1/tables/db/t/import",
                    {"metadata-location": f"file://{world.lake / name}/t/metadata/v1.metadata.json"},
                )
                for name in ("sales", "stock")
            )
        )
    assert [status for status, _ in answers] == [404, 404], answers
    assert small_reads == 2
    assert not has_overlap
