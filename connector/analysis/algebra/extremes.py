"""The limits on a column that is compared with the extreme of a query's rows.

The extreme is the minimum or maximum of rows of a stored table that meet a condition. If the condition selects exactly
these rows, the comparison gives two limits. If the condition may select more rows, it gives one limit: the maximum of
the real rows is not greater than the maximum of more rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from seamark.connector.analysis.algebra.relations import Relation
from seamark.connector.plans.conditions import ColumnReference, SemiJoin
from seamark.formats.protocol.wire import MAXIMUM

_WHOLE = frozenset(("int", "long"))
_LOCAL_TIMES = frozenset(("date", "timestamp"))
_ORDERED = _WHOLE | _LOCAL_TIMES | {"timestamptz"}


def has_order(first: str | None, second: str | None) -> bool:
    """Return whether values of the two types are ordered by their exact values, by engines and by the server."""
    return first in _ORDERED and second in _ORDERED and (first == second or {first, second} in (_WHOLE, _LOCAL_TIMES))


def has_outer_limit(kind: str, op: str) -> bool:
    """Return whether a comparison with the extreme gives a limit even if the extreme is computed from too many rows."""
    return op in (("=", "<", "<=") if kind == MAXIMUM else ("=", ">", ">="))


def is_beyond_extreme(op: str, relation: Relation, column: str) -> bool:
    """Return whether a column that `op` compares with an output is beyond an extreme.

    Then all values of the rows together say less than the extreme.
    """
    extreme = relation.find_extreme(column)
    return extreme is not None and not has_outer_limit(extreme.kind, op)


def iter_extreme_semi_joins(
    reference: ColumnReference, kind: str | None, op: str, relation: Relation, column: str
) -> Iterator[SemiJoin]:
    """Yield the semi-join of a column that is compared with the extreme of rows of a table.

    Args:
        reference: The column.
        kind: The type of the column.
        op: The operator: `=`, `<`, `<=`, `>` or `>=`.
        relation: The relation that has the extreme.
        column: Its column.
    """
    extreme = relation.find_extreme(column)
    rows = None if extreme is None else extreme.rows
    if extreme is None or rows is None or not has_order(kind, extreme.type):
        return
    if rows.exact or has_outer_limit(extreme.kind, op):
        pairs = ((reference, extreme.column),)
        yield SemiJoin(pairs, extreme.table, rows.where, extreme.kind, (op,), rows.exact)
