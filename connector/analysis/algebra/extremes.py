"""Derives limits on a column that is compared with the minimum or maximum (the extreme) of a query's rows.

The rows are rows of a stored table that meet a condition. If the condition selects exactly these rows, an equality
gives a lower and an upper limit. If the condition may also select other rows, it gives one limit: the maximum of the
rows is not greater than the maximum of all selected rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from seamark.connector.analysis.algebra.relations import Relation
from seamark.connector.plans.conditions import ColumnReference, SemiJoin
from seamark.formats.protocol.wire import MAXIMUM

_INTEGER_TYPES = frozenset(("int", "long"))
_LOCAL_TIMES = frozenset(("date", "timestamp"))
_ORDERED = _INTEGER_TYPES | _LOCAL_TIMES | {"timestamptz"}


def has_order(first: str | None, second: str | None) -> bool:
    """Return whether engines and the server order values of the two types by their exact values."""
    return (
        first in _ORDERED
        and second in _ORDERED
        and (first == second or {first, second} in (_INTEGER_TYPES, _LOCAL_TIMES))
    )


def has_outer_limit(kind: str, op: str) -> bool:
    """Return whether a comparison with an extreme gives a limit even if the extreme includes further rows.

    With more rows, a maximum can only become larger, so `<` the maximum stays true for all needed rows.
    """
    return op in (("=", "<", "<=") if kind == MAXIMUM else ("=", ">", ">="))


def is_beyond_extreme(op: str, relation: Relation, column: str) -> bool:
    """Return whether `op` requires values greater than a maximum, or less than a minimum.

    The extreme is then a stricter limit than the values of all rows.
    """
    extreme = relation.find_extreme(column)
    return extreme is not None and not has_outer_limit(extreme.kind, op)


def iter_extreme_semi_joins(
    reference: ColumnReference, kind: str | None, op: str, relation: Relation, column: str
) -> Iterator[SemiJoin]:
    """Yield the semi-join of a column that is compared with the extreme of rows of a table.

    Nothing is yielded if the rows are unknown, or if the extreme of more rows would not give a correct limit.

    Args:
        reference: The column.
        kind: The type of the column.
        op: The operator: `=`, `<`, `<=`, `>` or `>=`.
        relation: The relation with the extreme.
        column: The column of `relation` that is the extreme.
    """
    extreme = relation.find_extreme(column)
    rows = None if extreme is None else extreme.rows
    if extreme is None or rows is None or not has_order(kind, extreme.type):
        return
    if rows.exact or has_outer_limit(extreme.kind, op):
        pairs = ((reference, extreme.column),)
        yield SemiJoin(pairs, extreme.table, rows.where, extreme.kind, (op,), rows.exact)
