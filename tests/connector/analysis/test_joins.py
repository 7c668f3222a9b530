"""Tests of joins that limit the rows of a scan to those with a matching row in another scan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from seamark.connector.analysis.scans import find_scans
from seamark.connector.plans.conditions import write_sql
from seamark.connector.plans.scan import Join

TABLES = {
    "f": {
        **{"id": "long", "k": "int", "at": "timestamp", "tz": "timestamptz", "day": "date", "x": "double"},
        **{"amount": "decimal(9, 2)", "code": "string"},
    },
    "d": {
        "name": "string",
        "low": "long",
        "start": "timestamp",
        "stop": "timestamp",
        "first": "date",
        "z": "timestamptz",
        **{"least": "decimal(12, 2)", "most": "decimal(12, 2)", "precise": "decimal(12, 4)", "wide": "decimal(38, 2)"},
        **{"real": "float", "double": "double"},
    },
    "sales": {"s_item": "long", "s_day": "date", "s_ship": "date", "s_cust": "int", "price": "decimal(9, 2)"},
    "items": {"i_key": "long", "i_brand": "long", "color": "string", "weight": "double"},
    "brands": {"b_key": "long", "brand": "string"},
    "days": {"day": "date", "year": "int", "s_item": "long"},
    "customers": {"c_key": "long", "c_day": "date", "nation": "string"},
}


def get_columns(names: tuple[str | None, str | None, str]) -> dict[str, str] | None:
    return TABLES.get(names[2])


def find_joins(statement: str) -> dict[str, list[str]]:
    """Return the joins of each table as texts of the form "column=other table.column".

    If a table has several scans, its list contains the joins of all of them.
    """
    scans = find_scans(statement, find_columns=get_columns)
    joins_by_table: dict[str, list[str]] = {}
    for scan in scans:
        join_texts = (" and ".join(format_join_pairs(join, scans[join.scan].table)) for join in scan.joins)
        joins_by_table.setdefault(scan.table, []).extend(join_texts)
    return {table: sorted(join_texts) for table, join_texts in joins_by_table.items() if join_texts}


def format_join_pairs(join: Join, table: str) -> Iterator[str]:
    """Yield each comparison of the join as a text.

    If the other operand is a maximum or minimum, the text names the function: `max(d.first)`. It ends with "of fewer
    rows" if the query computes it from only some of these rows.

    Args:
        join: The join.
        table: The name of the table that the scan is joined with.
    """
    for (own_column, other_column), op in zip(join.on, join.ops or ["="] * len(join.on), strict=True):
        column = f"{table}.{other_column}"
        if join.is_extreme:
            where = "" if join.where is None else f", {write_sql(join.where)}"
            column = f"{join.transform}({column}{where}){'' if join.exact else ' of fewer rows'}"
        yield f"{own_column}{op}{column}"


def find_sales_joins(statement: str) -> list[str]:
    return find_joins(statement).get("sales", [])


def test_joined_scans_have_joins_with_each_other() -> None:
    assert find_joins("SELECT * FROM sales, items WHERE s_item = i_key AND color = 'red'") == {
        "sales": ["s_item=items.i_key"],
        "items": ["i_key=sales.s_item"],
    }


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT * FROM sales JOIN items ON s_item = i_key", ["s_item=items.i_key"]),
        ("SELECT * FROM sales JOIN items ON (i_key = s_item AND (price > 1))", ["s_item=items.i_key"]),
        ("SELECT * FROM sales JOIN days USING (s_item)", ["s_item=days.s_item"]),
        ("SELECT * FROM sales WHERE s_item = (SELECT DISTINCT (i_key) FROM items)", ["s_item=items.i_key"]),
        ("SELECT * FROM sales, (SELECT ((i_key)) AS k FROM items) i WHERE s_item = k", ["s_item=items.i_key"]),
        ("SELECT * FROM sales, (SELECT (i_key + 1) AS k FROM items) i WHERE s_item = k", []),
        (
            "SELECT * FROM sales, items WHERE (s_item = i_key AND color = 'red') OR (i_key = s_item AND price > 1)",
            ["s_item=items.i_key"] * 2,  # This join is also an alternative to the condition on the price.
        ),
        ("SELECT * FROM sales, items WHERE (s_item = i_key AND color = 'red') OR price > 1", []),
        ("SELECT * FROM sales, items WHERE (s_item = i_key AND color = 'red') OR (s_cust = i_key AND price > 1)", []),
        (
            "SELECT * FROM sales JOIN days ON (s_day = day AND year = 1) OR (s_day = day AND s_ship = day)",
            ["s_day=days.day"],
        ),
        (
            "SELECT * FROM items, sales f, days WHERE f.s_item = i_key AND s_day = day",
            ["s_day=days.day", "s_item=items.i_key"],
        ),
        (
            "SELECT * FROM sales JOIN days USING (s_item) WHERE s_day = day",
            ["s_day=days.day", "s_item=days.s_item"],
        ),
        (
            "SELECT * FROM sales f, days d WHERE f.s_item = d.s_item AND s_day = day",
            ["s_day=days.day and s_item=days.s_item"],
        ),
        (
            "SELECT * FROM sales, days a, days b WHERE s_day = a.day AND s_ship = b.day",
            ["s_day=days.day", "s_ship=days.day"],
        ),
        ("SELECT * FROM sales, customers WHERE s_cust = c_key", ["s_cust=customers.c_key"]),
        # Sources that pass columns on unchanged
        (
            "SELECT * FROM sales, (SELECT i_key AS k FROM items WHERE color = 'red' LIMIT 5) x WHERE s_item = k",
            ["s_item=items.i_key"],
        ),
        (
            "SELECT * FROM sales, (SELECT i_key, rank() OVER (ORDER BY color) AS r FROM items) x WHERE s_item = i_key",
            ["s_item=items.i_key"],
        ),
        (
            "SELECT * FROM sales, (SELECT i_brand FROM items GROUP BY 1 HAVING count(*) > 1) x (k) WHERE s_item = k",
            ["s_item=items.i_brand"],
        ),
        ("WITH x (k) AS (SELECT i_key FROM items) SELECT * FROM sales JOIN x ON s_item = k", ["s_item=items.i_key"]),
        ("SELECT * FROM (SELECT s_item AS k FROM sales) f JOIN items ON k = i_key", ["s_item=items.i_key"]),
        ("WITH f AS (SELECT * FROM sales) SELECT * FROM f JOIN items ON s_item = i_key", ["s_item=items.i_key"]),
        (
            "SELECT * FROM (SELECT s_item, count(*) AS n FROM sales GROUP BY s_item) f JOIN items ON s_item = i_key",
            ["s_item=items.i_key"],
        ),
        (
            "SELECT * FROM sales f, (SELECT i_key, s_item AS k FROM items LEFT JOIN days ON s_item = i_brand) x "
            "WHERE f.s_item = k",
            ["s_item=days.s_item"],
        ),
        (
            "SELECT * FROM sales f, (SELECT i_key, day FROM items, days) x WHERE s_item = i_key AND s_day = day",
            ["s_day=days.day", "s_item=items.i_key"],
        ),
        (
            "WITH d AS (SELECT * FROM days) SELECT * FROM sales f, (SELECT a.day, b.s_item AS k FROM d a, d b) x "
            "WHERE f.s_day = x.day AND f.s_item = x.k",
            ["s_day=days.day", "s_item=days.s_item"],
        ),
        (
            "SELECT * FROM items JOIN days ON s_item = i_key JOIN sales USING (s_item)",
            ["s_item=days.s_item", "s_item=items.i_key"],
        ),
        ("SELECT * FROM days a RIGHT JOIN days b USING (s_item) JOIN sales USING (s_item)", ["s_item=days.s_item"]),
        ("SELECT * FROM days a FULL JOIN days b USING (s_item) JOIN sales USING (s_item)", []),
        # The operation between the tables counts or orders the rows, so no row may be left out before the operation.
        ("SELECT * FROM (SELECT s_item FROM sales LIMIT 5) f JOIN items ON s_item = i_key", []),
        ("SELECT * FROM (SELECT s_item, rank() OVER () AS r FROM sales) f JOIN items ON s_item = i_key", []),
        ("SELECT * FROM (SELECT max(s_item) AS k FROM sales) f JOIN items ON k = i_key", []),
        (
            "WITH f AS (SELECT * FROM sales) SELECT (SELECT count(*) FROM f) FROM f JOIN items ON s_item = i_key",
            [],
        ),
        # The values differ in all rows or in some rows.
        ("SELECT * FROM sales, items WHERE s_item + 0 = i_key", []),
        ("SELECT * FROM sales, items WHERE s_item = i_key + 0", []),
        ("SELECT * FROM sales, items WHERE price = weight", []),
        (
            "SELECT * FROM sales, items a, items b WHERE a.weight = b.weight AND s_item > a.i_key",
            ["s_item>items.i_key"],
        ),
        ("SELECT * FROM sales, unknown WHERE sales.s_item = unknown.k", []),
        ("SELECT * FROM sales, items FOR VERSION AS OF 5 WHERE sales.s_item = items.i_key", []),
        ("SELECT * FROM sales, items WHERE s_item = i_key OR price > 1", []),
        ("SELECT * FROM sales, items WHERE NOT s_item = i_key", []),
        (
            "SELECT * FROM sales, items WHERE s_item >= i_key AND s_item IS NOT DISTINCT FROM i_key",
            ["s_item>=items.i_key"],
        ),
        ("SELECT * FROM sales, (SELECT i_key FROM items UNION SELECT b_key FROM brands) x WHERE s_item = i_key", []),
        ("SELECT * FROM sales, (VALUES BIGINT '1') x (k) WHERE s_item = k", []),
        ("SELECT s_item = i_key FROM sales, items", []),
        ("SELECT s_item FROM sales, items GROUP BY s_item, i_key HAVING s_item = i_key", []),
        # Outer joins
        ("SELECT * FROM sales LEFT JOIN items ON s_item = i_key", []),
        ("SELECT * FROM sales FULL JOIN items ON s_item = i_key", []),
        ("SELECT * FROM items LEFT JOIN sales ON s_item = i_key", ["s_item=items.i_key"]),
        ("SELECT * FROM sales RIGHT JOIN days USING (s_item)", ["s_item=days.s_item"]),
        ("SELECT * FROM sales LEFT JOIN days USING (s_item)", []),
        (
            "SELECT * FROM sales LEFT JOIN items ON s_item = i_key, brands WHERE i_brand = b_key",
            ["s_item=items.i_key"],
        ),
        ("SELECT * FROM sales LEFT JOIN items ON price > 1 WHERE s_item = i_key", ["s_item=items.i_key"]),
        (
            "SELECT * FROM brands LEFT JOIN (sales JOIN items ON s_item = i_key) ON i_brand = b_key",
            ["s_item=items.i_key"],
        ),
        ("SELECT * FROM sales LEFT JOIN (days JOIN items ON i_key = days.s_item) ON day = s_day", []),
        # Columns that are equal to a third column
        (
            "SELECT * FROM sales, items, brands WHERE s_item = i_key AND i_key = b_key",
            ["s_item=brands.b_key", "s_item=items.i_key"],
        ),
        # IN
        ("SELECT * FROM sales WHERE s_item IN (SELECT i_key FROM items WHERE color = 'red')", ["s_item=items.i_key"]),
        ("SELECT * FROM sales WHERE s_item IN ((SELECT i_key AS x FROM items LIMIT 3))", ["s_item=items.i_key"]),
        ("SELECT * FROM sales WHERE s_item IN (SELECT * FROM items)", []),
        (
            "SELECT * FROM sales WHERE s_item IN (SELECT max(i_key) FROM items)",
            ["s_item=items.i_key", "s_item=max(items.i_key)"],
        ),
        (
            "SELECT * FROM sales WHERE s_item = (SELECT min(i_key) AS k FROM (SELECT * FROM items))",
            ["s_item=items.i_key", "s_item=min(items.i_key)"],
        ),
        (
            "SELECT * FROM sales WHERE s_item = (SELECT max(i_key) FROM items WHERE i_key < 9)",
            ["s_item=items.i_key", 's_item=max(items.i_key, "i_key" < 9)'],
        ),
        ("SELECT * FROM sales WHERE s_item = (SELECT max(i_key) FROM items GROUP BY color)", ["s_item=items.i_key"]),
        (
            "SELECT * FROM sales WHERE s_item = (SELECT max(i_key) FROM (SELECT i_key FROM items LIMIT 9))",
            ["s_item=items.i_key", "s_item=max(items.i_key) of fewer rows"],
        ),
        # DuckDB returns no row for an empty list.
        (
            "SELECT * FROM sales WHERE s_item = (SELECT max(i_key) FROM (SELECT i_key, unnest([]) FROM items))",
            ["s_item=items.i_key", "s_item=max(items.i_key) of fewer rows"],
        ),
        (
            "SELECT * FROM sales WHERE s_item = (SELECT max(i_key) FROM (SELECT DISTINCT i_key, color FROM items))",
            ["s_item=items.i_key", "s_item=max(items.i_key)"],
        ),
        ("SELECT * FROM sales WHERE s_item = (SELECT max(i_key) FROM items, days)", ["s_item=items.i_key"]),
        ("SELECT * FROM sales WHERE s_item = (SELECT max(i_key + 1) FROM items)", []),
        ("SELECT * FROM sales WHERE s_item = (SELECT max(i_key) OVER () FROM items)", []),
        ("SELECT * FROM sales WHERE s_item IN (SELECT weight FROM items)", []),
        ("SELECT * FROM sales WHERE s_item NOT IN (SELECT i_key FROM items)", []),
        ("SELECT * FROM sales WHERE NOT (s_item IN (SELECT i_key FROM items))", []),
        ("SELECT * FROM sales WHERE s_item IN (SELECT i_key FROM items) OR price > 1", []),
        ("SELECT * FROM sales WHERE (s_item IN (SELECT i_key FROM items)) IS NULL", []),
        (
            "SELECT * FROM sales WHERE s_item IN (WITH x AS (SELECT i_key FROM items) SELECT * FROM x)",
            ["s_item=items.i_key"],
        ),
        (
            "SELECT * FROM sales WHERE s_item IN (WITH x AS (SELECT * FROM items) SELECT i_key FROM x)",
            ["s_item=items.i_key"],
        ),
        (
            "SELECT * FROM brands JOIN sales ON b_key IN (SELECT i_key FROM items) AND s_item = b_key",
            ["s_item=brands.b_key", "s_item=items.i_key"],
        ),
        # EXISTS
        (
            "SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item AND color = 'red')",
            ["s_item=items.i_key"],
        ),
        (
            "SELECT * FROM sales f WHERE EXISTS (SELECT * FROM days WHERE day = s_day AND days.s_item = f.s_item)",
            ["s_day=days.day and s_item=days.s_item"],
        ),
        (
            "SELECT * FROM sales WHERE EXISTS (SELECT i_brand FROM items WHERE sales.s_item = i_key GROUP BY i_brand)",
            ["s_item=items.i_key"],
        ),
        ("SELECT * FROM sales WHERE NOT EXISTS (SELECT 1 FROM items WHERE i_key = s_item)", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item) OR price > 1", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item OR color = 'red')", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key > s_item)", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT count(*) FROM items WHERE i_key = s_item)", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item HAVING count(*) = 0)", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item GROUP BY GROUPING SETS (()))", []),
        ("SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM items WHERE i_key = s_item ORDER BY count(*))", []),
        (
            "SELECT * FROM sales f WHERE EXISTS (SELECT 1 FROM days WHERE day = f.s_day AND s_item = s_item)",
            ["s_day=days.day"],
        ),
        ("SELECT * FROM sales x WHERE EXISTS (SELECT 1 FROM sales x, days WHERE day = x.s_day)", ["s_day=days.day"]),
        ("SELECT * FROM sales f WHERE EXISTS (SELECT 1 FROM unknown u, days WHERE day = s_day)", []),
        (
            "SELECT * FROM sales WHERE s_day IN (SELECT day FROM days WHERE days.s_item = sales.s_item)",
            ["s_day=days.day", "s_item=days.s_item"],
        ),
        (
            "SELECT * FROM sales WHERE EXISTS (SELECT 1 FROM days WHERE day IN (SELECT c_day FROM customers))",
            [],
        ),
    ],
)
def test_scan_has_a_join_exactly_if_its_rows_need_a_matching_row(statement: str, expected: list[str]) -> None:
    assert find_sales_joins(statement) == expected


def test_snowflake_table_has_joins_with_both_of_its_neighbours() -> None:
    joins_by_table = find_joins(
        "SELECT brand, sum(price) FROM sales, items, brands "
        "WHERE s_item = i_key AND i_brand = b_key AND brand = 'x' GROUP BY 1"
    )
    assert joins_by_table == {
        "sales": ["s_item=items.i_key"],
        "items": ["i_brand=brands.b_key", "i_key=sales.s_item"],
        "brands": ["b_key=items.i_brand"],
    }


def test_table_in_both_parts_of_a_set_operation_has_joins_in_each() -> None:
    part = "SELECT s_item AS k FROM sales, items WHERE s_item = i_key"
    assert find_sales_joins(f"{part} UNION ALL {part}") == ["s_item=items.i_key"] * 2
    union_query = "SELECT * FROM (SELECT s_item AS k FROM sales UNION SELECT b_key FROM brands) JOIN items ON k = i_key"
    assert find_joins(union_query) == {"sales": ["s_item=items.i_key"], "brands": ["b_key=items.i_key"]}


def test_scan_names_the_columns_of_its_predicate() -> None:
    scans = find_scans("SELECT * FROM items WHERE i_key = 1 AND (color = 'x' OR i_brand = 2)", find_columns=get_columns)
    assert scans[0].columns == {"i_key", "color", "i_brand"}


@pytest.mark.parametrize(
    "inner",
    [
        "customers m, LATERAL (SELECT i_key FROM items WHERE i_key = o.s_item) l, days AS o",
        "customers m JOIN items ON i_key = o.s_item, days AS o",
        "customers m LEFT JOIN items ON i_key = o.s_item, days AS o",
    ],
)
def test_alias_of_a_later_source_refers_to_the_outer_query(inner: str) -> None:
    """LATERAL and ON see only the sources on their left, so `o` is `sales` there, and not `days`."""
    join_texts = find_joins(f"SELECT * FROM sales o WHERE EXISTS (SELECT 1 FROM {inner} WHERE o.year = 7)")
    assert not [join for join in join_texts.get("items", []) if "days" in join]


def find_joins_of_first_scan(statement: str, table: str = "f") -> list[str]:
    """Return the joins of the first scan of a table as texts, such as "day>=d.first and day<=d.start"."""
    scans = find_scans(statement, find_columns=get_columns)
    scan = next(scan for scan in scans if scan.table == table)
    return sorted(" and ".join(format_join_pairs(join, scans[join.scan].table)) for join in scan.joins)


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        ("JOIN d ON at BETWEEN start AND stop", ["at>=d.start and at<=d.stop"]),
        ("JOIN d ON at >= start AND (stop > at)", ["at>=d.start and at<d.stop"]),
        ("JOIN d ON at > start AND at < stop AND at < first", ["at<d.first", "at>d.start and at<d.stop"]),
        (", d WHERE at < stop", ["at<d.stop"]),
        (", d WHERE id >= low AND k < low", ["id>=d.low", "k<d.low"]),
        (", d WHERE day BETWEEN first AND start", ["day>=d.first and day<=d.start"]),
        (", d WHERE low BETWEEN k AND id", ["id>=d.low", "k<=d.low"]),
        (", d WHERE at BETWEEN TIMESTAMP '2026-01-01 00:00:00' AND stop", ["at<=d.stop"]),
        (", d WHERE amount BETWEEN least AND most", ["amount>=d.least and amount<=d.most"]),
        (", d WHERE code BETWEEN name AND name", ["code>=d.name and code<=d.name"]),
        (", d WHERE x BETWEEN double AND double", ["x>=d.double and x<=d.double"]),
        (", d WHERE x > real AND x <= double", ["x>d.real and x<=d.double"]),
        ("WHERE amount < (SELECT least FROM d WHERE name = 'x')", ["amount<d.least"]),
        (", d WHERE amount > wide", []),
        (", d WHERE amount > precise", []),
        (", d WHERE amount > low", []),
        (", d WHERE amount > double", []),
        (", d WHERE x BETWEEN real AND double", []),  # The operands have different types.
        # Only the optional side has a join.
        ("RIGHT JOIN d ON at BETWEEN start AND stop", ["at>=d.start and at<=d.stop"]),
        ("LEFT JOIN d ON at BETWEEN start AND stop", []),
        ("FULL JOIN d ON at BETWEEN start AND stop", []),
        ("LEFT JOIN d ON d.low = id WHERE at < stop", ["at<d.stop", "id=d.low"]),
        # The operands have different types, so the engine converts them before it compares them.
        (", d WHERE tz BETWEEN start AND stop", []),
        (", d WHERE x < low", []),
        (", d WHERE id BETWEEN low AND 1e0", []),
        (", d WHERE at BETWEEN start AND z", []),
        # The condition has another form, which does not require a row within these limits.
        (", d WHERE at NOT BETWEEN start AND stop", []),
        (", d WHERE NOT (at < stop)", []),
        (", d WHERE at < stop OR id = 1", []),
        (", d WHERE at < stop + INTERVAL '1' DAY", []),
        (", d WHERE at IS DISTINCT FROM stop", []),
        ("WHERE EXISTS (SELECT 1 FROM d WHERE at < stop)", []),
    ],
)
def test_columns_are_limited_by_columns_of_other_tables(join: str, expected: list[str]) -> None:
    assert find_joins_of_first_scan(f"SELECT * FROM f {join}") == expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("day >= (SELECT max(first) FROM d)", ["day>=max(d.first)"]),
        ("day <= (SELECT max(first) FROM d)", ["day<=d.first", "day<=max(d.first)"]),
        ("(SELECT min(first) FROM d) > at", ["at<min(d.first)"]),
        ("day > (SELECT max(first) FROM d WHERE name = 'x')", ["""day>max(d.first, "name" = 'x')"""]),
        (
            "day > (SELECT max(e) FROM (SELECT first AS e FROM d WHERE low IN (1, NULL)) WHERE e < DATE '2026-01-01')",
            ["""day>max(d.first, ("low" IN (1, NULL) AND "first" < DATE '2026-01-01'))"""],
        ),
        (
            "day BETWEEN (SELECT min(first) FROM d) AND (SELECT max(first) FROM d)",
            ["day<=d.first", "day<=max(d.first)", "day>=d.first", "day>=min(d.first)"],
        ),
        ("day >= (SELECT first FROM d WHERE name = 'x')", ["day>=d.first"]),
        ("day < ANY (SELECT first FROM d)", ["day<d.first"]),
        # The analysis does not support one condition of the subquery. It knows only the maximum of more rows, which can
        # be greater. So this maximum is an upper limit, but no lower limit.
        ("day >= (SELECT max(first) FROM d WHERE lower(name) = 'x')", []),
        (
            "day <= (SELECT max(first) FROM d WHERE name LIKE '%x%' AND low = 1)",
            ["day<=d.first", """day<=max(d.first, "low" = 1) of fewer rows"""],
        ),
        ("day >= (SELECT max(first) FROM d WHERE low = f.id)", []),
        ("day >= (SELECT max(first) FILTER (WHERE low = 1) FROM d)", []),
        ("day >= (SELECT max(first) FROM d WHERE start > current_timestamp)", []),
        ("day >= (SELECT max(first) FROM d WHERE z > TIMESTAMP '2026-01-01')", []),
        # Two maximums in one query may come from different rows.
        ("day <= (SELECT max(e) FROM (SELECT max(first) e, max(low) l FROM d) WHERE l > 3)", []),
        ("day >= (SELECT max(first) FROM d GROUP BY name)", []),
        ("day >= (SELECT max(first) FROM d, f AS g)", []),
        ("day > ALL (SELECT first FROM d)", []),
        ("NOT day >= (SELECT max(first) FROM d)", []),
        ("x >= (SELECT max(low) FROM d)", []),
        ("tz >= (SELECT max(start) FROM d)", []),
        ("id BETWEEN (SELECT max(low) FROM d) AND 1e0", []),
    ],
)
def test_columns_are_limited_by_extremes(condition: str, expected: list[str]) -> None:
    assert find_joins_of_first_scan(f"SELECT * FROM f WHERE {condition}") == expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f, m WHERE day = e", ["day=d.first", "day=max(d.first)"]),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f JOIN m ON m.e < f.day", ["day>max(d.first)"]),
        ("m (e) AS (SELECT min(first) FROM d) SELECT * FROM f JOIN m ON e > day", ["day<min(d.first)"]),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f WHERE day > (SELECT e FROM m)", ["day>max(d.first)"]),
        (
            "m AS (SELECT max(first) AS e FROM d) SELECT * FROM f WHERE day IN (SELECT e FROM m)",
            ["day=d.first", "day=max(d.first)"],
        ),
        (
            "r AS (SELECT * FROM d WHERE name = 'x'), m AS (SELECT max(first) AS e FROM r), "
            "n AS (SELECT e AS b FROM m) SELECT * FROM f, n WHERE f.day > n.b",
            ["""day>max(d.first, "name" = 'x')"""],
        ),
        (
            "m AS (SELECT min(first) AS a, max(first) AS b FROM d) SELECT * FROM f, m WHERE day BETWEEN m.a AND m.b",
            ["day<=d.first", "day<=max(d.first)", "day>=d.first", "day>=min(d.first)"],
        ),
        (
            "m AS (SELECT max(first) AS e FROM d) SELECT * FROM m LEFT JOIN f ON day = e",
            ["day=d.first", "day=max(d.first)"],
        ),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f LEFT JOIN m ON day = e", []),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f, m WHERE NOT day = e", []),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f, m WHERE day = e + INTERVAL '1' DAY", []),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f, m WHERE day = coalesce(e, DATE '2026-01-01')", []),
        ("m AS (SELECT max(first) AS e FROM d) SELECT * FROM f, m WHERE at > e", ["at>max(d.first)"]),
        ("m AS (SELECT max(low) AS e FROM d) SELECT * FROM f, m WHERE x > e", []),
        # The maximum is of fewer or of different rows, so it limits the column on one side or not at all.
        ("m AS (SELECT max(first) AS e FROM (SELECT * FROM d LIMIT 3)) SELECT * FROM f, m WHERE day > e", []),
        (
            "r AS (SELECT * FROM d LIMIT 3), m AS (SELECT max(first) AS e FROM r) SELECT * FROM f, m WHERE day < e",
            ["day<d.first", "day<max(d.first) of fewer rows"],
        ),
        ("r AS (SELECT * FROM d LIMIT 3), m AS (SELECT max(first) AS e FROM r) SELECT * FROM f, m WHERE day > e", []),
        (
            "m AS (SELECT max(first) AS e FROM d UNION ALL SELECT min(first) FROM d) SELECT * FROM f, m WHERE day > e",
            [],
        ),
        (
            "RECURSIVE m AS (SELECT max(first) AS e FROM d UNION ALL SELECT e FROM m) SELECT * FROM f, m WHERE day > e",
            [],
        ),
        # Each group has its own maximum, so only the set of values limits the column.
        (
            "m AS (SELECT name, max(first) AS e FROM d GROUP BY name) SELECT * FROM f, m WHERE code = name AND day = e",
            ["code=d.name and day=d.first"],
        ),
        ("m AS (SELECT name, max(first) AS e FROM d GROUP BY name) SELECT * FROM f, m WHERE day > e", []),
    ],
)
def test_columns_are_limited_by_extremes_of_names_in_with(statement: str, expected: list[str]) -> None:
    assert find_joins_of_first_scan(f"WITH {statement}") == expected
