"""Tests of the caches in /metrics.

Each cache is listed by name, with a size within a tenth of the memory that it uses.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from seamark.cache.memory import ENTRY_OVERHEAD_BYTES, MemoryCache, measure_named_caches
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.metaserver.catalog.documents import estimate_memory
from tests.api.client import Api
from tests.server.rig import run_server
from tests.server.test_operation import read_metrics

REPO = Path(__file__).resolve().parents[2]
REPORTED_BY_OWNER = {
    "metaserver/planner/plan/cached_views.py",  # These plans belong to a view, and `views` includes them.
    "metaserver/planner/plan/planner.py",  # The size of this cache is not counted, because views keep its blocks alive.
}
"""Files whose caches have no name, because another object reports their size."""


CACHE_CLASSES = ("MemoryCache", "SharedCache", "AdmittingCache")


def find_caches() -> Iterator[tuple[str, str]]:
    """Yield (file, name) of every cache that the server creates. The name is empty if it is no constant."""
    for path in sorted(
        path for package in ("formats", "metaserver", "commands") for path in (REPO / package).rglob("*.py")
    ):
        text = path.read_text()
        if not any(name in text for name in CACHE_CLASSES):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            # The call may have type parameters.
            called_name = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            if isinstance(called_name, ast.Name) and called_name.id in CACHE_CLASSES:
                names = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
                name_argument = names[0] if names else node.args[1] if len(node.args) > 1 else None
                yield (
                    str(path.relative_to(REPO)),
                    str(name_argument.value) if isinstance(name_argument, ast.Constant) else "",
                )


def test_every_cache_is_reported_and_documented() -> None:
    actual_caches = list(find_caches())
    assert len(actual_caches) > 15
    assert {file for file, name in actual_caches if not name} == REPORTED_BY_OWNER
    page = (REPO / "docs/how-to/operate.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `seamark_cache_memory_bytes`"))
    assert set(re.findall(r"`([\w-]+)`", row)) - {"seamark_cache_memory_bytes", "cache"} == {
        "views",
        *(name for _, name in actual_caches if name),
    }


@pytest.mark.slow
def test_sizes_of_existing_caches_with_the_same_name_are_added() -> None:
    cache: MemoryCache[int, bytes] = MemoryCache(10_000, "test-cache")
    other_cache: MemoryCache[int, bytes] = MemoryCache(10_000, "test-cache")
    cache.put(1, b"", 100)
    other_cache.put(1, b"", 1000)
    assert measure_named_caches()["test-cache"] == 1100 + 2 * ENTRY_OVERHEAD_BYTES
    del other_cache
    gc.collect()
    assert measure_named_caches()["test-cache"] == 100 + ENTRY_OVERHEAD_BYTES


async def test_metrics_report_the_current_sizes_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.metaserver.api.sampling.SAMPLE_INTERVAL_S", 0.02)
    async with run_server(tmp_path) as server:
        api = Api(server)
        await api.create_table("t")
        path = "/v1/namespaces/db/tables/t"
        assert (await api("GET", path)).status == 200
        assert (await api("POST", f"{path}/plan", {})).status == 200
        format_sample_name = "seamark_cache_memory_bytes{{cache={}}}".format

        async def is_reported() -> bool:
            used_bytes, actual_scrape = measure_named_caches(), await read_metrics(server)
            planner = server.components.planner.read_stats()
            used_bytes["views"] = planner.live_bytes + planner.added_bytes
            return used_bytes["metadata"] > 0 and all(
                actual_scrape.get(format_sample_name(name)) == size for name, size in used_bytes.items()
            )

        async with asyncio.timeout(60):
            while not await is_reported():
                await asyncio.sleep(0.02)


def build_table_json(columns: int, snapshots: int) -> bytes:
    """Return the metadata file of a table with these numbers of columns and snapshots."""
    numbers = range(1, snapshots + 1)
    summary = {"operation": "append", "added-data-files": "12", "added-records": "120000", "total-records": "1200000"}
    summary |= {"total-data-files": "100", "spark.app.id": "application-2024-1", "added-files-size": "123456789"}
    fields = [{"id": i, "name": f"column_{i}", "required": False, "type": "long"} for i in range(1, columns + 1)]
    table = {
        "format-version": 2,
        "table-uuid": "00000000-0000-0000-0000-000000000001",
        "location": "s3://bucket/warehouse/db/table",
        "last-sequence-number": snapshots,
        "last-updated-ms": 1_760_000_000_000,
        "last-column-id": columns,
        "current-schema-id": 0,
        "schemas": [{"type": "struct", "schema-id": 0, "fields": fields}],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {"write.format.default": "parquet"},
        "current-snapshot-id": snapshots,
        "refs": {"main": {"snapshot-id": snapshots, "type": "branch"}},
        "snapshots": [
            {
                "snapshot-id": i,
                "sequence-number": i,
                "timestamp-ms": 1_760_000_000_000 + i,
                "manifest-list": f"s3://bucket/warehouse/db/table/metadata/snap-{i}-1-0f3a7bb1.avro",
                "summary": summary,
                "schema-id": 0,
            }
            for i in numbers
        ],
        "snapshot-log": [{"timestamp-ms": 1_760_000_000_000 + i, "snapshot-id": i} for i in numbers],
        "metadata-log": [],
    }
    return json.dumps(table, separators=(",", ":")).encode()


def load_metadata(document: bytes) -> TableMetadata:
    """Decode metadata, and compute the derived values that it keeps: the schema's index and the snapshots by id."""
    # Each table has its own copy of the document, as after a read from the storage.
    metadata = decode_table(bytes(bytearray(document)), "t")
    assert metadata.current_schema.index
    assert metadata.snapshots_by_id
    return metadata


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("columns", "snapshots"),
    [(20, 1), (300, 100), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((20, 100), (300, 1), (20, 1000)))],
)
def test_decoded_metadata_is_accounted_with_its_memory(columns: int, snapshots: int) -> None:
    document = build_table_json(columns, snapshots)
    load_metadata(document)
    gc.collect()
    tracemalloc.start()
    try:
        tables = [load_metadata(document) for _ in range(4)]
        held_bytes = tracemalloc.get_traced_memory()[0] / len(tables)
    finally:
        tracemalloc.stop()
    counted_bytes = estimate_memory(tables[0], len(document))
    assert abs(counted_bytes - held_bytes) < held_bytes / 10, (
        f"{counted_bytes:,} bytes are counted, but {held_bytes:,.0f} are allocated"
    )
