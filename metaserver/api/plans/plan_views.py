"""The route that creates plan views: views that are read from plan tables (`catalog/plans/plan_views.py`).

The client decides which rows of the underlying tables are left out, and engines run the plan view with the rights of
the view's owner. If rows are left out, a view may return rows that it otherwise hides (`… EXCEPT SELECT … FROM
hidden`), and the server does not check which rows may be left out. Therefore, the route requires the right to change
the view, because this right already allows any text. It also requires the right to read each table and view that the
request names.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from seamark.formats.protocol.wire import check_name, format_path, is_plan_name
from seamark.formats.runtime.errors import BadRequest, NoSuchTable, NoSuchView
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.joined_tables import may_use_plan
from seamark.metaserver.api.http.parameters.plan_audience import AUDIENCE, HEADER
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.plans.plan_leases import check_lease, grant_lease_s
from seamark.metaserver.api.plans.shown_plans import list_shown_plans
from seamark.metaserver.catalog.ownership.owners import borrows_rights, check_author
from seamark.metaserver.catalog.plans.plan_tables import Holder
from seamark.metaserver.catalog.plans.plan_views import PlanViewReader, ReplacedReference
from seamark.metaserver.store.model import TABLE, NamespacePath

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")

TABLES_MAX = 64


class PlanViewReference(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A name of a table or view in the view's text, and the scan plan that replaces it.

    The plan has its own name in `plan`. If the request has the header X-Seamark-Plans, plans of tables have no names:
    such a plan is a snapshot of the table, and `table` and `plan-snapshot-id` refer to it.
    """

    start: Annotated[int, doc("The position of the name in the view's text, in characters.")]
    end: Annotated[int, doc("The position after the name.")]
    plan: Annotated[
        list[str],
        doc("The levels of the namespace and the name of a plan table of this table, or of a plan view of this view."),
    ] = []
    table: Annotated[
        list[str],
        doc("The levels of the namespace and the name of the table, with plan-snapshot-id."),
    ] = []
    plan_snapshot_id: Annotated[
        int | None,
        doc("The plan snapshot of the table. A request with X-Seamark-Plans sends it instead of plan."),
    ] = None
    alias: Annotated[bool, doc("Whether to add the name as an alias, because the text has none.")] = False


class PlanViewRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request for a plan view."""

    metadata_location: Annotated[
        str,
        doc("The metadata file that the client has read. If the view has changed since, the answer is 404."),
    ]
    predicate: Annotated[
        str,
        doc(
            "A predicate in SQL on the view's columns, which selects the rows that the plan view returns. The client "
            "must ensure that the view returns the same selected rows from the plan tables."
        ),
    ]
    tables: Annotated[list[PlanViewReference], doc(f"1 to {TABLES_MAX} names with their plans.")]
    lease_s: Annotated[
        int | None,
        doc("The lease of the plan view in seconds, at least 1. Settings determine the default and the maximum."),
    ] = None
    reader: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None,
        doc("The engine's user for whom the plan view is created. It is required with X-Seamark-Plans."),
    ] = None
    holder: Annotated[str, msgspec.Meta(max_length=100, description="A text that identifies the client process.")] = ""


class PlanViewResponse(msgspec.Struct, rename="kebab"):
    """A plan view."""

    name: Annotated[
        str | None,
        doc(
            "The name of the plan view in the view's namespace. It is null if no plan view was created, because there "
            "are too many plans, or because the view's name is too long for a suffix."
        ),
    ]
    expires_at_ms: Annotated[int | None, doc("The end of the lease, in milliseconds since the epoch.")]
    plan_snapshot_id: Annotated[
        int | msgspec.UnsetType,
        doc("With X-Seamark-Plans: the id that renews the lease or withdraws the plan view."),
    ] = msgspec.UNSET


@Route(
    "POST",
    "/api/v1/views/{namespace}/{view}/plan-views",
    "makePlanView",
    "Create a plan view: a view over plan tables, which Trino can read by its name until its lease ends",
    tags=("metadata",),
    parameters=(AUDIENCE,),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "Its name", PlanViewResponse),
        ResponseSpec(400, "The view's text does not name these tables at these positions, or the predicate is invalid"),
        ResponseSpec(404, "The view does not exist or has changed, or a plan no longer exists"),
    ),
).takes(PlanViewRequest)
async def make_plan_view(call: Call, body: PlanViewRequest) -> PlanViewResponse:
    """Create a plan view: a view over plan tables, which Trino can read by its name until its lease ends."""
    namespace, name = call.namespace, call.name
    check_lease(body.lease_s)
    if not 0 < len(body.tables) <= TABLES_MAX:
        raise BadRequest(f"tables has {len(body.tables)} entries; it must have 1 to {TABLES_MAX}")
    audience = call.audience
    if (audience is None) != (body.reader is None):
        raise BadRequest(f"reader and the header {HEADER} belong together; send both or neither")
    references = [await _resolve_reference(call, table, audience) for table in body.tables]
    catalog = call.components.catalog
    view = await catalog.views.load(namespace, name)
    if view.entry.metadata_location != body.metadata_location:
        raise NoSuchView(f"View has changed since it was read: {format_path(namespace, name)}; load it again")
    check_author(call.caller, view.metadata)
    schema = view.metadata.schema(view.metadata.current_version.schema_id)
    assert schema is not None
    # Functions are allowed, because unqualified `lower` and `upper` are always Trino's own functions.
    parse_predicate = partial(sql.parse_sql, body.predicate, schema, functions=True)
    sql_filter = await read_in_turn(call, len(body.predicate), parse_predicate)
    if borrows_rights(view.metadata):
        # A subquery or a function would run with the rights of the view's owner. The parsed filter cannot show
        # them: `evil.bucket(4, c)` is a transform there, and a comparison with NULL is never true.
        unsupported_part = sql_filter.unused[0] if sql_filter.unused else sql.find_definer_rights_call(body.predicate)
        if unsupported_part is not None:
            raise BadRequest(
                f"The view runs with its owner's rights, so the predicate may only compare its columns with values: "
                f"{unsupported_part[:200]}"
            )
    lease_s = grant_lease_s(body.lease_s, call.components.settings)
    reader = None if audience is None else PlanViewReader(Holder(audience, body.holder), str(body.reader))
    plan = await catalog.plan_views.create(view, references, body.predicate, lease_s, call.principal.name, reader)
    if plan is None:
        return PlanViewResponse(None, None)
    return PlanViewResponse(
        plan.name, plan.expires_ms, msgspec.UNSET if plan.plan_snapshot_id is None else plan.plan_snapshot_id
    )


async def _resolve_reference(call: Call, reference: PlanViewReference, audience: str | None) -> ReplacedReference:
    """Find the plan that replaces a name, and check the caller's right.

    A plan has one of three forms: a snapshot of the planned table, a plan table (a read-only table with the files of
    the plan), or a plan view (a view whose tables are replaced by plans).

    Args:
        call: The request.
        reference: The name in the text, and the plan.
        audience: The value of the header X-Seamark-Plans, or None. With the header, plans of tables are snapshots, so
            a name is that of a plan view.

    Raises:
        BadRequest: The entry is invalid.
        NoSuchTable, NoSuchView: The plan does not exist.
    """
    path = reference.plan or reference.table
    if (
        len(path) < 2
        or (reference.plan_snapshot_id is None) != bool(reference.plan)
        or (reference.plan and reference.table)
    ):
        raise BadRequest(
            "Each entry of tables needs either plan, or table and plan-snapshot-id; plan and table need a namespace "
            "and a name"
        )
    *levels, name = (check_name(level, "plan table's name") for level in path)
    namespace = tuple(levels)
    catalog = call.components.catalog
    plan_table = await catalog.context.store.load_plan_table(namespace, name) if is_plan_name(name) else None
    await call.allow(
        Securable(namespace, TABLE, name if plan_table is None else plan_table.of_name), operation="planTableScan"
    )
    if plan_table is not None and not await may_use_plan(call.components, call.principal, plan_table.joined_tables):
        raise NoSuchTable(f"Table does not exist: {format_path(namespace, name)}")
    if reference.plan_snapshot_id is not None:
        return await _resolve_plan_snapshot(call, reference, namespace, name)
    if audience is not None:
        plan = await catalog.plan_views.find(namespace, name, audience)
        inner_metadata = (await catalog.views.load(namespace, plan.of_name)).metadata
        schema = inner_metadata.schema(inner_metadata.current_version.schema_id)
        columns = () if schema is None else tuple(field.name for field in schema.fields)
        return ReplacedReference(
            reference.start, reference.end, namespace, plan.of_name, plan.name, alias=reference.alias, columns=columns
        )
    try:
        plan, _ = await catalog.plan_tables.find(namespace, name)
    except NoSuchTable:
        plan = await catalog.plan_views.find(namespace, name)
    return ReplacedReference(reference.start, reference.end, namespace, plan.of_name, plan.name, alias=reference.alias)


async def _resolve_plan_snapshot(
    call: Call, reference: PlanViewReference, namespace: NamespacePath, name: str
) -> ReplacedReference:
    """Find the plan snapshot that replaces a reference to a table.

    A plan snapshot is a snapshot of the table with only the files of a plan.

    Raises:
        NoSuchTable: The client has no such plan snapshot of the table.
    """
    entry = await call.components.catalog.tables.load_entry(namespace, name)
    if reference.plan_snapshot_id not in {plan.id for plan in await list_shown_plans(call, entry)}:
        raise NoSuchTable(f"{format_path(namespace, name)} has no plan {reference.plan_snapshot_id} for this {HEADER}")
    return ReplacedReference(reference.start, reference.end, namespace, name, version=reference.plan_snapshot_id)
