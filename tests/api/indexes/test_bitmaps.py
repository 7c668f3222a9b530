"""Tests of the route that returns rows by predicate.

Plain Python computes the expected rows for each client's semantics.
"""

from __future__ import annotations

import base64
import json
import math
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyroaring
import pytest

from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http import bodies
from seamark.metaserver.api.lookups import bitmaps
from seamark.metaserver.planner.scan.request import BoundScan
from tests.api.client import Api
from tests.api.indexes.test_lookups import create_table_with_deletes
from tests.api.rest.stored import Row, StoredTable, draw_row, read_rows
from tests.seeds import mark_fast

BITMAP = "/api/v1/tables/db/t/bitmap"
COLUMNS = ("id", "name", "price", "part")
Verdict = bool | None
"""The result of a condition on a row. None is SQL's unknown."""
OPERATORS = {"=": "eq", "<>": "not-eq", "<": "lt", "<=": "lt-eq", ">": "gt", ">=": "gt-eq"}
OPPOSITE = {"eq": "not-eq", "lt": "gt-eq", "gt": "lt-eq"} | {"not-eq": "eq", "gt-eq": "lt", "lt-eq": "gt"}


@dataclass
class Leaf:
    """A condition on a column: a comparison with a value, or a test for null, for which `value` is None."""

    column: int
    op: str
    value: Any


Tree = Any
"""The syntax tree of a condition: a Leaf, or ("and" | "or" | "not", trees)."""


def build_random_tree(rng: random.Random, depth: int, columns: tuple[int, ...]) -> Tree:
    if depth and rng.random() < 0.7:
        operator = rng.choice(["and", "or", "not"])
        return (operator, [build_random_tree(rng, depth - 1, columns) for _ in range(1 if operator == "not" else 2)])
    column = rng.choice(columns)
    if rng.random() < 0.15:
        return Leaf(column, rng.choice(["is-null", "not-null"]), None)
    values = {0: [3, 17, 39, 100], 1: ["", "a", "b"], 2: [0.0, 1.5, -2.5], 3: [1, 2]}[column]
    return Leaf(column, rng.choice(list(OPPOSITE)), rng.choice(values))


def format_as_sql(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        name = COLUMNS[tree.column]
        if tree.value is None:
            return f"{name} IS {'NOT ' if tree.op == 'not-null' else ''}NULL"
        literal = f"'{tree.value}'" if isinstance(tree.value, str) else f"{tree.value}"
        return f"{name} {next(sql for sql, op in OPERATORS.items() if op == tree.op)} {literal}"
    operator, children = tree
    if operator == "not":
        return f"NOT ({format_as_sql(children[0])})"
    return "(" + f" {operator.upper()} ".join(map(format_as_sql, children)) + ")"


def build_filter_json(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, Leaf):
        leaf = {"type": tree.op, "term": COLUMNS[tree.column]}
        return leaf if tree.value is None else {**leaf, "value": tree.value}
    operator, children = tree
    if operator == "not":
        return {"type": "not", "child": build_filter_json(children[0])}
    return {"type": operator, "left": build_filter_json(children[0]), "right": build_filter_json(children[1])}


def evaluate_as_sql(tree: Tree, row: Row, *, nan_is_high: bool) -> Verdict:
    """Evaluate a tree in SQL's three-valued logic.

    With `nan_is_high`, NaN is the greatest value, as in Spark. Otherwise comparisons follow IEEE 754.
    """
    if isinstance(tree, Leaf):
        value = row[tree.column]
        if tree.value is None:
            return (value is None) == (tree.op == "is-null")
        if value is None:
            return None
        if isinstance(value, float) and math.isnan(value) and nan_is_high:
            return tree.op in ("not-eq", "gt", "gt-eq")
        return compare_values(tree.op, value, tree.value)
    operator, children = tree
    results = [evaluate_as_sql(child, row, nan_is_high=nan_is_high) for child in children]
    if operator == "not":
        return None if results[0] is None else not results[0]
    decisive = operator == "or"  # True decides OR, and False decides AND, even if another operand is unknown.
    return decisive if decisive in results else None if None in results else not decisive


def evaluate_as_iceberg(tree: Tree, row: Row, *, negated: bool = False) -> bool:
    """Evaluate a tree like Iceberg's Java evaluator, which pushes negation down to the leaves.

    `negated` states whether an odd number of NOT operators contains this tree.
    """
    if isinstance(tree, Leaf):
        value = row[tree.column]
        if tree.value is None:
            return (value is None) == ((tree.op == "is-null") != negated)
        op = OPPOSITE[tree.op] if negated else tree.op
        if value is None:
            return op == "not-eq"
        if isinstance(value, float):
            return compare_values(op, compute_java_order(value), compute_java_order(tree.value))
        return compare_values(op, value, tree.value)
    operator, children = tree
    if operator == "not":
        return evaluate_as_iceberg(children[0], row, negated=not negated)
    results = [evaluate_as_iceberg(child, row, negated=negated) for child in children]
    return any(results) if (operator == "or") != negated else all(results)


def compute_java_order(value: float) -> tuple[bool, float, float]:
    """Return a key for Java's order of doubles: -0.0 is less than 0.0, and NaN is the greatest value."""
    return (True, 0.0, 0.0) if math.isnan(value) else (False, value, math.copysign(1.0, value))


def compare_values(op: str, left: Any, right: Any) -> bool:
    cases: dict[str, Callable[[], bool]] = {
        "eq": lambda: left == right,
        "not-eq": lambda: left != right,
        "lt": lambda: left < right,
        "lt-eq": lambda: left <= right,
        "gt": lambda: left > right,
        "gt-eq": lambda: left >= right,
    }
    return cases[op]()


async def read_pages(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Query the bitmap of matching rows, and return the files of all pages.

    Check that a page is exact if and only if all of its files are exact.
    """
    files, token = [], None
    while True:
        answer = await api("POST", BITMAP, body | ({} if token is None else {"page-token": token}))
        assert answer.status == 200, answer.raw
        files += answer.json["files"]
        assert answer.json["exact"] == all(file["exact"] for file in answer.json["files"])
        token = answer.json["next-page-token"]
        if token is None:
            return files


def decode_rows(rows: Any) -> set[int] | None:
    if isinstance(rows, str):
        return set(pyroaring.BitMap.deserialize(base64.b64decode(rows)))
    return None if rows is None else set(rows)


def draw_row_with_negative_zero(rng: random.Random) -> Row:
    """Return a random row. Its price is -0.0 with a probability of 0.2."""
    row = draw_row(rng, rng.choice([1, 2]))
    return (*row[:2], -0.0, row[3]) if rng.random() < 0.2 else row


async def create_indexed_table(api: Api, rng: random.Random) -> StoredTable:
    table = await StoredTable.create(api)
    files = [
        table.write_data_file([draw_row_with_negative_zero(rng) for _ in range(rng.choice([1, 30, 200]))])
        for _ in range(5)
    ]
    files += [table.write_data_file([(n, "a", 1.5, 1) for n in range(70)])]  # This file has neither NaN nor null.
    await table.commit(files)
    for name in ("id", "name", "price"):
        await table.index(f"by_{name}", "bitmap", [name], files, parts=2)
    return table


@pytest.mark.parametrize("seed", mark_fast(range(6), fast_count=1))
async def test_matching_rows_follow_the_callers_semantics(api: Api, seed: int) -> None:
    rng = random.Random(seed)
    indexed_table = await create_indexed_table(api, rng)
    outcomes: Counter[str] = Counter()
    for _ in range(25):
        tree = build_random_tree(rng, depth=3, columns=(0, 1, 2) if rng.random() < 0.8 else (0, 1, 2, 3))
        row_format = rng.choice(["roaring", "positions"])
        # The rows for an SQL condition must be correct with NaN above all numbers (Spark) and with NaN as in IEEE 754.
        # The rows for a filter in JSON must be those of Iceberg's evaluator.
        for body, meanings in (
            (
                {"where": format_as_sql(tree)},
                [partial(evaluate_as_sql, tree, nan_is_high=high) for high in (True, False)],
            ),
            ({"filter": build_filter_json(tree)}, [partial(evaluate_as_iceberg, tree)]),
        ):
            pages = await read_pages(api, {**body, "rows": row_format, "limit": 2})
            reports_by_path = {file_report["file-path"]: file_report for file_report in pages}
            for file in indexed_table.snapshots[-1].data:
                rows = read_rows(file)
                expected = [{index for index, row in enumerate(rows) if matches(row) is True} for matches in meanings]
                file_report = reports_by_path.get(file.path)
                actual_rows = set() if file_report is None else decode_rows(file_report["rows"])
                if file_report is None or file_report["exact"]:
                    assert all(actual_rows == rows for rows in expected), f"seed {seed}: {body} in {file.path}"
                else:
                    assert actual_rows is None or all(actual_rows >= rows for rows in expected), (
                        f"seed {seed}: {body} in {file.path}"
                    )
                if file_report is not None:
                    assert file_report["count"] == (None if actual_rows is None else len(actual_rows))
                    assert file_report["record-count"] == len(rows)
                outcomes["absent" if file_report is None else "exact" if file_report["exact"] else "inexact"] += 1
    # With fewer cases of an outcome, the test would have tested little.
    assert min(outcomes[outcome] for outcome in ("absent", "exact", "inexact")) > 10, outcomes


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
async def test_deleted_rows_are_excluded_on_request(api: Api, version: int) -> None:
    rng = random.Random(version)
    table = await create_table_with_deletes(api, rng, version=version, partitioned=version == 2)
    data = table.snapshots[-1].data
    await table.index("by_id", "bitmap", ["id"], data)
    for snapshot in table.snapshots:
        live_rows = table.list_live_rows(snapshot)
        for position in rng.sample(range(40), 4):
            body = {"where": f"id < {position}", "snapshot-id": snapshot.id}
            pages_with_deletes = {page["file-path"]: page for page in await read_pages(api, {**body, "deletes": True})}
            pages_by_path = {page["file-path"]: page for page in await read_pages(api, body)}
            for file in snapshot.data:
                expected = {n for n, row in enumerate(read_rows(file)) if row[0] is not None and row[0] < position}
                live_ids = {n for path, n, row in live_rows if path == file.path and n in expected}
                assert (
                    decode_rows(pages_by_path[file.path]["rows"]) if file.path in pages_by_path else set()
                ) == expected
                assert (
                    decode_rows(pages_with_deletes[file.path]["rows"]) if file.path in pages_with_deletes else set()
                ) == live_ids
            assert all(value["exact"] and value["undecided"] == 0 for value in pages_with_deletes.values())


async def test_arrow_and_json_answers_are_equal(api: Api) -> None:
    rng = random.Random(1)
    await create_indexed_table(api, rng)
    for row_format in ("roaring", "positions"):
        body = {"where": "id < 20 AND part = 1", "rows": row_format}
        plain_answer = (await api("POST", BITMAP, body)).json
        answer = await api("POST", BITMAP, body, headers={"Accept": ARROW_STREAM})
        table = pa.ipc.open_stream(answer.raw).read_all()
        schema_metadata = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
        assert (schema_metadata["snapshot-id"], schema_metadata["meaning"], schema_metadata["exact"]) == (
            "1",
            "sql",
            "false",
        )
        assert json.loads(schema_metadata["not-used"]) == []
        for file, row in zip(plain_answer["files"], table.to_pylist(), strict=True):
            rows = row["rows"]
            actual_rows = set(pyroaring.BitMap.deserialize(rows)) if isinstance(rows, bytes) else set(rows)
            assert actual_rows == decode_rows(file["rows"])
            assert (row["file_path"], row["count"], row["exact"]) == (file["file-path"], file["count"], file["exact"])


async def test_sql_without_an_equivalent_expression_is_reported_and_makes_rows_inexact(api: Api) -> None:
    rng = random.Random(2)
    await create_indexed_table(api, rng)
    answer = (await api("POST", BITMAP, {"where": "id = 3 AND length(name) = 1"})).json
    assert answer["not-used"] == ["LENGTH(name) = 1"]
    assert not any(file["exact"] for file in answer["files"])
    assert not (await api("POST", BITMAP, {"where": "id < 5.5 AND price = 1.5"})).json["not-used"]


async def test_any_row_of_a_file_without_a_bitmap_may_match(api: Api) -> None:
    table = await StoredTable.create(api)
    files = [table.write_data_file([(n, "a", 1.5, 1) for n in range(10)]) for _ in range(2)]
    await table.commit(files)
    await table.index("by_id", "bitmap", ["id"], files[:1])
    reports_by_path = {
        file["file-path"]: file for file in (await api("POST", BITMAP, {"where": "id = 3"})).json["files"]
    }
    assert decode_rows(reports_by_path[files[0].path]["rows"]) == {3}
    file_report = reports_by_path[files[1].path]
    assert (file_report["rows"], file_report["count"], file_report["exact"], file_report["record-count"]) == (
        None,
        None,
        False,
        10,
    )


async def test_damaged_index_file_counts_as_missing(api: Api) -> None:
    table = await StoredTable.create(api)
    files = [table.write_data_file([(n, "a", 1.5, 1) for n in range(1000)])]
    await table.commit(files)
    await table.index("by_id", "bitmap", ["id"], files)
    (path,) = (table.folder / "_seamark" / "index").glob("**/*.puffin")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    for _ in range(2):
        file_report = (await api("POST", BITMAP, {"where": "id = 3"})).json["files"][0]
        assert (file_report["rows"], file_report["exact"]) == (None, False)


async def test_all_rows_match_without_a_predicate(api: Api) -> None:
    table = await StoredTable.create(api)
    file = table.write_data_file([(n, "a", 1.5, 1) for n in range(70)])
    await table.commit([file])
    await table.commit(deletes=[table.write_position_deletes([(file.path, 69)])])
    file_report = (await api("POST", BITMAP, {"deletes": True})).json["files"][0]
    assert decode_rows(file_report["rows"]) == set(range(69))
    assert (file_report["exact"], file_report["delete-files"], file_report["count"]) == (True, 1, 69)


@pytest.mark.slow
async def test_predicate_with_a_hundred_thousand_values_is_bound_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await create_file_with_row_count(api, rows=10)
    filter_ = {"type": "in", "term": "name", "values": [f"name {number}" for number in range(100_000)]}
    body = json.dumps({"filter": filter_}).encode()
    calls: list[tuple[str, int]] = []  # (function, thread)

    def record_threads(work: Callable[..., Any]) -> Callable[..., Any]:
        def record_thread(*arguments: Any, **options: Any) -> Any:
            calls.append((work.__name__, threading.get_ident()))
            return work(*arguments, **options)

        return record_thread

    monkeypatch.setattr(bodies, "parse_body", record_threads(bodies.parse_body))
    monkeypatch.setattr(bitmaps, "parse_expression", record_threads(parse_expression))
    monkeypatch.setattr(BoundScan, "bind", record_threads(BoundScan.bind))
    answer = await api("POST", BITMAP, body, headers={"Content-Type": "application/json"})
    assert {name for name, _ in calls} == {"parse_body", "parse_expression", "bind"}
    assert threading.get_ident() not in {thread for _, thread in calls}, "the event loop's thread did the work"
    assert [file["file-path"] for file in answer.json["files"]] == [path]


MEMORY_BYTES_MAX = 32 << 20
"""The limit for the memory of an answer. The positions of all rows of the tested files would need more."""


@contextmanager
def check_memory_stays_small() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
        assert peak_bytes < MEMORY_BYTES_MAX
    finally:
        tracemalloc.stop()


async def create_file_with_row_count(api: Api, rows: int, *, deleted: bool = False) -> str:
    """Create a table whose only data file has `rows` rows by its manifest entry, and return the file's path.

    If `deleted` is true, a position delete removes the first row.
    """
    table = await StoredTable.create(api)
    file = replace(table.write_data_file([(1, "a", 1.5, 1)]), record_count=rows)
    await table.commit([file])
    if deleted:
        await table.commit(deletes=[table.write_position_deletes([(file.path, 0)])])
    return file.path


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("form", ["roaring", "positions"])
@pytest.mark.parametrize("rows", [2**32 + 1, 8 * 10**9, 2**62])
async def test_any_row_may_match_in_a_file_too_large_for_a_bitmap(api: Api, rows: int, form: str) -> None:
    await create_file_with_row_count(api, rows)
    with check_memory_stays_small():
        answer = await api("POST", BITMAP, {"rows": form})
    (file_report,) = answer.json["files"]
    assert (file_report["rows"], file_report["count"], file_report["exact"], file_report["record-count"]) == (
        None,
        None,
        False,
        rows,
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("rows", [20_000_000, 2**32])
async def test_answer_that_all_rows_match_needs_no_memory(api: Api, rows: int) -> None:
    await create_file_with_row_count(api, rows)
    with check_memory_stays_small():
        answer = await api("POST", BITMAP, {})
    (file_report,) = answer.json["files"]
    rows_of_answer = pyroaring.BitMap.deserialize(base64.b64decode(file_report["rows"]))
    assert (len(rows_of_answer), rows_of_answer.min(), rows_of_answer.max()) == (rows, 0, rows - 1)
    assert (file_report["count"], file_report["exact"]) == (rows, True)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("accept", ["application/json", ARROW_STREAM])
async def test_list_of_positions_longer_than_a_page_is_rejected_before_it_is_built(api: Api, accept: str) -> None:
    path = await create_file_with_row_count(api, 20_000_000)
    with check_memory_stays_small():
        answer = await api("POST", BITMAP, {"rows": "positions"}, headers={"Accept": accept})
    assert answer.error[:2] == (413, "PayloadTooLargeException")
    assert path in answer.error[2]
    assert "request rows in the format roaring" in answer.error[2]


@pytest.mark.slow
async def test_all_rows_are_inexact_if_too_many_need_a_check_against_deletes(api: Api) -> None:
    rows = 2**31
    await create_file_with_row_count(api, rows, deleted=True)
    with check_memory_stays_small():
        answer = await api("POST", BITMAP, {"deletes": True})
    (file_report,) = answer.json["files"]
    assert (file_report["rows"], file_report["exact"], file_report["undecided"], file_report["delete-files"]) == (
        None,
        False,
        rows,
        1,
    )


@pytest.mark.slow
async def test_rows_of_a_large_file_are_checked_against_deletes_in_parts(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitmaps, "CANDIDATES_MAX", 128)  # The rows of a part. Files of 1,000 and 129 rows need several.
    rng = random.Random(3)
    table = await StoredTable.create(api)
    sizes = (1000, 70, 20, 129, 1)
    files = [table.write_data_file([(n, "a", 1.5, 1) for n in range(rows)]) for rows in sizes]
    await table.commit(files)
    await table.index("by_id", "bitmap", ["id"], files[:3])
    removed_rows = {file.path: set(rng.sample(range(rows), rows // 3)) for file, rows in zip(files, sizes, strict=True)}
    removed_positions = [(path, index) for path, positions in removed_rows.items() for index in positions]
    await table.commit(deletes=[table.write_position_deletes(removed_positions)])
    for body, minimum in (({}, 0), ({"where": "id >= 10"}, 10)):
        reports_by_path = {
            page["file-path"]: page for page in await read_pages(api, {**body, "deletes": True, "limit": 2})
        }
        for number, (file, rows) in enumerate(zip(files, sizes, strict=True)):
            # Only the first three files have an index. Any row of the other files may match.
            first_id = minimum if number < 3 else 0
            expected = set(range(first_id, rows)) - removed_rows[file.path]
            assert decode_rows(reports_by_path[file.path]["rows"]) == expected
            assert reports_by_path[file.path]["count"] == len(expected)


async def test_invalid_bitmap_request_is_rejected(api: Api) -> None:
    table = await StoredTable.create(api)
    await table.commit([table.write_data_file([(1, "a", 1.5, 1)])])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"where": "nope = 1"}, "Cannot find column 'nope'"),
        ({"where": "id = "}, "not valid SQL"),
        ({"where": "id = 1", "filter": True}, "has both where and filter"),
        ({"filter": {"type": "eq", "term": "id", "value": "x"}}, "invalid value"),
        ({"where": "id = 1", "meaning": "french"}, "it must be sql or iceberg"),
        ({"where": "id = 1", "rows": "all"}, "it must be roaring or positions"),
        ({"where": "id = 1", "limit": 0}, "at least 1"),
        ({"where": "id = 1", "page-token": "x"}, "start again"),
        ({"where": "id = 1", "snapshot-id": 7}, "Cannot find snapshot 7"),
        ({"where": "id = 1", "color": "red"}, "color"),
    ]
    for body, expected in cases:
        answer = await api("POST", BITMAP, body)
        assert answer.error[0] == 400, body
        assert expected in answer.error[2], body


async def test_page_token_is_valid_only_for_its_request_and_snapshot(api: Api) -> None:
    table = await StoredTable.create(api)
    files = [table.write_data_file([(n, "a", 1.5, 1)]) for n in range(3)]
    await table.commit(files)
    first_page = (await api("POST", BITMAP, {"where": "id >= 0", "limit": 1})).json
    await table.commit([table.write_data_file([(9, "a", 1.5, 1)])], removed=[files[2].path])
    other_answer = await api(
        "POST", BITMAP, {"where": "id >= 1", "limit": 1, "page-token": first_page["next-page-token"]}
    )
    assert "start again" in other_answer.error[2]
    actual_files = list(first_page["files"])
    token = first_page["next-page-token"]
    while token:
        page = (await api("POST", BITMAP, {"where": "id >= 0", "limit": 1, "page-token": token})).json
        assert page["snapshot-id"] == 1
        actual_files, token = actual_files + page["files"], page["next-page-token"]
    assert [file["file-path"] for file in actual_files] == [file.path for file in files]


async def test_table_without_a_snapshot_has_no_matching_rows(api: Api) -> None:
    await StoredTable.create(api)
    answer = (await api("POST", BITMAP, {"where": "id = 1"})).json
    assert (answer["snapshot-id"], answer["files"], answer["next-page-token"]) == (None, [], None)
