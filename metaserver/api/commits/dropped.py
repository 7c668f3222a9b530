"""Routes for dropped entries, which list, restore and purge them, and for reports of engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from seamark.formats.protocol.wire import check_name, check_namespace, parse_namespace
from seamark.formats.runtime.decoding import convert_attributes
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.parameters.paging import PAGING
from seamark.metaserver.api.http.parameters.requests import read_boolean_query
from seamark.metaserver.catalog.dropped import make_unknown_dropped_error
from seamark.metaserver.store.model import DroppedEntry, EntryKind

_NOT_FOUND = ResponseSpec(404, "No dropped entry has this id, or its retention has ended")


class EntryAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """A table or view."""

    kind: EntryKind
    namespace: list[str]
    name: str
    uuid: str
    metadata_location: str


class DroppedAnswer(EntryAnswer, frozen=True, rename="kebab"):
    """A dropped table or view."""

    id: str
    dropped_ms: int
    expires_ms: Annotated[int, doc("The end of the retention. Until this time, the entry can be restored.")]
    purge: Annotated[bool, doc("Whether the files are deleted after the retention.")]
    principal_name: str = msgspec.field(name="who")


class DroppedPage(msgspec.Struct, frozen=True, rename="kebab"):
    """One page of dropped tables and views."""

    dropped: list[DroppedAnswer]
    next_page_token: str | None


class MetricsReportAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """A report of an engine about a scan or a commit."""

    id: str
    report_type: Literal["scan-report", "commit-report"]
    snapshot_id: int | None
    received_ms: int
    principal_name: str = msgspec.field(name="who")
    report: Annotated[dict[str, Any], doc("The report as the engine sent it.")]


class MetricsReportPage(msgspec.Struct, frozen=True, rename="kebab"):
    """One page of reports."""

    reports: list[MetricsReportAnswer]
    next_page_token: str | None


class UndropRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to restore a dropped table or view."""

    namespace: Annotated[list[str] | None, doc("The new namespace. The default is the old namespace.")] = None
    name: Annotated[str | None, doc("The new name. The default is the old name.")] = None


@Route(
    "GET",
    "/api/v1/dropped",
    "listDropped",
    "List dropped entries that can be restored, or that keep their locations",
    tags=("dropped",),
    check=Check.HANDLER,
    parameters=(
        Parameter(
            "namespace", "query", "Only entries of this namespace, with levels joined by 0x1F.", {"type": "string"}
        ),
        Parameter(
            "retained",
            "query",
            "If true, list the entries that can no longer be restored, but keep their locations, where files are left.",
            {"type": "boolean", "default": False},
        ),
        *PAGING,
    ),
    answers=(ResponseSpec(200, "One page, sorted by the time of the drop", DroppedPage),),
)
async def list_dropped(call: Call) -> DroppedPage:
    """List dropped entries that can be restored, or that keep their locations."""
    namespace = call.query.get("namespace")
    path = parse_namespace(namespace) if namespace is not None else None
    await call.allow(Securable(path or ()))
    dropped_entries = call.components.catalog.dropped
    list_page = dropped_entries.list_retained if read_boolean_query(call.query, "retained") else dropped_entries.list
    page = await list_page(path, *call.read_paging())
    return DroppedPage([_make_dropped_answer(dropped_entry) for dropped_entry in page.items], page.next_token)


@Route(
    "POST",
    "/api/v1/dropped/{id}/undrop",
    "undrop",
    "Restore a dropped table or view, under its old name or a new name",
    tags=("dropped",),
    check=Check.SOMEWHERE,
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "The restored entry", EntryAnswer),
        _NOT_FOUND,
        ResponseSpec(409, "The name is taken"),
    ),
).takes(UndropRequest)
async def undrop(call: Call, body: UndropRequest) -> EntryAnswer:
    """Restore a dropped table or view, under its old name or a new name."""
    namespace = check_namespace(tuple(body.namespace)) if body.namespace is not None else None
    name = check_name(body.name, "name") if body.name is not None else None
    dropped_entries = call.components.catalog.dropped
    dropped_entry = await _find_dropped_entry(call)
    await call.allow(Securable(dropped_entry.entry.namespace))
    if namespace is not None and namespace != dropped_entry.entry.namespace:  # This moves the entry, as a rename does.
        await call.allow(Securable(dropped_entry.entry.namespace), operation="renameTable")
        await call.allow(Securable(namespace))
    await call.allow_new_name(
        dropped_entry.entry.kind.value, namespace or dropped_entry.entry.namespace, name or dropped_entry.entry.name
    )
    return convert_attributes(
        await dropped_entries.restore(call.caller, dropped_entry.id, namespace, name), EntryAnswer
    )


@Route(
    "DELETE",
    "/api/v1/dropped/{id}",
    "purgeDropped",
    "Delete the files of a dropped table, or a dropped view, permanently; undrop is then impossible",
    tags=("dropped",),
    check=Check.HANDLER,
    parameters=(
        Parameter(
            "release",
            "query",
            "If true, delete no file, but allow new entries at the locations of an entry that cannot be restored.",
            {"type": "boolean", "default": False},
        ),
    ),
    answers=(ResponseSpec(204, "The files are deleted, or the locations are released"), _NOT_FOUND),
)
async def purge_dropped(call: Call) -> None:
    """Delete the files of a dropped table, or a dropped view, permanently."""
    dropped_entries = call.components.catalog.dropped
    dropped_entry = await _find_dropped_entry(call)
    await call.allow(Securable(dropped_entry.entry.namespace))
    if read_boolean_query(call.query, "release"):
        await dropped_entries.release(dropped_entry.id)
    else:
        await dropped_entries.purge(call.caller, dropped_entry.id)


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/metrics",
    "listTableMetrics",
    "List the scan and commit reports that engines sent for a table",
    tags=("metrics",),
    parameters=PAGING,
    answers=(
        ResponseSpec(200, "One page, oldest first", MetricsReportPage),
        ResponseSpec(404, "No such table"),
    ),
)
async def list_table_metrics(call: Call) -> MetricsReportPage:
    """List the scan and commit reports that engines sent for a table."""
    page = await call.components.catalog.metrics.list(call.namespace, call.name, *call.read_paging())
    return MetricsReportPage(
        [convert_attributes(report, MetricsReportAnswer) for report in page.items], page.next_token
    )


async def _find_dropped_entry(call: Call) -> DroppedEntry:
    """Return the dropped entry that the path names.

    Raises:
        NotFound: The entry does not exist, or the caller may not list it. Forbidden would reveal that it exists.
    """
    dropped_entry = await call.components.catalog.dropped.get(call.name)
    if not await call.may(Securable(dropped_entry.entry.namespace), "listDropped"):
        raise make_unknown_dropped_error(dropped_entry.id)
    return dropped_entry


def _make_dropped_answer(dropped_entry: DroppedEntry) -> DroppedAnswer:
    """Return a dropped entry in the form of an answer."""
    entry = dropped_entry.entry
    return DroppedAnswer(
        entry.kind,
        list(entry.namespace),
        entry.name,
        entry.uuid,
        entry.metadata_location,
        dropped_entry.id,
        dropped_entry.dropped_ms,
        dropped_entry.expires_ms,
        dropped_entry.purge,
        dropped_entry.principal_name,
    )
