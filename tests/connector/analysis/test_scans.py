"""Tests of the tables that a statement reads, and of the rows that it needs: joins, subqueries, merged columns."""

from __future__ import annotations

import pytest

from seamark.connector.analysis.scans import find_scans
from tests.connector.analysis.scan_tables import find_predicates


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        # Inner joins: WHERE and ON apply to both sides.
        (
            "SELECT * FROM orders, items WHERE o_cust <> i_key AND o_key > 1 AND qty < 5",
            {"orders": '"o_key" > 1', "items": '"qty" < 5'},
        ),
        (
            "SELECT * FROM orders o JOIN items i ON o_key = i_key AND o.o_key > 1 WHERE i.qty < 5",
            {"orders": '"o_key" > 1', "items": '("qty" < 5 AND "i_key" > 1)'},
        ),
        ("SELECT * FROM orders JOIN items USING (k) WHERE k = 1 AND qty = 2", {"orders": None, "items": '"qty" = 2'}),
        (
            "SELECT * FROM orders, items WHERE (o_key = 1 AND qty = 2) OR (o_key = 3 AND qty = 4)",
            {"orders": '("o_key" = 1 OR "o_key" = 3)', "items": '("qty" = 2 OR "qty" = 4)'},
        ),
        # Outer joins: ON applies to the optional side. WHERE applies to this side only if the condition rejects nulls.
        (
            "SELECT * FROM orders LEFT JOIN items ON o_key = i_key AND o_key > 1 AND qty < 5",
            {"orders": None, "items": '("qty" < 5 AND "i_key" > 1)'},
        ),
        (
            "SELECT * FROM orders RIGHT JOIN items ON o_key = i_key AND o_key > 1 AND qty < 5",
            {"orders": '"o_key" > 1', "items": None},
        ),
        (
            "SELECT * FROM orders FULL JOIN items ON o_key = i_key AND o_key > 1 AND qty < 5",
            {"orders": None, "items": None},
        ),
        (
            "SELECT * FROM orders LEFT JOIN items ON o_key = i_key WHERE o_key > 1 AND qty < 5",
            {"orders": '"o_key" > 1', "items": '("qty" < 5 AND "i_key" > 1)'},
        ),
        ("SELECT * FROM orders LEFT JOIN items ON o_key = i_key WHERE qty IS NULL", {"orders": None, "items": None}),
        (
            "SELECT * FROM orders LEFT JOIN items ON o_key = i_key WHERE qty < 5 OR qty IS NULL",
            {"orders": None, "items": None},
        ),
        (
            "SELECT * FROM orders LEFT JOIN items ON o_key = i_key WHERE NOT (qty IS NOT NULL) OR qty = 1",
            {"orders": None, "items": None},
        ),
        (
            "SELECT * FROM orders LEFT JOIN items ON o_key = i_key WHERE qty IS DISTINCT FROM 5",
            {"orders": None, "items": None},
        ),
        (
            "SELECT * FROM orders FULL JOIN items ON o_key = i_key WHERE o_key > 1",
            {"orders": '"o_key" > 1', "items": '"i_key" > 1'},
        ),
        (
            "SELECT * FROM orders LEFT JOIN (items JOIN parts ON i_key = p_key AND size = 1) ON true AND qty = 2",
            {"orders": None, "items": '"qty" = 2', "parts": '"size" = 1'},
        ),
        # A condition on a column applies also to an equal column, if both have the same type and the row needs a
        # matching row.
        (
            "SELECT * FROM orders, items, parts WHERE o_key = i_key AND p_key = i_key AND p_key IN (1, 2)",
            {"orders": '"o_key" IN (1, 2)', "items": '"i_key" IN (1, 2)', "parts": '"p_key" IN (1, 2)'},
        ),
        (
            "SELECT * FROM orders JOIN items ON o_key = i_key JOIN parts ON p_key = i_key AND (p_key = 1 OR p_key = 2)",
            {
                "orders": '("o_key" = 1 OR "o_key" = 2)',
                "items": '("i_key" = 1 OR "i_key" = 2)',
                "parts": '("p_key" = 1 OR "p_key" = 2)',
            },
        ),
        (
            "SELECT * FROM orders, parts WHERE o_key = size AND size = 1",
            {"orders": '"o_key" = 1', "parts": '"size" = 1'},
        ),
        (
            "SELECT * FROM orders WHERE o_key IN (SELECT i_key FROM items WHERE i_key > 5 AND qty = 1)",
            {"orders": '"o_key" > 5', "items": '("i_key" > 5 AND "qty" = 1)'},
        ),
        ("SELECT * FROM m, n WHERE m.k = n.k AND m.k = 1", {"m": '"k" = 1', "n": None}),
        ("SELECT * FROM orders, items WHERE o_key <= i_key AND o_key = 1", {"orders": '"o_key" = 1', "items": None}),
        (
            "SELECT * FROM orders JOIN items ON o_key = i_key OR qty = 1 WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": None},
        ),
        ("SELECT * FROM orders LEFT JOIN items ON o_key = i_key WHERE i_key IS NULL", {"orders": None, "items": None}),
        ("SELECT * FROM orders FULL JOIN items ON o_key = i_key AND i_key = 1", {"orders": None, "items": None}),
        (
            "SELECT * FROM orders, items WHERE (o_key = i_key OR qty = 1) AND o_key = 1",
            {"orders": '"o_key" = 1', "items": None},
        ),
        (
            "SELECT * FROM orders RIGHT JOIN items ON o_key = i_key WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        (
            "SELECT * FROM (SELECT o_key AS k FROM orders) x LEFT JOIN items ON (k = i_key AND true) WHERE k = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        # A comma binds less tightly than a join.
        (
            "SELECT * FROM parts, orders RIGHT JOIN items ON o_key = i_key AND o_cust = 3 WHERE size = 1 AND o_key = 2",
            {"parts": '"size" = 1', "orders": '("o_key" = 2 AND "o_cust" = 3)', "items": '"i_key" = 2'},
        ),
        # Subqueries in FROM
        ("SELECT * FROM (SELECT * FROM orders) x WHERE x.o_key = 1", {"orders": '"o_key" = 1'}),
        (
            "SELECT * FROM (SELECT o_key AS k FROM orders WHERE o_cust = 2) x WHERE k = 1",
            {"orders": '("o_cust" = 2 AND "o_key" = 1)'},
        ),
        ("SELECT * FROM (SELECT o_key + 1 AS o_key FROM orders) x WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM (SELECT o_cust AS o_key, o_key AS k FROM orders) WHERE o_key = 1", {"orders": '"o_cust" = 1'}),
        ("SELECT * FROM (SELECT o_key, o_cust FROM orders) x (a, b) WHERE b = 1", {"orders": '"o_cust" = 1'}),
        ("SELECT * FROM (SELECT * FROM orders) x (a, b, c, d) WHERE b = 1", {"orders": None}),
        ("SELECT * FROM orders AS x (a, b, c, d) WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM (SELECT * FROM orders ORDER BY o_key LIMIT 5) WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM (SELECT * FROM orders OFFSET 5) WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM (SELECT * FROM orders FETCH FIRST ROW ONLY) WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM ((SELECT * FROM orders) LIMIT 5) WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM (SELECT *, count(*) OVER () AS n FROM orders) WHERE o_key = 1", {"orders": None}),
        ("SELECT * FROM (SELECT o_key FROM orders ORDER BY o_key) WHERE o_key = 1", {"orders": '"o_key" = 1'}),
        ("SELECT * FROM (SELECT DISTINCT o_key FROM orders) WHERE o_key = 1", {"orders": '"o_key" = 1'}),
        (
            "SELECT * FROM (SELECT o_key, max(1) FROM orders GROUP BY o_key HAVING count(*) > 1) WHERE o_key = 1",
            {"orders": '"o_key" = 1'},
        ),
        (
            "SELECT * FROM (SELECT o_key, max(o_cust) AS n FROM orders GROUP BY 1) WHERE n = 1 AND o_key = 2",
            {"orders": '"o_key" = 2'},
        ),
        (
            "SELECT * FROM (SELECT o_key, o_cust FROM orders GROUP BY GROUPING SETS (o_key, o_cust)) WHERE o_cust = 1",
            {"orders": None},
        ),
        ("SELECT * FROM (SELECT o_key FROM orders GROUP BY ROLLUP (o_key)) WHERE o_key = 1", {"orders": None}),
        (
            "SELECT * FROM (SELECT o_key FROM orders GROUP BY GROUPING SETS ((o_key), ())) WHERE o_key = 1",
            {"orders": None},
        ),
        ("SELECT o_key FROM orders GROUP BY o_key HAVING o_key = 1", {"orders": '"o_key" = 1'}),
        (
            "SELECT count(*) FROM orders GROUP BY o_key HAVING o_key = 1 AND count(*) > 1 AND max(o_cust) = 2 LIMIT 3",
            {"orders": '"o_key" = 1'},
        ),
        ("SELECT o_key, count(*) FROM orders GROUP BY 1 HAVING o_key = 1", {"orders": '"o_key" = 1'}),
        ("SELECT o_key FROM orders GROUP BY o_key HAVING o_key = 1 OR count(*) > 1", {"orders": None}),
        ("SELECT o_key FROM orders GROUP BY ROLLUP (o_key) HAVING o_key = 1", {"orders": None}),
        ("SELECT o_key + 1 FROM orders GROUP BY o_key + 1, o_cust HAVING o_cust = 1", {"orders": '"o_cust" = 1'}),
        ("SELECT o_key FROM orders GROUP BY ROLLUP (o_key), o_cust HAVING o_cust = 1", {"orders": '"o_cust" = 1'}),
        ("SELECT o_key FROM orders GROUP BY CUBE (o_key), 1 HAVING o_key = 1", {"orders": '"o_key" = 1'}),
        (
            "SELECT * FROM (SELECT o_key, o_cust FROM orders GROUP BY GROUPING SETS ((o_cust, o_key), o_key)) "
            "WHERE o_cust = 1 AND o_key = 2",
            {"orders": '"o_key" = 2'},
        ),
        (
            "SELECT 1 FROM items WHERE EXISTS (SELECT count(*) FROM orders WHERE o_key = qty GROUP BY ROLLUP (o_key))",
            {"orders": None, "items": None},
        ),
        # Window functions: a condition applies if its column is in the PARTITION BY of all of them.
        (
            "SELECT * FROM (SELECT *, rank() OVER (PARTITION BY o_key, o_cust ORDER BY o_day) AS n, "
            "sum(1) OVER (PARTITION BY o_key) FROM orders) WHERE n = 1 AND o_key = 1 AND o_cust = 2 AND o_day IS NULL",
            {"orders": '"o_key" = 1'},
        ),
        (
            "SELECT * FROM (SELECT o_key, count(*) OVER w AS n FROM orders WINDOW w AS (PARTITION BY o_key)) "
            "WHERE o_key = 1",
            {"orders": None},
        ),
        (
            "SELECT * FROM (SELECT o_key, (SELECT max(n) FROM (SELECT count(*) OVER () AS n FROM items)) AS m "
            "FROM orders) WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": None},
        ),
        # Correlated subqueries, and LATERAL
        (
            "SELECT (SELECT max(qty) FROM items WHERE i_key = o_key) FROM orders WHERE o_key IN (1, 2) AND o_cust = 3",
            {"orders": '("o_key" IN (1, 2) AND "o_cust" = 3)', "items": '"i_key" IN (1, 2)'},
        ),
        (
            "SELECT * FROM orders WHERE o_key = 1 AND o_cust < (SELECT avg(qty) FROM items WHERE i_key = o_key)",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        (
            "SELECT * FROM orders o, LATERAL (SELECT sum(qty) AS s FROM items WHERE i_key = o.o_key) x WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        (
            "SELECT * FROM orders o LEFT JOIN LATERAL (SELECT * FROM items WHERE i_key = o.o_key LIMIT 1) x ON true "
            "WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        (
            "SELECT * FROM orders WHERE o_key = 1 OR o_cust = (SELECT max(i_key) FROM items WHERE i_key = o_key)",
            {"orders": None, "items": None},
        ),
        # A list of values in the same FROM as a table
        ("SELECT * FROM orders JOIN (VALUES 1, 2) AS v (k) ON o_key = k", {"orders": '"o_key" IN (1, 2)'}),
        ("WITH v (k) AS (VALUES 1, 2) SELECT * FROM v LEFT JOIN orders ON o_key = k", {"orders": '"o_key" IN (1, 2)'}),
        ("SELECT * FROM orders LEFT JOIN (VALUES 1, 2) AS v (k) ON o_key = k", {"orders": None}),
        ("SELECT * FROM orders JOIN (VALUES 1, 2.5) AS v (k) ON o_key = k", {"orders": None}),
        ("SELECT * FROM orders JOIN (VALUES 1, NULL) AS v (k) USING (k)", {"orders": None}),
        ("SELECT o_key FROM orders WHERE o_cust = 1 GROUP BY CUBE (o_key)", {"orders": '"o_cust" = 1'}),
        ("SELECT * FROM orders WHERE o_cust = 1 ORDER BY o_key LIMIT 1", {"orders": '"o_cust" = 1'}),
        # Set operations: each part has its own WHERE.
        (
            "SELECT o_key FROM orders WHERE o_key = 1 UNION ALL SELECT i_key FROM items WHERE qty = 2 LIMIT 3",
            {"orders": '"o_key" = 1', "items": '"qty" = 2'},
        ),
        (
            "SELECT * FROM (SELECT o_key FROM orders UNION SELECT i_key FROM items) WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        (
            "SELECT * FROM (SELECT o_key, o_cust FROM orders EXCEPT ALL SELECT i_key, 1 FROM items) WHERE o_cust = 1",
            {"orders": '"o_cust" = 1', "items": None},
        ),
        (
            "SELECT * FROM (SELECT o_key, o_cust FROM orders EXCEPT SELECT i_key, 1 FROM items) WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        (
            "SELECT * FROM (SELECT o_key FROM orders UNION SELECT size FROM parts) WHERE o_key = 1",
            {"orders": '"o_key" = 1', "parts": '"size" = 1'},
        ),
        (
            "SELECT * FROM (SELECT * FROM orders UNION ALL SELECT * FROM orders) WHERE o_key = 1",
            {"orders": None},
        ),
        (
            "SELECT * FROM (SELECT o_key FROM orders UNION SELECT i_key FROM items LIMIT 3) WHERE o_key = 1",
            {"orders": None, "items": None},
        ),
        (
            "WITH x (a) AS (SELECT o_key FROM orders INTERSECT SELECT i_key FROM items) SELECT * FROM x WHERE a = 1",
            {"orders": '"o_key" = 1', "items": '"i_key" = 1'},
        ),
        # Names in WITH
        ("WITH x AS (SELECT * FROM orders) SELECT * FROM x WHERE o_key = 1", {"orders": '"o_key" = 1'}),
        (
            "WITH x AS (SELECT * FROM orders) SELECT * FROM x a, x b WHERE a.o_key = 1 AND b.o_key = 2",
            {"orders": '("o_key" = 1 OR "o_key" = 2)'},
        ),
        (
            "WITH x AS (SELECT * FROM orders) SELECT * FROM x WHERE o_key = 1 AND o_cust IN (SELECT o_key FROM x)",
            {"orders": None},
        ),
        ("WITH orders AS (SELECT * FROM items) SELECT * FROM orders WHERE qty = 1", {"items": '"qty" = 1'}),
        (
            "WITH orders AS (SELECT * FROM orders WHERE o_key = 1) SELECT * FROM Orders WHERE o_cust = 2",
            {"orders": '("o_key" = 1 AND "o_cust" = 2)'},
        ),
        ("WITH x (a) AS (SELECT o_cust FROM orders) SELECT * FROM x WHERE a = 1", {"orders": '"o_cust" = 1'}),
        (
            "WITH x AS (SELECT * FROM orders), y AS (SELECT * FROM x WHERE o_key = 1) SELECT * FROM y WHERE o_cust = 2",
            {"orders": '("o_key" = 1 AND "o_cust" = 2)'},
        ),
        ("WITH x AS (SELECT * FROM orders) SELECT 1 FROM s.x WHERE o_key = 1", {"x": '"o_key" = 1', "orders": None}),
        # No condition moves into a subquery in an expression, or out of it.
        (
            "SELECT * FROM orders WHERE o_key = 1 AND o_cust NOT IN (SELECT i_key FROM items WHERE qty = 2)",
            {"orders": '"o_key" = 1', "items": '"qty" = 2'},
        ),
        (
            "SELECT (SELECT max(qty) FROM items WHERE i_key = o_key AND i_day IS NULL AND o_cust = 5) FROM orders",
            {"orders": None, "items": '"i_day" IS NULL'},
        ),
        (
            "SELECT * FROM orders WHERE NOT EXISTS (SELECT 1 FROM items WHERE i_key = o_key AND qty = 2)",
            {"orders": None, "items": '"qty" = 2'},
        ),
        # An aggregate of CASE ignores the rows for which the CASE is null.
        ("SELECT sum(CASE WHEN o_key = 1 THEN 2 END) FROM orders", {"orders": '"o_key" = 1'}),
        (
            "SELECT max(CASE o_key WHEN 1 THEN 2 ELSE NULL END) / count_if(o_key = 3) FROM orders",
            {"orders": '("o_key" = 3 OR "o_key" = 1)'},
        ),
        ("SELECT count(DISTINCT IF(o_key = 1, o_cust)) FROM orders", {"orders": '"o_key" = 1'}),
        ("SELECT sum(CASE WHEN o_key = 1 THEN 2 ELSE 0 END) FROM orders", {"orders": None}),
        ("SELECT sum(CASE WHEN o_key = 1 THEN 2 END) FROM orders GROUP BY o_cust", {"orders": None}),
        ("SELECT array_agg(CASE WHEN o_key = 1 THEN 2 END) FROM orders", {"orders": None}),
        ("SELECT max(CASE WHEN o_key = 1 THEN 2 END, 3) FROM orders", {"orders": None}),
        # Integer division
        ("SELECT * FROM orders WHERE o_key / 100 = 5", {"orders": '("o_key" >= 500 AND "o_key" <= 599)'}),
        ("SELECT * FROM orders WHERE o_key / 100 = 0", {"orders": '("o_key" >= -99 AND "o_key" <= 99)'}),
        ("SELECT * FROM orders WHERE o_key / 100 = -5", {"orders": '("o_key" >= -599 AND "o_key" <= -500)'}),
        ("SELECT * FROM orders WHERE NOT o_key / 100 = 5", {"orders": '("o_key" < 500 OR "o_key" > 599)'}),
        ("SELECT * FROM orders WHERE o_key / 100 <= 5", {"orders": '"o_key" <= 599'}),
        ("SELECT * FROM orders WHERE o_key / 100 < 5", {"orders": '"o_key" < 500'}),
        ("SELECT * FROM orders WHERE o_key / 100 > -5", {"orders": '"o_key" > -500'}),
        ("SELECT * FROM orders WHERE o_key / -100 = 5 AND o_key / 100.0 <> 5 AND o_key / 0 = 1", {"orders": None}),
        # FILTER
        ("SELECT count(*) FILTER (WHERE o_key = 1) FROM orders", {"orders": '"o_key" = 1'}),
        (
            "SELECT coalesce(sum(o_cust) FILTER (WHERE o_key = 1), 0) - 2 * count(*) FILTER (WHERE o_key = 2) AS n "
            "FROM orders WHERE o_cust < 3",
            {"orders": '("o_cust" < 3 AND ("o_key" = 2 OR "o_key" = 1))'},
        ),
        ("SELECT count(*) FILTER (WHERE o_key = 1), count(*) FROM orders", {"orders": None}),
        ("SELECT count(*) FILTER (WHERE o_key = 1) + max(2) FROM orders", {"orders": None}),
        ("SELECT count(*) FILTER (WHERE o_key = 1) + checksum(2) FROM orders", {"orders": None}),
        ("SELECT count(*) FILTER (WHERE o_key = 1) FROM orders GROUP BY o_cust", {"orders": None}),
        ("SELECT count(*) FILTER (WHERE o_key = 1) FROM orders HAVING count(*) > 1", {"orders": None}),
        ("SELECT count(*) FILTER (WHERE o_key = 1) OVER () FROM orders", {"orders": None}),
        # WITH RECURSIVE
        (
            "WITH RECURSIVE x (n) AS (SELECT o_key FROM orders WHERE o_cust = 1 UNION ALL SELECT qty FROM items, x "
            "WHERE price = n AND qty < 3) SELECT * FROM x WHERE n = 4",
            {"orders": '"o_cust" = 1', "items": '"qty" < 3'},
        ),
        (
            "WITH RECURSIVE x (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x), y AS (SELECT * FROM items) "
            "SELECT * FROM x, orders, y WHERE o_key = 1 AND qty = 2",
            {"orders": '"o_key" = 1', "items": '"qty" = 2'},
        ),
        # Sources with unknown rows in the same FROM as tables
        (
            "SELECT * FROM orders CROSS JOIN UNNEST(ARRAY[1, 2]) AS u (n) WHERE orders.o_key = 1 AND n = 2",
            {"orders": '"o_key" = 1'},
        ),
        (
            "SELECT * FROM orders, LATERAL (SELECT * FROM items WHERE qty = 1) x WHERE o_key = 1",
            {"orders": '"o_key" = 1', "items": '"qty" = 1'},
        ),
        ("SELECT * FROM orders, TABLE(f(input => TABLE(items))) x WHERE o_key = 1", {"orders": '"o_key" = 1'}),
        ("SELECT * FROM orders, items TABLESAMPLE SYSTEM (10) WHERE o_key = 1", {"orders": '"o_key" = 1'}),
        (
            "SELECT * FROM orders, items FOR TIMESTAMP AS OF TIMESTAMP '2020-01-01 00:00:00 UTC' WHERE o_key = 1",
            {"orders": '"o_key" = 1'},
        ),
        (
            "SELECT * FROM orders o, items FOR VERSION AS OF 'tag' i WHERE o.o_key = 1 AND i.qty = 2",
            {"orders": '"o_key" = 1', "items": '"qty" = 2'},
        ),
        (
            "SELECT * FROM orders o, items FOR VERSION AS OF concat('a', 'b') i WHERE o.o_key = 1 AND i.qty = 2",
            {"orders": '"o_key" = 1'},
        ),
        ('SELECT * FROM orders, "items$files" WHERE o_key = 1', {"orders": '"o_key" = 1'}),
        ("SELECT * FROM orders, (VALUES 1, 2) v (o) WHERE o_key = 1 AND o = 1", {"orders": '"o_key" = 1'}),
        ("SELECT * FROM (orders JOIN items ON true) x WHERE o_key = 1", {}),
        (
            "WITH x AS (SELECT * FROM orders) SELECT * FROM x, LATERAL (SELECT * FROM x) y WHERE x.o_key = 1",
            {"orders": None},
        ),
        # Column names that are qualified by a schema
        ("SELECT s.orders.o_key FROM s.orders WHERE o_key = 1", {"orders": '"o_key" = 1'}),
        ("SELECT 1 FROM S.orders, items WHERE s.orders.o_key = 1", {"orders": '"o_key" = 1', "items": None}),
        ("SELECT 1 FROM s.orders, r.orders WHERE s.orders.o_key = 1", {"orders": None}),
        ("SELECT 1 FROM s.orders orders WHERE s.orders.o_key = 1", {"orders": None}),
        ("SELECT 1 FROM orders WHERE s.orders.o_key = 1", {"orders": None}),
        ("SELECT s.orders.o_key FROM s.orders AS orders WHERE o_key = 1", {"orders": '"o_key" = 1'}),
    ],
)
def test_scan_has_the_predicate_of_the_rows_that_can_matter(statement: str, expected: dict[str, str | None]) -> None:
    assert find_predicates(statement) == expected


def test_unqualified_column_is_ignored_if_the_columns_of_tables_are_unknown() -> None:
    statement = "SELECT * FROM orders o, items WHERE o_key = 1 AND o.o_cust = 2 AND qty = 3"
    assert [scan.predicate for scan in find_scans(statement)] == ['"o_cust" = 2', None]


@pytest.mark.parametrize(
    ("source", "applies_to_orders", "applies_to_others"),
    [
        ("orders JOIN others USING (o_key)", True, True),
        ("orders LEFT JOIN others USING (o_key)", True, True),
        ("orders RIGHT JOIN others USING (o_key)", True, True),
        ("orders FULL JOIN others USING (o_key)", False, False),
        ("(SELECT * FROM orders JOIN others USING (o_key)) AS x", True, True),
        ("others x LEFT JOIN orders USING (o_key) JOIN others y USING (o_key)", True, True),
        ("orders FULL JOIN others USING (o_key) JOIN (VALUES 1) AS v (o_key) USING (o_key)", False, False),
        ("orders FULL JOIN (others JOIN items ON o_key = i_key) USING (o_key)", False, False),
        # If one side is unknown or has another type, the merged column can have another value.
        ("orders RIGHT JOIN unknown USING (o_key)", False, False),
        ("orders JOIN unknown USING (o_key)", False, False),
        ("orders JOIN (SELECT o_key + 1 AS o_key FROM others) x USING (o_key)", False, False),
        ("orders JOIN (SELECT size AS o_key FROM parts) x USING (o_key)", False, False),
        (
            "(SELECT qty AS q FROM items) x RIGHT JOIN (SELECT qty AS q, o_key FROM items, orders) y USING (q)",
            True,
            False,
        ),
    ],
)
def test_condition_on_a_merged_column_applies_to_both_tables_if_they_share_its_value(
    source: str, applies_to_orders: bool, applies_to_others: bool
) -> None:
    predicates = find_predicates(f"SELECT * FROM {source} WHERE o_key = 1")
    assert predicates["orders"] == ('"o_key" = 1' if applies_to_orders else None)
    assert predicates.get("others") == ('"o_key" = 1' if applies_to_others else None)


def test_null_condition_on_a_merged_column_applies_to_the_side_that_is_kept() -> None:
    """The other table of a FULL JOIN can supply the value, so the condition applies to neither table."""
    statement = "SELECT * FROM orders {} JOIN others USING (o_key) WHERE o_key IS NULL"
    assert find_predicates(statement.format("LEFT"))["orders"] == '"o_key" IS NULL'
    assert find_predicates(statement.format("RIGHT"))["others"] == '"o_key" IS NULL'
    assert set(find_predicates(statement.format("FULL")).values()) == {None}


def test_column_belongs_to_the_unknown_table_if_no_other_source_can_have_it() -> None:
    for extra_relation in ("UNNEST(ARRAY[1, 2]) AS u (n)", "UNNEST(ARRAY[1])", "items", "(VALUES 1) AS v (n)"):
        assert find_predicates(f"SELECT * FROM unknown, {extra_relation} WHERE o_key = 1")["unknown"] == '"o_key" = 1'
    for extra_relation in ("UNNEST(ARRAY[rand()])", "orders", "nothing", "(VALUES 1) AS v (o_key)"):
        assert find_predicates(f"SELECT * FROM unknown, {extra_relation} WHERE o_key = 1")["unknown"] is None


def test_column_that_the_inner_table_lacks_belongs_to_the_outer_table() -> None:
    statement = "SELECT * FROM orders WHERE EXISTS (SELECT 1 FROM items WHERE o_key = 5)"
    assert find_predicates(statement) == {"orders": None, "items": None}
