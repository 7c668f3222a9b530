"""Tests that constants which Trino cannot compute exclude no files.

The statement must then fail as it does without a plan.
"""

from __future__ import annotations

import pytest

from seamark.connector.analysis.scans import find_scans

OUT_OF_RANGE = [
    "2147483647 + 1",
    "-2147483648 - 1",
    "2147483647 + 1 - 1",
    "1 + (2147483647 + 0) + 5",
    "- 2147483648 - 1",
    "9223372036854775807 + 1",
    "-9223372036854775807 - 2",
    "9223372036854775808",
    "-(-2147483648)",
    "BIGINT '9223372036854775807' + 1",
    "INTEGER '2147483647' + INTEGER '1'",
    "INTEGER '2147483648'",
    "CAST(2147483648 AS INTEGER)",
    "CAST('300' AS TINYINT)",
    "TINYINT '100' + TINYINT '100'",
    "SMALLINT '32767' + SMALLINT '1'",
    "CAST(127 AS TINYINT) + CAST(1 AS TINYINT)",
    "CAST(40000 AS SMALLINT)",
    "99999999999999999999999999999999999999.0",
    "99999999999999999999999999999999999999 + 1.0",
    "10 - 9.9999999999999999999999999999999999999",
    "1e400",
    "1 / 0",
    "5 % 0",
]
IN_RANGE = [
    ("2147483647 + 0", "2147483647"),
    ("2147483647 - 1", "2147483646"),
    ("-2147483647 - 1", "-2147483648"),
    ("2147483648 + 1", "2147483649"),
    ("BIGINT '2147483647' + 1", "2147483648"),
    ("CAST(2147483647 AS BIGINT) + 1", "2147483648"),
    ("TINYINT '100' + 100", "200"),
    ("SMALLINT '32767' + 1", "32768"),
    ("TINYINT '100' + TINYINT '27'", "127"),
    ("9223372036854775806 + 1", "9223372036854775807"),
    ("2147483647 + 1.5", "2147483648.5"),
    ("-128", "-128"),
]
DATES = [
    "DATE '9999-12-31' + INTERVAL '1' DAY",
    "DATE '0001-01-01' - INTERVAL '1' DAY",
    "DATE '2026-01-01' + INTERVAL '9999999999' MONTH",
    "DATE '2026-01-01' + INTERVAL '99999999999' DAY",
    "DATE '2026-02-30'",
    "TIMESTAMP '2026-01-01 00:00:00 +15:00'",
    "TIMESTAMP '2026-01-01 25:00:00'",
]


def find_predicate(text: str, column: str = "x") -> str | None:
    (scan,) = find_scans(
        f"SELECT * FROM t WHERE {column} = {text}",
        find_columns=lambda _: {"x": "long", "day": "date", "at": "timestamptz"},
        utc=True,
    )
    return scan.predicate


@pytest.mark.parametrize("text", OUT_OF_RANGE)
def test_number_out_of_its_types_range_is_not_in_the_predicate(text: str) -> None:
    assert find_predicate(text) is None
    (scan,) = find_scans(f"SELECT * FROM t WHERE x IN (1, {text})")
    assert scan.predicate is None
    (scan,) = find_scans(f"SELECT * FROM t WHERE x BETWEEN 1 AND {text} AND y = 1")
    assert "y" in (scan.predicate or "")
    assert "BETWEEN" not in (scan.predicate or "")


@pytest.mark.parametrize(("text", "value"), IN_RANGE)
def test_number_within_its_types_range_has_the_value_that_trino_computes(text: str, value: str) -> None:
    assert find_predicate(text) == f'"x" = {value}'


@pytest.mark.parametrize("text", DATES)
def test_invalid_time_is_not_in_the_predicate(text: str) -> None:
    for column in ("day", "at"):
        assert find_predicate(text, column) is None
