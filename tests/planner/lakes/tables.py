"""Hand-made tables with any number of snapshots, manifests and files, written below one folder.

Column 1, `id`, has the values 10 n to 10 n + 9 in file n; the table is partitioned by column 2, `day`.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import CacheDamaged
from seamark.metaserver.objects.forwarding import ForwardingObjects
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.answer.answer import ScanTaskWriter
from seamark.metaserver.planner.plan.planner import Planner, open_planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.settings.settings import Settings
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.lake import DATA, POSITION_DELETES, DataFile, DeleteFile
from tests.planner.lakes.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    PartitionField,
    Style,
    build_manifest_bytes,
    encode_manifest_list,
)
from tests.planner.lakes.metrics import ColumnMetrics

KINDS = {1: "long", 2: "int"}
DAY = PartitionField(1000, "day", 2, "identity")
SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "day", "required": False, "type": "int"},
    ],
}
PLAIN_STYLE = Style(has_shuffled_fields=False, sparse=False, codec="deflate", old_names=False, summaries=True, seed=0)
UNCOMPRESSED_STYLE = Style(
    has_shuffled_fields=False, sparse=False, codec="null", old_names=False, summaries=True, seed=0
)


class Table:
    """A table of format version 2 at `folder`. Each snapshot lists exactly the manifests that `commit` receives."""

    def __init__(self, folder: Path, *, style: Style = PLAIN_STYLE) -> None:
        self.folder = folder
        self.style = style
        self._snapshots: list[dict[str, Any]] = []
        self._uuid = uuid.UUID(int=random.Random(str(folder)).getrandbits(128))
        (folder / "metadata").mkdir(parents=True)

    def write_manifest(self, name: str, numbers: Iterable[int], *, day: int = 0, snapshot_id: int = 1) -> Manifest:
        """Write a manifest of the data files with these numbers, all of one day."""
        files = [self.make_file(number, day) for number in numbers]
        return self._write_manifest(name, files, content=0, day=day, snapshot_id=snapshot_id)

    def write_delete_manifest(
        self, name: str, numbers: Iterable[int], *, day: int = 0, snapshot_id: int = 1
    ) -> Manifest:
        """Write a manifest with a position delete file for each data file of `numbers`, and return it."""
        files = [
            DeleteFile(
                f"{self.folder.as_uri()}/data/d{number}.parquet",
                content=POSITION_DELETES,
                format="PARQUET",
                spec_id=0,
                partition=(day,),
                record_count=1,
                size=500,
                metrics={},
                referenced_path=self.make_file(number, day).path,
            )
            for number in numbers
        ]
        return self._write_manifest(name, files, content=1, day=day, snapshot_id=snapshot_id)

    def make_file(self, number: int, day: int) -> DataFile:
        metrics = {
            1: ColumnMetrics(10, 0, None, to_bytes("long", 10 * number), to_bytes("long", 10 * number + 9)),
            2: ColumnMetrics(10, 0, None, to_bytes("int", day), to_bytes("int", day)),
        }
        path = f"{self.folder.as_uri()}/data/{number:06d}.parquet"
        return DataFile(path, DATA, "PARQUET", 0, (day,), 10, 10_000, metrics, split_offsets=[4])

    def commit(self, snapshot_id: int, manifests: Sequence[Manifest]) -> Path:
        """Write the manifest list of a snapshot, and return its path.

        Also add the snapshot to the snapshots of the table in memory.
        """
        path = self.folder / "metadata" / f"snap-{snapshot_id}.avro"
        header = {"format-version": "2", "snapshot-id": str(snapshot_id)}
        rows = [(manifest, None) for manifest in manifests]
        path.write_bytes(encode_manifest_list(rows, version=2, style=self.style, header=header))
        self._snapshots.append(
            {
                "snapshot-id": snapshot_id,
                "sequence-number": snapshot_id,
                "timestamp-ms": 1_760_000_000_000 + snapshot_id,
                "manifest-list": path.as_uri(),
                "summary": {"operation": "append"},
                "schema-id": 0,
                **({"parent-snapshot-id": self._snapshots[-1]["snapshot-id"]} if self._snapshots else {}),
            }
        )
        return path

    @property
    def metadata(self) -> TableMetadata:
        return decode_table(
            json.dumps(self._build_json()).encode(), f"{self.folder.as_uri()}/metadata/v1.metadata.json"
        )

    @property
    def snapshots(self) -> list[dict[str, Any]]:
        """The snapshots of the metadata, oldest first."""
        return self._snapshots

    def write_metadata(self) -> str:
        """Write a metadata file to register with a catalog, and return its location."""
        path = self.folder / "metadata" / f"v{len(self._snapshots)}.metadata.json"
        path.write_text(json.dumps(self._build_json()))
        return path.as_uri()

    def _build_json(self) -> dict[str, Any]:
        location = self.folder.as_uri()
        last_snapshot = self._snapshots[-1]
        return {
            "format-version": 2,
            "table-uuid": str(self._uuid),
            "location": location,
            "last-sequence-number": last_snapshot["sequence-number"],
            "last-updated-ms": last_snapshot["timestamp-ms"],
            "last-column-id": 2,
            "current-schema-id": 0,
            "schemas": [SCHEMA],
            "default-spec-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": [DAY.build_json()]}],
            "last-partition-id": 1000,
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "current-snapshot-id": last_snapshot["snapshot-id"],
            "snapshots": self._snapshots,
            "refs": {"main": {"snapshot-id": last_snapshot["snapshot-id"], "type": "branch"}},
        }

    def _write_manifest(
        self, name: str, files: Sequence[DataFile | DeleteFile], content: int, day: int, snapshot_id: int
    ) -> Manifest:
        entries = [Entry(ADDED, snapshot_id, None, None, file) for file in files]
        data = build_manifest_bytes(
            entries,
            version=2,
            content=content,
            style=self.style,
            spec_id=0,
            fields=(DAY,),
            kinds=KINDS,
            schema=SCHEMA,
        )
        path = self.folder / "metadata" / f"{name}.avro"
        path.write_bytes(data)
        bound = to_bytes("int", day)
        summary = {"contains_null": False, "contains_nan": False, "lower_bound": bound, "upper_bound": bound}
        counts = {ADDED: (len(files), 10 * len(files)), EXISTING: (0, 0), DELETED: (0, 0)}
        return Manifest(
            path.as_uri(),
            len(data),
            content,
            0,
            snapshot_id,
            snapshot_id,
            snapshot_id,
            entries,
            [summary],
            counts=counts,
        )


def to_path(manifest: Manifest) -> Path:
    return Path(manifest.path.removeprefix("file://"))


class RecordingObjects(ForwardingObjects):
    """An object store that records the name of each file that is read, completely or by ranges.

    Complete reads of the file `hold` wait until `resume` is called.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.reads: list[str] = []
        self.ranges: list[str] = []
        self.hold = ""
        self.is_holding = False
        self._gate = asyncio.Event()

    def resume(self) -> None:
        self._gate.set()

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        name = location.rpartition("/")[2]
        self.reads.append(name)
        if name == self.hold:
            self.is_holding = True
            await self._gate.wait()
        return await self._stored_objects.read(location, limit_bytes=limit_bytes)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        self.ranges.append(location.rpartition("/")[2])
        return await self._stored_objects.read_range(location, start, length)


@asynccontextmanager
async def open_test_planner(
    folder: Path, wrap: Callable[[ObjectStore], ObjectStore] = lambda inner: inner, **arguments: Any
) -> AsyncIterator[Planner]:
    """Open a planner over the tables below `folder`.

    Args:
        folder: The warehouse, which also contains the home of the server.
        wrap: Wraps the object store, for example to record reads.
        arguments: Settings of the server. By default, there are two planning threads and no disk cache.
    """
    options = {"plan_disk_bytes": 0, "plan_threads": 2, **arguments}
    settings = Settings(home=folder / "home", warehouse=folder.as_uri(), **options)
    clock = SystemClock()
    async with open_objects(settings, clock) as objects, open_planner(settings, wrap(objects), clock) as planner:
        yield planner


async def plan_file_numbers(planner: Planner, metadata: TableMetadata, filter: Any = True, **request: Any) -> list[int]:
    """Return the numbers of the planned files in the plan's order, and check that the JSON answer has the same files.

    As the routes of the server do, plan again if the answer finds a damaged file of the local cache.
    """
    try:
        return await _list_planned_numbers(planner, metadata, filter, **request)
    except CacheDamaged:
        return await _list_planned_numbers(planner, metadata, filter, **request)


async def _list_planned_numbers(planner: Planner, metadata: TableMetadata, filter: Any, **request: Any) -> list[int]:
    scan = await planner.bind_and_plan(metadata, ScanRequest(filter=parse_expression(filter), **request))
    numbers = list_file_numbers(scan)
    tasks = json.loads(b"[" + b"".join(ScanTaskWriter(scan).write_tasks(scan.entry_ids)) + b"]")
    assert [_parse_number(task["data-file"]["file-path"]) for task in tasks] == numbers
    return numbers


def list_file_numbers(scan: ScanPlan) -> list[int]:
    entry_positions = (scan.view.locate(row) for row in scan.entry_ids.tolist())
    return [_parse_number(block.read_text("file_path", row) or "") for block, row in entry_positions]


def _parse_number(path: str) -> int:
    return int(path.rpartition("/")[2].removesuffix(".parquet"))


def build_filter_of_files(low: int, high: int) -> dict[str, Any]:
    """Return a filter that only rows of the files from number `low` to `high` can satisfy.

    The file with the number n has ids from 10 n to 10 n + 9.
    """
    lower_filter = {"type": "gt-eq", "term": "id", "value": 10 * low}
    return {"type": "and", "left": lower_filter, "right": {"type": "lt-eq", "term": "id", "value": 10 * high + 9}}


def build_day_filter(day: int) -> dict[str, Any]:
    return {"type": "eq", "term": "day", "value": day}
