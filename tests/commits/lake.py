"""A table written only by changes: real files with metrics, their ContentFile JSON, and their rows.

Rows are (id, part, value). The tests store the rows that a reader must see as plain Python tuples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa

from seamark.metaserver.commit.changes.commit_result import CommitResult
from seamark.metaserver.commit.changes.group_commit import Commits
from tests.api.client import Answer, Api
from tests.api.rest.stored import PATH_ID, POSITION_ID, encode_vector, write_parquet
from tests.waits import until

FIELDS = ((1, "id", pa.int64(), "long"), (2, "part", pa.int32(), "int"), (3, "value", pa.string(), "string"))
SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": number, "name": name, "required": False, "type": kind} for number, name, _, kind in FIELDS],
}
BY_PART = [{"name": "part", "transform": "identity", "source-id": 2, "field-id": 1000}]
Row = tuple[int | None, int | None, str | None]
_counts: WeakKeyDictionary[Commits, Counter[str]] = WeakKeyDictionary()
"""The number of changes of each table that are queued or in a group that is being committed, by server."""


def _patch_to_count_waiting_changes(commits: Commits) -> None:
    """Patch `commits`, if it is not patched yet, so that `_counts` has the number of waiting changes of each table."""
    if commits in _counts:
        return
    counts, queue = _counts.setdefault(commits, Counter()), commits._queue_and_wait

    async def count_job(namespace: tuple[str, ...], name: str, job: Any) -> CommitResult:
        counts[name] += 1
        try:
            return await queue(namespace, name, job)
        finally:
            counts[name] -= 1

    commits._queue_and_wait = count_job  # type: ignore[method-assign]


@dataclass
class CommitTable:
    """The table `db.<name>`. `spec` has the fields of partition spec 0: the identity of `part`, or none."""

    api: Api
    folder: Path
    name: str
    version: int
    spec: Sequence[dict[str, Any]]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    """The rows of each written data file, by path."""
    _file_numbers: Any = field(default_factory=itertools.count)

    @staticmethod
    async def create(
        api: Api, name: str = "t", *, version: int = 2, spec: Sequence[dict[str, Any]] = (), **properties: str
    ) -> CommitTable:
        body = {
            "name": name,
            "schema": SCHEMA,
            "partition-spec": {"spec-id": 0, "fields": list(spec)},
            "properties": {"format-version": str(version), **properties},
        }
        answer = await api("POST", "/v1/namespaces/db/tables", body)
        assert answer.status == 200, answer.raw
        folder = Path(answer.json["metadata"]["location"].removeprefix("file://"))
        (folder / "data").mkdir(parents=True)
        _patch_to_count_waiting_changes(api.server.components.commits)
        return CommitTable(api, folder, name, version, spec)

    @property
    def path(self) -> str:
        return f"/api/v1/tables/db/{self.name}/commit"

    async def commit(self, body: Mapping[str, Any], **options: Any) -> Any:
        """Commit a change that must succeed, and return the answer's JSON."""
        answer = await self.send(body, **options)
        assert answer.status == 200, answer.raw
        return answer.json

    async def send(self, body: Mapping[str, Any], **options: Any) -> Answer:
        return await self.api("POST", self.path, dict(body), **options)

    async def append(self, *row_groups: Sequence[Row], **options: Any) -> Any:
        """Write a data file for each group of rows, and commit all of them in one change.

        `options` are further keys of the request.
        """
        return await self.commit({"add": [self.write_data_file(rows) for rows in row_groups], **options})

    async def wait_for_changes(self, count: int) -> None:
        """Wait until `count` changes are in the table's queue, or in the group that is being committed."""
        counts = _counts[self.api.server.components.commits]
        await until(lambda: counts[self.name] == count)

    async def read_metadata(self) -> Any:
        answer = await self.api("GET", f"/v1/namespaces/db/tables/{self.name}")
        assert answer.status == 200, answer.raw
        return answer.json["metadata"]

    # Files

    def _create_path(self, ending: str) -> Path:
        return self.folder / "data" / f"{next(self._file_numbers):05d}{ending}"

    def _build_partition(self, part: int | None) -> list[Any]:
        return [part] if self.spec else []

    def write_data_file(self, rows: Sequence[Row], *, metrics: bool = True, path: Path | None = None) -> dict[str, Any]:
        """Write a Parquet file, and return its entry of a commit request.

        In a partitioned table, all rows must belong to one partition.

        Args:
            rows: (id, part, text) of each row.
            metrics: Whether the entry has counts and bounds of the columns.
            path: The path of the file. By default, it is a new path in the table.
        """
        path = path or self._create_path(".parquet")
        columns = list(zip(*rows, strict=True)) or [()] * len(FIELDS)
        write_parquet(
            path,
            {number: (name, pa.array(columns[index], kind)) for index, (number, name, kind, _) in enumerate(FIELDS)},
        )
        parts = {part for _, part, _ in rows}
        assert not self.spec or len(parts) == 1
        location = f"file://{path}"
        self.rows[location] = list(rows)
        document = {
            "content": "data",
            "file-path": location,
            "file-format": "parquet",
            "spec-id": 0,
            "partition": self._build_partition(parts.pop() if parts else None),
            "record-count": len(rows),
            "file-size-in-bytes": path.stat().st_size,
        }
        return document | (_build_metrics(columns) if metrics else {})

    def write_position_deletes(
        self, positions: Iterable[tuple[str, int]], part: int | None = None, *, names_data_file: bool = False
    ) -> dict[str, Any]:
        """Write a position delete file, and return its entry of a commit request.

        Args:
            positions: (path of the data file, position) of each deleted row.
            part: The partition of the delete file.
            names_data_file: Whether the entry names the data file. Then all positions must be of one data file.
        """
        sorted_positions = sorted(positions)
        path = self._create_path("-deletes.parquet")
        data_paths = pa.array([data_path for data_path, _ in sorted_positions], pa.string())
        row_positions = pa.array([position for _, position in sorted_positions], pa.int64())
        delete_columns = {PATH_ID: ("file_path", data_paths), POSITION_ID: ("pos", row_positions)}
        write_parquet(path, delete_columns)
        (first_path, _), (last_path, _) = sorted_positions[0], sorted_positions[-1]
        return {
            "content": "position-deletes",
            "file-path": f"file://{path}",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": self._build_partition(part),
            "record-count": len(sorted_positions),
            "file-size-in-bytes": path.stat().st_size,
            "lower-bounds": {"keys": [PATH_ID], "values": [first_path.encode().hex()]},
            "upper-bounds": {"keys": [PATH_ID], "values": [last_path.encode().hex()]},
            **({"referenced-data-file": first_path} if names_data_file else {}),
        }

    def write_vectors(self, positions: Mapping[str, Iterable[int]], part: int | None = None) -> list[dict[str, Any]]:
        """Write a Puffin file with a deletion vector for each data file, and return the entries of a commit request.

        Args:
            positions: The deleted positions by the path of the data file.
            part: The partition of all these data files if the table is partitioned.
        """
        path = self._create_path("-dv.puffin")
        data, vectors = b"PFA1", []
        for data_path, deleted_positions in positions.items():
            blob = encode_vector(deleted_positions)
            vectors.append((data_path, len(set(deleted_positions)), len(data), len(blob)))
            data += blob
        data += b"{}"
        path.write_bytes(data)
        return [
            {
                "content": "position-deletes",
                "file-path": f"file://{path}",
                "file-format": "puffin",
                "spec-id": 0,
                "partition": self._build_partition(part),
                "record-count": count,
                "file-size-in-bytes": len(data),
                "referenced-data-file": data_path,
                "content-offset": offset,
                "content-size-in-bytes": length,
            }
            for data_path, count, offset, length in vectors
        ]

    def write_equality_deletes(self, ids: Sequence[int], part: int | None = None) -> dict[str, Any]:
        """Write a file that deletes the rows with these ids, and return its entry of a commit request."""
        path = self._create_path("-equality.parquet")
        write_parquet(path, {1: ("id", pa.array(list(ids), pa.int64()))})
        return {
            "content": "equality-deletes",
            "file-path": f"file://{path}",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": self._build_partition(part),
            "record-count": len(ids),
            "file-size-in-bytes": path.stat().st_size,
            "equality-ids": [1],
        }


def _build_metrics(columns: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the counts of values and of nulls, and the exact bounds, of each column."""
    value_counts: dict[int, int] = {}
    null_counts: dict[int, int] = {}
    lower_bounds: dict[int, str] = {}
    upper_bounds: dict[int, str] = {}
    for (field_id, _, _, kind), column in zip(FIELDS, columns, strict=True):
        value_counts[field_id], null_counts[field_id] = len(column), sum(value is None for value in column)
        present_values = [value for value in column if value is not None]
        if present_values:
            lower_bounds[field_id], upper_bounds[field_id] = (
                _encode_hex(kind, min(present_values)),
                _encode_hex(kind, max(present_values)),
            )
    metrics: dict[str, dict[int, Any]] = {
        "value-counts": value_counts,
        "null-value-counts": null_counts,
        "lower-bounds": lower_bounds,
        "upper-bounds": upper_bounds,
    }
    return {name: {"keys": list(values), "values": list(values.values())} for name, values in metrics.items()}


def _encode_hex(kind: str, value: Any) -> str:
    if kind == "string":
        return str(value).encode().hex()
    return int(value).to_bytes(8 if kind == "long" else 4, "little", signed=True).hex()
