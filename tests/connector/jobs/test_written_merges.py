"""Tests that the files of a write are merged before its commit, and that the rows and all other files stay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.jobs.written_merges import merge_written
from seamark.connector.read.lineage import NAMES
from seamark.connector.read.scans import scan
from seamark.connector.read.tables import ScanTask, open_table
from seamark.connector.write.appends import APPEND, OVERWRITE, OVERWRITE_PARTITIONS, append, open_destination
from seamark.connector.write.replacements import Batches
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from tests.connector.jobs.test_file_merges import build_rows, create_table, read_rows_by_id
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed


def list_stored_files(folder: Path, ending: str = ".parquet") -> set[str]:
    return {f"file://{path}" for path in folder.rglob(f"*{ending}")}


def write_with_tasks(client: IndexClient, mode: str, tables: Sequence[pa.Table], where: Any = True) -> tuple[Any, Any]:
    """Write each table with its own task, and return the destination and the written files of each task."""
    destination = open_destination(client, "db.t", mode, where=where)
    return destination, [write_batches(destination.target, table.to_batches()) for table in tables]


def count_partitions(files: Sequence[Any]) -> Counter[str]:
    return Counter(str(file["partition"]) for file in files)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))])
def test_merged_files_contain_the_rows_that_the_tasks_wrote(
    client: IndexClient, server: ServerThread, tmp_path: Path, number: int
) -> None:
    seed = first_seed() + number
    rng = random.Random(seed)
    version, mode = rng.choice([2, 3]), rng.choice([APPEND, OVERWRITE, OVERWRITE_PARTITIONS])
    create_table(server, version)
    if rng.random() < 0.5:
        client.put_index("db.t", "ids", kind="bloom", columns=["id"])
    append(client, "db.t", build_rows(rng, range(1_000_000, 1_000_100)))
    rows_before, first_id, tables = read_rows_by_id(client), 0, []
    for row_count in rng.choices([3, 200, 700, 4000], k=rng.randint(2, 6)):
        tables.append(build_rows(rng, range(first_id, first_id + row_count)))
        first_id += row_count
    replaced_part = rng.choice([1, 0])
    where = f"part = {replaced_part}"
    if mode == OVERWRITE:
        tables = [
            table.filter(pa.array([part == replaced_part for part in table["part"].to_pylist()])) for table in tables
        ]
    destination, parts = write_with_tasks(client, mode, tables, where)
    written_files = WrittenFiles.join(parts)
    merge_report = merge_written(client, "db.t", destination.target, parts, slots=rng.randint(1, 3))
    assert merge_report.rows == written_files.rows
    assert len(merge_report.files) < len(written_files.files), seed
    removed_file_paths = {file["file-path"] for file in written_files.files} - {
        file["file-path"] for file in merge_report.files
    }
    assert not removed_file_paths & list_stored_files(tmp_path)
    answer = destination.commit(client, merge_report)
    assert answer is not None
    expected = {row["id"]: row for table in tables for row in table.to_pylist()}
    for id_, row in rows_before.items():
        is_replaced = mode == OVERWRITE_PARTITIONS or (mode == OVERWRITE and row["part"] == replaced_part)
        if not is_replaced:
            expected[id_] = row
    assert read_rows_by_id(client) == expected, seed
    if version == 3:  # Each row has its own row id.
        ids = scan(client, "db.t", [NAMES[0]]).to_arrow()[NAMES[0]].to_pylist()
        assert None not in ids
        assert len(set(ids)) == len(expected)
    assert list_stored_files(tmp_path) >= {
        str(path) for path in client.files("db.t", content="data")["file_path"].to_pylist()
    }
    if client.indexes("db.t"):
        assert client.index("db.t", "ids").health == "ok"
        assert client.explain("db.t", "id = -5").files == 0


def test_merge_keeps_large_files_and_single_files_of_partitions(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    rng = random.Random(1)
    even_rows = build_rows(rng, range(20_000)).filter(pa.array([number % 2 == 0 for number in range(20_000)]))
    other_rows = [build_rows(rng, range(id_, id_ + 1)) for id_ in (50_001, 50_003)]
    destination, parts = write_with_tasks(client, APPEND, [even_rows, *other_rows])
    merge_report = merge_written(client, "db.t", destination.target, parts)
    large_paths = [file["file-path"] for file in parts[0].files]
    assert len(large_paths) >= 1
    assert count_partitions(merge_report.files) == Counter({"[0]": len(large_paths), "[1]": 1})
    assert [file["file-path"] for file in merge_report.files][: len(large_paths)] == large_paths
    calls = []

    def record_and_run(batches: Batches) -> Batches:
        calls.append(1)
        return batches

    assert merge_written(client, "db.t", destination.target, [merge_report], runner=record_and_run) == merge_report
    assert calls == []


def test_failed_merge_keeps_the_files_that_the_tasks_wrote(
    client: IndexClient, server: ServerThread, tmp_path: Path
) -> None:
    create_table(server, 2)
    destination, parts = write_with_tasks(
        client, APPEND, [build_rows(random.Random(n), range(n * 9, n * 9 + 9)) for n in range(3)]
    )

    def raise_invalid_request() -> Any:
        raise InvalidRequest("a Spark task failed: no memory")

    def fail_all_tasks(batches: Batches) -> Iterator[tuple[Sequence[ScanTask], Any]]:
        yield from ((batch, raise_invalid_request) for batch, _ in batches)

    report = merge_written(client, "db.t", destination.target, parts, runner=fail_all_tasks)
    assert report == WrittenFiles.join(parts)
    destination.commit(client, report)
    assert sorted(read_rows_by_id(client)) == list(range(27))


def test_interrupted_merge_leaves_no_file(client: IndexClient, server: ServerThread, tmp_path: Path) -> None:
    create_table(server, 2)
    destination, parts = write_with_tasks(
        client, APPEND, [build_rows(random.Random(n), range(n * 900, n * 900 + 900)) for n in range(3)]
    )
    assert list_stored_files(tmp_path)

    def interrupt_after_one_task(batches: Batches) -> Iterator[tuple[Sequence[ScanTask], Any]]:
        for batch, rewrite in batches:
            yield batch, rewrite
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_written(client, "db.t", destination.target, parts, runner=interrupt_after_one_task)
    assert list_stored_files(tmp_path) == set()


def test_table_whose_columns_changed_during_the_write_is_not_merged(client: IndexClient, server: ServerThread) -> None:
    create_table(server, 2)
    destination, parts = write_with_tasks(
        client, APPEND, [build_rows(random.Random(n), range(n * 9, n * 9 + 9)) for n in range(3)]
    )
    with open_catalog(server.url) as catalog, catalog.load_table("db.t").update_schema() as update:
        update.rename_column("payload", "other")
    assert open_table(client, "db.t", At()).schema != destination.target.schema
    assert merge_written(client, "db.t", destination.target, parts) == WrittenFiles.join(parts)
