"""The rows that a key matches: key columns by name, zeros, NaN, NUL.

Invalid keys are refused before any write.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append, overwrite, overwrite_partitions
from seamark.connector.write.data_files import FileWriter
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.locations import format_partition_path
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.connector.server_thread import ServerThread
from tests.connector.write.test_upserts import FIELDS, build_rows, create_upsert_table, read_rows
from tests.connector.write.test_upserts_at_once import run_before_commits
from tests.seeds import first_seed, mark_fast

DOUBLES: list[dict[str, Any]] = [
    {"id": 1, "name": "x", "required": False, "type": "double"},
    {"id": 2, "name": "y", "required": False, "type": "float"},
    {"id": 3, "name": "n", "required": False, "type": "int"},
]
NAN = float("nan")


def create_with_identifier_fields(client: IndexClient, *ids: int) -> None:
    schema = {
        "type": "struct",
        "fields": [{**field, "required": True} for field in FIELDS],
        "identifier-field-ids": [*ids],
    }
    body = {"name": "t", "schema": schema}
    client._request("POST", "/v1/namespaces/db/tables", {}, json.dumps(body).encode())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", [None, EQUALITY])
def test_delete_matches_rows_by_the_named_columns_only(client: IndexClient, strategy: str | None) -> None:
    create_upsert_table(client)
    append(client, "db.t", build_rows((1, "a", 1, "x"), (2, "b", 2, "x"), (3, "c", 3, "x")))
    input_rows = build_rows((1, "other", 7, None), (9, "b", 2, "x"))
    with pytest.raises(Unwritable, match=r"no identifier fields; name the key columns: key=\["):
        delete(client, "db.t", keys=input_rows, strategy=strategy)
    with pytest.raises(Unwritable, match="the rows have no column nope, which is a key column; they have id, land"):
        delete(client, "db.t", keys=input_rows, key=["nope"], strategy=strategy)
    with pytest.raises(ValueError, match="lists of names"):
        delete(client, "db.t", keys=input_rows, key="id", strategy=strategy)
    rows_with_unknown_column = input_rows.append_column("extra", pa.array([1, 2]))
    delete(client, "db.t", keys=rows_with_unknown_column, key=["id"], strategy=strategy)
    assert [row[0] for row in read_rows(client)] == [2, 3]
    delete(client, "db.t", keys=pa.table({"id": [2]}), strategy=strategy)
    assert [row[0] for row in read_rows(client)] == [3]


def test_delete_matches_rows_by_the_tables_identifier_fields(client: IndexClient) -> None:
    create_with_identifier_fields(client, 1, 2)
    append(client, "db.t", build_rows((1, "a", 1, "x"), (1, "b", 2, "x"), (3, "c", 3, "x")))
    assert delete(client, "db.t", keys=build_rows((1, "a", 9, "z"), (3, "a", 3, "x"))).deleted == 1
    with pytest.raises(Unwritable, match="the rows have no column land, which is a key column"):
        delete(client, "db.t", keys=pa.table({"id": [1]}))
    assert delete(client, "db.t", keys=pa.table({"id": [1]}), key=["id"]).deleted == 1
    assert [row[0] for row in read_rows(client)] == [3]


def read_x_and_n(client: IndexClient) -> list[tuple[str, int]]:
    values = scan(client, "db.t", ["x", "n"]).to_arrow().to_pylist()
    return sorted((repr(value["x"]), value["n"]) for value in values)


def build_doubles(*rows: tuple[float, float, int]) -> pa.Table:
    x, y, n = zip(*rows, strict=True)
    return pa.table({"x": pa.array(x, "float64"), "y": pa.array(y, "float32"), "n": pa.array(n, "int32")})


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("index", [(), ("x",), ("x", "y")], ids=["plain", "record", "record of two"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spec", [[], [("identity", 1)]], ids=["whole", "partitioned"])
def test_both_zeros_are_one_key_and_all_nans_are_one_key(
    client: IndexClient, mode: str, spec: list[tuple[str, int]], index: tuple[str, ...]
) -> None:
    properties = {"seamark.index.keys": f"record({', '.join(index)})"} if index else {}
    create_upsert_table(client, fields=DOUBLES, spec=spec, properties=properties)
    names = list(index) or ["x"]
    nan = 7.0 if spec else NAN  # The server's planner cannot prove that a partition value is NaN.
    append(client, "db.t", build_doubles((-0.0, 0.0, 1), (nan, -0.0, 1), (1.5, 1.0, 1)))
    report = upsert(
        client,
        "db.t",
        build_doubles((0.0, -0.0, 2), (nan if spec else math.copysign(nan, -1.0), 0.0, 2)),
        keys=names,
        mode=mode,
    )
    assert (report.inserted, report.updated) == (0, 2)
    assert read_x_and_n(client) == [("0.0", 2), ("1.5", 1), (repr(nan), 2)]
    report = upsert(client, "db.t", build_doubles((0.0, 0.0, 3), (-0.0, -0.0, 4)), keys=names, mode=mode)
    assert (report.inserted, report.updated) == (0, 1)
    assert read_x_and_n(client) == [("-0.0", 4), ("1.5", 1), (repr(nan), 2)], "stored rows must keep the sign of zero"
    delete_report = delete(client, "db.t", keys=build_doubles((0.0, 0.0, 0), (nan, 0.0, 0)), key=names, mode=mode)
    assert delete_report.deleted == 2
    assert read_x_and_n(client) == [("1.5", 1)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_concurrent_upsert_of_the_other_zero_is_a_conflict(
    client: IndexClient, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, fields=DOUBLES, spec=[("identity", 1)])
    append(client, "db.t", build_doubles((5.0, 0.0, 1)))
    run_before_commits(monkeypatch, lambda: upsert(client, "db.t", build_doubles((-0.0, 0.0, 1)), keys=["x"]))
    report = upsert(client, "db.t", build_doubles((0.0, 0.0, 2)), keys=["x"], mode=mode)
    assert (report.attempts, report.updated) == (2, 1)
    assert read_x_and_n(client) == [("0.0", 2), ("5.0", 1)]


def test_both_zeros_are_equal_as_precombine_values(client: IndexClient) -> None:
    create_upsert_table(client, fields=DOUBLES)
    append(client, "db.t", build_doubles((1.0, 0.0, 1)))
    report = upsert(client, "db.t", build_doubles((1.0, -0.0, 2)), keys=["x"], precombine="y")
    assert (report.updated, report.stale) == (1, 0)


UNSAFE_PATH_TEXTS = (
    "a\0b",
    "\0",
    "a\0",
    "",
    "a",
    "a/../b",
    "..",
    "x%2e%2e%2fy",
    "/..",
    "%00",
    "\\..\\",
    "%252525252500",
)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("write_mode", [*MODES, EQUALITY])
@pytest.mark.parametrize("transform", ["identity", "truncate[2]", "bucket[4]"])
@pytest.mark.parametrize("version", [2, 3])
def test_partition_values_can_contain_characters_that_paths_cannot(
    client: IndexClient, version: int, transform: str, write_mode: str
) -> None:
    create_upsert_table(client, version=version, spec=[(transform, 2)])
    strategy_options: dict[str, Any] = {"strategy": EQUALITY} if write_mode == EQUALITY else {"mode": write_mode}
    append(client, "db.t", build_rows(*((number, land, 0) for number, land in enumerate(UNSAFE_PATH_TEXTS))))
    changed_rows = build_rows(*((number, land, 1) for number, land in enumerate(UNSAFE_PATH_TEXTS) if number % 2))
    upsert(client, "db.t", changed_rows, keys=["id", "land"], **strategy_options)
    delete(
        client,
        "db.t",
        keys=build_rows((2, UNSAFE_PATH_TEXTS[2])).select(["id", "land"]),
        key=["id", "land"],
        **strategy_options,
    )
    expected = [(number, land, number % 2, None) for number, land in enumerate(UNSAFE_PATH_TEXTS) if number != 2]
    assert read_rows(client) == expected
    for number, land, _, _ in expected:
        where = {"type": "eq", "term": "land", "value": land}
        assert scan(client, "db.t", ["id"], where=where).to_arrow()["id"].to_pylist() == [number]
    overwrite_partitions(client, "db.t", build_rows((77, "\0")))
    assert (77, "\0", None, None) in read_rows(client)


def test_partition_path_keeps_plain_values_and_escapes_separators() -> None:
    assert format_partition_path(["p"], ["identity"], ["string"], ["x/y ü%"]) == "p=x%2Fy+%C3%BC%25"
    for value in UNSAFE_PATH_TEXTS:
        path = format_partition_path(["p"], ["identity"], ["string"], [value])
        assert "%00" not in path.replace("%25", "%")
        assert path.count("/") == 0


CHANGES: dict[str, Any] = {
    "upsert": lambda client: upsert(client, "db.t", build_rows((7, "b")), keys=["id"]),
    "update": lambda client: upsert(client, "db.t", build_rows((1, "b")), keys=["id"], mode="merge-on-read"),
    "copy": lambda client: upsert(client, "db.t", build_rows((1, "b")), keys=["id"], mode="copy-on-write"),
    "equality delete": lambda client: upsert(client, "db.t", build_rows((1, "b")), keys=["id"], strategy=EQUALITY),
    "delete": lambda client: delete(client, "db.t", keys=pa.table({"id": [1]})),
    "delete by predicate": lambda client: delete(client, "db.t", where="id = 1"),
    "overwrite": lambda client: overwrite(client, "db.t", build_rows((1, "b")), where="id = 1"),
    "overwrite partitions": lambda client: overwrite_partitions(client, "db.t", build_rows((1, "b"))),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", CHANGES)
def test_row_changes_of_a_version_1_table_are_refused_before_a_file_is_written(
    client: IndexClient, server: ServerThread, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upsert_table(client, version=1)
    append(client, "db.t", build_rows((1, "a")))
    files_before = server.list_written_files()
    opened_writers: list[object] = []
    monkeypatch.setattr(FileWriter, "__init__", lambda *_, **__: opened_writers.append(1))
    with pytest.raises(Unwritable, match=r"version 1 supports .*appends.*upgrade it to version 2"):
        CHANGES[name](client)
    assert (opened_writers, server.list_written_files()) == ([], files_before)
    assert read_rows(client) == [(1, "a", None, None)]


@pytest.mark.parametrize("number", mark_fast(range(4), 1))
def test_random_histories_of_floating_point_keys_match_a_dict(client: IndexClient, number: int) -> None:
    """A history has 14 random upserts and deletes with a few keys, so that most statements change stored rows.

    In the dict, 0.0 and -0.0 are one key, and all NaNs are one key. Stored rows keep their signs.
    """
    seed = 100 * first_seed() + number
    rng = random.Random(seed)
    create_upsert_table(client, fields=DOUBLES, properties={"seamark.index.keys": "record(x)"} if number % 2 else {})
    model: dict[str, tuple[str, int]] = {}  # The keys are texts of x + 0.0, which is 0.0 also for -0.0.
    for step in range(14):
        drawn_keys = rng.sample((0.0, -0.0, NAN, -NAN, 1.5, -1.5, float("inf")), rng.randint(1, 4))
        input_table = build_doubles(*((x, 0.0, step) for x in drawn_keys))
        write_options: dict[str, Any] = {"mode": rng.choice(MODES), "producer": ("history", step)}
        if rng.random() < 0.3:
            change = delete(client, "db.t", keys=input_table, key=["x"], **write_options)
            model = {key: row for key, row in model.items() if key not in {repr(x + 0.0) for x in drawn_keys}}
        else:
            change = upsert(client, "db.t", input_table, keys=["x"], **write_options)
            model |= {repr(x + 0.0): (repr(x), step) for x in drawn_keys}
        assert not change.duplicate
        assert read_x_and_n(client) == sorted(model.values()), f"seed {seed}, step {step}"
        if rng.random() < 0.3:
            assert delete(client, "db.t", keys=input_table, key=["x"], **write_options).duplicate, (
                f"seed {seed}, step {step}"
            )
