"""Views read over plan tables: the same rows, rights, types and errors as without the proxy, from fewer files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import trino.exceptions

from tests.deploy.shop import Shop, both, rows_of, told
from tests.services.trino import NEEDS_TRINO

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
}


@pytest.fixture(scope="module", params=["DEFINER", "INVOKER"])
def views(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Shop]:
    rows_of(shop.trino.port, "CREATE SCHEMA IF NOT EXISTS seamark.views")
    for name, text in VIEWS.items():
        rows_of(shop.trino.port, f"CREATE OR REPLACE VIEW views.{name} SECURITY {request.param} AS {text}")
    yield shop
    for name in VIEWS:
        rows_of(shop.trino.port, f"DROP VIEW views.{name}")


def told_of(shop: Shop, sql: str) -> str:
    return told(shop, sql, **SESSION)


def same(shop: Shop, sql: str) -> list[list[Any]]:
    return both(shop, sql, schema="views")


@pytest.mark.parametrize(
    ("sql", "views_named"),
    [
        ("SELECT * FROM plain WHERE id = 4711", "plain"),
        ("SELECT plain.note FROM plain WHERE plain.id IN (4711, 4712) ORDER BY 1", "plain"),
        ("SELECT number, country, land FROM renamed WHERE number = 4711", "renamed"),
        ("SELECT * FROM some WHERE id = 4712", "some"),
        ("SELECT * FROM named WHERE id = 4711", "named"),
        ("SELECT * FROM counted WHERE id = 4711", "counted"),
        ("SELECT * FROM hiding WHERE id IN (4711, 4712) ORDER BY 1", "hiding"),
        ("SELECT raw, id, x FROM converted WHERE raw = 4711 AND x > 5", "converted"),
        ("SELECT a.note, b.note FROM plain a, some b WHERE a.id = 30 AND b.id = 31", "plain,views.some"),
        ("WITH orders AS (SELECT 1 AS id) SELECT * FROM orders, plain WHERE plain.id = 77", "plain"),
        ("EXECUTE IMMEDIATE 'SELECT note FROM plain WHERE id = ?' USING 4711", "plain"),
    ],
)
def test_a_view_is_read_over_plan_tables(views: Shop, sql: str, views_named: str) -> None:
    assert same(views, sql) is not None
    done = told_of(views, sql)
    assert done.endswith(f"; views=views.{views_named}"), done
    assert done.startswith("rewritten; ")


def test_only_the_files_that_are_needed_are_read(views: Shop) -> None:
    sql = "EXPLAIN ANALYZE SELECT * FROM plain WHERE id = 4711"
    assert "orders~plan~" in rows_of(views.proxy.port, sql, schema="views")[0][0]
    direct = rows_of(views.trino.port, sql, schema="views")[0][0]
    assert "orders~plan~" not in direct
    counted = "SELECT count(*) FROM views.plain WHERE id % 1 = 0 AND id = 4711"
    assert both(views, counted) == [[1]]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM converted WHERE id = '4711'",
        "SELECT * FROM converted WHERE x = 4711",
        "SELECT * FROM limited WHERE id = 4711",
        "SELECT * FROM renamed WHERE land = 'DE' ORDER BY number LIMIT 5",
        "SELECT * FROM nested WHERE id = 4711",
        "SELECT count(*) FROM plain",
    ],
)
def test_a_view_that_cannot_be_looked_into_passes_as_it_came(views: Shop, sql: str) -> None:
    same(views, sql)
    assert told_of(views, sql).startswith("unchanged; ")


def test_random_statements_over_views_give_the_same_rows(views: Shop) -> None:
    rng, before = random.Random(5), over_plans(views)
    for _ in range(30):
        sql = statement(rng)
        same(views, sql)
    assert over_plans(views) - before > 10


def over_plans(shop: Shop) -> int:
    """How many statements read a view over plans so far."""
    return shop.proxy.process.log.read_text().count("; views=views.")


def statement(rng: random.Random) -> str:
    """Over one view or two, with conditions that some files meet."""
    columns = {
        "plain": ("id", "country", "note"),
        "renamed": ("number", "country", "land"),
        "some": ("id", "note", "note"),
        "named": ("id", "name", "note"),
        "counted": ("id", "first", "first"),
        "all_of_it": ("id", "note", "note"),
        "hiding": ("id", "id", "id"),
        "converted": ("raw", "id", "id"),
    }

    def condition(name: str, alias: str) -> str:
        key, text, other = (f"{alias}.{one}" for one in columns[name])
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

    one, two = rng.choice(list(columns)), rng.choice(list(columns))
    where = f"WHERE {condition(one, 'a')}"
    match rng.randrange(6):
        case 0:
            return (
                f"SELECT a.* FROM {one} a {where} ORDER BY 1, 2"
                if one != "hiding"
                else f"SELECT * FROM {one} a {where} ORDER BY 1"
            )
        case 1:
            return f"SELECT count(*) FROM {one} a {where}"
        case 2:
            join = rng.choice(["JOIN", "LEFT JOIN", "FULL JOIN"])
            keys = f"a.{columns[one][0]} = b.{columns[two][0]}"
            return f"SELECT count(*), max(a.{columns[one][0]}) FROM {one} a {join} {two} b ON {keys} {where}"
        case 3:
            inner = f"SELECT 1 FROM shop.orders o WHERE o.id = a.{columns[one][0]}"
            return f"SELECT count(*) FROM {one} a {where} AND EXISTS ({inner})"
        case 4:
            return f"SELECT count(*) FROM (SELECT * FROM {one}) a, shop.orders o {where} AND o.id = a.{columns[one][0]}"
        case _:
            return f"SELECT count(*) FROM {one} a {where} OR {condition(one, 'a')}"


def test_a_view_that_is_replaced_is_read_as_it_is(views: Shop) -> None:
    port = views.proxy.port
    for number in range(4):
        text = f"SELECT id + {number} AS other, note, id FROM shop.orders WHERE id <> {number}"
        rows_of(views.trino.port, f"CREATE OR REPLACE VIEW views.turning AS {text}")
        for one in (4711, number):
            sql = f"SELECT * FROM turning WHERE id = {one}"
            assert len(same(views, sql)) == (one == 4711)
    assert told_of(views, sql).endswith("views=views.turning")
    rows_of(views.trino.port, "DROP VIEW views.turning")
    rows_of(views.trino.port, "CREATE TABLE views.turning AS SELECT id, note FROM shop.orders WHERE id < 50")
    assert same(views, "SELECT * FROM turning WHERE id = 3") == [[3, "n3"]]
    rows_of(views.trino.port, "DROP TABLE views.turning")
    with pytest.raises(trino.exceptions.TrinoUserError, match=r"Table 'seamark\.views\.turning' does not exist"):
        rows_of(port, "SELECT * FROM turning WHERE id = 3", schema="views")


def test_a_view_that_has_become_stale_fails_as_without_the_proxy(views: Shop) -> None:
    """Its table has other types, or other columns, than when it was made."""

    def answer(port: int) -> Any:
        try:
            return rows_of(port, "SELECT * FROM stale WHERE a = -1", schema="views")
        except trino.exceptions.TrinoUserError as error:
            return error.error_name, error.message

    direct, port = views.trino.port, views.proxy.port
    for change in ("ALTER COLUMN a SET DATA TYPE bigint", "RENAME COLUMN a TO c", "DROP COLUMN a"):
        rows_of(direct, "CREATE TABLE views.base AS SELECT CAST(id AS integer) AS a, note AS b FROM shop.orders")
        rows_of(direct, "INSERT INTO views.base VALUES (-1, 'x')")
        rows_of(direct, "CREATE VIEW views.stale AS SELECT * FROM views.base")
        assert same(views, "SELECT * FROM stale WHERE a = -1") == [[-1, "x"]]
        rows_of(direct, f"ALTER TABLE views.base {change}")
        assert answer(direct) == answer(port)
        rows_of(direct, "DROP VIEW views.stale")
        rows_of(direct, "DROP TABLE views.base")
