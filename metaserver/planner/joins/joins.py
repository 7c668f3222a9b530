"""Dynamic filters from joins: which keys a row must have to join with a row of the other table.

A row is needed only if, for each join, the other table has a row that equals it in all columns of `on`, none of them
null, and that may match the join's filter. Each of several columns has its own key set, which is a superset. Types
whose equality differs from that of their keys, such as floats, produce no filter. A join that exceeds its time or
limits is skipped, and its outcome says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from seamark.metaserver.gathering import gathered
from seamark.metaserver.iceberg.expressions.expression import Expression
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.types.schema import is_primitive
from seamark.metaserver.iceberg.types.types import base_name, canonical_primitive
from seamark.metaserver.iceberg.types.values import FLOATS, decimal_scale
from seamark.metaserver.index.keys.keys import has_codes
from seamark.metaserver.planner.joins.dimension_columns import DimensionColumn
from seamark.metaserver.planner.joins.dimensions import DimensionRequest, Dimensions, DimensionSkipped
from seamark.metaserver.planner.pruning.dynamic_filters import DynamicFilter
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.store.model import Entry


class Pair(NamedTuple):
    """A column of the table that equals a column of the other table. `kind`s are canonical types."""

    column_id: int
    name: str
    kind: str
    other_id: int
    other_kind: str


@dataclass(frozen=True)
class Join:
    """A join with another table. `table`: its name in the request. `filter`: bound to the other table's columns."""

    table: tuple[str, ...]
    metadata: TableMetadata
    entry: Entry
    snapshot_id: int | None
    filter: Expression
    on: tuple[Pair, ...]
    joins: tuple[Join, ...] = ()


class JoinOutcome(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The result of a join. `keys`: the number of keys, for several columns the smallest; None if the join was
    skipped.
    """

    table: tuple[str, ...]
    snapshot_id: int | None
    keys: int | None
    used: bool
    reason: str | None = None


class JoinFilters(NamedTuple):
    dynamic_filters: tuple[DynamicFilter, ...]
    outcomes: tuple[JoinOutcome, ...]
    """In the order of the joins, depth first."""


async def join_filters(dimensions: Dimensions, joins: Sequence[Join], until_s: float) -> JoinFilters:
    """The dynamic filters of a table's joins. Waits until `until_s`, in monotonic seconds."""
    results = await gathered([partial(_filters_of, dimensions, join, until_s) for join in joins])
    dynamic_filters = tuple(dynamic_filter for result in results for dynamic_filter in result.dynamic_filters)
    return JoinFilters(dynamic_filters, tuple(outcome for result in results for outcome in result.outcomes))


async def _filters_of(dimensions: Dimensions, join: Join, until_s: float) -> JoinFilters:
    nested = await join_filters(dimensions, join.joins, until_s)
    pairs = [pair for pair in join.on if is_comparable(pair.kind, pair.other_kind)]
    dynamic_filters: tuple[DynamicFilter, ...] = ()
    try:
        if not pairs:
            raise DimensionSkipped(f"{join.on[0].kind} and {join.on[0].other_kind} cannot be compared by keys")
        request = ScanRequest(filter=join.filter, snapshot_id=join.snapshot_id)
        bound_scan = BoundScan.bind(join.metadata, request, nested.dynamic_filters)
        columns = tuple((DimensionColumn(pair.other_id, pair.other_kind), pair.kind) for pair in pairs)
        keys = await dimensions.keys(DimensionRequest(bound_scan, join.entry, columns), until_s)
        dynamic_filters = tuple(
            DynamicFilter(pair.column_id, pair.name, pair.kind, key_set)
            for pair, key_set in zip(pairs, keys, strict=True)
        )
        outcome = JoinOutcome(join.table, join.snapshot_id, min(map(len, keys)), used=True)
    except DimensionSkipped as skipped:
        outcome = JoinOutcome(join.table, join.snapshot_id, None, used=False, reason=skipped.reason)
    return JoinFilters(dynamic_filters, (outcome, *nested.outcomes))


def is_comparable(kind: str, other: str) -> bool:
    """Whether equal values of the two types have equal keys, after `KeySet.of_kind` converts them to one type."""
    names = base_name(kind), base_name(other)
    if not all(is_primitive(primitive) and _has_keys(primitive) for primitive in (kind, other)) or {
        "unknown",
        *FLOATS,
    } & set(names):
        return False
    if names == ("decimal", "decimal"):
        return decimal_scale(kind) == decimal_scale(other)
    return kind == other or set(names) == {"int", "long"}


def _has_keys(kind: str) -> bool:
    try:
        has_codes(kind)
    except ValueError:
        return False
    return True


def kind_of(kind: object) -> str:
    """The canonical name of a primitive type."""
    assert isinstance(kind, str)
    return canonical_primitive(kind)
