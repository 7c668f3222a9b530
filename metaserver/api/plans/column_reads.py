"""The columns that a plan or a scan report reads, and the age of the oldest partition, for `catalog/column_usage.py`.

If the columns are unknown, the read counts as a read of every column. If the partition is unknown, it counts as a read
of the whole table. So no column that is read appears to be unread. For each plan, this needs one pass over the
partition values of its files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from seamark.formats.iceberg.expressions.binding import bind, list_terms
from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Op
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.column_ttl import find_time_columns
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import PROXY_ENGINE
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.principal import ANONYMOUS
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.catalog.column_usage import DAY_MS, ColumnRead, ColumnUsage, select_columns_of_read
from seamark.metaserver.planner.lookup.partition_times import find_oldest_end_ms
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.store.model import ALL_AGES, EVERY_COLUMN, UNKNOWN_COLUMNS, Entry

_ENGINES = frozenset({"spark", "flink", "hive", "presto", PROXY_ENGINE})
"""The engines whose scan reports name only the columns that a query reads.

Other engines report all columns, even if a query reads only some of them.
"""
_IN_LOOP_NAMES_MAX = 10_000
_OPS_WITH_LOWER_BOUND = frozenset({Op.GT, Op.GT_EQ, Op.EQ, Op.IN})


def find_column_usage(call: Call) -> ColumnUsage | None:
    """Return the counters of reads.

    Returns:
        None if reads are not counted, because the setting is off, or because the caller is a job of table services.
    """
    usage = call.components.catalog.column_usage
    return usage if usage.is_on and call.principal.name != SERVICE_PRINCIPAL else None


def count_read(call: Call, column_read: ColumnRead | None) -> None:
    """Count a read, if reads are counted. If `column_read` is None, do nothing."""
    usage = None if column_read is None else find_column_usage(call)
    if usage is not None and column_read is not None:
        usage.add(column_read, None if call.principal is ANONYMOUS else call.principal.name)


async def count_plan(
    call: Call, entry: Entry | None, scan_plan: ScanPlan, predicates: Sequence[Bound], select: Sequence[str] | None
) -> ColumnRead | None:
    """Count the read of a plan.

    Args:
        call: The request.
        entry: The table.
        scan_plan: The plan.
        predicates: The predicates of the plan's filter.
        select: The columns that the client names, or None if it names no columns.

    Returns:
        The read, so that it can be counted again if the request is repeated, or None if reads are not counted.
    """
    usage = find_column_usage(call)
    if entry is None or usage is None:
        return None
    selected_columns: set[int] | None = None
    if select is not None:  # A client may name half a million columns.
        find_ids = partial(_find_ids, scan_plan.schema, select)
        selected_columns = find_ids() if len(select) <= _IN_LOOP_NAMES_MAX else await call.run_in_turn(find_ids)
    columns = {UNKNOWN_COLUMNS} if selected_columns is None else selected_columns
    columns |= {predicate.column_id for predicate in predicates}
    end_ms = find_oldest_end_ms(scan_plan.view, scan_plan.entry_ids, scan_plan.metadata)
    column_read = ColumnRead(
        entry.uuid, select_columns_of_read(columns), _compute_age_d(end_ms, call.components.clock.now_ms())
    )
    usage.add(column_read, None if call.principal is ANONYMOUS else call.principal.name)
    return column_read


def _find_ids(schema: Schema, names: Collection[str]) -> set[int]:
    """Return the ids of the columns with these names.

    Unknown names are left out, because they belong to metadata columns, or to columns of a different schema.
    """
    by_name = schema.index.by_name
    ids = {by_name[name] for name in names if name in by_name}
    if len(ids) < len(names):  # Some engines ignore the case of names.
        lower_names = {name.lower() for name in names}
        ids |= {column_id for name, column_id in by_name.items() if name.lower() in lower_names}
    return ids | ({EVERY_COLUMN} if "*" in names else set())


def _compute_age_d(end_ms: int | None, now_ms: int) -> int:
    return ALL_AGES if end_ms is None else max(0, (now_ms - end_ms) // DAY_MS)


def read_scan_report(
    uuid: str,
    metadata: TableMetadata,
    report: Mapping[str, Any],
    now_ms: int,
    *,
    is_plan_snapshot: bool,
    plan_end_ms: int | None,
) -> ColumnRead | None:
    """Return the read that a scan report describes (Iceberg REST specification, ScanReport).

    An invalid report counts as a read of unknown columns.

    Args:
        uuid: The UUID of the table.
        metadata: The metadata of the table.
        report: The report.
        now_ms: The time.
        is_plan_snapshot: Whether the report is about a plan snapshot, with which the Trino proxy replaces a table.
        plan_end_ms: The end of the oldest partition of the plan snapshot, in milliseconds since the epoch. None if it
            is unknown, or if the report is not about a plan snapshot.

    Returns:
        The read. None if an engine reads a plan snapshot, because the proxy reports the columns of such a read.
    """
    schema = find_schema_of_report(metadata, report)
    # Ignore unknown ids: a reader could invent any number of ids, and engines also send the ids of metadata columns.
    by_id = schema.index.by_id
    ids = {
        field_id for field_id in _get_list(report, "projected-field-ids") if type(field_id) is int and field_id in by_id
    }
    names = [field_name for field_name in _get_list(report, "projected-field-names") if isinstance(field_name, str)]
    columns = ids or _find_ids(schema, names)
    engine = report.get("metadata")
    engine_name = str(engine.get("engine-name", "")).lower() if isinstance(engine, dict) else ""
    top_level_ids = {field.id for field in schema.fields}
    oldest_ms = plan_end_ms
    if is_plan_snapshot and engine_name != PROXY_ENGINE:
        return None
    # Most engines report all columns, even if a query reads only some of them. So this list does not show which columns
    # the query reads.
    if not columns or (top_level_ids <= columns and engine_name not in _ENGINES):
        columns = {UNKNOWN_COLUMNS}
    try:
        report_filter = parse_expression(report.get("filter", True))
        columns = {*columns, *(term[0] for term in list_terms(report_filter, schema, (), case_sensitive=False))}
        if not is_plan_snapshot:
            oldest_ms = _find_minimum_time_ms(bind(report_filter, schema, (), case_sensitive=False), metadata)
    except BadRequest:  # Iceberg replaces literals with a description, such as (2-digit-int).
        pass
    return ColumnRead(uuid, select_columns_of_read(columns), _compute_age_d(oldest_ms, now_ms))


def _get_list(report: Mapping[str, Any], name: str) -> list[Any]:
    value = report.get(name)
    return value if isinstance(value, list) else []


def find_schema_of_report(metadata: TableMetadata, report: Mapping[str, Any]) -> Schema:
    """Return the schema that a scan report names, or the current schema if the table does not have it."""
    schema_id = report.get("schema-id")
    return (metadata.schema(schema_id) if isinstance(schema_id, int) else None) or metadata.current_schema


def _find_minimum_time_ms(bound: Expression, metadata: TableMetadata) -> int | None:
    """Return a lower bound of the time column in all rows that satisfy the filter.

    Returns:
        None if the filter sets no lower bound, or if the table is not partitioned by exactly one time column.
    """
    time_columns = find_time_columns(metadata, metadata.default_spec)
    conjuncts = bound.children if isinstance(bound, And) else (bound,)
    if len(time_columns) != 1:
        return None
    lower_bounds = [
        min(conjunct.values)
        for conjunct in conjuncts
        if isinstance(conjunct, Bound)
        and conjunct.column_id == time_columns[0].column_id
        and conjunct.transform == IDENTITY
        and conjunct.op in _OPS_WITH_LOWER_BOUND
        and conjunct.values
    ]
    return None if not lower_bounds else time_columns[0].to_ms(int(max(lower_bounds)))
