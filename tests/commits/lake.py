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


def _count_waiting(commits: Commits) -> None:
    """Wrap the queue of these commits so that it counts the waiting jobs of each table."""
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
        _count_waiting(api.server.components.commits)
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

    async def append(self, *parts: Sequence[Row], **options: Any) -> Any:
        return await self.commit({"add": [self.write_data_file(rows) for rows in parts], **options})

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
        """Write a Parquet file of rows of one partition, and return its entry of a commit request."""
        path = path or self._create_path(".parquet")
        columns = list(zip(*rows, strict=True)) or [()] * len(FIELDS)
        write_parquet(
            path,
            {number: (name, pa.array(columns[index], kind)) for index, (number, name, kind, _) in enumerate(FIELDS)},
        )
        parts = {row[1] for row in rows}
        assert not self.spec or len(parts) == 1
        location = f"file://{path}"
        self.rows[location] = list(rows)
        document = {
            "content": "data",
            "file-path": location,
            "file-format": "parquet",
            "spec-id": 0,
            "partition": self._build_partition(rows[0][1] if rows else None),
            "record-count": len(rows),
            "file-size-in-bytes": path.stat().st_size,
        }
        return document | (_build_metrics(columns) if metrics else {})

    def write_position_deletes(
        self, positions: Iterable[tuple[str, int]], part: int | None = None, *, has_path_bounds: bool = False
    ) -> dict[str, Any]:
        """Write a file that deletes rows at (path, position), and return its entry of a commit request."""
        listed_positions = sorted(positions)
        path = self._create_path("-deletes.parquet")
        spots = {PATH_ID: ("file_path", pa.array([data_path for data_path, _ in listed_positions], pa.string()))}
        spots |= {POSITION_ID: ("pos", pa.array([index for _, index in listed_positions], pa.int64()))}
        write_parquet(path, spots)
        low, high = listed_positions[0][0].encode().hex(), listed_positions[-1][0].encode().hex()
        return {
            "content": "position-deletes",
            "file-path": f"file://{path}",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": self._build_partition(part),
            "record-count": len(listed_positions),
            "file-size-in-bytes": path.stat().st_size,
            "lower-bounds": {"keys": [PATH_ID], "values": [low]},
            "upper-bounds": {"keys": [PATH_ID], "values": [high]},
            **({"referenced-data-file": listed_positions[0][0]} if has_path_bounds else {}),
        }

    def write_vectors(self, positions: Mapping[str, Iterable[int]], part: int | None = None) -> list[dict[str, Any]]:
        """Return a Puffin file with a deletion vector for each data file."""
        path = self._create_path("-dv.puffin")
        data, results = b"PFA1", []
        for name, rows in positions.items():
            blob = encode_vector(rows)
            results.append((name, len(set(rows)), len(data), len(blob)))
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
                "referenced-data-file": name,
                "content-offset": offset,
                "content-size-in-bytes": length,
            }
            for name, count, offset, length in results
        ]

    def write_equality_deletes(self, ids: Sequence[int], part: int | None = None) -> dict[str, Any]:
        """Return an equality delete file for the rows with these ids."""
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
    """Return count and exact bounds of each column."""
    counts: dict[int, int] = {}
    nulls: dict[int, int] = {}
    lower: dict[int, str] = {}
    upper: dict[int, str] = {}
    for (number, _, _, kind), column in zip(FIELDS, columns, strict=True):
        counts[number], nulls[number] = len(column), sum(value is None for value in column)
        present_values = [value for value in column if value is not None]
        if present_values:
            lower[number], upper[number] = (
                _encode_hex(kind, min(present_values)),
                _encode_hex(kind, max(present_values)),
            )
    return {name: {"keys": list(values), "values": list(values.values())} for name, values in (
        ("value-counts", counts), ("null-value-counts", nulls), ("lower-bounds", lower), ("upper-bounds", upper),
    )}  # fmt: skip


def _encode_hex(kind: str, value: Any) -> str:
    if kind == "string":
        return str(value).encode().hex()
    return int(value).to_bytes(8 if kind == "long" else 4, "little", signed=True).hex()
