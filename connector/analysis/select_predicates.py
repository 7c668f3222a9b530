"""Reads the predicates of one SELECT of sqlglot's tree.

A predicate gives conditions, equal columns, and conditions with the values of subqueries and periods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from sqlglot import exp

from seamark.connector.analysis.algebra.blocks import Extreme, QueryBlock, iter_exists_semi_joins
from seamark.connector.analysis.algebra.equivalences import (
    Equality,
    Limit,
    Pair,
    Predicate,
    can_limit,
    is_equality_exact,
    is_year_number,
    iter_period_semi_joins,
    iter_range_semi_joins,
    list_partner_conditions,
    restrict_to_sources,
)
from seamark.connector.analysis.algebra.extremes import is_beyond_extreme, iter_extreme_semi_joins
from seamark.connector.analysis.algebra.relations import Relation, is_exact
from seamark.connector.analysis.comparisons import FLIPPED
from seamark.connector.analysis.conditions import COMPARISONS, ConditionReader, is_plain, split_conjunction
from seamark.connector.analysis.literals import parse_unit
from seamark.connector.analysis.operands import get_kind_class, get_literal_class
from seamark.connector.analysis.select_names import ParsedJoin, SelectNames, list_sources
from seamark.connector.plans.conditions import DAY, HOUR, MONTH, YEAR, ColumnReference, Condition, SemiJoin, all_of
from seamark.formats.protocol.wire import MAXIMUM, MINIMUM

EXACT_PARTS_MAX = 100
"""The maximum number of parts of a condition that the reader tries to translate exactly.

A minimum or maximum has an exact limit only if its condition is translated exactly.
"""


class InnerSelect(NamedTuple):
    """A subquery that is a single query block, with its names and its WHERE."""

    block: QueryBlock
    names: SelectNames
    where: exp.Expr | None


class PredicateReader:
    """Reads the predicates of one SELECT.

    Args:
        names: The names of the SELECT.
        reader: The reader of conditions.
        queries: The subqueries in expressions of the SELECT, by the `id` of their nodes.
        selects: The query blocks of the statement, by their `id`.
    """

    def __init__(
        self,
        names: SelectNames,
        reader: ConditionReader,
        queries: Mapping[int, Relation],
        selects: Mapping[int, InnerSelect],
    ) -> None:
        self._names = names
        self._reader = reader
        self._queries = queries
        self._selects = selects

    def read_condition(self, node: exp.Expr) -> Condition | None:
        """Return the condition on columns of the sources that is true for each row for which `node` is true."""
        return self._reader.read(node, self._names.resolve_stored, self._names.find_kind)

    def build_condition_on(self, node: exp.Expr, columns: frozenset[ColumnReference]) -> Condition | None:
        """Return the condition on only `columns` that is true for each row for which `node` is true."""

        def resolve(column: exp.Column) -> ColumnReference | None:
            reference = self._names.resolve(column)
            return reference if reference in columns else None

        return self._reader.read(node, resolve, self._names.find_kind)

    def read_predicate(self, node: exp.Expr) -> Predicate:
        """Return what is known about each row for which the condition of WHERE is true."""
        condition, equalities = self._read_condition(node, None), tuple(self._find_equalities(node))
        return Predicate(condition, equalities, partial(self._read_exact_condition, node))

    def _read_exact_condition(self, node: exp.Expr) -> Condition | None:
        """Return a condition that is true for exactly the rows for which `node` is true.

        Return None if a part of `node` cannot be translated exactly.
        """
        parts = list(islice(split_conjunction(node), EXACT_PARTS_MAX + 1))
        if len(parts) > EXACT_PARTS_MAX:
            return None
        names = self._names
        comparisons = [self._reader.read_exact_comparison(part, names.resolve, names.find_kind) for part in parts]
        exact_parts = [
            comparison
            for comparison in comparisons
            if comparison is not None and is_exact(names.find_kind(comparison.column))
        ]
        return all_of(exact_parts) if len(exact_parts) == len(comparisons) else None

    def find_join_predicate(self, join: ParsedJoin) -> Predicate:
        """Return what is known about each pair of rows for which ON or USING is true.

        The predicate refers only to sources of the join, because any other name may belong to an outer block.
        """
        joined_sources = list_sources(join)
        equalities = [
            (left, right)
            for left, right in self._find_equalities(join.on)
            if left[0] in joined_sources and right[0] in joined_sources
        ]
        equalities += self._equate_using_columns(join)
        return Predicate(
            restrict_to_sources(self._read_condition(join.on, joined_sources), joined_sources), tuple(equalities)
        )

    def _read_condition(self, node: exp.Expr | None, visible_sources: frozenset[int] | None) -> Condition | None:
        """Return a condition that is true for each row for which `node` is true.

        The condition also has semi-joins: comparisons with subqueries, with periods and with columns of other sources.

        Args:
            node: The expression, or None.
            visible_sources: The sources to which `node` may refer, or None for all sources.
        """
        if node is None:
            return None
        values = [
            *self._read_subquery_values(node),
            *self._read_period_values(node, visible_sources),
            *self._read_range_values(node, visible_sources),
        ]
        return all_of([self.read_condition(node), *values])

    # Equal columns

    def _find_equalities(self, node: exp.Expr | None) -> list[Equality]:
        """Return the pairs of columns that are equal in each row for which `node` is true.

        For an OR, these are the pairs that every branch requires to be equal.
        """
        equalities: list[Equality] = []
        for part in split_conjunction(node):
            if isinstance(part, exp.Or):
                equalities += self._find_equalities_in_each(part)
            elif type(part) is exp.EQ:
                left, right = self._names.resolve_node(part.this), self._names.resolve_node(part.expression)
                if left is not None and right is not None and self._are_comparable(left, right):
                    equalities.append((left, right))
        return equalities

    def _find_equalities_in_each(self, disjunction: exp.Or) -> list[Equality]:
        common: dict[Equality, None] | None = None
        for branch in disjunction.flatten():
            equalities = {(min(equality), max(equality)): None for equality in self._find_equalities(branch)}
            common = equalities if common is None else {equality: None for equality in common if equality in equalities}
            if not common:
                break
        return list(common or ())

    def _equate_using_columns(self, join: ParsedJoin) -> Iterator[Equality]:
        """Yield the pairs of columns that USING requires to be equal."""
        for column in join.using:
            left, right = (self._names.resolve_in(side, column) for side in (join.left, join.right))
            if left is not None and right is not None and self._are_comparable(left, right):
                yield left, right

    def _are_comparable(self, left: ColumnReference, right: ColumnReference) -> bool:
        return is_equality_exact(self._find_kind(left), self._find_kind(right))

    def _find_kind(self, reference: ColumnReference) -> str | None:
        """Return the type of a stored column, or of an extreme of a stored column."""
        source, column = reference
        return _find_output_kind(self._names.sources[source].relation, column)

    # Values of subqueries

    def _read_subquery_values(self, node: exp.Expr) -> Iterator[Condition]:
        """Yield conditions that limit columns to values of the subqueries in `node`.

        The conditions are true for each row for which `node` is true.
        """
        for part in split_conjunction(node):
            match part:
                case exp.In() if {name for name, value in part.args.items() if value} == {"this", "query"}:
                    query = self._queries.get(id(part.args["query"]))
                    columns = part.this.expressions if isinstance(part.this, exp.Tuple) else [part.this]
                    yield from self._find_in_conditions(columns, query)
                    yield from self._find_exists_semi_joins(query)
                case exp.EQ():
                    for column, other in ((part.this, part.expression), (part.expression, part.this)):
                        inner = other.this if isinstance(other, exp.Any) else other
                        yield from self._find_in_conditions([column], self._queries.get(id(inner)))
                case exp.Exists():
                    yield from self._find_exists_semi_joins(self._queries.get(id(part.this)))
                case _:
                    for column, op, other in self._read_inequalities(part):
                        inner = other.this if isinstance(other, exp.Any) else other
                        yield from self._find_order_semi_joins(column, op, self._queries.get(id(inner)))

    def _find_in_conditions(self, columns: Sequence[exp.Expr], query: Relation | None) -> Iterator[Condition]:
        """Yield conditions on columns that must together equal the columns of one row of the query.

        Args:
            columns: The columns of this SELECT.
            query: The subquery. Its columns are in the order of `columns`. If it is None, nothing is yielded.
        """
        names = None if query is None else query.list_names()
        if query is None or names is None or len(names) != len(columns):
            return
        pairs: list[Pair] = []
        for column, name in zip(columns, names, strict=True):
            reference = self._names.resolve_node(column)
            if reference is None or name is None:
                continue
            if is_equality_exact(self._names.find_kind(reference), _find_output_kind(query, name)):
                pairs.append((reference, name))
        for reference, name in pairs:
            yield from iter_extreme_semi_joins(reference, self._names.find_kind(reference), "=", query, name)
        if pairs:
            yield from list_partner_conditions(pairs, query)

    def _find_order_semi_joins(self, column: exp.Expr, op: str, query: Relation | None) -> Iterator[SemiJoin]:
        """Yield semi-joins for a column that must be less or greater than the query's only column in some row."""
        names = None if query is None else query.list_names()
        reference = self._names.resolve_node(column)
        name = names[0] if names is not None and len(names) == 1 else None
        if query is None or reference is None or name is None:
            return
        kind = self._names.find_kind(reference)
        yield from iter_extreme_semi_joins(reference, kind, op, query, name)
        if can_limit(kind, _find_output_kind(query, name)) and not is_beyond_extreme(op, query, name):
            yield from iter_range_semi_joins(reference, [Limit(op, name)], query)

    def _find_exists_semi_joins(self, query: Relation | None) -> Iterator[SemiJoin]:
        """Yield semi-joins for the columns of this SELECT that are compared in the WHERE of a subquery.

        The subquery must return a row, as in EXISTS. Its WHERE requires these columns to equal columns of the subquery.
        """
        select = self._selects.get(id(query))
        if select is not None:
            yield from iter_exists_semi_joins(select.block, self.find_correlated_pairs(select))

    def find_correlated_pairs(self, query: InnerSelect) -> tuple[Equality, ...]:
        """Return the equal columns of a correlated subquery.

        Each pair has a column of a source of the subquery, and a column of this SELECT. The subquery's WHERE requires
        both to be equal.
        """
        pairs: list[Equality] = []
        for part in split_conjunction(query.where):
            if type(part) is not exp.EQ or type(part.this) is not exp.Column or type(part.expression) is not exp.Column:
                continue
            for inside, outside in ((part.this, part.expression), (part.expression, part.this)):
                own_column = query.names.resolve(inside)
                outer = self._names.resolve(outside) if query.names.is_outer_name(outside) else None
                if own_column is None or outer is None:
                    continue
                if is_equality_exact(self._names.find_kind(outer), query.names.find_kind(own_column)):
                    pairs.append((own_column, outer))
        return tuple(pairs)

    # Periods

    def _read_period_values(self, node: exp.Expr, visible_sources: frozenset[int] | None) -> Iterator[SemiJoin]:
        """Yield semi-joins for columns whose day, month, year or hour equals a value of another source."""
        for part in split_conjunction(node):
            sides = (part.this, part.expression) if type(part) is exp.EQ else ()
            for side, other in zip(sides, reversed(sides), strict=True):
                period = parse_period(side)
                reference = None if period is None else self._names.resolve(period.column)
                partner = self._names.resolve_node(other.unnest())
                if period is None or reference is None or partner is None or reference[0] == partner[0]:
                    continue
                is_seen = visible_sources is None or {reference[0], partner[0]} <= visible_sources
                if is_seen and period.identifies_one_period(
                    self._names.find_kind(reference), self._names.find_kind(partner)
                ):
                    relation = self._names.sources[partner[0]].relation
                    yield from iter_period_semi_joins(reference, period.transform, relation, partner[1])

    # Inequalities

    def _read_inequalities(self, part: exp.Expr) -> Iterator[tuple[exp.Expr, str, exp.Expr]]:
        """Yield each comparison `left op right` in `part`, and then the same comparison with its sides exchanged."""
        comparisons: list[tuple[exp.Expr, str, exp.Expr]] = []
        if isinstance(part, exp.LT | exp.LTE | exp.GT | exp.GTE) and is_plain(part):
            comparisons.append((part.this, COMPARISONS[type(part)], part.expression))
        elif type(part) is exp.Between and is_plain(part) and not part.args.get("negate"):
            low, high = part.args["low"], part.args["high"]
            # Engines compare all three operands in their common type.
            classes = {self._find_class(operand) for operand in (part.this, low, high)}
            if len(classes) == 1 and None not in classes:
                comparisons += [(part.this, ">=", low), (part.this, "<=", high)]
        for left, op, right in comparisons:
            sides = left.unnest(), right.unnest()
            # A subquery keeps its brackets, because `self._queries` has it under the node with the brackets.
            yield sides[0], op, _choose_operand_node(right, sides[1])
            yield sides[1], FLIPPED[op], _choose_operand_node(left, sides[0])

    def _find_class(self, operand: exp.Expr) -> str | None:
        """Return the type class of a column, a subquery or a literal, or None if it is unknown.

        All types of one class, such as integers and decimals, are compared exactly (`operands.py`).
        """
        query = self._queries.get(id(operand))
        if query is not None:
            names = query.list_names()
            return None if names is None or len(names) != 1 else get_kind_class(_find_output_kind(query, str(names[0])))
        reference = self._names.resolve_node(operand.unnest())
        if reference is not None:
            return get_kind_class(self._find_kind(reference))
        literal = self._reader.read_literal(operand)
        return None if literal is None else get_literal_class(literal)

    def _read_range_values(self, node: exp.Expr, visible_sources: frozenset[int] | None) -> Iterator[SemiJoin]:
        """Yield semi-joins for columns that are less or greater than columns of another source.

        The limits of a column by one source are collected, because a lower and an upper limit together form a range.
        """
        limits: dict[tuple[ColumnReference, int], list[Limit]] = {}
        for part in split_conjunction(node):
            for left, op, right in self._read_inequalities(part):
                reference, partner = self._names.resolve_node(left), self._names.resolve_node(right)
                if reference is None or partner is None or reference[0] == partner[0]:
                    continue
                if visible_sources is not None and not {reference[0], partner[0]} <= visible_sources:
                    continue
                kind, relation = self._names.find_kind(reference), self._names.sources[partner[0]].relation
                yield from iter_extreme_semi_joins(reference, kind, op, relation, partner[1])
                if can_limit(kind, self._find_kind(partner)) and not is_beyond_extreme(op, relation, partner[1]):
                    limits.setdefault((reference, partner[0]), []).append(Limit(op, partner[1]))
        for (reference, source), source_limits in limits.items():
            yield from iter_range_semi_joins(reference, source_limits, self._names.sources[source].relation)


class Period(NamedTuple):
    """An expression that is the start of a period of a column, or the number of its year.

    Attributes:
        column: The column.
        transform: The Iceberg transform of the period.
        is_cast: Whether the expression casts the column to a date.
        is_number: Whether the expression is the number of the year.
    """

    column: exp.Column
    transform: str
    is_cast: bool = False
    is_number: bool = False

    def identifies_one_period(self, kind: str | None, partner_kind: str | None) -> bool:
        """Return whether each value of the column on the other side of the equality identifies one period.

        For example, in `date_trunc('month', a.time) = b.month`, each date in `b.month` identifies a month of `a.time`.
        A time with a zone and a time without a zone do not identify the same period. Therefore a column with a zone is
        accepted only for the number of its year, or if it is cast to a date. It is refused in `date_trunc`, also if
        both columns have a zone. A date has no hour.

        Args:
            kind: The type of the column whose period is compared, such as `a.time`.
            partner_kind: The type of the column on the other side, such as `b.month`.
        """
        if kind == "date" and self.transform == HOUR:
            return False
        if self.is_number:
            return kind in ("date", "timestamp", "timestamptz") and is_year_number(partner_kind)
        if self.is_cast:
            return kind in ("timestamp", "timestamptz") and partner_kind == "date"
        return kind in ("date", "timestamp") and partner_kind in ("date", "timestamp")


def parse_period(node: exp.Expr) -> Period | None:
    """Return the period that an expression represents, or None if it does not represent a period."""
    node = node.unnest()
    inner: exp.Expr | None = None
    transform, is_cast, is_number = DAY, False, False
    match node:
        case exp.Cast() if type(node) is exp.Cast and node.to.this is exp.DataType.Type.DATE and is_plain(node):
            inner, is_cast = node.this, True
        case exp.Date() if not node.expressions and is_plain(node):
            inner, is_cast = node.this, True
        case exp.TimestampTrunc() | exp.DateTrunc() if parse_unit(node).lower() in (DAY, MONTH, YEAR, HOUR):
            inner, transform = node.this, parse_unit(node).lower()
        case exp.Year() if is_plain(node):
            inner, transform, is_number = node.this, YEAR, True
        case exp.Extract() if type(node.this) is exp.Var and node.name.upper() == "YEAR" and is_plain(node):
            inner, transform, is_number = node.expression, YEAR, True
    return Period(inner, transform, is_cast, is_number) if type(inner) is exp.Column else None


def find_extremes(names: SelectNames) -> dict[str, Extreme]:
    """Return the minima and maxima of columns among the outputs of a SELECT, by the name of the output.

    Outputs with a name that occurs twice are left out, because a reference to such a name is ambiguous.
    """
    extremes: dict[int, Extreme] = {}
    for number, projection in enumerate(names.projections):
        aggregate = projection.unalias()
        if type(aggregate) in (exp.Min, exp.Max) and is_plain(aggregate) and not aggregate.args.get("expressions"):
            reference = names.resolve_node(aggregate.this)
            if reference is not None:
                extremes[number] = Extreme(reference, MAXIMUM if type(aggregate) is exp.Max else MINIMUM)
    outputs = (names.list_names() or ()) if extremes else ()
    return {
        str(name): extremes[number]
        for number, name in enumerate(outputs)
        if number in extremes and outputs.count(name) == 1
    }


def _choose_operand_node(node: exp.Expr, inner: exp.Expr) -> exp.Expr:
    """Return `node` if it is a subquery, and `inner` otherwise.

    Args:
        node: An operand, possibly in brackets. Subqueries are registered by the node that includes the brackets.
        inner: The operand without brackets.
    """
    return node if isinstance(node, exp.Subquery) else inner


def _find_output_kind(relation: Relation, name: str) -> str | None:
    """Return the type of an output that is a stored column, or an extreme of a stored column."""
    if isinstance(relation, QueryBlock) and name in relation.extremes:
        return relation.find_reference_kind(relation.extremes[name].column)
    extreme = relation.find_extreme(name)
    return relation.find_kind(name) if extreme is None else extreme.type
