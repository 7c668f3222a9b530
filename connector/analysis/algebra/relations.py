"""Defines the relations of a statement except blocks: tables, literal rows, set operations and names in WITH.

A condition on a result is pushed down to its inputs, unless an operation between them counts or orders rows. Invariant:
rows of a source may be left out only if the result of the statement stays the same for any data.

- A condition on a column of a set operation is pushed to the same column of both inputs if both have the same type.
- The query of a name in WITH gets the disjunction of the conditions of all uses of the name.

`find_origin` returns the stored columns from which a column's values come. Counting, ordering and limiting rows do not
change the origin, because each value of the result is in a needed row of the table. Similarly, `find_extreme` returns
the extreme of stored rows that is the value of a column, even if the column is selected from a name in WITH.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from seamark.connector.analysis.operands import EXACT, TEXT, get_kind_class
from seamark.connector.plans.conditions import Atom, ColumnComparison, ColumnReference, Condition, any_of, move, weaken
from seamark.connector.plans.literals import Literal

Columns: TypeAlias = Mapping[str, str]
"""The columns of a table in lower case, with their Iceberg types."""
COMPUTED = ""
"""The type of a column of a view if its values are not stored values of a table."""

SHARED_LEAVES_MAX = 500
"""The maximum number of comparisons in the condition on a name in WITH that is used several times.

A name with more comparisons is read completely. Without this limit, each name in a chain of names could have as many
comparisons as a whole statement.
"""

_EXACT = frozenset(("boolean", "int", "long", "decimal", "date", "time", "timestamp", "timestamptz", "string", "uuid"))
"""Types whose equal values are identical.

Floats are not among them because they have two zeros. Nested types are not compared.
"""

_FLOATS = frozenset(("float", "double"))

_COMPARED_CLASSES = frozenset((TEXT, EXACT))
"""The classes of literals that are compared with a stored column in the other input of a set operation."""

_LITERAL_TYPES = {"boolean": "boolean", "integer": "long", "text": "string", "date": "date"}


def is_exact(kind: str | None) -> bool:
    """Return whether values of the type are equal only if they are identical."""
    return kind is not None and kind.partition("(")[0].strip() in _EXACT


class SourceRows(NamedTuple):
    """Rows of a table that meet a condition.

    Attributes:
        where: The condition on the columns of the table, or None. The table has the number 0 in column references.
        exact: Whether every row of the table that meets the condition is included. If not, some may be missing.
    """

    where: Condition | None
    exact: bool


class StoredExtreme(NamedTuple):
    """The minimum or maximum of a column in rows of a table.

    Attributes:
        table: The table.
        column: The column of the table.
        kind: `MINIMUM` or `MAXIMUM`.
        rows: The rows, or None if they are unknown, for example because they are the rows of a group.
    """

    table: Table
    column: str
    kind: str
    rows: SourceRows | None

    @property
    def type(self) -> str | None:
        """The Iceberg type of the column."""
        return self.table.find_kind(self.column)


class Relation(Protocol):
    """The rows of a query, of a table, or of another relation in FROM.

    An extreme is a minimum or maximum of a column of stored rows.
    """

    def has(self, column: str) -> bool | None:
        """Return whether the relation has a column of this name, or None if this is unknown."""

    def list_names(self) -> tuple[str | None, ...] | None:
        """Return the names of all columns in order, with None for a column without a name. Return None if unknown."""

    def find_kind(self, column: str) -> str | None:
        """Return the Iceberg type of a column with unchanged stored values, or None for other columns or types."""

    def find_origin(self, columns: Sequence[str]) -> Origin | None:
        """Return a stored table and the columns of it from which these columns come, or None if there is no such table.

        For each row in which these columns are not null, a row of the table has the same values, except that the sign
        of a floating-point zero may differ.
        """

    def find_extreme(self, column: str) -> StoredExtreme | None:
        """Return the minimum or maximum of stored rows that is the value of the column, or None.

        For example, the column `m` of `SELECT max(v) AS m FROM t` has the maximum of `t.v`. In some rows the column may
        be null instead.
        """

    def find_source_rows(self) -> SourceRows | None:
        """Return the rows of a table that are exactly the rows of this relation, or None if this is not possible."""

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        """Return the values of a column with only literals of the statement and nulls, or None for other columns."""

    def find_value_class(self, column: str) -> str | None:
        """Return the class of a column of stored values or literals, or None for other columns.

        A class is a group of types that engines compare exactly with each other, such as `TEXT` or `EXACT` (integers
        and decimals).
        """

    def push_down(self, condition: Condition | None) -> None:
        """Push a condition down to the inputs of the relation. The method is called once.

        Args:
            condition: A condition on columns of this relation, which has the number 0 in column references. Rows for
                which it is not true are not needed. None means that all rows are needed.
        """


@dataclass(eq=False)
class Table:
    """A reference to a stored table, which is a `Relation`.

    All of its columns have stored values, so no column is the result of MIN or MAX, or has only literals. Its rows are
    exactly the rows of the table. After the push-down, `predicate` is true for each row that the statement needs. The
    readers of statements store further data about the reference themselves.
    """

    columns: Columns | None
    predicate: Condition | None = None

    def has(self, column: str) -> bool | None:
        return None if self.columns is None else column in self.columns

    def list_names(self) -> None:
        return None  # The order of the columns is unknown.

    def find_kind(self, column: str) -> str | None:
        return None if self.columns is None else self.columns.get(column)

    def find_origin(self, columns: Sequence[str]) -> Origin | None:
        kinds = [self.find_kind(column) for column in columns]
        return (self, tuple(columns)) if all(is_exact(kind) or kind in _FLOATS for kind in kinds) else None

    def find_extreme(self, column: str) -> None:
        return None

    def find_source_rows(self) -> SourceRows:
        return SourceRows(None, exact=True)

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        return None

    def find_value_class(self, column: str) -> str | None:
        return get_kind_class(self.find_kind(column))

    def push_down(self, condition: Condition | None) -> None:
        self.predicate = condition


Origin: TypeAlias = tuple[Table, tuple[str, ...]]
"""A stored table, and the names of some of its columns."""


def find_exact_origin(relation: Relation, columns: Sequence[str]) -> Origin | None:
    """Return the origin of columns whose values are identical to the stored values.

    Return None if the columns have no origin, or if equal values of a column's type can differ, as 0.0 and -0.0 do.
    """
    origin = relation.find_origin(columns)
    return origin if origin is not None and all(is_exact(origin[0].find_kind(name)) for name in origin[1]) else None


@dataclass(frozen=True)
class UnknownRelation:
    """Rows about which nothing is known, for example those of a function or of a table at an earlier time.

    The rows may depend on all rows of `inputs`.
    """

    inputs: tuple[Relation, ...] = ()

    def has(self, column: str) -> None:
        return None

    def list_names(self) -> None:
        return None

    def find_kind(self, column: str) -> None:
        return None

    def find_origin(self, columns: Sequence[str]) -> None:
        return None

    def find_extreme(self, column: str) -> None:
        return None

    def find_source_rows(self) -> None:
        return None

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        return None

    def find_value_class(self, column: str) -> None:
        return None

    def push_down(self, condition: Condition | None) -> None:
        for relation in self.inputs:
            relation.push_down(None)


@dataclass
class LiteralRows:
    """Rows of literals, stored by column: VALUES, or UNNEST of an ARRAY.

    The columns have the names `_col0`, `_col1` and so on, which Trino displays for columns without an alias.
    """

    columns: tuple[tuple[Literal, ...], ...]

    def has(self, column: str) -> bool:
        return column in self.list_names()

    def list_names(self) -> tuple[str, ...]:
        return tuple(f"_col{number}" for number in range(len(self.columns)))

    def find_kind(self, column: str) -> str | None:
        kinds = {_LITERAL_TYPES.get(literal.kind) for literal in self.list_values(column) or ()}
        return kinds.pop() if len(kinds) == 1 else None

    def find_origin(self, columns: Sequence[str]) -> None:
        return None

    def find_extreme(self, column: str) -> None:
        return None

    def find_source_rows(self) -> None:
        return None

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        names = self.list_names()
        if column not in names:
            return None
        return tuple(literal for literal in self.columns[names.index(column)] if literal.kind != "null")

    def find_value_class(self, column: str) -> None:
        return None

    def push_down(self, condition: Condition | None) -> None:
        return None


@dataclass
class _SameColumns:
    """A base class of relations that have the columns of their `body`."""

    body: Relation

    def has(self, column: str) -> bool | None:
        return self.body.has(column)

    def list_names(self) -> tuple[str | None, ...] | None:
        return self.body.list_names()

    def find_kind(self, column: str) -> str | None:
        return self.body.find_kind(column)

    def find_origin(self, columns: Sequence[str]) -> Origin | None:
        return self.body.find_origin(columns)

    def find_extreme(self, column: str) -> StoredExtreme | None:
        return self.body.find_extreme(column)

    def find_source_rows(self) -> SourceRows | None:
        return self.body.find_source_rows()

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        return self.body.list_values(column)

    def find_value_class(self, column: str) -> str | None:
        return self.body.find_value_class(column)


@dataclass
class PushdownBarrier(_SameColumns):
    """A relation through which no condition is pushed, because its rows are counted or ordered.

    Attributes:
        dependencies: Further relations on which the rows depend. No condition is pushed to them.
    """

    dependencies: tuple[Relation, ...] = ()

    def find_source_rows(self) -> None:
        return None

    def push_down(self, condition: Condition | None) -> None:
        for relation in (self.body, *self.dependencies):
            relation.push_down(None)


@dataclass
class SetOperation:
    """UNION, INTERSECT or EXCEPT, with or without ALL.

    A condition on a column is pushed to the same column of both inputs if both columns have the same type. If the types
    differ, the engine compares converted values, so no condition is pushed. A literal in one input, such as `'a'` in
    `SELECT 'a' AS source, …`, is compared as a value of the type of the stored column in the other input.
    """

    left: Relation
    right: Relation

    def has(self, column: str) -> bool | None:
        return self.left.has(column)

    def list_names(self) -> tuple[str | None, ...] | None:
        return self.left.list_names()

    def find_kind(self, column: str) -> str | None:
        name = find_same_position(column, self.left.list_names(), self.right.list_names())
        kind = None if name is None else self.left.find_kind(column)
        return kind if name is not None and self.right.find_kind(name) == kind else None

    def find_origin(self, columns: Sequence[str]) -> None:
        return None

    def find_extreme(self, column: str) -> None:
        return None

    def find_source_rows(self) -> None:
        return None

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        return None

    def find_value_class(self, column: str) -> str | None:
        # Both inputs must have the same group of types, because a column of the result has values of both.
        name = find_same_position(column, self.left.list_names(), self.right.list_names())
        class_ = None if name is None else self.left.find_value_class(column)
        if name is None or class_ not in _COMPARED_CLASSES:
            return None
        return class_ if self.right.find_value_class(name) == class_ else None

    def push_down(self, condition: Condition | None) -> None:
        def keep(atom: Atom) -> Atom | None:
            if isinstance(atom, ColumnComparison) and self.find_value_class(atom.column[1]) is not None:
                return atom
            return atom.move_columns(lambda reference: reference if self.find_kind(reference[1]) is not None else None)

        # A comparison has the same meaning in both inputs only if their columns have types of the same class.
        common_part = weaken(condition, keep)

        def find_right_reference(reference: ColumnReference) -> ColumnReference | None:
            name = find_same_position(reference[1], self.left.list_names(), self.right.list_names())
            return None if name is None else (0, name)

        # The columns have the names of the left input. Columns of the right input correspond to them by position.
        self.left.push_down(common_part)
        self.right.push_down(move(common_part, find_right_reference))


def find_same_position(
    column: str, names: Sequence[str | None] | None, other_names: Sequence[str | None] | None
) -> str | None:
    """Return the name in `other_names` at the position that `column` has in `names`.

    If `column` is a field of a struct, the result is the field with the same name of the struct in `other_names`.

    Returns:
        The name in `other_names`. None if one of the two names does not occur exactly once, or if the lists are unknown
        or have different lengths.
    """
    if names is None or other_names is None or len(names) != len(other_names):
        return None
    field = ""
    if column not in names:
        column, dot, path = column.partition(".")
        field = dot + path
    if names.count(column) != 1:
        return None
    other = other_names[names.index(column)]
    return None if other is None or other_names.count(other) != 1 else other + field


@dataclass
class RenamedColumns:
    """Rows whose columns are renamed by position: `AS t (a, b)`."""

    inner: Relation
    columns: tuple[str, ...]

    def has(self, column: str) -> bool | None:
        return column in self.columns

    def list_names(self) -> tuple[str | None, ...] | None:
        return self.columns

    def find_kind(self, column: str) -> str | None:
        name = self._find_inner_name(column)
        return None if name is None else self.inner.find_kind(name)

    def find_origin(self, columns: Sequence[str]) -> Origin | None:
        names = [name for column in columns if (name := self._find_inner_name(column)) is not None]
        return self.inner.find_origin(names) if len(names) == len(columns) else None

    def find_extreme(self, column: str) -> StoredExtreme | None:
        name = self._find_inner_name(column)
        return None if name is None else self.inner.find_extreme(name)

    def find_source_rows(self) -> SourceRows | None:
        return self.inner.find_source_rows()

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        name = self._find_inner_name(column)
        return None if name is None else self.inner.list_values(name)

    def find_value_class(self, column: str) -> str | None:
        name = self._find_inner_name(column)
        return None if name is None else self.inner.find_value_class(name)

    def push_down(self, condition: Condition | None) -> None:
        def find_inner_reference(reference: ColumnReference) -> ColumnReference | None:
            name = self._find_inner_name(reference[1])
            return None if name is None else (0, name)  # A relation has the number 0 in its own conditions.

        self.inner.push_down(move(condition, find_inner_reference))

    def _find_inner_name(self, column: str) -> str | None:
        """Return the name of the column in the inner relation, or None if the name is ambiguous or unknown."""
        return find_same_position(column, self.columns, self.inner.list_names())


@dataclass
class NamedQuery:
    """A query with a name in WITH.

    After all uses of the name have added their conditions, one condition is pushed to the query.
    """

    inner: Relation
    collected: list[Condition | None] = field(default_factory=list)
    _has: dict[str, bool | None] = field(default_factory=dict)
    _kinds: dict[str, str | None] = field(default_factory=dict)
    _names: list[tuple[str | None, ...] | None] = field(default_factory=list)
    _origins: dict[tuple[str, ...], Origin | None] = field(default_factory=dict)
    _extremes: dict[str, StoredExtreme | None] = field(default_factory=dict)
    _stored_rows: list[SourceRows | None] = field(default_factory=list)
    _values: dict[str, tuple[Literal, ...] | None] = field(default_factory=dict)
    _classes: dict[str, str | None] = field(default_factory=dict)
    """These fields are caches.

    Without them, a chain of names that each use the next name twice needs exponential time.
    """

    def has(self, column: str) -> bool | None:
        if column not in self._has:
            self._has[column] = self.inner.has(column)
        return self._has[column]

    def list_names(self) -> tuple[str | None, ...] | None:
        if not self._names:
            self._names.append(self.inner.list_names())
        return self._names[0]

    def find_kind(self, column: str) -> str | None:
        if column not in self._kinds:
            self._kinds[column] = self.inner.find_kind(column)
        return self._kinds[column]

    def find_origin(self, columns: Sequence[str]) -> Origin | None:
        key = tuple(columns)
        if key not in self._origins:
            self._origins[key] = self.inner.find_origin(columns)
        return self._origins[key]

    def find_extreme(self, column: str) -> StoredExtreme | None:
        if column not in self._extremes:
            self._extremes[column] = self.inner.find_extreme(column)
        return self._extremes[column]

    def find_source_rows(self) -> SourceRows | None:
        if not self._stored_rows:
            self._stored_rows.append(self.inner.find_source_rows())
        return self._stored_rows[0]

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        if column not in self._values:
            self._values[column] = self.inner.list_values(column)
        return self._values[column]

    def find_value_class(self, column: str) -> str | None:
        if column not in self._classes:
            self._classes[column] = self.inner.find_value_class(column)
        return self._classes[column]

    def push_down(self, condition: Condition | None) -> None:
        self.collected.append(condition)

    def push_collected(self) -> None:
        wanted_condition = any_of(self.collected) if self.collected else None
        if len(self.collected) > 1 and wanted_condition is not None and wanted_condition.size > SHARED_LEAVES_MAX:
            wanted_condition = None
        self.inner.push_down(wanted_condition)


@dataclass
class WithClause(_SameColumns):
    """A query with its WITH clause. Each name in the clause may use the names that precede it."""

    named: tuple[NamedQuery, ...]

    def push_down(self, condition: Condition | None) -> None:
        self.body.push_down(condition)
        # Only the body and later queries read from a named query. Each of them adds its conditions to the named query,
        # so the queries are processed from last to first.
        for query in reversed(self.named):
            query.push_collected()
