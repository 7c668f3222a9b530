"""Which rows of a query's tables can matter to its answer, read off the plan that Spark's analyser made of it.

The rule kept: for each relation, rows for which its predicate is not true can be left out and the plan's rows stay the
same, whatever the tables hold. So can rows that have no match in one of its `joins`: no row of the other relation,
for which that one's predicate is true (and its joins hold), that is equal and not null in all the columns.

Two things are followed from the tables upwards, for each attribute (Spark's ids tell them apart):
- the relations that a condition on it `reaches`: to ask it of the attribute's values, here, is as good as asking it of
  the relation's rows, before everything in between. Not through LIMIT, windows or the side of an outer join that is
  filled up with nulls, nor through anything that is not known here;
- the relation's column that all its values, but nulls, are `from`. That holds through much more.

A condition asked of rows that reach a relation becomes part of its predicate. An equality of an attribute that reaches
one, and of one that is from another one, becomes a join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from seamark.connector.spark.query.catalyst import Catalyst, Node, items
from seamark.connector.spark.query.conditions import ColumnPredicate, Conditions, SparkColumn

NODES_MAX = 2_000
"""Of one query's plan; more are not looked at."""
_SAME_ROWS = frozenset(
    {"SubqueryAlias", "View", "Sort", "Distinct", "RepartitionByExpression", "Repartition", "ResolvedHint"}
    | {"Generate", "Intersect", "Except", "PipeOperator"}
)
"""Nodes whose rows are their first child's, by the same attributes; in another order, more than once or not at all, but
whichever others there are."""
_UNDER_EACH = frozenset({"GlobalLimit", "LocalLimit", "Offset", "Tail", "Sample", "Window"})
"""Nodes whose attributes, as far as they are their child's, have no other values."""
_LEFT, _RIGHT, _BOTH = (True, False), (False, True), (True, True)
_JOINS = {
    "Inner$": (_BOTH, _BOTH),
    "Cross$": (_BOTH, _BOTH),
    "LeftOuter$": (_RIGHT, _LEFT),
    "RightOuter$": (_LEFT, _RIGHT),
    "LeftSemi$": (_BOTH, _LEFT),
    "LeftAnti$": (_RIGHT, _LEFT),
    "ExistenceJoin": (_RIGHT, _LEFT),
}
"""Of which sides (left, right) a row matters only where the join's condition is true; and which sides a condition on
the join's rows reaches."""
_ROWS_OF_LEFT = ("LeftSemi$", "LeftAnti$", "ExistenceJoin")
_NO_KEYS = ("float", "double", "boolean", "binary")


@dataclass(eq=False)
class Relation:
    """One that a mark stands at (`places.py`); a mark has more where a WITH is used more than once."""

    mark: int
    columns: Mapping[int, SparkColumn]
    """By the ids of attributes."""
    parts: list[ColumnPredicate] = field(default_factory=list)
    """What its rows have to meet."""
    joins: list[tuple[Relation, tuple[tuple[str, str], ...]]] = field(default_factory=list)
    """Others, and pairs of equal columns, its own first."""


V = TypeVar("V")
_Reach: TypeAlias = dict[int, dict[Relation, SparkColumn]]
_From: TypeAlias = dict[int, tuple[Relation, SparkColumn]]


@dataclass(frozen=True)
class _Rows:
    """What is known of a node's."""

    reach: _Reach
    origin: _From


_NOTHING = _Rows({}, {})


class TooLarge(Exception):
    """A plan, to be looked at."""


class Relations:
    """Of one plan. `relation_of` makes one of a leaf, or none."""

    def __init__(self, catalyst: Catalyst, relation_of: Callable[[Node], Relation | None]) -> None:
        self._catalyst = catalyst
        self._relation_of = relation_of
        self._conditions = Conditions(catalyst)
        self._left = NODES_MAX
        self.found: list[Relation] = []

    def read(self, plan: Node) -> None:
        """Raises TooLarge."""
        self._rows(plan)

    def _rows(self, node: Node) -> _Rows:
        self._left -= 1
        if self._left < 0:
            raise TooLarge
        for one in items(node.subqueries()):  # what could not be made joins: plans of their own
            self._rows(one)
        kind = self._catalyst.kind(node)
        if kind == "Join":
            return self._join(node)
        children = [self._rows(one) for one in items(node.children())]
        if not children:
            return self._leaf(node)
        below = children[0]
        match kind:
            case "Filter":
                self._ask(node.condition(), below.reach, below.origin)
            case "Project":
                below = self._projected(items(node.projectList()), below)
            case "Aggregate":
                below = self._grouped(node, below)
            case "Union":
                below = _Rows(self._united(node, children), {})
            case _ if kind in _UNDER_EACH:
                below = _Rows({}, below.origin)
            case _ if kind not in _SAME_ROWS:
                return _NOTHING
        return below if node.deterministic() else _Rows({}, below.origin)

    def _leaf(self, node: Node) -> _Rows:
        found = self._relation_of(node)
        if found is None:
            return _NOTHING
        self.found.append(found)
        reach: _Reach = {number: {found: column} for number, column in found.columns.items()}
        return _Rows(reach, {number: (found, column) for number, column in found.columns.items()})

    # Nodes

    def _projected(self, outputs: Iterable[Node], below: _Rows) -> _Rows:
        reach: _Reach = {}
        origin: _From = {}
        for output in outputs:
            source = self._attribute(output)
            if source is None:
                continue
            number = self._catalyst.id_of(output)
            if source in below.reach:
                reach[number] = below.reach[source]
            if source in below.origin:
                origin[number] = below.origin[source]
        return _Rows(reach, origin)

    def _grouped(self, node: Node, below: _Rows) -> _Rows:
        """By the keys, groups are left out whole."""
        keys = {self._attribute(one) for one in items(node.groupingExpressions())}
        outputs = [one for one in items(node.aggregateExpressions()) if self._attribute(one) in keys - {None}]
        return self._projected(outputs, below)

    def _united(self, node: Node, children: list[_Rows]) -> _Reach:
        """A condition is asked of each part. No value is surely from one of them."""
        reach: _Reach = {}
        inputs = [items(one.output()) for one in items(node.children())]
        for at, output in enumerate(items(node.output())):
            kind = self._catalyst.type_of(output)
            targets: dict[Relation, SparkColumn] = {}
            for given, child in zip(inputs, children, strict=True):
                if self._catalyst.type_of(given[at]) == kind:
                    targets |= child.reach.get(self._catalyst.id_of(given[at]), {})
            reach[self._catalyst.id_of(output)] = targets
        return reach

    def _join(self, node: Node) -> _Rows:
        left, right = self._rows(node.left()), self._rows(node.right())
        kind = self._catalyst.kind(node.joinType())
        limited, reached = _JOINS.get(kind, ((False, False), (False, False)))
        origin = _apart(left.origin, right.origin)
        if node.condition().isDefined():
            self._ask(node.condition().get(), _apart(*_of_sides(left, right, limited)), origin)
        reach = _apart(*_of_sides(left, right, reached))
        if kind in _ROWS_OF_LEFT:
            origin = left.origin
        return _Rows(reach if node.deterministic() else {}, origin)

    # Conditions

    def _ask(self, condition: Node, reach: _Reach, origin: _From) -> None:
        """Only those rows matter for which it is true."""
        equal: dict[tuple[Relation, Relation], list[tuple[str, str]]] = {}
        for part in self._catalyst.operands(condition, "And"):
            for target in self._reached(part, reach):
                columns = {number: each[target] for number, each in reach.items() if target in each}
                said = self._conditions.predicate(part, columns)
                if said is not None:
                    target.parts.append(said)
            if self._catalyst.kind(part) == "EqualTo":
                for one, other in ((part.left(), part.right()), (part.right(), part.left())):
                    for target, partner, pair in self._pairs(one, other, reach, origin):
                        equal.setdefault((target, partner), []).append(pair)
        for (target, partner), pairs in equal.items():
            target.joins.append((partner, tuple(dict(pairs).items())))

    def _reached(self, condition: Node, reach: _Reach) -> list[Relation]:
        found: dict[Relation, None] = {}
        for one in items(condition.references().toSeq()):
            found |= dict.fromkeys(reach.get(self._catalyst.id_of(one), {}))
        return list(found)

    def _pairs(
        self, one: Node, other: Node, reach: _Reach, origin: _From
    ) -> Iterable[tuple[Relation, Relation, tuple[str, str]]]:
        """Of the equality of two attributes: which relation is limited, by which, and in which columns."""
        (number, kind), (source, their_kind) = self._key(one), self._key(other)
        if source not in origin or not _are_keys(kind, their_kind):
            return
        partner, theirs = origin[source]
        for target, column in reach.get(number, {}).items():
            if target is not partner and (column.kind, theirs.kind) == (kind, their_kind):
                yield target, partner, (column.name, theirs.name)

    def _key(self, node: Node) -> tuple[int, str]:
        """An attribute, or one whose whole numbers have been made wider, and its type; -1 for anything else."""
        if self._catalyst.kind(node) == "Cast" and self._catalyst.type_of(node) == "bigint":
            node = node.child()
            if self._catalyst.type_of(node) != "int":
                return -1, ""
        if self._catalyst.kind(node) != "AttributeReference":
            return -1, ""
        return self._catalyst.id_of(node), self._catalyst.type_of(node)

    def _attribute(self, output: Node) -> int | None:
        """That an output is, by another name or not."""
        if self._catalyst.kind(output) == "Alias":
            output = output.child()
        return self._catalyst.id_of(output) if self._catalyst.kind(output) == "AttributeReference" else None


def _are_keys(one: str, other: str) -> bool:
    whole = ("int", "bigint")
    return one not in _NO_KEYS and (one == other or (one in whole and other in whole))


def _of_sides(left: _Rows, right: _Rows, sides: tuple[bool, bool]) -> tuple[_Reach, _Reach]:
    return left.reach if sides[0] else {}, right.reach if sides[1] else {}


def _apart(left: dict[int, V], right: dict[int, V]) -> dict[int, V]:
    """Of both sides; an attribute that is on both is neither's."""
    return {number: one for number, one in (left | right).items() if (number in left) != (number in right)}
