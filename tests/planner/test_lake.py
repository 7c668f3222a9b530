"""Tests of the oracles with real readers: Java and PyIceberg read every lake and agree with its rows and rules."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import StaticTable

from tests.planner.lakes.cases import ScanCase, draw_cases
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.lake import EQUALITY_DELETES, Lake
from tests.planner.lakes.predicates import (
    JAVA_FLOAT_ORDER,
    SPARK_FLOAT_ORDER,
    Names,
    is_judged_otherwise_by_java,
    matches,
)
from tests.planner.lakes.schemas import Field, Schema
from tests.services.java_planner import JavaPlan, JavaPlanner, PlanRequest

LAKE_COUNT = 40


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> list[Lake]:
    folder = tmp_path_factory.mktemp("lakes")
    return [write_random_lake(seed, folder / str(seed)) for seed in range(LAKE_COUNT)]


def is_partitioned_by_fixed(lake: Lake) -> bool:
    """Return whether the random table has partitions by a `fixed` column, which Java writes and cannot read."""
    columns = lake.all_columns
    fields = [part for spec in lake.specs.values() for part in spec]
    return any(columns[part.source].kind.startswith("fixed") and part.transform == "identity" for part in fields)


def test_java_finds_the_live_files_and_delete_files_of_every_snapshot(lakes: list[Lake], java: JavaPlanner) -> None:
    queries = [(lake, snapshot) for lake in lakes for snapshot in lake.snapshots.values()]
    answers = java.plan([PlanRequest(lake.metadata_location, "true", snapshot.id) for lake, snapshot in queries])
    counts: Counter[str] = Counter()
    for (lake, snapshot), answer in zip(queries, answers, strict=True):
        if answer.error is not None:
            assert is_partitioned_by_fixed(lake), f"seed {lake.seed}: {answer.error}"
            continue
        # Without a filter Java does not use metrics, so it keeps files without rows.
        assert set(answer.tasks) == {file.path for file in snapshot.data_files}, f"seed {lake.seed}"
        for file in snapshot.data_files:
            applicable_deletes = lake.find_applicable_deletes(snapshot, file)
            deletes = answer.tasks[file.path].deletes
            assert deletes <= {delete.name for delete in applicable_deletes}, f"seed {lake.seed} {file.path}"
            removing_deletes = {
                delete.name for delete in applicable_deletes if lake.find_removed_positions(delete, file)
            }
            # Java compares bounds of UUIDs in its own order, so it may omit an equality delete file that is needed.
            if not any(column.kind == "uuid" for column in lake.all_columns.values()):
                assert removing_deletes <= deletes, f"seed {lake.seed} {file.path}"
            counts.update(
                {"vector" if delete.is_vector else f"content {delete.content}" for delete in applicable_deletes}
            )
    # Deletion vectors, position deletes (content 1) and equality deletes (content 2) must occur in the lakes.
    assert min(counts[kind] for kind in ("vector", "content 1", "content 2")) > 5


def test_pyiceberg_finds_the_live_files_of_every_snapshot(lakes: list[Lake]) -> None:
    read_count = 0
    for lake in lakes:
        if lake.version > 2:
            continue  # PyIceberg 0.12 cannot plan version 3.
        table = StaticTable.from_metadata(lake.metadata_location)
        for snapshot in lake.snapshots.values():
            if any(delete.content == EQUALITY_DELETES for delete in snapshot.delete_files):
                continue  # PyIceberg refuses to plan with equality deletes.
            file_paths = {task.file.file_path for task in table.scan(snapshot_id=snapshot.id).plan_files()}
            assert file_paths == {file.path for file in snapshot.data_files if file.record_count}, f"seed {lake.seed}"
            read_count += 1
    assert read_count > 20, "PyIceberg can plan too few snapshots, so the test proves little"


def judge_java(case: ScanCase, answer: JavaPlan) -> Counter[str]:
    """Check that Java's plan and residuals agree with the rows.

    Filters that known faults of Java affect are not checked: they compare UUIDs, a transform of an identity partition,
    the least number of a truncated column, or texts with timestamps in nanoseconds.
    """
    counts: Counter[str] = Counter()
    if answer.error is not None:
        return Counter(["refused"])
    is_trusted = not is_judged_otherwise_by_java(case.filter, case.names, case.lake)
    for file in case.snapshot.data_files:
        expected = case.match_rows(file, case.filter, JAVA_FLOAT_ORDER)
        assert expected == case.match_rows(file, case.java_filter, JAVA_FLOAT_ORDER), (
            f"the two forms of the filter have different results: {case}"
        )
        counts["dropped" if file.path not in answer.tasks else "kept"] += 1
        if not is_trusted:
            continue
        if file.path not in answer.tasks:
            assert not any(expected), f"Java drops {file.path}, which has a matching row: {case}"
            continue
        if any(value is None or value != value for value in file.partition):
            continue  # Java's residuals treat null as the least value, and NaN as the greatest.
        residual = answer.tasks[file.path].residual
        assert case.match_rows(file, residual, JAVA_FLOAT_ORDER) == expected, (
            f"residual {residual} of {file.path}: {case}"
        )
    return counts


def test_java_keeps_every_matching_file_with_a_residual_equivalent_to_the_filter(
    tmp_path: Path, java: JavaPlanner
) -> None:
    random_cases = [case for seed in range(1000, 1000 + LAKE_COUNT) for case in draw_cases(seed, tmp_path, 6)]
    answers = java.plan([case.build_java_request() for case in random_cases])
    counts: Counter[str] = Counter()
    for case, answer in zip(random_cases, answers, strict=True):
        counts += judge_java(case, answer)
    assert counts["dropped"] > 300
    assert counts["kept"] > 300
    assert counts["refused"] < len(random_cases) / 6


def test_same_seed_always_makes_the_same_table(tmp_path: Path) -> None:
    def describe(lake: Lake) -> list[Any]:
        files = [file for snapshot in lake.snapshots.values() for file in snapshot.data_files]
        return [repr((file.partition, file.rows, file.sequence, file.metrics)) for file in files]

    first_lake, second_lake = (write_random_lake(7, tmp_path / name) for name in ("one", "two"))
    assert describe(first_lake) == describe(second_lake)
    assert first_lake.metadata["schemas"] == second_lake.metadata["schemas"]


KINDS_BY_NAME = {"i": "int", "f": "double", "s": "string", "d": "decimal(9, 2)", "t": "timestamptz_ns", "b": "binary"}
FIELDS = tuple(Field(index, name, False, kind) for index, (name, kind) in enumerate(KINDS_BY_NAME.items(), start=1))
NAMES = Names(Schema(0, FIELDS))
ROW = {1: 5, 2: math.nan, 3: "a\U0001f600b", 4: 125, 5: 1_000_000_001, 6: b"\x00\xff"}
NULLS = dict.fromkeys(ROW)


@pytest.mark.parametrize(
    ("op", "name", "literal", "row", "expected"),
    [
        ("lt", "i", 5.5, ROW, True),
        ("eq", "i", 5.5, ROW, False),
        ("not-eq", "i", 5, NULLS, True),
        ("lt", "i", 5, NULLS, False),
        ("not-in", "i", [1, 2], NULLS, True),
        ("in", "i", [5, 6], ROW, True),
        ("gt", "f", 0.0, ROW, False),
        ("not-eq", "f", 0.0, ROW, True),
        ("starts-with", "s", "a\U0001f600", ROW, True),
        ("starts-with", "s", "", NULLS, False),
        ("not-starts-with", "s", "", NULLS, True),
        ("eq", "d", "1.25", ROW, True),
        ("gt", "d", "1.249", ROW, True),
        ("eq", "t", "1970-01-01T00:00:01.000000001+00:00", ROW, True),
        ("gt", "t", 1_000_000, ROW, True),
        ("lt-eq", "b", "00FF", ROW, True),
    ],
)
def test_predicate_evaluation_follows_iceberg(op: str, name: str, literal: Any, row: Any, expected: bool) -> None:
    key = "values" if isinstance(literal, list) else "value"
    predicate = {"type": op, "term": name, key: literal}
    assert matches(predicate, row, NAMES) is expected


@pytest.mark.parametrize(("op", "expected"), [("lt", False), ("eq", True), ("gt", False)])
def test_negated_predicate_is_its_opposite_but_false_on_null(op: str, expected: bool) -> None:
    negated = {"type": "not", "child": {"type": op, "term": "i", "value": 5}}
    assert matches(negated, NULLS, NAMES) is expected


def test_meanings_differ_on_zeros_and_nan() -> None:
    zero_row, nan_row = {2: -0.0}, {2: math.nan}
    predicate = {"type": "eq", "term": "f", "value": 0.0}
    assert matches(predicate, zero_row, NAMES)
    assert not matches(predicate, zero_row, NAMES, JAVA_FLOAT_ORDER)
    greater_filter = {"type": "gt", "term": "f", "value": 1.0}
    assert not matches(greater_filter, nan_row, NAMES)
    assert matches(greater_filter, nan_row, NAMES, SPARK_FLOAT_ORDER)
