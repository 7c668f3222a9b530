"""Joins of a statement as demands on a table's rows: which keys a row must have to meet a row of the other table.

The rules it keeps. A row can matter only if for each join the other table has a row that is equal in all columns of
`on`, none of them null, and for which its filter may be true; of several columns each one's keys are taken alone, which
is a superset. Types whose equality is not that of their keys, as of floats, demand nothing. What cannot be told in time
or within bounds is left out, and said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from metaserver.gathering import gathered
from metaserver.iceberg.expressions.expression import Expression
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.schema import is_primitive
from metaserver.iceberg.types.types import base_name, canonical_primitive
from metaserver.iceberg.types.values import FLOATS, decimal_scale
from metaserver.index.keys.keys import has_codes
from metaserver.planner.joins.dimension_columns import DimensionColumn
from metaserver.planner.joins.dimensions import DimensionRequest, Dimensions, DimensionSkipped
from metaserver.planner.pruning.dynamic_filters import DynamicFilter
from metaserver.planner.scan.request import BoundScan, ScanRequest
from metaserver.store.port import Entry


class Pair(NamedTuple):
    """A column of the table, and one of the other, that are equal. `kind`s are canonical types."""

    column_id: int
    name: str
    kind: str
    other_id: int
    other_kind: str


@dataclass(frozen=True)
class Join:
    """`table` as it was asked for. `filter` is bound, over the other table's columns."""

    table: tuple[str, ...]
    metadata: TableMetadata
    entry: Entry
    snapshot_id: int | None
    filter: Expression
    on: tuple[Pair, ...]
    joins: tuple[Join, ...] = ()


class JoinOutcome(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """What became of a join. `keys`: how many the other table has left, of several columns the fewest; None where it
    was left out."""

    table: tuple[str, ...]
    snapshot_id: int | None
    keys: int | None
    used: bool
    reason: str | None = None


class JoinFilters(NamedTuple):
    dynamic_filters: tuple[DynamicFilter, ...]
    told: tuple[JoinOutcome, ...]
    """In the order of the joins, depth first."""


async def join_filters(dimensions: Dimensions, joins: Sequence[Join], until_s: float) -> JoinFilters:
    """What the joins demand of the columns of a table; until then, in monotonic time, they are waited for."""
    found = await gathered([partial(_demanded, dimensions, join, until_s) for join in joins])
    dynamic_filters = tuple(one for each in found for one in each.dynamic_filters)
    return JoinFilters(dynamic_filters, tuple(one for each in found for one in each.told))


async def _demanded(dimensions: Dimensions, join: Join, until_s: float) -> JoinFilters:
    nested = await join_filters(dimensions, join.joins, until_s)
    pairs = [pair for pair in join.on if is_comparable(pair.kind, pair.other_kind)]
    dynamic_filters: tuple[DynamicFilter, ...] = ()
    try:
        if not pairs:
            raise DimensionSkipped(f"{join.on[0].kind} and {join.on[0].other_kind} are not compared by keys")
        request = ScanRequest(filter=join.filter, snapshot_id=join.snapshot_id)
        bound_scan = BoundScan.bind(join.metadata, request, nested.dynamic_filters)
        columns = tuple((DimensionColumn(pair.other_id, pair.other_kind), pair.kind) for pair in pairs)
        keys = await dimensions.keys(DimensionRequest(bound_scan, join.entry, columns), until_s)
        dynamic_filters = tuple(
            DynamicFilter(pair.column_id, pair.name, pair.kind, one) for pair, one in zip(pairs, keys, strict=True)
        )
        told = JoinOutcome(join.table, join.snapshot_id, min(map(len, keys)), used=True)
    except DimensionSkipped as left_out:
        told = JoinOutcome(join.table, join.snapshot_id, None, used=False, reason=left_out.reason)
    return JoinFilters(dynamic_filters, (told, *nested.told))


def is_comparable(kind: str, other: str) -> bool:
    """Whether values of two types are equal where their keys are, once `KeySet.of_kind` has made them of one."""
    names = base_name(kind), base_name(other)
    if not all(is_primitive(one) and _has_keys(one) for one in (kind, other)) or {"unknown", *FLOATS} & set(names):
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
    """The canonical type of a column that is not nested."""
    assert isinstance(kind, str)
    return canonical_primitive(kind)
