"""The filters with which planning is measured, as REST expressions of ordinary queries.

`about` states how the values of a column are distributed over the files, because this decides what a planner can leave
out before it reads statistics. Literals are ISO texts if the type requires it; every measured planner reads them. The
round number shifts the literals of a filter a little, so that a planner that caches its plans has to plan again.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.planning.columns import DAY_US, SPAN, START_DAY, compute_event_time_us
from bench.planning.layout import format_day
from bench.planning.tables import GeneratedTable

RANGES = ("narrow range", "wide range", "decimal range", "float range")
"""Filters with a range of a column whose values are spread over the files at random."""
ORDERED_COLUMN = "ordered column"
HOUR_US = 3_600_000_000


@dataclass(frozen=True)
class Filter:
    name: str
    description: str
    make: Callable[[GeneratedTable, int], Any]
    columns: tuple[tuple[str, str], ...] = ()
    """For RANGES: (column, "lower" or "upper"), the bounds with which the filter is compared."""

    def build_expression(self, table: GeneratedTable, round_number: int = 0) -> Any:
        """Return the filter as JSON.

        The literals depend a little on `round_number`, so that no cached plan can answer. For values of `round_number`
        up to some thousands, the filter keeps nearly the same files.
        """
        return self.make(table, round_number)


def build_comparison(op: str, column: str, value: Any) -> dict[str, Any]:
    return {"type": op, "term": column, "value": value}


def build_conjunction(left: Any, right: Any) -> dict[str, Any]:
    return {"type": "and", "left": left, "right": right}


def build_range_filter(column: str, low: Any, high: Any) -> dict[str, Any]:
    """Return the filter low ≤ column < high."""
    return build_conjunction(build_comparison("gt-eq", column, low), build_comparison("lt", column, high))


def format_timestamp(at_us: int) -> str:
    """Return a time in µs since the epoch as a timestamptz in UTC, in the format of Iceberg's JSON."""
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=at_us)
    return moment.isoformat(timespec="microseconds") + "+00:00"


def _compute_middle_us(table: GeneratedTable) -> int:
    return compute_event_time_us(table.files // 2, table.files_per_day)


def _build_hour_filter(table: GeneratedTable, round_number: int) -> Any:
    start = _compute_middle_us(table) + round_number * 1000
    return build_range_filter("ts", format_timestamp(start), format_timestamp(start + HOUR_US))


def _build_day_filter(table: GeneratedTable, round_number: int) -> Any:
    """Return a filter for one day.

    The filter also names a second day, later than every file, which depends on the round. It makes each filter
    different and matches no file.
    """
    days = [format_day(_compute_middle_us(table) // DAY_US), format_day(START_DAY + 100_000 + round_number)]
    return {"type": "in", "term": "day", "values": days}


def _build_three_conditions(table: GeneratedTable, round_number: int) -> Any:
    sessions = build_range_filter("session_id", SPAN // 4 + round_number, SPAN // 4 + 1000 + round_number)
    orders = build_range_filter("order_id", SPAN // 3, SPAN // 3 + SPAN // 100)
    return build_conjunction(build_comparison("gt", "user_id", SPAN // 2), build_conjunction(sessions, orders))


FILTERS = {
    item.name: item
    for item in (
        Filter(
            "narrow range",
            "order_id between two near values; files in any order, narrow bounds",
            lambda table, number: build_range_filter("order_id", SPAN // 2 + number, SPAN // 2 + 10_000 + number),
            (("order_id", "lower"), ("order_id", "upper")),
        ),
        Filter(
            "wide range",
            "price below a value; files in any order",
            lambda table, number: build_comparison("lt", "price", SPAN * 0.3 / 1000 + number / 1000),
            (("price", "lower"),),
        ),
        Filter(
            "decimal range",
            "amount, a decimal, between two near values; files in any order",
            lambda table, number: build_range_filter(
                "amount", f"{SPAN // 200 + number}.00", f"{SPAN // 200 + 100 + number}.00"
            ),
            (("amount", "lower"), ("amount", "upper")),
        ),
        Filter(
            "float range",
            "discount above a value; files in any order",
            lambda table, number: build_comparison("gt", "discount", SPAN * 1.08 / 1000 + number),
            (("discount", "upper"),),
        ),
        Filter(ORDERED_COLUMN, "one hour of ts, which grows with the files", _build_hour_filter),
        Filter(
            "clustered column",
            "event_id between two near values; roughly grows with the files",
            lambda table, number: build_range_filter("event_id", SPAN // 2 + number, SPAN // 2 + 1000 + number),
        ),
        Filter(
            "string equality",
            "email equal to a text; files in any order",
            lambda table, number: build_comparison("eq", "email", f"bqxmaeab{number}@m.io"),
        ),
        Filter("partition value", "one day, an identity partition", _build_day_filter),
        Filter(
            "bucketed key",
            "user_id equal to a value: one bucket of 16, then wide bounds",
            lambda table, number: build_comparison("eq", "user_id", SPAN // 3 + number),
        ),
        Filter("three columns", "ranges of user_id, session_id and order_id together", _build_three_conditions),
    )
}


def build_small_filter(table: GeneratedTable, round_number: int = 0) -> Any:
    """Return a filter for one user in six hours, as a dashboard sends it; it keeps a few files."""
    start = _compute_middle_us(table)
    hours = build_range_filter("ts", format_timestamp(start), format_timestamp(start + 6 * HOUR_US))
    return build_conjunction(build_comparison("eq", "user_id", SPAN // 3 + round_number), hours)
