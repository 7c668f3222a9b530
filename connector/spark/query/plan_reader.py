"""Converts the plan of Spark's analyser to relations of the block algebra (`connector/analysis/algebra/`).

Each node of the plan becomes a block or another relation. The columns of a relation are named by the ids of Spark's
attributes. Nodes that are not supported are opaque: no condition is pushed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from seamark.connector.analysis.algebra.blocks import Extreme, QueryBlock, SourceJoin
from seamark.connector.analysis.algebra.equivalences import (
    Equality,
    Limit,
    Predicate,
    can_limit,
    is_equality_exact,
    is_wider,
    iter_period_semi_joins,
    iter_range_semi_joins,
    list_partner_conditions,
)
from seamark.connector.analysis.algebra.extremes import is_beyond_extreme, iter_extreme_semi_joins
from seamark.connector.analysis.algebra.relations import (
    LiteralRows,
    PushdownBarrier,
    Relation,
    SetOperation,
    Table,
    UnknownRelation,
)
from seamark.connector.analysis.comparisons import FLIPPED
from seamark.connector.plans.conditions import ColumnReference, Condition, all_of, any_of, move
from seamark.connector.plans.literals import Literal
from seamark.connector.spark.query.aggregates import find_extreme, list_row_conditions
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import Conditions, SparkColumn, find_iceberg_kind
from seamark.connector.spark.query.constant_rows import find_constant_columns
from seamark.connector.spark.query.periods import find_period
from seamark.connector.spark.scala import to_list

PLAN_NODES_MAX = 2_000
"""The maximum number of nodes in the plan of one query."""
EXPANDED_VALUES_MAX = 500
"""The maximum number of values in the projections of GROUPING SETS. Each value costs several calls to the JVM."""
EXACT_PARTS_MAX = 20
"""The maximum number of parts of a condition that the reader tries to translate exactly.

A minimum or maximum has an exact limit only if its condition is translated exactly.
"""
_INEQUALITIES = {"LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">", "GreaterThanOrEqual": ">="}
_SAME_ROWS = frozenset(
    {"SubqueryAlias", "View", "Sort", "Distinct", "RepartitionByExpression", "Repartition", "ResolvedHint"}
    | {"PipeOperator"}
)
"""Nodes that return rows of their child with the same attributes, in any order and number.

A row is in the result independently of other rows, except of equal rows.
"""
_DEPENDENT_ROWS = frozenset({"GlobalLimit", "LocalLimit", "Offset", "Tail", "Sample"})
"""Nodes that return rows of their child unchanged, but choose a row by its position among other rows."""
_SET_OPERATIONS = frozenset({"Union", "Intersect", "Except"})
_KEPT_SIDES = {
    "Inner$": (False, False),
    "Cross$": (False, False),
    "LeftOuter$": (True, False),
    "RightOuter$": (False, True),
    "FullOuter$": (True, True),
    "LeftSemi$": (False, False),
    "LeftAnti$": (True, False),
    "ExistenceJoin": (True, False),
}
"""Whether unmatched rows of the left side and of the right side may be in the result, by join type."""
_ROWS_OF_LEFT = ("LeftSemi$", "LeftAnti$", "ExistenceJoin")
"""The join types whose results contain only rows of the left side."""


class PlanTooLarge(Exception):
    """Raised if a plan has more than `PLAN_NODES_MAX` nodes."""


@dataclass(frozen=True)
class MarkedTable:
    """A table that the query's text names, and its columns by the ids of their attributes.

    `marker` is the number of the reference in the text. Each reference gets an alias with its number (a marker), by
    which it is found in Spark's plan (`name_positions.py`).
    """

    marker: int
    columns: Mapping[int, SparkColumn]


@dataclass(frozen=True)
class AttributeOutputs:
    """The outputs of a query block (`QueryBlock`, one SELECT), named by the ids of Spark's attributes.

    The name of a struct field is the id, a dot and the field name.

    Attributes:
        references: The source column whose value an output has, by output. If it is None, each output is the column of
            the same name in the only source.
        output_names: The names of all outputs in order, or None if they are unknown.
        nullable: The outputs that may be null in a row in which the source column has a value, as in GROUPING SETS.
    """

    references: Mapping[str, ColumnReference] | None = None
    output_names: tuple[str, ...] | None = None
    nullable: frozenset[str] = frozenset()

    def has(self, name: str) -> bool | None:
        """Return whether the name is an output, or None if the outputs are unknown."""
        return None if self.output_names is None else name in self.output_names

    def list_names(self) -> tuple[str, ...] | None:
        return self.output_names

    def find_reference(self, name: str) -> ColumnReference | None:
        if self.references is None:
            return 0, name
        attribute, dot, path = name.partition(".")
        reference = self.references.get(attribute)
        return None if reference is None else (reference[0], f"{reference[1]}{dot}{path}")

    def find_literal(self, name: str) -> Literal | None:
        return None

    def may_be_null(self, name: str) -> bool:
        return name.partition(".")[0] in self.nullable


@dataclass(frozen=True)
class _Rows:
    """The rows of a plan node.

    Attributes:
        relation: The rows as a relation.
        columns: The attributes with unchanged stored values. The name of each column is the id of its attribute.
        sources: The ids of other attributes whose values come from a column: minima, maxima and constants.
    """

    relation: Relation
    columns: Mapping[int, SparkColumn] = field(default_factory=dict)
    sources: frozenset[int] = frozenset()

    @property
    def ids(self) -> set[int]:
        return {*self.columns, *self.sources}


class _Key(NamedTuple):
    """A column of an equality, and its Iceberg type (`kind`)."""

    reference: ColumnReference
    kind: str | None


class _ScalarQuery(NamedTuple):
    """A scalar subquery.

    Attributes:
        relation: The rows of the subquery, without the conditions that compare them with columns of an outer query.
        output: The output column of the subquery.
        kind: The Iceberg type of the output column.
        is_correlated: Whether the subquery has conditions that compare its rows with columns of an outer query.
    """

    relation: Relation
    output: str
    kind: str | None
    is_correlated: bool


class PlanReader:
    """Converts one plan to relations, and pushes its conditions down to its tables.

    Args:
        catalyst: Access to the plan.
        find_table: A function that returns the table of a leaf, or None.

    Attributes:
        tables: The tables of the plan, with their markers. After `read`, each table has the condition on its needed
            rows.
    """

    def __init__(self, catalyst: Catalyst, find_table: Callable[[Node], MarkedTable | None]) -> None:
        self.tables: dict[Table, int] = {}
        self._catalyst = catalyst
        self._find_table = find_table
        self._conditions = Conditions(catalyst)
        self._nodes_left = PLAN_NODES_MAX
        self._has_subqueries = True
        self._roots: list[Relation] = []
        self._subqueries: dict[int, Relation | None] = {}
        """The subqueries that Spark's rules did not turn into joins, by the ids of their first attributes.

        The value is None if several subqueries have the same id.
        """

    def push_conditions_down(self, plan: Node) -> None:
        """Push the conditions of the plan down to its tables.

        First, the whole plan is read. Then conditions are pushed down in the plan and in each subquery, because a
        condition may use the rows of another part.

        Raises:
            PlanTooLarge: The plan has too many nodes, or is too deep.
        """
        self._has_subqueries = self._catalyst.has_subqueries(plan)
        try:
            self._roots.append(self._read_rows(plan).relation)
            for relation in self._roots:
                relation.push_down(None)
        except RecursionError:
            raise PlanTooLarge from None

    def _read_rows(self, node: Node) -> _Rows:
        """Return the rows of a node. A node that is not deterministic stops the pushdown of conditions.

        Raises:
            PlanTooLarge: The plan has too many nodes.
        """
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise PlanTooLarge
        if self._has_subqueries:
            for subquery in to_list(node.subqueries()):
                self._read_subquery(subquery)
        kind = self._catalyst.find_kind(node)
        if kind == "Join":
            rows = self._read_join(node)
        else:
            children = [self._read_rows(child) for child in self._catalyst.list_children(node)]
            rows = self._read_leaf(node) if not children else self._read_node(node, kind, children)
        if not rows.ids or node.deterministic():
            return rows
        return _Rows(PushdownBarrier(rows.relation), rows.columns, rows.sources)

    def _read_subquery(self, plan: Node) -> None:
        """Read a subquery, and store its relation under the id of its first output.

        A comparison with the subquery uses this id to find the relation.
        """
        relation = self._read_rows(plan).relation
        self._roots.append(relation)
        outputs = plan.output()
        if outputs.isEmpty():
            return
        number = self._catalyst.read_id(outputs.head())
        # Two references to the same query of WITH have the same attribute ids. Such an id does not identify one of the
        # subqueries, so None is stored, and comparisons with these subqueries leave out no rows.
        self._subqueries[number] = None if number in self._subqueries else relation

    def _read_node(self, node: Node, kind: str, children: Sequence[_Rows]) -> _Rows:
        """Return the rows of a node with children, except a join.

        Conditions pass through nodes that keep each row unchanged (`_SAME_ROWS`). They stop at nodes whose rows depend
        on each other (`_DEPENDENT_ROWS`), such as LIMIT. A window function lets only conditions on its partition keys
        pass. No condition passes an unknown node.
        """
        child = children[0]
        match kind:
            case "Filter":
                condition = self._read_predicate(node.condition(), child)
                block = QueryBlock([child.relation], 0, AttributeOutputs(), where=condition, needs_rows=True)
                return self._keep_columns(block, child)
            case "Project":
                return self._read_project(to_list(node.projectList()), child)
            case "Aggregate":
                return self._read_aggregate(node, child)
            case "Window":
                keys = self._find_references(to_list(node.partitionSpec()), child)
                window = QueryBlock([child.relation], 0, AttributeOutputs(), partitions=[keys])
                return self._keep_columns(window, child)
            case "Expand":
                return self._read_expand(node, children)
            case "Generate":
                return self._read_generate(node, child)
            case _ if kind in _SET_OPERATIONS:
                return self._read_set_operation(node, children)
            case _ if kind in _DEPENDENT_ROWS:
                return self._keep_columns(PushdownBarrier(child.relation), child)
            case _ if kind in _SAME_ROWS:
                return child
        return _hide(children)

    def _keep_columns(self, relation: Relation, child: _Rows) -> _Rows:
        return _Rows(relation, child.columns, child.sources)

    # Leaves

    def _read_leaf(self, node: Node) -> _Rows:
        """Return the rows of a table that the query's text names, or of a constant relation."""
        marked_table = self._find_table(node)
        if marked_table is None:
            return self._read_constants(node)
        table = Table(dict(_list_kinds(marked_table.columns.values())))
        self.tables[table] = marked_table.marker
        outputs = AttributeOutputs({str(number): (0, column.name) for number, column in marked_table.columns.items()})
        columns = {number: _rename(column, str(number)) for number, column in marked_table.columns.items()}
        # The block returns exactly the rows of the table.
        return _Rows(QueryBlock([table], 0, outputs, needs_rows=True), columns)

    def _read_constants(self, node: Node) -> _Rows:
        """Read the columns of VALUES, or of the elements of an array. The rows of other nodes are unknown."""
        columns = find_constant_columns(self._catalyst, node)
        if not columns:
            return _Rows(UnknownRelation())
        rows = LiteralRows(tuple(values for _, _, values in columns))
        names = zip(columns, rows.list_names(), strict=True)
        outputs = AttributeOutputs({str(number): (0, name) for (number, _, _), name in names})
        return _Rows(QueryBlock([rows], 0, outputs), {}, frozenset(number for number, _, _ in columns))

    # Nodes with a child

    def _read_project(self, outputs: Iterable[Node], child: _Rows) -> _Rows:
        columns, sources, references = self._select_passed_columns(outputs, child)
        block = QueryBlock([child.relation], 0, AttributeOutputs(references), needs_rows=True)
        return _Rows(block, columns, sources)

    def _select_passed_columns(
        self, outputs: Iterable[Node], child: _Rows
    ) -> tuple[dict[int, SparkColumn], frozenset[int], dict[str, ColumnReference]]:
        """Select the outputs that are attributes of the child.

        Returns:
            The outputs with the unchanged values of a stored column, by id. The ids of other outputs whose values come
            from a column, such as minima. The references to the child's attributes, by the id of the output.
        """
        columns: dict[int, SparkColumn] = {}
        ids_without_column: set[int] = set()
        references: dict[str, ColumnReference] = {}
        for output in outputs:
            source = self._find_attribute(output)
            if source is None or source not in child.ids:
                continue
            number = self._catalyst.read_id(output)
            references[str(number)] = (0, str(source))
            if source in child.columns:
                columns[number] = _rename(child.columns[source], str(number))
            else:
                ids_without_column.add(number)
        return columns, frozenset(ids_without_column), references

    def _read_aggregate(self, node: Node, child: _Rows) -> _Rows:
        """Read an aggregation. A condition on its grouping keys removes whole groups.

        The source columns are recorded only for outputs that are grouping keys, minima or maxima. Without grouping
        keys, a row is needed only if it meets a condition in one of the aggregates, such as FILTER.
        """
        groups, outputs = to_list(node.groupingExpressions()), to_list(node.aggregateExpressions())
        keys = {self._find_attribute(key) for key in groups} - {None}
        columns, sources, references = self._select_passed_columns(
            [output for output in outputs if self._find_attribute(output) in keys], child
        )
        extremes = {}
        for output in outputs:
            extreme = find_extreme(self._catalyst, output)
            source = None if extreme is None else self._find_attribute(extreme.expression)
            if extreme is not None and source in child.ids:
                name = str(self._catalyst.read_id(output))
                extremes[name] = Extreme((0, str(source)), extreme.kind, extreme.is_filtered)
        filters = [] if groups else list_row_conditions(self._catalyst, outputs)
        can_filter = bool(filters) and bool(node.deterministic())
        needed_rows_condition = (
            any_of(self._read_condition([condition], child.columns) for condition in filters) if can_filter else None
        )
        block = QueryBlock(
            [child.relation],
            0,
            AttributeOutputs(references),
            keys=self._find_references(groups, child) if groups else None,
            aggregate_filter=None
            if needed_rows_condition is None
            else _move_to_sources(needed_rows_condition, dict.fromkeys(child.columns, 0)),
            extremes=extremes,
        )
        return _Rows(block, columns, sources | {int(name) for name in extremes})

    def _read_expand(self, node: Node, children: Sequence[_Rows]) -> _Rows:
        """Read GROUPING SETS, UNPIVOT and similar nodes, which create several rows from each row.

        A grouping key is null in the rows of the grouping sets without this key. An output is recorded only if all its
        values that are not null are the same attribute of the child. No condition is pushed to the child if there are
        more than `EXPANDED_VALUES_MAX` values.
        """
        child, projections, outputs = children[0], to_list(node.projections()), to_list(node.output())
        if len(projections) * len(outputs) > EXPANDED_VALUES_MAX:
            return _hide(children)
        columns: dict[int, SparkColumn] = {}
        sources: set[int] = set()
        references: dict[str, ColumnReference] = {}
        nullable: set[str] = set()
        for output, *values in zip(outputs, *map(to_list, projections), strict=True):
            nulls = [self._catalyst.find_kind(value) == "Literal" and value.value() is None for value in values]
            attributes = {self._find_attribute(value) for value, null in zip(values, nulls, strict=True) if not null}
            source = attributes.pop() if len(attributes) == 1 else None
            if source is None or source not in child.ids:
                continue
            number = self._catalyst.read_id(output)
            references[str(number)] = (0, str(source))
            nullable |= {str(number)} if any(nulls) else set()
            if source in child.columns:
                columns[number] = _rename(child.columns[source], str(number))
            else:
                sources.add(number)
        block = QueryBlock([child.relation], 0, AttributeOutputs(references, nullable=frozenset(nullable)))
        return _Rows(block, columns, frozenset(sources))

    # Nodes with several children

    def _read_set_operation(self, node: Node, children: Sequence[_Rows]) -> _Rows:
        """Read a set operation. A condition is pushed to each input, by the position of its columns.

        The outputs have new ids, so the columns are named by position between the inputs and the outputs. A value comes
        from an unknown input, so minima, maxima and constants of the inputs are not passed on.
        """
        inputs = [to_list(child.output()) for child in to_list(node.children())]
        outputs = to_list(node.output())
        order = tuple(map(str, range(len(outputs))))
        relation: Relation | None = None
        for attributes, child in zip(inputs, children, strict=True):
            positions = zip(order, attributes, strict=True)
            references = {name: (0, str(self._catalyst.read_id(attribute))) for name, attribute in positions}
            block = QueryBlock([child.relation], 0, AttributeOutputs(references, order))
            relation = block if relation is None else SetOperation(relation, block)
        columns, names = {}, {}
        for position, (output, attribute) in enumerate(zip(outputs, inputs[0], strict=True)):
            column = children[0].columns.get(self._catalyst.read_id(attribute))
            if column is not None and column.kind in ("struct", self._catalyst.read_type(output)):
                number = self._catalyst.read_id(output)
                columns[number] = _rename(column, str(number))
                names[str(number)] = (0, str(position))
        rows: Relation = UnknownRelation() if relation is None else relation
        return _Rows(QueryBlock([rows], 0, AttributeOutputs(names)), columns, sources=frozenset())

    def _read_generate(self, node: Node, child: _Rows) -> _Rows:
        """Read `explode` and other generators, which create any number of rows from each row."""
        constants = self._read_constants(node)
        if constants.ids:  # The generator returns constants, such as the elements of an array, for each row.
            return self._join_rows(child, constants, SourceJoin(0, 1))
        return self._keep_columns(QueryBlock([child.relation], 0, AttributeOutputs()), child)

    def _read_join(self, node: Node) -> _Rows:
        """Return the rows of a join.

        If the type of the join is unknown, both sides keep all rows and nothing is pushed through it. A semi-join or
        anti-join returns only the columns of the left side.
        """
        left, right = self._read_rows(node.left()), self._read_rows(node.right())
        kind = self._catalyst.find_kind(node.joinType())
        kept_sides = _KEPT_SIDES.get(kind)
        if kept_sides is None:
            rows = self._join_rows(left, right, SourceJoin(0, 1, keeps_left=True, keeps_right=True))
            return _Rows(PushdownBarrier(rows.relation), rows.columns, rows.sources)
        condition = node.condition()
        on = self._read_predicate(condition.get(), left, right) if condition.isDefined() else Predicate()
        rows = self._join_rows(left, right, SourceJoin(0, 1, *kept_sides, on))
        if kind not in _ROWS_OF_LEFT:
            return rows
        columns = {number: column for number, column in rows.columns.items() if number in left.columns}
        return _Rows(rows.relation, columns, rows.sources & left.sources)

    def _join_rows(self, left: _Rows, right: _Rows, tree: SourceJoin) -> _Rows:
        """Return the rows of a join, without the attributes that both sides have.

        Two references to the same query in WITH have the same attribute ids, so the side of such an attribute is
        unknown.
        """
        sources_by_id = _map_sources_by_id([left, right])
        references = {str(number): (source, str(number)) for number, source in sources_by_id.items()}
        block = QueryBlock([left.relation, right.relation], tree, AttributeOutputs(references))
        columns = {
            number: column
            for rows in (left, right)
            for number, column in rows.columns.items()
            if number in sources_by_id
        }
        sources = frozenset(number for number in left.sources | right.sources if number in sources_by_id)
        return _Rows(block, columns, sources)

    # Predicates

    def _read_predicate(self, condition: Node, *sources: _Rows) -> Predicate:
        """Translate the condition of a node to conditions, equalities and semi-joins on the columns of its sources.

        The operands of AND are read one by one. In an equality, each side may be the column that the other side limits.
        """
        sources_by_id = _map_sources_by_id(sources)
        columns = {
            number: column for rows in sources for number, column in rows.columns.items() if number in sources_by_id
        }
        parts = self._catalyst.list_operands(condition, "And")
        conditions: list[Condition | None] = [_move_to_sources(self._read_condition(parts, columns), sources_by_id)]
        equalities: list[Equality] = []
        for part in parts:
            if self._catalyst.find_kind(part) != "EqualTo":
                continue
            left, right = part.left(), part.right()
            keys = self._read_key(left, sources_by_id), self._read_key(right, sources_by_id)
            if keys[0] is not None and keys[1] is not None and is_equality_exact(keys[0].kind, keys[1].kind):
                equalities.append((keys[0].reference, keys[1].reference))
            for side, key, other in ((left, keys[0], right), (right, keys[1], left)):
                conditions += self._list_subquery_conditions(key, other)
                conditions += self._list_period_values(side, other, sources_by_id, sources)
        conditions += self._list_inequality_values(parts, sources_by_id, sources)
        return Predicate(
            all_of(conditions), tuple(equalities), partial(self._read_exact_condition, parts, columns, sources_by_id)
        )

    def _read_exact_condition(
        self, parts: Sequence[Node], columns: Mapping[int, SparkColumn], sources_by_id: Mapping[int, int]
    ) -> Condition | None:
        """Return a condition that is true for exactly the rows for which all parts are true.

        The result is None if a part cannot be translated exactly.
        """
        if len(parts) > EXACT_PARTS_MAX:
            return None
        comparisons = [self._conditions.read_exact_comparison(part, columns) for part in parts]
        if any(comparison is None for comparison in comparisons):
            return None
        return _move_to_sources(all_of(comparisons), sources_by_id)

    def _list_inequality_values(
        self, parts: Sequence[Node], sources_by_id: Mapping[int, int], sources: Sequence[_Rows]
    ) -> Iterator[Condition]:
        """Yield semi-joins for columns that an inequality compares with a subquery or a column of another source.

        Each inequality is read in both directions, because each side may be the column to restrict. Inequalities of the
        same two columns and sources are collected in `limits`, because together they may form a range.
        """
        limits: dict[tuple[ColumnReference, int], list[Limit]] = {}
        for part in parts:
            op = _INEQUALITIES.get(self._catalyst.find_kind(part))
            if op is None:
                continue
            nodes = (part.left(), part.right())
            for (side, other), oriented_op in ((nodes, op), (nodes[::-1], FLIPPED[op])):
                key = self._read_key(side, sources_by_id)
                if key is None:
                    continue
                yield from self._list_subquery_limits(key, oriented_op, other)
                partner = self._read_key(other, sources_by_id)
                if partner is None or partner.reference[0] == key.reference[0]:
                    continue
                source, column = partner.reference
                relation = sources[source].relation
                yield from iter_extreme_semi_joins(key.reference, key.kind, oriented_op, relation, column)
                if can_limit(key.kind, partner.kind) and not is_beyond_extreme(oriented_op, relation, column):
                    limits.setdefault((key.reference, source), []).append(Limit(oriented_op, column))
        for (reference, source), source_limits in limits.items():
            yield from iter_range_semi_joins(reference, source_limits, sources[source].relation)

    def _list_subquery_limits(self, key: _Key, op: str, other: Node) -> Iterator[Condition]:
        """Yield the semi-joins that follow from the comparison of a column with a scalar subquery.

        For each row of the outer query, a correlated subquery may have a different minimum or maximum, so only the
        range of all values is used. If the comparison requires values beyond the minimum or maximum, the range of all
        values is not used, because it gives a weaker limit.
        """
        query = self._find_scalar_subquery(other)
        if query is None or not can_limit(key.kind, query.kind):
            return
        if not query.is_correlated:
            yield from iter_extreme_semi_joins(key.reference, key.kind, op, query.relation, query.output)
        if not is_beyond_extreme(op, query.relation, query.output):
            yield from iter_range_semi_joins(key.reference, [Limit(op, query.output)], query.relation)

    def _find_scalar_subquery(self, node: Node) -> _ScalarQuery | None:
        """Return the scalar subquery in a node, without casts to wider types, or None if there is none."""
        node = self._remove_widening(node)
        if self._catalyst.find_kind(node) != "ScalarSubquery":
            return None
        output = node.plan().output().head()
        number = self._catalyst.read_id(output)
        query = self._subqueries.get(number)
        if query is None:
            return None
        kind = find_iceberg_kind(self._catalyst.read_type(output))
        return _ScalarQuery(query, str(number), kind, is_correlated=not node.children().isEmpty())

    def _read_condition(self, nodes: Sequence[Node], columns: Mapping[int, SparkColumn]) -> Condition | None:
        return self._conditions.read_with_likes(nodes, columns) if columns else None

    def _list_subquery_conditions(self, key: _Key | None, other: Node) -> list[Condition]:
        """Return the conditions on a column that must equal the value of a scalar subquery.

        The value of the column must be a value of the subquery's output. If the output is a minimum or maximum, the
        column is compared with it.
        """
        query = None if key is None else self._find_scalar_subquery(other)
        if key is None or query is None or not is_equality_exact(key.kind, query.kind):
            return []
        conditions = list_partner_conditions([(key.reference, query.output)], query.relation)
        if not query.is_correlated:
            conditions += iter_extreme_semi_joins(key.reference, key.kind, "=", query.relation, query.output)
        return conditions

    def _list_period_values(
        self, side: Node, other: Node, sources_by_id: Mapping[int, int], sources: Sequence[_Rows]
    ) -> Iterator[Condition]:
        """Yield semi-joins for a column whose day, month or year equals a value of another column."""
        partner = self._find_attribute(other)
        period = None if partner is None or partner not in sources_by_id else find_period(self._catalyst, side)
        if period is None or partner is None or self._catalyst.read_type(other) not in period.partners:
            return
        number = self._catalyst.read_id(period.column)
        if number in sources_by_id:
            rows = sources[sources_by_id[partner]]
            yield from iter_period_semi_joins(
                (sources_by_id[number], str(number)), period.transform, rows.relation, str(partner)
            )

    def _read_key(self, node: Node, sources_by_id: Mapping[int, int]) -> _Key | None:
        """Return the attribute in a node as a key, without casts to wider types, or None if there is no attribute."""
        node = self._remove_widening(node)
        if self._catalyst.find_kind(node) != "AttributeReference":
            return None
        number = self._catalyst.read_id(node)
        if number not in sources_by_id:
            return None
        return _Key((sources_by_id[number], str(number)), find_iceberg_kind(self._catalyst.read_type(node)))

    def _remove_widening(self, node: Node) -> Node:
        """Return the operand of a cast to a type that has all values of the operand. Return other nodes unchanged."""
        if self._catalyst.find_kind(node) != "Cast":
            return node
        child = node.child()
        is_widened = is_wider(
            find_iceberg_kind(self._catalyst.read_type(node)), find_iceberg_kind(self._catalyst.read_type(child))
        )
        return child if is_widened else node

    def _find_attribute(self, output: Node) -> int | None:
        """Return the id of the attribute that an output returns unchanged, possibly with a new name, or None."""
        if self._catalyst.find_kind(output) == "Alias":
            output = output.child()
        return self._catalyst.read_id(output) if self._catalyst.find_kind(output) == "AttributeReference" else None

    def _find_references(self, nodes: Iterable[Node], child: _Rows) -> frozenset[ColumnReference]:
        numbers = {self._find_attribute(node) for node in nodes}
        return frozenset((0, str(number)) for number in numbers if number in child.ids)


def _hide(children: Sequence[_Rows]) -> _Rows:
    """Return opaque rows, to which no condition is pushed."""
    return _Rows(UnknownRelation(tuple(child.relation for child in children)))


def _map_sources_by_id(sources: Sequence[_Rows]) -> dict[int, int]:
    """Return the position of the source of each attribute. Attributes that several sources have are left out.

    Two references to the same WITH query have the same attribute ids, so their source is ambiguous.
    """
    positions: dict[int, int] = {}
    repeated_ids: set[int] = set()
    for position, rows in enumerate(sources):
        repeated_ids |= positions.keys() & rows.ids
        positions |= dict.fromkeys(rows.ids, position)
    return {number: position for number, position in positions.items() if number not in repeated_ids}


def _move_to_sources(condition: Condition | None, sources_by_id: Mapping[int, int]) -> Condition | None:
    """Translate a condition on attributes into a condition on columns of the sources.

    The name in a reference is the id of an attribute, followed by a dot and a path for a field of a struct.
    """
    return move(condition, lambda reference: (sources_by_id[int(reference[1].partition(".")[0])], reference[1]))


def _rename(column: SparkColumn, name: str) -> SparkColumn:
    """Return the column with a new name. The names of its struct fields begin with the new name."""
    if column.name == name:
        return column
    fields = tuple(_rename(field, f"{name}.{field.name.rpartition('.')[2]}") for field in column.fields)
    return SparkColumn(name, column.kind, fields)


def _list_kinds(columns: Iterable[SparkColumn]) -> Iterator[tuple[str, str]]:
    """Yield the name and the Iceberg type of each column, and of each struct field."""
    for column in columns:
        kind = find_iceberg_kind(column.kind)
        if kind is not None:
            yield column.name, kind
        yield from _list_kinds(column.fields)
