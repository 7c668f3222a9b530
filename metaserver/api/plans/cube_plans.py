"""The route that plans an aggregate query over a cube: groups of covered files, and a plan of the other files.

One request decides which files are answered from the cube, so that each file of the plan counts exactly once: its rows
are either in the groups or in the plan table. The plan table has a new name for each request, because the cube may
cover different files at the next request. If the cube covers all files, there is no plan table.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import pyarrow as pa
from aiohttp import web

from seamark.formats.iceberg.expressions.expression import TRUE, Expression, is_longer, join_by_and
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.group_conditions import to_group_condition
from seamark.formats.protocol.wire import CUBE_COST_MAX_FRACTION, CUBE_PLAN, CUBE_UNCHECKED_ROWS_MAX
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.fresh_reads import load_to_read
from seamark.metaserver.api.http.parameters.fresh import AFTER, FRESH
from seamark.metaserver.api.http.parameters.plan_audience import AUDIENCE
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.lookups.cube_groups import CONDITION_VALUES_MAX, find_cube, read_condition, read_groups
from seamark.metaserver.api.plans.plan_leases import check_lease
from seamark.metaserver.api.plans.plan_tables import (
    NewPlanTable,
    PlanTableRequest,
    PlanTableResponse,
    bind_request,
    count_requested_statement,
    read_filter,
)
from seamark.metaserver.catalog.plans.plan_tables import Holder
from seamark.metaserver.planner.indexes.coverage import compute_view_file_ids
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.scan.request import BoundScan
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.store.model import EntryKind, PlanJoin

GROUPS_MAX = 1_000_000
"""The maximum number of groups of a response."""


class MakeCubePlanRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for the plan of an aggregate query over a cube."""

    definition_id: Annotated[str, doc("The definition-id of the cube.")]
    columns: Annotated[
        list[str],
        doc("The dimensions d0, d1, … and partial aggregates m0, m1, … to return.", examples=[["d0", "m1"]]),
    ]
    filter: Annotated[
        msgspec.Raw, doc("An expression of the Iceberg REST specification that is true for all needed rows.")
    ] = msgspec.field(default_factory=msgspec.Raw)
    predicate: Annotated[str | None, doc("A predicate in SQL, instead of `filter`.")] = None
    unless: Annotated[
        msgspec.Raw,
        doc("An expression. The groups of a file are used only if the plan shows that no row of the file meets it."),
    ] = msgspec.field(default_factory=msgspec.Raw)
    group_filter: Annotated[
        msgspec.Raw,
        doc("An expression over the dimensions d0, d1, … of the entries. Groups that do not meet it are left out."),
    ] = msgspec.field(default_factory=msgspec.Raw)
    case_sensitive: Annotated[bool, doc("Whether names in `filter` are case-sensitive.")] = True
    snapshot_id: int | None = None
    ref: Annotated[str | None, doc("A branch or tag, instead of snapshot-id.")] = None
    groups_max: Annotated[
        int, doc("The maximum. If there are more groups, none are returned.", minimum=1, maximum=GROUPS_MAX)
    ] = GROUPS_MAX
    lease_s: Annotated[int | None, doc("The lease of the plan table, in seconds.", minimum=1)] = None
    hide_partitions: Annotated[
        bool, doc("Whether to hide the partitions of the table from DuckDB, as for plan tables.")
    ] = False
    holder: Annotated[
        str,
        msgspec.Meta(max_length=100, description="A text that identifies the client process, as for plan tables."),
    ] = ""


class MakeCubePlanResponse(msgspec.Struct, rename="kebab"):
    """The plan of an aggregate query. The answer is an Arrow stream, and its schema metadata contain this as `plan`."""

    reason: Annotated[
        str | None, doc("The reason why the cube cannot be used. If it is set, the other fields have no meaning.")
    ]
    snapshot_id: int | None = None
    schema_id: Annotated[int, doc("The schema of the table, with which the filter was read.")] = 0
    covered_files: Annotated[int, doc("The number of data files whose rows are in the groups.")] = 0
    considered_files: Annotated[int, doc("The number of data files of the snapshot.")] = 0
    row_files: Annotated[int, doc("The number of data files whose rows have to be read.")] = 0
    row_bytes: int = 0
    name: Annotated[str | None, doc("The plan table with the row files, if there are any.")] = None
    plan_snapshot_id: Annotated[
        int | None, doc("The id of the snapshot with the row files. It replaces `name` if X-Seamark-Plans is sent.")
    ] = None


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/cube-plans",
    "makeCubePlan",
    "Plan an aggregate query: return groups of a cube, and create a plan table for the files that it does not cover",
    tags=("indexes",),
    parameters=(AUDIENCE, FRESH, AFTER),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(
            200,
            "An Arrow IPC stream with the requested columns. A group may appear several times. The metadata `plan` "
            "of its schema is a JSON object with reason, snapshot-id, schema-id, covered-files, considered-files, "
            "row-files, row-bytes, name and plan-snapshot-id",
        ),
        ResponseSpec(400, "The filter, a column or the snapshot is invalid"),
        ResponseSpec(403, "The caller may not read the table, or a dimension table whose attributes the cube has"),
        ResponseSpec(404, "The table or the cube does not exist"),
    ),
).takes(MakeCubePlanRequest)
async def make_cube_plan(call: Call, body: MakeCubePlanRequest) -> web.Response:
    """Plan an aggregate query with a cube.

    The answer has groups of the cube, and a plan table for the files that the cube does not cover.
    """
    check_lease(body.lease_s)
    if not 1 <= body.groups_max <= GROUPS_MAX:
        raise BadRequest(f"groups-max is {body.groups_max}; it must be from 1 to {GROUPS_MAX:,}")
    if body.hide_partitions and call.audience is not None:
        raise BadRequest("hide-partitions is for plan tables; with X-Seamark-Plans a plan is a snapshot of the table")
    loaded_table = await load_to_read(call, call.namespace, call.name, body.snapshot_id, is_named=body.ref is not None)
    await call.components.catalog.check_writable(loaded_table)
    cube = await find_cube(call, loaded_table, body.definition_id)
    plan_request = PlanTableRequest(
        filter=body.filter,
        predicate=body.predicate,
        case_sensitive=body.case_sensitive,
        snapshot_id=body.snapshot_id,
        ref=body.ref,
        lease_s=body.lease_s,
        hide_partitions=body.hide_partitions,
        holder=body.holder,
    )
    bound_scan = await _bind_filter(call, plan_request, loaded_table.metadata)
    no_groups = pa.schema([]).empty_table()
    if bound_scan.snapshot is None:
        return await _encode_answer(no_groups, MakeCubePlanResponse("the table has no snapshot"))
    if bound_scan.snapshot.schema_id not in (None, loaded_table.metadata.current_schema_id):
        return await _encode_answer(
            no_groups, MakeCubePlanResponse("the schema of the snapshot is not that of the table")
        )
    assert loaded_table.entry is not None
    scan_plan = await call.components.planner.plan(bound_scan, loaded_table.entry)
    excluded_plan = None
    if bytes(body.unless):
        # Leave out `filter`, because it may contain the condition whose opposite is `unless`.
        unless_request = msgspec.structs.replace(plan_request, filter=body.unless, predicate=None)
        bound_unless = await _bind_filter(call, unless_request, loaded_table.metadata)
        excluded_plan = await call.components.planner.plan(bound_unless, loaded_table.entry)
    is_whole, ids = await asyncio.to_thread(_find_whole_files, scan_plan, excluded_plan)
    condition: Expression = TRUE
    if not is_longer(bound_scan.bound, CONDITION_VALUES_MAX):
        condition = await asyncio.to_thread(to_group_condition, bound_scan.bound, cube.terms)
    group_filter_json = bytes(body.group_filter)
    group_condition = await read_in_turn(call, len(group_filter_json), partial(read_condition, group_filter_json, cube))
    condition = join_by_and(condition, group_condition)
    group_reading = await read_groups(call, loaded_table, cube, body.columns, ids, condition)
    is_covered = np.zeros(scan_plan.files, dtype=np.bool_)
    is_covered[is_whole] = group_reading.covered
    groups = group_reading.groups
    if not is_covered.any():
        return await _encode_answer(no_groups, MakeCubePlanResponse("the cube has no entry of a file of the plan"))
    if groups.num_rows > body.groups_max:
        reason = f"the answer has {groups.num_rows:,} groups; the maximum is {body.groups_max:,}"
        return await _encode_answer(no_groups, MakeCubePlanResponse(reason))
    refusal = await asyncio.to_thread(_explain_small_gain, scan_plan, is_covered)
    if refusal is not None:
        return await _encode_answer(no_groups, MakeCubePlanResponse(refusal))
    remaining_plan = scan_plan.with_only(scan_plan.entry_ids[~is_covered])
    holder = None if call.audience is None else Holder(call.audience, body.holder)
    plan_answer = PlanTableResponse(None, bound_scan.snapshot_id, None, 0, 0, scan_plan.considered, None)
    if remaining_plan.files:
        joined_tables = await _find_dimension_tables(call, cube)
        plan_table = NewPlanTable(call, loaded_table, plan_request, bound_scan, holder, joined_tables)
        plan_answer = await plan_table.make_plan_table(remaining_plan, is_shared=False)
        if plan_answer.name is None:
            reason = plan_answer.misread or "no plan table can be created for the files that it does not cover"
            return await _encode_answer(no_groups, MakeCubePlanResponse(reason))
    count_requested_statement(call, loaded_table, plan_request, bound_scan, plan_answer, None)
    answer = MakeCubePlanResponse(
        None,
        bound_scan.snapshot_id,
        loaded_table.metadata.current_schema_id,
        int(is_covered.sum()),
        scan_plan.considered,
        plan_answer.files,
        plan_answer.bytes,
        plan_answer.name if holder is None else None,
        plan_answer.plan_snapshot_id or None,
    )
    return await _encode_answer(groups, answer)


def _explain_small_gain(scan_plan: ScanPlan, is_covered: np.ndarray) -> str | None:
    """Return the reason why the rows are read without the cube, or None if the cube saves enough of them.

    With a cube, joins do not prune the files whose rows are read. So a plan without the cube may read fewer rows.
    """
    rows = find_files_at(scan_plan.view, scan_plan.entry_ids).read_longs("record_count")
    uncovered_rows, all_rows = int(rows[~is_covered].sum()), int(rows.sum())
    if all_rows <= CUBE_UNCHECKED_ROWS_MAX or uncovered_rows < CUBE_COST_MAX_FRACTION * all_rows:
        return None
    return f"the cube covers too few rows: {uncovered_rows:,} of {all_rows:,} rows would still be read"


async def _find_dimension_tables(call: Call, cube: IndexDefinition) -> list[PlanJoin]:
    """Return the dimension tables of a cube that exist. The files that the cube covers may depend on their rows."""
    tables = []
    for path in dict.fromkeys(tuple(table) for table in cube.dimension_tables):
        *namespace, name = path
        entry = await call.components.store.load_entry(EntryKind.TABLE, tuple(namespace), name)
        if entry is not None:
            tables.append(PlanJoin(path, entry.uuid))
    return tables


async def _bind_filter(call: Call, request: PlanTableRequest, metadata: TableMetadata) -> BoundScan:
    """Bind the filter of a request. A long filter is bound in a thread.

    Raises:
        BadRequest: The filter or the snapshot is invalid.
    """

    def bind_parsed_filter() -> BoundScan:
        # The first item of the result is the request itself.
        return bind_request((request, read_filter(request, metadata)), metadata)[1]

    return await read_in_turn(call, len(bytes(request.filter)) + len(request.predicate or ""), bind_parsed_filter)


def _find_whole_files(scan_plan: ScanPlan, excluded_plan: ScanPlan | None) -> tuple[np.ndarray, np.ndarray]:
    """Find the files of a plan that a cube may answer.

    Args:
        scan_plan: The plan.
        excluded_plan: A plan of the same snapshot. Its files are left out.

    Returns:
        bool[files], whether each file of the plan has an identity and no deletes, and uint64[n, 2], the identities of
        these files.
    """
    ids, is_known = compute_view_file_ids(scan_plan.view).read_identities(
        scan_plan.view.find_positions(scan_plan.entry_ids)
    )
    has_deletes = np.array(
        [bool(deletes) for deletes in scan_plan.find_deletes_by_file(scan_plan.entry_ids)], dtype=np.bool_
    )
    is_whole = is_known & ~has_deletes
    if excluded_plan is not None:
        # Entry ids depend only on the snapshot, so they are the same in both plans.
        is_whole &= ~np.isin(scan_plan.entry_ids, excluded_plan.entry_ids)
    return is_whole, ids[is_whole]


async def _encode_answer(groups: pa.Table, answer: MakeCubePlanResponse) -> web.Response:
    """Return the response with groups as an Arrow stream, and the answer in the metadata of its schema."""

    def encode() -> bytes:
        table = groups.replace_schema_metadata({CUBE_PLAN: msgspec.json.encode(answer)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    return web.Response(body=await asyncio.to_thread(encode), content_type=ARROW_STREAM)
