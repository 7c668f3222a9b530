"""Notes about the parts of a query that do not help to prune files. Each note has the reason.

Engines would refuse some of these parts, such as a column that does not exist. An explanation must report them, because
otherwise it would look as if they were not in the query.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from seamark.connector.plans.conditions import AllOf, Condition, build_expression, write_sql
from seamark.formats.iceberg.expressions.comparisons import resolve_literals
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.expressions.sql_parser import parse_statements
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest

NOTES_MAX = 16
"""The maximum number of notes of one query. A query may have thousands of conditions."""
_TEXT_MAX = 500
"""The maximum number of characters of a condition that is parsed to find the reason of its note."""
_NAMES_MAX = 100
"""The maximum number of unknown names of a query that are compared with its columns, to suggest a similar one.

A comparison takes about a millisecond.
"""
_SHOWN_CHARACTERS_MAX = 60
_MISFIT_REASON = "one of its values does not fit the type of the column, and engines convert it differently"
_HIDDEN_PREFIXES = ("$", "_")
"""The prefixes of engines' hidden columns, such as `$path` and `_file`."""
_ENGINE_WORDS = frozenset(
    [
        "all",
        "filename",
        "file_row_number",
        "rowid",
        "current_schema",
        "session_user",
        "year",
        "quarter",
        "month",
        "week",
        "day",
        "hour",
        "minute",
        "second",
    ]
)
"""Words that the parser treats as columns: hidden columns of DuckDB, functions without parentheses, units of
time.
"""


def find_unused_conditions(condition: Condition, schema: Schema, schemas: Iterable[Schema]) -> dict[str, str]:
    """Return the parts of a conjunction whose literals do not fit their columns, with the reasons.

    The result has at most NOTES_MAX parts.

    Raises:
        BadRequest: A column is unknown.
    """
    known_schemas = list(schemas)
    notes: dict[str, str] = {}
    for part in condition.parts if isinstance(condition, AllOf) else (condition,):
        if len(notes) == NOTES_MAX:
            break
        if resolve_literals(build_expression(part), schema, known_schemas) == TRUE:
            text = write_sql(part)
            notes[_shorten_text(text)] = _explain_reason(text, schema, known_schemas)
    return notes


def _explain_reason(text: str, schema: Schema, schemas: Iterable[Schema]) -> str:
    if len(text) > _TEXT_MAX:
        return _MISFIT_REASON
    try:
        return next(iter(parse_sql(text, schema, schemas, functions=True).reasons), _MISFIT_REASON)
    except BadRequest:
        return _MISFIT_REASON


def find_unknown_columns(
    text: str, dialect: str, tables: Collection[tuple[str, ...]], columns: Collection[str]
) -> dict[str, str]:
    """Return the column names that neither the tables of a query nor the query itself define, each with a hint.

    If the query reads tables that are not in `tables`, the result is empty.

    Args:
        text: The query.
        dialect: The SQL dialect of the query.
        tables: The names of the tables to which `columns` belong.
        columns: The names of the columns, in lower case.
    """
    try:
        (tree,) = parse_statements(Dialect.get_or_raise(dialect), text)
    except (ValueError, SqlglotError, RecursionError):
        return {}
    if tree is None or not _reads_only_tables(tree, {names[-1].lower() for names in tables}):
        return {}
    # Names that the query defines, and names that are not checked because of their place, such as fields of structs.
    known_names = {
        identifier.name.lower()
        for identifier in tree.find_all(exp.Identifier)
        if not isinstance(identifier.parent, exp.Column)
    }
    known_names.update(columns)
    sorted_columns = sorted(columns)
    near_names_by_column: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for column in _list_single_names(tree):
        lower_name = column.name.lower()
        if lower_name in known_names or lower_name.startswith(_HIDDEN_PREFIXES) or lower_name in _ENGINE_WORDS:
            continue
        if lower_name not in near_names_by_column:
            if len(near_names_by_column) == _NAMES_MAX:
                break
            near_names_by_column[lower_name] = find_near_names(lower_name, sorted_columns, maximum=1)
        similar_columns = near_names_by_column[lower_name]
        if similar_columns:
            hint = f"; did you mean {_shorten_text(similar_columns[0])}"
        elif column.this.quoted:
            hint = "; write a text in single quotes"
        elif isinstance(column.parent, exp.Predicate):
            hint = ""
        else:  # The name may be a keyword of the dialect.
            continue
        notes[_shorten_text(column.name)] = f"no table of the query has this column{hint}"
        if len(notes) == NOTES_MAX:
            break
    return notes


def _reads_only_tables(tree: exp.Expr, tables: Collection[str]) -> bool:
    """Return whether the query reads only `tables` in their current state, and names that its WITH clause defines."""
    cte_names = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    return all(
        isinstance(table.this, exp.Identifier)
        and table.name.lower() in (tables if table.args.get("db") is not None else {*tables, *cte_names})
        and table.args.get("when") is None
        and table.args.get("version") is None
        for table in tree.find_all(exp.Table)
    )


def _list_single_names(tree: exp.Expr) -> Iterator[exp.Column]:
    for column in tree.find_all(exp.Column):
        if isinstance(column.this, exp.Identifier) and len(column.parts) == 1:
            yield column


def _shorten_text(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}…"
