"""Finds the columns by which a query groups each of its tables, and the aggregates of its columns.

The server records both in the query history, by the ids of the columns. A name without a qualifier may belong to any
table of its SELECT, so each of them gets the name. The server drops names that the table does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sqlglot import exp

from seamark.connector.plans.scan import NO_AGGREGATION, Aggregation

_FUNCTIONS = {exp.Count: "count", exp.Sum: "sum", exp.Min: "min", exp.Max: "max", exp.Avg: "avg"}
_OTHER = "other"
_COLUMNS_MAX, _AGGREGATES_MAX = 32, 32
_NAME_CHARACTERS_MAX = 500
"""The server refuses a request with a longer name of a column."""


def find_aggregations(tree: exp.Expr) -> Mapping[int, Aggregation]:
    """Return the aggregation of each table reference, by the `id` of its node. Tables without one are left out."""
    aggregations = {}
    for select in tree.find_all(exp.Select):
        group = select.args.get("group")
        grouping = list(_list_columns(group)) if isinstance(group, exp.Group) else []
        aggregates = list(_list_aggregates(select))
        tables = list(_list_tables(select)) if grouping or aggregates else []
        for table in tables:
            name = table.alias_or_name.lower()
            aggregation = _select_for_table(name, grouping, aggregates)
            if aggregation != NO_AGGREGATION:
                aggregations[id(table)] = aggregation
    return aggregations


def _list_tables(select: exp.Select) -> Iterator[exp.Table]:
    """Yield the tables of FROM and of the joins of one SELECT, without the tables of its subqueries."""
    source = select.args.get("from") or select.args.get("from_")
    for part in (source, *(select.args.get("joins") or ())):
        if part is not None and isinstance(part.this, exp.Table):
            yield part.this


def _list_columns(group: exp.Group) -> Iterator[exp.Column]:
    """Yield the columns of GROUP BY, also those inside of functions, ROLLUP and GROUPING SETS."""
    yield from group.find_all(exp.Column)


def _list_aggregates(select: exp.Select) -> Iterator[tuple[str, exp.Column | None]]:
    """Yield the aggregates of one SELECT: the function, and its column if the argument is a column."""
    for part in (*select.expressions, select.args.get("having")):
        if part is None:
            continue
        for call in part.find_all(exp.AggFunc):
            if call.find_ancestor(exp.Select) is select:
                argument = next(iter(call.this.expressions), None) if isinstance(call.this, exp.Distinct) else call.this
                column = argument if isinstance(argument, exp.Column) else None
                yield _FUNCTIONS.get(type(call), _OTHER), column


def _select_for_table(
    name: str, grouping: list[exp.Column], aggregates: list[tuple[str, exp.Column | None]]
) -> Aggregation:
    """Return the part of an aggregation that may belong to a table."""

    def is_own(column: exp.Column) -> bool:
        return column.table.lower() in ("", name) and len(column.name) <= _NAME_CHARACTERS_MAX

    columns = dict.fromkeys(column.name for column in grouping if is_own(column))
    functions: dict[tuple[str, str], None] = {}
    for function, column in aggregates:
        if column is None or is_own(column):
            functions[function, "" if column is None else column.name] = None
    return Aggregation(tuple(sorted(columns)[:_COLUMNS_MAX]), tuple(functions)[:_AGGREGATES_MAX])
