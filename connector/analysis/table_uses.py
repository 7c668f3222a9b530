"""Finds how a query uses each of its tables: the columns that it reads, its grouping keys, and its aggregates.

The server records the uses in the query history, by the ids of the columns. A column name without a qualifier may
belong to any table of its SELECT, so it is reported for each of these tables. The server drops names that a table does
not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sqlglot import exp

from seamark.connector.plans.scan import NO_USE, TableUse

_FUNCTIONS = {exp.Count: "count", exp.Sum: "sum", exp.Min: "min", exp.Max: "max", exp.Avg: "avg"}
_OTHER = "other"
_GROUPING_MAX, _AGGREGATES_MAX = 32, 32
_COLUMNS_MAX = 64
"""The maximum number of read columns in a report. If more columns are read, the report has no columns."""
_NAME_CHARACTERS_MAX = 500
"""The maximum length of a column name. The server refuses a request with a longer name."""


def find_table_uses(tree: exp.Expr) -> Mapping[int, TableUse]:
    """Return the use of each table reference, by the `id` of its node. References without a known use are left out.

    A column without a qualifier may belong to any table of its SELECT, so its name is added to the columns of each of
    these tables. After `*`, the names of the read columns are unknown.
    """
    uses = {}
    for select in tree.find_all(exp.Select):
        tables = list(_list_tables(select))
        if not tables:
            continue
        group = select.args.get("group")
        grouping = list(group.find_all(exp.Column)) if isinstance(group, exp.Group) else []
        aggregates = list(_list_aggregates(select))
        columns = list(select.find_all(exp.Column))
        joined_names = [name for join in select.args.get("joins") or () for name in join.args.get("using") or ()]
        for table in tables:
            name = table.alias_or_name.lower()
            use = _select_for_table(name, grouping, aggregates)
            if not _has_star(select, name):
                read_names = {column.name for column in columns if _may_belong_to(column, name, select)}
                read_names |= {identifier.name for identifier in joined_names}
                use = TableUse(use.grouping, use.aggregates, _limit_columns(read_names))
            if use != NO_USE:
                uses[id(table)] = use
    return uses


def _list_tables(select: exp.Select) -> Iterator[exp.Table]:
    """Yield the tables of FROM and of the joins of one SELECT, without the tables of its subqueries."""
    # The name of the argument depends on the version of sqlglot.
    source = select.args.get("from") or select.args.get("from_")
    for part in (source, *(select.args.get("joins") or ())):
        if part is not None and isinstance(part.this, exp.Table):
            yield part.this


def _has_star(select: exp.Select, name: str) -> bool:
    """Return whether a SELECT has `*` or `name.*`, so that the columns of the table are not named."""
    for part in select.expressions:
        if isinstance(part, exp.Star):
            return True
        if isinstance(part, exp.Column) and isinstance(part.this, exp.Star) and part.table.lower() == name:
            return True
    return False


def _may_belong_to(column: exp.Column, name: str, select: exp.Select) -> bool:
    """Return whether a column of a SELECT or of its subqueries may be a column of the table with this name.

    For a column of a subquery, the result is True only if the column has this name as its qualifier.
    """
    if isinstance(column.this, exp.Star):
        return False
    return column.table.lower() == name or (not column.table and column.find_ancestor(exp.Select) is select)


def _limit_columns(names: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted names, without names that are too long, or no names if more than `_COLUMNS_MAX` remain."""
    columns = tuple(sorted(name for name in names if len(name) <= _NAME_CHARACTERS_MAX))
    return columns if len(columns) <= _COLUMNS_MAX else ()


def _list_aggregates(select: exp.Select) -> Iterator[tuple[str, exp.Column | None]]:
    """Yield the aggregates of one SELECT: the function, and its column, or None if the argument is not a column."""
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
) -> TableUse:
    """Return the grouping keys and the aggregates that may belong to a table.

    Very long names are left out, as are keys and aggregates above a maximum number.

    Args:
        name: The alias or the name of the table, in lower case.
        grouping: The columns in GROUP BY.
        aggregates: The functions, each with its column or None. A function without a column belongs to every table.
    """

    def is_own(column: exp.Column) -> bool:
        return column.table.lower() in ("", name) and len(column.name) <= _NAME_CHARACTERS_MAX

    columns = dict.fromkeys(column.name for column in grouping if is_own(column))
    functions: dict[tuple[str, str], None] = {}
    for function, column in aggregates:
        if column is None or is_own(column):
            functions[function, "" if column is None else column.name] = None
    return TableUse(tuple(sorted(columns)[:_GROUPING_MAX]), tuple(functions)[:_AGGREGATES_MAX])
