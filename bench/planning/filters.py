"""The filters that planning is timed with, as REST expressions: what engines send for ordinary queries.

Each says how the column lies over the files, since that decides what a planner can leave out before it looks. Literals
are ISO texts where the type asks for one; every planner measured here reads them.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from bench.planning.columns import SPAN, event_time_us
from bench.planning.layout import day_text
from bench.planning.tables import Table

RANGES = ("narrow range", "wide range", "decimal range", "float range")
"""Names of the filters that are one range of one column which lies at random over the files."""


@dataclass(frozen=True)
class Filter:
    name: str
    about: str
    expression: Any


def comparison(op: str, column: str, value: Any) -> dict[str, Any]:
    return {"type": op, "term": column, "value": value}


def between(column: str, low: Any, high: Any) -> dict[str, Any]:
    """low ≤ column < high."""
    return {"type": "and", "left": comparison("gt-eq", column, low), "right": comparison("lt", column, high)}


def filters(table: Table) -> dict[str, Filter]:
    """By name, with literals that fit the table's size."""
    middle = table.files // 2
    hour = 3_600_000_000
    at = event_time_us(middle, table.files_per_day)
    found = [
        Filter(
            "narrow range",
            "order_id between two near values; any order, narrow bounds: about 0.5 % of the files",
            between("order_id", SPAN // 2, SPAN // 2 + SPAN // 100_000),
        ),
        Filter(
            "wide range",
            "price below a value; any order: about 30 % of the files",
            comparison("lt", "price", SPAN / 1000 * 0.3),
        ),
        Filter(
            "decimal range",
            "amount between two near values; any order: about 1 % of the files",
            between("amount", f"{SPAN // 200}.00", f"{SPAN // 200 + 100}.00"),
        ),
        Filter(
            "float range",
            "discount above a value; any order: about 2 % of the files",
            comparison("gt", "discount", SPAN / 1000 * 1.08),
        ),
        Filter(
            "ordered column",
            "one hour of ts, which grows with the files",
            between("ts", timestamp_text(at), timestamp_text(at + hour)),
        ),
        Filter(
            "clustered column",
            "event_id between two near values; roughly grows with the files",
            between("event_id", SPAN // 2, SPAN // 2 + 1000),
        ),
        Filter("string equality", "email equal to a text; any order", comparison("eq", "email", "bqxmaeabcd@m.io")),
        Filter(
            "partition value",
            "one day, an identity partition",
            comparison("eq", "day", day_text(_day_of(table, middle))),
        ),
        Filter("bucketed key", "user_id equal to a value: one bucket of 16", comparison("eq", "user_id", SPAN // 3)),
        Filter(
            "three columns",
            "ranges of user_id, session_id and order_id together",
            {
                "type": "and",
                "left": comparison("gt", "user_id", SPAN // 2),
                "right": {
                    "type": "and",
                    "left": between("session_id", SPAN // 4, SPAN // 4 + 1000),
                    "right": between("order_id", SPAN // 3, SPAN // 3 + SPAN // 100),
                },
            },
        ),
    ]
    return {one.name: one for one in found}


def timestamp_text(at_us: int) -> str:
    """A timestamptz in UTC as Iceberg's JSON spells it. `at_us` is in µs since the epoch."""
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=at_us)
    return moment.isoformat(timespec="microseconds") + "+00:00"


def _day_of(table: Table, number: int) -> int:
    return event_time_us(number, table.files_per_day) // 86_400_000_000
