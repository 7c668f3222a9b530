"""Tables of real files for joins: Parquet with field ids, position deletes, partitions, indexes, evolving schemas.

The tables are committed over HTTP. Their rows are known, so that joins can be compared with another engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from seamark.connector.index.files import DataFile as Indexed
from seamark.connector.index.files import IndexTask, index_data_files
from seamark.connector.parquet.columns import Projection
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import parse_definition
from tests.api.client import Api
from tests.api.live import LiveTable
from tests.api.rest.stored import PATH_ID, POSITION_ID, write_parquet
from tests.planner.lakes.indexing import build_array
from tests.planner.lakes.kinds import FLOATS, compute_sort_key, to_bytes
from tests.planner.lakes.lake import DataFile, DeleteFile
from tests.planner.lakes.manifests import PartitionField
from tests.planner.lakes.metrics import ColumnMetrics, draw_metrics

Row = dict[str, Any]
"""Values by column name, in the form of `kinds.py`."""


@dataclass(frozen=True)
class Col:
    id: int
    name: str
    kind: str
    default: Any = None
    """The default value in JSON, for files that were written before the column was added."""

    def build_json(self) -> dict[str, Any]:
        column_json = {"id": self.id, "name": self.name, "required": False, "type": self.kind}
        return column_json if self.default is None else {**column_json, "initial-default": self.default}


@dataclass(kw_only=True)
class StarTable(LiveTable):
    """A table with known rows. `rows` has the rows of each data file, including deleted rows."""

    columns: list[Col]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    deleted_positions: dict[str, set[int]] = field(default_factory=dict)

    @staticmethod
    async def create(
        api: Api, name: str, columns: Sequence[Col], *, version: int = 2, parts: Sequence[PartitionField] = ()
    ) -> StarTable:
        return await StarTable.make(api, name, _build_schema(0, columns), parts, version, columns=list(columns))

    async def evolve(self, columns: Sequence[Col]) -> None:
        """Replace the columns of the schema."""
        self.schema = _build_schema(self.schema["schema-id"] + 1, columns)
        self.columns = list(columns)
        await self.update(
            {"action": "add-schema", "schema": self.schema}, {"action": "set-current-schema", "schema-id": -1}
        )

    def write_file(self, rows: Sequence[Row], *, rng: random.Random | None = None) -> DataFile:
        """Write a Parquet file of these rows with the columns of the current schema, and remember its rows.

        The metrics of the file are complete. With `rng`, random metrics are missing.
        """
        path = self.make_path(".parquet")
        write_parquet(
            path,
            {
                column.id: (column.name, build_array(column.kind, [row[column.name] for row in rows]))
                for column in self.columns
            },
        )
        partition = tuple(_compute_partition(self, part, rows) for part in self.parts)
        metrics = {}
        for column in self.columns:
            values = [row[column.name] for row in rows]
            metrics[column.id] = (
                make_whole_metrics(column.kind, values) if rng is None else draw_metrics(rng, column.kind, values)
            )
        data_file = DataFile(
            f"file://{path}", content=0, format="PARQUET", spec_id=0, partition=partition, record_count=len(rows),
            size=path.stat().st_size, metrics=metrics,
        )  # fmt: skip
        self.rows[data_file.path] = list(rows)
        return data_file

    def write_position_deletes(self, file: DataFile, positions: Iterable[int]) -> DeleteFile:
        listed_positions = sorted(positions)
        path = self.make_path("-deletes.parquet")
        path_column = {PATH_ID: ("file_path", pa.array([file.path] * len(listed_positions), pa.string()))}
        write_parquet(path, {**path_column, POSITION_ID: ("pos", pa.array(listed_positions, pa.int64()))})
        self.deleted_positions.setdefault(file.path, set()).update(listed_positions)
        return DeleteFile(
            f"file://{path}", 1, "PARQUET", 0, file.partition, len(listed_positions), path.stat().st_size, {},
            referenced_path=file.path, positions=frozenset((file.path, item) for item in listed_positions),
        )  # fmt: skip

    async def index(self, name: str, kind: str, columns: Sequence[str], files: Sequence[DataFile]) -> bool:
        """Define an index and build it for these files, and return whether it covers all of them."""
        route = f"/api/v1/tables/db/{self.name}/indexes/{name}"
        answer = await self.api("PUT", route, {"kind": kind, "columns": list(columns)})
        assert answer.status == 200, answer.raw
        build = (await self.api("POST", f"{route}/builds")).json
        location = (await self.api("GET", f"/v1/namespaces/db/tables/{self.name}")).json["metadata-location"]
        schema = decode_table(Path(location.removeprefix("file://")).read_bytes(), location).current_schema
        definition = parse_definition(build["definition-id"], schema)
        task = IndexTask(build["table-uuid"], definition, Projection(schema), build["folder"])
        written_index = index_data_files(task, [Indexed(file.path, file.size, file.record_count) for file in files])
        if written_index.location is None:
            return False
        file = {"location": written_index.location, "size-in-bytes": written_index.size_bytes}
        builds = f"{route}/builds/{build['build-id']}"
        assert (await self.api("POST", f"{builds}/index-files", {"index-files": [file]})).status == 200
        assert (await self.api("POST", f"{builds}/finish", {"outcome": "completed"})).status == 200
        return not written_index.skipped


def _build_schema(number: int, columns: Sequence[Col]) -> dict[str, Any]:
    return {"type": "struct", "schema-id": number, "fields": [column.build_json() for column in columns]}


def make_whole_metrics(kind: str, values: Sequence[Any]) -> ColumnMetrics:
    """Return complete metrics. Bounds of floats do not include NaN."""
    nulls, nans = sum(value is None for value in values), sum(value != value for value in values)
    ordered_values = sorted(
        (value for value in values if value is not None and value == value),
        key=lambda value: compute_sort_key(kind, value),
    )
    lower, upper = (to_bytes(kind, ordered_values[position]) if ordered_values else None for position in (0, -1))
    return ColumnMetrics(len(values), nulls, nans if kind in FLOATS else None, lower, upper)


def _compute_partition(table: StarTable, part: PartitionField, rows: Sequence[Row]) -> Any:
    """Return the partition value that all rows share; partitions use the identity transform."""
    assert part.transform == "identity"
    name = next(column.name for column in table.columns if column.id == part.source)
    (value,) = {row[name] for row in rows}
    return value
