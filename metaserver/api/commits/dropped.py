"""Routes for dropped entries (list, undrop, purge) and for reports of engines."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.describe import NAMESPACE, TABLE, Parameter, ResponseSpec, describe
from seamark.metaserver.api.http.keys import AUTHORIZER, CATALOG, PRINCIPAL
from seamark.metaserver.api.http.paging import PAGING, page_schema, paging
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, allow_somewhere, caller, path_name, path_namespace, read_body
from seamark.metaserver.catalog.dropped import no_such_dropped
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind, MetricsReport
from seamark.metaserver.wire import check_name, check_namespace, decode_as, parse_namespace

_ENTRY: dict[str, Any] = {
    "kind": {"enum": [kind.value for kind in EntryKind]},
    "namespace": {"type": "array", "items": {"type": "string"}},
    "name": {"type": "string"},
    "uuid": {"type": "string"},
    "metadata-location": {"type": "string"},
}
DROPPED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", *_ENTRY, "dropped-ms", "expires-ms", "purge", "who"],
    "properties": {
        "id": {"type": "string"},
        **_ENTRY,
        "dropped-ms": {"type": "integer"},
        "expires-ms": {"type": "integer", "description": "The end of the retention; until then undrop is possible."},
        "purge": {"type": "boolean", "description": "Whether the files are deleted after the retention."},
        "who": {"type": "string"},
    },
}
REPORT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "report-type", "received-ms", "who", "report"],
    "properties": {
        "id": {"type": "string"},
        "report-type": {"enum": ["scan-report", "commit-report"]},
        "snapshot-id": {"type": ["integer", "null"]},
        "received-ms": {"type": "integer"},
        "who": {"type": "string"},
        "report": {"type": "object", "description": "The report as the engine sent it."},
    },
}
_UNDROP_BODY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "namespace": {"type": ["array", "null"], "items": {"type": "string"}, "description": "A new namespace."},
        "name": {"type": ["string", "null"], "description": "A new name."},
    },
}
_ID = Parameter("id", "path", "Id of the dropped entry, from the list.", {"type": "string"}, True)
_NOT_FOUND = ResponseSpec(404, "No dropped entry has this id, or its retention has ended")


class UndropBody(msgspec.Struct, forbid_unknown_fields=True):
    namespace: list[str] | None = None
    name: str | None = None


@describe(
    "listDropped",
    "Lists dropped entries that can be restored",
    tags=("dropped",),
    parameters=(
        Parameter("namespace", "query", "Only from this namespace; levels joined by 0x1F.", {"type": "string"}),
        *PAGING,
    ),
    answers=(ResponseSpec(200, "One page, in order of dropping", page_schema("dropped", "Dropped")),),
)
async def list_dropped(request: web.Request) -> web.Response:
    namespace = request.query.get("namespace")
    path = parse_namespace(namespace) if namespace is not None else None
    allow(request, path or ())
    page = await request.app[CATALOG].dropped.list(path, *paging(request))
    return json_answer({"dropped": [_dropped(row) for row in page.items], "next-page-token": page.next_token})


@describe(
    "undrop",
    "Restores a dropped table or view, under its old name or a new name",
    tags=("dropped",),
    parameters=(_ID,),
    body=_UNDROP_BODY,
    answers=(
        ResponseSpec(200, "The restored entry", {"type": "object", "required": list(_ENTRY), "properties": _ENTRY}),
        _NOT_FOUND,
        ResponseSpec(409, "The name is taken"),
    ),
)
async def undrop(request: web.Request) -> web.Response:
    allow_somewhere(request)
    body = await read_body(request)
    change = decode_as(body, UndropBody, "The body") if body else UndropBody()
    namespace = check_namespace(tuple(change.namespace)) if change.namespace is not None else None
    name = check_name(change.name, "name") if change.name is not None else None
    dropped = request.app[CATALOG].dropped
    row = await _row(request)
    allow(request, row.entry.namespace, namespace if namespace is not None else row.entry.namespace)
    entry = await dropped.restore(caller(request), row.id, namespace, name)
    return json_answer(_entry(entry))


@describe(
    "purgeDropped",
    "Deletes the files of a dropped table, or a dropped view, permanently; undrop is then impossible",
    tags=("dropped",),
    parameters=(_ID,),
    answers=(ResponseSpec(204, "Purged"), _NOT_FOUND),
)
async def purge_dropped(request: web.Request) -> web.Response:
    dropped = request.app[CATALOG].dropped
    row = await _row(request)
    allow(request, row.entry.namespace)
    await dropped.purge(caller(request), row.id)
    return web.Response(status=204)


@describe(
    "listTableMetrics",
    "Lists the scan and commit reports that engines sent for a table",
    tags=("metrics",),
    parameters=(NAMESPACE, TABLE, *PAGING),
    answers=(
        ResponseSpec(200, "One page, oldest first", page_schema("reports", "MetricsReport")),
        ResponseSpec(404, "No such table"),
    ),
)
async def list_table_metrics(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    page = await request.app[CATALOG].metrics.list(namespace, name, *paging(request))
    return json_answer({"reports": [_report(row) for row in page.items], "next-page-token": page.next_token})


async def _row(request: web.Request) -> DroppedEntry:
    """The dropped entry in the path. NotFound also when the caller may not list it: a refusal would reveal it."""
    row = await request.app[CATALOG].dropped.get(path_name(request, "id"))
    if not request.app[AUTHORIZER].allows(request[PRINCIPAL], "listDropped", row.entry.namespace):
        raise no_such_dropped(row.id)
    return row


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind.value,
        "namespace": list(entry.namespace),
        "name": entry.name,
        "uuid": entry.uuid,
        "metadata-location": entry.metadata_location,
    }


def _dropped(row: DroppedEntry) -> dict[str, Any]:
    return {
        "id": row.id,
        **_entry(row.entry),
        "dropped-ms": row.dropped_ms,
        "expires-ms": row.expires_ms,
        "purge": row.purge,
        "who": row.who,
    }


def _report(row: MetricsReport) -> dict[str, Any]:
    return {
        "id": row.id,
        "report-type": row.report_type,
        "snapshot-id": row.snapshot_id,
        "received-ms": row.received_ms,
        "who": row.who,
        "report": row.report,
    }


def add_routes(app: web.Application) -> None:
    app.router.add_get("/api/v1/dropped", list_dropped)
    app.router.add_post("/api/v1/dropped/{id}/undrop", undrop)
    app.router.add_delete("/api/v1/dropped/{id}", purge_dropped)
    app.router.add_get("/api/v1/tables/{namespace}/{table}/metrics", list_table_metrics)
