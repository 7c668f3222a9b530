"""Our own route that makes a plan view: a view read over plan tables (`catalog/plan_views.py`).

Who makes one says which rows of the tables behind the view are left out, and engines run it by the rights of the
view's owner. By leaving out some rows one could have a view show others that it hides (`… EXCEPT SELECT … FROM
hidden`). The server does not judge which may be left out: who asks does. So it needs the right to change the view, as
whoever has that may have the view say anything. And the right to read each table and view that is named.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web

from metaserver.api.http.describe import NAMESPACE, Parameter, ResponseSpec, describe
from metaserver.api.http.keys import AUTHORIZER, CATALOG, PRINCIPAL, SETTINGS
from metaserver.api.http.plan_audience import AUDIENCE, HEADER, audience_of
from metaserver.api.http.render import json_answer
from metaserver.api.http.requests import allow, path_name, path_namespace, read_json
from metaserver.api.plans.plan_leases import check_lease, granted_s
from metaserver.catalog.catalog import Catalog
from metaserver.catalog.plan_tables import Holder
from metaserver.catalog.plan_views import Place, Reader
from metaserver.deferred import Deferred
from metaserver.errors import BadRequest, NoSuchTable, NoSuchView
from metaserver.store.port import NamespacePath
from metaserver.wire import check_name, show

if TYPE_CHECKING:
    from metaserver.iceberg.expressions import sql
else:
    sql = Deferred("metaserver.iceberg.expressions.sql")

TABLES_MAX = 64
_IN_THREAD_CHARACTERS = 2_000
_VIEW = Parameter("view", "path", "Name of the view.", {"type": "string"}, True)
_INTEGER = {"type": "integer", "minimum": 0}
_ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "expires-at-ms"],
    "properties": {
        "name": {
            "type": ["string", "null"],
            "description": "Of the plan view, in the view's namespace. Null where none was made: there are too many "
            "plans, or there is no room for another name behind the view's.",
        },
        "expires-at-ms": {"type": ["integer", "null"], "description": "When the name is good no longer."},
        "plan-snapshot-id": {
            "type": "integer",
            "description": "With X-Seamark-Plans: the id by which the lease is renewed or the plan view withdrawn.",
        },
    },
}
_BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["metadata-location", "predicate", "tables"],
    "properties": {
        "metadata-location": {
            "type": "string",
            "description": "Of the view as it was read. Where it has changed since, no plan view is made (404).",
        },
        "predicate": {
            "type": "string",
            "description": "In SQL, over the view's columns: the rows that the plan view has. Those of the view for "
            "which it is true must be the same over the plan tables; that is the caller's to know.",
        },
        "tables": {
            "type": "array",
            "minItems": 1,
            "maxItems": TABLES_MAX,
            "items": {
                "type": "object",
                "required": ["start", "end"],
                "properties": {
                    "start": {**_INTEGER, "description": "Of the name in the view's text, in characters."},
                    "end": {**_INTEGER, "description": "Exclusive."},
                    "plan": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Levels of the namespace, and the name of a plan table of this very table, or "
                        "of a plan view of this very view.",
                    },
                    "table": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Levels of the namespace and the name of the table, with plan-snapshot-id.",
                    },
                    "plan-snapshot-id": {
                        "type": "integer",
                        "description": "Instead of plan, with X-Seamark-Plans: the plan of the table to be read.",
                    },
                    "alias": {
                        "type": "boolean",
                        "description": "The own name is to follow, as there is no alias. Default false.",
                    },
                },
            },
        },
        "lease-s": {
            "type": "integer",
            "minimum": 1,
            "description": "How long the name is to be good for; default and bound are settings.",
        },
        "reader": {
            "type": "string",
            "minLength": 1,
            "maxLength": 1000,
            "description": "With X-Seamark-Plans, and needed there: the engine's user that the plan view is made for.",
        },
        "holder": {"type": "string", "maxLength": 100, "description": "As of plan tables."},
    },
}


class _Table(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    start: int
    end: int
    plan: list[str] = []
    table: list[str] = []
    plan_snapshot_id: int | None = None
    alias: bool = False


class _Wanted(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    metadata_location: str
    predicate: str
    tables: list[_Table]
    lease_s: int | None = None
    reader: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    holder: Annotated[str, msgspec.Meta(max_length=100)] = ""


class _Made(msgspec.Struct, rename="kebab"):
    name: str | None
    expires_at_ms: int | None
    plan_snapshot_id: int | msgspec.UnsetType = msgspec.UNSET


@describe(
    "makePlanView",
    "Creates a plan view: a view over plan tables, which Trino can read by its name until its lease ends",
    tags=("metadata",),
    parameters=(NAMESPACE, _VIEW, AUDIENCE),
    body=_BODY_SCHEMA,
    answers=(
        ResponseSpec(200, "Its name", _ANSWER_SCHEMA),
        ResponseSpec(400, "The view's text does not name these tables at these positions, or the predicate is invalid"),
        ResponseSpec(404, "No such view, it has changed, or a plan no longer exists"),
    ),
)
async def make_plan_view(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "view")
    allow(request, namespace)
    wanted = await read_json(request, _Wanted)
    check_lease(wanted.lease_s)
    if not 0 < len(wanted.tables) <= TABLES_MAX:
        raise BadRequest(f"{len(wanted.tables)} tables are given; from 1 to {TABLES_MAX} are allowed")
    audience = audience_of(request)
    if (audience is None) != (wanted.reader is None):
        raise BadRequest(f"reader and the header {HEADER} go together; give both or neither")
    places = [await _place(request, one, audience) for one in wanted.tables]
    catalog = request.app[CATALOG]
    view = await catalog.views.load(namespace, name)
    if view.entry.metadata_location != wanted.metadata_location:
        raise NoSuchView(f"View does not exist any more as it was read: {show(namespace, name)}")
    schema = view.metadata.schema(view.metadata.current_version.schema_id)
    assert schema is not None
    if len(wanted.predicate) > _IN_THREAD_CHARACTERS:
        await asyncio.to_thread(sql.parse_sql, wanted.predicate, schema)
    else:
        sql.parse_sql(wanted.predicate, schema)
    lease_s = granted_s(wanted.lease_s, request.app[SETTINGS])
    reader = None if audience is None else Reader(Holder(audience, wanted.holder), str(wanted.reader))
    plan = await catalog.plan_views.make(view, places, wanted.predicate, lease_s, request[PRINCIPAL].name, reader)
    if plan is None:
        return json_answer(_Made(None, None))
    return json_answer(_Made(plan.name, plan.expires_ms, msgspec.UNSET if plan.shown_id is None else plan.shown_id))


async def _place(request: web.Request, table: _Table, audience: str | None) -> Place:
    given = table.plan or table.table
    if len(given) < 2 or (table.plan_snapshot_id is None) != bool(table.plan) or (table.plan and table.table):
        raise BadRequest("A place needs a plan, or a table and a plan-snapshot-id; each has a namespace and a name")
    *levels, name = (check_name(one, "plan table's name") for one in given)
    namespace = tuple(levels)
    for operation in ("loadTable", "loadView"):
        request.app[AUTHORIZER].require(request[PRINCIPAL], operation, namespace)
    catalog = request.app[CATALOG]
    if table.plan_snapshot_id is not None:
        return await _version(catalog, table, namespace, name, audience)
    if audience is not None:
        plan = await catalog.plan_views.named(namespace, name, audience)
        inner = (await catalog.views.load(namespace, plan.of_name)).metadata
        schema = inner.schema(inner.current_version.schema_id)
        columns = () if schema is None else tuple(field.name for field in schema.fields)
        return Place(table.start, table.end, namespace, plan.of_name, plan.name, alias=table.alias, columns=columns)
    try:
        plan, _ = await catalog.plan_tables.named(namespace, name)
    except NoSuchTable:
        plan = await catalog.plan_views.named(namespace, name)
    return Place(table.start, table.end, namespace, plan.of_name, plan.name, alias=table.alias)


async def _version(catalog: Catalog, table: _Table, namespace: NamespacePath, name: str, audience: str | None) -> Place:
    entry = await catalog.tables.entry(namespace, name)
    shown = [] if audience is None else await catalog.plan_tables.shown(entry, audience)
    if table.plan_snapshot_id not in {one.shown_id for one in shown}:
        raise NoSuchTable(f"{show(namespace, name)} has no plan {table.plan_snapshot_id} for this {HEADER}")
    return Place(table.start, table.end, namespace, name, version=table.plan_snapshot_id)


def add_routes(app: web.Application) -> None:
    app.router.add_post("/api/v1/views/{namespace:[^/]+}/{view:[^/]+}/plan-views", make_plan_view)
