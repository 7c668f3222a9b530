"""Dynamic filters from joins: the keys of the rows that join with a row of the other table.

A row is needed only if each join has a partner for the row. A partner is a row of the other table that may match
the join's filter, and that has equal, non-null values in all columns of `on`. If `on` has several columns, each
column has its own key set, so all key sets together may admit more rows than the join. Types whose equality differs
from the equality of their keys, such as floats, give no filter. A join that exceeds its time or limits is skipped,
and its outcome reports this.

A join on the day, month, year or hour of a column, or by `<`, `>` or BETWEEN, becomes a condition on the column. Joins
that are alternatives become a disjunction: a row is needed only if it has a partner in one of them.

If the planned table has indexes on attributes of the other table, the join's filter becomes a condition that these
indexes evaluate (`star_conditions.py`). If the indexes need no help from keys, the other table is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Bound,
    Expression,
    collect_predicates,
    is_longer,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import is_primitive
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import canonicalize_primitive, get_base_name
from seamark.formats.iceberg.types.values import FLOATS, get_decimal_scale
from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import has_keys
from seamark.formats.index.keys.lookups import DimensionSource
from seamark.formats.protocol.wire import RANGE
from seamark.metaserver.planner.joins.dimension_columns import DimensionColumn
from seamark.metaserver.planner.joins.dimensions import DimensionRequest, Dimensions, DimensionSkipped
from seamark.metaserver.planner.joins.extremes import (
    EXTREMES,
    RowsOutside,
    find_extreme_limits,
    make_extreme_condition,
)
from seamark.metaserver.planner.joins.like_predicates import AnyLike
from seamark.metaserver.planner.joins.periods import make_period_condition
from seamark.metaserver.planner.joins.ranges import PlannedColumn, make_range_condition
from seamark.metaserver.planner.joins.star_conditions import JoinedKey, StarCondition, make_star_condition
from seamark.metaserver.planner.lookup.lookup import RequestedColumn
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.pruning.dynamic_filters import DynamicFilter
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry

IN_LOOP_VALUES_MAX = 200
"""The maximum number of values of a filter that is bound in the event loop. Longer filters are bound in a thread."""


class Pair(NamedTuple):
    """A column of the planned table that is compared with a column of the other table.

    The types are canonical names; see `get_canonical_kind`.
    """

    column_id: int
    name: str
    kind: str
    other_id: int
    other_kind: str


@dataclass(frozen=True)
class RequestedJoin:
    """A join of the planned table with another table.

    Attributes:
        table: The name of the other table, as in the request.
        filter: The filter on the other table, bound to its columns.
        operators: For `RANGE`, `MINIMUM` or `MAXIMUM`, the operators between the columns of each pair. All pairs of
            `RANGE` have the same column of the planned table.
        outside: For `MINIMUM` or `MAXIMUM`, a condition on the other table's columns that is true for at least the
            rows that the extreme excludes. None if there is no such condition.
    """

    table: tuple[str, ...]
    metadata: TableMetadata
    entry: Entry
    snapshot_id: int | None
    filter: Expression
    on: tuple[Pair, ...]
    joins: tuple[RequestedJoin, ...] = ()
    likes: tuple[AnyLike, ...] = ()
    transform: str = IDENTITY
    """The way in which the column of the planned table is compared with the column of the other table.

    - `IDENTITY`: the values are equal.
    - `day`, `month`, `year` or `hour`: the other table contains this period of the column (`periods.py`).
    - `MINIMUM` or `MAXIMUM`: the column is compared with the extreme of the other column (`extremes.py`).
    - `RANGE`: the column is in a range of values of the other table (`ranges.py`).
    """
    any_of: int | None = None
    """The number of a group of alternative joins. A row needs a matching row in at least one of these joins."""
    exempt_condition: Expression = FALSE
    """A condition on the planned table's columns. Rows that may match the condition need no matching row."""
    operators: tuple[str, ...] = ()
    outside: Expression | None = None
    star: StarCondition | None = None
    """The condition on attributes of the other table that each matching row satisfies, and that indexes evaluate."""
    needs_keys: bool = True
    """Whether keys may leave out rows that `star` does not leave out."""

    @property
    def is_filter(self) -> bool:
        """Whether each row needs a matching row with an equal value, so that the join gives a dynamic filter."""
        return self.transform == IDENTITY and self.any_of is None and self.exempt_condition == FALSE


class JoinOutcome(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The result of a join.

    Attributes:
        table: The name of the other table.
        snapshot_id: The snapshot of the other table.
        keys: The number of keys or ranges. For several columns, it is the smallest number. None if the table was
            not read.
        used: Whether the plan uses the join.
        reason: The reason why the plan does not use the join.
        indexes: The names of the indexes on attributes of the table that evaluate the join's filter.
    """

    table: tuple[str, ...]
    snapshot_id: int | None
    keys: int | None
    used: bool
    reason: str | None = None
    indexes: tuple[str, ...] = ()


class JoinFilters(NamedTuple):
    """The dynamic filters and the condition that follow from the joins of a table."""

    dynamic_filters: tuple[DynamicFilter, ...]
    outcomes: tuple[JoinOutcome, ...]
    """The outcomes in the order of the joins, depth first."""
    condition: Expression = TRUE
    """A condition on the planned table's columns, from joins that do not give dynamic filters."""
    attribute_filter: Expression = TRUE
    """A condition on attributes of the joined tables, which only indexes evaluate.

    Some joins keep rows without a matching row in the other table, if the rows satisfy a condition on columns of the
    planned table. This condition then has such predicates as alternatives.
    """

    def apply_to(self, bound_scan: BoundScan) -> BoundScan:
        """Return the scan with these filters and this condition."""
        if not self.dynamic_filters and self.condition == self.attribute_filter == TRUE:
            return bound_scan
        return bound_scan.join_with(self.dynamic_filters, self.condition, self.attribute_filter)


async def add_star_conditions(
    planner: Planner, bound_scan: BoundScan, entry: Entry | None, joins: Sequence[RequestedJoin]
) -> list[RequestedJoin]:
    """Add to each join the condition on attributes that the indexes of the planned table can evaluate (star condition).

    In a star schema, the planned table refers to dimension tables. An attribute is a column of such a joined table. An
    index of the planned table can contain the attribute of each row. The arguments stay unchanged, and the result has
    the changed joins.

    Args:
        planner: The planner.
        bound_scan: The scan of the planned table, without its joins.
        entry: The entry of the planned table.
        joins: The joins of the planned table.
    """
    definitions = read_definitions(bound_scan.metadata).enabled
    if not any(definition.dimension_tables for definition in definitions):
        return list(joins)
    return [await _add_attribute_condition(planner, bound_scan, entry, join, definitions) for join in joins]


async def _add_attribute_condition(
    planner: Planner,
    bound_scan: BoundScan,
    entry: Entry | None,
    join: RequestedJoin,
    definitions: Sequence[IndexDefinition],
) -> RequestedJoin:
    """Return the join with the condition that its filter implies on attributes in indexes of the planned table.

    Without such a condition, the join is returned unchanged. If the condition contains the whole filter, and indexes
    cover all files of the scan, the keys of the joined table are not read, because they would exclude no further rows.
    """
    if join.transform != IDENTITY or join.snapshot_id is None:
        return join
    keys = [
        JoinedKey(*pair[:3], DimensionSource(join.table, join.snapshot_id, pair.other_id), pair.other_kind)
        for pair in join.on
    ]
    star = make_star_condition(join.filter, keys, definitions)
    if star is None:
        return join
    is_whole = join.is_filter and star.is_whole and not join.joins and not join.likes
    needs_keys = not is_whole or not await planner.covers(
        bound_scan.join_with((), TRUE, star.expression), star.indexes, entry
    )
    return replace(join, star=star, needs_keys=needs_keys)


async def build_join_filters(dimensions: Dimensions, joins: Sequence[RequestedJoin], until_s: float) -> JoinFilters:
    """Return the dynamic filters and the condition that follow from a table's joins.

    Joins with the same number `any_of` are alternatives: a row needs a matching row in only one of them. If one of them
    cannot be used, none is used. The function waits until `until_s`, in monotonic seconds.
    """
    results = await gather([partial(_build_filters, dimensions, join, until_s) for join in joins])
    pairs = list(zip(joins, results, strict=True))
    parts, attribute_parts = [], []
    for number in dict.fromkeys(join.any_of for join in joins):
        alternatives = [(join, result) for join, result in pairs if join.any_of == number]
        if number is None:
            parts += [_build_condition([alternative]) for alternative in alternatives]
        elif all(result.outcomes[0].used for _, result in alternatives):
            parts.append(_build_condition(alternatives))
        else:
            pairs = [(join, _mark_unused(result) if join.any_of == number else result) for join, result in pairs]
            continue
        if number is None:
            attribute_parts += [_build_attribute_condition([alternative]) for alternative in alternatives]
        else:
            attribute_parts.append(_build_attribute_condition(alternatives))
    return JoinFilters(
        tuple(dynamic_filter for join, result in pairs if join.is_filter for dynamic_filter in result.dynamic_filters),
        tuple(outcome for _, result in pairs for outcome in result.outcomes),
        join_by_and(*parts),
        join_by_and(*attribute_parts),
    )


def _build_attribute_condition(alternatives: Sequence[tuple[RequestedJoin, JoinFilters]]) -> Expression:
    """Return the condition on attributes that each needed row satisfies, from a group of alternative joins.

    A row is needed if it has a partner, a matching row of the other table, in at least one join. A row that satisfies
    the exempt condition of a join needs no partner. So these conditions on columns of the planned table are
    alternatives, too.
    """
    return join_by_or(
        *(part for join, result in alternatives for part in (result.attribute_filter, join.exempt_condition))
    )


def _build_condition(alternatives: Sequence[tuple[RequestedJoin, JoinFilters]]) -> Expression:
    """Return the condition on columns that each needed row satisfies, from a group of alternative joins.

    A row is needed if it has a partner, a matching row of the other table, in at least one join. A row that satisfies
    the exempt condition of a join needs no partner.

    The condition is TRUE if a join is not used, or if it gives a dynamic filter (`is_filter`), a set of keys that is
    evaluated separately.
    """
    if any(join.is_filter or not result.outcomes[0].used for join, result in alternatives):
        return TRUE
    conditions = []
    for join, result in alternatives:
        keys = join_by_and(*(dynamic_filter.as_condition for dynamic_filter in result.dynamic_filters))
        conditions += [join_by_and(keys, result.condition), join.exempt_condition]
    return join_by_or(*conditions)


def _mark_unused(result: JoinFilters) -> JoinFilters:
    """Return a result without filters, whose outcome says that the join was not used."""
    first, *nested_outcomes = result.outcomes
    reason = first.reason or "one of its alternatives was not used"
    return JoinFilters((), (msgspec.structs.replace(first, keys=None, used=False, reason=reason), *nested_outcomes))


async def _build_filters(dimensions: Dimensions, join: RequestedJoin, until_s: float) -> JoinFilters:
    """Return the dynamic filters or the condition that follow from one join."""
    if join.transform in EXTREMES:  # The column is compared with the MIN or MAX of the other column.
        return await _build_extreme_condition(dimensions, join, until_s)
    # `star` is a condition on columns of the other table that indexes of the planned table evaluate.
    star = TRUE if join.star is None else join.star.expression
    indexes = () if join.star is None else tuple(definition.name for definition in join.star.indexes)
    if not join.needs_keys:  # The indexes leave out as many rows as the keys, so the other table is not read.
        outcome = JoinOutcome(join.table, join.snapshot_id, None, used=True, indexes=indexes)
        return JoinFilters((), (outcome,), TRUE, star)
    nested_filters = await build_join_filters(dimensions, join.joins, until_s)
    is_compared, is_range = join.transform == IDENTITY, join.transform == RANGE
    pairs = [pair for pair in join.on if not is_compared or is_comparable(pair.kind, pair.other_kind)]
    dynamic_filters: tuple[DynamicFilter, ...] = ()
    condition: Expression = TRUE
    try:
        if not pairs:
            raise DimensionSkipped(f"{join.on[0].kind} and {join.on[0].other_kind} cannot be compared by keys")
        # Spark and DuckDB order NaN above all numbers, so a row with NaN satisfies > and >=.
        request = ScanRequest(filter=join.filter, snapshot_id=join.snapshot_id, nan_above=True)

        def bind() -> BoundScan:
            return nested_filters.apply_to(BoundScan.bind(join.metadata, request))

        bound_scan = await asyncio.to_thread(bind) if is_longer(join.filter, IN_LOOP_VALUES_MAX) else bind()
        columns = tuple(
            (DimensionColumn(pair.other_id, pair.other_kind), pair.kind if is_compared or is_range else pair.other_kind)
            for pair in pairs
        )
        operators = join.operators if is_range else ()
        keys = await dimensions.find_keys(
            DimensionRequest(bound_scan, join.entry, columns, join.likes, operators), until_s
        )
        if is_range:
            condition = _make_range_condition(pairs[0], *keys)
        elif not is_compared:
            condition = _make_period_condition(pairs[0], join.transform, keys[0])
        else:
            dynamic_filters = tuple(
                DynamicFilter(pair.column_id, pair.name, pair.kind, key_set)
                for pair, key_set in zip(pairs, keys, strict=True)
            )
        outcome = JoinOutcome(join.table, join.snapshot_id, min(map(len, keys)), used=True, indexes=indexes)
    except DimensionSkipped as error:
        outcome = JoinOutcome(
            join.table, join.snapshot_id, None, used=bool(indexes), reason=error.reason, indexes=indexes
        )
    return JoinFilters(dynamic_filters, (outcome, *nested_filters.outcomes), condition, star)


async def _build_extreme_condition(dimensions: Dimensions, join: RequestedJoin, until_s: float) -> JoinFilters:
    """Return the condition on the column that is compared with the extreme of the other table's column.

    The extreme, a minimum or maximum, is not read from rows. Its limits follow from the statistics of the files.

    Args:
        dimensions: Plans the scan of the other table.
        join: The join.
        until_s: The time until which the function waits, in monotonic seconds.
    """
    pair, op = join.on[0], join.operators[0]
    condition: Expression = TRUE
    try:
        if join.joins or join.likes:
            raise DimensionSkipped("statistics do not show the extreme of the rows that satisfy joins or LIKE")
        # Spark and DuckDB order NaN above all numbers, so a row with NaN satisfies > and >=.
        request = ScanRequest(filter=join.filter, snapshot_id=join.snapshot_id, nan_above=True)
        bound_scan = BoundScan.bind(join.metadata, request)

        def read(scan: ScanPlan) -> Expression:
            column = RequestedColumn(pair.other_id, pair.other_kind)
            limits = find_extreme_limits(join.transform, column, scan, _make_outside_condition(join))
            planned_column = PlannedColumn(pair.column_id, pair.name, pair.kind)
            return make_extreme_condition(planned_column, op, pair.other_kind, limits)

        condition = await dimensions.derive_condition(bound_scan, join.entry, read, until_s)
        outcome = JoinOutcome(join.table, join.snapshot_id, keys=1, used=True)
    except DimensionSkipped as error:
        outcome = JoinOutcome(join.table, join.snapshot_id, None, used=False, reason=error.reason)
    return JoinFilters((), (outcome,), condition)


def _make_outside_condition(join: RequestedJoin) -> RowsOutside | None:
    """Return the rows of the other table that do not count for its MIN or MAX, because they do not match the filter.

    Return None if the statistics do not show exactly which rows these are.
    """
    outside = join.outside
    if outside is None or not all(map(_is_decided_by_statistics, collect_predicates(outside))):
        return None
    bound_scan = BoundScan.bind(join.metadata, ScanRequest(filter=outside, snapshot_id=join.snapshot_id))
    return RowsOutside(bound_scan.bound, bound_scan.partition_filters)


def _is_decided_by_statistics(predicate: Bound) -> bool:
    """Return whether file statistics can show that all rows match a predicate, with the same result in all clients.

    Clients differ about NaN, and some file formats do not count a field of a null struct as null.
    """
    return get_base_name(predicate.kind) not in FLOATS and "." not in predicate.name


def _make_range_condition(pair: Pair, starts: KeySet, ends: KeySet) -> Expression:
    """Return the condition that a column is in one of the ranges.

    Args:
        pair: The column, and the column of the other table.
        starts: The start of each range.
        ends: The end of each range.

    Raises:
        DimensionSkipped: No condition follows from the ranges.
    """
    try:
        return make_range_condition(PlannedColumn(pair.column_id, pair.name, pair.kind), starts, ends)
    except ValueError as error:
        raise DimensionSkipped(str(error)) from None


def _make_period_condition(pair: Pair, transform: str, keys: KeySet) -> Expression:
    """Return the condition on a column whose period must be one of the keys.

    Raises:
        DimensionSkipped: No condition follows from the keys.
    """
    try:
        return make_period_condition(pair.column_id, pair.name, pair.kind, transform, keys)
    except ValueError as error:
        raise DimensionSkipped(str(error)) from None


def is_comparable(kind: str, other: str) -> bool:
    """Return whether equal values of two types have equal keys after `KeySet.convert_to_kind`.

    Floats do not, because clients compare NaN and -0.0 in different ways.
    """
    names = get_base_name(kind), get_base_name(other)
    if not all(is_primitive(primitive) and has_keys(primitive) for primitive in (kind, other)) or {
        "unknown",
        *FLOATS,
    } & set(names):
        return False
    if names == ("decimal", "decimal"):
        return get_decimal_scale(kind) == get_decimal_scale(other)
    return kind == other or set(names) == {"int", "long"}


def get_canonical_kind(kind: object) -> str:
    """Return the canonical name of a primitive type."""
    assert isinstance(kind, str)
    return canonicalize_primitive(kind)
