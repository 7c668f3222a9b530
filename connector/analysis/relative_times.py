"""Computes spans of dates that contain the values of expressions of the current time.

The engine evaluates an expression such as `current_date - INTERVAL '7' DAY` later, by its own clock and in the
session's zone. Therefore the analysis works with a span. The span of the current time begins two days before the date
in UTC at which the statement is analysed, and ends three days after it. Two days are enough for any zone (at most 14
hours from UTC) and for clocks that differ by less than a day. Each operation moves both ends of the span.

Two operations make the span wider, because their results in two zones may differ by more than a day: the start of a
period, and adding months. For example, an instant on 31 January in UTC may be on 1 February in a zone further east, so
its month starts a whole month later. Adding a month turns several days at the end of a month into the same day.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from sqlglot import exp

from seamark.connector.analysis.literals import UNITS, add_months, parse_interval, parse_unit
from seamark.connector.analysis.truncations import truncate
from seamark.connector.plans.literals import Literal

_CURRENT = re.compile(r"\b(?:current_date|current_timestamp|localtimestamp|now|today)\b", re.IGNORECASE)
_BEFORE_TODAY, _AFTER_TODAY = timedelta(days=2), timedelta(days=3)
"""The distances of the ends of the span of the current time from the date in UTC at which the statement is analysed."""
_ZONE_DIFFERENCE_MAX = timedelta(days=2)
"""An upper bound of the difference between the local times of two zones."""
_TIMES = frozenset({exp.DataType.Type.DATE, exp.DataType.Type.TIMESTAMP, exp.DataType.Type.TIMESTAMPTZ})


@dataclass(frozen=True)
class DateSpan:
    """A span that contains a date or time: from midnight of `low` to midnight of `high`, in UTC.

    The date or time is the current time, possibly moved by an interval, in the unknown zone of the session.
    """

    low: date
    high: date

    def choose_literal(self, op: str) -> Literal:
        """Return the end of the span with which a comparison by `op` is true if it is true for any value of the span.

        For `c > value`, this is the lower end: if `c` is greater than any value of the span, it is greater than the
        lower end. The literal has no zone, because the span is wide enough for all zones.

        Args:
            op: One of <, <=, >, >=.
        """
        return Literal("date", (self.low if op in (">", ">=") else self.high).isoformat())

    def move(self, unit: str, count: int) -> DateSpan:
        """Move both ends of the span by a number of units.

        Adding months can make the results in two time zones differ by more than a day, so the span becomes wider. Other
        units have a fixed length, and the ends are rounded outwards to whole days.

        Raises:
            OverflowError: An end is outside the range of dates.
            ValueError: An end is outside the range of dates.
        """
        if unit not in UNITS:
            low, high = (add_months(bound, unit, count) for bound in (self.low, self.high))
            return DateSpan(low - _ZONE_DIFFERENCE_MAX, high + _ZONE_DIFFERENCE_MAX)
        shift, day = count * UNITS[unit], timedelta(days=1)
        # `//` rounds down, so the lower end is rounded down and, with two signs changed, the upper end is rounded up.
        return DateSpan(self.low + shift // day * day, self.high - (-shift // day) * day)


def parse_span(node: exp.Expr | None, today: date | None) -> DateSpan | None:
    """Return the range of dates that an expression such as `current_date - INTERVAL '7' DAY` can have.

    Return None for expressions that do not depend on the current time.

    Args:
        node: The expression, or None if there is none.
        today: The date in UTC. With None, no expression of the current time is read, and the result is None.
    """
    if today is None or node is None or sum(1 for _ in node.find_all(exp.AtTimeZone)) > 1:
        return None  # Repeated conversions between zones may move the value further.
    try:
        return _parse_operand(node, today)
    except (OverflowError, ValueError, KeyError):
        return None


def _parse_operand(node: exp.Expr | None, today: date) -> DateSpan | None:
    """Return the range of dates that an expression such as `CURRENT_DATE` can have, or None for another expression.

    For the start of a period, such as `date_trunc('month', now())`, the lower end of the range is moved to the start of
    its period, and further because the period may begin earlier in another zone. The upper end stays unchanged.
    """
    match node:
        case exp.Paren() | exp.AtTimeZone():
            return _parse_operand(node.this, today)
        case exp.Date() if not node.expressions:
            return _parse_operand(node.this, today)
        case exp.Cast() if type(node) is exp.Cast and node.to.this in _TIMES:
            return _parse_operand(node.this, today)
        case exp.CurrentDate() | exp.CurrentTimestamp() | exp.Localtimestamp():
            return DateSpan(today - _BEFORE_TODAY, today + _AFTER_TODAY)
        case exp.TimestampTrunc() | exp.DateTrunc():
            inner = _parse_operand(node.this, today)
            return (
                None
                if inner is None
                else DateSpan(truncate(inner.low, parse_unit(node)) - _ZONE_DIFFERENCE_MAX, inner.high)
            )
        case exp.Add() | exp.Sub():
            inner, interval = _parse_operand(node.this, today), parse_interval(node.expression)
            if inner is None or interval is None:
                return None
            return inner.move(interval[0], -interval[1] if isinstance(node, exp.Sub) else interval[1])
        case exp.DateAdd():
            inner, interval = (
                _parse_operand(node.this, today),
                parse_interval(exp.Interval(this=node.expression, unit=node.args.get("unit"))),
            )
            return None if inner is None or interval is None else inner.move(*interval)
    return None


def find_today(*texts: str) -> date | None:
    """Return the date in UTC if one of the texts may contain the current time. Otherwise return None."""
    return datetime.now(UTC).date() if any(_CURRENT.search(text) for text in texts) else None
