"""One SELECT block: its joined sources, and how conditions are pushed down to them.

- A condition on the rows of an inner join is pushed to both sides.
- An outer join keeps all rows of its preserved side, so ON is pushed to the other side only. A condition from above the
  join is pushed to the other side only if it is true for no row of nulls: otherwise a preserved row whose partner was
  removed would pass.
- A condition on a grouping key is pushed to the rows of the groups.
- A condition on a column is also true for an equal column of the same type.
- If a row is used only with a join partner, and its columns equal columns of a stored table, its values are among the
  values of these columns. The same is true of IN and EXISTS, if the subquery creates no rows itself.
- A subquery in an expression is a separate query; no condition is pushed into it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sqlglot import exp

from seamark.connector.trino.statements.conditions import (
    All,
    Condition,
    ConditionReader,
    Match,
    Place,
    all_of,
    move,
    places_of,
    rejects_null,
)
from seamark.connector.trino.statements.scopes import Origin, Scope, canonical_name, is_exact

_WHOLE = frozenset(("int", "long"))
_Equal: TypeAlias = tuple[Place, Place]


@dataclass(frozen=True)
class JoinedSource:
    """`keeps_left`: a left row without a partner is kept, with nulls."""

    left: Tree
    right: Tree
    keeps_left: bool = False
    keeps_right: bool = False
    on: exp.Expr | None = None
    using: tuple[str, ...] = ()


Tree: TypeAlias = int | JoinedSource
"""A number is the position of a source in the block."""


def _sources(tree: Tree) -> frozenset[int]:
    return frozenset({tree}) if isinstance(tree, int) else _sources(tree.left) | _sources(tree.right)


def _inner(tree: Tree) -> tuple[list[Tree], list[JoinedSource]]:
    """The operands of nested inner joins, and these joins."""
    if isinstance(tree, int) or tree.keeps_left or tree.keeps_right:
        return [tree], []
    (left, of_left), (right, of_right) = _inner(tree.left), _inner(tree.right)
    return [*left, *right], [*of_left, *of_right, tree]


@dataclass
class BlockSource:
    """`name` qualifies its columns."""

    result: Scope
    name: str | None


@dataclass
class Block:
    """One SELECT. `passes`: conditions on its result may be pushed to its sources (`queries.py`)."""

    projections: list[exp.Expr]
    where: exp.Expr | None
    sources: list[BlockSource]
    tree: Tree | None
    passes: bool
    needs_rows: bool
    """If no row of the sources meets WHERE, the block has no row."""
    inner: list[tuple[exp.Expr, Scope]]
    """Subqueries in its expressions."""
    reader: ConditionReader
    _kinds: dict[str, str | None] = field(default_factory=dict)
    """Cache: without it, nested blocks would need exponential time."""

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
        if column not in self._kinds:
            place = self._output(column)
            self._kinds[column] = None if place is None else self._kind(place)
        return self._kinds[column]

    def origin(self, columns: Sequence[str]) -> Origin | None:
        places = [self._output(one) for one in columns]
        sources = {None if place is None else place[0] for place in places}
        number = sources.pop() if len(sources) == 1 else None
        if number is None:
            return None
        return self.sources[number].result.origin([place[1] for place in places if place is not None])

    def push_down(self, wanted: Condition | None) -> None:
        for _, query in self.inner:
            query.push_down(None)
        if self.tree is None:
            return
        above = move(wanted, lambda place: self._output(place[1])) if self.passes else None
        if self.where is not None:
            equal = self._equals(self.where)
            above = self._implied(all_of([self._held(self.where, equal), above]), equal)
        self._ask(self.tree, above)

    def _ask(self, tree: Tree, wanted: Condition | None) -> None:
        """`wanted` is true for each row of the join that can change the result."""
        if isinstance(tree, int):
            alone = _restricted(wanted, frozenset({tree}))
            self.sources[tree].result.push_down(move(alone, lambda place: (0, place[1])))
        elif tree.keeps_left or tree.keeps_right:
            self._ask_outer(tree, wanted)
        else:
            self._ask_inner(tree, wanted)

    def _ask_inner(self, tree: JoinedSource, wanted: Condition | None) -> None:
        """Nested inner joins are processed together: each row meets every ON, for any number of tables."""
        sides, joins = _inner(tree)
        equal = [one for join in joins for one in (*self._equals(join.on), *self._merges(join))]
        ons = [self._held(join.on, []) for join in joins]
        held = self._implied(all_of([wanted, *ons, *self._partners(equal)]), equal)
        number_of = {source: number for number, side in enumerate(sides) for source in _sources(side)}
        asked: list[list[Condition | None]] = [[] for _ in sides]
        for part in held.parts if isinstance(held, All) else () if held is None else (held,):
            numbers = {number_of[source] for source, _ in places_of(part) if source in number_of}
            for number in numbers:
                asked[number].append(part)
        for side, parts in zip(sides, asked, strict=True):
            self._ask(side, all_of(parts))

    def _ask_outer(self, tree: JoinedSource, wanted: Condition | None) -> None:
        equal = [*self._equals(tree.on), *self._merges(tree)]
        on = self._held(tree.on, equal)
        left, right = _sources(tree.left), _sources(tree.right)
        for side, own, other, kept, other_kept in (
            (tree.left, left, right, tree.keeps_left, tree.keeps_right),
            (tree.right, right, left, tree.keeps_right, tree.keeps_left),
        ):
            asked = _restricted(wanted, own)
            if other_kept and not rejects_null(asked):
                asked = None
            if not kept:  # a row is used only with a partner that matters and meets ON
                beside = self._implied(all_of([_restricted(wanted, other), on]), equal)
                asked = all_of([asked, _restricted(beside, own)])
            self._ask(side, asked)

    def _held(self, node: exp.Expr | None, equal: list[_Equal]) -> Condition | None:
        """A condition that is true for each row where `node` is true and these columns are equal."""
        read = None if node is None else self.reader.read(node, self._place)
        return all_of([read, *self._partners(equal), *self._found_in(node)])

    # Equal columns

    def _equals(self, node: exp.Expr | None) -> list[_Equal]:
        """Columns that are equal for each row where `node` is true."""
        found = []
        for part in _conjuncts(node):
            sides = (part.this, part.expression) if type(part) is exp.EQ else ()
            places = [self._place(side) for side in sides if type(side) is exp.Column]
            known = [place for place in places if place is not None]
            if len(known) == 2 and _comparable(*(self._kind(place) for place in known)):
                found.append((known[0], known[1]))
        return found

    def _merges(self, join: JoinedSource) -> Iterator[_Equal]:
        """The equal columns of USING."""
        for column in join.using:
            one, other = (self._within(side, column) for side in (join.left, join.right))
            if one is not None and other is not None and _comparable(self._kind(one), self._kind(other)):
                yield one, other

    def _partners(self, equal: list[_Equal]) -> Iterator[Match]:
        """Columns of a source whose values are among those of another source."""
        pairs: defaultdict[tuple[int, int], list[tuple[Place, str]]] = defaultdict(list)
        for one, other in equal:
            for here, there in ((one, other), (other, one)):
                if here[0] != there[0]:
                    pairs[here[0], there[0]].append((here, there[1]))
        for (_, partner), found in pairs.items():
            yield from _matches(found, self.sources[partner].result)

    def _found_in(self, node: exp.Expr | None) -> Iterator[Match]:
        """Columns whose values are among the values of subqueries in `node`, for each row where it is true."""
        for part in _conjuncts(node):
            match part:
                case exp.In() if {name for name, value in part.args.items() if value} == {"this", "query"}:
                    query = self._query(part.args["query"])
                    names = None if query is None else query.names()
                    place = self._place(part.this) if type(part.this) is exp.Column else None
                    name = names[0] if names is not None and len(names) == 1 else None
                    if query is None or place is None or name is None:
                        continue
                    if _comparable(self._kind(place), query.kind(name)):
                        yield from _matches([(place, name)], query)
                case exp.Exists():
                    query = self._query(part.this)
                case _:
                    continue
            if isinstance(query, Block) and query.needs_rows:
                yield from self._correlated(query)

    def _query(self, node: exp.Expr) -> Scope | None:
        return next((result for one, result in self.inner if one is node), None)

    def _correlated(self, query: Block) -> Iterator[Match]:
        """Columns of this block that the WHERE of a subquery compares with its own columns."""
        pairs: defaultdict[int, list[tuple[Place, str]]] = defaultdict(list)
        for part in _conjuncts(query.where):
            if type(part) is not exp.EQ or type(part.this) is not exp.Column or type(part.expression) is not exp.Column:
                continue
            for inside, outside in ((part.this, part.expression), (part.expression, part.this)):
                own = query._place(inside)
                place = self._place(outside) if query._is_foreign(outside) else None
                if own is not None and place is not None and _comparable(self._kind(place), query._kind(own)):
                    pairs[own[0]].append((place, own[1]))
        for number, found in pairs.items():
            yield from _matches(found, query.sources[number].result)

    def _is_foreign(self, column: exp.Column) -> bool:
        """Whether it is certain that the column is not one of this block, by its qualifier, and is no struct field."""
        first = column.parts[0]
        if not isinstance(first, exp.Identifier) or len(column.parts) > 2:
            return False
        name = canonical_name(first.name)
        if len(column.parts) == 2 and self._qualified(name):
            return False
        return all(source.result.has(name) is False for source in self.sources)

    def _kind(self, place: Place) -> str | None:
        return self.sources[place[0]].result.kind(place[1])

    def _implied(self, condition: Condition | None, equal: list[_Equal]) -> Condition | None:
        """The condition, and its parts on single columns also for the columns that are equal to these."""
        same = [frozenset(pair) for pair in equal if self._kind(pair[0]) == self._kind(pair[1])]
        if condition is None or not same:
            return condition
        given = condition.parts if isinstance(condition, All) else (condition,)
        parts: list[Condition | None] = list(given)
        for part in given:
            places = places_of(part)
            if len(places) != 1:
                continue
            equals = set(places)
            while more := {place for group in same if group & equals for place in group} - equals:
                equals |= more
            parts += [_at(part, place) for place in sorted(equals - places)]
        return all_of(parts)

    def _output(self, name: str) -> Place | None:
        """None if the name may be ambiguous: more than one star, or a star beside other columns."""
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
        names = [canonical_name(part.name) for part in parts]
        return self._found(names[-1], *names[:-1])

    def _found(self, name: str, qualifier: str | None = None) -> Place | None:
        if qualifier is not None:
            matching = self._qualified(qualifier)
            if len(matching) != 1 or matching[0].result.has(name) is False or not _is_plain(name):
                return None
            return self.sources.index(matching[0]), name
        return None if self.tree is None else self._within(self.tree, name)

    def _within(self, tree: Tree, name: str) -> Place | None:
        """The column that an unqualified name refers to in a join.

        A column merged by USING has the value of the left side, or of the right side if the row has no left side. It is
        the column of one side if the join keeps no row of the other side without a partner.
        """
        if isinstance(tree, int):
            has = self.sources[tree].result.has(name)
            if has is None:
                others = (source.result.has(name) for number, source in enumerate(self.sources) if number != tree)
                has = all(other is False for other in others)
            return (tree, name) if has and _is_plain(name) else None
        left, right = self._within(tree.left, name), self._within(tree.right, name)
        if name not in tree.using:
            # If both sides had the column, the name would be ambiguous, and the statement would fail.
            return left or right if left is None or right is None else None
        if left is None or right is None or (tree.keeps_left and tree.keeps_right):
            return None
        kind = self._kind(left)
        if kind is None or self._kind(right) != kind:  # otherwise it is converted
            return None
        return left if not tree.keeps_right else right if is_exact(kind) else None

    def _qualified(self, qualifier: str) -> list[BlockSource]:
        return [source for source in self.sources if source.name == qualifier]


def _conjuncts(node: exp.Expr | None) -> Iterator[exp.Expr]:
    for part in node.flatten() if isinstance(node, exp.And) else () if node is None else (node,):
        while isinstance(part, exp.Paren):
            part = part.this
        if isinstance(part, exp.And):
            yield from _conjuncts(part)
        else:
            yield part


def _comparable(one: str | None, other: str | None) -> bool:
    """Whether values of the two types are equal only if they are identical."""
    return is_exact(one) and (one == other or {one, other} == _WHOLE)


def _matches(pairs: list[tuple[Place, str]], partner: Scope) -> list[Match]:
    """A single match, in one row of the table, if all columns of the partner come from the same table."""
    found = partner.origin([column for _, column in pairs])
    if found is not None:
        places = [place for place, _ in pairs]
        return [Match(tuple(sorted(zip(places, found[1], strict=True))), found[0])]
    return [] if len(pairs) == 1 else [match for pair in pairs for match in _matches([pair], partner)]


def _at(condition: Condition, place: Place) -> Condition | None:
    return move(condition, lambda _: place)


def _restricted(condition: Condition | None, sources: frozenset[int]) -> Condition | None:
    return move(condition, lambda place: place if place[0] in sources else None)


def _is_plain(name: str) -> bool:
    """No hidden column, and no name that the catalog would read as a struct field."""
    return "$" not in name and "." not in name


def _star(projection: exp.Expr) -> str | None:
    """The qualifier of a star, "" for a star without one; None if the projection is no star."""
    if isinstance(projection, exp.Star):
        return ""
    if type(projection) is exp.Column and isinstance(projection.this, exp.Star):
        qualifiers = projection.parts[:-1]
        return (
            canonical_name(qualifiers[-1].name) if len(qualifiers) == 1 else "\0"
        )  # a table with its schema, or a struct
    return None


def _output_name(projection: exp.Expr) -> str | None:
    if isinstance(projection, exp.Alias):
        return canonical_name(projection.alias)
    if type(projection) is exp.Column or isinstance(projection, exp.Dot):
        return canonical_name(projection.name) or None
    return None
