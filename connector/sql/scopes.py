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
from seamark.connector.sql.types import NESTED, UNREADABLE, SqlType
from seamark.formats.iceberg.types.near_names import near_names

MESSAGE_NAME_MAX = 100
_HINTS_FROM = 1000
"""The maximum number of columns of a relation that are compared with an unknown name to find similar names."""


class UnsupportedInDuckDB(Exception):
    """Raised if the statement cannot be translated to DuckDB's SQL with the result that the dialect defines.

    A different engine may be able to run the statement.
    """


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
    """The name of the last column, which has the places of rows, or None if the statement does not change the table."""

    @property
    def name(self) -> str:
        """The name of the relation that DuckDB reads."""
        return f"t{self.number}"


@dataclass(frozen=True, slots=True)
class VisibleColumn:
    """A column that FROM makes visible.

    Attributes:
        qualifiers: The parts of the relation's name. Empty for a column of USING.
    """

    name: str
    qualifiers: tuple[str, ...]
    value: SqlValue
    stored: tuple[StoredTable, str] | None = None


@dataclass(frozen=True, slots=True)
class WithQuery:
    """A query in WITH.

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
        """Return the value of a column.

        Raises:
            InvalidRequest: The name is unknown or ambiguous.
        """
        name = node.name.lower()
        qualifiers = tuple(part.name.lower() for part in node.parts[:-1])
        scope: NameScope | None = self
        while scope is not None:
            matches = [field for field in scope._by_name.get(name, ()) if _is_qualified(field, qualifiers)]
            if len(matches) > 1:
                raise InvalidRequest(f"The column {describe(node)} is ambiguous; qualify it with the name of its table")
            if matches:
                return use_column(matches[0])
            if qualifiers and any(field.value.type == NESTED for field in scope._by_name.get(qualifiers[0], ())):
                raise UnsupportedInDuckDB(f"{describe(node)}: fields of a nested column are not translated")
            scope = scope.parent
        raise InvalidRequest(f"The column {describe(node)} does not exist{self._make_hint(node, qualifiers)}")

    def find(self, node: exp.Column) -> VisibleColumn | None:
        """Return the only column of this query to which the name refers, or None if there is none or several."""
        qualifiers = tuple(part.name.lower() for part in node.parts[:-1])
        matches = [field for field in self._by_name.get(node.name.lower(), ()) if _is_qualified(field, qualifiers)]
        return matches[0] if len(matches) == 1 else None

    @cached_property
    def _by_name(self) -> Mapping[str, list[VisibleColumn]]:
        """The columns by name. Without this index, each search would compare all columns."""
        by_name: defaultdict[str, list[VisibleColumn]] = defaultdict(list)
        for visible in self.fields:
            by_name[visible.name].append(visible)
        return by_name

    def _make_hint(self, node: exp.Column, qualifiers: tuple[str, ...]) -> str:
        """Return a hint for an unknown column: similar names, or a remark that a string needs single quotes."""
        candidates: dict[str, None] = {}
        scope: NameScope | None = self
        while scope is not None:
            candidates |= dict.fromkeys(
                visible.name for visible in scope.fields[:_HINTS_FROM] if _is_qualified(visible, qualifiers)
            )
            scope = scope.parent
        similar_names = near_names(node.name, candidates)
        if similar_names:
            return f"; did you mean {' or '.join(visible[:MESSAGE_NAME_MAX] for visible in similar_names)}?"
        return "; write a text in single quotes" if node.this.quoted and not qualifiers else ""

    def expand_star(self, qualifiers: Sequence[str]) -> list[VisibleColumn]:
        """Return the columns to which `*` or `t.*` refers.

        Raises:
            InvalidRequest: There are no columns to which it refers.
        """
        wanted = tuple(qualifier.lower() for qualifier in qualifiers)
        visible = [field for field in self.fields if not wanted or _is_qualified(field, wanted)]
        if not visible:
            raise InvalidRequest(f"{'.'.join([*qualifiers, '*'])[:MESSAGE_NAME_MAX]} matches no column")
        return visible


def use_column(visible: VisibleColumn) -> SqlValue:
    """Return the value of a column. If the column is in a stored table, mark the column as used.

    Raises:
        UnsupportedInDuckDB: The values of the column cannot be read.
    """
    if visible.value.type == UNREADABLE:
        raise UnsupportedInDuckDB(f"The column {visible.name[:MESSAGE_NAME_MAX]} has a type that cannot be read")
    if visible.stored is not None:
        table, column = visible.stored
        table.used[column] = None
    return visible.value


def describe(node: exp.Expr) -> str:
    """Return the node as SQL text for error messages."""
    text = node.sql("trino")
    return text if len(text) <= MESSAGE_NAME_MAX else f"{text[:MESSAGE_NAME_MAX]}…"


def _is_qualified(visible: VisibleColumn, qualifiers: tuple[str, ...]) -> bool:
    return not qualifiers or (bool(visible.qualifiers) and visible.qualifiers[-len(qualifiers) :] == qualifiers)
