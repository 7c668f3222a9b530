"""Other threads read small files ahead of their use.

The rows, their order and the errors stay the same.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seamark.connector.client.storage import Storage
from seamark.connector.read import read_ahead
from seamark.connector.read.read_ahead import read_tasks
from seamark.connector.read.read_plan import ReadPlan
from seamark.connector.read.tables import ScanTask
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types import schema as seamark_schema
from tests.connector.read.test_reading_schemas import create_new_table
from tests.seeds import first_seed

ARROW = pa.schema([pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "1"})])
SCHEMA = seamark_schema.Schema((seamark_schema.Field(1, "id", False, "long"),), 0)
DELETES = pa.schema(
    [
        pa.field("file_path", pa.string(), metadata={"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), metadata={"PARQUET:field_id": "2147483545"}),
    ]
)


def _build_read_plan(folder: Path) -> ReadPlan:
    return ReadPlan(create_new_table(SCHEMA, PartitionSpec(0, ()), folder), SCHEMA, ("id",), positions=True)


def _write_task(path: Path, values: list[int], deleted_positions: list[int] | None = None) -> ScanTask:
    """Write a data file with several row groups and, if rows are deleted, a delete file, and return its scan task."""
    pq.write_table(pa.table([values], schema=ARROW), path, row_group_size=max(1, len(values) // 3))
    deletes: tuple[dict[str, Any], ...] = ()
    if deleted_positions:
        delete_path = path.with_suffix(".deletes.parquet")
        rows = [[path.as_uri()] * len(deleted_positions), deleted_positions]
        pq.write_table(pa.table(rows, schema=DELETES), delete_path)
        size = delete_path.stat().st_size
        deletes = ({"content": "position-deletes", "file-path": delete_path.as_uri(), "file-format": "parquet",
                    "spec-id": 0, "partition": [], "record-count": len(deleted_positions),
                    "file-size-in-bytes": size},)  # fmt: skip
    file = {"file-path": path.as_uri(), "file-format": "parquet", "record-count": len(values), "spec-id": 0,
            "partition": [], "file-size-in-bytes": path.stat().st_size}  # fmt: skip
    return ScanTask(file, deletes)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits that are near the size of the test's files, which are a few kilobytes."""
    for name, value in (
        ("_SMALL_FILE_BYTES_MAX", 2000),
        ("_READ_BYTES_MAX", 5000),
        ("_READ_FILES_MAX", 3),
        ("_READ_ROWS_MAX", 150),
    ):
        monkeypatch.setattr(read_ahead, name, value)


def test_read_ahead_returns_all_files_in_order_with_their_rows(tmp_path: Path) -> None:
    """Files are large, small or empty, with and without deletes. The written lists are the expected rows."""
    rng = random.Random(first_seed())
    tasks, expected = [], []
    for number in range(60):
        values = [rng.randrange(10**12) for _ in range(rng.choice([0, 1, 5, 40, 140, 151, 400]))]
        deleted_rows = sorted(rng.sample(range(len(values)), len(values) // 4)) if rng.random() < 0.3 else []
        task = _write_task(tmp_path / f"{number}.parquet", values, deleted_rows)
        tasks.append(task)
        expected.append(
            (task.path, [(value, index) for index, value in enumerate(values) if index not in deleted_rows])
        )
    assert len({read_ahead._is_small(task) for task in tasks}) == 2
    actual = []
    for task, batches in read_tasks(_build_read_plan(tmp_path), Storage(), tasks):
        rows = [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
        actual.append((task.path, rows))
    assert actual == expected


def test_unreadable_file_raises_an_error_after_the_files_before_it(tmp_path: Path) -> None:
    tasks = [_write_task(tmp_path / f"{number}.parquet", [number]) for number in range(40)]
    Path(tmp_path / "25.parquet").write_bytes(b"no Parquet")
    values: list[list[int]] = []

    def read_all() -> None:
        for _, batches in read_tasks(_build_read_plan(tmp_path), Storage(), tasks):
            values.extend(batch.column(0).to_pylist() for batch in batches)

    with pytest.raises(Unreadable, match=r"25\.parquet: the file cannot be read"):
        read_all()
    assert values == [[number] for number in range(len(values))]
    assert len(values) > 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_reader_that_stops_early_leaves_no_thread_and_requests_few_files(tmp_path: Path) -> None:
    tasks = [_write_task(tmp_path / f"{number}.parquet", [number]) for number in range(200)]
    requested_tasks: list[ScanTask] = []

    def request_tasks() -> Iterator[ScanTask]:
        for task in tasks:
            requested_tasks.append(task)
            yield task

    with closing(read_tasks(_build_read_plan(tmp_path), Storage(), request_tasks())) as reads:
        task, batches = next(reads)
        assert (task, [batch.column(0).to_pylist() for batch in batches]) == (tasks[0], [[0]])
    assert len(requested_tasks) < 50
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]
