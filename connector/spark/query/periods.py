"""Reads the day, month or year of a column in the conditions of joins."""

from __future__ import annotations

from typing import NamedTuple

from seamark.connector.plans.conditions import DAY, MONTH, YEAR
from seamark.connector.plans.zones import is_utc
from seamark.connector.spark.query.catalyst import Catalyst, Node

_UNITS = {**dict.fromkeys(("month", "mon", "mm"), MONTH), **dict.fromkeys(("year", "yyyy", "yy"), YEAR)}
_INTEGER_TYPES = ("int", "bigint")


class TermPeriod(NamedTuple):
    """The first day of the period that contains an attribute's value, or the number of the year."""

    column: Node
    transform: str
    """The Iceberg transform of the period."""
    partners: tuple[str, ...]
    """The Spark types of the columns with which the period may be compared."""


def find_period(catalyst: Catalyst, node: Node) -> TermPeriod | None:
    """Return the period that an expression represents, or None if it does not represent a period.

    Supported are `year(c)`, also as a bigint, `trunc(c, unit)` of a date, and a cast of a time to its day.

    The period of an instant is a period in UTC.
    """
    kind = catalyst.find_kind(node)
    if kind == "Cast" and catalyst.read_type(node) == "bigint" and catalyst.find_kind(node.child()) == "Year":
        node, kind = node.child(), "Year"
    match kind:
        case "Year":
            inner = node.child()
            column = inner if catalyst.find_kind(inner) == "AttributeReference" else _find_day_source(catalyst, inner)
            is_time_column = column is not None and catalyst.read_type(column) in ("date", "timestamp", "timestamp_ntz")
            return TermPeriod(column, YEAR, _INTEGER_TYPES) if is_time_column else None
        case "TruncDate":
            column, unit = node.date(), node.format()
            text = str(unit.value()).lower() if catalyst.find_kind(unit) == "Literal" else ""
            is_date = catalyst.find_kind(column) == "AttributeReference" and catalyst.read_type(column) == "date"
            return TermPeriod(column, _UNITS[text], ("date",)) if is_date and text in _UNITS else None
        case "Cast":
            column = _find_day_source(catalyst, node)
            return None if column is None else TermPeriod(column, DAY, ("date",))
    return None


def _find_day_source(catalyst: Catalyst, node: Node) -> Node | None:
    """Return the attribute with a timestamp if the node is a cast of this attribute to its day. Otherwise return None.

    The day of a timestamp with a time zone must be a day in UTC.
    """
    if catalyst.find_kind(node) != "Cast" or catalyst.read_type(node) != "date":
        return None
    column, zone = node.child(), node.timeZoneId()
    if catalyst.find_kind(column) != "AttributeReference":
        return None
    match catalyst.read_type(column):
        case "timestamp_ntz":
            return column
        case "timestamp":
            return column if zone.isDefined() and is_utc(zone.get()) else None
    return None
