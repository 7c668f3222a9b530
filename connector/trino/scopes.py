"""The blocks of a query, and which rows of their tables matter.

A block is one SELECT: sources joined in some way, and conditions upon them. What is asked of a block's result from
above (`wanted`, on its output columns) is asked of its sources, too, where nothing stands between that counts or orders
rows; what is asked of a group's key is asked of the rows that the group is made of. The rule kept: rows of a source may
be left out only where, whatever else there is in the data, the statement's answer stays the same.

- What every row of an inner join must meet is asked of both sides.
- An outer join keeps its preserved side's rows whatever ON says: ON is asked of the other side only. What stands above
  it is asked of the other side only where it is true for no row of nulls: else a row that lost its partner would pass.
- What is asked of a set operation's column is asked of the same column of both parts, where it is of one type in both.
- What holds of a column holds of one that is equal to it, where both are of one type.
- A name in WITH is read by all who use it: its query is asked for what any of them wants.
- Subqueries within expressions are queries of their own. Nothing is asked of them from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

from sqlglot import exp

from connector.trino.conditions import (
    All,
    Condition,
    Leaf,
    Place,
    Reader,
    all_of,
    any_of,
    places_of,
    rejects_null,
    weakened,
)
from connector.trino.lexing import Unclear

Columns: TypeAlias = Mapping[str, str]
"""A table's columns in lower case, and their Iceberg types."""


_EXACT = frozenset(("boolean", "int", "long", "decimal", "date", "time", "timestamp", "timestamptz", "string", "uuid"))
"""Types whose equal values are one value: floats have two zeros, and what is no primitive is not compared."""


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

    def ask(self, wanted: Condition | None) -> None:
        """Rows for which `wanted` is not true do not matter. Its places are (0, column). Said once."""


@dataclass
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

    def ask(self, wanted: Condition | None) -> None:
        self.asked = wanted


class Unknown:
    """Rows of which nothing is known: VALUES, UNNEST, a function, a table in the past."""

    def has(self, column: str) -> None:
        return None

    def names(self) -> None:
        return None

    def kind(self, column: str) -> None:
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

    def kind(self, column: str) -> None:
        return None

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
        return kind if name is not None and _base(kind) in _EXACT and self.right.kind(name) == kind else None

    def ask(self, wanted: Condition | None) -> None:
        both = weakened(wanted, lambda leaf: leaf if self.kind(leaf.place[1]) is not None else None)

        def on_right(leaf: Leaf) -> Leaf | None:
            name = same_place(leaf.place[1], self.left.names(), self.right.names())
            return None if name is None else replace(leaf, place=(0, name))

        self.left.ask(both)
        self.right.ask(weakened(both, on_right))


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

    def ask(self, wanted: Condition | None) -> None:
        def keep(leaf: Leaf) -> Leaf | None:
            name = self._before(leaf.place[1])
            return None if name is None else replace(leaf, place=(0, name))

        self.inner.ask(weakened(wanted, keep))

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

    def ask(self, wanted: Condition | None) -> None:
        self.body.ask(wanted)
        for one in reversed(self.named):
            one.settle()


@dataclass(frozen=True)
class Joined:
    """`keeps_left`: a left row stays without a partner, beside nulls."""

    left: Tree
    right: Tree
    keeps_left: bool = False
    keeps_right: bool = False
    on: exp.Expr | None = None


Tree: TypeAlias = int | Joined
"""A number is that of a source."""


def _sources(tree: Tree) -> frozenset[int]:
    return frozenset({tree}) if isinstance(tree, int) else _sources(tree.left) | _sources(tree.right)


@dataclass
class Source:
    """`name`: by which its columns are qualified."""

    result: Result
    name: str | None


@dataclass
class Block:
    """One SELECT. `passes`: what is asked of its result may be asked of its sources (`queries.py`)."""

    projections: list[exp.Expr]
    where: exp.Expr | None
    sources: list[Source]
    tree: Tree | None
    merged: frozenset[str]
    """Columns in USING: a name that stands for two."""
    passes: bool
    inner: list[Result]
    """Subqueries within its expressions."""
    reader: Reader

    def has(self, column: str) -> bool | None:
        answers: set[bool | None] = {False}
        for projection in self.projections:
            star = _star(projection)
            if star is None:
                answers.add(_output_name(projection) == column)
            elif star == "":
                answers |= {source.result.has(column) for source in self.sources}
            else:
                answers |= {source.result.has(column) for source in self._qualified(star)} or {None}
        return True if True in answers else None if None in answers else False

    def names(self) -> tuple[str | None, ...] | None:
        if any(_star(one) is not None for one in self.projections):
            return None
        return tuple(_output_name(one) for one in self.projections)

    def kind(self, column: str) -> str | None:
        place = self._output(column)
        return None if place is None else self._kind(place)

    def ask(self, wanted: Condition | None) -> None:
        for query in self.inner:
            query.ask(None)
        if self.tree is None:
            return
        above = weakened(wanted, self._below) if self.passes else None
        if self.where is not None:
            above = self._implied(all_of([self.reader.read(self.where, self._place), above]), self._same(self.where))
        self._ask(self.tree, above)

    def _ask(self, tree: Tree, wanted: Condition | None) -> None:
        """`wanted` holds for each row of the join that matters."""
        if isinstance(tree, int):
            alone = _restricted(wanted, frozenset({tree}))
            self.sources[tree].result.ask(weakened(alone, lambda leaf: replace(leaf, place=(0, leaf.place[1]))))
            return
        on = None if tree.on is None else self.reader.read(tree.on, self._place)
        same = [] if tree.on is None else self._same(tree.on)
        left, right = _sources(tree.left), _sources(tree.right)
        for side, own, other, kept, other_kept in (
            (tree.left, left, right, tree.keeps_left, tree.keeps_right),
            (tree.right, right, left, tree.keeps_right, tree.keeps_left),
        ):
            asked = _restricted(wanted, own)
            if other_kept and not rejects_null(asked):
                asked = None
            if not kept:  # so it counts only beside a partner that matters, with which it meets ON
                beside = self._implied(all_of([_restricted(wanted, other), on]), same)
                asked = all_of([asked, _restricted(beside, own)])
            self._ask(side, asked)

    def _same(self, node: exp.Expr) -> list[frozenset[Place]]:
        """Columns of one type that are equal wherever `node` is true."""
        found: list[frozenset[Place]] = []
        for part in node.flatten() if isinstance(node, exp.And) else (node,):
            while isinstance(part, exp.Paren):
                part = part.this
            if isinstance(part, exp.And):
                found += self._same(part)
            sides = (part.this, part.expression) if type(part) is exp.EQ else ()
            places = [self._place(side) for side in sides if type(side) is exp.Column]
            kinds = {None if place is None else self._kind(place) for place in places}
            if len(places) == 2 and len(kinds) == 1 and _base(kinds.pop()) in _EXACT:
                found.append(frozenset(place for place in places if place is not None))
        return found

    def _kind(self, place: Place) -> str | None:
        return self.sources[place[0]].result.kind(place[1])

    def _implied(self, condition: Condition | None, same: list[frozenset[Place]]) -> Condition | None:
        """With what it says of one column said of its equals, too."""
        if condition is None:
            return None
        given = condition.parts if isinstance(condition, All) else (condition,)
        parts: list[Condition | None] = list(given)
        for part in given:
            places = places_of(part)
            if len(places) != 1 or not same:
                continue
            equal = set(places)
            while more := {place for group in same if group & equal for place in group} - equal:
                equal |= more
            parts += [weakened(part, partial(replace, place=place)) for place in sorted(equal - places)]
        return all_of(parts)

    def _below(self, leaf: Leaf) -> Leaf | None:
        """A condition on an output column, on the source's column that it is."""
        place = self._output(leaf.place[1])
        return None if place is None else replace(leaf, place=place)

    def _output(self, name: str) -> Place | None:
        """Two columns of one name cannot be told apart from above, so where one is found there is no other."""
        stars = []
        for projection in self.projections:
            star = _star(projection)
            if star is not None:
                stars.append(star)
            elif _output_name(projection) == name:
                column = projection.this if isinstance(projection, exp.Alias) else projection
                return self._place(column) if type(column) is exp.Column else None
        if len(stars) != 1:
            return None
        return self._found(name) if stars[0] == "" else self._found(name, stars[0])

    def _place(self, column: exp.Column) -> Place | None:
        parts = column.parts
        if not all(isinstance(part, exp.Identifier) for part in parts) or len(parts) > 2:
            return None  # a schema or a field of a struct
        names = [folded(part.name) for part in parts]
        return self._found(names[-1], *names[:-1])

    def _found(self, name: str, qualifier: str | None = None) -> Place | None:
        if "$" in name or "." in name:  # hidden columns; what the catalog would take for a field of a struct
            return None
        if qualifier is not None:
            matching = self._qualified(qualifier)
            if len(matching) != 1 or matching[0].result.has(name) is False:
                return None
            return self.sources.index(matching[0]), name
        if name in self.merged:
            return None
        owners = [number for number, source in enumerate(self.sources) if source.result.has(name)]
        if len(self.sources) == 1 and self.sources[0].result.has(name) is None:
            owners = [0]
        # Were it a column of another source as well, the name would be ambiguous, and the statement fail.
        return (owners[0], name) if len(owners) == 1 else None

    def _qualified(self, qualifier: str) -> list[Source]:
        return [source for source in self.sources if source.name == qualifier]


def _base(kind: str | None) -> str:
    return "" if kind is None else kind.partition("(")[0].strip()


def _restricted(condition: Condition | None, sources: frozenset[int]) -> Condition | None:
    return weakened(condition, lambda leaf: leaf if leaf.place[0] in sources else None)


def _star(projection: exp.Expr) -> str | None:
    """The qualifier of a star, "" where it has none; None for what is no star."""
    if isinstance(projection, exp.Star):
        return ""
    if type(projection) is exp.Column and isinstance(projection.this, exp.Star):
        qualifiers = projection.parts[:-1]
        return folded(qualifiers[-1].name) if len(qualifiers) == 1 else "\0"  # of a schema's table, or a struct's
    return None


def _output_name(projection: exp.Expr) -> str | None:
    if isinstance(projection, exp.Alias):
        return folded(projection.alias)
    if type(projection) is exp.Column or isinstance(projection, exp.Dot):
        return folded(projection.name) or None
    return None
