"""The pruning stages of a plan. They narrow the files of a view to those that can contain a matching row.

Stages run in ascending order of cost, each on the files that the previous stage kept. A stage that the filter does not
need is omitted. Files that are not checked within the time budget are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.planner.indexes.probe import Probe
from seamark.metaserver.planner.plan.cached_views import CachedView
from seamark.metaserver.planner.plan.metadata_deletes import find_file_against_metadata_delete, weaken_to_java_pruning
from seamark.metaserver.planner.pruning.dynamic_filters import DynamicFilter
from seamark.metaserver.planner.pruning.file_pruning import (
    keep_appended_files,
    narrow_by_partition,
    narrow_by_stats,
    narrow_to_keys,
)
from seamark.metaserver.planner.scan.request import BoundScan, list_appends
from seamark.metaserver.planner.scan.scan_plan import PruningStage, ScanPlan
from seamark.metaserver.planner.view.selection import FileSelection
from seamark.metaserver.planner.view.view import TableView

_NOT_COUNTED = (-1, -1)
"""The numbers of files and bytes of a stage that does not count them."""
_LAST_STAGE = "column_stats"
"""The name of the last stage of a plan without indexes and joins.

This stage also lists the kept rows, and so evaluates all queued comparisons. If the stages do not count files, these
include the comparisons of earlier stages.
"""


def run_stages(
    cached_view: CachedView,
    bound_scan: BoundScan,
    is_expired: Callable[[], bool],
    clock: Clock,
    *,
    probe: Probe | None = None,
    loaded_us: int | None = None,
) -> ScanPlan:
    """Run the stages, and return a plan of the remaining files.

    Args:
        cached_view: The view of the snapshot, with its delete index.
        bound_scan: The scan.
        is_expired: A function that returns whether the time budget of the plan is exhausted.
        clock: The clock.
        probe: The indexes that the plan may use.
        loaded_us: The time that loading the manifests took, in microseconds. If it is not None, the first stage reports
            it, and all stages count files and bytes.
    """
    is_measured = loaded_us is not None
    selection = FileSelection.select_all(cached_view.view)
    stages: list[PruningStage] = []
    files, size_bytes = selection.measure_size() if is_measured else _NOT_COUNTED
    if loaded_us is not None:
        stages.append(PruningStage("manifests", files, files, size_bytes, size_bytes, loaded_us))
    entry_ids: Longs | None = None
    last_stage = "" if probe is not None or bound_scan.dynamic_filters else _LAST_STAGE
    for name, narrow_selection in _list_stages(cached_view.view, bound_scan, is_expired, probe):
        start_s = clock.monotonic()
        narrow_selection(selection)
        if name == last_stage:
            entry_ids = selection.list_entry_ids()
        elif is_measured:
            selection.apply_waiting()
        spent_us = int((clock.monotonic() - start_s) * 1e6)
        files_in, bytes_in = files, size_bytes
        if is_measured:
            files, size_bytes = selection.measure_size()
        stages.append(PruningStage(name, files_in, files, bytes_in, size_bytes, spent_us, not is_expired()))
    scan = ScanPlan(
        cached_view.view,
        cached_view.deletes,
        selection.list_entry_ids() if entry_ids is None else entry_ids,
        schema=bound_scan.schema,
        bound=bound_scan.bound,
        projection=bound_scan.filter_projections,
        metadata=_drop_history(bound_scan.metadata),
        stages=tuple(stages),
        snapshot_id=bound_scan.snapshot_id,
        considered_files=cached_view.files,
        complete=all(stage.complete for stage in stages) and (probe is None or probe.complete),
        indexes=() if probe is None else probe.used,
    )
    if bound_scan.options.may_delete_files:
        java_filter = weaken_to_java_pruning(bound_scan.bound)
        # Without indexes and with the same filter, Java's statistics keep the files of the plan.
        if probe is not None or java_filter != bound_scan.bound:
            added_id = find_file_against_metadata_delete(
                scan, java_filter, _make_partition_filters(cached_view.view, bound_scan), is_expired
            )
            if added_id is not None:
                return scan.with_file(added_id)
    return scan


def _make_partition_filters(view: TableView, bound_scan: BoundScan) -> dict[int, Expression]:
    """Return the conditions on partition values for the view's specs."""
    return {
        spec_id: expression for spec_id, expression in bound_scan.partition_filters.items() if spec_id in view.specs
    }


def _list_stages(
    view: TableView, bound_scan: BoundScan, is_expired: Callable[[], bool], probe: Probe | None
) -> Iterator[tuple[str, Callable[[FileSelection], None]]]:
    """Yield the stages that narrow the selection, with their names, in ascending order of cost."""
    if bound_scan.options.is_incremental:
        ids = {snapshot.snapshot_id for snapshot in list_appends(bound_scan.metadata, bound_scan.options)}
        yield "appended", partial(keep_appended_files, snapshot_ids=ids)
    # A scan without a filter returns all files. Statistics would leave out files without rows.
    if bound_scan.is_unfiltered:
        return
    by_spec = _make_partition_filters(view, bound_scan)
    if any(expression != TRUE for expression in by_spec.values()):
        yield "partition", partial(narrow_by_partition, by_spec=by_spec, is_expired=is_expired)
    yield "column_stats", partial(narrow_by_stats, expression=bound_scan.bound, is_expired=is_expired)
    if bound_scan.dynamic_filters:
        yield "join_keys", partial(_narrow_by_keys, dynamic_filters=bound_scan.dynamic_filters, is_expired=is_expired)
    if probe is not None:
        yield from probe.list_steps(is_expired)


def _narrow_by_keys(
    selection: FileSelection, dynamic_filters: Sequence[DynamicFilter], is_expired: Callable[[], bool]
) -> None:
    """Remove the files from the selection whose statistics exclude all keys of a dynamic filter.

    A dynamic filter is the set of keys of the other table of a join. The function returns early if the time budget of
    the plan is exhausted.
    """
    for dynamic_filter in dynamic_filters:
        if is_expired():
            return
        narrow_to_keys(selection, dynamic_filter.column_id, dynamic_filter.kind, dynamic_filter.keys)


def _drop_history(metadata: TableMetadata) -> TableMetadata:
    """Return the metadata without the history of snapshots, so that cached plans stay small."""
    return msgspec.structs.replace(metadata, snapshots=(), snapshot_log=(), metadata_log=(), refs={})
