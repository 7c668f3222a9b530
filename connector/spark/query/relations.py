"""Conditions on the needed rows of a query's tables, from the plan of Spark's analyser.

Invariant: for each relation, rows for which one of its `parts` is not true can be left out, and the plan's rows stay
the same for any data. The same applies to rows without a match in one of its `joins`: a row of the other relation that
meets its own parts and joins, and is equal and not null in all the columns.

The analysis goes from the tables upwards, and keeps two maps for each attribute, which has an id in Spark:
- `reach`: the relations to which a condition on the attribute can be pushed down, and its column there. A condition is
  not pushed through LIMIT, the nullable side of an outer join, and nodes that are not supported.
- `origin`: the relation and column that all values except nulls come from. It passes through more kinds of nodes.

A condition on rows is added to the relations that its attributes reach. An equality of an attribute that reaches one
relation with an attribute that originates from another relation becomes a join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from seamark.connector.plans.conditions import Condition
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import Conditions, SparkColumn
from seamark.connector.spark.scala import items

NODES_MAX = 2_000
"""The limit for one query's plan."""
_SAME_ROWS = frozenset(
    {"SubqueryAlias", "View", "Sort", "Distinct", "RepartitionByExpression", "Repartition", "ResolvedHint"}
    | {"Generate", "Intersect", "Except", "PipeOperator"}
)
"""Nodes whose rows are rows of their first child with the same attributes, in any order and number. Whether a row is in
the result does not depend on other rows, except on equal rows."""
_UNDER_EACH = frozenset({"GlobalLimit", "LocalLimit", "Offset", "Tail", "Sample"})
"""Nodes whose attributes have the values of the child's attributes, but whose rows depend on other rows."""
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
"""The sides (left, right) whose rows are needed only if the join's condition is true, and the sides to which a
condition on the join's rows can be pushed."""
_ROWS_OF_LEFT = ("LeftSemi$", "LeftAnti$", "ExistenceJoin")
_NO_KEYS = ("float", "double", "boolean", "binary")


@dataclass(eq=False)
class Relation:
    """A relation at a marker (`name_positions.py`). A marker has several relations if a name in WITH is used several
    times."""

    mark: int
    columns: Mapping[int, SparkColumn]
    """By the ids of attributes."""
    parts: list[Condition] = field(default_factory=list)
    """Conditions that each needed row meets."""
    joins: list[tuple[Relation, tuple[tuple[str, str], ...]]] = field(default_factory=list)
    """Other relations, and pairs of equal columns: its own, the other's."""


V = TypeVar("V")
_Reach: TypeAlias = dict[int, dict[Relation, SparkColumn]]
_From: TypeAlias = dict[int, tuple[Relation, SparkColumn]]


@dataclass(frozen=True)
class _Rows:
    """The attributes of a node's rows."""

    reach: _Reach
    origin: _From


_NOTHING = _Rows({}, {})


class TooLarge(Exception):
    """The plan has more than `NODES_MAX` nodes."""


class Relations:
    """The relations of one plan. `relation_of` returns the relation of a leaf, or None."""

    def __init__(self, catalyst: Catalyst, relation_of: Callable[[Node], Relation | None]) -> None:
        self._catalyst = catalyst
        self._relation_of = relation_of
        self._conditions = Conditions(catalyst)
        self._left = NODES_MAX
        self._with_subqueries = True
        self.found: list[Relation] = []

    def read(self, plan: Node) -> None:
        """Raises TooLarge."""
        self._with_subqueries = self._catalyst.has_subqueries(plan)
        self._rows(plan)

    def _rows(self, node: Node) -> _Rows:
        self._left -= 1
        if self._left < 0:
            raise TooLarge
        if self._with_subqueries:
            for one in items(node.subqueries()):  # subqueries that Spark's rules did not turn into joins
                self._rows(one)
        kind = self._catalyst.kind(node)
        if kind == "Join":
            return self._join(node)
        children = [self._rows(one) for one in self._catalyst.children(node)]
        if not children:
            return self._leaf(node)
        below = children[0]
        match kind:
            case "Filter":
                self._add(node.condition(), below.reach, below.origin)
            case "Project":
                below = self._projected(items(node.projectList()), below)
            case "Aggregate":
                below = self._grouped(node, below)
            case "Union":
                below = _Rows(self._united(node, children), {})
            case "Window":
                keys = {self._attribute(one) for one in items(node.partitionSpec())}
                below = _Rows({at: each for at, each in below.reach.items() if at in keys}, below.origin)
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
        """A condition on grouping keys leaves out entire groups."""
        keys = {self._attribute(one) for one in items(node.groupingExpressions())}
        outputs = [one for one in items(node.aggregateExpressions()) if self._attribute(one) in keys - {None}]
        return self._projected(outputs, below)

    def _united(self, node: Node, children: list[_Rows]) -> _Reach:
        """A condition is pushed to each part. The origin of a value is unknown."""
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
            self._add(node.condition().get(), _apart(*_of_sides(left, right, limited)), origin)
        reach = _apart(*_of_sides(left, right, reached))
        if kind in _ROWS_OF_LEFT:
            origin = left.origin
        return _Rows(reach if node.deterministic() else {}, origin)

    # Conditions

    def _add(self, condition: Node, reach: _Reach, origin: _From) -> None:
        """Adds a condition: only rows for which it is true are needed."""
        equal: dict[tuple[Relation, Relation], list[tuple[str, str]]] = {}
        for part in self._catalyst.operands(condition, "And"):
            for target in self._reached(part, reach):
                columns = {number: each[target] for number, each in reach.items() if target in each}
                found = self._conditions.read(part, columns)
                if found is not None:
                    target.parts.append(found)
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
        """The joins that the equality of two attributes implies: filtered relation, other relation, columns."""
        (number, kind), (source, their_kind) = self._key(one), self._key(other)
        if source not in origin or not _are_keys(kind, their_kind):
            return
        partner, theirs = origin[source]
        for target, column in reach.get(number, {}).items():
            if target is not partner and (column.kind, theirs.kind) == (kind, their_kind):
                yield target, partner, (column.name, theirs.name)

    def _key(self, node: Node) -> tuple[int, str]:
        """The attribute's id and type; also of an int that is cast to bigint. -1 for other expressions."""
        if self._catalyst.kind(node) == "Cast" and self._catalyst.type_of(node) == "bigint":
            node = node.child()
            if self._catalyst.type_of(node) != "int":
                return -1, ""
        if self._catalyst.kind(node) != "AttributeReference":
            return -1, ""
        return self._catalyst.id_of(node), self._catalyst.type_of(node)

    def _attribute(self, output: Node) -> int | None:
        """The attribute of an output, possibly renamed; None for other expressions."""
        if self._catalyst.kind(output) == "Alias":
            output = output.child()
        return self._catalyst.id_of(output) if self._catalyst.kind(output) == "AttributeReference" else None


def _are_keys(one: str, other: str) -> bool:
    whole = ("int", "bigint")
    return one not in _NO_KEYS and (one == other or (one in whole and other in whole))


def _of_sides(left: _Rows, right: _Rows, sides: tuple[bool, bool]) -> tuple[_Reach, _Reach]:
    return left.reach if sides[0] else {}, right.reach if sides[1] else {}


def _apart(left: dict[int, V], right: dict[int, V]) -> dict[int, V]:
    """Both sides together, without attributes that are on both."""
    return {number: one for number, one in (left | right).items() if (number in left) != (number in right)}
