"""Translates writing statements to DuckDB's SQL: INSERT, UPDATE, DELETE, CREATE and DROP.

INSERT, UPDATE and DELETE become queries over the rows that Seamark's reader passes to DuckDB. These queries return the
rows to insert, or the places of the rows to change (file and position) with their new values (`row_changes.py`). The
code that translates queries also translates their expressions, so the expressions have the same meaning. CREATE and
DROP run on the attached catalog. All names in their text are quoted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlglot import exp

from seamark.connector.analysis.lexer import TrinoToken, UnsupportedStatement, tokenize_trino
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.plans.async_client import Name
from seamark.connector.plans.quotes import quote_name
from seamark.connector.sql.literals import parse_target_type
from seamark.connector.sql.queries import Translation
from seamark.connector.sql.scopes import NameScope, SqlValue, StoredTable, describe
from seamark.connector.sql.statement import Kind, SqlStatement, parse
from seamark.connector.sql.types import (
    BIGINT,
    UNKNOWN,
    SqlType,
    UnsupportedInDuckDB,
    find_common_type,
    has_duckdb_name,
    name_duckdb_type,
)
from seamark.connector.sql.values import check_args
from seamark.formats.runtime.repetitions import find_repeated

FindColumns = Callable[[exp.Table], Mapping[str, SqlType]]
GetName = Callable[[exp.Table], Name]
_ALLOWED: dict[type[exp.Expr], frozenset[str]] = {
    exp.Insert: frozenset(("this", "expression")),
    exp.Update: frozenset(("this", "expressions", "where")),
    exp.Delete: frozenset(("this", "where")),
    exp.Create: frozenset(("this", "kind", "exists")),
    exp.Drop: frozenset(("this", "tables", "kind", "exists")),
}
_PLACE = "$place"
"""The name of the column with the place of each row (its file and position), unless the statement contains it."""
_OPENING, _CLOSING = ("(", "["), (")", "]")


@dataclass(frozen=True)
class DuckDBChange:
    """A writing statement, translated to DuckDB's SQL."""

    text: str
    names: tuple[str, ...]
    """The names of the columns of the query's result. Empty for CREATE and DROP.

    For UPDATE and DELETE, the first column has the place of each row: the index of its file in the plan (high bits),
    and its position in the file (low bits).
    """
    tables: tuple[StoredTable, ...]
    """The tables that the query reads."""
    target: Name | None
    """The table whose rows the statement changes, or None for CREATE and DROP."""
    query: SqlStatement | None
    """The query whose text contains the references `tables`, or None for CREATE and DROP."""


def translate_change(
    statement: SqlStatement, find_columns: FindColumns, get_name: GetName, catalog: str, now: datetime
) -> DuckDBChange:
    """Translate a statement that writes to a table or to the catalog.

    Args:
        statement: The statement.
        find_columns: A function that returns the columns of a table.
        get_name: A function that returns the name of a table in the catalog.
        catalog: The name of the attached catalog in DuckDB.
        now: The current time of the statement.

    Raises:
        InvalidRequest: The statement is invalid.
        UnsupportedInDuckDB: The statement is not translated.
    """
    tree = statement.tree
    allowed_arguments = _ALLOWED.get(type(tree))
    if allowed_arguments is None:
        raise UnsupportedInDuckDB(f"{type(tree).__name__.upper()} is not translated")
    check_args(tree, allowed_arguments)
    change = _Change(statement, find_columns, get_name, catalog, now)
    match tree:
        case exp.Insert():
            return change.translate_insert(tree)
        case exp.Update() | exp.Delete():
            return change.translate_row_change(tree)
    return change.translate_definition(tree)


class _Change:
    """Translates one writing statement."""

    def __init__(
        self, statement: SqlStatement, find_columns: FindColumns, get_name: GetName, catalog: str, now: datetime
    ) -> None:
        self._statement = statement
        self._find_columns = find_columns
        self._get_name = get_name
        self._catalog = catalog
        self._now = now

    def translate_insert(self, tree: exp.Expr) -> DuckDBChange:
        """Translate an INSERT to a query that returns the new rows, with the types of the target's columns.

        Raises:
            InvalidRequest: The query has another number of columns than the statement names, or a type does not fit.
        """
        target_node = tree.this
        table = target_node.this if isinstance(target_node, exp.Schema) else target_node
        columns = self._find_target_columns(table)
        names = (
            [expression.name for expression in target_node.expressions]
            if isinstance(target_node, exp.Schema)
            else list(columns)
        )
        target_columns = _check_distinct([_find_column(name, columns, table) for name in names])
        translation = Translation(self._find_columns, self._now)
        query, query_columns = translation.translate_query(tree.expression, NameScope((), {}))
        if len(query_columns) != len(target_columns):
            raise InvalidRequest(f"The statement has {len(query_columns)} values for {len(target_columns)} columns")
        converted_columns = ", ".join(
            _convert_to_column_type(SqlValue(f"c{number}", kind), columns[name], name)
            for number, (name, (_, kind)) in enumerate(zip(target_columns, query_columns, strict=True))
        )
        text = f"SELECT {converted_columns} FROM ({query})"  # noqa: S608
        tables = tuple(translation.tables)
        return DuckDBChange(text, tuple(target_columns), tables, self._get_name(table), self._statement.query)

    def translate_row_change(self, tree: exp.Expr) -> DuckDBChange:
        """Translate UPDATE or DELETE to `SELECT place, new values FROM table WHERE condition`.

        The place of a row is one integer: the index of its file in the plan, and its position in the file. The reader
        adds this column to the rows of the table.
        """
        columns = self._find_target_columns(tree.this)
        place = _PLACE
        while place in self._statement.text.lower() or any(place == name.lower() for name in columns):
            place += "$"  # The name of the column with the places must not occur in the statement.
        kind, texts = self._statement.kind, divide_row_change(self._statement.text)
        target_columns = []
        for assignment in tree.expressions if kind is Kind.UPDATE else ():
            if not isinstance(assignment, exp.EQ) or not isinstance(assignment.this, exp.Column):
                raise UnsupportedInDuckDB(f"SET {describe(assignment)} is not translated")
            target_columns.append(_find_column(assignment.this.name, columns, tree.this))
        if len(texts.values) != len(_check_distinct(target_columns)):
            raise UnsupportedInDuckDB(f"{kind.value} of this form is not translated")
        place_column = quote_name(place)
        text = f"SELECT {', '.join([place_column, *texts.values])} FROM {texts.source}"  # noqa: S608
        parsed_statement = parse(text)
        query = parsed_statement.tree
        clause = query.args.get("from_")
        if not isinstance(query, exp.Select) or clause is None or len(query.expressions) != 1 + len(target_columns):
            raise UnsupportedInDuckDB(f"{kind.value} of this form is not translated")
        target = clause.this

        def find_columns(table: exp.Table) -> Mapping[str, SqlType]:
            table_columns = self._find_columns(table)
            return {**table_columns, place: BIGINT} if table is target else table_columns

        translation = Translation(find_columns, self._now)
        query_sql, query_columns = translation.translate_query(query, NameScope((), {}))
        if len(query_columns) != 1 + len(target_columns):  # A new value is `*`, which selects several columns.
            raise UnsupportedInDuckDB(f"{kind.value} of this form is not translated")
        for table in translation.tables:
            table.place = place if table.node is target else None
        converted_columns = [
            _convert_to_column_type(SqlValue(f"c{number}", kind), columns[name], name)
            for number, (name, (_, kind)) in enumerate(zip(target_columns, query_columns[1:], strict=True), 1)
        ]
        # The analysis of conditions would not find the column with the places, so the query does not contain it.
        query.expressions[0].replace(exp.Literal.number(1))
        return DuckDBChange(
            f"SELECT {', '.join(['c0', *converted_columns])} FROM ({query_sql})",  # noqa: S608
            (place, *target_columns),
            tuple(translation.tables),
            self._get_name(tree.this),
            parsed_statement,
        )

    def translate_definition(self, tree: exp.Expr) -> DuckDBChange:
        """Translate a statement that creates or drops a table or schema.

        Raises:
            InvalidRequest: The name of a schema is not one name in the catalog.
            UnsupportedInDuckDB: The statement creates or drops something else, or a table without a list of columns.
        """
        kind, word = tree.text("kind").upper(), "CREATE" if isinstance(tree, exp.Create) else "DROP"
        if kind not in ("TABLE", "SCHEMA"):
            raise UnsupportedInDuckDB(f"{word} {kind} is not translated")
        exists_clause = ""
        if tree.args.get("exists"):
            exists_clause = " IF NOT EXISTS" if word == "CREATE" else " IF EXISTS"
        target_nodes = tree.args.get("tables") or [tree.this]
        if len(target_nodes) != 1:
            raise UnsupportedInDuckDB("DROP of several tables is not translated")
        target_node, columns = target_nodes[0], ""
        if isinstance(target_node, exp.Schema):
            columns = f" ({', '.join(_define_column(expression) for expression in target_node.expressions)})"
            target_node = target_node.this
        if kind == "TABLE" and word == "CREATE" and not columns:
            raise UnsupportedInDuckDB(
                "CREATE TABLE must list columns; create the table, and then INSERT the rows of a query"
            )
        if kind == "SCHEMA":
            parts = [part.name for part in target_node.parts]
            if len(parts) == 2 and parts[0].lower() == self._catalog.lower():
                parts = parts[1:]
            if len(parts) != 1:
                raise InvalidRequest(
                    f'{describe(target_node)} is not the name of a schema; write nested levels in quotes: "a.b"'
                )
            target = f"{quote_name(self._catalog)}.{quote_name(parts[0])}"
        else:
            target = self._write_duckdb_name(target_node)
        return DuckDBChange(f"{word} {kind}{exists_clause} {target}{columns}", (), (), None, None)

    def _find_target_columns(self, table: exp.Expr) -> Mapping[str, SqlType]:
        if not isinstance(table, exp.Table):
            raise UnsupportedInDuckDB(f"{describe(table)} is not a table")
        check_args(table, frozenset(("this", "db", "catalog")))
        return self._find_columns(table)

    def _write_duckdb_name(self, table: exp.Expr) -> str:
        assert isinstance(table, exp.Table)
        name = self._get_name(table)
        return ".".join(map(quote_name, (self._catalog, ".".join(name[:-1]), name[-1])))


@dataclass(frozen=True)
class RowChangeTexts:
    """Parts of the text of an UPDATE or DELETE."""

    values: tuple[str, ...]
    """The texts of the new values."""
    source: str
    """The table and the condition, in the form of the text after FROM."""


def divide_row_change(text: str) -> RowChangeTexts:
    """Divide the text `UPDATE table SET column = value, … WHERE condition` or `DELETE FROM table WHERE condition`.

    Raises:
        UnsupportedInDuckDB: The statement does not have one of these forms.
    """
    try:
        tokens = [token for token in tokenize_trino(text) if token.word != ";"]
    except UnsupportedStatement:
        raise UnsupportedInDuckDB("The statement does not have a form that Trino supports") from None
    words = [token.word for token in tokens]
    end = tokens[-1].end if tokens else 0
    if words[:2] == ["DELETE", "FROM"] and len(words) > 2:
        return RowChangeTexts((), text[tokens[2].start : end])
    if words[:1] != ["UPDATE"] or "SET" not in words:
        raise UnsupportedInDuckDB("UPDATE of this form is not translated")
    set_position = words.index("SET")
    groups, condition = _parse_assignments(tokens[set_position + 1 :])
    values = []
    for group in groups:
        equals = next((position for position, token in enumerate(group) if token.word == "="), None)
        if equals is None or equals + 1 == len(group):
            raise UnsupportedInDuckDB("UPDATE of this form is not translated")
        values.append(text[group[equals + 1].start : group[-1].end])
    source = text[tokens[1].start : tokens[set_position - 1].end]
    if condition is not None:
        source += f" {text[condition.start : end]}"
    return RowChangeTexts(tuple(values), source)


def _parse_assignments(tokens: Sequence[TrinoToken]) -> tuple[list[list[TrinoToken]], TrinoToken | None]:
    """Return the assignments of SET, and the token WHERE or None if there is no condition."""
    groups: list[list[TrinoToken]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.word in _OPENING) - (token.word in _CLOSING)
        if depth == 0 and token.word == "WHERE":
            return groups, token
        if depth == 0 and token.word == ",":
            groups.append([])
        else:
            groups[-1].append(token)
    return groups, None


def _check_distinct(names: list[str]) -> list[str]:
    """Check that the names are distinct, and return them.

    Raises:
        InvalidRequest: A name occurs twice.
    """
    if (repeated_name := find_repeated(names)) is not None:
        raise InvalidRequest(f"The statement names the column {repeated_name[:100]!r} twice")
    return names


def _find_column(name: str, columns: Mapping[str, SqlType], table: exp.Expr) -> str:
    matches = [column for column in columns if column.lower() == name.lower()]
    if not matches:
        raise InvalidRequest(f"{describe(table)} has no column {name[:100]!r}")
    return matches[0]


def _convert_to_column_type(value: SqlValue, kind: SqlType, column: str) -> str:
    """Return the value, converted to the type of its column.

    An exact number may be converted to a narrower type. The statement then fails for values that do not fit.

    Raises:
        InvalidRequest: The conversion requires a CAST.
        UnsupportedInDuckDB: The type of the column cannot be written.
    """
    if value.type != kind and find_common_type(value.type, kind) != kind:
        is_narrowing = value.type.is_number and kind.is_number and not value.type.is_float
        if not is_narrowing:
            raise InvalidRequest(
                f"The column {column[:100]!r} has the type {kind}, but its new value has {value.type}; use CAST"
            )
    # The writer converts nested values to the type of the column, and refuses values that do not fit.
    if not has_duckdb_name(kind):
        if value.type == UNKNOWN or value.type != kind:
            raise UnsupportedInDuckDB(f"The column {column[:100]!r} has a type that cannot be written")
        return value.sql
    return f"CAST({value.sql} AS {name_duckdb_type(kind)})"


def _define_column(node: exp.Expr) -> str:
    if not isinstance(node, exp.ColumnDef) or not isinstance(node.args.get("kind"), exp.DataType):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    not_null = ""
    for constraint in node.args.get("constraints") or ():
        if not isinstance(constraint.kind, exp.NotNullColumnConstraint) or constraint.kind.args.get("allow_null"):
            raise UnsupportedInDuckDB(f"{describe(node)}: NOT NULL is the only supported constraint")
        not_null = " NOT NULL"
    return f"{quote_name(node.name)} {name_duckdb_type(parse_target_type(node.args['kind'], node))}{not_null}"
