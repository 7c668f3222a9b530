"""Resolves the names in a query: columns of its relations and of enclosing queries, and names in WITH.

Each name is replaced by a name that the translation generates (`r3.c0`), so the text that DuckDB runs contains no
identifier of the statement. As in Trino, names are not case-sensitive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.plans.quotes import quote_text
from seamark.connector.sql.types import UNREADABLE, SqlType, UnsupportedInDuckDB
from seamark.formats.iceberg.types.near_names import find_near_names

MESSAGE_NAME_MAX = 100
_HIDDEN_COLUMNS = {"$path", "$partition", "$file_modified_time"}
"""The columns that each table has in Trino, but that `*` does not select."""
_HINT_COLUMNS_MAX = 1000
"""The maximum number of columns of a relation that are compared with an unknown name to find similar names."""


@dataclass(frozen=True, slots=True)
class SqlValue:
    """A translated expression in DuckDB's SQL, with its type.

    Attributes:
        literal: The node of the expression if it is a literal without a cast, otherwise None.
    """

    sql: str
    type: SqlType
    literal: exp.Expr | None = None


@dataclass(eq=False)
class StoredTable:
    """A reference to a stored table in the statement.

    Attributes:
        node: The node of the reference, with the table's name and its positions in the text.
    """

    number: int
    node: exp.Table
    columns: Mapping[str, SqlType]
    """The types of the columns by name, in the order of the schema."""
    used: dict[str, None] = field(default_factory=dict)
    """The names of the columns that the statement uses."""
    place: str | None = None
    """The name of the last column, or None if the statement does not change the table.

    This column has the place of each row: the index of its file in the plan, and its position in the file.
    """

    @property
    def name(self) -> str:
        """The name of the relation that DuckDB reads."""
        return f"t{self.number}"


@dataclass(frozen=True, slots=True)
class VisibleColumn:
    """A column that FROM makes visible.

    Attributes:
        qualifiers: The parts of the relation's name. Empty for a column of USING.
        value: The value of the column in DuckDB's SQL.
        stored: The stored table of the column and the column's name in it, or None if the column is computed.
        fields: For a struct of which only some fields are visible: these fields, by the names from the struct to the
            field, in lower case.
    """

    name: str
    qualifiers: tuple[str, ...]
    value: SqlValue
    stored: tuple[StoredTable, str] | None = None
    fields: Mapping[tuple[str, ...], VisibleColumn] | None = None


@dataclass(frozen=True, slots=True)
class WithQuery:
    """A query in a WITH clause.

    Attributes:
        relation: The name of the query in DuckDB's text.
        columns: The names and types of its columns.
    """

    relation: str
    columns: tuple[tuple[str, SqlType], ...]


@dataclass(frozen=True)
class NameScope:
    """The names that are visible in a query.

    They are the columns of FROM, the names in WITH, and the names of the enclosing query, which correlated queries use.
    """

    fields: tuple[VisibleColumn, ...]
    named: Mapping[str, WithQuery]
    parent: NameScope | None = None

    def resolve_column(self, node: exp.Column) -> SqlValue:
        """Return the value of a column, or of a field of a struct.

        If a column has the full name, the name refers to it. Otherwise the name's longest prefix that is the name of a
        column refers to this column, and the rest of the name to its fields. If the scope has no such column, the
        enclosing scopes are searched, from the innermost to the outermost.

        Raises:
            InvalidRequest: The name is unknown or ambiguous.
            UnsupportedInDuckDB: The value cannot be read.
        """
        name = node.name.lower()
        qualifiers = tuple(part.name.lower() for part in node.parts[:-1])
        scope: NameScope | None = self
        while scope is not None:
            matches = scope._find_columns((*qualifiers, name))
            if len(matches) > 1:
                raise InvalidRequest(f"The column {describe(node)} is ambiguous; qualify it with the name of its table")
            if matches:
                return use_column(matches[0])
            for length in range(len(qualifiers), 0, -1):
                columns = scope._find_columns(qualifiers[:length])
                if len(columns) > 1:
                    raise InvalidRequest(f"The column {'.'.join(qualifiers[:length])[:MESSAGE_NAME_MAX]} is ambiguous")
                if columns:
                    return select_path(columns[0], (*qualifiers[length:], name), node)
            scope = scope.parent
        if name in _HIDDEN_COLUMNS:
            raise UnsupportedInDuckDB(f"The column {describe(node)} is not translated")
        raise InvalidRequest(f"The column {describe(node)} does not exist{self._make_hint(node, qualifiers)}")

    def _find_columns(self, parts: Sequence[str]) -> list[VisibleColumn]:
        """Return the columns of this query to which a name can refer. Qualifiers may precede the name in `parts`."""
        return [column for column in self._by_name.get(parts[-1], ()) if _is_qualified(column, tuple(parts[:-1]))]

    def find(self, node: exp.Column) -> VisibleColumn | None:
        """Return the only column of this query to which the name refers, or None if there is none or several."""
        qualifiers = tuple(part.name.lower() for part in node.parts[:-1])
        matches = [field for field in self._by_name.get(node.name.lower(), ()) if _is_qualified(field, qualifiers)]
        return matches[0] if len(matches) == 1 else None

    def find_path(self, node: exp.Column) -> tuple[VisibleColumn, tuple[str, ...]] | None:
        """Return the column of this query to which the name refers, and the names of the fields after it.

        The result is None if the name is unknown or ambiguous.
        """
        parts = tuple(part.name.lower() for part in node.parts)
        for length in range(len(parts), 0, -1):
            columns = self._find_columns(parts[:length])
            if columns:
                return (columns[0], parts[length:]) if len(columns) == 1 else None
        return None

    @cached_property
    def _by_name(self) -> Mapping[str, list[VisibleColumn]]:
        """The columns by name. Without this index, each search would compare all columns."""
        by_name: defaultdict[str, list[VisibleColumn]] = defaultdict(list)
        for visible in self.fields:
            by_name[visible.name].append(visible)
        return by_name

    def _make_hint(self, node: exp.Column, qualifiers: tuple[str, ...]) -> str:
        """Return a hint for an unknown column: similar names, or a remark that a string needs single quotes.

        The hint is empty if neither applies.
        """
        candidates: dict[str, None] = {}
        scope: NameScope | None = self
        while scope is not None:
            candidates |= dict.fromkeys(
                visible.name for visible in scope.fields[:_HINT_COLUMNS_MAX] if _is_qualified(visible, qualifiers)
            )
            scope = scope.parent
        similar_names = find_near_names(node.name, candidates)
        if similar_names:
            return f"; did you mean {' or '.join(visible[:MESSAGE_NAME_MAX] for visible in similar_names)}?"
        return "; write a text in single quotes" if node.this.quoted and not qualifiers else ""

    def expand_star(self, qualifiers: Sequence[str]) -> list[VisibleColumn]:
        """Return the columns to which `*` or `t.*` refers.

        Raises:
            InvalidRequest: There are no columns to which it refers.
        """
        lower_qualifiers = tuple(qualifier.lower() for qualifier in qualifiers)
        visible = [field for field in self.fields if not lower_qualifiers or _is_qualified(field, lower_qualifiers)]
        if not visible:
            raise InvalidRequest(f"{'.'.join([*qualifiers, '*'])[:MESSAGE_NAME_MAX]} matches no column")
        return visible


def use_column(visible: VisibleColumn) -> SqlValue:
    """Return the value of a column. If the column is in a stored table, mark the column as used.

    Raises:
        UnsupportedInDuckDB: The values of the column cannot be read.
    """
    if visible.fields is not None:
        raise UnsupportedInDuckDB(f"Only fields of {visible.name[:MESSAGE_NAME_MAX]} can be used")
    if visible.value.type == UNREADABLE:
        raise UnsupportedInDuckDB(f"The column {visible.name[:MESSAGE_NAME_MAX]} has a type that cannot be read")
    if visible.stored is not None:
        table, column = visible.stored
        table.used[column] = None
    return visible.value


def select_field(value: SqlValue, name: str, node: exp.Expr) -> SqlValue:
    """Return a field of a struct. As in Trino, names are not case-sensitive.

    Raises:
        InvalidRequest: The value has no field of this name.
        UnsupportedInDuckDB: Several fields have this name, or the field cannot be read.
    """
    matches = [field for field in value.type.fields if field[0].lower() == name.lower()]
    if not matches:
        raise InvalidRequest(f"{describe(node)}: there is no field {name[:MESSAGE_NAME_MAX]!r}")
    if len(matches) > 1 or matches[0][1] == UNREADABLE:
        raise UnsupportedInDuckDB(f"{describe(node)}: this field is not translated")
    return SqlValue(f"struct_extract({value.sql}, {quote_text(matches[0][0])})", matches[0][1])


def select_path(column: VisibleColumn, names: Sequence[str], node: exp.Expr) -> SqlValue:
    """Return a field of a struct by the names from the struct to the field.

    Raises:
        InvalidRequest: The struct has no such field.
        UnsupportedInDuckDB: The field cannot be read.
    """
    if column.fields is not None:
        visible = column.fields.get(tuple(names))
        if visible is None:
            raise UnsupportedInDuckDB(f"{describe(node)} is not a dimension of the cube")
        return use_column(visible)
    value = use_column(column)
    for name in names:
        value = select_field(value, name, node)
    return value


def describe(node: exp.Expr) -> str:
    """Return the node as SQL text for error messages."""
    text = node.sql("trino")
    return text if len(text) <= MESSAGE_NAME_MAX else f"{text[:MESSAGE_NAME_MAX]}…"


def _is_qualified(visible: VisibleColumn, qualifiers: tuple[str, ...]) -> bool:
    return not qualifiers or (bool(visible.qualifiers) and visible.qualifiers[-len(qualifiers) :] == qualifiers)
