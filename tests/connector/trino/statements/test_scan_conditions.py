"""What becomes of the conditions of one table: comparisons, functions, times, parameters, fields of structs."""

from __future__ import annotations

from datetime import date

import pytest

from seamark.connector.plans.joins import Dimension, PlannedScan
from seamark.connector.trino.statements.scans import find_scans
from tests.connector.trino.statements.scan_tables import found, predicates


@pytest.mark.parametrize(
    ("condition", "predicate"),
    [
        ("i_key = 5", '"i_key" = 5'),
        ("5 < i_key", '"i_key" > 5'),
        ("i.I_KEY = 5 AND qty > 1.5", '("i_key" = 5 AND "qty" > 1.5)'),
        ('"I_Key" IN (1, -2, NULL)', '"i_key" IN (1, -2, NULL)'),
        ("i_key NOT IN (1, 2)", 'NOT ("i_key" IN (1, 2))'),
        ("NOT (i_key = 5 OR qty = 1)", '(NOT ("i_key" = 5) AND NOT ("qty" = 1))'),
        ("NOT (i_key = 5 AND qty = 1)", '(NOT ("i_key" = 5) OR NOT ("qty" = 1))'),
        ("i_key BETWEEN 1 AND 2 + 3", '"i_key" BETWEEN 1 AND 5'),
        ("qty BETWEEN 0.06 - 0.01 AND 0.06 + 0.01", '"qty" BETWEEN 0.05 AND 0.07'),
        ("i_day < DATE '1994-01-31' + INTERVAL '1' MONTH", "\"i_day\" < DATE '1994-02-28'"),
        ("i_day <= date '1998-12-01' - interval '90' day", "\"i_day\" <= DATE '1998-09-02'"),
        ("i_day < DATE '1996-02-29' + INTERVAL '1' YEAR", "\"i_day\" < DATE '1997-02-28'"),
        ("i_key IS NULL", '"i_key" IS NULL'),
        ("i_key IS NOT NULL", 'NOT ("i_key" IS NULL)'),
        ("i_key IS NOT DISTINCT FROM 5", '"i_key" IS NOT DISTINCT FROM 5'),
        ("i_key IS DISTINCT FROM NULL", '"i_key" IS DISTINCT FROM NULL'),
        ("ts >= TIMESTAMP '2020-01-01 10:00:00.123456'", "\"ts\" >= TIMESTAMP '2020-01-01 10:00:00.123456'"),
        ("CAST(tz AS date) = DATE '2020-01-01'", "CAST(\"tz\" AS DATE) = DATE '2020-01-01'"),
        ("date(ts) = DATE '2020-01-01'", "CAST(\"ts\" AS DATE) = DATE '2020-01-01'"),
        ("year(i_day) = 1994", 'YEAR("i_day") = 1994'),
        ("extract(YEAR FROM i_day) IN (1994, 1995)", 'YEAR("i_day") IN (1994, 1995)'),
        ("i_key = BIGINT '7' AND qty < DECIMAL '1.5'", '("i_key" = 7 AND "qty" < 1.5)'),
        ("qty < 1e3 AND qty < DOUBLE '2'", '("qty" < 1e3 AND "qty" < 2E0)'),
        # Weaker where a part is not understood.
        ("i_key = 5 AND rand() < 0.5", '"i_key" = 5'),
        ("i_key = 5 OR rand() < 0.5", None),
        ("(i_key = 5 AND qty > i_key) OR i_key = 6", '("i_key" = 5 OR "i_key" = 6)'),
        ("NOT (i_key = 5 AND qty > i_key)", None),
        ("NOT (i_key = 5 OR qty > i_key)", 'NOT ("i_key" = 5)'),
        ("i_key = 5 AND i_key = i_key", '"i_key" = 5'),
        # Not plain enough to mean the same everywhere.
        ("rand() + i_key = 5", None),
        ("i_key = 10 / 3", None),
        ("i_key = CAST('x' AS char(5))", None),
        ("i_key = CAST(5 AS varchar)", None),
        ("tz > TIMESTAMP '2020-01-01 00:00:00'", None),
        ("tz > DATE '2020-01-01'", None),
        ("i_day > TIMESTAMP '2020-01-01 00:00:00 UTC'", None),
        ("ts > TIMESTAMP '2020-01-01 00:00:00 Europe/Berlin'", None),
        ("ts > CAST('2020-01-01 00:00:00.123456' AS timestamp)", None),
        ("qty > CAST('1.5' AS decimal)", None),
        ("i_day > current_date", None),
        ("i_day > DATE '2020-02-30'", None),
        ("i_key = (SELECT 5)", None),
        ("i_key IN (SELECT 5)", None),
        ("i_key > ALL (VALUES 5)", None),
        ("(i_key, qty) = (1, 2)", '("i_key" = 1 AND "qty" = 2)'),
        (
            "(i_key, qty) IN ((1, 2), (3, rand()))",
            '(("i_key" = 1 AND "qty" = 2) OR "i_key" = 3)',
        ),
        ("(i_key, qty) NOT IN ((1, 2), (3, 4))", None),
        ("(i_key, qty) IN ((1, 2), (3, 4, 5))", None),
        ("i_key IN (VALUES 1, 2)", '"i_key" IN (1, 2)'),
        ("i_key IN (VALUES (1, 2))", None),
        ("i_key IN (SELECT x FROM UNNEST(ARRAY[1, 2]) AS u (x))", '"i_key" IN (1, 2)'),
        ("i_key IN (SELECT x FROM (VALUES (1, 'a'), (NULL, 'b')) AS u (x, y))", '"i_key" IN (1)'),
        ("i_key IN (SELECT x FROM UNNEST(ARRAY[1, i_key]) AS u (x))", None),
        ("i_key = ANY (SELECT x FROM UNNEST(ARRAY[1, 2]) AS u (x))", '"i_key" IN (1, 2)'),
        ("contains(ARRAY[1, 2], i_key)", '"i_key" IN (1, 2)'),
        ("NOT contains(ARRAY[1, NULL], i_key)", 'NOT ("i_key" IN (1, NULL))'),
        ("contains(ARRAY[1, 2], i_key + 1)", None),
        ("i_key = ?", None),
        ("\"$path\" = 'x'", None),
        ("\"a.b\" = 'x'", None),
        ("try_cast(ts AS date) = DATE '2020-01-01'", None),
        ("i_key = 5 IS NULL", None),
        ("true", None),
        ("nothing_here = 5", None),
        ("other.i_key = 5", None),
        ("i.i_key.x = 5", None),
    ],
)
def test_conditions_of_one_table_become_its_predicate(condition: str, predicate: str | None) -> None:
    assert predicates(f"SELECT * FROM items i WHERE {condition}", parameters=["1 + 1"] * condition.count("?")) == {
        "items": predicate
    }


@pytest.mark.parametrize(
    ("condition", "predicate"),
    [
        ("date_trunc('month', ts) = DATE '2026-01-01'", "(\"ts\" >= DATE '2026-01-01' AND \"ts\" < DATE '2026-02-01')"),
        ("date_trunc('month', ts) = DATE '2026-01-02'", "FALSE"),
        ("date_trunc('week', i_day) > DATE '2026-01-01'", "\"i_day\" >= DATE '2026-01-05'"),
        ("date_trunc('hour', ts) <= TIMESTAMP '2026-01-01 10:30:00'", "\"ts\" < TIMESTAMP '2026-01-01 11:00:00'"),
        ("date_trunc('day', tz) = DATE '2026-01-01'", None),
        (
            "year(i_day) = 2026 AND month(i_day) = 12",
            '(YEAR("i_day") = 2026 AND "i_day" >= DATE \'2026-12-01\' AND "i_day" < DATE \'2027-01-01\')',
        ),
        ("date_format(ts, '%Y-%m') = '2026-12'", "(\"ts\" >= DATE '2026-12-01' AND \"ts\" < DATE '2027-01-01')"),
        ("date_format(ts, '%Y-%m') = 'x'", None),
        ("date_format(ts, '%Y-%m') = '0033-12'", None),
        ("date_format(ts, '%Y-%m') = '2026-1'", "FALSE"),
        ("i_day >= current_date - INTERVAL '7' DAY", "\"i_day\" >= DATE '2026-03-03'"),
        ("i_day < now() + INTERVAL '1' MONTH", "\"i_day\" < DATE '2026-04-17'"),
        ("tz >= date_trunc('month', current_timestamp)", "\"tz\" >= DATE '2026-02-27'"),
        ("i_day = current_date", "(\"i_day\" >= DATE '2026-03-10' AND \"i_day\" <= DATE '2026-03-15')"),
        ("i_day <> current_date", None),
        ("NOT i_day < date_add('day', -1, current_date)", "\"i_day\" >= DATE '2026-03-09'"),
        ("i_day + INTERVAL '2' DAY > DATE '2026-01-03'", "\"i_day\" > DATE '2026-01-01'"),
        ("i_day + INTERVAL '1' MONTH > DATE '2026-01-03'", None),
        ("date_diff('day', i_day, current_date) < 30", "\"i_day\" >= DATE '2026-02-07'"),
        ("ts < TIMESTAMP '2026-01-01 00:00:00' + INTERVAL '90' MINUTE", "\"ts\" < TIMESTAMP '2026-01-01 01:30:00'"),
        ("tz >= from_iso8601_timestamp('2026-01-01T00:00:00Z')", "\"tz\" >= TIMESTAMP '2026-01-01 00:00:00 UTC'"),
        ("i_key + 1 = 5", '"i_key" = 4'),
        ("10 - i_key > 4", '"i_key" < 6'),
        ("-(i_key) * 2 >= 7", '"i_key" <= -4'),
        ("i_key * 2 = 7", "FALSE"),
        ("qty - 0.5 <= 1", '"qty" <= 1.5'),
        ("CAST(i_key AS bigint) = 5", '"i_key" = 5'),
        ("coalesce(i_key, 1) = 1", '("i_key" = 1 OR "i_key" IS NULL)'),
        ("coalesce(i_key, 1) > 1", '"i_key" > 1'),
        ("coalesce(i_key, 1e0) > 1", None),
        ("nullif(i_key, 0) IN (1, 2)", '("i_key" = 1 OR "i_key" = 2)'),
        ("CASE WHEN i_key = 5 THEN true END", '"i_key" = 5'),
        ("CASE WHEN i_key = 5 THEN 'a' WHEN i_key > 7 THEN 'b' ELSE 'c' END = 'b'", '"i_key" > 7'),
        ("CASE WHEN i_key = 5 THEN 'a' ELSE 'c' END = 'c'", None),
        ("IF(i_key = 5, 1, 0) = 1", '"i_key" = 5'),
        ("1 = 0", "FALSE"),
        ("i_key = 5 OR 1 = 0", '"i_key" = 5'),
        ("NOT true", "FALSE"),
    ],
)
def test_functions_of_a_column_become_conditions_on_it(condition: str, predicate: str | None) -> None:
    statement = f"SELECT * FROM items i WHERE {condition}"
    assert predicates(statement, today=date(2026, 3, 12)) == {"items": predicate}


@pytest.mark.parametrize(
    ("condition", "predicate"),
    [
        ("substr(brand, 1, 2) = 'ab'", "\"brand\" LIKE 'ab%'"),
        ("substr(brand, 1, 2) IN ('a', 'ab')", "(\"brand\" = 'a' OR \"brand\" LIKE 'ab%')"),
        ("substr(brand, 1, 2) = 'abc'", "FALSE"),
        ("substr(brand, 2, 2) = 'ab'", None),
        ("substr(brand, 1, 2) <> 'ab'", "NOT (\"brand\" LIKE 'ab%')"),
        ("starts_with(brand, 'a%')", "\"brand\" LIKE 'a\\%%' ESCAPE '\\'"),
        ("lower(brand) = 'a1'", "(\"brand\" = 'A1' OR \"brand\" = 'a1')"),
        ("lower(brand) = 'kä'", None),
        ("NOT lower(brand) = 'a'", None),
        ("upper(brand) = 'longer than the limit'", None),
    ],
)
def test_functions_of_texts_become_conditions_on_them(condition: str, predicate: str | None) -> None:
    assert predicates(f"SELECT * FROM parts WHERE {condition}") == {"parts": predicate}


@pytest.mark.parametrize(
    ("condition", "predicate"),
    [
        ("tz > TIMESTAMP '2020-01-01 00:00:00'", "\"tz\" > TIMESTAMP '2020-01-01 00:00:00'"),
        ("i_day < TIMESTAMP '2020-01-01 00:00:00 UTC'", "\"i_day\" < TIMESTAMP '2020-01-01 00:00:00 UTC'"),
    ],
)
def test_times_of_the_sessions_zone_are_used_where_it_is_utc(condition: str, predicate: str) -> None:
    assert predicates(f"SELECT * FROM items WHERE {condition}", utc=True) == {"items": predicate}


def test_times_of_a_column_whose_type_is_not_known_say_nothing() -> None:
    (scan,) = find_scans("SELECT * FROM items WHERE i_day = DATE '2020-01-01' AND i_key = 1")
    assert scan.predicate == '"i_key" = 1'


@pytest.mark.parametrize(
    ("parameters", "predicate"),
    [
        (["5", "'x'"], '("p_key" = 5 AND "brand" = \'x\')'),
        (["-5", "NULL"], '("p_key" = -5 AND "brand" = NULL)'),
        (["BIGINT '5'", "'it''s'"], "(\"p_key\" = 5 AND \"brand\" = 'it''s')"),
        (["1 + 1", "'x'"], "\"brand\" = 'x'"),
        (["ARRAY[1]", "lower('X')"], None),
    ],
)
def test_parameters_stand_where_their_question_marks_are(parameters: list[str], predicate: str | None) -> None:
    text = "SELECT * FROM parts WHERE p_key = ? AND brand = ? LIMIT 5"
    (scan,) = found(text, parameters=parameters)
    assert (text[scan.start : scan.end], scan.predicate) == ("parts", predicate)
    inside = f"EXECUTE IMMEDIATE '{text}' USING {', '.join(parameters)}"
    (scan,) = found(inside)
    assert (inside[scan.start : scan.end], scan.predicate) == ("parts", predicate)


STRUCTS = {
    "sales": {"id": "long", "delivery": "nested", "delivery.zone": "int", "delivery.to.city": "string"},
    "delivery": {"zone": "int"},
    "shops": {"zone": "int", "s_id": "long"},
}


@pytest.mark.parametrize(
    ("statement", "predicate"),
    [
        ("SELECT 1 FROM sales WHERE delivery.zone = 17", '"delivery.zone" = 17'),
        ("SELECT 1 FROM sales s WHERE s.delivery.zone IN (1, 2)", '"delivery.zone" IN (1, 2)'),
        ("SELECT 1 FROM sales WHERE delivery.to.city = 'x' AND id = 1", '("delivery.to.city" = \'x\' AND "id" = 1)'),
        ("SELECT 1 FROM sales s JOIN shops ON id = s_id WHERE delivery.zone > 3", '"delivery.zone" > 3'),
        ("SELECT sum(id) FILTER (WHERE delivery.zone = 3) FROM sales", '"delivery.zone" = 3'),
        ("SELECT 1 FROM sales WHERE delivery.zone IS NOT NULL", 'NOT ("delivery.zone" IS NULL)'),
        # Not every file format counts the field of a null struct as null.
        ("SELECT 1 FROM sales WHERE delivery.zone IS NULL", None),
        ("SELECT 1 FROM sales WHERE coalesce(delivery.zone, 1) = 1", None),
        # The name may be that of a relation.
        ("SELECT 1 FROM sales, delivery WHERE delivery.zone = 17", None),
        ("SELECT 1 FROM delivery WHERE EXISTS (SELECT 1 FROM sales WHERE delivery.zone = 17)", None),
        ("SELECT 1 FROM shops delivery WHERE EXISTS (SELECT 1 FROM sales WHERE delivery.zone = 17)", None),
        # Not of a table itself, or not known.
        ("SELECT 1 FROM (SELECT delivery FROM sales) WHERE delivery.zone = 17", None),
        ("SELECT 1 FROM sales WHERE delivery.street = 'x'", None),
        ("SELECT 1 FROM sales a, sales b WHERE delivery.zone = 17", None),
    ],
)
def test_a_field_of_a_struct_is_found_where_its_name_is_sure(statement: str, predicate: str | None) -> None:
    scans = find_scans(statement, columns_of=lambda names: STRUCTS.get(names[2]))
    assert [one.predicate for one in scans if one.table == "sales"][:1] == [predicate]


def test_a_field_filters_no_rows_of_a_dimension_and_counts_as_its_struct() -> None:
    text = "SELECT 1 FROM shops, sales WHERE s_id = id AND delivery.zone = 3"
    shops, sales = find_scans(text, columns_of=lambda names: STRUCTS.get(names[2]))
    assert sales.columns == {"delivery"}
    place = PlannedScan(sales, "sea", ("db", "sales"))
    assert Dimension(place, 1, 1, shops.joins[0], ()).request().filter is None
    either = "SELECT 1 FROM shops, sales WHERE s_id = id AND (delivery.zone = 3 OR shops.zone = 4)"
    assert [one.joins[0].any_of for one in find_scans(either, columns_of=lambda names: STRUCTS.get(names[2]))] == [
        None
    ] * 2
