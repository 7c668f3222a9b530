"""Tests that conditions on small tables prune files of the large table that is joined to them, with equal rows."""

from __future__ import annotations

import datetime
import random
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog

from tests.deploy.shop import Shop, post_statement, query_rows, run_both_ways
from tests.services.needs import NEEDS_TRINO

pytestmark = NEEDS_TRINO
FILES = 16
ITEMS_PER_FILE = 10
COLORS = FILES
DAY = datetime.date(2026, 1, 1)
SESSION = {"X-Trino-Schema": "star"}


@pytest.fixture(scope="module")
def star(shop: Shop) -> Iterator[Shop]:
    """Create the star schema `star`: `sales` and the dimension tables `items`, `brands`, `days` and `nations`.

    Each file of `sales` has ten items of one colour, in all countries, on all days of its month.
    """
    catalog = load_catalog("seamark", type="rest", uri=shop.seamark.base_url)
    catalog.create_namespace("star")
    keys = list(range(FILES * ITEMS_PER_FILE))
    create_table(
        catalog,
        "items",
        {"i_key": keys, "color": [f"c{key // ITEMS_PER_FILE}" for key in keys], "i_brand": [key % 8 for key in keys]},
    )
    create_table(catalog, "brands", {"b_key": list(range(8)), "brand": [f"b{number}" for number in range(8)]})
    days = [DAY + datetime.timedelta(days=number) for number in range(40 * FILES)]
    create_table(
        catalog, "days", {"d_day": days, "month": [day.month for day in days], "year": [day.year for day in days]}
    )
    create_table(catalog, "nations", {"code": ["FR", "DE", "IT"], "name": ["France", "Germany", "Italy"]})
    for file_number in range(FILES):
        numbers = range(100)
        rows = {
            "s_item": [file_number * ITEMS_PER_FILE + number % ITEMS_PER_FILE for number in numbers],
            "s_day": [DAY + datetime.timedelta(days=40 * file_number + number % 40) for number in numbers],
            "s_code": [("FR", "DE", "IT", None)[number % 4] for number in numbers],
            "price": [1000 * file_number + number for number in numbers],
        }
        if file_number == 0:
            create_table(catalog, "sales", rows)
        else:
            catalog.load_table("star.sales").append(pa.table(rows))
    yield shop
    catalog.close()


def create_table(catalog: Catalog, name: str, rows: dict[str, list[Any]]) -> None:
    table = pa.table(rows)
    catalog.create_table(f"star.{name}", schema=table.schema).append(table)


def read_outcome(star: Shop, sql: str) -> str:
    return post_statement(star.proxy.port, sql, **SESSION)[0].partition("; ms=")[0]


def check_same(star: Shop, sql: str) -> list[list[Any]]:
    return run_both_ways(star, sql, schema="star")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("sql", "files", "joins"),
    [
        ("SELECT sum(price) FROM sales WHERE s_item IN (SELECT i_key FROM items WHERE color = 'c3')", 1, "s_item:10"),
        (
            "SELECT year, sum(price) FROM sales, items, days WHERE s_item = i_key AND s_day = d_day AND month = 2 "
            "AND color < 'c13' GROUP BY 1 ORDER BY 1",
            3,
            "s_item:50,star.sales.s_day:56",
        ),
        (
            "SELECT n, count(*) FROM (SELECT s_item, rank() OVER (PARTITION BY s_item ORDER BY price) AS n FROM sales) "
            "JOIN items ON s_item = i_key WHERE color = 'c4' AND n = 1 GROUP BY 1",
            1,
            "s_item:10",
        ),
        # tests/connector/analysis/ tests these forms without Trino too.
        *(
            pytest.param(*sql, marks=pytest.mark.slow)
            for sql in (
                (
                    "SELECT count(*) FROM sales, items, brands "
                    "WHERE s_item = i_key AND i_brand = b_key AND brand = 'none'",
                    0,
                    "s_item:0",
                ),
                (
                    "SELECT i_key, price FROM items LEFT JOIN sales ON s_item = i_key WHERE color = 'c2' ORDER BY 1, 2",
                    1,
                    "s_item:10",
                ),
                ("SELECT count(*), sum(price) FROM sales, items WHERE s_item = i_key AND color = 'c7'", 1, "s_item:10"),
                (
                    "SELECT count(*) FROM sales s JOIN items i ON s.s_item = i.i_key AND i.color IN ('c7', 'c9')",
                    2,
                    "s_item:20",
                ),
                (
                    "SELECT sum(price) FROM sales "
                    "WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item AND color = 'c3')",
                    1,
                    "s_item:10",
                ),
                (
                    "WITH red AS (SELECT i_key AS k FROM items WHERE color = 'c5' ORDER BY 1 LIMIT 3) "
                    "SELECT s_item, max(price) FROM sales JOIN red ON k = s_item GROUP BY 1 ORDER BY 1",
                    1,
                    "s_item:10",
                ),
                (
                    "SELECT count(*) FROM sales WHERE s_item = ANY (SELECT i_key FROM items WHERE color = 'c3')",
                    1,
                    "s_item:10",
                ),
                (
                    "SELECT count(*) FROM sales WHERE s_item = "
                    "(SELECT i_key FROM items WHERE color = 'c3' ORDER BY i_key LIMIT 1)",
                    1,
                    "s_item:10",
                ),
                (
                    "SELECT count(*) FROM sales "
                    "WHERE (s_item, s_code) IN (SELECT i_key, 'FR' FROM items WHERE color = 'c3')",
                    1,
                    "s_item:10",
                ),
                (
                    "SELECT i_key, (SELECT max(price) FROM sales WHERE s_item = i_key) FROM items WHERE color = 'c2' "
                    "ORDER BY 1",
                    1,
                    "s_item:10",
                ),
                (
                    "SELECT i_key, m FROM items "
                    "CROSS JOIN LATERAL (SELECT max(price) AS m FROM sales WHERE s_item = i_key) x "
                    "WHERE color = 'c2' ORDER BY 1",
                    1,
                    "s_item:10",
                ),
            )
        ),
    ],
)
def test_only_files_with_matching_rows_of_the_join_are_read(star: Shop, sql: str, files: int, joins: str) -> None:
    check_same(star, sql)
    join_outcome = read_outcome(star, sql)
    assert join_outcome.startswith("rewritten; "), join_outcome
    assert f"; star.sales={files}/{FILES}; " in join_outcome
    assert f"; joins=star.sales.{joins}" in join_outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "files"),
    [
        ("SELECT count(*) FROM sales WHERE (s_item, s_code) IN ((5, 'FR'), (15, 'DE'), (25, NULL))", 2),
        (
            "SELECT s_item, price FROM sales s WHERE s_item = 42 AND price > "
            "(SELECT avg(price) FROM sales a WHERE a.s_item = s.s_item) ORDER BY 2",
            1,
        ),
        # tests/connector/analysis/ tests these forms without Trino too.
        *(
            pytest.param(*sql, marks=pytest.mark.slow)
            for sql in (
                ("SELECT s_item, count(*) FROM sales GROUP BY s_item HAVING s_item IN (31, 32) ORDER BY 1", 1),
                (
                    "SELECT count(*) FROM sales "
                    "WHERE s_item IN (SELECT i_key FROM items WHERE i_key BETWEEN 33 AND 42)",
                    2,
                ),
                (
                    "SELECT max(n) FROM "
                    "(SELECT s_item, row_number() OVER (PARTITION BY s_item ORDER BY price) AS n FROM sales)"
                    " WHERE s_item = 42",
                    1,
                ),
                ("SELECT count(*) FROM sales JOIN (VALUES 5, 15) AS v (k) ON s_item = k", 2),
                ("SELECT count(*) FROM sales WHERE s_item IN (SELECT k FROM UNNEST(ARRAY[5, 15]) AS v (k))", 2),
                ("SELECT count(*) FROM sales WHERE contains(ARRAY[5, 15], s_item)", 2),
                ("SELECT star.sales.price FROM star.sales WHERE star.sales.s_item = 5 ORDER BY 1", 1),
                ("WITH m AS (SELECT max(s_day) AS d FROM sales) SELECT count(*) FROM sales, m WHERE s_day = m.d", 1),
            )
        ),
    ],
)
def test_statement_opens_only_the_files_of_its_values(star: Shop, sql: str, files: int) -> None:
    check_same(star, sql)
    join_outcome = read_outcome(star, sql)
    assert f"; star.sales={files}/{FILES}; " in f"{join_outcome}; ", join_outcome


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM sales LEFT JOIN items ON s_item = i_key AND color = 'c7'",
        "SELECT count(*) FROM sales WHERE s_item NOT IN (SELECT i_key FROM items WHERE color = 'c7')",
        "SELECT count(*) FROM sales, items WHERE s_item = i_key AND color = 'c7' OR price < 50",
        # tests/connector/analysis/ tests these forms without Trino too.
        *(
            pytest.param(sql, marks=pytest.mark.slow)
            for sql in (
                "SELECT count(*) FROM sales FULL JOIN items ON s_item = i_key AND color = 'c7'",
                "SELECT count(*), count(code) FROM sales JOIN nations ON s_code = code AND name = 'Italy'",
            )
        ),
    ],
)
def test_all_files_are_read_if_all_can_have_matching_rows(star: Shop, sql: str) -> None:
    check_same(star, sql)
    assert "star.sales=" not in read_outcome(star, sql)


@pytest.mark.slow
def test_changing_dimension_is_read_at_its_planned_snapshot(star: Shop) -> None:
    """A writer constantly changes the colours of items, and the items of one file have all colours.

    If rows of one snapshot were joined with files chosen by another snapshot, the join would return no rows.
    """
    catalog = load_catalog("seamark", type="rest", uri=star.seamark.base_url)
    keys = list(range(FILES * ITEMS_PER_FILE))
    create_table(catalog, "turning", {"t_key": keys, "hue": [key // ITEMS_PER_FILE for key in keys]})
    table, is_over = catalog.load_table("star.turning"), threading.Event()

    def overwrite_repeatedly() -> None:
        shift = 0
        while not is_over.is_set():
            shift += 1
            table.overwrite(pa.table({"t_key": keys, "hue": [(key // ITEMS_PER_FILE + shift) % FILES for key in keys]}))

    thread = threading.Thread(target=overwrite_repeatedly)
    thread.start()
    first_colors = set()
    try:
        sql = "SELECT count(*), min(s_item) / 10 FROM sales, turning WHERE s_item = t_key AND hue = 3"
        for _ in range(25):
            ((count, first_color),) = query_rows(star.proxy.port, sql, schema="star")
            assert count == 100  # A colour has the items of one file, which has 100 rows.
            first_colors.add(first_color)
    finally:
        is_over.set()
        thread.join(60)
        catalog.drop_table("star.turning")
        catalog.close()
    assert len(first_colors) > 3  # The queries read several snapshots, so writes ran between them.


@pytest.mark.slow
@pytest.mark.parametrize("queries", [3, 40])
def test_random_stars_give_equal_rows(star: Shop, queries: int) -> None:
    rng, smaller_count = random.Random(7), 0
    for _ in range(queries):
        sql = draw_statement(rng)
        check_same(star, sql)
        smaller_count += "joins=star.sales." in read_outcome(star, sql)
    assert smaller_count >= 0.5 * (queries - 1)


def draw_statement(rng: random.Random) -> str:
    """Return a random join of `sales` with one to three of the tables `items`, `days` and `nations`."""
    joined_tables = {
        "items": ("s_item = i_key", [f"color = 'c{rng.randrange(18)}'", f"i_key BETWEEN 30 AND {rng.randrange(90)}"]),
        "days": ("s_day = d_day", [f"month = {rng.randint(1, 13)}", "year = 2027"]),
        "nations": ("s_code = code", ["name < 'Ger'", "code IS NOT NULL"]),
    }
    sql, where = "sales", [f"price > {rng.randrange(3000)}"] if rng.random() < 0.3 else []
    for name in rng.sample(sorted(joined_tables), rng.randint(1, 3)):
        equal_condition, conditions = joined_tables[name]
        condition = rng.choice(conditions)
        match rng.randrange(5):
            case 0:
                sql += f" JOIN {name} ON {equal_condition} AND {condition}"
            case 1:
                sql += f" LEFT JOIN {name} ON {equal_condition}"
                where.append(condition)
            case 2:
                sql += f" CROSS JOIN {name}"
                where += [equal_condition, condition]
            case 3:
                where.append(f"EXISTS (SELECT 1 FROM {name} WHERE {equal_condition} AND {condition})")
            case 4:
                own_column, other_column = equal_condition.split(" = ")
                where.append(f"{own_column} IN (SELECT {other_column} FROM {name} WHERE {condition})")
    if "items" in sql and rng.random() < 0.4:
        where.append(
            "i_brand IN (SELECT b_key FROM brands WHERE brand < 'b3')" if "JOIN items" in sql else "s_item > 3"
        )
    clause = f" WHERE {' AND '.join(where)}" if where else ""
    return f"SELECT s_item, s_day, s_code, price FROM {sql}{clause} ORDER BY price, s_item, s_code LIMIT 200"
