"""Counts the statement of a plan or of a scan report for the query history (`history/history.py`).

A plan adds one count to the sums in memory. The shape of a statement is computed once for each plan. The samples of its
values are computed later, in a thread.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any
from weakref import ref

import msgspec
import numpy as np

from seamark.formats.iceberg.expressions.expression import Bound, Expression, collect_predicates, is_longer
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_count
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.index.packing import MISSING, Form
from seamark.formats.protocol.wire import PROXY_ENGINE
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.principal import ANONYMOUS
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.api.http.components import ServerComponents
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.plans.column_reads import find_schema_of_report
from seamark.metaserver.history.history import QueryHistory, StatementRead, StatementSample, StatementSampler
from seamark.metaserver.history.samples import (
    DROPPED,
    FILTER_CHARACTERS_MAX,
    KEPT,
    FilterSample,
    compute_widths,
    list_column_conjuncts,
)
from seamark.metaserver.history.shapes import (
    AGGREGATE_FUNCTIONS,
    ENGINES,
    OTHER_FUNCTION,
    Aggregate,
    QueryShape,
    list_conjuncts,
    select_shape_columns,
)
from seamark.metaserver.planner.lookup.lookup import RequestedColumn, find_files_at, find_files_by_prefix
from seamark.metaserver.planner.scan.request import BoundScan
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import Entry

_SAMPLED_VALUES_MAX = 200
"""The maximum number of values and predicates of a filter that is sampled."""
_SAMPLED_FILES_MAX = 20_000
"""The maximum number of remaining files of a plan whose sizes are sampled."""
_PURPOSE = "query history"
_TOTAL_BYTES, _TOTAL_FILES = "total-files-size", "total-data-files"
_NAMES_MAX = 1000
_METRIC_MAX = 2**53
"""The limit of a counter in a report. Larger numbers are not exact in JSON."""
_DIGEST_CHARACTERS = 16
_OTHER_ENGINE = "other"
REPORTED_COLUMNS_MAX, REPORTED_KEYS_MAX = 64, 32
"""The maximum numbers of read columns and of grouping keys, join columns or aggregates that a request reports."""


class ReportedAggregate(msgspec.Struct, frozen=True):
    """An aggregate of the statement, for the query history."""

    function: Annotated[
        str,
        msgspec.Meta(max_length=20, description="The function: count, sum, min, max, avg, or another name."),
    ]
    column: Annotated[
        str, msgspec.Meta(max_length=500, description="The column, or an empty string if the argument is not a column.")
    ] = ""


ReportedNames = Annotated[list[str], msgspec.Meta(max_length=REPORTED_KEYS_MAX)]


class ReportedUse(msgspec.Struct, frozen=True, rename="kebab"):
    """The use of the table by the statement of a plan request. Unknown names are ignored.

    Attributes:
        engine: The engine that runs the statement. A name that is not in `ENGINES` is recorded as `other`.
        grouping: The names of columns by which the statement groups.
        join_columns: The names of columns by which the statement joins other tables.
        aggregates: The aggregates of the statement.
        counts: Whether the statement is counted. It is not counted if it is only explained, or if it was counted with
            the request for a plan table.
    """

    engine: str = ""
    grouping: ReportedNames = []
    join_columns: ReportedNames = []
    aggregates: Annotated[list[ReportedAggregate], msgspec.Meta(max_length=REPORTED_KEYS_MAX)] = []
    counts: bool = True


NO_USE = ReportedUse()


def find_history(call: Call) -> QueryHistory | None:
    """Return the query history of the server.

    Returns:
        The history, or None if statements are not counted because the setting is off or because a job of the table
        services makes the request.
    """
    history = call.components.history
    return history if history.is_on and call.principal.name != SERVICE_PRINCIPAL else None


def count_statement(call: Call, statement_read: StatementRead | None, sampler: StatementSampler | None = None) -> None:
    """Count a statement, if statements are counted. If `statement_read` is None, do nothing.

    Args:
        call: The request.
        statement_read: The files and bytes that the statement read.
        sampler: A function that samples the statement. It is passed to the history if the history wants a sample.
    """
    history = None if statement_read is None else find_history(call)
    if history is not None and statement_read is not None:
        # The list is None unless the history wants a sample of statements of this shape.
        samplers = history.add(statement_read, _get_principal_name(call))
        if samplers is not None and sampler is not None:
            samplers.append(sampler)


def count_plan_statement(
    call: Call,
    entry: Entry | None,
    bound_scan: BoundScan,
    scan_plan: ScanPlan,
    engine: str,
    plan_s: float,
    *,
    select: Sequence[str] | None = None,
    use: ReportedUse = NO_USE,
) -> StatementRead | None:
    """Count the statement of a plan.

    Args:
        call: The request.
        entry: The table.
        bound_scan: The bound request.
        scan_plan: The plan.
        engine: One of `ENGINES`. It is recorded if the client reports no engine.
        plan_s: The duration of planning.
        select: The columns that the statement reads, or None if they are unknown.
        use: The use that the client reports.

    Returns:
        The statement, which is counted again if the request is repeated, or None if statements are not counted.
    """
    history = find_history(call)
    if entry is None or history is None or not use.counts:
        return None
    shape = build_shape(bound_scan, engine, select=select, use=use)
    statement_read = StatementRead(
        entry.uuid, shape, scan_plan.considered, scan_plan.files, literals=hash(bound_scan.text)
    )
    samplers = history.add(statement_read, _get_principal_name(call), plan_s)
    if samplers is not None:
        samplers.append(make_sampler(call.components, bound_scan, scan_plan))
    return statement_read


def build_shape(
    bound_scan: BoundScan, engine: str, *, select: Sequence[str] | None = None, use: ReportedUse = NO_USE
) -> QueryShape:
    """Return the shape of a statement that reads a table.

    The shape has the engine, the columns, the conditions and the aggregates of the statement, but no values. Statements
    with equal shapes are counted together in the query history.

    Args:
        bound_scan: The bound request.
        engine: One of `ENGINES`. It is recorded if the client reports no engine.
        select: The columns that the statement reads, or None if they are unknown.
        use: The use that the client reports. Names that the table does not have are ignored.
    """
    conjuncts = list_conjuncts(bound_scan.bound)
    if use.engine:
        engine = use.engine if use.engine in ENGINES else _OTHER_ENGINE
    if not select and use == NO_USE:
        return QueryShape(engine, (), conjuncts)
    by_name = bound_scan.schema.index.by_name
    names = () if select is None or len(select) > _NAMES_MAX else select
    # Names in SQL ignore case. Most names are exact, so the second dictionary is rarely needed.
    reported_names = (
        *names,
        *use.grouping,
        *use.join_columns,
        *(aggregate.column for aggregate in use.aggregates if aggregate.column),
    )
    if not by_name.keys() >= set(reported_names):
        by_name = {name.lower(): column_id for name, column_id in by_name.items()} | by_name
        by_name |= {name: by_name[name.lower()] for name in reported_names if name.lower() in by_name}
    # An aggregate without a column, such as count(*), has the column id 0. Aggregates of unknown columns are left out.
    functions = {
        Aggregate(aggregate.function if aggregate.function in AGGREGATE_FUNCTIONS else OTHER_FUNCTION, column_id)
        for aggregate in use.aggregates
        if (column_id := by_name.get(aggregate.column) if aggregate.column else 0) is not None
    }
    return QueryShape(
        engine,
        _find_ids(names, by_name),
        conjuncts,
        _find_ids(use.join_columns, by_name),
        _find_ids(use.grouping, by_name),
        tuple(sorted(functions)),
    )


def _find_ids(names: Iterable[str], by_name: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids of the named columns as `select_shape_columns` does. Unknown names are left out."""
    return select_shape_columns(by_name[name] for name in names if name in by_name)


def read_reported_statement(
    uuid: str, metadata: TableMetadata, report: Mapping[str, Any], *, is_planned: bool
) -> StatementRead | None:
    """Return the statement that a scan report describes (`ScanReport` of the Iceberg REST specification).

    Args:
        uuid: The UUID of the table.
        metadata: The metadata of the table.
        report: The report.
        is_planned: Whether the report is about a plan snapshot.

    Returns:
        The statement. None if the report is about a plan snapshot or comes from the Trino proxy, because such a
        statement was counted when it was planned. Also None if the table does not have the snapshot of the report, or
        if the filter of the report is invalid.
    """
    engine = _read_report_engine(report)
    snapshot = metadata.snapshot(report["snapshot-id"])
    if is_planned or snapshot is None or engine == PROXY_ENGINE:
        return None
    try:
        filter = parse_expression(report.get("filter", True))
    except BadRequest:
        return None
    schema = find_schema_of_report(metadata, report)
    by_name = schema.index.by_name
    ids_by_lower_name: dict[str, int] = {}

    def find_column(name: str) -> int | None:
        if name not in by_name and not ids_by_lower_name:
            ids_by_lower_name.update({known_name.lower(): column_id for known_name, column_id in by_name.items()})
        return by_name.get(name, ids_by_lower_name.get(name.lower()))

    ids = report.get("projected-field-ids")
    by_id = schema.index.by_id
    metrics = report.get("metrics")
    files_left = _read_metric(metrics, "result-data-files")
    files_in = _read_total(snapshot, _TOTAL_FILES)
    bytes_left = _read_metric(metrics, "total-file-size-in-bytes")
    bytes_in = _read_total(snapshot, _TOTAL_BYTES)
    shape = QueryShape(
        engine,
        select_shape_columns(
            id for id in (ids if isinstance(ids, list) else ())[:_NAMES_MAX] if type(id) is int and id in by_id
        ),
        list_conjuncts(filter, find_column),
    )
    files_left = max(0, files_left)
    # An unknown number of files is at least the number of the remaining files. Unknown bytes of the snapshot are -1, so
    # the remaining bytes are then unknown, too.
    return StatementRead(uuid, shape, max(files_in, files_left), files_left, bytes_in, min(bytes_left, bytes_in))


def read_engine(call: Call) -> str:
    """Return the engine of a plan request, from its headers."""
    agent = call.headers.get("User-Agent", "")
    if agent.startswith("PyIceberg/"):
        return "pyiceberg"
    if agent.startswith("seamark-client"):
        return "seamark"
    is_java = agent.startswith("Apache-HttpClient/") or call.headers.get("X-Client-Version", "").startswith(
        "Apache Iceberg"
    )
    return "java" if is_java else _OTHER_ENGINE


def _read_report_engine(report: Mapping[str, Any]) -> str:
    """Return the engine that a scan report names, or `_OTHER_ENGINE` if the name is missing or unknown."""
    metadata = report.get("metadata")
    name = str(metadata.get("engine-name", "")).lower() if isinstance(metadata, dict) else ""
    return name if name in ENGINES or name == PROXY_ENGINE else _OTHER_ENGINE


def _get_principal_name(call: Call) -> str | None:
    """Return the name of the caller, or None if the server has no logins."""
    return None if call.principal is ANONYMOUS else call.principal.name


def _read_total(snapshot: Snapshot, name: str) -> int:
    """Return a total of the snapshot's summary, or -1 if it is missing or invalid."""
    return parse_count(snapshot.build_summary_map(), name, -1)


def _read_metric(metrics: object, name: str) -> int:
    """Return a counter of a scan report, or -1 if it is not an integer from 0 to `_METRIC_MAX` - 1, or is missing."""
    counter = metrics.get(name) if isinstance(metrics, dict) else None
    value = counter.get("value") if isinstance(counter, dict) else None
    return value if type(value) is int and 0 <= value < _METRIC_MAX else -1


# The samples of compared values


def make_sampler(
    components: ServerComponents, bound_scan: BoundScan, scan_plan: ScanPlan, *, has_sizes: bool = False
) -> StatementSampler:
    """Return a function that samples the sizes and the values of a plan.

    The function keeps neither the view nor a long filter nor many files in memory. It returns no sample if the view has
    left memory before the call.

    Args:
        components: The components of the server.
        bound_scan: The bound request.
        scan_plan: The plan.
        has_sizes: Whether the caller counts the sizes of the files itself. The sample then has no sizes.
    """
    history = components.history
    has_filter = not is_longer(scan_plan.bound, _SAMPLED_VALUES_MAX) and history.reserve(len(bound_scan.text))
    bound = scan_plan.bound if has_filter else None
    entry_ids = None
    if not has_sizes and scan_plan.files <= _SAMPLED_FILES_MAX and history.reserve(scan_plan.entry_ids.nbytes):
        entry_ids = scan_plan.entry_ids.copy()  # The array may be a part of a larger array.
    view_ref = ref(scan_plan.view)
    snapshot = None if bound_scan.options.is_incremental else bound_scan.snapshot
    # If the view has only some of the files, the bounds of these files are not the bounds of the column. Then no widths
    # of ranges are computed.
    has_all_files = scan_plan.view.file_count == scan_plan.considered
    literals = history.literals
    key = components.keyring.find_signing_key(_PURPOSE)[1] if literals != DROPPED else b""

    def sample() -> StatementSample | None:
        view = view_ref()
        if view is None:
            return None
        filter_sample = None if bound is None else _sample_filter(bound, view if has_all_files else None, literals, key)
        if entry_ids is None:
            return StatementSample(filter_sample, -1, -1)
        bytes_left = int(find_files_at(view, entry_ids).read_longs("file_size_in_bytes").sum())
        bytes_in = -1 if snapshot is None else _read_total(snapshot, _TOTAL_BYTES)
        if bytes_in < bytes_left:  # Some writers state no total.
            bytes_in = int(find_files_by_prefix(view).read_longs("file_size_in_bytes").sum()) if has_all_files else -1
        return StatementSample(filter_sample, bytes_in, bytes_left)

    return sample


def _sample_filter(bound: Expression, view: TableView | None, literals: str, key: bytes) -> FilterSample | None:
    """Return a sample of a filter, or None if the filter has no predicates.

    Args:
        bound: The filter.
        view: The files of the snapshot. Their bounds are needed to compute the widths: the part of a column's values
            that a range such as `x > 5` selects. None if no widths are computed.
        literals: The setting for values in filters. If it is `DROPPED`, the sample has neither the filter nor its
            digest.
        key: The key of the digest, so that the digest does not reveal the values.
    """
    if not collect_predicates(bound):
        return None
    widths = () if view is None else compute_widths(bound, find_limits(view, bound))
    text = "" if literals == DROPPED else msgspec.json.encode(encode_expression(bound)).decode()
    digest = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:_DIGEST_CHARACTERS] if text else ""
    return FilterSample(widths, digest, text if literals == KEPT and len(text) <= FILTER_CHARACTERS_MAX else "")


def find_limits(view: TableView, bound: Expression) -> dict[int, tuple[float, float]]:
    """Return the smallest and the largest bound of each numeric column that a filter compares, by column id.

    The bounds are those of all files of the view. Only comparisons of plain columns that all rows must satisfy are
    used. A column without known bounds is left out.
    """
    limits: dict[int, tuple[float, float]] = {}
    files = find_files_by_prefix(view)
    for conjunct in list_column_conjuncts(bound):
        if conjunct.column_id not in limits and (column_limits := _find_column_limits(files, conjunct)) is not None:
            limits[conjunct.column_id] = column_limits
    return limits


def _find_column_limits(files: Any, conjunct: Bound) -> tuple[float, float] | None:
    """Return the smallest and the largest bound of one column, or None if they are unknown."""
    stats = files.find_statistics(RequestedColumn(conjunct.column_id, conjunct.kind))
    if stats.form not in (Form.INTEGERS, Form.FLOATS):
        return None
    lower, upper = stats.read_bounds("lower"), stats.read_bounds("upper")
    if stats.form is Form.INTEGERS:
        has_bounds = (lower != MISSING) & (upper != MISSING)
    else:
        has_bounds = np.isfinite(lower) & np.isfinite(upper)
    return (float(lower[has_bounds].min()), float(upper[has_bounds].max())) if has_bounds.any() else None
