"""Which scans are limited by extremes, and by columns of other tables that theirs are less or greater than."""

from __future__ import annotations

import pytest

from seamark.connector.analysis.scans import find_scans
from tests.connector.analysis.test_joins import shown_pairs

TABLES = {
    "f": {"id": "long", "k": "int", "at": "timestamp", "tz": "timestamptz", "day": "date", "x": "double"},
    "d": {
        "name": "string",
        "low": "long",
        "start": "timestamp",
        "stop": "timestamp",
        "first": "date",
        "z": "timestamptz",
    },
}


def limits(statement: str, table: str = "f") -> list[str]:
    """Return the joins of the first scan of a table."""
    scans = find_scans(statement, columns_of=lambda names: TABLES.get(names[2]))
    scan = next(scan for scan in scans if scan.table == table)
    return sorted(" and ".join(shown_pairs(join, scans[join.scan].table)) for join in scan.joins)


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
        # The optional side only.
        ("RIGHT JOIN d ON at BETWEEN start AND stop", ["at>=d.start and at<=d.stop"]),
        ("LEFT JOIN d ON at BETWEEN start AND stop", []),
        ("FULL JOIN d ON at BETWEEN start AND stop", []),
        ("LEFT JOIN d ON d.low = id WHERE at < stop", ["at<d.stop", "id=d.low"]),
        # The sides are converted before they are compared, or a row needs no partner.
        (", d WHERE tz BETWEEN start AND stop", []),
        (", d WHERE x < low", []),
        (", d WHERE id BETWEEN low AND 1e0", []),
        (", d WHERE at BETWEEN start AND z", []),
        (", d WHERE at NOT BETWEEN start AND stop", []),
        (", d WHERE NOT (at < stop)", []),
        (", d WHERE at < stop OR id = 1", []),
        (", d WHERE at < stop + INTERVAL '1' DAY", []),
        (", d WHERE at IS DISTINCT FROM stop", []),
        ("WHERE EXISTS (SELECT 1 FROM d WHERE at < stop)", []),
    ],
)
def test_columns_are_limited_by_columns_of_other_tables(join: str, expected: list[str]) -> None:
    assert limits(f"SELECT * FROM f {join}") == expected


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
        # Fewer rows than those of the condition: one limit.
        ("day >= (SELECT max(first) FROM d WHERE lower(name) = 'x')", []),
        (
            "day <= (SELECT max(first) FROM d WHERE name LIKE '%x%' AND low = 1)",
            ["day<=d.first", """day<=max(d.first, "low" = 1) of fewer rows"""],
        ),
        ("day >= (SELECT max(first) FROM d WHERE low = f.id)", []),
        ("day >= (SELECT max(first) FILTER (WHERE low = 1) FROM d)", []),
        ("day >= (SELECT max(first) FROM d WHERE start > current_timestamp)", []),
        ("day >= (SELECT max(first) FROM d WHERE z > TIMESTAMP '2026-01-01')", []),
        # The extremes of one query may be of several rows.
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
    assert limits(f"SELECT * FROM f WHERE {condition}") == expected
