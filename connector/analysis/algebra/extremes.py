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


def have_same_exact_order(first: str | None, second: str | None) -> bool:
    """Return whether engines and the server order values of the two types in the same way, by their exact values."""
    return (
        first in _ORDERED
        and second in _ORDERED
        and (first == second or {first, second} in (_INTEGER_TYPES, _LOCAL_TIMES))
    )


def stays_true_with_more_rows(kind: str, op: str) -> bool:
    """Return whether a comparison with an extreme stays true if the extreme is computed from more rows.

    For example, if `c <= max(v)` is true for some rows, it is also true for more rows, whose maximum is not smaller.
    The same applies to `c >= min(v)`, and to the part of `c = max(v)` that is `c <= max(v)`.

    Args:
        kind: `MINIMUM` or `MAXIMUM`.
        op: The operator of the comparison, with the column on the left.
    """
    return op in (("=", "<", "<=") if kind == MAXIMUM else ("=", ">", ">="))


def is_beyond_extreme(op: str, relation: Relation, column: str) -> bool:
    """Return whether `op` requires values greater than a maximum, or less than a minimum.

    For example, `c > max(v)` requires a `c` above all values of `v`. The server then compares with the extreme. A
    comparison with the values of all rows would only require a `c` above the smallest of them.

    Args:
        op: The operator of the comparison.
        relation: The relation with the column.
        column: The column of `relation`, which may be an extreme.
    """
    extreme = relation.find_extreme(column)
    return extreme is not None and not stays_true_with_more_rows(extreme.kind, op)


def iter_extreme_semi_joins(
    reference: ColumnReference, kind: str | None, op: str, relation: Relation, column: str
) -> Iterator[SemiJoin]:
    """Yield the semi-join of a column that is compared with a minimum or maximum (the extreme) of rows of a table.

    For example, `WHERE c = (SELECT max(v) FROM t WHERE k = 1)` becomes a comparison of `c` with the maximum of `v` in
    the rows of `t` that meet `k = 1`. If the condition on `t` may select more rows than the query does, the semi-join
    is yielded only if the comparison stays true with more rows (`stays_true_with_more_rows`).

    Args:
        reference: The column that is compared.
        kind: The type of the column.
        op: The operator: `=`, `<`, `<=`, `>` or `>=`.
        relation: The relation with the extreme.
        column: The column of `relation` that is the extreme.
    """
    extreme = relation.find_extreme(column)
    rows = None if extreme is None else extreme.rows
    if extreme is None or rows is None or not have_same_exact_order(kind, extreme.type):
        return
    if rows.exact or stays_true_with_more_rows(extreme.kind, op):
        pairs = ((reference, extreme.column),)
        yield SemiJoin(pairs, extreme.table, rows.where, extreme.kind, (op,), rows.exact)
