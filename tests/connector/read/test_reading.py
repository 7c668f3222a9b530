"""Rows that are read from a plan's tasks, against the written rows, DuckDB and PyIceberg."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as spark_types

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At
from seamark.connector.read.changes import INSERT, SnapshotChange
from seamark.connector.read.read_plan import FILE, POSITION, ReadCounts, ReadPlan, plan_read
from seamark.connector.read.scans import TaskReader, bind_filter, scan
from seamark.connector.read.tables import ScanTask, divide_task, open_table, plan, restrict_to_rows
from seamark.connector.spark.source.reader import RowReader, split_tasks
from seamark.formats.iceberg.expressions.arrow import build_arrow_array
from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.files.parquet import Unreadable
from tests.api.indexes.test_bitmaps import (
    OPPOSITE,
    Leaf,
    Tree,
    build_filter_json,
    build_random_tree,
    compare_values,
    draw_row_with_negative_zero,
    evaluate_as_sql,
    format_as_sql,
)
from tests.api.rest.stored import LiveSnapshot, StoredTable, draw_row
from tests.connector import lake
from tests.connector.server_thread import ServerThread
from tests.iceberg.expressions.test_sql import BOUND_TO, COLUMNS, NESTED_FIELD, draw_predicate, table
from tests.planner.lakes.lake import Row
from tests.seeds import examples

__all__ = ["table"]
NAMES = ["id", "name", "price", "part"]


def read_task(
    task: ScanTask, read_plan: ReadPlan, storage: Storage, *, positions: np.ndarray[Any, Any] | None = None
) -> Iterator[pa.RecordBatch]:
    return TaskReader(read_plan, storage).read(task, positions)


@pytest.fixture
def client(server: ServerThread) -> Iterator[SeamarkClient]:
    with closing(SeamarkClient(server.url)) as client:
        yield client


# Filters


def build_columns_by_id(rows: list[Row]) -> dict[int, pa.Array]:
    """Return the columns of the rows, by field id."""
    kinds = {number: kind for number, (kind, _) in enumerate(COLUMNS.values(), 1)} | {51: "int", 53: "int"}
    columns = {
        column_id: build_arrow_array(kind, [row[column_id] for row in rows]) for column_id, kind in kinds.items()
    }
    # The nested field `st` (50) has the fields `in` (51) and `deep` (52), which has the field `y` (53).
    inner = pa.StructArray.from_arrays([columns[53]], ["y"])
    return columns | {NESTED_FIELD.id: pa.StructArray.from_arrays([columns[51], inner], ["in", "deep"]), 52: inner}


def test_sql_filter_keeps_the_rows_that_duckdb_keeps(table: tuple[duckdb.DuckDBPyConnection, list[Row]]) -> None:
    db, rows = table
    columns = build_columns_by_id(rows)
    compared_count, count = 0, examples(1500, 200)
    for seed in range(count):
        sql = draw_predicate(random.Random(seed))
        parsed_filter = parse_sql(sql.seamark_text, BOUND_TO, nan_above=True)
        if not parsed_filter.exact:
            continue
        actual_filter = evaluate_filter(
            bind(parsed_filter.expression, BOUND_TO, (), case_sensitive=True), columns, len(rows)
        )
        expected = {number for (number,) in db.execute(f"SELECT n FROM rows WHERE {sql.duckdb_text}").fetchall()}
        assert set(np.flatnonzero(actual_filter).tolist()) == expected, f"seed {seed}: {sql.seamark_text}"
        compared_count += 1
    assert compared_count > count / 4, "more than a quarter of the drawn predicates can be evaluated exactly"


def evaluate(tree: Tree, row: Any, *, negated: bool = False) -> bool:
    """Evaluate an expression on a row: nulls as in Iceberg, comparisons of numbers as in SQL.

    A NaN in a row is greater than all numbers.

    Args:
        tree: The expression.
        row: The values by column.
        negated: Whether to evaluate the negation of the expression.
    """
    if isinstance(tree, Leaf):
        value = row[tree.column]
        if tree.value is None:
            return (value is None) == ((tree.op == "is-null") != negated)
        op = OPPOSITE[tree.op] if negated else tree.op
        if value is None:
            return op == "not-eq"
        if isinstance(value, float) and math.isnan(value):
            return op in ("not-eq", "gt", "gt-eq")
        return compare_values(op, value, tree.value)
    operator, children = tree
    if operator == "not":
        return evaluate(children[0], row, negated=not negated)
    child_results = [evaluate(child, row, negated=negated) for child in children]
    return any(child_results) if (operator == "or") != negated else all(child_results)


# Whole tables


async def commit_random_files(stored_table: StoredTable, rng: random.Random, commits: int) -> None:
    """Commit random files, and in some commits deletes of earlier rows.

    The deletes are equality deletes, and position deletes in version 2 or deletion vectors in version 3. Files of 40
    and 150 rows may have row groups of 16 rows.
    """
    for _ in range(commits):
        snapshot_before = stored_table.snapshots[-1] if stored_table.snapshots else LiveSnapshot(0, [], [])
        part = rng.choice([1, 2])
        data = [
            stored_table.write_data_file(
                [
                    draw_row(rng, part) if stored_table.partitioned else draw_row_with_negative_zero(rng)
                    for _ in range(rng.choice([1, 40, 150]))
                ],
                group_rows=rng.choice([16, 1000]),
            )
            for _ in range(rng.randint(0 if snapshot_before.data else 1, 2))
        ]
        partition_files = [
            file for file in snapshot_before.data if not stored_table.partitioned or file.partition == (part,)
        ]
        deletes = []
        if partition_files and rng.random() < 0.7:
            deleted_rows = {
                (file.path, rng.randrange(file.record_count))
                for file in partition_files
                for _ in range(rng.randint(0, 12))
            }
            paths = {path for path, _ in deleted_rows}
            vector_paths = {delete.referenced_path for delete in snapshot_before.deletes if delete.format == "PUFFIN"}
            if stored_table.version > 2:
                new_deletes = {
                    path: {index for file_path, index in deleted_rows if file_path == path}
                    for path in paths - vector_paths
                }
                deletes += stored_table.write_vectors(new_deletes, part) if new_deletes else []
            elif deleted_rows:
                deletes.append(stored_table.write_position_deletes(deleted_rows, part))
        if rng.random() < 0.5:
            ids = rng.choice([[1], [2], [1, 2], [3]])
            keys = [tuple(draw_row(rng, part)[id_ - 1] for id_ in ids) for _ in range(rng.randint(1, 3))]
            deletes.append(stored_table.write_equality_deletes(ids, keys, part))
        await stored_table.commit(data, deletes)


def to_comparable_row(row: Any) -> tuple[Any, ...]:
    """Return a comparable form of the row, in which NaN equals NaN, and -0.0 differs from 0.0."""
    return tuple(repr(value) if isinstance(value, float) else value for value in row)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("version", "partitioned", "seed"),
    [
        pytest.param(2, False, 1, marks=pytest.mark.slow),
        (2, True, 2),
        (3, False, 3),
        pytest.param(3, True, 4, marks=pytest.mark.slow),
    ],
)
def test_scans_of_random_tables_return_the_written_rows_except_deleted_rows(
    server: ServerThread, client: SeamarkClient, version: int, partitioned: bool, seed: int
) -> None:
    rng = random.Random(seed)

    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api, version=version, partitioned=partitioned)
        await commit_random_files(new_table, rng, 6)
        for name in ("id", "price"):
            await new_table.index(f"by_{name}", "bitmap", [name], new_table.snapshots[-1].data[: rng.randint(1, 9)])
        return new_table

    stored_table = server.run(make())
    outcomes: Counter[str] = Counter()
    for round_number in range(40):  # The first four scans have no filter.
        snapshot = rng.choice(stored_table.snapshots)
        tree = build_random_tree(rng, 3, (0, 1, 2, 3))
        in_text = rng.random() < 0.5
        where: Any = None if round_number < 4 else format_as_sql(tree) if in_text else build_filter_json(tree)
        names = rng.sample([*NAMES, FILE, POSITION], rng.randint(0, 6))
        actual = scan(client, "db.t", names, where, at=At(snapshot_id=snapshot.id), bitmaps=rng.random() < 0.7)
        rows = []
        for path, position, row in stored_table.list_live_rows(snapshot):
            is_expected = evaluate_as_sql(tree, row, nan_is_high=True) is True if in_text else evaluate(tree, row)
            if where is None or is_expected:
                values = dict(zip(NAMES, row, strict=True)) | {FILE: path, POSITION: position}
                rows.append(to_comparable_row(values[name] for name in names))
        actual_rows = [to_comparable_row(value.values()) for value in actual.to_arrow().to_pylist()] if names else None
        message = f"seed {seed}, turn {round_number}: {where} of snapshot {snapshot.id}, {names}"
        if actual_rows is None:
            assert sum(batch.num_rows for batch in actual) == len(rows), message
        else:
            assert sorted(actual_rows, key=repr) == sorted(rows, key=repr), message
        outcomes["some" if rows else "none"] += 1
    assert min(outcomes["some"], outcomes["none"]) > 1, outcomes


def test_rows_chosen_by_an_exact_bitmap_are_read_without_the_filters_columns(
    server: ServerThread, client: SeamarkClient
) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        rows = [(n, f"n{n}", float(n % 10), 1) for n in range(1000)]
        random.Random(5).shuffle(rows)
        files = [new_table.write_data_file(rows, group_rows=20)]
        await new_table.commit(files)
        await new_table.commit(
            deletes=[new_table.write_position_deletes([(files[0].path, [row[0] for row in rows].index(7))])]
        )
        await new_table.index("by_id", "bitmap", ["id"], files)
        return new_table

    stored_table = server.run(make())
    path = Path(stored_table.snapshots[-1].data[0].path.removeprefix("file://"))
    overwrite_column_chunks(path, keep=lambda group, column: column != "id")  # No byte of the filter's column is read.
    actual = scan(client, "db.t", ["name"], "id IN (7, 500)")
    assert actual.to_arrow().to_pylist() == [{"name": "n500"}]
    assert (actual.counts.row_groups, actual.counts.row_groups_skipped) == (1, 49)
    with pytest.raises(Unreadable):
        scan(client, "db.t", ["name"], "id IN (7, 500)", bitmaps=False).to_arrow()


def overwrite_column_chunks(path: Path, keep: Any) -> None:
    """Overwrite all column chunks except those for which `keep(row group, column)` is true.

    The footer stays unchanged.
    """
    data = bytearray(path.read_bytes())
    file = pq.ParquetFile(path).metadata
    for group in range(file.num_row_groups):
        for number in range(file.num_columns):
            chunk = file.row_group(group).column(number)
            if not keep(group, chunk.path_in_schema):
                chunk_start = min(
                    offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset is not None
                )
                data[chunk_start : chunk_start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("where", "groups"),
    [
        ("id < 25", {0, 1, 2}),
        ("id >= 980", {98, 99}),
        ("id = 333 OR name = 'n0334'", {33}),
        ("id IN (5, 995) AND price IS NOT NULL", {0, 99}),
        ("name LIKE 'n001%'", {1}),
        ("price < 1.0", {0}),
        ("name IS NULL", {50}),
    ],
)
def test_row_groups_that_statistics_rule_out_are_not_read(
    server: ServerThread, client: SeamarkClient, where: str, groups: set[int]
) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        rows = [(n, None if n == 500 else f"n{n:04}", n / 10, 1) for n in range(1000)]
        await new_table.commit([new_table.write_data_file(rows, group_rows=10)])
        return new_table

    stored_table = server.run(make())
    expected_rows = [
        row for row in scan(client, "db.t", where=where).to_arrow().to_pylist() if row["id"] // 10 in groups
    ]
    path = Path(stored_table.snapshots[-1].data[0].path.removeprefix("file://"))
    overwrite_column_chunks(path, keep=lambda group, _: group in groups)
    actual = scan(client, "db.t", where=where)
    assert actual.to_arrow().to_pylist() == expected_rows
    assert len(expected_rows) > 0
    assert actual.counts.row_groups == len(groups)
    with pytest.raises(Unreadable, match="cannot be read"):
        scan(client, "db.t").to_arrow()


def test_only_the_filters_columns_are_read_in_row_groups_without_a_match(
    server: ServerThread, client: SeamarkClient
) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        rows = [(2 * (n % 100), f"n{n}", None, 1) for n in range(1000)]
        rows[777] = (51, "here", None, 1)
        await new_table.commit([new_table.write_data_file(rows, group_rows=100)])
        return new_table

    stored_table = server.run(make())
    path = Path(stored_table.snapshots[-1].data[0].path.removeprefix("file://"))
    overwrite_column_chunks(path, keep=lambda group, column: column == "id" or group == 7)
    actual = scan(client, "db.t", ["name", "id"], "id = 51")
    assert actual.to_arrow().to_pylist() == [{"name": "here", "id": 51}]
    assert (actual.counts.row_groups, actual.counts.row_groups_skipped) == (1, 9)


def test_spans_divide_a_file_by_its_row_groups(server: ServerThread, client: SeamarkClient) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        await new_table.commit([new_table.write_data_file([(n, "a", 1.5, 1) for n in range(500)], group_rows=50)])
        return new_table

    server.run(make())
    opened_table = open_table(client, "db.t", At())
    (task,) = plan(client, opened_table)
    read_plan = pickle.loads(pickle.dumps(plan_read(opened_table, ["id"], TRUE)))
    offsets = [0, 1, task.size_bytes // 3, task.size_bytes // 2, task.size_bytes]
    ids_by_span = []
    for start, end in pairwise(offsets):
        part = pickle.loads(pickle.dumps(ScanTask(task.file, task.deletes, span=(start, end))))
        ids_by_span.append(
            [value for batch in read_task(part, read_plan, opened_table.storage) for value in batch["id"].to_pylist()]
        )
    assert [value for part in ids_by_span for value in part] == list(range(500))
    # A span reads the row groups that begin in it. No group begins in the first byte or in the last half of the file.
    assert [bool(part) for part in ids_by_span] == [False, True, True, False]
    footer = pq.read_metadata(Path(task.path.removeprefix("file://")))
    chunks = [footer.row_group(number).column(0) for number in range(footer.num_row_groups)]
    split_offsets = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
    split_task = replace(task, file={**task.file, "split-offsets": split_offsets})
    for pieces in (1, 3, 10):
        pieces_of_task = list(divide_task(split_task, -(-task.size_bytes // pieces)))
        assert min(pieces, 2) <= len(pieces_of_task) <= pieces
        batches = (batch for piece in pieces_of_task for batch in read_task(piece, read_plan, opened_table.storage))
        assert [value for batch in batches for value in batch["id"].to_pylist()] == list(range(500))
    batches_of_rows = read_task(task, read_plan, opened_table.storage, positions=np.array([3, 260, 499]))
    assert [value for batch in batches_of_rows for value in batch["id"].to_pylist()] == [3, 260, 499]
    # A manifest may state wrong sizes and offsets.
    spark_schema = spark_types.StructType([spark_types.StructField("id", spark_types.LongType())])
    row_reader = RowReader(opened_table, spark_schema, TRUE)
    for size_bytes, stated_offsets in itertools.product(
        (-5, 0, 1, task.size_bytes // 2, 1 << 60),
        (split_offsets, split_offsets[2:], [-70, -7, *split_offsets[5:], 1 << 60]),
    ):
        stated_sizes = {"file-size-in-bytes": size_bytes, "split-offsets": stated_offsets}
        change = SnapshotChange(INSERT, replace(task, file={**task.file, **stated_sizes}))
        parts: list[Any] = [*split_tasks([change], row_reader, split_bytes=task.size_bytes // 5)]
        ids = [value for part in parts for batch in part.read() for value in batch["id"].to_pylist()]
        assert ids == list(range(500)), (size_bytes, stated_offsets)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_rows_that_only_one_of_two_delete_sets_removes_can_be_read(
    server: ServerThread, client: SeamarkClient, version: int
) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api, version=version)
        await commit_random_files(new_table, random.Random(version), 6)
        return new_table

    stored_table = server.run(make())
    snapshot_count = len(stored_table.snapshots)
    for old_id in range(1, snapshot_count):
        old_table, latest_table = open_table(client, "db.t", At(snapshot_id=old_id)), open_table(client, "db.t", At())
        latest_tasks = {task.path: task for task in plan(client, latest_table)}
        reader = TaskReader(plan_read(old_table, [FILE, POSITION], TRUE), old_table.storage)
        removed_rows = set()
        for task in plan(client, old_table):
            part = ScanTask(task.file, task.deletes, removed_by=latest_tasks[task.path].deletes)
            for batch in reader.read(part):
                removed_rows |= set(zip(*batch.to_pydict().values(), strict=True))
        old_rows, latest_rows = (
            {(path, index) for path, index, _ in stored_table.list_live_rows(stored_table.snapshots[snapshot_id - 1])}
            for snapshot_id in (old_id, snapshot_count)
        )
        assert removed_rows == old_rows - latest_rows


def test_limit_bounds_the_rows_and_the_files_that_are_read(server: ServerThread, client: SeamarkClient) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        await new_table.commit([new_table.write_data_file([(n, "a", 1.5, 1) for n in range(100)]) for _ in range(3)])
        return new_table

    server.run(make())
    for limit, files in ((0, 0), (1, 1), (100, 1), (101, 2), (1000, 3)):
        actual = scan(client, "db.t", limit=limit)
        assert actual.to_arrow().num_rows == min(limit, 300)
        assert actual.counts.files == files
    table = scan(client, "db.t", ["id"], "id < 2").reader().read_all()
    assert sorted(table["id"].to_pylist()) == [0, 0, 0, 1, 1, 1]


def test_scan_that_cannot_be_exact_is_refused(server: ServerThread, client: SeamarkClient) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        await new_table.commit([new_table.write_data_file([(1, "a", 1.5, 1)])])
        return new_table

    server.run(make())
    for where, expected in (
        ("upper(name) = 'A' AND id = 1", "by all parts of this predicate: UPPER"),
        ("nothing = 1", "Cannot find column 'nothing'"),
        ({"type": "eq", "term": "id", "value": "x"}, "x"),
    ):
        with pytest.raises(InvalidRequest, match=expected):
            scan(client, "db.t", where=where)
    with pytest.raises(InvalidRequest, match="Cannot read 'nothing'"):
        scan(client, "db.t", ["nothing"])
    with pytest.raises(InvalidRequest, match="branch or tag 'dev'"):
        scan(client, "db.t", at=At(ref="dev"))
    with pytest.raises(InvalidRequest, match="snapshot 99"):
        scan(client, "db.t", at=At(snapshot_id=99))
    with pytest.raises(InvalidRequest, match="no snapshot at or before"):
        scan(client, "db.t", at=At(as_of_ms=1))


def test_error_names_the_file_that_cannot_be_read(server: ServerThread, client: SeamarkClient) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        files = [new_table.write_data_file([(1, "a", 1.5, 1)])]
        await new_table.commit(files)
        await new_table.commit(deletes=[new_table.write_position_deletes([(files[0].path, 0)])])
        return new_table

    stored_table = server.run(make())
    opened_table = open_table(client, "db.t", At())
    read_plan = plan_read(opened_table, None, TRUE)
    (task,) = plan(client, opened_table)

    def read_error(**changes: Any) -> str:
        options = {name.replace("_", "-"): value for name, value in changes.items()}
        with pytest.raises(Unreadable) as error:
            list(read_task(ScanTask({**task.file, **options}, task.deletes), read_plan, opened_table.storage))
        assert str(error.value).startswith((task.path, str(options.get("file-path")), task.deletes[0]["file-path"]))
        return str(error.value)

    assert "'orc' are not supported" in read_error(file_format="orc")
    assert "encrypted" in read_error(key_metadata="AABB")
    assert "1 rows; the manifest entry says 2" in read_error(record_count=2)
    assert "cannot be read" in read_error(file_path=task.path + ".gone")
    deletes = Path(task.deletes[0]["file-path"].removeprefix("file://"))
    deletes.write_bytes(b"PAR1 no PAR1")
    assert str(deletes) in read_error()
    assert stored_table.snapshots


def test_nan_is_greater_than_all_numbers_even_when_bounds_prune_files(
    server: ServerThread, client: SeamarkClient
) -> None:
    arrow_schema = pa.schema([("id", pa.int64()), ("f", pa.float64())])
    with lake.open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        table = catalog.create_table("db.n", schema=arrow_schema)
        for start in (0, 10):
            table.append(
                pa.table({"id": [start, start + 1, start + 2], "f": [1.0, math.nan, None]}, schema=arrow_schema)
            )
        table.append(pa.table({"id": [20], "f": [1.5]}, schema=arrow_schema))
    for where, ids in (
        ("f > 2", [1, 11]),
        ("NOT f <= 1.0", [1, 11, 20]),
        ("f < 2", [0, 10, 20]),
        ("f <> 1", [1, 11, 20]),
    ):
        assert sorted(scan(client, "db.n", ["id"], where).to_arrow()["id"].to_pylist()) == ids, where


def test_scan_reads_the_snapshot_branch_or_tag_that_it_names(server: ServerThread, client: SeamarkClient) -> None:
    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        for n in range(3):
            await new_table.commit([new_table.write_data_file([(n, "a", 1.5, 1)])])
        ref = {"action": "set-snapshot-ref", "ref-name": "dev", "type": "branch", "snapshot-id": 1}
        tag = {"action": "set-snapshot-ref", "ref-name": "v2", "type": "tag", "snapshot-id": 2}
        answer = await server.api("POST", "/v1/namespaces/db/tables/t", {"requirements": [], "updates": [ref, tag]})
        assert answer.status == 200
        return new_table

    server.run(make())

    def read_ids(at: At) -> list[int]:
        return sorted(scan(client, "db.t", ["id"], at=at).to_arrow()["id"].to_pylist())

    assert read_ids(At()) == read_ids(At(ref="main")) == [0, 1, 2]
    assert read_ids(At(ref="dev")) == read_ids(At(snapshot_id=1)) == [0]
    assert read_ids(At(ref="v2")) == [0, 1]
    opened_table = open_table(client, "db.t", At())
    assert opened_table.snapshot_id == 3
    bound = bind_filter("id = 1", opened_table)
    tasks = list(restrict_to_rows(client, opened_table, bound, plan(client, opened_table, bound)))
    counts = ReadCounts()
    reader = TaskReader(plan_read(opened_table, None, bound), opened_table.storage, counts=counts)
    assert sum(batch.num_rows for batch in reader.read_all(tasks)) == counts.rows == 1
