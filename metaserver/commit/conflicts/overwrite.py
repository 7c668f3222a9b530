"""Selects the live files that an overwrite replaces: the files in its scope.

A file is removed if all of its rows are in the scope, and stays if none of its rows are. If only some rows may be in
the scope, the change is refused with a BadRequest that names the file. Otherwise, the other rows of the file would be
lost, or its rows in the scope would remain (Java: `ManifestFilterManager`). All rows of a file match a filter if its
partition and bounds prove that no row matches the negation of the filter, which includes null and NaN.
"""

from __future__ import annotations

import asyncio

import numpy as np

from seamark.formats.iceberg.expressions.binding import OPPOSITE, bind
from seamark.formats.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Op,
    Or,
    Unbound,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.errors import BadRequest, RetryLater
from seamark.metaserver.commit.change_requests.change import ReadScope
from seamark.metaserver.commit.change_requests.change_body import Remove
from seamark.metaserver.commit.conflicts.overlap import PartitionOverlap, Targets
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.view import TableView


async def find_replaced_files(
    planner: Planner, metadata: TableMetadata, head: Snapshot | None, scope: ReadScope
) -> set[Remove]:
    """Return the data files of a branch's last snapshot that are in the scope.

    A filter is planned twice: a file that is in the plan of the filter, and not in the plan of its negation, has only
    matching rows.

    Args:
        planner: Plans the filter.
        metadata: The table's metadata.
        head: The last snapshot of the branch, or None for an empty table.
        scope: The filter or the partitions of the files to replace.

    Raises:
        BadRequest: A file may be only partly in the scope. The message names the file.
        RetryLater: Planning the filter exceeded its time limit, so it is unknown whether a file is only partly in the
            scope.
    """
    if head is None:
        return set()
    if scope.bound is None:
        view = await planner.view(metadata, ScanRequest(snapshot_id=head.snapshot_id))
        return await asyncio.to_thread(_select_files_in_scope, view, metadata, scope)
    matching_plan = await planner.bind_and_plan(metadata, ScanRequest(filter=scope.bound, snapshot_id=head.snapshot_id))
    paths = await asyncio.to_thread(_list_paths, matching_plan.view, matching_plan.entry_ids)
    if scope.bound != TRUE:
        negation = await asyncio.to_thread(negate_bound_expression, scope.bound, metadata)
        negation_plan = await planner.bind_and_plan(
            metadata, ScanRequest(filter=negation, snapshot_id=head.snapshot_id)
        )
        # A file in both plans may have rows that match the filter, and rows that do not match.
        mixed_paths = await asyncio.to_thread(lambda: paths & _list_paths(negation_plan.view, negation_plan.entry_ids))
        if mixed_paths and not (matching_plan.complete and negation_plan.complete):
            raise RetryLater("replace: planning the filter exceeded its time limit; try again")
        if mixed_paths:
            raise BadRequest(
                f"replace: only some of the rows of {min(mixed_paths)[:1000]} may match the filter; use a filter for "
                "which partitions or column bounds show that all rows match, or rewrite the file"
            )
    return await asyncio.to_thread(lambda: {Remove(path) for path in paths})


def _list_paths(view: TableView, rows: Longs) -> set[str]:
    return {
        path.decode() for path in find_files_at(view, rows).read_texts("file_path").list_values() if path is not None
    }


def _select_files_in_scope(view: TableView, metadata: TableMetadata, scope: ReadScope) -> set[Remove]:
    """Return the files of a view whose partitions are in the partitions of the scope.

    Raises:
        BadRequest: A file may be only partly in the scope. The message names the file.
    """
    targets = Targets(PartitionOverlap(metadata), scope.partitions)
    rows = np.concatenate([np.empty(0, dtype=np.int64), *map(view.list_block_entry_ids, range(len(view.blocks)))])
    groups = group_by_partition(find_files_at(view, rows))
    is_in_scope = []
    for number, partition in enumerate(groups.partitions):
        is_contained = targets.contain(partition)
        if not is_contained and targets.overlap(partition):
            path = min(_list_paths(view, rows[groups.numbers == number]))
            raise BadRequest(
                f"replace: {path[:1000]} has partition spec {partition.spec_id}; only some of its rows may be in the "
                "written partitions. Rewrite the file with the current partition spec first"
            )
        is_in_scope.append(is_contained)
    return {Remove(path) for path in _list_paths(view, rows[np.array(is_in_scope, dtype=np.bool_)[groups.numbers]])}


def negate_bound_expression(expression: Expression, metadata: TableMetadata) -> Expression:
    """Return the negation of a bound expression. Each row that does not match the expression matches its negation.

    A null or NaN may match neither a predicate nor its usual negation. The result then matches these values. Engines
    disagree on whether NaN is greater than a number, so NaN may match both the expression and its negation.
    """
    match expression:
        case And(children):
            return join_by_or(*(negate_bound_expression(child, metadata) for child in children))
        case Or(children):
            return join_by_and(*(negate_bound_expression(child, metadata) for child in children))
        case Always(value):
            return Always(not value)
        case Bound():
            return _negate_predicate(expression, metadata)
    raise TypeError(f"not a bound expression: {expression!r}")


def _negate_predicate(predicate: Bound, metadata: TableMetadata) -> Expression:
    """Return a condition that every row satisfies for which the predicate is not true.

    The predicate and its opposite may both be false or unknown for NaN and null, so terms for these values are added.
    """
    opposite = OPPOSITE[predicate.op]
    negation = Bound(
        opposite,
        predicate.column_id,
        predicate.name,
        predicate.kind,
        predicate.transform,
        predicate.result,
        predicate.values,
    )
    if predicate.op in (Op.IS_NULL, Op.NOT_NULL, Op.IS_NAN, Op.NOT_NAN):
        return negation
    terms: list[Expression] = [negation]
    if predicate.result in FLOATS:
        terms.append(_bind_again(predicate, Op.IS_NAN, metadata))
    if opposite not in NULL_MATCHES and predicate.op not in NULL_MATCHES:
        terms.append(_bind_again(predicate, Op.IS_NULL, metadata))
    return join_by_or(*terms)


def _bind_again(predicate: Bound, op: Op, metadata: TableMetadata) -> Expression:
    """Return a predicate with the operator `op` on the term of `predicate`.

    The column is found by its id, because the current schema may have a different column with the same name. Binding
    simplifies a null test on a required column to a constant.
    """
    column = metadata.current_schema.column(predicate.column_id)
    if column is None:  # The column was dropped, but older files still have it.
        return Bound(op, predicate.column_id, predicate.name, predicate.kind, predicate.transform, predicate.result, ())
    term = Unbound(op, column.name, predicate.transform, ())
    return bind(term, metadata.current_schema, metadata.schemas, case_sensitive=True)
