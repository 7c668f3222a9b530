"""Tests that check which statements are analysed, and which parts of a text change if a table is replaced."""

from __future__ import annotations

import random

import pytest

from seamark.connector.analysis.lexer import ExecuteStatement, parse_execute
from seamark.connector.analysis.scans import find_scans, read_from_view
from seamark.connector.plans.splices import splice
from tests.connector.analysis.scan_tables import find_predicates, find_statement_scans, get_columns


@pytest.mark.parametrize(
    "statement",
    [
        "",
        "SHOW TABLES",
        "TABLE orders",
        "VALUES 1",
        "INSERT INTO items SELECT * FROM orders WHERE o_key = 1",
        "CREATE TABLE x AS SELECT * FROM orders WHERE o_key = 1",
        "EXPLAIN INSERT INTO items SELECT * FROM orders WHERE o_key = 1",
        "DELETE FROM orders WHERE o_key = 1",
        "UPDATE orders SET o_key = 1 WHERE o_key = 1",
        "MERGE INTO orders USING items ON o_key = i_key WHEN MATCHED THEN DELETE",
        "PREPARE p FROM SELECT * FROM orders WHERE o_key = 1",
        "EXECUTE p USING 1",
        "DESCRIBE orders",
        "SHOW STATS FOR (SELECT * FROM orders WHERE o_key = 1)",
        "SELECT 1; SELECT * FROM orders WHERE o_key = 1",
        "WITH FUNCTION f(x int) RETURNS int RETURN x SELECT * FROM orders WHERE o_key = 1",
        "SELECT * FROM orders MATCH_RECOGNIZE (PATTERN (A) DEFINE A AS o_key = 1) WHERE o_key = 1",
        "SELECT * FROM orders NATURAL JOIN items WHERE o_key = 1",
        "SELECT * FROM orders SEMI JOIN items ON true WHERE o_key = 1",
        "SELECT * FROM orders ASOF JOIN items ON true WHERE o_key = 1",
        "SELECT DISTINCT ON (o_key) * FROM orders WHERE o_key = 1",
        "SELECT * FROM orders PIVOT (max(o_key) FOR o_cust IN (1)) WHERE o_key = 1",
        "SELECT * FROM orders QUALIFY row_number() OVER () = 1",
        "SELECT * FROM `orders` WHERE o_key = 1",
        "SELECT * FROM orders WHERE o_key = 1_000",
        "SELECT * FROM orders WHERE o_key = 0x1F",
        "SELECT * FROM orders WHERE o_key = 'unfinished",
        "SELECT * FROM orders /* unfinished WHERE o_key = 1",
        "SELECT * FROM orders {# x #} WHERE o_key = 1",
        "SELECT * FROM orders WHERE größe = 1",
        "SELECT * FROM orders WHERE o_key = ?",
        'SELECT * FROM "ORDERſ" WHERE o_key = 1',
        "SELECT * FROM orders WHERE " + "(" * 3000 + "o_key = 1" + ")" * 3000,
        "SELECT * FROM orders WHERE o_key = 1 " + " " * 200_000,
        "EXECUTE IMMEDIATE 'SELECT * FROM orders WHERE o_key = ?'",
        "EXECUTE IMMEDIATE 'SELECT * FROM orders WHERE o_key = ?' USING 1, 2",
        "EXECUTE IMMEDIATE 'INSERT INTO items SELECT * FROM orders WHERE o_key = 1'",
    ],
)
def test_statement_that_is_not_fully_understood_has_no_scans(statement: str) -> None:
    assert find_statement_scans(statement) == ()


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT * FROM orders WHERE o_key = 1", 'SELECT * FROM "P" AS "orders" WHERE o_key = 1'),
        ("select/**/*from Orders--x\nwhere o_key=1", 'select/**/*from "P" AS "Orders"--x\nwhere o_key=1'),
        ('SELECT * FROM "orders" o, items AS i', 'SELECT * FROM "P" o, "P" AS i'),
        ('SELECT * FROM c."S s" /* . */ . "orders" x', 'SELECT * FROM c."S s" /* . */ . "P" x'),
        ("SELECT * FROM (orders)", 'SELECT * FROM ("P" AS "orders")'),
        ("SELECT 'FROM orders' FROM s.orders", 'SELECT \'FROM orders\' FROM s."P" AS "orders"'),
        ("SELECT /* /* */ 1 FROM orders", 'SELECT /* /* */ 1 FROM "P" AS "orders"'),
        ("SELECT 'ü😀' FROM orders", 'SELECT \'ü😀\' FROM "P" AS "orders"'),
        ("EXPLAIN SELECT * FROM orders", 'EXPLAIN SELECT * FROM "P" AS "orders"'),
        ("explain analyze verbose (SELECT * FROM orders)", 'explain analyze verbose (SELECT * FROM "P" AS "orders")'),
        (
            "EXPLAIN (TYPE DISTRIBUTED, FORMAT JSON) SELECT * FROM orders",
            'EXPLAIN (TYPE DISTRIBUTED, FORMAT JSON) SELECT * FROM "P" AS "orders"',
        ),
        (
            "EXECUTE IMMEDIATE 'SELECT ''a'', ? FROM orders' USING 'it''s'",
            "EXECUTE IMMEDIATE 'SELECT ''a'', ? FROM \"P\" AS \"orders\"' USING 'it''s'",
        ),
        (
            "EXECUTE IMMEDIATE 'SELECT * FROM \"o''b\" WHERE x = ''y'''",
            "EXECUTE IMMEDIATE 'SELECT * FROM \"P\" AS \"o''b\" WHERE x = ''y'''",
        ),
        (
            "EXPLAIN EXECUTE IMMEDIATE 'SELECT * FROM orders -- ''\n, items'",
            'EXPLAIN EXECUTE IMMEDIATE \'SELECT * FROM "P" AS "orders" -- \'\'\n, "P" AS "items"\'',
        ),
    ],
)
def test_splice_changes_only_the_names_of_tables(statement: str, expected: str) -> None:
    assert splice(statement, [read_from_view(scan, "P") for scan in find_statement_scans(statement)]) == expected


def test_scan_has_the_names_and_the_position_of_its_table_reference() -> None:
    statement = 'SELECT * FROM Cat."Sch".ORDERS FOR VERSION AS OF 123 WHERE o_key = 1'
    (scan,) = find_statement_scans(statement)
    assert (scan.catalog, scan.schema, scan.table, scan.snapshot_id) == ("cat", "sch", "orders", 123)
    assert statement[scan.start : scan.end] == 'Cat."Sch".ORDERS'
    assert statement[scan.name_start : scan.end] == "ORDERS"
    assert scan.version_span is not None
    assert statement[slice(*scan.version_span)] == "FOR VERSION AS OF 123"
    assert scan.alias_needed == ' AS "ORDERS"'
    assert scan.predicate == '"o_key" = 1'
    statement = "EXECUTE IMMEDIATE 'SELECT * FROM orders /* */ FOR version AS OF ''it''''s'' AS o'"
    (scan,) = find_statement_scans(statement)
    assert (scan.snapshot_id, scan.ref) == (None, "it's")
    assert scan.version_span is not None
    assert statement[slice(*scan.version_span)] == "FOR version AS OF ''it''''s''"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("EXECUTE p", ExecuteStatement("p", ())),
        (
            "execute \"My p\" USING 1, 'a, b', ARRAY[1, (2)] -- x",
            ExecuteStatement("My p", ("1", "'a, b'", "ARRAY [ 1 , ( 2 ) ]")),
        ),
        ("EXPLAIN ANALYZE EXECUTE p USING DATE '2020-01-01'", ExecuteStatement("p", ("DATE '2020-01-01'",))),
        ("EXECUTE IMMEDIATE 'SELECT 1'", None),
        ("SELECT 1", None),
        ("EXECUTE", None),
        ("EXECUTE p 5", None),
        ("", None),
    ],
)
def test_execute_is_parsed_into_name_and_parameters(statement: str, expected: ExecuteStatement | None) -> None:
    assert parse_execute(statement) == expected


def test_chain_of_names_that_are_used_twice_is_analysed_quickly() -> None:
    """If each use of a name were analysed separately, the chain would need 2**59 analyses."""
    names = ["x0 AS (SELECT * FROM orders)"]
    for number in range(1, 60):
        inner = f"SELECT * FROM x{number - 1} a, x{number - 1} b WHERE a.o_key < {number} AND b.o_cust < {number}"
        names.append(f"x{number} AS ({inner})")
    (scan,) = find_statement_scans(f"WITH {', '.join(names)} SELECT * FROM x59")
    assert scan.predicate == '("o_key" < 1 OR "o_cust" < 1)'
    union_names = ["x0 AS (SELECT o_key FROM orders)"]
    union_names += [f"x{n} AS (SELECT o_key FROM x{n - 1} UNION SELECT o_key FROM x{n - 1})" for n in range(1, 60)]
    assert find_predicates(f"WITH {', '.join(union_names)} SELECT * FROM x59 WHERE o_key = 1") == {
        "orders": '"o_key" = 1'
    }


def test_long_chain_of_conditions_is_analysed() -> None:
    alternatives = " OR ".join(f"(o_key = {number} AND o_cust = {number})" for number in range(1000))
    conditions = " AND ".join(f"o_key <> {number}" for number in range(1500))
    for condition, comparison_count in ((alternatives, 1000), (conditions, 1500)):
        (predicate,) = find_predicates(f"SELECT * FROM orders WHERE {condition}").values()
        assert predicate is not None
        assert predicate.count('"o_key"') == comparison_count


def test_analysis_of_a_random_text_raises_no_error() -> None:
    rng = random.Random(5)
    pieces = ["SELECT", "*", "FROM", "orders", "WHERE", "(", ")", ",", "'x'", '"y"', "=", "JOIN", "ON", "WITH", "AS"]
    pieces += ["1", "EXPLAIN", "?", "USING", "UNION", "--", "/*", "*/", "NOT", "IN"]
    pieces += ["EXECUTE IMMEDIATE", "LIKE", ".", "é", "'", "EXECUTE", "LEFT", "VALUES", "TABLE", "UNNEST", "INTERVAL"]
    for _ in range(3000):
        find_scans(" ".join(rng.choices(pieces, k=rng.randint(1, 25))), find_columns=get_columns)
