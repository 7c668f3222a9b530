"""Tests that INSERT, UPDATE and DELETE of `seamark sql` change exactly the rows of their conditions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from seamark.connector.sql import session as sessions
from seamark.connector.sql.changes import divide_row_change
from seamark.connector.sql.session import SqlSession
from seamark.connector.sql.types import UnsupportedInDuckDB
from seamark.connector.write.appends import append
from tests.connector.server_thread import ServerThread

TIMES = {
    "timestamp": ["1969-12-31 12:00:00", "1969-12-01 00:00:00", "1950-02-28 23:59:59.999999", "2024-05-05 00:00:00"],
    "date": ["1969-12-31", "1969-12-01", "1950-02-28", "2024-05-05"],
}


@pytest.fixture
def session(server: ServerThread) -> Iterator[SqlSession]:
    with SqlSession(server.url) as session:
        yield session


def create_table(
    client: IndexClient, name: str, columns: list[tuple[str, Any]], transform: str = "", **properties: str
) -> None:
    """Create a table that is partitioned by its last column if a transform is given."""
    fields = [{"id": n, "name": column, "required": False, "type": kind} for n, (column, kind) in enumerate(columns, 1)]
    body: dict[str, Any] = {"name": name, "schema": {"type": "struct", "fields": fields}, "properties": properties}
    if transform:
        field = {"name": "part", "transform": transform, "source-id": len(columns), "field-id": 1000}
        body["partition-spec"] = {"spec-id": 0, "fields": [field]}
    client._request("POST", "/v1/namespaces/db/tables", {}, json.dumps(body).encode())


def read_ids(session: SqlSession, table: str) -> list[int]:
    return sorted(session.sql(f"SELECT id FROM {table}").to_arrow()["id"].to_pylist())


def count_changed_rows(session: SqlSession, text: str) -> int | None:
    (rows,) = session.sql(text).to_arrow()["rows"].to_pylist()
    return rows if rows is None else int(rows)


@pytest.mark.parametrize("kind", TIMES)
def test_rows_before_1970_are_changed(client: IndexClient, session: SqlSession, kind: str) -> None:
    """DuckDB's extension truncates months and days towards zero, and therefore leaves out the files of these rows."""
    date_transforms = ("year", "day", "bucket[3]")
    for transform in (*date_transforms, "month", "hour", "identity") if kind == "timestamp" else date_transforms:
        table = f"{kind}_{transform[:3]}"
        create_table(client, table, [("id", "long"), ("at", kind)], transform)
        values = ", ".join(f"({n}, {kind.upper()} '{text}')" for n, text in enumerate(TIMES[kind]))
        assert count_changed_rows(session, f"INSERT INTO db.{table} VALUES {values}") == 4
        for number, text in enumerate(TIMES[kind]):
            where = f"WHERE at = {kind.upper()} '{text}'"
            assert count_changed_rows(session, f"UPDATE db.{table} SET id = id + 10 {where}") == 1, (transform, text)
            assert read_ids(session, f"db.{table}") == sorted(n + 10 * (n <= number) for n in range(4))
        assert count_changed_rows(session, f"DELETE FROM db.{table} WHERE at < {kind.upper()} '1969-12-15'") == 2
        # The second and the third row are earlier than the middle of December 1969.
        assert read_ids(session, f"db.{table}") == [10, 13]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("version", "mode"), [(2, "merge-on-read"), (2, "copy-on-write"), (3, ""), (3, "copy-on-write")]
)
def test_changed_rows_keep_their_other_columns_and_ids(
    client: IndexClient, session: SqlSession, version: int, mode: str
) -> None:
    modes = {f"write.{kind}.mode": mode for kind in ("update", "delete")} if mode else {}
    nested_type = {"type": "list", "element-id": 9, "element-required": False, "element": "string"}
    columns = [("id", "long"), ("name", "string"), ("tags", nested_type), ("at", "timestamptz")]
    create_table(client, "t", columns, **{"format-version": str(version), **modes})
    arrow_types = {"id": pa.int64(), "name": pa.string(), "tags": pa.list_(pa.string())}
    schema = pa.schema([*arrow_types.items(), ("at", pa.timestamp("us", "UTC"))])
    for start in (0, 4):
        rows = [{"id": n, "name": f"n{n}", "tags": ["é", None], "at": n} for n in range(start, start + 4)]
        append(client, "db.t", pa.Table.from_pylist(rows, schema))
    read_columns = [*schema.names, "_row_id"] if version == 3 else schema.names
    rows_before = {row["id"]: row for row in scan(client, "db.t", read_columns).to_arrow().to_pylist()}
    assert count_changed_rows(session, "UPDATE db.t SET name = upper(name) WHERE id IN (1, 5) OR name = 'n2'") == 3
    assert count_changed_rows(session, "DELETE FROM db.t WHERE id > 5") == 2
    rows_after = {row["id"]: row for row in scan(client, "db.t", read_columns).to_arrow().to_pylist()}
    for changed_id in (1, 2, 5):
        rows_before[changed_id]["name"] = f"N{changed_id}"
    assert rows_after == {number: row for number, row in rows_before.items() if number <= 5}
    contents = client.files("db.t", content="all")["content"].to_pylist()
    assert ("position-deletes" in contents) == (mode != "copy-on-write"), contents


def test_condition_of_a_change_can_read_the_changed_table(client: IndexClient, session: SqlSession) -> None:
    create_table(client, "t", [("id", "long"), ("n", "long")])
    session.sql("INSERT INTO db.t VALUES (1, 10), (2, 20), (3, 30)")
    session.sql("INSERT INTO db.t SELECT id + 3, n FROM db.t WHERE n > 10")
    assert read_ids(session, "db.t") == [1, 2, 3, 5, 6]
    assert (
        count_changed_rows(
            session, "UPDATE db.t SET n = (SELECT max(id) FROM db.t) WHERE n = (SELECT min(n) FROM db.t)"
        )
        == 1
    )
    assert count_changed_rows(session, "DELETE FROM db.t WHERE id IN (SELECT id - 3 FROM db.t WHERE id > 4)") == 2
    assert count_changed_rows(session, "DELETE FROM db.t WHERE id = 99") == 0
    assert session.sql("SELECT id, n FROM db.t ORDER BY id").to_arrow().to_pylist() == [
        {"id": 1, "n": 6},
        {"id": 5, "n": 20},
        {"id": 6, "n": 30},
    ]


def test_change_runs_again_after_a_concurrent_commit(
    client: IndexClient, session: SqlSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(client, "t", [("id", "long"), ("n", "long")])
    session.sql("INSERT INTO db.t VALUES (1, 1)")
    compute_rows, concurrent_writes = (
        sessions.SqlSession._compute_rows,
        [lambda: append(client, "db.t", pa.table({"id": [2], "n": [1]}))],
    )

    def compute_and_write(self: SqlSession, *arguments: Any) -> Any:
        rows = compute_rows(self, *arguments)
        for write in concurrent_writes:
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        concurrent_writes.clear()
        return rows

    monkeypatch.setattr(sessions.SqlSession, "_compute_rows", compute_and_write)
    assert count_changed_rows(session, "UPDATE db.t SET n = n + 1 WHERE n = 1") == 2
    assert session.sql("SELECT id, n FROM db.t ORDER BY id").to_arrow()["n"].to_pylist() == [2, 2]


REFUSED_STATEMENTS = [
    ("UPDATE db.t SET n = 1, n = 2", "twice"),
    ("UPDATE db.t SET n = 'x' WHERE id = 1", "use CAST"),
    ("UPDATE db.t SET missing = 1", "no column 'missing'"),
    ("UPDATE db.t SET id = NULL", "required"),
    ("INSERT INTO db.t (n) VALUES (1)", "required"),
    ("INSERT INTO db.t VALUES (1)", "1 values for 2 columns"),
    ("UPDATE db.old SET n = 1", "version 1"),
    ("DELETE FROM db.t WHERE missing = 1", "does not exist"),
    ("UPDATE db.t SET n = id / 0", "zero"),
    ("UPDATE db.t SET n = *", "not translated"),
    ('DELETE FROM db.t WHERE "$place" = 0', "does not exist"),
]


def test_failed_statement_does_not_change_the_table(client: IndexClient, session: SqlSession) -> None:
    fields = [{"id": n, "name": name, "required": n == 1, "type": "long"} for n, name in enumerate(("id", "n"), 1)]
    body = {"name": "t", "schema": {"type": "struct", "fields": fields}}
    client._request("POST", "/v1/namespaces/db/tables", {}, json.dumps(body).encode())
    create_table(client, "old", [("id", "long"), ("n", "long")], **{"format-version": "1"})
    session.sql("INSERT INTO db.t VALUES (1, 1)")
    session.sql("INSERT INTO db.old VALUES (1, NULL)")
    for text, reason in REFUSED_STATEMENTS:
        with pytest.raises(InvalidRequest, match=reason):
            session.sql(text).to_arrow()
    assert session.sql("SELECT id, n FROM db.t").to_arrow().to_pylist() == [{"id": 1, "n": 1}]
    assert len(client.files("db.t")) == len(client.files("db.old")) == 1


def test_row_change_is_divided_into_its_source_and_values() -> None:
    text = 'UPDATE "a,b".t /* , */ SET x = f(1, 2) -- WHERE\n'
    text += ", y = CASE WHEN z = 1 THEN 'WHERE' END WHERE x IN (1, 2) ; "
    parts = divide_row_change(text)
    assert parts.values == ("f(1, 2)", "CASE WHEN z = 1 THEN 'WHERE' END")
    assert parts.source == '"a,b".t WHERE x IN (1, 2)'
    assert divide_row_change("delete from t").source == "t"
    for statement in ("UPDATE t", "UPDATE t SET x", "DELETE t", "MERGE INTO t", "UPDATE t SET x ="):
        with pytest.raises(UnsupportedInDuckDB):
            divide_row_change(statement)
