"""The pruning of one plan: the stages that narrow a view's files down to those that can hold a matching row.

The rule kept: the cheapest first, each on what the one before it left, and none that the filter does not need. What is
not checked within the time budget is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from metaserver.clock import Clock
from metaserver.iceberg.expressions.expression import TRUE
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.planner.deletes.delete_index import DeleteIndex
from metaserver.planner.indexes.probe import Probe
from metaserver.planner.pruning.dynamic_filters import DynamicFilter
from metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats, narrow_to_keys
from metaserver.planner.pruning.incremental import keep_appended
from metaserver.planner.scan.request import BoundScan, appended
from metaserver.planner.scan.scan import Scan, Stage
from metaserver.planner.view.selection import Selection
from metaserver.planner.view.view import TableView

_NOT_COUNTED = (-1, -1)


class PruningInput(NamedTuple):
    """What is pruned. `files` are the live files of the snapshot, those of manifests that the view leaves out
    included."""

    view: TableView
    deletes: DeleteIndex
    files: int


def prune(
    subject: PruningInput,
    bound_scan: BoundScan,
    expired: Callable[[], bool],
    clock: Clock,
    *,
    probe: Probe | None = None,
    loaded_us: int | None = None,
) -> Scan:
    """The files that are left, and the stages on the way. With `loaded_us`, how long it took to have the manifests,
    that is the first stage, and files and bytes are counted at each."""
    counted = loaded_us is not None
    selection = Selection.everything(subject.view)
    stages: list[Stage] = []
    size = selection.size() if counted else _NOT_COUNTED
    if loaded_us is not None:
        stages.append(Stage("manifests", size[0], size[0], size[1], size[1], loaded_us))
    for name, narrow in _steps(subject, bound_scan, expired, probe):
        before_s = clock.monotonic()
        narrow(selection)
        spent_us = int((clock.monotonic() - before_s) * 1e6)
        before, size = size, selection.size() if counted else size
        stages.append(Stage(name, before[0], size[0], before[1], size[1], spent_us, not expired()))
    return Scan(
        subject.view,
        subject.deletes,
        selection.rows(),
        schema=bound_scan.schema,
        bound=bound_scan.bound,
        projected=bound_scan.projected,
        metadata=_without_history(bound_scan.metadata),
        stages=tuple(stages),
        snapshot_id=bound_scan.snapshot_id,
        considered=subject.files,
        complete=all(stage.complete for stage in stages) and (probe is None or probe.complete),
        indexes=() if probe is None else probe.used,
    )


def _steps(
    subject: PruningInput, bound_scan: BoundScan, expired: Callable[[], bool], probe: Probe | None
) -> Iterator[tuple[str, Callable[[Selection], None]]]:
    """What narrows the selection, by name, the cheapest first."""
    if bound_scan.request.incremental:
        ids = {snapshot.snapshot_id for snapshot in appended(bound_scan.metadata, bound_scan.request)}
        yield "appended", partial(keep_appended, snapshot_ids=ids)
    if bound_scan.is_unfiltered:  # of a filter that is true of all rows, files without rows are left out
        return
    by_spec = {number: demand for number, demand in bound_scan.demands.items() if number in subject.view.specs}
    if any(demand != TRUE for demand in by_spec.values()):
        yield "partition", partial(narrow_by_partition, by_spec=by_spec, expired=expired)
    yield "column_stats", partial(narrow_by_stats, expression=bound_scan.bound, expired=expired)
    if bound_scan.dynamic_filters:
        yield "join_keys", partial(_narrow_by_members, dynamic_filters=bound_scan.dynamic_filters, expired=expired)
    if probe is not None:
        yield from probe.steps(expired)


def _narrow_by_members(
    selection: Selection, dynamic_filters: Sequence[DynamicFilter], expired: Callable[[], bool]
) -> None:
    """By statistics of the columns that joins ask about."""
    for one in dynamic_filters:
        if expired():
            return
        narrow_to_keys(selection, one.column_id, one.kind, one.keys)


def _without_history(metadata: TableMetadata) -> TableMetadata:
    """For plans that are kept: thousands of snapshots would be kept with each."""
    return msgspec.structs.replace(metadata, snapshots=(), snapshot_log=(), metadata_log=(), refs={})
