"""The explain route: plans a scan, and returns the effect of each stage and the unused conjuncts of the predicate.

The route does not use the plan cache, so that the times are those of a complete plan. If the request asks for files,
the answer lists the files that an engine with the same predicate would read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web

from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    And,
    Bound,
    Expression,
    Or,
    collect_predicates,
    is_longer,
)
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import read_definitions
from seamark.formats.protocol.wire import decode_json, encode_json
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.api.formats.listings import FILE_COLUMNS, FileListing, make_items
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.fresh_reads import load_to_read
from seamark.metaserver.api.http.parameters.fresh import AFTER, FRESH
from seamark.metaserver.api.http.parameters.snapshots import resolve_snapshot_id
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.plans.attribute_columns import NamedAttributes, describe_attributes, resolve_attributes
from seamark.metaserver.api.plans.joins import JoinOutcomes, Joins, evaluate_joins
from seamark.metaserver.api.plans.unpruned import find_unpruned_reasons
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.advice.column_samples import Samples, sample_columns
from seamark.metaserver.planner.advice.layout_estimates import estimate_layouts
from seamark.metaserver.planner.advice.term_effects import TermEffect, compute_term_effects
from seamark.metaserver.planner.answer.answer import RESIDUAL_VALUES_MAX
from seamark.metaserver.planner.joins.joins import IN_LOOP_VALUES_MAX
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.scan.attribute_columns import (
    AttributeColumn,
    add_to_schema,
    find_attribute_columns,
    list_attribute_names,
)
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import PruningStage, ScanPlan

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")

LISTED_FILES_DEFAULT = 100
RESIDUAL_PARTITIONS_MAX = 1000
"""The maximum number of partitions whose residuals are returned.

The partitions with the most files are returned.
"""
RESIDUAL_BYTES_MAX = 4 << 20
"""The maximum total size of all distinct residuals."""
_IN_LOOP_FILES_MAX = 5_000
"""The maximum number of files of a plan that is explained in the event loop."""
_IN_LOOP_BYTES_MAX = 4_000
"""The maximum size of a filter that is parsed in the event loop."""


class ExplainedStage(msgspec.Struct, rename="kebab"):
    """The effect of one stage of the plan."""

    name: Annotated[str, msgspec.Meta(examples=["manifests", "partition", "column_stats", "bloom"])]
    files_in: int
    files_removed: int
    files_left: int
    bytes_in: int
    bytes_removed: int
    bytes_left: int
    microseconds: int
    complete: Annotated[bool, doc("False if the time limit ended the stage. Files that were not checked are kept.")]


class ExplainedIndex(msgspec.Struct, rename="kebab"):
    """The effect of one index."""

    name: str
    kind: str
    files_in: int
    files_removed: int


class ExplainedTerm(msgspec.Struct, rename="kebab"):
    """The effect of one conjunct of the filter."""

    filter: Annotated[Any, doc("The conjunct as an Iceberg expression.")]
    column: Annotated[str | None, doc("The column, if the conjunct is a predicate on one column.")]
    files_in: int
    files_left: Annotated[int, doc("The number of files that remain if only this conjunct is applied.")]
    has_bounds: Annotated[
        bool,
        doc("False if no file has bounds of the column. It is true for boolean and nested columns, which need none."),
    ]
    index: Annotated[str | None, doc("An enabled index of the table on the column.")]
    index_kind: Annotated[str | None, doc("The kind of an index that would help, if the table has none.")]
    index_files: Annotated[
        int | None,
        doc("The estimated number of files that the conjunct would keep with an index, or null if it is unknown."),
    ]
    index_note: Annotated[str | None, doc("The reason why `index-files` is unknown, or why no index would help.")]


class ExplainedLayout(msgspec.Struct, rename="kebab"):
    """The estimated effect of a layout."""

    columns: Annotated[
        list[str], doc("The columns by which each partition is sorted, or, if there are several, clustered.")
    ]
    files_in: Annotated[
        int, doc("The estimated number of files in the partitions that the filter keeps, at the target file size.")
    ]
    files: Annotated[int, doc("The estimated number of files that the filter keeps.")]


class UnknownLayout(msgspec.Struct):
    """A layout whose effect cannot be estimated."""

    column: str
    reason: Annotated[str, doc("The reason why the effect of sorting by the column cannot be estimated.")]


class ComparedColumn(msgspec.Struct):
    """A column whose statistics or partition values were compared."""

    name: str
    id: int
    type: str


class ExplainedResidual(msgspec.Struct):
    """A residual with its number of files."""

    residual: msgspec.Raw
    files: int


class ExplainResponse(msgspec.Struct, rename="kebab"):
    """The explanation of a plan."""

    snapshot_id: int | None
    stages: list[ExplainedStage]
    indexes: Annotated[
        list[ExplainedIndex],
        doc("The effect of each index that was probed. The combination of bitmaps by row is a stage."),
    ]
    complete: Annotated[
        bool,
        doc("False if a time limit ended the plan, or an index was late. A repeated request may keep fewer files."),
    ]
    files: Annotated[int, doc("The number of data files that the plan keeps.")]
    bytes: int
    records: Annotated[int, doc("The number of records in the kept files, including deleted records.")]
    delete_files: Annotated[int, doc("The number of delete files that apply to a kept file.")]
    filter: Annotated[Any, doc("The predicate that the planner used, as an Iceberg expression.")]
    not_used: Annotated[
        tuple[str, ...],
        doc("Parts of the SQL text that Iceberg expressions cannot represent. The planner takes them as true."),
    ]
    not_used_reasons: Annotated[
        tuple[str, ...], doc("The reason why each part of `not-used` is not used, in the same order.")
    ]
    terms: Annotated[
        list[ExplainedTerm],
        doc("The conjuncts of the filter, each with the effect that partition values and bounds have for it alone."),
    ]
    layouts: Annotated[
        list[ExplainedLayout],
        doc(
            "Layouts with which the plan would read clearly less. The layout with the fewest files is first. The "
            "effects are estimated from a sample of the columns, bounds and record counts. Layouts of the table's "
            "policy are left out."
        ),
    ]
    unknown_layouts: Annotated[list[UnknownLayout], doc("The columns for which no effect can be estimated.")]
    columns: Annotated[list[ComparedColumn], doc("The columns whose statistics or partition values were compared.")]
    residuals: Annotated[
        list[ExplainedResidual],
        doc("The residuals of the filter in the partitions of the kept files, each with its number of files."),
    ]
    residuals_complete: Annotated[
        bool,
        doc(
            f"False if more than {RESIDUAL_PARTITIONS_MAX} partitions remain, or fewer with long residuals. In this "
            "case, the list contains the residuals with the most files."
        ),
    ]
    kept_files: Annotated[
        list[dict[str, Any]] | msgspec.UnsetType,
        doc("The kept files, if the request lists them.", items={"$ref": "#/components/schemas/ContentFile"}),
    ] = msgspec.field(default=msgspec.UNSET, name="kept")
    joins: JoinOutcomes = msgspec.UNSET
    attributes: NamedAttributes = msgspec.UNSET
    unpruned_reasons: Annotated[
        tuple[str, ...],
        doc(
            "The reasons why all files are read: conditions, joins and limits. For a table of a query, a reason may be "
            "that engines do not use a plan that keeps so many files. The list is empty if files are left out."
        ),
    ] = ()


class ExplainRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to explain the plan of a scan."""

    where: Annotated[str | None, doc("A predicate in SQL.", examples=["id = 5 AND day >= '2024-01-01'"])] = None
    filter: Annotated[msgspec.Raw, doc("An expression of the Iceberg REST specification, instead of `where`.")] = (
        msgspec.field(default_factory=msgspec.Raw)
    )
    case_sensitive: Annotated[bool, doc("Whether names in `filter` are case-sensitive. Names in SQL are not.")] = True
    snapshot_id: int | None = None
    ref: str | None = None
    as_of: Annotated[int | None, doc("A time in milliseconds since the epoch.")] = None
    files: Annotated[bool, doc("Whether to list the kept files, as `kept`.")] = False
    limit: Annotated[int, doc("The maximum number of listed files.", minimum=1)] = LISTED_FILES_DEFAULT
    joins: Joins = []


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/explain",
    "explain",
    "Explain the plan of a scan: files and bytes after each stage, and the parts of the predicate that prune",
    tags=("metadata",),
    parameters=(FRESH, AFTER),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The explanation of the plan", ExplainResponse),
        ResponseSpec(400, "The predicate or a join is invalid; the message states the position"),
        ResponseSpec(404, "No such table, or a table of a join does not exist"),
    ),
).takes(ExplainRequest)
async def explain(call: Call, body: ExplainRequest) -> web.Response:
    """Explain the plan of a scan: files and bytes after each stage, and the parts of the predicate that prune."""
    is_named = body.ref is not None or body.as_of is not None
    loaded_table = await load_to_read(call, call.namespace, call.name, body.snapshot_id, is_named=is_named)
    metadata = loaded_table.metadata
    if body.limit < 1:
        raise BadRequest(f"limit is {body.limit}; it must be at least 1")
    snapshot_id = resolve_snapshot_id(metadata, body.snapshot_id, body.ref, body.as_of)
    parsed_filter = await _read_filter(call, body, metadata)
    attributes = await resolve_attributes(call, metadata, parsed_filter.expression)
    scan_request = ScanRequest(
        filter=parsed_filter.expression,
        snapshot_id=snapshot_id,
        case_sensitive=body.case_sensitive,
        nan_above=True,  # Spark and DuckDB order NaN above all numbers, so NaN matches > and >=.
        attributes=attributes,
    )
    outdated_reasons = [_explain_unused(metadata, attribute) for attribute in attributes if not attribute.is_current]
    files_max = min(body.limit, call.components.settings.page_limit) if body.files else 0
    explanation = await explain_scan(
        call, loaded_table, scan_request, parsed_filter, body.joins, files_max, unrequested_reasons=outdated_reasons
    )
    return web.Response(body=explanation, content_type="application/json")


def _explain_unused(metadata: TableMetadata, attribute: AttributeColumn) -> str:
    """Return the reason why a predicate on an attribute prunes no files.

    The attribute is a column of a dimension table. An index of the planned table stores its values for each data file.
    """
    if not read_definitions(metadata).by_name[attribute.name].enabled:
        return f"the index {attribute.name} is paused; resume it"
    return (
        f"the index {attribute.name} has the attributes of an earlier snapshot of "
        f"{'.'.join(attribute.lookup.source.table)}; create it again and build it"
    )


async def explain_scan(
    call: Call,
    loaded_table: LoadedTable,
    scan_request: ScanRequest,
    sql_filter: sql.SqlFilter,
    joins: Joins,
    files_max: int = 0,
    unrequested_reasons: Sequence[str] = (),
    max_kept_fraction: float = 1.0,
) -> bytes:
    """Explain a scan, and return the encoded `ExplainResponse`.

    Args:
        call: The request.
        loaded_table: The table.
        scan_request: The scan to explain.
        sql_filter: The parsed SQL from which the filter of `scan_request` was made.
        joins: The joins of the table.
        files_max: The maximum number of files to list.
        unrequested_reasons: The reasons why other joins were not requested.
        max_kept_fraction: The largest fraction of the files that a plan may keep so that engines use it.

    Raises:
        Forbidden: The caller may not read a table of `joins`.
        NotFound: A table of `joins` does not exist.
        BadRequest: A filter or a join cannot be bound.
    """
    bind = partial(BoundScan.bind, loaded_table.metadata, scan_request)
    is_long = is_longer(scan_request.filter, IN_LOOP_VALUES_MAX)
    bound_scan = await call.run_in_turn(bind) if is_long else bind()
    filters, outcomes, _ = await evaluate_joins(call, bound_scan, loaded_table.entry, joins)
    bound_scan = filters.apply_to(bound_scan)
    is_long = is_long or bound_scan.is_long
    scan = await call.components.planner.explain(bound_scan, loaded_table.entry)
    samples = await sample_columns(call.components.objects, scan)
    namespace = () if loaded_table.entry is None else loaded_table.entry.namespace
    policies = await load_policies(call.components.catalog.context.store, namespace)
    properties = with_policies(scan.metadata, policies).properties

    def encode_answer() -> bytes:
        reasons = find_unpruned_reasons(
            (scan.stages[0].files_in if scan.stages else scan.files, scan.files),
            joins,
            () if outcomes is msgspec.UNSET else outcomes,
            has_condition=scan_request.filter != TRUE,
            complete=scan.complete,
            unrequested_reasons=unrequested_reasons,
            max_kept_fraction=max_kept_fraction,
        )
        explanation = _explain_scan(scan, sql_filter, files_max, outcomes, reasons, samples, properties)
        if scan_request.attributes:
            explanation = msgspec.structs.replace(explanation, attributes=describe_attributes(scan_request.attributes))
        return encode_json(explanation)

    if is_long:
        return await call.run_in_turn(encode_answer)
    return encode_answer() if scan.considered <= _IN_LOOP_FILES_MAX else await asyncio.to_thread(encode_answer)


async def _read_filter(call: Call, body: ExplainRequest, metadata: TableMetadata) -> sql.SqlFilter:
    """Parse the filter of a request.

    Raises:
        BadRequest: The filter is invalid.
    """
    if body.where is None:
        filter_json = bytes(body.filter)
        if not filter_json:
            return sql.SqlFilter(TRUE, ())

        def parse() -> sql.SqlFilter:
            # `unknown` accepts null as a literal, because PyIceberg writes null for infinity. `functions` accepts
            # functions of columns. The filter only selects files, so both are safe.
            return sql.SqlFilter(
                parse_expression(decode_json(filter_json, "The filter"), unknown=True, functions=True), ()
            )

        return parse() if len(filter_json) <= _IN_LOOP_BYTES_MAX else await call.run_in_turn(parse)
    if bytes(body.filter):
        raise BadRequest("The request has both where and filter; send the predicate as SQL or as an Iceberg expression")
    # Only attributes of dimension tables whose names occur in the text are added to the schema.
    lower_sql = body.where.lower()
    names = [name for name in list_attribute_names(metadata) if name.lower() in lower_sql]
    schema = add_to_schema(metadata.current_schema, find_attribute_columns(metadata, names))
    parse_filter = partial(sql.parse_sql, body.where, schema, metadata.schemas, functions=True)
    return await read_in_turn(call, len(body.where), parse_filter)


def _explain_scan(
    scan: ScanPlan,
    sql_filter: sql.SqlFilter,
    files_max: int,
    outcomes: JoinOutcomes,
    reasons: tuple[str, ...],
    samples: Samples,
    properties: Mapping[str, str],
) -> ExplainResponse:
    """Return the explanation of a plan.

    Args:
        scan: The plan.
        sql_filter: The filter, with the parts of its SQL text that the plan does not use.
        files_max: The maximum number of kept files to list. If it is 0, the answer has no list.
        outcomes: The outcomes of the joins.
        reasons: The reasons why predicates and joins leave out no files.
        samples: The sampled rows, from which the effects of layouts and indexes are estimated.
        properties: The properties of the table.
    """
    estimates = estimate_layouts(scan, samples, properties)
    files = find_files_at(scan.view, scan.entry_ids)
    deletes = {delete for deletes_of_file in scan.find_deletes_by_file(scan.entry_ids) for delete in deletes_of_file}
    residuals, is_complete = _collect_residuals(scan)
    kept_files: Any = msgspec.UNSET
    if files_max:
        listing = FileListing(scan.metadata, files, find_files_at(scan.view, scan.entry_ids[:0]), scan)
        kept_files = make_items(listing, tuple(FILE_COLUMNS), 0, min(files_max, listing.total))
    return ExplainResponse(
        snapshot_id=scan.snapshot_id,
        stages=[_describe_stage(stage) for stage in scan.stages],
        indexes=[ExplainedIndex(use.name, use.kind, use.files_in, use.files_removed) for use in scan.indexes],
        complete=scan.complete,
        files=scan.files,
        bytes=scan.stages[-1].bytes_left,
        records=int(files.read_longs("record_count").clip(0).sum()),
        delete_files=len(deletes),
        filter=encode_expression(scan.bound),
        not_used=sql_filter.unused,
        not_used_reasons=sql_filter.reasons,
        terms=[_describe_term(effect) for effect in compute_term_effects(scan, samples)],
        layouts=[ExplainedLayout(list(layout.columns), layout.files_in, layout.files) for layout in estimates.layouts],
        unknown_layouts=[UnknownLayout(column, reason) for column, reason in estimates.unknown.items()],
        columns=list(_collect_columns(scan.bound, set())),
        residuals=residuals,
        residuals_complete=is_complete,
        kept_files=kept_files,
        joins=outcomes,
        unpruned_reasons=reasons,
    )


def _describe_term(effect: TermEffect) -> ExplainedTerm:
    """Return the effect of a conjunct in the form of an answer."""
    return ExplainedTerm(
        filter=encode_expression(effect.expression),
        column=effect.column,
        files_in=effect.files_in,
        files_left=effect.files_left,
        has_bounds=effect.has_bounds,
        index=effect.index_name,
        index_kind=effect.index_kind,
        index_files=effect.index_files,
        index_note=effect.index_note,
    )


def _describe_stage(stage: PruningStage) -> ExplainedStage:
    """Return a stage in the form of an answer."""
    return ExplainedStage(
        name=stage.name,
        files_in=stage.files_in,
        files_removed=stage.files_in - stage.files_left,
        files_left=stage.files_left,
        bytes_in=stage.bytes_in,
        bytes_removed=stage.bytes_in - stage.bytes_left,
        bytes_left=stage.bytes_left,
        microseconds=stage.microseconds,
        complete=stage.complete,
    )


def _collect_columns(expression: Expression, listed_ids: set[int]) -> Iterator[ComparedColumn]:
    """Yield the columns of the expression in the order of the predicates.

    Columns in `listed_ids` were yielded already, and are left out. The function adds the yielded columns to the set.
    """
    if isinstance(expression, And | Or):
        for child in expression.children:
            yield from _collect_columns(child, listed_ids)
    elif isinstance(expression, Bound) and expression.column_id not in listed_ids:
        listed_ids.add(expression.column_id)
        yield ComparedColumn(expression.name, expression.column_id, expression.kind)


def _collect_residuals(scan: ScanPlan) -> tuple[list[ExplainedResidual], bool]:
    """Return the residuals with their numbers of files, and whether the list is complete.

    A residual is the part of the filter that the partition of a file does not decide. The residual with the most files
    is first. The partitions with the most files are handled first, until a limit is reached.
    """
    files_by_partition = group_by_partition(find_files_at(scan.view, scan.entry_ids))
    partitions_by_files = sorted(
        zip(files_by_partition.count_files(), files_by_partition.partitions, strict=True), key=lambda part: -part[0]
    )
    files_by_residual: dict[bytes, int] = {}
    value_count = sum(1 + len(predicate.values) for predicate in collect_predicates(scan.bound))
    residual_bytes, handled_partitions = 0, 0
    for files, partition in partitions_by_files[:RESIDUAL_PARTITIONS_MAX]:
        if handled_partitions * value_count > RESIDUAL_VALUES_MAX or residual_bytes > RESIDUAL_BYTES_MAX:
            break
        handled_partitions += 1
        values = tuple(field.value for field in partition.fields)
        fields = tuple((field.field_id, field.kind) for field in partition.fields)
        residual = encode_json(encode_expression(scan.compute_partition_residual(partition.spec_id, fields, values)))
        residual_bytes += 0 if residual in files_by_residual else len(residual)
        files_by_residual[residual] = files_by_residual.get(residual, 0) + files
    most_first = sorted(files_by_residual.items(), key=lambda item: -item[1])
    return [ExplainedResidual(msgspec.Raw(text), files) for text, files in most_first], handled_partitions == len(
        partitions_by_files
    )
