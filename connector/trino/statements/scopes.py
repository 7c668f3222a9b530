"""The rows of a query: of its tables, subqueries, set operations and names in WITH. Blocks are in `blocks.py`.

What is asked of a result from above is asked of what it is made of, where nothing stands between that counts or orders
rows. The rule kept: rows of a source may be left out only where, whatever else there is in the data, the statement's
answer stays the same.

- What is asked of a set operation's column is asked of the same column of both parts, where it is of one type in both.
- A name in WITH is read by all who use it: its query is asked for what any of them wants.

Where a column's values come from is another question (`origin`), and rows that are counted, ordered or left out are no
doubt in it: whatever value there is, some row of the table has it that matters itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from sqlglot import exp

from seamark.connector.trino.statements.conditions import Condition, Place, any_of, moved
from seamark.connector.trino.statements.lexer import Unclear

Columns: TypeAlias = Mapping[str, str]
"""A table's columns in lower case, and their Iceberg types."""
COMPUTED = ""
"""In the place of a type: the column of a view whose values are not those that some table has stored."""

_EXACT = frozenset(("boolean", "int", "long", "decimal", "date", "time", "timestamp", "timestamptz", "string", "uuid"))
"""Types whose equal values are one value: floats have two zeros, and what is no primitive is not compared."""


def is_exact(kind: str | None) -> bool:
    """Of a type whose values are equal only where they are the same."""
    return kind is not None and kind.partition("(")[0].strip() in _EXACT


def folded(name: str) -> str:
    """As Trino compares names, quoted or not (trinodb/trino#17). Raises Unclear where its ways to do so differ."""
    low = name.lower()
    if not name.isascii():
        # Java's equalsIgnoreCase goes character by character by way of upper case; toLowerCase does not.
        upper = [one.upper() if len(one.upper()) == 1 else one for one in name]
        if "".join(one.lower() if len(one.lower()) == 1 else one for one in upper) != low:
            raise Unclear
    return low


class Result(Protocol):
    """The rows of a query, of a table, or of whatever else stands in FROM."""

    def has(self, column: str) -> bool | None:
        """Whether there is a column of that name; None where that is not known."""

    def names(self) -> tuple[str | None, ...] | None:
        """Of all columns in their order, None for one without a name; None where that is not known."""

    def kind(self, column: str) -> str | None:
        """The Iceberg type of a column that is a stored one as it is; None of others, and where it is not known."""

    def origin(self, columns: Sequence[str]) -> Origin | None:
        """Where a row of a stored table can be told for each row, which has the same values wherever these are no
        nulls."""

    def ask(self, wanted: Condition | None) -> None:
        """Rows for which `wanted` is not true do not matter. Its places are (0, column). Said once."""


@dataclass(eq=False)
class Table:
    """A reference to a stored table. `asked` is what holds for each row that matters, once all has been asked."""

    node: exp.Table
    columns: Columns | None
    asked: Condition | None = None

    def has(self, column: str) -> bool | None:
        return None if self.columns is None else column in self.columns

    def names(self) -> None:
        return None

    def kind(self, column: str) -> str | None:
        return None if self.columns is None else self.columns.get(column)

    def origin(self, columns: Sequence[str]) -> Origin | None:
        known = self.columns or {}
        return (self, tuple(columns)) if all(is_exact(known.get(one)) for one in columns) else None

    def ask(self, wanted: Condition | None) -> None:
        self.asked = wanted


Origin: TypeAlias = tuple[Table, tuple[str, ...]]
"""The table, and the columns as it has them."""


class Unknown:
    """Rows of which nothing is known: VALUES, UNNEST, a function, a table in the past."""

    def has(self, column: str) -> None:
        return None

    def names(self) -> None:
        return None

    def kind(self, column: str) -> None:
        return None

    def origin(self, columns: Sequence[str]) -> None:
        return None

    def ask(self, wanted: Condition | None) -> None:
        return None


@dataclass
class Cut:
    """Rows that are counted or ordered: nothing is asked of what is below."""

    inner: tuple[Result, ...]
    """The first one names the columns."""

    def has(self, column: str) -> bool | None:
        return self.inner[0].has(column)

    def names(self) -> tuple[str | None, ...] | None:
        return self.inner[0].names()

    def kind(self, column: str) -> str | None:
        return self.inner[0].kind(column)

    def origin(self, columns: Sequence[str]) -> Origin | None:
        return self.inner[0].origin(columns)

    def ask(self, wanted: Condition | None) -> None:
        for one in self.inner:
            one.ask(None)


@dataclass
class Combined:
    """UNION, INTERSECT or EXCEPT, ALL or not: what is asked of a column is asked of the same column of both.

    Where both have it of one type: else it is converted, and compared as what it became.
    """

    left: Result
    right: Result

    def has(self, column: str) -> bool | None:
        return self.left.has(column)

    def names(self) -> tuple[str | None, ...] | None:
        return self.left.names()

    def kind(self, column: str) -> str | None:
        name = same_place(column, self.left.names(), self.right.names())
        kind = None if name is None else self.left.kind(column)
        return kind if name is not None and is_exact(kind) and self.right.kind(name) == kind else None

    def origin(self, columns: Sequence[str]) -> None:
        return None

    def ask(self, wanted: Condition | None) -> None:
        both = moved(wanted, lambda place: place if self.kind(place[1]) is not None else None)

        def on_right(place: Place) -> Place | None:
            name = same_place(place[1], self.left.names(), self.right.names())
            return None if name is None else (0, name)

        self.left.ask(both)
        self.right.ask(moved(both, on_right))


def same_place(column: str, names: Sequence[str | None] | None, others: Sequence[str | None] | None) -> str | None:
    """The one of `others` where `column` is among `names`; None where either is not there once."""
    if names is None or others is None or len(names) != len(others) or names.count(column) != 1:
        return None
    other = others[names.index(column)]
    return None if other is None or others.count(other) != 1 else other


@dataclass
class Renamed:
    """Rows whose columns have got other names, by position: `AS t (a, b)`."""

    inner: Result
    columns: tuple[str, ...]

    def has(self, column: str) -> bool | None:
        return column in self.columns

    def names(self) -> tuple[str | None, ...] | None:
        return self.columns

    def kind(self, column: str) -> str | None:
        name = self._before(column)
        return None if name is None else self.inner.kind(name)

    def origin(self, columns: Sequence[str]) -> Origin | None:
        names = [name for one in columns if (name := self._before(one)) is not None]
        return self.inner.origin(names) if len(names) == len(columns) else None

    def ask(self, wanted: Condition | None) -> None:
        def inside(place: Place) -> Place | None:
            name = self._before(place[1])
            return None if name is None else (0, name)

        self.inner.ask(moved(wanted, inside))

    def _before(self, column: str) -> str | None:
        """The name that the column has inside, where one place has the one, and one the other."""
        return same_place(column, self.columns, self.inner.names())


@dataclass
class Named:
    """A name in WITH. Its query is asked once, after all who use it have said what they want."""

    inner: Result
    wishes: list[Condition | None] = field(default_factory=list)
    _known: dict[str, bool | None] = field(default_factory=dict)
    _kinds: dict[str, str | None] = field(default_factory=dict)
    """Of names that use names twice all would be asked ever more often."""

    def has(self, column: str) -> bool | None:
        if column not in self._known:
            self._known[column] = self.inner.has(column)
        return self._known[column]

    def names(self) -> tuple[str | None, ...] | None:
        return self.inner.names()

    def kind(self, column: str) -> str | None:
        if column not in self._kinds:
            self._kinds[column] = self.inner.kind(column)
        return self._kinds[column]

    def origin(self, columns: Sequence[str]) -> Origin | None:
        return self.inner.origin(columns)

    def ask(self, wanted: Condition | None) -> None:
        self.wishes.append(wanted)

    def settle(self) -> None:
        self.inner.ask(any_of(self.wishes))


@dataclass
class With:
    """A query and the names in its WITH, of which each may use those before it."""

    body: Result
    named: tuple[Named, ...]

    def has(self, column: str) -> bool | None:
        return self.body.has(column)

    def names(self) -> tuple[str | None, ...] | None:
        return self.body.names()

    def kind(self, column: str) -> str | None:
        return self.body.kind(column)

    def origin(self, columns: Sequence[str]) -> Origin | None:
        return self.body.origin(columns)

    def ask(self, wanted: Condition | None) -> None:
        self.body.ask(wanted)
        for one in reversed(self.named):
            one.settle()
