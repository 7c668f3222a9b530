"""Tables of real files for joins: any schema, evolving; Parquet with field ids, position deletes, partitions, indexes.

Committed over HTTP; rows are known, so that what a join says of them can be had from elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from connector.indexing import DataFile as Indexed
from connector.indexing import IndexTask, index_data_files
from connector.parquet.columns import Projection
from metaserver.iceberg.table_json import decode_table
from metaserver.index.definitions import of_id
from tests.api.client import Api
from tests.api.stored import PATH_ID, POSITION_ID, STYLE
from tests.planner.indexing import array_of
from tests.planner.kinds import FLOATS, order, to_bytes
from tests.planner.lake import DataFile, DeleteFile
from tests.planner.manifests import (
    ADDED,
    DELETED,
    EXISTING,
    Entry,
    Manifest,
    PartitionField,
    list_bytes,
    manifest_bytes,
)
from tests.planner.metrics import ColumnMetrics, column_metrics

Row = dict[str, Any]
"""By column name, in the form of `kinds.py`."""


@dataclass(frozen=True)
class Col:
    id: int
    name: str
    kind: str
    default: Any = None
    """In JSON, for files that were written before the column."""

    def json(self) -> dict[str, Any]:
        said = {"id": self.id, "name": self.name, "required": False, "type": self.kind}
        return said if self.default is None else {**said, "initial-default": self.default}


@dataclass
class StarTable:
    """A table of namespace `db`. `rows` are those of each live data file, deleted ones included."""

    api: Api
    name: str
    folder: Path
    version: int
    columns: list[Col]
    parts: tuple[PartitionField, ...] = ()
    data: list[DataFile] = field(default_factory=list)
    deletes: list[DeleteFile] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    gone: dict[str, set[int]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    snapshots: int = 0
    made: int = 0
    next_row_id: int = 0

    @staticmethod
    async def create(
        api: Api, name: str, columns: Sequence[Col], *, version: int = 2, parts: Sequence[PartitionField] = ()
    ) -> StarTable:
        schema = {"type": "struct", "schema-id": 0, "fields": [one.json() for one in columns]}
        body = {
            "name": name,
            "schema": schema,
            "partition-spec": {"spec-id": 0, "fields": [one.json() for one in parts]},
            "properties": {"format-version": str(version)},
        }
        answer = await api("POST", "/v1/namespaces/db/tables", body)
        assert answer.status == 200, answer.raw
        folder = Path(answer.json["metadata"]["location"].removeprefix("file://"))
        (folder / "data").mkdir(parents=True)
        return StarTable(api, name, folder, version, list(columns), tuple(parts), schemas=[schema])

    @property
    def kinds(self) -> dict[int, str]:
        return {one.id: one.kind for one in self.columns}

    async def evolve(self, columns: Sequence[Col]) -> None:
        """The schema has these columns from now on."""
        schema = {"type": "struct", "schema-id": len(self.schemas), "fields": [one.json() for one in columns]}
        updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
        answer = await self.api(
            "POST", f"/v1/namespaces/db/tables/{self.name}", {"requirements": [], "updates": updates}
        )
        assert answer.status == 200, answer.raw
        self.columns = list(columns)
        self.schemas.append(schema)

    def file(self, rows: Sequence[Row], *, rng: random.Random | None = None) -> DataFile:
        """A data file of these rows, with the columns of the schema as it is now. With `rng` it has metrics as one of
        many writers makes them, else such as tell everything."""
        self.made += 1
        path = self.folder / "data" / f"{self.made:05d}.parquet"
        write(path, {one.id: (one.name, array_of(one.kind, [row[one.name] for row in rows])) for one in self.columns})
        partition = tuple(_partition(self, part, rows) for part in self.parts)
        metrics = {}
        for one in self.columns:
            values = [row[one.name] for row in rows]
            metrics[one.id] = whole_metrics(one.kind, values) if rng is None else column_metrics(rng, one.kind, values)
        made = DataFile(f"file://{path}", 0, "PARQUET", 0, partition, len(rows), path.stat().st_size, metrics)
        self.rows[made.path] = list(rows)
        return made

    def position_deletes(self, file: DataFile, positions: Iterable[int]) -> DeleteFile:
        self.made += 1
        listed = sorted(positions)
        path = self.folder / "data" / f"{self.made:05d}-deletes.parquet"
        spots = {PATH_ID: ("file_path", pa.array([file.path] * len(listed), pa.string()))}
        write(path, {**spots, POSITION_ID: ("pos", pa.array(listed, pa.int64()))})
        self.gone.setdefault(file.path, set()).update(listed)
        return DeleteFile(
            f"file://{path}", 1, "PARQUET", 0, file.partition, len(listed), path.stat().st_size, {},
            referenced=file.path, positions=frozenset((file.path, one) for one in listed),
        )  # fmt: skip

    async def commit(
        self, data: Sequence[DataFile] = (), deletes: Sequence[DeleteFile] = (), removed: Iterable[str] = ()
    ) -> int:
        """A snapshot of what there was without those removed, and these; its id."""
        loaded = (await self.api("GET", f"/v1/namespaces/db/tables/{self.name}")).json["metadata"]
        sequence, before = loaded["last-sequence-number"] + 1, self.snapshots
        self.snapshots += 1
        gone, number = set(removed), self.snapshots
        self.data = [one for one in self.data if one.path not in gone]
        self.data += [replace(one, sequence=sequence, snapshot_id=number) for one in data]
        self.deletes += [replace(one, sequence=sequence, snapshot_id=number) for one in deletes]
        manifests = [
            self._manifest(files, content, number, sequence)
            for content, files in ((0, self.data), (1, self.deletes))
            if files
        ]
        path = self.folder / "metadata" / f"snap-{number}.avro"
        path.parent.mkdir(exist_ok=True)
        first = self.next_row_id
        listed = [(one, first if self.version > 2 and one.content == 0 else None) for one in manifests]
        header = {"format-version": str(self.version)}
        path.write_bytes(list_bytes(listed, version=self.version, style=STYLE, header=header))
        rows = sum(one.record_count for one in self.data)
        self.next_row_id += rows
        body = {
            "snapshot-id": number,
            "sequence-number": sequence,
            "timestamp-ms": loaded["last-updated-ms"] + 1,
            "manifest-list": f"file://{path}",
            "summary": {"operation": "append"},
            "schema-id": len(self.schemas) - 1,
            **({"parent-snapshot-id": before} if before else {}),
            **({"first-row-id": first, "added-rows": rows} if self.version > 2 else {}),
        }
        ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": number}
        updates = [{"action": "add-snapshot", "snapshot": body}, ref]
        answer = await self.api(
            "POST", f"/v1/namespaces/db/tables/{self.name}", {"requirements": [], "updates": updates}
        )
        assert answer.status == 200, answer.raw
        return number

    def _manifest(self, files: Sequence[Any], content: int, snapshot_id: int, sequence: int) -> Manifest:
        entries = [
            Entry(ADDED if one.sequence == sequence else EXISTING, one.snapshot_id, one.sequence, one.sequence, one)
            for one in files
        ]
        data = manifest_bytes(
            entries, version=self.version, content=content, style=STYLE, spec_id=0, fields=self.parts,
            kinds=self.kinds, schema=self.schemas[-1],
        )  # fmt: skip
        path = self.folder / "metadata" / f"m-{snapshot_id}-{content}.avro"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        counts = dict.fromkeys((ADDED, EXISTING, DELETED), (0, 0))
        for entry in entries:
            files_of, rows_of = counts[entry.status]
            counts[entry.status] = (files_of + 1, rows_of + entry.file.record_count)
        least = min(one.sequence for one in files)
        return Manifest(
            f"file://{path}", len(data), content, 0, sequence, least, snapshot_id, entries, None, counts=counts
        )

    async def index(self, name: str, kind: str, columns: Sequence[str], files: Sequence[DataFile]) -> bool:
        """Defines it, and builds it for these files; whether it describes all of them."""
        route = f"/api/v1/tables/db/{self.name}/indexes/{name}"
        answer = await self.api("PUT", route, {"kind": kind, "columns": list(columns)})
        assert answer.status == 200, answer.raw
        build = (await self.api("POST", f"{route}/builds")).json
        location = (await self.api("GET", f"/v1/namespaces/db/tables/{self.name}")).json["metadata-location"]
        schema = decode_table(Path(location.removeprefix("file://")).read_bytes(), location).current_schema
        definition = of_id(build["definition-id"], schema)
        task = IndexTask(build["table-uuid"], definition, Projection(schema), build["folder"])
        written = index_data_files(task, [Indexed(one.path, one.size, one.record_count) for one in files])
        if written.location is None:
            return False
        file = {"location": written.location, "size-in-bytes": written.size_bytes}
        builds = f"{route}/builds/{build['build-id']}"
        assert (await self.api("POST", f"{builds}/index-files", {"index-files": [file]})).status == 200
        assert (await self.api("POST", f"{builds}/finish", {"outcome": "completed"})).status == 200
        return not written.skipped


def whole_metrics(kind: str, values: Sequence[Any]) -> ColumnMetrics:
    """All that there is to tell; nothing of floats."""
    present = sorted((one for one in values if one is not None), key=lambda value: order(kind, value))
    if kind in FLOATS:
        return ColumnMetrics()
    lower, upper = (to_bytes(kind, present[place]) if present else None for place in (0, -1))
    return ColumnMetrics(len(values), len(values) - len(present), None, lower, upper)


def _partition(table: StarTable, part: PartitionField, rows: Sequence[Row]) -> Any:
    """The value that all rows share: partitions are by identity."""
    assert part.transform == "identity"
    name = next(one.name for one in table.columns if one.id == part.source)
    (value,) = {row[name] for row in rows}
    return value


def write(path: Path, columns: dict[int, tuple[str, pa.Array]]) -> None:
    fields = [
        pa.field(name, array.type, metadata={"PARQUET:field_id": str(number)})
        for number, (name, array) in columns.items()
    ]
    pq.write_table(pa.table([array for _, array in columns.values()], schema=pa.schema(fields)), path)
