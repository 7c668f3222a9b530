"""Which live files an overwrite takes away: those that lie within what it replaces.

A file goes where all of its rows do, and stays where none does; one of which only a part may be meant is a BadRequest
that names it, for its other rows would be lost or its own stay (Java: `ManifestFilterManager`). All rows match a filter
where partition and bounds prove that none matches its opposite, null and NaN included.
"""

from __future__ import annotations

import asyncio

import numpy as np

from metaserver.commits.change import ReadScope, Remove
from metaserver.commits.overlap import PartitionOverlap, Targets
from metaserver.errors import BadRequest, RetryLater
from metaserver.iceberg.expressions.binding import OPPOSITE, bind
from metaserver.iceberg.expressions.evaluation import NULL_MATCHES
from metaserver.iceberg.expressions.expression import (
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Op,
    Or,
    Unbound,
    all_of,
    any_of,
)
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.iceberg.types.values import FLOATS
from metaserver.index.blocks.packing import Longs
from metaserver.planner.lookup.lookup import files_at
from metaserver.planner.lookup.partitions import group_by_partition
from metaserver.planner.plan.planner import Planner
from metaserver.planner.scan.request import ScanRequest
from metaserver.planner.view.view import TableView


async def replaced_files(
    planner: Planner, metadata: TableMetadata, head: Snapshot | None, scope: ReadScope
) -> set[Remove]:
    """The head's data files within the scope. BadRequest naming one that lies in it with a part of its rows."""
    if head is None:
        return set()
    if scope.bound is None:
        view = await planner.view(metadata, ScanRequest(snapshot_id=head.snapshot_id))
        return await asyncio.to_thread(_within, view, metadata, scope)
    meant = await planner.scan(metadata, ScanRequest(scope.bound, head.snapshot_id))
    paths = _paths(meant.view, meant.rows)
    if scope.bound != TRUE:
        others = await planner.scan(metadata, ScanRequest(rest(scope.bound, metadata), head.snapshot_id))
        partly = paths & _paths(others.view, others.rows)
        if partly and not (meant.complete and others.complete):
            raise RetryLater("replace: there was no time to tell which files the filter holds; try again")
        if partly:
            raise BadRequest(
                f"replace: of the rows of {min(partly)[:1000]} some may match the filter and some not; replace what "
                "partitions and bounds can tell apart, or rewrite the file"
            )
    return {Remove(path) for path in paths}


def _paths(view: TableView, rows: Longs) -> set[str]:
    return {path.decode() for path in files_at(view, rows).texts("file_path").values() if path is not None}


def _within(view: TableView, metadata: TableMetadata, scope: ReadScope) -> set[Remove]:
    targets = Targets(PartitionOverlap(metadata), scope.partitions)
    rows = np.concatenate([np.empty(0, dtype=np.int64), *map(view.rows_of, range(len(view.blocks)))])
    groups = group_by_partition(files_at(view, rows))
    goes = []
    for number, one in enumerate(groups.partitions):
        inside = targets.hold(one)
        if not inside and targets.overlap(one):
            path = min(_paths(view, rows[groups.numbers == number]))
            raise BadRequest(
                f"replace: {path[:1000]} was written by the partition spec {one.spec_id}; some of its rows may lie in "
                "the partitions that are written and some not. Rewrite it by the current spec first"
            )
        goes.append(inside)
    return {Remove(path) for path in _paths(view, rows[np.array(goes, dtype=np.bool_)[groups.numbers]])}


def rest(expression: Expression, metadata: TableMetadata) -> Expression:
    """What every row matches that does not match a bound expression: its opposite, and null and NaN where neither does.

    Engines differ on whether NaN is above a number, so it may match both.
    """
    match expression:
        case And(children):
            return any_of(*(rest(child, metadata) for child in children))
        case Or(children):
            return all_of(*(rest(child, metadata) for child in children))
        case Always(value):
            return Always(not value)
        case Bound():
            return _opposite(expression, metadata)
    raise TypeError(f"not a bound expression: {expression}")


def _opposite(predicate: Bound, metadata: TableMetadata) -> Expression:
    opposite = OPPOSITE[predicate.op]
    turned = Bound(
        opposite,
        predicate.column_id,
        predicate.name,
        predicate.kind,
        predicate.transform,
        predicate.result,
        predicate.values,
    )
    if predicate.op in (Op.IS_NULL, Op.NOT_NULL, Op.IS_NAN, Op.NOT_NAN):
        return turned
    found: list[Expression] = [turned]
    if predicate.result in FLOATS:
        found.append(_asked(predicate, Op.IS_NAN, metadata))
    if opposite not in NULL_MATCHES and predicate.op not in NULL_MATCHES:
        found.append(_asked(predicate, Op.IS_NULL, metadata))
    return any_of(*found)


def _asked(predicate: Bound, op: Op, metadata: TableMetadata) -> Expression:
    """Bound anew: what can never be null needs no statistics to say so."""
    term = Unbound(op, predicate.name, predicate.transform, ())
    return bind(term, metadata.current_schema, metadata.schemas, case_sensitive=True)
