"""Routes for dropped entries (list, undrop, purge) and for reports of engines."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.keys import CATALOG
from seamark.metaserver.api.http.parameters.paging import PAGING, page_schema
from seamark.metaserver.catalog.dropped import no_such_dropped
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind, MetricsReport
from seamark.metaserver.wire import check_name, check_namespace, parse_namespace

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
_NOT_FOUND = ResponseSpec(404, "No dropped entry has this id, or its retention has ended")


class UndropRequest(msgspec.Struct, forbid_unknown_fields=True):
    namespace: Annotated[list[str] | None, doc("A new namespace.")] = None
    name: Annotated[str | None, doc("A new name.")] = None


@Route(
    "GET",
    "/api/v1/dropped",
    "listDropped",
    "Lists dropped entries that can be restored",
    tags=("dropped",),
    check=Check.HANDLER,
    parameters=(
        Parameter("namespace", "query", "Only from this namespace; levels joined by 0x1F.", {"type": "string"}),
        *PAGING,
    ),
    answers=(ResponseSpec(200, "One page, in order of dropping", page_schema("dropped", "DroppedEntry")),),
)
async def list_dropped(call: Call) -> dict[str, Any]:
    namespace = call.query.get("namespace")
    path = parse_namespace(namespace) if namespace is not None else None
    call.allow(path or ())
    page = await call.app[CATALOG].dropped.list(path, *call.paging())
    return {"dropped": [_dropped(row) for row in page.items], "next-page-token": page.next_token}


@Route(
    "POST",
    "/api/v1/dropped/{id}/undrop",
    "undrop",
    "Restores a dropped table or view, under its old name or a new name",
    tags=("dropped",),
    check=Check.SOMEWHERE,
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "The restored entry", {"type": "object", "required": list(_ENTRY), "properties": _ENTRY}),
        _NOT_FOUND,
        ResponseSpec(409, "The name is taken"),
    ),
).takes(UndropRequest)
async def undrop(call: Call, change: UndropRequest) -> dict[str, Any]:
    namespace = check_namespace(tuple(change.namespace)) if change.namespace is not None else None
    name = check_name(change.name, "name") if change.name is not None else None
    dropped = call.app[CATALOG].dropped
    row = await _row(call)
    call.allow(row.entry.namespace, namespace if namespace is not None else row.entry.namespace)
    entry = await dropped.restore(call.caller, row.id, namespace, name)
    return _entry(entry)


@Route(
    "DELETE",
    "/api/v1/dropped/{id}",
    "purgeDropped",
    "Deletes the files of a dropped table, or a dropped view, permanently; undrop is then impossible",
    tags=("dropped",),
    check=Check.HANDLER,
    answers=(ResponseSpec(204, "Purged"), _NOT_FOUND),
)
async def purge_dropped(call: Call) -> None:
    dropped = call.app[CATALOG].dropped
    row = await _row(call)
    call.allow(row.entry.namespace)
    await dropped.purge(call.caller, row.id)


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/metrics",
    "listTableMetrics",
    "Lists the scan and commit reports that engines sent for a table",
    tags=("metrics",),
    parameters=PAGING,
    answers=(
        ResponseSpec(200, "One page, oldest first", page_schema("reports", "MetricsReport")),
        ResponseSpec(404, "No such table"),
    ),
)
async def list_table_metrics(call: Call) -> dict[str, Any]:
    page = await call.app[CATALOG].metrics.list(call.namespace, call.name, *call.paging())
    return {"reports": [_report(row) for row in page.items], "next-page-token": page.next_token}


async def _row(call: Call) -> DroppedEntry:
    """The dropped entry in the path. NotFound also when the caller may not list it: a refusal would reveal it."""
    row = await call.app[CATALOG].dropped.get(call.name)
    if not call.may(row.entry.namespace, "listDropped"):
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
