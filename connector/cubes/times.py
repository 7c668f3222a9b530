"""Finds the places of a query where a truncated time has the same effect as the time itself.

If a cube has the dimension `day(ts)`, then `date_trunc('month', ts)`, `year(ts)`, `CAST(ts AS date)` and
`ts >= DATE '2026-01-01'` follow from the day. In these places, the column is replaced by a hidden column, which is the
dimension. In all other places, the column stays, and the translation over the cube fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlglot import exp

from seamark.formats.index.keys.group_conditions import TIME_UNITS

_UNITS_OF_PARTS: dict[type[exp.Expr], str] = {
    exp.Year: "year",
    exp.Quarter: "month",
    exp.Month: "month",
    exp.WeekOfYear: "day",
    exp.Day: "day",
    exp.DayOfMonth: "day",
    exp.DayOfWeekIso: "day",
    exp.DayOfYear: "day",
    exp.Hour: "hour",
}
"""The coarsest truncation from which each part of a time follows."""
_UNITS = {
    "YEAR": "year",
    "QUARTER": "month",
    "MONTH": "month",
    "WEEK": "day",
    "DAY": "day",
    "DAY_OF_MONTH": "day",
    "DAY_OF_WEEK": "day",
    "DAY_OF_YEAR": "day",
    "HOUR": "hour",
}
"""The coarsest truncation from which a truncation to each unit, or the extraction of this unit, follows."""


@dataclass(frozen=True)
class TimeDimension:
    """A time dimension of a cube.

    Attributes:
        path: The name of the column in lower case. For a field of a struct, the names from the column to the field.
        unit: The unit to which the time is truncated.
        is_zoned: Whether the column has a time zone.
    """

    path: tuple[str, ...]
    unit: str
    is_zoned: bool = False

    @property
    def hidden_path(self) -> tuple[str, ...]:
        """The names that replace the path in the scope of the query. No statement can contain the last of them."""
        return (*self.path[:-1], f"\0{self.unit}\0{'.'.join(self.path)}")

    def can_truncate_to(self, unit: str) -> bool:
        """Return whether the time truncated to `unit` can be computed from the values of the dimension."""
        return TIME_UNITS.index(unit) <= TIME_UNITS.index(self.unit)


def replace_times(tree: exp.Expr, dimensions: Sequence[TimeDimension]) -> exp.Expr:
    """Return a copy of the query in which time dimensions replace columns where they have the same effect.

    A truncation follows from a dimension of the same or a finer unit. A comparison follows from it if the boundary is
    the start of a period. Comparisons of times with a zone are not replaced, because the session's zone is unknown. A
    longer path is tried first, because a field of a struct is more specific than a column.
    """
    if not dimensions:
        return tree.copy()
    aliases = {item.alias.lower() for item in tree.expressions if isinstance(item, exp.Alias)}
    new_tree = tree.copy()
    for node in list(new_tree.walk()):
        time = _find_time(node)
        if time is None:
            continue
        column, unit, boundary = time
        if column.name.lower() in aliases and column.find_ancestor(exp.Order) is not None:
            continue  # In ORDER BY, the name is the name of an output.
        for dimension in sorted(dimensions, key=lambda dimension: -len(dimension.path)):
            if tuple(part.name.lower() for part in column.parts[-len(dimension.path) :]) != dimension.path:
                continue
            if boundary is None:
                fits = dimension.can_truncate_to(unit)
            else:
                fits = not dimension.is_zoned and _is_boundary(boundary, dimension.unit)
            if fits:
                column.set("this", exp.to_identifier(dimension.hidden_path[-1], quoted=True))
                break
    return new_tree


def _find_time(node: exp.Expr) -> tuple[exp.Column, str, datetime | None] | None:
    """Return (column, unit, boundary) if the node may use a truncated time, otherwise None.

    The unit is the coarsest truncation that is sufficient. For a comparison, the boundary is the other side. Only
    `time >= boundary` and `time < boundary`, in either order, have the same result for truncated times.
    """
    match node:
        case exp.TimestampTrunc() | exp.DateTrunc():
            unit = _UNITS.get(node.text("unit").upper())
            return _read_column(node.this, unit)
        case exp.Extract():
            return _read_column(node.expression, _UNITS.get(node.name.upper()))
        case exp.Cast() if node.args["to"].is_type(exp.DataType.Type.DATE):
            return _read_column(node.this, "day")
        case exp.GTE() | exp.LT():
            return _read_comparison(node.this, node.expression)
        case exp.LTE() | exp.GT():
            return _read_comparison(node.expression, node.this)
    unit = _UNITS_OF_PARTS.get(type(node))
    return None if unit is None else _read_column(node.this, unit)


def _read_column(node: exp.Expr, unit: str | None) -> tuple[exp.Column, str, None] | None:
    """Return (column, unit, None), or None if the unit is unknown or the node is no column.

    The result has the form of the results of `_find_time`. Their last item is a boundary, which only comparisons have.
    """
    if isinstance(node, exp.TsOrDsToDate) and set(node.args) <= {"this"}:  # Spark's year(ts) is year(CAST(ts AS date)).
        node = node.this
    if unit is None or not isinstance(node, exp.Column) or not isinstance(node.this, exp.Identifier):
        return None
    return node, unit, None


def _read_comparison(node: exp.Expr, literal: exp.Expr) -> tuple[exp.Column, str, datetime] | None:
    """Return (column, "", boundary) for the comparison of a column with a time, or None for other operands.

    The time must be a text with a cast to DATE, or to TIMESTAMP without a time zone. The unit is empty, because the
    caller determines the needed unit from the boundary.
    """
    if not isinstance(node, exp.Column) or not isinstance(node.this, exp.Identifier):
        return None
    if type(literal) is not exp.Cast or not isinstance(literal.this, exp.Literal):
        return None
    types = (exp.DataType.Type.DATE, exp.DataType.Type.TIMESTAMP, exp.DataType.Type.TIMESTAMPNTZ)
    if not literal.args["to"].is_type(*types) or not literal.this.is_string:
        return None
    try:
        moment = datetime.fromisoformat(str(literal.this.this).strip())
    except ValueError:
        return None
    return (node, "", moment) if moment.tzinfo is None else None


def _is_boundary(moment: datetime, unit: str) -> bool:
    """Return whether a period of this unit begins at the moment."""
    parts = (moment.month - 1, moment.day - 1, moment.hour, moment.minute, moment.second, moment.microsecond)
    return not any(parts[TIME_UNITS.index(unit) :])
