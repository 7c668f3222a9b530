"""Tests of views over plan tables: the same rows, rights, types and errors as without the proxy, from fewer files."""

from __future__ import annotations

import json
import random
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trino.exceptions

from tests.deploy.shop import (
    Shop,
    await_final_outcome,
    explain_with_plan_tables,
    is_planned,
    post_statement,
    query_rows,
    run_both_ways,
)
from tests.services.needs import NEEDS_TRINO
from tests.services.trino_proxy import run_trino_proxy

pytestmark = NEEDS_TRINO
SESSION = {"X-Trino-Schema": "views"}
VIEWS = {
    "plain": "SELECT id, country, note FROM shop.orders",
    "renamed": "SELECT o.id AS number, o.note AS country, upper(o.country) AS land FROM shop.orders o",
    "some": "SELECT id, note FROM shop.orders WHERE country <> 'FR' OR id < 4000",
    "named": "SELECT o.id, c.name, o.note FROM shop.orders o JOIN shop.countries c ON o.country = c.code",
    "counted": "SELECT id, count(*) AS n, min(note) AS first FROM shop.orders GROUP BY id",
    "hiding": "SELECT id FROM shop.orders EXCEPT SELECT id FROM shop.orders WHERE country = 'IT'",
    "all_of_it": "WITH o AS (SELECT * FROM shop.orders) SELECT id, note FROM o UNION ALL SELECT -id, note FROM o",
    "converted": "SELECT CAST(id AS varchar) AS id, CAST(id AS double) AS x, id AS raw FROM shop.orders",
    "limited": "SELECT id, note FROM shop.orders ORDER BY id LIMIT 300",
    "nested": "SELECT id, note FROM views.plain WHERE country = 'DE'",
    "deep": 'SELECT n.id, n.note, c.n FROM "Views"."NESTED" AS n JOIN seamark.views.counted c ON c.id = n.id',
    "deeper": "SELECT number, land, deep.note FROM views.renamed LEFT JOIN views.deep ON id = number WHERE number > 9",
    "elsewhere.plain": "SELECT id, note, id + 1 AS next FROM shop.orders WHERE country = 'IT'",
    "twins": "SELECT a.id, b.next, b.note FROM views.plain a LEFT JOIN elsewhere.plain b ON a.id = b.id",
    "hidden": "SELECT id FROM views.hiding EXCEPT SELECT id FROM views.some WHERE note = 'n4711'",
    "alone": "SELECT o.id, s.note FROM shop.orders o JOIN views.some s ON o.id = s.id WHERE o.country = 'DE'",
}
"""The views. Their schema is `views`, except for those that name the schema `elsewhere`."""


@pytest.fixture(
    scope="module",
    params=[
        "EITHER",
        pytest.param("DEFINER", marks=pytest.mark.slow),
        pytest.param("INVOKER", marks=pytest.mark.slow),
    ],
)
def views(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Shop]:
    """Create the views with the parameter as their `SECURITY`.

    EITHER alternates between both values, because a user who may read all tables sees no difference.
    """
    for schema in ("views", "elsewhere"):
        query_rows(shop.trino.port, f"CREATE SCHEMA IF NOT EXISTS seamark.{schema}")
    for number, (name, text) in enumerate(VIEWS.items()):
        security = ("DEFINER", "INVOKER")[number % 2] if request.param == "EITHER" else request.param
        query_rows(shop.trino.port, f"CREATE OR REPLACE VIEW {name} SECURITY {security} AS {text}", schema="views")
    yield shop
    for name in VIEWS:
        query_rows(shop.trino.port, f"DROP VIEW {name}", schema="views")


def read_outcome(shop: Shop, sql: str) -> str:
    return await_final_outcome(shop, sql, **SESSION)


def answer_query(port: int, sql: str) -> Any:
    """Return the rows, or the error."""
    try:
        return query_rows(port, sql, schema="views")
    except trino.exceptions.TrinoUserError as error:
        return error.error_name, error.message


def check_same(shop: Shop, sql: str) -> list[list[Any]]:
    return run_both_ways(shop, sql, schema="views")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("sql", "view_names"),
    [
        ("SELECT * FROM plain WHERE id = 4711", "plain"),
        ("SELECT * FROM named WHERE id = 4711", "named"),
        ("SELECT a.note, b.note FROM plain a, some b WHERE a.id = 30 AND b.id = 31", "plain,views.some"),
        ("EXECUTE IMMEDIATE 'SELECT note FROM plain WHERE id = ?' USING 4711", "plain"),
        ("SELECT * FROM elsewhere.plain a JOIN plain b ON a.id = b.id WHERE a.id = 4712", "plain"),
        # tests/connector/analysis/ tests these forms without Trino too.
        *(
            pytest.param(*sql, marks=pytest.mark.slow)
            for sql in (
                ("SELECT number, country, land FROM renamed WHERE number = 4711", "renamed"),
                ("SELECT * FROM counted WHERE id = 4711", "counted"),
                ("SELECT * FROM deep WHERE id = 4711", "deep"),
                ("SELECT * FROM alone WHERE id = 4711", "alone"),
                ("SELECT plain.note FROM plain WHERE plain.id IN (4711, 4712) ORDER BY 1", "plain"),
                ("SELECT * FROM some WHERE id = 4712", "some"),
                ("SELECT * FROM hiding WHERE id IN (4711, 4712) ORDER BY 1", "hiding"),
                ("SELECT raw, id, x FROM converted WHERE raw = 4711 AND x > 5", "converted"),
                ("WITH orders AS (SELECT 1 AS id) SELECT * FROM orders, plain WHERE plain.id = 77", "plain"),
                ("SELECT * FROM nested WHERE id = 4711", "nested"),
                ("SELECT nested.note FROM nested WHERE id IN (4711, 4712, 4713) ORDER BY 1", "nested"),
                ("SELECT * FROM deeper WHERE number IN (4711, 4712) ORDER BY 1", "deeper"),
                ("SELECT * FROM twins WHERE id IN (4711, 4712) ORDER BY 1", "twins"),
                ("SELECT * FROM hidden WHERE id IN (4711, 4713) ORDER BY 1", "hidden"),
                ("SELECT * FROM deep d JOIN shop.orders o ON o.id = d.id WHERE o.id = 4711", "deep"),
            )
        ),
    ],
)
def test_tables_of_a_view_are_replaced_by_plan_tables(views: Shop, sql: str, view_names: str) -> None:
    """A plan table has only the files that a statement needs. The texts of the views are in `VIEWS`."""
    assert check_same(views, sql) is not None
    view_outcome = read_outcome(views, sql)
    assert view_outcome.endswith(f"views.{view_names}"), view_outcome
    assert "; views=" in view_outcome
    assert view_outcome.startswith("rewritten; ")


def test_view_reads_only_the_needed_files(views: Shop) -> None:
    sql = "EXPLAIN ANALYZE SELECT * FROM plain WHERE id = 4711"
    assert explain_with_plan_tables(views, sql, schema="views")
    assert not is_planned(views, query_rows(views.trino.port, sql, schema="views")[0][0])
    for view in ("nested", "deep", "deeper"):
        column = "number" if view == "deeper" else "id"
        explain = f"EXPLAIN SELECT * FROM {view} WHERE {column} = 4711"
        assert explain_with_plan_tables(views, explain, schema="views")
    count_query = "SELECT count(*) FROM views.plain WHERE id % 1 = 0 AND id = 4711"
    assert run_both_ways(views, count_query) == [[1]]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM converted WHERE id = '4711'",
        pytest.param("SELECT * FROM converted WHERE x = 4711", marks=pytest.mark.slow),
        "SELECT * FROM limited WHERE id = 4711",
        pytest.param("SELECT * FROM renamed WHERE land = 'DE' ORDER BY number LIMIT 5", marks=pytest.mark.slow),
        "SELECT count(*) FROM plain",
    ],
)
def test_view_that_cannot_be_analysed_passes_unchanged(views: Shop, sql: str) -> None:
    check_same(views, sql)
    assert read_outcome(views, sql).startswith("unchanged; ")


@pytest.mark.slow
@pytest.mark.parametrize("queries", [4, 50])
def test_random_statements_over_views_give_equal_rows(views: Shop, queries: int) -> None:
    rng, count_before = random.Random(5), count_plan_views(views)
    for _ in range(queries):
        sql = draw_statement(rng)
        check_same(views, sql)
    assert count_plan_views(views) - count_before > 0.4 * queries


def count_plan_views(shop: Shop) -> int:
    """Return the number of statements for which the proxy has made plan views.

    A plan view is a copy of a view that reads only the files of a plan.
    """
    return shop.proxy.process.log.read_text().count("; views=views.")


def draw_statement(rng: random.Random) -> str:
    """Return a random statement over one view or two, with conditions that some files satisfy."""
    # The columns of each view in conditions: the key of the table, a column with text, and any other column.
    columns = {
        "plain": ("id", "country", "note"),
        "renamed": ("number", "country", "land"),
        "some": ("id", "note", "note"),
        "named": ("id", "name", "note"),
        "counted": ("id", "first", "first"),
        "all_of_it": ("id", "note", "note"),
        "hiding": ("id", "id", "id"),
        "converted": ("raw", "id", "id"),
        "nested": ("id", "note", "note"),
        "deep": ("id", "note", "n"),
        "deeper": ("number", "land", "note"),
        "twins": ("id", "next", "note"),
        "hidden": ("id", "id", "id"),
        "alone": ("id", "note", "note"),
    }

    def draw_condition(name: str, alias: str) -> str:
        key, text, other = (f"{alias}.{column}" for column in columns[name])
        number = rng.randrange(10_050)
        choices = [
            f"{key} = {number}",
            f"{key} IN ({number}, {number + 20}, {number + 40})",
            f"{key} = {number} OR {key} = {number + 1}",
            f"{key} BETWEEN {number} AND {number + 3}",
            f"NOT ({key} <> {number})",
            f"{key} IS NULL",
            f"({key} = {number} AND CAST({text} AS varchar) <> 'DE')",
            f"{key} = {number} AND CAST({other} AS varchar) LIKE '%1%'",
        ]
        return rng.choice(choices)

    view, other_view = rng.choice(list(columns)), rng.choice(list(columns))
    key_column, other_key_column = columns[view][0], columns[other_view][0]
    where = f"WHERE {draw_condition(view, 'a')}"
    match rng.randrange(6):
        case 0:
            return (
                f"SELECT a.* FROM {view} a {where} ORDER BY 1, 2"
                if view not in ("hiding", "hidden")
                else f"SELECT * FROM {view} a {where} ORDER BY 1"
            )
        case 1:
            return f"SELECT count(*) FROM {view} a {where}"
        case 2:
            join = rng.choice(["JOIN", "LEFT JOIN", "FULL JOIN"])
            keys = f"a.{key_column} = b.{other_key_column}"
            return f"SELECT count(*), max(a.{key_column}) FROM {view} a {join} {other_view} b ON {keys} {where}"
        case 3:
            inner = f"SELECT 1 FROM shop.orders o WHERE o.id = a.{key_column}"
            return f"SELECT count(*) FROM {view} a {where} AND EXISTS ({inner})"
        case 4:
            view_join = f"(SELECT * FROM {view}) a, shop.orders o"
            return f"SELECT count(*) FROM {view_join} {where} AND o.id = a.{key_column}"
        case _:
            return f"SELECT count(*) FROM {view} a {where} OR {draw_condition(view, 'a')}"


@pytest.mark.slow
def test_replaced_view_is_read_in_its_current_form(views: Shop, request: pytest.FixtureRequest) -> None:
    port = views.proxy.port
    # For some time, the proxy does not check again whether a name has become a view, so each case has its own name.
    view_name = f"turning_{request.node.callspec.params['views'].lower()}"
    for number in range(4):
        text = f"SELECT id + {number} AS other, note, id FROM shop.orders WHERE id <> {number}"
        query_rows(views.trino.port, f"CREATE OR REPLACE VIEW views.{view_name} AS {text}")
        # Each version of the view has the row 4711 and leaves out the row `number`.
        for key in (4711, number):
            sql = f"SELECT * FROM {view_name} WHERE id = {key}"
            assert len(check_same(views, sql)) == (key == 4711)
    assert read_outcome(views, sql).endswith(f"views=views.{view_name}")
    query_rows(views.trino.port, f"DROP VIEW views.{view_name}")
    query_rows(views.trino.port, f"CREATE TABLE views.{view_name} AS SELECT id, note FROM shop.orders WHERE id < 50")
    assert check_same(views, f"SELECT * FROM {view_name} WHERE id = 3") == [[3, "n3"]]
    query_rows(views.trino.port, f"DROP TABLE views.{view_name}")
    with pytest.raises(trino.exceptions.TrinoUserError, match=r"Table 'seamark\.views\.turning\w+' does not exist"):
        query_rows(port, f"SELECT * FROM {view_name} WHERE id = 3", schema="views")


@pytest.mark.slow
def test_replaced_inner_view_is_read_in_its_current_form(views: Shop, request: pytest.FixtureRequest) -> None:
    direct_port, port = views.trino.port, views.proxy.port
    # For some time, the proxy does not check again whether a name has become a view, so each case has its own name.
    view_below = f"views.below_{request.node.callspec.params['views']}"
    sql = "SELECT * FROM above WHERE id IN (4711, 4712, 4713) ORDER BY 1"
    for number in range(3):
        text = f"SELECT note, id FROM shop.orders WHERE id <> {4711 + number}"
        query_rows(direct_port, f"CREATE OR REPLACE VIEW {view_below} AS {text}")
        query_rows(direct_port, f"CREATE OR REPLACE VIEW views.above AS SELECT a.id, a.note FROM {view_below} a")
        remaining_ids = [row_id for row_id in (4711, 4712, 4713) if row_id != 4711 + number]
        assert [row_id for row_id, _ in check_same(views, sql)] == remaining_ids
        assert read_outcome(views, sql).endswith("; views=views.above")
    query_rows(direct_port, f"DROP VIEW {view_below}")
    assert answer_query(direct_port, sql) == answer_query(port, sql)
    query_rows(direct_port, f"CREATE TABLE {view_below} AS SELECT note, id FROM shop.orders WHERE id < 4712")
    assert check_same(views, sql) == [[4711, "n4711"]]
    query_rows(direct_port, f"DROP TABLE {view_below}")
    assert answer_query(direct_port, sql) == answer_query(port, sql)
    query_rows(direct_port, "DROP VIEW views.above")


@pytest.mark.slow  # It stops Trino for seconds, so its result depends on the speed of the machine.
def test_inner_view_that_changes_during_planning_does_not_fail_the_statement(views: Shop, tmp_path: Path) -> None:
    """The test pauses Trino while the view changes. The proxy then sends the original statement."""
    sql = "SELECT * FROM deep WHERE id = 4711"
    comment_commit = {"updates": [{"action": "set-properties", "updates": {"comment": "another"}}]}
    change_request = urllib.request.Request(
        f"{views.seamark.base_url}/v1/namespaces/views/views/plain", json.dumps(comment_commit).encode(), method="POST"
    )
    change_request.add_header("Content-Type", "application/json")
    flags = ("--trino", views.trino.base_url, "--budget-ms", "30000", "--hold", "60")
    with run_trino_proxy(tmp_path, *flags, seamark=views.planner.base_url) as proxy, ThreadPoolExecutor(1) as threads:
        assert post_statement(proxy.port, sql, **SESSION)[0].startswith("rewritten")
        views.trino.process.send(signal.SIGSTOP)
        try:
            query_future = threads.submit(query_rows, proxy.port, sql, schema="views")
            with pytest.raises(TimeoutError):  # The query cannot end while Trino is paused.
                query_future.result(timeout=3)
            with urllib.request.urlopen(change_request, timeout=60):
                pass
            views.trino.process.send(signal.SIGCONT)
            assert query_future.result(timeout=120) == [[4711, "n4711", 1]]
        finally:
            views.trino.process.send(signal.SIGCONT)
        assert proxy.count_statements("original") == 1
        assert query_rows(proxy.port, sql, schema="views") == [[4711, "n4711", 1]]
        assert proxy.count_statements("original") == 1


@pytest.mark.slow
def test_stale_view_fails_as_without_the_proxy(views: Shop) -> None:
    """After the creation of the view, its table has got different types or columns."""
    direct_port, port = views.trino.port, views.proxy.port
    for change in ("ALTER COLUMN a SET DATA TYPE bigint", "RENAME COLUMN a TO c", "DROP COLUMN a"):
        query_rows(
            direct_port, "CREATE TABLE views.base AS SELECT CAST(id AS integer) AS a, note AS b FROM shop.orders"
        )
        query_rows(direct_port, "INSERT INTO views.base VALUES (-1, 'x')")
        query_rows(direct_port, "CREATE VIEW views.stale AS SELECT * FROM views.base")
        assert check_same(views, "SELECT * FROM stale WHERE a = -1") == [[-1, "x"]]
        query_rows(direct_port, f"ALTER TABLE views.base {change}")
        sql = "SELECT * FROM stale WHERE a = -1"
        assert answer_query(direct_port, sql) == answer_query(port, sql)
        query_rows(direct_port, "DROP VIEW views.stale")
        query_rows(direct_port, "DROP TABLE views.base")
