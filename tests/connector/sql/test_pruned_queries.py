"""Tests that random queries return the same rows with and without conditions and joins that leave files out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, LongType, MapType, NestedField, StringType, StructType, UUIDType

from seamark import append
from seamark.connector.analysis import scans
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.sql import reads, statement
from seamark.connector.sql.session import SqlSession
from seamark.formats.iceberg.expressions.sql_parser import parse_statements
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import count_rows
from tests.connector.sql.random_queries import SCHEMA, TABLES, RandomQueries, draw_rows
from tests.seeds import examples, first_seed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("pruned")) as server:
        rng = random.Random(5)
        with open_catalog(server.url) as catalog:
            for name in TABLES:
                table = catalog.create_table(f"db.{name}", schema=SCHEMA)
                for _ in range(4):
                    table.append(draw_rows(rng, 12))
                table.delete("id = 3")
        yield server


def compare_random_queries(url: str, seed: int, query_count: int) -> Counter[str]:
    """Compare the rows of random queries with and without files left out.

    Return the numbers of files that were left out, and of joins.
    """
    counts: Counter[str] = Counter()
    random_queries = RandomQueries(random.Random(seed), "db")
    # A session caches the analysis of a statement, so the statement without an analysis runs in a separate session.
    with SqlSession(url) as session, SqlSession(url) as unpruned_session:
        for number in range(query_count):
            text = random_queries.draw_query()
            pruned_result = session.sql(text)
            counts["files left out"] += sum(
                table.considered_files - table.files for table in pruned_result.explanation.tables
            )
            counts["joins"] += sum(len(table.joins) for table in pruned_result.explanation.tables)
            rows = count_rows(pruned_result)
            with patch.object(reads, "collect_scans", lambda *_, **__: ()):
                unpruned_result = unpruned_session.sql(text)
                assert all(table.files == table.considered_files for table in unpruned_result.explanation.tables)
                assert rows == count_rows(unpruned_result), f"seed {seed}, query {number}: {text}"
    return counts


def test_pruned_queries_return_the_rows_of_whole_tables(server: ServerThread) -> None:
    counts = compare_random_queries(server.url, first_seed(), examples(60, 10))
    assert counts["files left out"] > 0


@pytest.mark.slow
def test_a_thousand_pruned_queries_return_the_rows_of_whole_tables(server: ServerThread) -> None:
    counts = compare_random_queries(server.url, first_seed(), 1000)
    assert counts["files left out"] > 100


def test_join_with_a_small_table_leaves_files_of_a_large_table_out(server: ServerThread) -> None:
    with SqlSession(server.url) as session:
        text = "SELECT count(*) FROM db.t1 a JOIN db.t2 b ON a.id = b.id WHERE b.name = 'nothing has this name'"
        actual = session.sql(text)
        assert actual.explanation.tables[0].joins == (("id", 0),)
        assert actual.to_arrow().column(0).to_pylist() == [0]


def test_uuids_are_compared_joined_and_written_as_uuids(server: ServerThread) -> None:
    """UUIDs may also be in structs, lists and maps. DuckDB pushes keys of joins into the scan of a table."""
    texts = ["00000000-0000-0000-0000-000000000001", "ffffffff-ffff-ffff-ffff-ffffffffffff"]
    uuids = pa.array([UUID(text).bytes for text in texts], pa.binary(16))
    struct_kind = StructType(NestedField(11, "u", UUIDType()))
    schema = Schema(
        NestedField(1, "id", LongType()),
        NestedField(2, "u", UUIDType()),
        NestedField(3, "st", struct_kind),
        NestedField(4, "l", ListType(12, UUIDType())),
        NestedField(5, "m", MapType(13, StringType(), 14, UUIDType())),
    )
    offsets = pa.array([0, 1, 2], pa.int32())
    rows = {"id": pa.array([1, 2]), "u": uuids, "st": pa.StructArray.from_arrays([uuids], names=["u"])}
    rows["l"] = pa.ListArray.from_arrays(offsets, uuids)
    rows["m"] = pa.MapArray.from_arrays(offsets, pa.array(["k", "k"]), uuids)
    with open_catalog(server.url) as catalog:
        catalog.create_table("db.uuids", schema=schema)
    with closing(IndexClient(server.url)) as client:
        append(client, "db.uuids", pa.table(rows))
    expressions = ("u", "st.u", "l[1]", "element_at(m, 'k')")
    with SqlSession(server.url) as session:
        for expression in expressions:
            texts_query = f"SELECT {expression} AS v, CAST({expression} AS varchar) AS w FROM db.uuids ORDER BY id"
            assert session.sql(texts_query).to_arrow().to_pydict() == {"v": texts, "w": texts}
            conditions = (
                f"{expression} = UUID '{texts[1]}'",
                f"{expression} = (SELECT max(u) FROM db.uuids)",
                f"{expression} IN (SELECT u FROM db.uuids WHERE id = 2)",
                f"coalesce({expression}, u) > (SELECT min(st.u) FROM db.uuids)",
                f"contains(l, {expression})",
            )
            result = session.sql(f"SELECT id FROM db.uuids WHERE {' AND '.join(conditions)}")
            assert result.to_arrow().column(0).to_pylist() == [2], expression
        joined_rows = session.sql(
            "SELECT x.u FROM db.uuids x JOIN db.uuids y ON x.u = y.u JOIN db.uuids z ON y.u = z.st.u"
        )
        assert sorted(joined_rows.to_arrow().column(0).to_pylist()) == texts
        session.sql("INSERT INTO db.uuids SELECT id + 2, element_at(m, 'k'), st, l, m FROM db.uuids")
        session.sql("UPDATE db.uuids SET u = l[1], st = st WHERE id > 2")
        changed_rows = session.sql("SELECT u, st.u AS v FROM db.uuids ORDER BY id").to_arrow().to_pydict()
        assert changed_rows == {"u": texts * 2, "v": texts * 2}


@pytest.mark.parametrize(
    ("text", "expected_count"),
    [
        ("SELECT name FROM db.t1 WHERE id = 4711", 1),
        ("\n-- a comment\n SELECT name FROM /* another */ db.t1 WHERE id = 4711", 1),
        ("INSERT INTO db.t1 WITH a AS (SELECT * FROM db.t2) SELECT * FROM a WHERE id = 4711", 1),
        ("DELETE FROM db.t1 WHERE id = 4711", 2),
    ],
)
def test_statement_is_parsed_once(server: ServerThread, text: str, expected_count: int) -> None:
    """DELETE and UPDATE are parsed a second time, as the query of the rows that they change."""
    parse_counts = Counter[str]()

    def count_and_parse(*args: Any, **options: Any) -> Any:
        parse_counts["parses"] += 1
        return parse_statements(*args, **options)

    with (
        SqlSession(server.url) as session,
        patch.object(statement, "parse_statements", count_and_parse),
        patch.object(scans, "parse_statements", count_and_parse),
    ):
        (table_report,) = session.explain(text).tables
    assert table_report.files < table_report.considered_files
    assert parse_counts["parses"] == expected_count


def test_tag_is_read_as_the_snapshot_that_it_names(server: ServerThread) -> None:
    with open_catalog(server.url) as catalog:
        snapshot_ids = {}
        for name in TABLES:
            table = catalog.load_table(f"db.{name}")
            snapshot_ids[name] = table.snapshots()[2].snapshot_id
            table.manage_snapshots().create_tag(snapshot_ids[name], "it's").commit()
    queries = RandomQueries(random.Random(first_seed() + 1), "db")
    with SqlSession(server.url) as session:
        for number in range(examples(30, 4)):
            text = queries.draw_query()
            for name in TABLES:
                text = text.replace(f"db.{name} ", f"db.{name} FOR VERSION AS OF 'it''s' ")
            result_at_tag = session.sql(text)
            for name in TABLES:
                text = text.replace(
                    f"db.{name} FOR VERSION AS OF 'it''s'", f"db.{name} FOR VERSION AS OF {snapshot_ids[name]}"
                )
            assert count_rows(result_at_tag) == count_rows(session.sql(text)), (
                f"seed {first_seed() + 1}, query {number}: {text}"
            )
        with pytest.raises(InvalidRequest, match="Cannot find the branch or tag 'none'; the table has it's, main"):
            session.sql("SELECT * FROM db.t1 FOR VERSION AS OF 'none'")
        self_join = "SELECT count(*) FROM db.t1 a JOIN db.t1 FOR VERSION AS OF 'it''s' b ON a.id = b.id"
        with pytest.raises(InvalidRequest, match="at a branch or tag, and also at a second snapshot"):
            session.explain(self_join)
        (table_report,) = session.explain("SELECT id FROM db.t1 FOR VERSION AS OF 'it''s' WHERE id = 4711").tables
        assert (table_report.files, table_report.considered_files) == (0, 3)


def test_branch_is_loaded_once_for_a_statement_and_follows_its_commits(server: ServerThread) -> None:
    name = "db.branched"
    with open_catalog(server.url) as catalog:
        table = catalog.create_table(name, schema=SCHEMA)
        table.append(draw_rows(random.Random(1), 9))
        table.manage_snapshots().create_branch(table.snapshots()[0].snapshot_id, "b").commit()
    counts, load_table = Counter[str](), SeamarkClient.load_table

    def count_load(client: SeamarkClient, *args: Any, **options: Any) -> Any:
        loaded_table = load_table(client, *args, **options)
        counts["unchanged" if loaded_table is options.get("loaded_before") else "loads"] += 1
        return loaded_table

    text = f"SELECT * FROM {name} FOR VERSION AS OF 'b'"
    with patch.object(SeamarkClient, "load_table", count_load), SqlSession(server.url) as session:
        assert sum(count_rows(session.sql(text)).values()) == 9
        assert counts["loads"] == 1
        assert sum(count_rows(session.sql(text)).values()) == 9
        assert counts["loads"] == 1, "the branch has not changed"
        assert counts["unchanged"] >= 1
        with open_catalog(server.url) as catalog:
            table = catalog.load_table(name)
            table.append(draw_rows(random.Random(2), 5), branch="b")
            with table.update_schema() as update:
                update.rename_column("name", "title")
        result_after_commit = session.sql(text)
        snapshot_id = catalog.load_table(name).refs()["b"].snapshot_id
        assert result_after_commit.to_arrow().column_names == SCHEMA.names, "the schema of the snapshot"
        assert count_rows(session.sql(text)) == count_rows(
            session.sql(f"SELECT * FROM {name} FOR VERSION AS OF {snapshot_id}")
        )
        assert sum(count_rows(session.sql(text)).values()) == 14
        assert sum(count_rows(session.sql(f"SELECT * FROM {name}")).values()) == 9
        for version in ("b", snapshot_id, None):  # An open table does not need the other snapshots.
            named_table = session._tables.open(("db", "branched"), version)
            opened_ids = [snapshot.snapshot_id for snapshot in named_table.open_table.history]
            assert opened_ids == [named_table.open_table.snapshot_id]
            assert named_table.loaded is not None
            assert named_table.loaded.metadata == b""
