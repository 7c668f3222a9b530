"""Translates statements that write, for DuckDB with the catalog attached: INSERT, UPDATE, DELETE, CREATE and DROP.

Expressions and queries are translated as those of queries are, so they mean the same. The table that is written is
named in the text, with quoted names; what is read comes from our reader, at the snapshot of the statement's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlglot import exp

from seamark.connector.client.errors import BadRequest
from seamark.connector.plans.async_client import Name
from seamark.connector.plans.quotes import quoted_name
from seamark.connector.sql.literals import target_type
from seamark.connector.sql.queries import Translation
from seamark.connector.sql.scopes import (
    Field,
    NameScope,
    StoredTable,
    UnsupportedInDuckDB,
    Value,
    shown,
)
from seamark.connector.sql.types import SqlType, common_type, duckdb_name
from seamark.connector.sql.values import check_args

ColumnsOf = Callable[[exp.Table], Mapping[str, SqlType]]
NameOf = Callable[[exp.Table], Name]
_ALLOWED: dict[type[exp.Expr], frozenset[str]] = {
    exp.Insert: frozenset(("this", "expression")),
    exp.Update: frozenset(("this", "expressions", "where")),
    exp.Delete: frozenset(("this", "where")),
    exp.Create: frozenset(("this", "kind", "exists")),
    exp.Drop: frozenset(("this", "tables", "kind", "exists")),
}


@dataclass(frozen=True)
class DuckDBChange:
    text: str
    tables: tuple[StoredTable, ...]
    """What it reads besides the table that it writes."""
    target: str


def translate_change(
    tree: exp.Expr, columns_of: ColumnsOf, name_of: NameOf, catalog: str, now: datetime
) -> DuckDBChange:
    """`catalog`: the name under which the catalog is attached. BadRequest for an invalid statement, UnsupportedInDuckDB
    for one that is not translated."""
    allowed = _ALLOWED.get(type(tree))
    if allowed is None:
        raise UnsupportedInDuckDB(f"{type(tree).__name__.upper()} is not translated")
    check_args(tree, allowed)
    change = _Change(columns_of, name_of, catalog, now)
    match tree:
        case exp.Insert():
            text, target = change.insert(tree)
        case exp.Update():
            text, target = change.update(tree)
        case exp.Delete():
            text, target = change.delete(tree)
        case _:
            text, target = change.definition(tree)
    return DuckDBChange(text, tuple(change.translation.tables), target)


class _Change:
    def __init__(self, columns_of: ColumnsOf, name_of: NameOf, catalog: str, now: datetime) -> None:
        self.translation = Translation(columns_of, now)
        self._columns_of = columns_of
        self._name_of = name_of
        self._catalog = catalog

    def insert(self, tree: exp.Expr) -> tuple[str, str]:
        into = tree.this
        table = into.this if isinstance(into, exp.Schema) else into
        columns = self._target(table)
        names = [one.name for one in into.expressions] if isinstance(into, exp.Schema) else list(columns)
        chosen = [_known(name, columns, table) for name in names]
        query, given = self.translation.query(tree.expression, NameScope((), {}))
        if len(given) != len(chosen):
            raise BadRequest(f"The statement gives {len(given)} values for {len(chosen)} columns")
        converted = ", ".join(
            _stored(Value(f"c{n}", kind), columns[name], name)
            for n, (name, (_, kind)) in enumerate(zip(chosen, given, strict=True))
        )
        listed = ", ".join(quoted_name(name) for name in chosen)
        target = self._duckdb_name(table)
        return f"INSERT INTO {target} ({listed}) SELECT {converted} FROM ({query})", shown(table)  # noqa: S608

    def update(self, tree: exp.Expr) -> tuple[str, str]:
        table = tree.this
        columns = self._target(table)
        scope, e = _scope_of(table, columns), self.translation.expressions
        sets = []
        for one in tree.expressions:
            if not isinstance(one, exp.EQ) or not isinstance(one.this, exp.Column):
                raise UnsupportedInDuckDB(f"SET {shown(one)} is not translated")
            name = _known(one.this.name, columns, table)
            sets.append(f"{quoted_name(name)} = {_stored(e.value(one.expression, scope), columns[name], name)}")
        return f"UPDATE {self._duckdb_name(table)} SET {', '.join(sets)}{self._where(tree, scope)}", shown(table)  # noqa: S608

    def delete(self, tree: exp.Expr) -> tuple[str, str]:
        table = tree.this
        scope = _scope_of(table, self._target(table))
        return f"DELETE FROM {self._duckdb_name(table)}{self._where(tree, scope)}", shown(table)  # noqa: S608

    def definition(self, tree: exp.Expr) -> tuple[str, str]:
        kind, word = tree.text("kind").upper(), "CREATE" if isinstance(tree, exp.Create) else "DROP"
        if kind not in ("TABLE", "SCHEMA"):
            raise UnsupportedInDuckDB(f"{word} {kind} is not translated")
        exists = ""
        if tree.args.get("exists"):
            exists = " IF NOT EXISTS" if word == "CREATE" else " IF EXISTS"
        dropped = tree.args.get("tables") or [tree.this]
        if len(dropped) != 1:
            raise UnsupportedInDuckDB("DROP of several tables is not translated")
        named, columns = dropped[0], ""
        if isinstance(named, exp.Schema):
            columns = f" ({', '.join(_defined(one) for one in named.expressions)})"
            named = named.this
        if kind == "TABLE" and word == "CREATE" and not columns:
            raise UnsupportedInDuckDB(
                "CREATE TABLE needs columns here; create the table, then INSERT the rows of a query"
            )
        if kind == "SCHEMA":
            parts = [part.name for part in named.parts]
            if len(parts) == 2 and parts[0].lower() == self._catalog.lower():
                parts = parts[1:]
            if len(parts) != 1:
                raise BadRequest(f'{shown(named)} is not the name of a schema; write nested levels in quotes: "a.b"')
            target = f"{quoted_name(self._catalog)}.{quoted_name(parts[0])}"
        else:
            target = self._duckdb_name(named)
        return f"{word} {kind}{exists} {target}{columns}", shown(named)

    def _target(self, table: exp.Expr) -> Mapping[str, SqlType]:
        if not isinstance(table, exp.Table):
            raise UnsupportedInDuckDB(f"{shown(table)} is not a table")
        check_args(table, frozenset(("this", "db", "catalog")))
        return self._columns_of(table)

    def _duckdb_name(self, table: exp.Expr) -> str:
        assert isinstance(table, exp.Table)
        name = self._name_of(table)
        return ".".join(map(quoted_name, (self._catalog, ".".join(name[:-1]), name[-1])))

    def _where(self, tree: exp.Expr, scope: NameScope) -> str:
        where = tree.args.get("where")
        return "" if where is None else f" WHERE {self.translation.expressions.condition(where.this, scope)}"


def _scope_of(table: exp.Table, columns: Mapping[str, SqlType]) -> NameScope:
    parts = tuple(part.name.lower() for part in table.parts)
    fields = (Field(name.lower(), parts, Value(quoted_name(name), kind)) for name, kind in columns.items())
    return NameScope(tuple(fields), {})


def _known(name: str, columns: Mapping[str, SqlType], table: exp.Expr) -> str:
    found = [one for one in columns if one.lower() == name.lower()]
    if not found:
        raise BadRequest(f"{shown(table)} has no column {name[:100]!r}")
    return found[0]


def _stored(value: Value, kind: SqlType, column: str) -> str:
    """The value in the type of its column. BadRequest if that needs a CAST."""
    if value.type != kind and common_type(value.type, kind) != kind:
        narrows = value.type.is_number and kind.is_number and not value.type.is_float
        if not narrows:
            raise BadRequest(
                f"The column {column[:100]!r} has the type {kind}, and its new value {value.type}: use CAST"
            )
    return f"CAST({value.sql} AS {duckdb_name(kind)})"


def _defined(node: exp.Expr) -> str:
    if not isinstance(node, exp.ColumnDef) or not isinstance(node.args.get("kind"), exp.DataType):
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated")
    required = ""
    for one in node.args.get("constraints") or ():
        if not isinstance(one.kind, exp.NotNullColumnConstraint) or one.kind.args.get("allow_null"):
            raise UnsupportedInDuckDB(f"{shown(node)}: of constraints only NOT NULL is translated")
        required = " NOT NULL"
    return f"{quoted_name(node.name)} {duckdb_name(target_type(node.args['kind'], node))}{required}"
