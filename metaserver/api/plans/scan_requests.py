"""Defines the body of a plan request, and derives from it how the client may use the files.

Iceberg's Java library sends the same request to read files and to change files, so the request does not state two
facts. The selected columns show them (the names of Java's methods are in parentheses):

- Spark may delete the planned files by metadata (`SparkTable.canDeleteWhere`). It selects all columns of the table.
- Spark may write all rows of a file again, so that its reader must not apply the residual: copy-on-write
  (`SparkScanBuilder.buildCopyOnWriteScan`) selects `_file`, and the procedure `rewrite_data_files`
  (`BinPackRewriteFilePlanner`) selects all columns. Both call `Scan.ignoreResiduals`, which `RESTTableScan` does not
  send. Spark's readers then skip the row groups in which no row satisfies the residual of the answer, and the rows of
  these row groups would be missing in the new files.

A query may select the same columns. It then gets a residual that skips no row group, and at most one additional file.
"""

from __future__ import annotations

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.types.schema import Schema, is_primitive
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.plans.statement_reads import NO_USE, ReportedUse
from seamark.metaserver.planner.answer.content_files import ClientDialect
from seamark.metaserver.planner.scan.request import PinnedRequest, find_expired_ancestor, find_schemas_while_head

STATS_FIELDS_MAX = 10_000
"""The maximum number of stats fields of one request. Plan tasks contain the names of these fields."""
FILE_COLUMN = "_file"
"""The metadata column with which Spark finds the files whose rows a statement rewrites or deletes."""
_MERGE_ON_READ_COLUMNS = frozenset({"_pos", "_spec_id", "_partition"})
"""The metadata columns that a merge-on-read statement selects in addition to `_file`.

Such a statement never rewrites the other rows of a file.
"""
_MODE_PROPERTIES = ("write.delete.mode", "write.update.mode", "write.merge.mode")


class _Extensions(msgspec.Struct, frozen=True, rename="kebab"):
    """The fields of a plan request that only Seamark's client sends (`planner.answer.TaskForm`)."""

    residuals: bool = True
    sequence_numbers: bool = False
    usage: bool = True
    """Whether the scan counts as a read of its columns.

    Scans of maintenance jobs do not count, because they read all columns of old files.
    """
    functions: bool = False
    """Whether the filter may contain functions of SQL (`formats/iceberg/types/functions.py`).

    If it is true, `residuals` must be false, because Iceberg's readers do not have these functions.
    """
    schema_id: int | None = None
    """The schema that resolves the names in the filter. It may differ from the current schema."""
    use: ReportedUse = NO_USE
    """How the statement uses the table, for the query history."""


class PlanTableScan(msgspec.Struct, rename="kebab"):
    """The body of a plan request."""

    select: tuple[str, ...] | None = None
    """The columns that the client reads.

    The server counts how often each column is read. From the columns, it also derives whether the client may delete
    the planned files or write them again (`_read_selection`).
    """
    snapshot_id: int | None = None
    start_snapshot_id: int | None = None
    end_snapshot_id: int | None = None
    filter: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    case_sensitive: bool | None = None
    use_snapshot_schema: bool | None = None
    stats_fields: tuple[str, ...] | None = None
    min_rows_requested: int | None = None
    seamark: _Extensions = _Extensions()


def pin_request(
    body: PlanTableScan, metadata: TableMetadata, dialect: ClientDialect, fresh_snapshot: Snapshot | None = None
) -> PinnedRequest:
    """Return the request with an explicit snapshot and without repeated stats fields.

    Args:
        body: The body of the request.
        metadata: The table's metadata.
        dialect: The form of answers that the client can read.
        fresh_snapshot: The current snapshot of `metadata` if it is fresh, which means that it also has appended rows
            that are not in files of the table yet. Otherwise None.

    Raises:
        BadRequest: The request names too many stats fields or an unknown snapshot, or has both functions and
            residuals.
    """
    stats_fields = body.stats_fields or ()
    if len(stats_fields) > STATS_FIELDS_MAX:
        raise BadRequest(f"stats-fields has {len(stats_fields):,} names; the limit is {STATS_FIELDS_MAX:,}")
    if body.seamark.functions and body.seamark.residuals:
        raise BadRequest(
            "A filter with functions gives no residuals; send seamark.residuals: false if seamark.functions is true"
        )
    is_incremental = body.start_snapshot_id is not None or body.end_snapshot_id is not None
    snapshot_id, start_snapshot_id = body.snapshot_id, body.start_snapshot_id
    if snapshot_id is None and not is_incremental:
        snapshot_id = metadata.current_snapshot_id
    if is_incremental and start_snapshot_id is None:
        start_snapshot_id = find_expired_ancestor(metadata, body.end_snapshot_id)
    extensions = body.seamark
    # A client that can change files selects all columns before it deletes whole files of the plan.
    selects_all_columns = may_rewrite = False
    if dialect.changes_files:
        selects_all_columns, may_rewrite = _read_selection(body, metadata, snapshot_id)
    return PinnedRequest(
        snapshot_id=snapshot_id,
        start_snapshot_id=start_snapshot_id,
        end_snapshot_id=body.end_snapshot_id,
        case_sensitive=body.case_sensitive is not False,
        use_snapshot_schema=body.use_snapshot_schema is True,
        nan_above=dialect.orders_nan_above,
        may_delete_files=selects_all_columns and not is_incremental,
        schema_id=metadata.current_schema_id if extensions.schema_id is None else extensions.schema_id,
        filter_json=bytes(body.filter),
        stats_fields=tuple(dict.fromkeys(stats_fields)),
        residuals=extensions.residuals,
        sequence_numbers=extensions.sequence_numbers,
        may_rewrite_files=may_rewrite,
        functions=extensions.functions,
        fresh=b""
        if fresh_snapshot is None or fresh_snapshot.snapshot_id != snapshot_id
        else msgspec.json.encode(fresh_snapshot),
    )


def _read_selection(body: PlanTableScan, metadata: TableMetadata, snapshot_id: int | None) -> tuple[bool, bool]:
    """Return whether a request selects all columns, and whether its statement may write the files' rows again.

    A statement that rewrites files selects either the column with the file path, or all columns. If the request has all
    columns that merge-on-read selects, and all mode properties of the table are merge-on-read, the statement writes
    deletes instead.

    Returns:
        (whether the request selects all columns of the table and no others, whether the request may belong to a
        statement that writes all rows of the files again)
    """
    selected_columns = frozenset(body.select or ())
    if FILE_COLUMN in selected_columns:
        # The properties do not suffice, because they could change between the statement and its plan. The columns do
        # not suffice, because a query may select them.
        has_merge_on_read = selected_columns >= _MERGE_ON_READ_COLUMNS and all(
            metadata.properties.get(mode) == "merge-on-read" for mode in _MODE_PROPERTIES
        )
        return False, not has_merge_on_read
    snapshot = None if snapshot_id is None else metadata.snapshot(snapshot_id)
    snapshot_schema = None if snapshot is None or snapshot.schema_id is None else metadata.schema(snapshot.schema_id)
    schema = metadata.current_schema if snapshot_schema is None else snapshot_schema
    earlier_schemas = (metadata.current_schema, *find_schemas_while_head(metadata, snapshot, schema))
    selects_all_columns = any(_has_all_columns(selected_columns, candidate) for candidate in (schema, *earlier_schemas))
    return selects_all_columns, selects_all_columns


def _has_all_columns(selected_columns: frozenset[str], schema: Schema) -> bool:
    """Return whether the selected columns include the full names of all columns of primitive types.

    Iceberg's Java library also selects the structs that contain them.
    """
    try:
        columns = schema.index.by_id.values()
    except BadRequest:  # The table has an irregular schema that an engine stored.
        return False
    return all(column.name in selected_columns for column in columns if is_primitive(column.type))
