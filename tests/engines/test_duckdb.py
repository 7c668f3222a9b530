"""Tests of unmodified DuckDB 1.5.5: PyIceberg reads the rows that DuckDB writes, and the reverse."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import IntegerType

import seamark
import seamark.duckdb
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.scans import scan
from seamark.connector.sql.session import SqlSession
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import delete
from tests.connector.jobs.encrypted.test_encrypted_merges import encrypt
from tests.connector.parquet import encrypted
from tests.connector.read import typed
from tests.seeds import first_seed
from tests.services.s3 import S3
from tests.services.seamark import Seamark

ROWS = [(1, "ann", 1.5), (2, "bob", None), (3, "cy", 2.5)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("duckdb")) as server:
        yield server


@pytest.fixture
def con(server: Seamark) -> Iterator[duckdb.DuckDBPyConnection]:
    with closing(seamark.duckdb.connect(server.base_url)) as con:
        con.execute("CREATE SCHEMA IF NOT EXISTS sea.shop")
        yield con


def create_people(con: duckdb.DuckDBPyConnection, name: str, version: int = 2) -> str:
    con.execute(
        f"CREATE TABLE sea.shop.{name} (id BIGINT, name VARCHAR, score DOUBLE) WITH ('format-version' = {version})"
    )
    con.executemany(f"INSERT INTO sea.shop.{name} VALUES (?, ?, ?)", ROWS)
    return f"sea.shop.{name}"


def read_with_both_plans(con: duckdb.DuckDBPyConnection, text: str) -> list[tuple[Any, ...]]:
    """Return the rows of the query, and check that DuckDB's own plan and Seamark's plan give the same rows."""
    direct_rows = sorted(con.sql(text).fetchall(), key=repr)
    assert sorted(seamark.duckdb.sql(con, text).fetchall(), key=repr) == direct_rows
    return direct_rows


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_duckdb_inserts_updates_and_deletes_rows(con: duckdb.DuckDBPyConnection, server: Seamark, version: int) -> None:
    table = create_people(con, f"people_v{version}", version)
    con.execute(f"UPDATE {table} SET name = 'bo' WHERE id = 2")
    con.execute(f"DELETE FROM {table} WHERE id = 1")
    expected = [(2, "bo", None), (3, "cy", 2.5)]
    assert read_with_both_plans(con, f"FROM {table}") == expected
    assert read_with_both_plans(con, f"FROM {table} WHERE id = 3") == expected[1:]
    assert read_with_both_plans(con, f"FROM {table} WHERE name = 'ann' OR id = 1") == []
    with closing(IndexClient(server.base_url)) as client:
        assert seamark.scan(client, f"shop.people_v{version}").to_arrow().num_rows == 2
    with RestCatalog("sea", uri=server.base_url) as catalog:
        loaded_table = catalog.load_table(f"shop.people_v{version}")
        assert loaded_table.format_version == version
        if version == 2:  # PyIceberg does not read deletion vectors.
            assert sorted(loaded_table.scan().to_arrow().column("id").to_pylist()) == [2, 3]


def test_duckdb_reads_rows_of_an_evolved_schema(con: duckdb.DuckDBPyConnection) -> None:
    table = create_people(con, "evolving")
    con.execute(f"ALTER TABLE {table} ADD COLUMN note VARCHAR")
    con.execute(f"ALTER TABLE {table} RENAME COLUMN name TO title")
    con.execute(f"ALTER TABLE {table} DROP COLUMN score")
    con.execute(f"INSERT INTO {table} VALUES (4, 'dee', 'new')")
    assert read_with_both_plans(con, f"FROM {table} WHERE id > 2") == [(3, "cy", None), (4, "dee", "new")]
    assert read_with_both_plans(con, f"SELECT id FROM {table} WHERE title = 'dee'") == [(4,)]
    assert read_with_both_plans(con, f"SELECT id FROM {table} WHERE note IS NULL AND id < 2") == [(1,)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [2, 3])
def test_duckdb_changes_rows_of_files_with_an_earlier_partition_spec(
    con: duckdb.DuckDBPyConnection, server: Seamark, version: int
) -> None:
    """DuckDB writes the deletes under the current spec. Without the server's correction, no reader applies them."""
    table = f"sea.shop.respecified_v{version}"
    con.execute(f"CREATE TABLE {table} (id BIGINT, day DATE) WITH ('format-version' = {version})")
    con.execute(f"INSERT INTO {table} VALUES (1, '2021-05-01'), (2, '2021-05-01'), (3, '2021-05-02')")
    con.execute(f"ALTER TABLE {table} SET PARTITIONED BY (month(day))")
    con.execute(f"INSERT INTO {table} VALUES (4, '2021-05-03'), (5, '2021-05-03')")
    con.execute(f"ALTER TABLE {table} SET PARTITIONED BY (day(day))")
    con.execute(f"DELETE FROM {table} WHERE id IN (1, 4)")
    con.execute(f"UPDATE {table} SET id = id + 10 WHERE id IN (2, 5)")
    assert read_with_both_plans(con, f"SELECT id FROM {table}") == [(12,), (15,), (3,)]
    with closing(IndexClient(server.base_url)) as client:
        rows = seamark.scan(client, f"shop.respecified_v{version}").to_arrow()
        assert sorted(rows.column("id").to_pylist()) == [3, 12, 15]
    with RestCatalog("sea", uri=server.base_url) as catalog:
        delete_files = catalog.load_table(f"shop.respecified_v{version}").inspect.delete_files()
        assert set(delete_files.column("spec_id").to_pylist()) == {0, 1}


def create_table_with_shared_vectors(
    con: duckdb.DuckDBPyConnection, client: IndexClient, name: str, file_count: int = 3
) -> None:
    """Create a table of version 3 whose deletion vectors are in one Puffin file.

    It has the ids 0, 2, 3, 4, 10, 12, 13, 14 and so on. The rows of the ids 1, 11 and so on are deleted.
    """
    con.execute(f"CREATE TABLE sea.shop.{name} (id BIGINT, value BIGINT) WITH ('format-version' = 3)")
    for start in range(0, 10 * file_count, 10):
        ids = pa.array(range(start, start + 5), pa.int64())
        append(client, f"shop.{name}", pa.table({"id": ids, "value": ids}))
    delete(client, f"shop.{name}", keys=pa.table({"id": range(1, 10 * file_count, 10)}), mode="merge-on-read")


def test_duckdb_replaces_one_of_several_vectors_in_a_puffin_file(
    con: duckdb.DuckDBPyConnection, server: Seamark
) -> None:
    """To replace one vector, DuckDB removes all vectors of the Puffin file.

    Without the server's correction, the rows that the other vectors delete come back.
    """
    ids = {0, 2, 3, 4, 10, 12, 13, 14, 20, 22, 23, 24}
    with closing(IndexClient(server.base_url)) as client:
        create_table_with_shared_vectors(con, client, "vectors")
        con.execute("DELETE FROM sea.shop.vectors WHERE id = 2")
        assert set(seamark.scan(client, "shop.vectors").to_arrow().column("id").to_pylist()) == ids - {2}
        # The second snapshot of this commit contains the manifests of the first one.
        con.begin()
        con.execute("DELETE FROM sea.shop.vectors WHERE id = 12")
        con.execute("INSERT INTO sea.shop.vectors VALUES (99, 0)")
        con.commit()
        assert set(seamark.scan(client, "shop.vectors").to_arrow().column("id").to_pylist()) == ids - {2, 12} | {99}
    assert {row[0] for row in read_with_both_plans(con, "SELECT id FROM sea.shop.vectors")} == ids - {2, 12} | {99}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [first_seed() + number for number in range(6)])
def test_random_transactions_of_duckdb_change_only_the_rows_that_they_name(
    con: duckdb.DuckDBPyConnection, server: Seamark, seed: int
) -> None:
    """Random statements change the table and a dict in the same way.

    Several deletion vectors of the table are in one Puffin file, and its partition spec changes.
    """
    rng = random.Random(seed)
    name = f"random_{seed}"
    table = f"sea.shop.{name}"
    with closing(IndexClient(server.base_url)) as client:
        create_table_with_shared_vectors(con, client, name, file_count=5)
        # The new table has these rows: the ids that end with 1 are already deleted.
        rows = {id_: id_ for start in range(0, 50, 10) for id_ in range(start, start + 5) if id_ % 10 != 1}
        refused_steps = 0
        for step in range(12):
            if rng.random() < 0.25 and rows:
                keys = rng.sample(sorted(rows), min(len(rows), 4))
                delete(client, f"shop.{name}", keys=pa.table({"id": keys}), mode="merge-on-read")
                rows = {id_: value for id_, value in rows.items() if id_ not in keys}
            with closing(seamark.duckdb.connect(server.base_url)) as writer:
                if rng.random() < 0.12:
                    writer.execute(f"ALTER TABLE {table} SET PARTITIONED BY (bucket({rng.randint(2, 30)}, id))")
                writer.begin()
                changed_rows, new_rows = dict(rows), dict[int, int]()
                try:
                    for number in range(rng.randint(1, 3)):
                        ids = rng.sample(sorted(changed_rows), min(len(changed_rows), rng.randint(1, 3)))
                        condition = f"id IN ({', '.join(map(str, ids or [-1]))})"
                        match rng.choice(("insert", "update", "delete")):
                            case "insert":
                                new_id = 100 * (step + 1) + number
                                writer.execute(f"INSERT INTO {table} VALUES ({new_id}, {step})")
                                new_rows[new_id] = step
                                continue
                            case "update":
                                writer.execute(f"UPDATE {table} SET value = {-step} WHERE {condition}")
                                new_rows |= dict.fromkeys(ids, -step)
                            case "delete":
                                writer.execute(f"DELETE FROM {table} WHERE {condition}")
                        changed_rows = {id_: value for id_, value in changed_rows.items() if id_ not in ids}
                    writer.commit()
                except duckdb.InvalidInputException:
                    # DuckDB 1.5.5 cannot do some changes of partitioned tables ("entries without partition info").
                    refused_steps += 1
                else:
                    rows = changed_rows | new_rows
            stored_rows = seamark.scan(client, f"shop.{name}").to_arrow().select(["id", "value"]).to_pylist()
            assert sorted(tuple(row.values()) for row in stored_rows) == sorted(rows.items()), (seed, step)
        assert refused_steps < 12, "no statement ran"


def test_duckdb_reads_an_earlier_snapshot(con: duckdb.DuckDBPyConnection, server: Seamark) -> None:
    table = create_people(con, "travel")
    with RestCatalog("sea", uri=server.base_url) as catalog:
        snapshot_before = catalog.load_table("shop.travel").current_snapshot()
    assert snapshot_before is not None
    con.execute(f"DELETE FROM {table} WHERE id = 3")
    table_at_version = f"{table} AT (VERSION => {snapshot_before.snapshot_id})"
    count_query = f"SELECT count(*) FROM {table_at_version} WHERE id = 3"
    assert read_with_both_plans(con, count_query) == [(1,)]
    assert seamark.duckdb.rewrite_query(con, count_query).files == 1
    assert read_with_both_plans(con, f"SELECT count(*) FROM {table} WHERE id = 3") == [(0,)]
    table_at_version = f"{table} AS a at(version => {snapshot_before.snapshot_id} )"
    join = f"SELECT a.id, b.id FROM {table_at_version} LEFT JOIN {table} AS b ON a.id = b.id WHERE a.id > 1"
    assert read_with_both_plans(con, join) == [(2, 2), (3, None)]
    assert seamark.duckdb.rewrite_query(con, join).files < seamark.duckdb.rewrite_query(con, join).considered_files
    con.execute(f"ALTER TABLE {table} RENAME COLUMN name TO title")
    con.execute(f"INSERT INTO {table} VALUES (5, 'eve', 1.5)")
    assert seamark.duckdb.rewrite_query(con, count_query).statement is None
    assert seamark.duckdb.rewrite_query(con, join).summary == "unchanged; there is no plan of an earlier snapshot"
    assert read_with_both_plans(con, count_query) == [(1,)]
    rewritten = seamark.duckdb.rewrite_query(con, f"SELECT id FROM {table} AT (TIMESTAMP => now()) WHERE id = 3")
    assert (
        rewritten.summary == "unchanged; the statement selects a snapshot by a clause other than VERSION with a number"
    )


def test_duckdb_reads_rows_of_pyiceberg_and_pyiceberg_those_of_duckdb(
    con: duckdb.DuckDBPyConnection, server: Seamark
) -> None:
    with RestCatalog("sea", uri=server.base_url) as catalog:
        rows = pa.table({"id": pa.array([7, 8], pa.int64()), "seen": pa.array([1, None], pa.timestamp("us", "UTC"))})
        table = catalog.create_table("shop.shared", schema=rows.schema)
        table.append(rows)
        con.execute("INSERT INTO sea.shop.shared VALUES (9, TIMESTAMPTZ '2020-01-01 00:00:00+00')")
        assert sorted(catalog.load_table("shop.shared").scan().to_arrow().column("id").to_pylist()) == [7, 8, 9]
    assert read_with_both_plans(con, "SELECT id FROM sea.shop.shared WHERE seen >= '2020-01-01 00:00:00+00'") == [(9,)]


def test_conflicting_insert_of_a_transaction_is_not_lost_silently(
    con: duckdb.DuckDBPyConnection, server: Seamark
) -> None:
    table = create_people(con, "race")
    with closing(seamark.duckdb.connect(server.base_url)) as other_connection:
        con.begin()
        con.execute(f"INSERT INTO {table} VALUES (10, 'mine', 0)")
        other_connection.execute(f"INSERT INTO {table} VALUES (11, 'theirs', 0)")
        assert seamark.duckdb.rewrite_query(con, f"FROM {table} WHERE id = 10").statement is None
        try:
            con.commit()
            is_committed = True
        except duckdb.Error:  # DuckDB reports a conflict.
            is_committed = False
    ids = [row[0] for row in read_with_both_plans(con, f"SELECT id FROM {table} WHERE id >= 10")]
    assert ids == ([10, 11] if is_committed else [11])


def test_duckdb_drops_a_table(con: duckdb.DuckDBPyConnection) -> None:
    table = create_people(con, "gone")
    con.execute(f"DROP TABLE {table}")
    with pytest.raises(duckdb.CatalogException):
        con.sql(f"FROM {table}")


def test_duckdb_sends_the_token_and_does_not_show_it(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "seamark"), "token", "create", "admin", "--role", "admin"]
    result = subprocess.run([*command, "--home", str(tmp_path)], check=True, capture_output=True, text=True)
    token = result.stdout.strip()
    with Seamark(tmp_path, env={"SEAMARK_AUTH": "token"}) as server:
        with pytest.raises(duckdb.Error):
            seamark.duckdb.connect(server.base_url).execute("CREATE SCHEMA sea.shop")
        with closing(seamark.duckdb.connect(server.base_url, token=token)) as con:
            con.execute("CREATE SCHEMA sea.shop")
            table = create_people(con, "people")
            assert read_with_both_plans(con, f"FROM {table} WHERE id = 3") == ROWS[2:]
            assert seamark.duckdb.rewrite_query(con, f"FROM {table} WHERE id = 3").files == 1
            assert token not in repr(con.sql("FROM duckdb_secrets()").fetchall())


def test_duckdb_writes_and_reads_tables_in_s3(s3: S3, tmp_path: Path) -> None:
    env = {**s3.build_seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": "static"}
    with (
        Seamark(tmp_path, warehouse=f"s3://{s3.create_bucket()}/lake", env=env) as server,
        closing(seamark.duckdb.connect(server.base_url, on_s3=True)) as con,
    ):
        con.execute("CREATE SCHEMA sea.shop")
        table = create_people(con, "people")
        con.execute(f"DELETE FROM {table} WHERE id = 1")
        con.execute(f"CREATE TABLE sea.shop.copy AS FROM {table}")
        assert read_with_both_plans(con, "SELECT id FROM sea.shop.copy WHERE id <> 2") == [(3,)]
        assert read_with_both_plans(con, f"SELECT id FROM {table} WHERE id <= 2") == [(2,)]


def test_indexes_leave_files_out_for_duckdb(con: duckdb.DuckDBPyConnection, server: Seamark) -> None:
    con.execute("CREATE TABLE sea.shop.keyed (id VARCHAR, land VARCHAR)")
    for start in range(4):  # The ranges of all files overlap.
        con.execute(f"INSERT INTO sea.shop.keyed SELECT (range * 4 + {start})::VARCHAR, 'de' FROM range(100)")
    text = "FROM sea.shop.keyed WHERE id = '42'"
    assert seamark.duckdb.rewrite_query(con, text).summary == "unchanged; plans keep too many of the files"
    with closing(IndexClient(server.base_url)) as client:
        client.put_index("shop.keyed", "by_id", kind="bloom", columns=["id"])
        build(client, "shop.keyed", "by_id", InProcessWorkers())
    assert seamark.duckdb.rewrite_query(con, text).summary == "rewritten; shop.keyed=1/4"
    assert read_with_both_plans(con, text) == [("42", "de")]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("footer", ["plain", "encrypted"])
def test_sql_on_encrypted_files_is_refused_with_the_reason(
    con: duckdb.DuckDBPyConnection, server: Seamark, footer: str
) -> None:
    """A refused statement changes no row."""
    table = create_people(con, f"secret_{footer}").removeprefix("sea.")
    client = IndexClient(server.base_url)
    for location in client.files(table, content="data")["file_path"].to_pylist():
        encrypt(location.removeprefix("file://"), {"columns": {"k1": ["name"]}, "plaintext_footer": footer == "plain"})

    def read_ids() -> list[int]:
        return sorted(scan(client, table, ["id"], keys=encrypted.build_keys()).to_arrow()["id"].to_pylist())

    changes = [f"UPDATE {table} SET score = 1 WHERE id = 1", f"DELETE FROM {table} WHERE name = 'ann'"]
    with SqlSession(server.base_url) as session:
        for statement in (f"SELECT id FROM {table}", *changes, f"DELETE FROM {table} WHERE id = 2"):
            with pytest.raises(InvalidRequest, match=r"SQL cannot read encrypted files: file://.*no keys were given"):
                session.sql(statement).to_arrow()
    assert read_ids() == [1, 2, 3]


def create_partitioned_table(server: Seamark, name: str, kind: str, transform: str, values: list[Any]) -> None:
    """Create a partitioned table with one file for each value."""
    with RestCatalog("sea", uri=server.base_url) as catalog:
        catalog.create_namespace_if_not_exists("parts")
    fields = [{"id": 1, "name": "id", "required": False, "type": "long"}]
    fields.append({"id": 2, "name": "x", "required": False, "type": kind})
    spec = {"spec-id": 0, "fields": [{"name": "p", "transform": transform, "source-id": 2, "field-id": 1000}]}
    body = {"name": name, "schema": {"type": "struct", "fields": fields}, "partition-spec": spec}
    with closing(IndexClient(server.base_url)) as client:
        client._request("POST", "/v1/namespaces/parts/tables", {}, json.dumps(body).encode())
        for number, value in enumerate(values):
            rows = pa.table({"id": [number], "x": typed.build_array(kind, [value])})
            seamark.append(client, f"parts.{name}", rows)


LAYOUTS: list[tuple[str, str, list[Any], list[str]]] = [
    (
        "timestamp",
        "month",
        [-43_200_000_000, -2_678_400_000_000, 1_700_000_000_000_000],
        ["TIMESTAMP '1969-12-31 12:00:00'"],
    ),
    ("timestamptz", "day", [-43_200_000_000, 0], ["TIMESTAMPTZ '1969-12-31 12:00:00+00'"]),
    ("int", "truncate[10]", [-(2**31), -1, 7], ["-1", "-2147483647"]),
    ("decimal(9, 2)", "truncate[10]", [-1, -7, 0, 777], ["-0.01", "7.77"]),
    ("decimal(38, 10)", "truncate[10]", [12345678901234567890123456789, -1], ["1234567890123456789.0123456789"]),
    (
        "string",
        "truncate[3]",
        ["e\u0301abc", "\U0001f1e9\U0001f1ea", "abcdef"],
        ["'e\u0301abc'", "'\U0001f1e9\U0001f1ea'"],
    ),
    ("uuid", "bucket[3]", [bytes(15) + b"\1", b"\xff" * 16], ["'00000000-0000-0000-0000-000000000001'::UUID"]),
]
"""The type of a column, its partition transform, one value for each file, and literals to which queries compare it."""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("kind", "transform", "values", "literals"), LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_partition_values_do_not_make_duckdb_lose_rows(
    con: duckdb.DuckDBPyConnection, server: Seamark, kind: str, transform: str, values: list[Any], literals: list[str]
) -> None:
    con.execute("SET TimeZone = 'UTC'")
    name = kind.partition("(")[0] + transform[:3] + str(len(values)) + str(len(kind))
    create_partitioned_table(server, name, kind, transform, values)
    table = f"sea.parts.{name}"
    con.execute(f"CREATE TEMP TABLE all_rows AS SELECT * FROM {table}")
    for literal in literals:
        for op in ("=", "<", "<=", ">", ">=", "<>"):
            expected = sorted(con.sql(f"SELECT id FROM all_rows WHERE x {op} {literal}").fetchall())
            text = f"SELECT id FROM {table} WHERE x {op} {literal}"
            assert sorted(seamark.duckdb.sql(con, text).fetchall()) == expected, text


def test_nan_does_not_make_duckdb_lose_rows(con: duckdb.DuckDBPyConnection) -> None:
    """DuckDB treats NaN as the greatest number, and compares filters with bounds, which do not include NaN.

    DuckDB also writes no counts of NaN.
    """
    con.execute("CREATE TABLE sea.shop.nans (id BIGINT, x DOUBLE)")
    con.execute("INSERT INTO sea.shop.nans VALUES (1, 1), (2, 'NaN')")
    con.execute("INSERT INTO sea.shop.nans VALUES (3, 5)")
    for condition, expected in (
        ("x > 3", [2, 3]),
        ("x >= 'NaN'::DOUBLE", [2]),
        ("x = 1", [1]),
        ("id = 3 AND x > 1", [3]),
    ):
        rows = seamark.duckdb.sql(con, f"SELECT id FROM sea.shop.nans WHERE {condition} ORDER BY id").fetchall()
        assert [row[0] for row in rows] == expected, condition


def test_equality_deletes_that_duckdb_misreads_are_refused(con: duckdb.DuckDBPyConnection, server: Seamark) -> None:
    """DuckDB ends with a segmentation fault if a column of the deletes was dropped and added again.

    `seamark sql` can change such tables.
    """
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "k": pa.array([1, 2, 3], pa.int32())})
    with RestCatalog("sea", uri=server.base_url) as catalog, closing(IndexClient(server.base_url)) as client:
        table = catalog.create_table("shop.added_again", schema=rows.schema)
        table.append(rows)
        keys = pa.table({"k": pa.array([2], pa.int32())})
        seamark.delete(client, "shop.added_again", keys=keys, key=["k"], strategy="equality")
        assert read_with_both_plans(con, "SELECT id FROM sea.shop.added_again") == [(1,), (3,)]
        for change in ("delete_column", "add_column"):
            with catalog.load_table("shop.added_again").update_schema() as update:
                update.delete_column("k") if change == "delete_column" else update.add_column("k", IntegerType())
        for text in ("FROM sea.shop.added_again", "SELECT count(*) FROM sea.shop.added_again WHERE id > 1"):
            with pytest.raises(InvalidRequest, match=r"DuckDB .* cannot read shop.added_again: .*dropped since"):
                seamark.duckdb.sql(con, text)
        with SqlSession(server.base_url) as session:
            assert session.sql("UPDATE shop.added_again SET k = 5 WHERE id = 3").to_arrow()["rows"].to_pylist() == [1]
            values = session.sql("SELECT id, k FROM shop.added_again ORDER BY id").to_arrow().to_pylist()
        assert values == [{"id": 1, "k": None}, {"id": 3, "k": 5}]
        create_partitioned_table(server, "keyed", "int", "identity", [1, 2, 3])
        keys = pa.table({"id": pa.array([0], pa.int64()), "x": pa.array([1], pa.int32())})
        seamark.delete(client, "parts.keyed", keys=keys, key=["id", "x"], strategy="equality")
        values = seamark.duckdb.sql(con, "SELECT id FROM sea.parts.keyed WHERE id < 2").fetchall()
        assert values == [(1,)], (
            "equality deletes with the partition columns as keys delete only rows of their own partition"
        )


def test_table_whose_partition_column_was_dropped_is_read(con: duckdb.DuckDBPyConnection, server: Seamark) -> None:
    rows = pa.table({"id": pa.array([1, 2], pa.int64()), "k": pa.array([1, 2], pa.int32())})
    with RestCatalog("sea", uri=server.base_url) as catalog:
        table = catalog.create_table("shop.unparted", schema=rows.schema)
        with table.update_spec() as spec:
            spec.add_field("k", BucketTransform(4), "part")
        with closing(IndexClient(server.base_url)) as client:
            seamark.append(client, "shop.unparted", rows)
        table = catalog.load_table("shop.unparted")
        with table.update_spec() as spec:
            spec.remove_field("part")
        with table.update_schema() as update:
            update.delete_column("k")
    assert seamark.duckdb.sql(con, "FROM sea.shop.unparted WHERE id = 2").fetchall() == [(2,)]
    assert seamark.duckdb.sql(con, "SELECT count(*) FROM sea.shop.unparted").fetchall() == [(2,)]


def test_impossible_partition_values_of_duckdb_are_refused(con: duckdb.DuckDBPyConnection, server: Seamark) -> None:
    create_partitioned_table(server, "cut", "string", "truncate[3]", [])
    with pytest.raises(duckdb.Error, match="truncate"):
        con.execute("INSERT INTO sea.parts.cut VALUES (1, 'e' || chr(769) || 'abc')")
    con.execute("INSERT INTO sea.parts.cut VALUES (2, 'éabc')")
    assert seamark.duckdb.sql(con, "FROM sea.parts.cut WHERE x = 'éabc'").fetchall() == [(2, "éabc")]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("caches_files", [False, True])
def test_each_data_file_gets_its_vector_of_a_shared_puffin_file(
    server: Seamark, con: duckdb.DuckDBPyConnection, caches_files: bool
) -> None:
    """With its cache, DuckDB reads beyond a large vector, and then uses these bytes for a later small vector.

    The deletion vector of the second of three data files is large, because every third of its 5,000 rows is deleted.
    """
    table_name = f"shop.vectors_{caches_files}".lower()
    con.execute(f"CREATE TABLE sea.{table_name} (id BIGINT) WITH ('format-version' = 3)")
    for first, end in ((0, 10), (10, 5_010), (5_010, 5_020)):
        con.execute(f"INSERT INTO sea.{table_name} SELECT range FROM range({first}, {end})")
    deleted_ids = {3, 5, 5_011, 5_018, *range(10, 5_010, 3)}
    keys = pa.table({"id": sorted(deleted_ids)})
    seamark.delete(SeamarkClient(server.base_url), table_name, keys=keys, key=["id"], mode="merge-on-read")
    if caches_files:
        con.execute("SET GLOBAL enable_external_file_cache = true")
    rows = con.sql(f"SELECT id FROM sea.{table_name} ORDER BY id").fetchall()
    assert rows == [(number,) for number in range(5_020) if number not in deleted_ids]


def test_temporary_tables_and_views_hide_tables_of_the_catalog(con: duckdb.DuckDBPyConnection) -> None:
    create_people(con, "hidden")
    con.execute("USE sea.shop")
    text = "SELECT name FROM hidden WHERE id = 3"
    assert seamark.duckdb.rewrite_query(con, text).statement is not None
    assert read_with_both_plans(con, text) == [("cy",)]
    for kind in ("TABLE", "VIEW"):
        con.execute(f"CREATE TEMP {kind} hidden AS SELECT 3 AS id, '{kind}' AS name")
        assert read_with_both_plans(con, text) == [(kind,)]
        con.execute(f"DROP {kind} hidden")
