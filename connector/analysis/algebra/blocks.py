"""Defines query blocks, and pushes conditions down to the joined sources of a block by these rules:

- A condition on the rows of an inner join is pushed to both sides of the join.
- An outer join keeps all rows of its preserved side, so its ON condition is pushed only to the other side. A condition
  from above the join is pushed to the other side only if the condition is true for no row of nulls. Otherwise, the
  push-down could remove the partner of a preserved row, and the row would pass the condition with nulls instead.
  A semi-join is handled as an inner join, and an anti-join as an outer join. The columns of their right side are not
  outputs.
- A condition on a grouping key is pushed to the rows of the groups. The same applies to a condition of HAVING. If a
  block has several grouping sets, the key must be in every set.
- Some outputs may be null although the source has a value. A condition on such an output is pushed only if the
  condition is not true for null.
- If all aggregates of a block without groups have FILTER, only rows that meet one of their conditions are needed.
- A condition is pushed through the window functions of a block only if every window function is partitioned by the
  columns of the condition.
- A condition on a column is also pushed for an equal column of the same type. Columns are equal if AND, or each branch
  of an OR, requires it (`equivalences.py`).
- A disjunction of conditions on several sources becomes a disjunction of semi-joins for each source that is joined with
  them.
- If a row is used only with a join partner, and its columns equal columns of a stored table, its values are among the
  values of these columns. The same is true for IN and EXISTS, if the subquery cannot create rows on its own.
- A subquery in an expression is a separate query. If its WHERE compares a column with a column of this block, only rows
  with values of needed rows of this block are needed. The same applies to LATERAL.
- A column that is compared with the minimum or maximum of rows of a table has limits (`extremes.py`), even if the
  minimum is a column of a join partner. A column that is less or greater than a column of a join partner also has
  limits.
- The literals of VALUES and UNNEST are lists of values for the columns that are compared with them for equality.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

from seamark.connector.analysis.algebra.equivalences import (
    ALWAYS,
    Equality,
    Pair,
    Predicate,
    build_semi_joins,
    copy_to_equal_columns,
    derive_conditions_from_equalities,
    move_to_column,
    push_disjunction_across_join,
    restrict_to_columns,
    restrict_to_sources,
)
from seamark.connector.analysis.algebra.relations import (
    Origin,
    Relation,
    SourceRows,
    StoredExtreme,
    find_exact_origin,
)
from seamark.connector.analysis.comparisons import evaluate_literals
from seamark.connector.analysis.operands import get_kind_class, get_literal_class
from seamark.connector.plans.conditions import (
    Atom,
    ColumnReference,
    Condition,
    SemiJoin,
    all_of,
    keep_comparisons,
    list_references,
    move,
    rejects_null,
    split_parts,
    weaken,
)
from seamark.connector.plans.literals import Literal


@dataclass(frozen=True)
class SourceJoin:
    """A join of two sources, or of joins of sources. A source is a relation in FROM.

    Attributes:
        left: The left side: the position of a source, or a join.
        right: The right side, in the same form.
        keeps_left: Whether a left row that joins no right row is kept, with nulls for the right side.
        keeps_right: Whether a right row that joins no left row is kept, with nulls for the left side.
    """

    left: JoinTree
    right: JoinTree
    keeps_left: bool = False
    keeps_right: bool = False
    on: Predicate = ALWAYS
    """The ON condition. It refers only to sources of this join."""

    @property
    def is_outer(self) -> bool:
        return self.keeps_left or self.keeps_right


JoinTree: TypeAlias = int | SourceJoin
"""A join, or the position of a source in the block."""


def list_sources(tree: JoinTree) -> frozenset[int]:
    return frozenset({tree}) if isinstance(tree, int) else list_sources(tree.left) | list_sources(tree.right)


def flatten_inner_joins(tree: JoinTree) -> tuple[list[JoinTree], list[SourceJoin]]:
    """Return the operands of nested inner joins, and the joins themselves. A source or an outer join is an operand."""
    if isinstance(tree, int) or tree.is_outer:
        return [tree], []
    (left, left_joins), (right, right_joins) = flatten_inner_joins(tree.left), flatten_inner_joins(tree.right)
    return [*left, *right], [*left_joins, *right_joins, tree]


class Extreme(NamedTuple):
    """The minimum or maximum of a column of a source.

    Attributes:
        kind: `MINIMUM` or `MAXIMUM`.
        is_filtered: Whether only some rows of a group are used, for example because of FILTER.
    """

    column: ColumnReference
    kind: str
    is_filtered: bool = False


class Outputs(Protocol):
    """The output columns of a block, which is one SELECT."""

    def has(self, name: str) -> bool | None:
        """Return whether the block has an output column of this name, or None if this is unknown."""

    def list_names(self) -> tuple[str | None, ...] | None:
        """Return the names of all columns in order, with None for a column without a name. Return None if unknown."""

    def find_reference(self, name: str) -> ColumnReference | None:
        """Return the source column whose unchanged value the output has, or None if there is no such column."""

    def find_literal(self, name: str) -> Literal | None:
        """Return the value of an output that is a literal of the statement, or None for other outputs and for NULL."""

    def may_be_null(self, name: str) -> bool:
        """Return whether the output may be null in a row in which its source column has a value."""


@dataclass(frozen=True)
class InnerQuery:
    """A subquery in an expression of a block, or a LATERAL subquery.

    Attributes:
        relation: The rows of the subquery.
        block: The query block of the subquery, or None if the subquery is not a single block.
        pairs: Pairs of a column of the subquery's sources and a column of the outer block. The subquery's WHERE
            requires both to be equal.
        source: The position of a LATERAL subquery among the sources of the outer block.
    """

    relation: Relation
    block: QueryBlock | None = None
    pairs: tuple[Equality, ...] = ()
    source: int | None = None


@dataclass(eq=False)
class QueryBlock:
    """One SELECT, or one node of a query plan.

    Attributes:
        sources: The relations that the block reads.
        tree: The joins of the sources, or None for a block without sources.
        outputs: The output columns of the block.
        where: A predicate on the joined rows.
        passes_conditions: Whether a condition on an output may be pushed to the sources.
        needs_rows: Whether the result has exactly the rows of the sources that meet `where`, each at least once.
        keys: The grouping keys that have one value in each group, or None if the rows are not grouped.
        having: The condition of HAVING on `keys`.
        aggregate_filter: A condition that is true for each row that an aggregate uses.
        partitions: The PARTITION BY columns of each window function.
        extremes: The outputs that are the minimum or maximum of a source column.
        inner_queries: The subqueries in expressions of the block, and its LATERAL sources.
        correlated_condition: A condition on the rows of the sources that follows from comparisons with columns of an
            outer block.
    """

    sources: Sequence[Relation]
    tree: JoinTree | None
    outputs: Outputs
    where: Predicate | None = None
    passes_conditions: bool = True
    needs_rows: bool = False
    keys: frozenset[ColumnReference] | None = None
    having: Condition | None = None
    aggregate_filter: Condition | None = None
    partitions: Sequence[frozenset[ColumnReference]] = ()
    extremes: Mapping[str, Extreme] = field(default_factory=dict)
    inner_queries: Sequence[InnerQuery] = ()
    correlated_condition: Condition | None = None
    _lateral_conditions: dict[int, Condition | None] = field(default_factory=dict)
    # These two caches prevent exponential time for nested blocks.
    _kinds: dict[str, str | None] = field(default_factory=dict)
    _extremes: dict[str, StoredExtreme | None] = field(default_factory=dict)

    def has(self, column: str) -> bool | None:
        return self.outputs.has(column)

    def list_names(self) -> tuple[str | None, ...] | None:
        return self.outputs.list_names()

    def find_kind(self, column: str) -> str | None:
        if column not in self._kinds:
            reference = self.outputs.find_reference(column)
            self._kinds[column] = None if reference is None else self.find_reference_kind(reference)
        return self._kinds[column]

    def find_reference_kind(self, reference: ColumnReference) -> str | None:
        source, column = reference
        return self.sources[source].find_kind(column)

    def find_origin(self, columns: Sequence[str]) -> Origin | None:
        """Return the stored table and its columns from which these outputs come, or None if there is no such table.

        All outputs must come from the same source, because columns of two sources are not in one row of a table.
        """
        if len({column for column in columns if column in self.extremes}) > 1:
            return None  # Two minimums or maximums may come from different rows.
        references = [
            self.extremes[column].column if column in self.extremes else self.outputs.find_reference(column)
            for column in columns
        ]
        sources = {None if reference is None else reference[0] for reference in references}
        source = sources.pop() if len(sources) == 1 else None
        if source is None:
            return None
        return self.sources[source].find_origin([reference[1] for reference in references if reference is not None])

    def find_extreme(self, column: str) -> StoredExtreme | None:
        if column not in self._extremes:
            self._extremes[column] = self._find_extreme(column)
        return self._extremes[column]

    def _find_extreme(self, column: str) -> StoredExtreme | None:
        """Return the minimum or maximum of stored rows that is the value of an output, or None.

        The output is an aggregate of this block, or a column of a source that already has such a value.
        """
        own_extreme = self.extremes.get(column)
        if own_extreme is None:
            reference = self.outputs.find_reference(column)
            return None if reference is None else self.sources[reference[0]].find_extreme(reference[1])
        source, name = own_extreme.column
        origin = find_exact_origin(self.sources[source], [name])
        if origin is None:
            return None
        table, (stored_column,) = origin
        # If the block groups rows, the rows of each group are unknown.
        rows = self._find_joined_rows() if self.keys is None and self.having is None else None
        if rows is not None and own_extreme.is_filtered:
            # A FILTER clause, for example, leaves out some of the rows that meet the condition.
            rows = rows._replace(exact=False)
        return StoredExtreme(table, stored_column, own_extreme.kind, rows)

    def find_source_rows(self) -> SourceRows | None:
        """Return the rows of a table that are the rows of this block, or None if the block groups rows."""
        if self.keys is not None or self.having is not None or self.extremes:
            return None
        rows = self._find_joined_rows()
        # If `needs_rows` is False, the result may have no row for a row of the sources. For example, DuckDB's `unnest`
        # in SELECT may return no row. So the result is not exact: some rows that meet the condition may be missing.
        return rows if rows is None or self.needs_rows else rows._replace(exact=False)

    def _find_joined_rows(self) -> SourceRows | None:
        """Return the rows of a stored table that FROM and WHERE select, or None if FROM joins several sources.

        The result is also None if the rows of the only source are not rows of a table. If WHERE cannot be translated
        exactly, the result has a weaker condition and is marked as not exact.
        """
        if self.tree != 0:  # A join. Without a join, the tree is the position of the only source, which is 0.
            return None
        source = self.sources[0]
        source_rows = source.find_source_rows()
        if source_rows is None or self.where is None:
            return source_rows
        exact_condition = self.where.exact() if source_rows.exact else None
        table_condition = _move_to_table(exact_condition, source)
        if exact_condition is not None and table_condition is not None and table_condition.size == exact_condition.size:
            return SourceRows(all_of([source_rows.where, table_condition]), exact=True)
        # Grouping sets replace values by null, and such rows are not rows of the table.
        certain_condition = weaken(self.where.condition, lambda atom: atom if atom.rejects_null else None)
        weaker = _move_to_table(keep_comparisons(certain_condition), source)
        return SourceRows(all_of([source_rows.where, weaker]), exact=False)

    def list_values(self, column: str) -> tuple[Literal, ...] | None:
        reference = self.outputs.find_reference(column)
        return None if reference is None else self.sources[reference[0]].list_values(reference[1])

    def find_value_class(self, column: str) -> str | None:
        literal = self.outputs.find_literal(column)
        return get_kind_class(self.find_kind(column)) if literal is None else get_literal_class(literal)

    def push_down(self, condition: Condition | None) -> None:
        """Push a condition on the outputs, and the block's own conditions, down to the sources and the subqueries."""
        if self.tree is not None:
            self._push_to(self.tree, self._derive_row_condition(condition))
        # The subqueries are last, because the conditions on the sources also apply to equal columns of correlated
        # subqueries.
        for query in self.inner_queries:
            if query.block is not None:
                query.block.correlated_condition = self._derive_correlated_condition(query.block, query.pairs)
            query.relation.push_down(None if query.source is None else self._lateral_conditions.get(query.source))

    # Conditions on the joined rows

    def _derive_row_condition(self, condition: Condition | None) -> Condition | None:
        """Return a condition that is true for each joined row that can change the result.

        It combines these conditions: WHERE; the given condition on the outputs, if `passes_conditions` allows it;
        HAVING on grouping keys; the conditions of aggregates with FILTER; and conditions of an outer query. Conditions
        that follow from equal columns are added.

        Args:
            condition: A condition on the outputs of the block, or None.
        """
        row_condition = self._keep_before_windows(
            self._translate_to_source_columns(condition) if self.passes_conditions else None
        )
        row_condition = all_of([row_condition, self.having, self.aggregate_filter, self.correlated_condition])
        if self.where is None:
            return row_condition
        return self._extend_by_equalities(all_of([self.where.condition, row_condition]), self.where.equalities)

    def _translate_to_source_columns(self, condition: Condition | None) -> Condition | None:
        """Translate a condition on the outputs into a condition on the columns of the sources.

        An output is a result column of the SELECT. Comparisons of an output that is a literal are evaluated. A SELECT
        with grouping sets may replace a value of a source by null. Parts that may be true for such a null are dropped,
        because the source has another value there. If the SELECT groups rows, only parts on grouping keys remain,
        because they remove whole groups. If no part remains, the result is None.
        """
        condition = weaken(condition, lambda atom: evaluate_literals(atom, self.outputs.find_literal))
        column_condition = move(
            weaken(condition, self._keep_certain), lambda reference: self.outputs.find_reference(reference[1])
        )
        return column_condition if self.keys is None else restrict_to_columns(column_condition, self.keys)

    def _keep_certain(self, atom: Atom) -> Atom | None:
        if atom.rejects_null or not any(self.outputs.may_be_null(name) for _, name in list_references(atom)):
            return atom
        return None

    def _keep_before_windows(self, condition: Condition | None) -> Condition | None:
        """Return the part of a condition that removes only whole partitions of every window function.

        Removing some rows of a partition would change the function's value in the other rows.
        """
        for columns in self.partitions:
            condition = restrict_to_columns(condition, columns)
        return condition

    def _extend_by_equalities(self, condition: Condition | None, equalities: Sequence[Equality]) -> Condition | None:
        """Return the condition extended by the conditions that follow from equal columns."""
        condition = all_of([*derive_conditions_from_equalities(equalities, self.sources), condition])
        condition = copy_to_equal_columns(condition, equalities, self.find_reference_kind)
        return all_of([condition, *push_disjunction_across_join(condition, equalities, self.sources)])

    # Joins

    def _push_to(self, tree: JoinTree, condition: Condition | None) -> None:
        """Push a condition down to the sources of a join.

        Args:
            tree: The join, or the position of a single source.
            condition: A condition that is true for each row of the join that can change the result.
        """
        if isinstance(tree, SourceJoin):
            (self._push_to_outer_join if tree.is_outer else self._push_to_inner_joins)(tree, condition)
            return
        own_part = move(restrict_to_sources(condition, frozenset({tree})), lambda reference: (0, reference[1]))
        if any(query.source == tree for query in self.inner_queries):
            self._lateral_conditions[tree] = own_part
        else:
            self.sources[tree].push_down(own_part)

    def _push_to_inner_joins(self, tree: SourceJoin, condition: Condition | None) -> None:
        """Push a condition down to the sides of nested inner joins.

        The nested joins are handled as one join of all sides, because each row meets all ON conditions.
        """
        sides, joins = flatten_inner_joins(tree)
        equalities = [equality for join in joins for equality in join.on.equalities]
        implied_condition = self._extend_by_equalities(
            all_of([condition, *(join.on.condition for join in joins)]), equalities
        )
        side_by_source = {source: number for number, side in enumerate(sides) for source in list_sources(side)}
        parts_by_side: list[list[Condition]] = [[] for _ in sides]
        for part in split_parts(implied_condition):
            for number in {side_by_source[source] for source, _ in list_references(part) if source in side_by_source}:
                parts_by_side[number].append(part)
        for side, parts in zip(sides, parts_by_side, strict=True):
            self._push_to(side, all_of(parts))

    def _push_to_outer_join(self, tree: SourceJoin, wanted_condition: Condition | None) -> None:
        """Push a condition down through an outer join.

        A condition on a side is pushed only if the join does not add nulls to this side for unmatched rows of the other
        side. ON is pushed only to a side whose unmatched rows are not kept.

        Args:
            tree: The join.
            wanted_condition: A condition that is true for each row of the join that can change the result.
        """
        left, right = list_sources(tree.left), list_sources(tree.right)
        # If the pushed condition is not true for nulls, it removes each row that joins no row of the other side, so the
        # join does not need to keep these rows.
        keeps_left = tree.keeps_left and not rejects_null(restrict_to_sources(wanted_condition, right))
        keeps_right = tree.keeps_right and not rejects_null(restrict_to_sources(wanted_condition, left))
        tree = replace(tree, keeps_left=keeps_left, keeps_right=keeps_right)
        if not tree.is_outer:
            self._push_to_inner_joins(tree, wanted_condition)
            return
        equalities = tree.on.equalities
        on = all_of([tree.on.condition, *derive_conditions_from_equalities(equalities, self.sources)])
        for side, own_sources, other_sources, is_kept, is_other_kept in (
            (tree.left, left, right, keeps_left, keeps_right),
            (tree.right, right, left, keeps_right, keeps_left),
        ):
            condition = None if is_other_kept else restrict_to_sources(wanted_condition, own_sources)
            if not is_kept:  # A row is used only with a needed row of the other side, with which it meets ON.
                other_condition = all_of([restrict_to_sources(wanted_condition, other_sources), on])
                implied_condition = copy_to_equal_columns(other_condition, equalities, self.find_reference_kind)
                condition = all_of([condition, restrict_to_sources(implied_condition, own_sources)])
            self._push_to(side, condition)

    # Correlated subqueries

    def _derive_correlated_condition(self, query: QueryBlock, pairs: Sequence[Equality]) -> Condition | None:
        """Return a condition on the rows of a correlated subquery that follows from the conditions on this block.

        The subquery's WHERE compares columns of its sources with columns of this block. Only rows of this block that
        meet its conditions are needed, so these conditions also limit the values of the compared columns. If no
        condition follows, the result is None.
        """
        parts: list[Condition | None] = []
        for own_column, (source, column) in pairs:
            partner = self.sources[source]
            parts += build_semi_joins([(own_column, column)], partner)
            origin = find_exact_origin(partner, [column])
            if origin is not None and partner.find_kind(column) == query.find_reference_kind(own_column):
                table, (name,) = origin
                on_column = restrict_to_columns(table.predicate, {(0, name)})
                parts.append(keep_comparisons(move_to_column(on_column, own_column)))
        return all_of(parts)


def _move_to_table(condition: Condition | None, source: Relation) -> Condition | None:
    """Translate a condition on a relation into a condition on the stored table from which its columns come.

    Parts on other columns are dropped. If no part remains, the result is None. In the result, the table has the source
    number 0, because it is the only source.
    """

    def find_stored(reference: ColumnReference) -> ColumnReference | None:
        origin = find_exact_origin(source, [reference[1]])
        if origin is None:
            return None
        _, (stored_column,) = origin
        return 0, stored_column

    return move(condition, find_stored)


def iter_exists_semi_joins(query: QueryBlock, pairs: Sequence[Equality]) -> Iterator[SemiJoin]:
    """Yield semi-joins for columns of the outer block, from a subquery that must return a row (EXISTS).

    For example, in `WHERE EXISTS (SELECT 1 FROM t WHERE t.k = o.k)`, the column `o.k` has a value of `t.k`. The
    function yields nothing if the subquery can return a row although its sources have no rows, as `SELECT count(*)`
    does.

    Args:
        query: The block of the subquery.
        pairs: Pairs of a column of the subquery's sources and a column of the outer block that WHERE requires to be
            equal.
    """
    if not query.needs_rows:
        return
    by_source: defaultdict[int, list[Pair]] = defaultdict(list)
    for (source, column), outer in pairs:
        by_source[source].append((outer, column))
    for source, own_pairs in by_source.items():
        yield from build_semi_joins(own_pairs, query.sources[source])
