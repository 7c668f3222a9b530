"""Conditions on the needed rows of a query's tables, from the plan of Spark's analyser.

Invariant: for each relation, rows for which one of its `parts` is not true can be left out, and the plan's rows stay
the same for any data. The same applies to rows without a match in one of its `joins`: a row of the other relation that
meets its own parts and joins, and is equal and not null in all the columns.

The analysis goes from the tables upwards, and keeps two maps for each attribute, which has an id in Spark:
- `reach`: the relations to which a condition on the attribute can be pushed down, and its column there. A condition is
  not pushed through LIMIT, the nullable side of an outer join, and nodes that are not supported.
- `origin`: the relation and column that all values except nulls come from. It passes through more kinds of nodes.

A condition on rows is added to the relations that its attributes reach. An equality of an attribute that reaches one
relation with an attribute that originates from another relation becomes a join. The equality of the day, month or year
of an attribute also becomes one. With constant rows (VALUES) an equality becomes a list of values. A disjunction of
conditions on several relations becomes alternative joins of a relation that is joined with them in the same rows
(`_Rows.equal`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from seamark.connector.plans.conditions import Atom, ColumnComparison, Condition, any_of, weaken, without_functions
from seamark.connector.plans.literals import Literal
from seamark.connector.spark.query.aggregates import conditions_of_rows, extreme_of
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import Conditions, SparkColumn
from seamark.connector.spark.query.constant_rows import constant_columns
from seamark.connector.spark.query.periods import period_of
from seamark.connector.spark.scala import items
from seamark.formats.iceberg.types.transforms import IDENTITY

NODES_MAX = 2_000
"""The limit for one query's plan."""
EXPANDED_MAX = 500
"""Values of a row of GROUPING SETS that are read: a value takes calls to the JVM."""
_SAME_ROWS = frozenset(
    {"SubqueryAlias", "View", "Sort", "Distinct", "RepartitionByExpression", "Repartition", "ResolvedHint"}
    | {"Generate", "Intersect", "Except", "PipeOperator"}
)
"""Nodes whose rows are rows of their first child with the same attributes, in any order and number. Whether a row is in
the result does not depend on other rows, except on equal rows."""
_EACH_ROW = frozenset(
    {"SubqueryAlias", "View", "Sort", "RepartitionByExpression", "Repartition", "ResolvedHint", "Filter", "Project"}
)
"""Nodes of which each row is made from one row of the child."""
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
    joins: list[RelationJoin] = field(default_factory=list)
    values: Mapping[str, tuple[Literal, ...]] | None = None
    """Of constant rows, which have no marker: the values of each column besides null."""


@dataclass(frozen=True, eq=False)
class RelationJoin:
    """The other fields as those of `connector.plans.scan.Join`."""

    partner: Relation
    on: tuple[tuple[str, str], ...]
    """Pairs of equal columns: its own, the partner's."""
    transform: str = IDENTITY
    where: Condition | None = None
    any_of: int | None = None
    unless: Condition | None = None


V = TypeVar("V")
_Reach: TypeAlias = dict[int, dict[Relation, SparkColumn]]
_From: TypeAlias = dict[int, tuple[Relation, SparkColumn]]


@dataclass(frozen=True)
class _Rows:
    """The attributes of a node's rows."""

    reach: _Reach
    origin: _From
    equal: tuple[tuple[Relation, RelationJoin], ...] = ()
    """Joins that each row meets, with the relation that has them: the values of both are from the same row."""


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
        self._subqueries: _From = {}
        """Of the attributes of scalar subqueries."""
        self._alternatives = 0
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
                self._subqueries |= self._rows(one).origin
        kind = self._catalyst.kind(node)
        if kind == "Join":
            return self._join(node)
        children = [self._rows(one) for one in self._catalyst.children(node)]
        if not children:
            return self._leaf(node)
        below = children[0]
        equal = below.equal if kind in _EACH_ROW else ()
        match kind:
            case "Filter":
                equal = self._add(node.condition(), below.reach, below.origin, equal)
            case "Project":
                below = self._projected(items(node.projectList()), below)
            case "Aggregate":
                below = self._grouped(node, below)
            case "Union":
                below = _Rows(self._united(node, children), {})
            case "Window":
                keys = {self._attribute(one) for one in items(node.partitionSpec())}
                below = _Rows({at: each for at, each in below.reach.items() if at in keys}, below.origin)
            case "Expand":
                below = self._expanded(node, below)
            case "Generate":
                below = _Rows(below.reach, below.origin | self._constants(node))
            case _ if kind in _UNDER_EACH:
                below = _Rows({}, below.origin)
            case _ if kind not in _SAME_ROWS:
                return _NOTHING
        return _Rows(below.reach, below.origin, equal) if node.deterministic() else _Rows({}, below.origin)

    def _leaf(self, node: Node) -> _Rows:
        found = self._relation_of(node)
        if found is None:
            return _Rows({}, self._constants(node))
        self.found.append(found)
        reach: _Reach = {number: {found: column} for number, column in found.columns.items()}
        return _Rows(reach, {number: (found, column) for number, column in found.columns.items()})

    def _constants(self, node: Node) -> _From:
        """The columns of VALUES, and of an array's elements."""
        columns = constant_columns(self._catalyst, node)
        if not columns:
            return {}
        rows = Relation(-1, {}, values={column.name: values for _, column, values in columns})
        return {number: (rows, column) for number, column, _ in columns}

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
        groups, given = items(node.groupingExpressions()), items(node.aggregateExpressions())
        keys = {self._attribute(one) for one in groups}
        found = self._projected([one for one in given if self._attribute(one) in keys - {None}], below)
        extremes: set[Relation] = set()
        for output in given:
            extreme = extreme_of(self._catalyst, output)
            source = None if extreme is None else self._attribute(extreme)
            # Two of a relation may be from two of its rows: a join is with one row that has all values.
            if source in below.origin and below.origin[source][0] not in extremes:
                extremes.add(below.origin[source][0])
                found.origin[self._catalyst.id_of(output)] = below.origin[source]
        if not groups and node.deterministic():
            conditions = conditions_of_rows(self._catalyst, given)
            targets = dict.fromkeys(one for part in conditions for one in self._reached(part, below.reach))
            for target in targets:
                columns = _columns(below.reach, target)
                either = any_of(self._conditions.read_with_likes([one], columns) for one in conditions)
                target.parts += [] if either is None else [either]
        return found

    def _expanded(self, node: Node, below: _Rows) -> _Rows:
        """Of GROUPING SETS, UNPIVOT and others: several rows of each row. A grouping key is null outside of its
        sets."""
        projections, outputs = items(node.projections()), items(node.output())
        if len(projections) * len(outputs) > EXPANDED_MAX:
            return _NOTHING
        reach: _Reach = {}
        origin: _From = {}
        for output, *values in zip(outputs, *map(items, projections), strict=True):
            nulls = [self._catalyst.kind(one) == "Literal" and one.value() is None for one in values]
            given = {self._attribute(one) for one, null in zip(values, nulls, strict=True) if not null}
            source = given.pop() if len(given) == 1 else None
            if source is None:
                continue
            number = self._catalyst.id_of(output)
            if source in below.reach:
                each = below.reach[source]
                reach[number] = {
                    one: column._replace(or_null=column.or_null or any(nulls)) for one, column in each.items()
                }
            if source in below.origin:
                origin[number] = below.origin[source]
        return _Rows(reach, origin)

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
        equal = (*(left.equal if reached[0] else ()), *(right.equal if reached[1] else ()))
        if node.condition().isDefined():
            sides = _apart(*_of_sides(left, right, limited))
            added = self._add(node.condition().get(), sides, origin, equal if limited == _BOTH else ())
            equal = added if limited == _BOTH else equal
        reach = _apart(*_of_sides(left, right, reached))
        if kind in _ROWS_OF_LEFT:
            origin = left.origin
        return _Rows(reach, origin, equal) if node.deterministic() else _Rows({}, origin)

    # Conditions

    def _add(
        self, condition: Node, reach: _Reach, origin: _From, equal: tuple[tuple[Relation, RelationJoin], ...]
    ) -> tuple[tuple[Relation, RelationJoin], ...]:
        """Adds a condition: only rows for which it is true are needed. `equal` of these rows."""
        parts = self._catalyst.operands(condition, "And")
        by_target: dict[Relation, list[Node]] = {}
        pairs: dict[tuple[Relation, Relation, str], list[tuple[str, str]]] = {}
        for part in parts:
            for target in self._reached(part, reach):
                by_target.setdefault(target, []).append(part)
            if self._catalyst.kind(part) == "EqualTo":
                for one, other in ((part.left(), part.right()), (part.right(), part.left())):
                    for target, partner, transform, pair in self._pairs(one, other, reach, origin):
                        pairs.setdefault((target, partner, transform), []).append(pair)
        for target, nodes in by_target.items():
            found = self._conditions.read_with_likes(nodes, _columns(reach, target))
            target.parts += [] if found is None else [found]
        for (target, partner, transform), columns in pairs.items():
            if partner.values is not None:
                target.parts += [
                    ColumnComparison((0, own), "IN", partner.values[theirs], transform)
                    for own, theirs in columns
                    if transform == IDENTITY
                ]
                continue
            # A transform has a single pair.
            for on in [tuple(dict(columns).items())] if transform == IDENTITY else [(one,) for one in columns]:
                join = RelationJoin(partner, on, transform)
                target.joins.append(join)
                equal = (*equal, (target, join))
        for part in parts:
            if self._catalyst.kind(part) == "Or":
                self._add_alternatives(self._catalyst.operands(part, "Or"), reach, equal)
        return equal

    def _add_alternatives(
        self, branches: Sequence[Node], reach: _Reach, equal: tuple[tuple[Relation, RelationJoin], ...]
    ) -> None:
        """`d.x = 1 OR e.y = 2` is true for a row only if its partner in d or its partner in e meets its condition."""
        seen = {relation for each in reach.values() for relation in each}
        for target in {one: None for one, _ in equal if one in seen}:
            partners = {join.partner: join for one, join in equal if one is target and join.partner in seen}
            own: list[Condition] = []
            joins: list[RelationJoin] = []
            for branch in branches:
                nodes = self._catalyst.operands(branch, "And")
                found = without_functions(self._read(nodes, reach, target))  # rows of a dimension are compared with it
                join = None if found is not None else self._joined(nodes, reach, partners)
                own += [] if found is None else [found]
                joins += [] if join is None else [join]
            if joins and len(own) + len(joins) == len(branches):
                self._alternatives += 1
                unless = any_of(own) if own else None
                target.joins += [replace(one, any_of=self._alternatives, unless=unless) for one in joins]

    def _joined(
        self, nodes: Sequence[Node], reach: _Reach, partners: Mapping[Relation, RelationJoin]
    ) -> RelationJoin | None:
        """The join with a partner on which the nodes have a condition."""
        for partner, join in partners.items():
            where = weaken(self._read(nodes, reach, partner), lambda atom: atom if atom.rejects_null else None)
            if where is not None:
                return replace(join, where=where)
        return None

    def _read(self, nodes: Sequence[Node], reach: _Reach, target: Relation) -> Condition | None:
        found = self._conditions.read_with_likes(nodes, _columns(reach, target))
        return weaken(found, _of_column)

    def _reached(self, condition: Node, reach: _Reach) -> list[Relation]:
        found: dict[Relation, None] = {}
        for one in items(condition.references().toSeq()):
            found |= dict.fromkeys(reach.get(self._catalyst.id_of(one), {}))
        return list(found)

    def _pairs(
        self, one: Node, other: Node, reach: _Reach, origin: _From
    ) -> Iterator[tuple[Relation, Relation, str, tuple[str, str]]]:
        """The joins that the equality of two expressions implies: filtered relation, other relation, transform,
        columns."""
        source, their_kind = self._key(other)
        partner, theirs = origin.get(source) or self._subqueries.get(source) or (None, None)
        if partner is None or theirs is None or theirs.kind != their_kind:
            return
        number, kind = self._key(one)
        if number >= 0 and _are_keys(kind, their_kind):
            for target, column in reach.get(number, {}).items():
                if target is not partner and column.kind == kind:
                    yield target, partner, IDENTITY, (column.name, theirs.name)
        period = period_of(self._catalyst, one)
        if period is not None and their_kind in period.partners:
            for target, column in reach.get(self._catalyst.id_of(period.column), {}).items():
                if target is not partner and column.kind == self._catalyst.type_of(period.column):
                    yield target, partner, period.transform, (column.name, theirs.name)

    def _key(self, node: Node) -> tuple[int, str]:
        """The attribute's id and type; also of an int that is cast to bigint, and of a scalar subquery. -1 for other
        expressions."""
        if self._catalyst.kind(node) == "Cast" and self._catalyst.type_of(node) == "bigint":
            node = node.child()
            if self._catalyst.type_of(node) != "int":
                return -1, ""
        if self._catalyst.kind(node) == "ScalarSubquery":
            node = node.plan().output().head()
        if self._catalyst.kind(node) != "AttributeReference":
            return -1, ""
        return self._catalyst.id_of(node), self._catalyst.type_of(node)

    def _attribute(self, output: Node) -> int | None:
        """The attribute of an output, possibly renamed; None for other expressions."""
        if self._catalyst.kind(output) == "Alias":
            output = output.child()
        return self._catalyst.id_of(output) if self._catalyst.kind(output) == "AttributeReference" else None


def _columns(reach: _Reach, target: Relation) -> dict[int, SparkColumn]:
    return {number: each[target] for number, each in reach.items() if target in each}


def _of_column(atom: Atom) -> Atom | None:
    """A comparison of a whole column, by which the server also filters rows of a dimension."""
    return atom if isinstance(atom, ColumnComparison) and "." not in atom.column[1] else None


def _are_keys(one: str, other: str) -> bool:
    whole = ("int", "bigint")
    return one not in _NO_KEYS and (one == other or (one in whole and other in whole))


def _of_sides(left: _Rows, right: _Rows, sides: tuple[bool, bool]) -> tuple[_Reach, _Reach]:
    return left.reach if sides[0] else {}, right.reach if sides[1] else {}


def _apart(left: dict[int, V], right: dict[int, V]) -> dict[int, V]:
    """Both sides together, without attributes that are on both."""
    return {number: one for number, one in (left | right).items() if (number in left) != (number in right)}
