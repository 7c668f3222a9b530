"""The limits on a column that is compared with the extreme of a query's rows.

The extreme is the minimum or maximum of rows of a stored table that meet a condition. If the condition selects exactly
these rows, the comparison gives two limits. If the condition may select more rows, it gives one limit: the maximum of
the real rows is not greater than the maximum of more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from seamark.connector.analysis.algebra.blocks import QueryBlock
from seamark.connector.analysis.algebra.equivalences import has_order
from seamark.connector.analysis.algebra.relations import Relation, Table
from seamark.connector.plans.conditions import (
    ColumnReference,
    Condition,
    SemiJoin,
    all_of,
    comparisons_of,
    move,
    weaken,
)
from seamark.formats.protocol.wire import MAXIMUM


class _StoredRows(NamedTuple):
    """Rows of a table that meet a condition.

    Attributes:
        where: The condition.
        exact: Whether the query uses all rows that meet the condition, and no others.
    """

    where: Condition | None
    exact: bool


def has_outer_limit(kind: str, op: str) -> bool:
    """Return whether a comparison with the extreme gives a limit even if the extreme is computed from too many rows."""
    return op in (("=", "<", "<=") if kind == MAXIMUM else ("=", ">", ">="))


def is_beyond_extreme(op: str, query: Relation, column: str) -> bool:
    """Return whether `op` compares a column with an output that is an extreme, and the column is beyond the extreme.

    A column is beyond the extreme if it is, for example, greater than a maximum. All values of the query's rows
    then give a weaker limit than the extreme.
    """
    extreme = query.extremes.get(column) if isinstance(query, QueryBlock) else None
    return extreme is not None and not has_outer_limit(extreme.kind, op)


def extreme_values(
    reference: ColumnReference, kind: str | None, op: str, query: Relation, column: str
) -> Iterator[SemiJoin]:
    """Yield the semi-join of a column that is compared with the extreme of rows of a table.

    Args:
        reference: The column.
        kind: The type of the column.
        op: The operator: `=`, `<`, `<=`, `>` or `>=`.
        query: The query that computes the extreme. It has a single row.
        column: The output of the query that is the extreme.
    """
    extreme = query.extremes.get(column) if isinstance(query, QueryBlock) else None
    if extreme is None or not isinstance(query, QueryBlock) or not has_order(kind, query.kind_of(extreme.column)):
        return
    source, name = extreme.column
    origin = query.sources[source].origin([name])
    rows = _stored_rows(query) if query.keys is None and query.having is None and origin is not None else None
    if rows is None or origin is None:
        return
    exact = rows.exact and not extreme.is_filtered
    if exact or has_outer_limit(extreme.kind, op):
        table, (stored,) = origin
        yield SemiJoin(((reference, stored),), table, rows.where, extreme.kind, (op,), exact)


def _stored_rows(block: QueryBlock) -> _StoredRows | None:
    """Return the rows of a table that are the joined rows of a block.

    The result is None if other rows may be among the joined rows.
    """
    if block.tree != 0:
        return None
    source = block.sources[0]
    if isinstance(source, Table):
        below: _StoredRows | None = _StoredRows(None, exact=True)
    elif isinstance(source, QueryBlock) and source.keys is None and source.having is None and not source.extremes:
        below = _stored_rows(source)
        # A function in SELECT may return no row for a row of the source, as DuckDB's `unnest` does.
        below = below if below is None or source.needs_rows else below._replace(exact=False)
    else:
        below = None
    if below is None or block.where is None:
        return below
    exact = block.where.exact() if below.exact else None
    stored = _move_to_table(exact, source)
    if exact is not None and stored is not None and stored.size == exact.size:
        return _StoredRows(all_of([below.where, stored]), exact=True)
    # A null that replaces a value, as in grouping sets, is not in the table.
    certain_condition = weaken(block.where.condition, lambda atom: atom if atom.rejects_null else None)
    weaker = _move_to_table(comparisons_of(certain_condition), source)
    return _StoredRows(all_of([below.where, weaker]), exact=False)


def _move_to_table(condition: Condition | None, source: Relation) -> Condition | None:
    def find_stored(reference: ColumnReference) -> ColumnReference | None:
        origin = source.origin([reference[1]])
        return None if origin is None else (0, origin[1][0])

    return move(condition, find_stored)
