"""Expressions of the current time, as the span of dates in which their values are.

The engine evaluates `current_date - INTERVAL '7' DAY` later, by its own clock and in the session's zone. Therefore the
analysis takes a span: the current time is between two days before and three days after the date in UTC at which the
statement was analysed. Two days are enough for any zone (at most 14 hours from UTC) and for clocks that differ by less
than a day. Each operation moves both ends.

The start of a period, and a date some months away, may be far from the same in another zone: the month of an instant
starts on 31 January in UTC if it starts on 1 February east of it, and days at the end of a month become one day. So
these operations make the span wider.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from sqlglot import exp

from seamark.connector.analysis.literals import UNITS, add_months, interval_of, unit_of
from seamark.connector.analysis.truncations import truncate
from seamark.connector.plans.literals import Literal

_CURRENT = re.compile(r"\b(?:current_date|current_timestamp|localtimestamp|now|today)\b", re.IGNORECASE)
_BEFORE, _AFTER = timedelta(days=2), timedelta(days=3)
_ZONES = timedelta(days=2)
"""More than the times of two zones differ."""
_TIMES = frozenset({exp.DataType.Type.DATE, exp.DataType.Type.TIMESTAMP, exp.DataType.Type.TIMESTAMPTZ})


@dataclass(frozen=True)
class DateSpan:
    """The value is not before `low` at midnight and not after `high` at midnight, in UTC."""

    low: date
    high: date

    def literal(self, op: str) -> Literal:
        """Return what a column is compared with by `op`, one of <, <=, >, >=, so that the comparison is true for
        each value of the span.

        It has no zone, because the span covers all zones.
        """
        return Literal("date", (self.low if op in (">", ">=") else self.high).isoformat())

    def move(self, unit: str, count: int) -> DateSpan:
        """Move both ends of the span by a number of units.

        Raises:
            OverflowError: If an end is beyond the range of dates.
            ValueError: If an end is beyond the range of dates.
        """
        if unit not in UNITS:
            low, high = (add_months(bound, unit, count) for bound in (self.low, self.high))
            return DateSpan(low - _ZONES, high + _ZONES)
        moved, day = count * UNITS[unit], timedelta(days=1)
        return DateSpan(self.low + moved // day * day, self.high - (-moved // day) * day)


def parse_span(node: exp.Expr | None, today: date | None) -> DateSpan | None:
    """Return the span of an expression of the current time; None for another node.

    Args:
        today: The date in UTC.
    """
    if today is None or node is None or sum(1 for _ in node.find_all(exp.AtTimeZone)) > 1:
        return None  # each conversion to a zone and back may move the value
    try:
        return _parse_operand(node, today)
    except (OverflowError, ValueError, KeyError):
        return None


def _parse_operand(node: exp.Expr | None, today: date) -> DateSpan | None:
    match node:
        case exp.Paren() | exp.AtTimeZone():
            return _parse_operand(node.this, today)
        case exp.Date() if not node.expressions:
            return _parse_operand(node.this, today)
        case exp.Cast() if type(node) is exp.Cast and node.to.this in _TIMES:
            return _parse_operand(node.this, today)
        case exp.CurrentDate() | exp.CurrentTimestamp() | exp.Localtimestamp():
            return DateSpan(today - _BEFORE, today + _AFTER)
        case exp.TimestampTrunc() | exp.DateTrunc():
            inner = _parse_operand(node.this, today)
            return None if inner is None else DateSpan(truncate(inner.low, unit_of(node)) - _ZONES, inner.high)
        case exp.Add() | exp.Sub():
            inner, moved = _parse_operand(node.this, today), interval_of(node.expression)
            if inner is None or moved is None:
                return None
            return inner.move(moved[0], -moved[1] if isinstance(node, exp.Sub) else moved[1])
        case exp.DateAdd():
            inner, moved = (
                _parse_operand(node.this, today),
                interval_of(exp.Interval(this=node.expression, unit=node.args.get("unit"))),
            )
            return None if inner is None or moved is None else inner.move(*moved)
    return None


def today_for(*texts: str) -> date | None:
    """Return the date in UTC, if one of the texts may contain the current time."""
    return datetime.now(UTC).date() if any(_CURRENT.search(text) for text in texts) else None
