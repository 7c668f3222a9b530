"""Our own route that makes a plan a table of its own, for any engine that takes a table's name.

Identical questions share one name: what answers them is found by the table's pointer, its indexes and the bound filter
alone, before anything is planned. Of those that are asked at the same time one is worked on. A reader's right, as
planning is: what is stored is small, names nothing that the table's reader may not read, and goes by itself.

With `X-Seamark-Plans` the plan has no name. Its answer says the id of a snapshot, which loadTable shows to requests
with the same value (`plan_audience.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web

from cache.memory import MemoryCache
from cache.single_flight import SingleFlight
from metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from metaserver.api.http.keys import CATALOG, CLOCK, OBJECTS, PLANNER, PRINCIPAL, SETTINGS
from metaserver.api.http.plan_audience import AUDIENCE, audience_of
from metaserver.api.http.render import json_answer
from metaserver.api.http.requests import allow, parse_body, path_name, path_namespace, read_body
from metaserver.api.http.snapshots import snapshot_of
from metaserver.api.plans.joins import JOINS_SCHEMA, JOINS_TOLD_SCHEMA, JoinAsked, add_joins, told_of
from metaserver.api.plans.plan_leases import check_lease, granted_s
from metaserver.catalog.plan_tables import Holder, digest_of, plan_name, shown_snapshot
from metaserver.catalog.values import LoadedTable
from metaserver.deferred import Deferred
from metaserver.errors import BadRequest
from metaserver.iceberg.expressions.expression import TRUE, Expression
from metaserver.iceberg.expressions.expression_json import parse_expression
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.properties import metadata_folder
from metaserver.planner.joins.joins import JoinOutcome
from metaserver.planner.lookup.lookup import files_at, lookup
from metaserver.planner.plan.plan_tables import KeptManifests, PlanWriter, kept_of
from metaserver.planner.scan.request import BoundScan, ScanRequest
from metaserver.planner.scan.scan import Scan
from metaserver.store.port import Entry, PlanTable
from metaserver.wire import PLANS_FOLDER, decode_json

if TYPE_CHECKING:
    from metaserver.iceberg.expressions import sql
else:
    sql = Deferred("metaserver.iceberg.expressions.sql")

_IN_THREAD_BYTES = 4000
"""Longer requests are read and bound beside the event loop."""
_IN_THREAD_FILES, _IN_THREAD_MANIFESTS = 100_000, 200
"""Plans of larger snapshots are weighed there, too."""
_READ_BYTES, _BYTES_PER_READ_BYTE = 1 << 20, 40
_DECLINED_BYTES, _DECLINED_EACH_BYTES = 1 << 20, 500
"""What is remembered of questions: how they read, and which of them no table is made for."""

_INTEGER = {"type": "integer"}
PLAN_TABLE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "name",
        "snapshot-id",
        "expires-at-ms",
        "files",
        "bytes",
        "considered-files",
        "considered-bytes",
    ],
    "properties": {
        "name": {
            "type": ["string", "null"],
            "description": "Of the plan table, in the table's namespace. Null where none was made: the table has no "
            "snapshot, it is to be read by another schema, the plan keeps more than kept-max, too many files would "
            "have to be listed anew, or there are too many plan tables.",
        },
        "snapshot-id": {"type": ["integer", "null"]},
        "plan-snapshot-id": {
            "type": "integer",
            "description": "With X-Seamark-Plans, instead of the name: the id of the snapshot that loadTable adds for "
            "requests with the same value of the header.",
        },
        "expires-at-ms": {
            "type": ["integer", "null"],
            "description": "When the name is good no longer. Half of lease-s from now at least: plans are shared.",
        },
        "files": {**_INTEGER, "description": "Data files that the plan keeps."},
        "bytes": _INTEGER,
        "considered-files": {**_INTEGER, "description": "Data files of the snapshot."},
        "considered-bytes": {
            "type": ["integer", "null"],
            "description": "Null where not known: manifests that the filter rules out are not read.",
        },
        "joins": JOINS_TOLD_SCHEMA,
    },
}
_BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "joins": JOINS_SCHEMA,
        "filter": {"description": "An expression of the Iceberg REST standard. Without it, and predicate: all files."},
        "predicate": {
            "type": "string",
            "description": "A predicate in SQL, instead of `filter`.",
            "examples": ["id = 5 AND day >= '2024-01-01'"],
        },
        "case-sensitive": {
            "type": "boolean",
            "description": "Names in `filter`; default true. Those in SQL never are.",
        },
        "snapshot-id": _INTEGER,
        "ref": {"type": "string", "description": "A branch or tag, instead of snapshot-id."},
        "use-snapshot-schema": {
            "type": "boolean",
            "description": "The reader goes by the snapshot's schema. A plan table is read by the current one: where "
            "the two differ, none is made. Default false.",
        },
        "kept-max": {
            "type": "number",
            "minimum": 0,
            "maximum": 1,
            "description": "Where the plan keeps more of the snapshot's files than this share, no table is made.",
        },
        "lease-s": {
            "type": "integer",
            "minimum": 1,
            "description": "How long the name is to be good for; default and bound are settings.",
        },
        "holder": {
            "type": "string",
            "maxLength": 100,
            "description": "With X-Seamark-Plans: any text that names the process that asks. Identical plans are "
            "shared by requests of one holder only, so that a holder can withdraw its plans.",
        },
    },
}


class _Wanted(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    filter: msgspec.Raw = msgspec.Raw()
    predicate: str | None = None
    case_sensitive: bool = True
    snapshot_id: int | None = None
    ref: str | None = None
    use_snapshot_schema: bool = False
    kept_max: float | None = None
    lease_s: int | None = None
    joins: list[JoinAsked] = []
    holder: Annotated[str, msgspec.Meta(max_length=100)] = ""


class _Made(msgspec.Struct, rename="kebab"):
    name: str | None
    snapshot_id: int | None
    expires_at_ms: int | None
    files: int
    bytes: int
    considered_files: int
    considered_bytes: int | None
    joins: tuple[JoinOutcome, ...] | msgspec.UnsetType = msgspec.UNSET
    plan_snapshot_id: int | msgspec.UnsetType = msgspec.UNSET


WRITER: web.AppKey[PlanWriter] = web.AppKey("plan-writer", PlanWriter)
MAKING: web.AppKey[SingleFlight[tuple[object, ...], _Made]] = web.AppKey("plan-tables-making")
_Read = tuple[_Wanted, Expression]
READ: web.AppKey[MemoryCache[tuple[str, bytes], _Read]] = web.AppKey("plan-tables-read")
"""By the table's metadata file and the body: names mean what that file says."""
DECLINED: web.AppKey[MemoryCache[tuple[str, float | None], _Made]] = web.AppKey("plan-tables-declined")
"""By the name that a table would have had, which tells all that its plan depends on, and `kept-max`."""


@describe(
    "makePlanTable",
    "Creates a plan table: the files that a plan keeps, as a table that any engine can read by its name "
    "until its lease ends",
    tags=("metadata",),
    parameters=(NAMESPACE, TABLE, AUDIENCE),
    body=_BODY_SCHEMA,
    answers=(
        ResponseSpec(200, "The plan, and its name", {"$ref": "#/components/schemas/PlanTable"}),
        ResponseSpec(400, "The filter, a join or the snapshot is invalid; the message states the reason"),
        ResponseSpec(404, "No such table, or a table of a join does not exist"),
    ),
)
async def make_plan_table(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    loaded = await request.app[CATALOG].tables.load(namespace, path_name(request, "table"))
    await request.app[CATALOG].check_writable(loaded)
    audience = audience_of(request)
    wanted, question = await _understood(request.app[READ], await read_body(request), loaded)
    holder = None if audience is None else Holder(audience, wanted.holder)
    found, told = await told_of(request, loaded.metadata, wanted.joins)
    if found.dynamic_filters:
        question = question.joined_with(found.dynamic_filters)
    made = await _made(request.app, loaded, wanted, question, holder, request[PRINCIPAL].name)
    if holder is not None:
        made = msgspec.structs.replace(made, name=None)
    return json_answer(msgspec.structs.replace(made, joins=told))


async def _understood(
    known: MemoryCache[tuple[str, bytes], _Read], body: bytes, loaded: LoadedTable
) -> tuple[_Wanted, BoundScan]:
    entry, metadata = loaded.entry, loaded.metadata
    assert entry is not None
    if len(body) > _IN_THREAD_BYTES:
        return await asyncio.to_thread(lambda: _asked(_read(body, metadata), metadata))
    key = (entry.metadata_location, body)
    found = known.get(key)
    if found is None:
        found = _read(body, metadata)
        known.put(key, found, _BYTES_PER_READ_BYTE * len(body))
    return _asked(found, metadata)


def _read(body: bytes, metadata: TableMetadata) -> _Read:
    wanted = parse_body(body, _Wanted)
    check_lease(wanted.lease_s)
    if wanted.kept_max is not None and not 0 <= wanted.kept_max <= 1:
        raise BadRequest(f"kept-max is {wanted.kept_max}; it is a share, from 0 to 1")
    return wanted, _filter(wanted, metadata)


def _asked(read: _Read, metadata: TableMetadata) -> tuple[_Wanted, BoundScan]:
    wanted, filter = read
    snapshot_id = snapshot_of(metadata, wanted.snapshot_id, wanted.ref, None)
    asked = ScanRequest(filter=filter, snapshot_id=snapshot_id, case_sensitive=wanted.case_sensitive)
    return wanted, BoundScan.bind(metadata, asked)


def _filter(wanted: _Wanted, metadata: TableMetadata) -> Expression:
    given = bytes(wanted.filter)
    if wanted.predicate is None:
        return parse_expression(decode_json(given, "The filter")) if given else TRUE
    if given:
        raise BadRequest("Give the filter as predicate, in SQL, or as filter, an Iceberg expression, not as both")
    return sql.parse_sql(wanted.predicate, metadata.current_schema, metadata.schemas).expression


async def _made(
    app: web.Application, loaded: LoadedTable, wanted: _Wanted, question: BoundScan, holder: Holder | None, who: str
) -> _Made:
    entry, snapshot = loaded.entry, question.snapshot
    assert entry is not None
    if snapshot is None:
        return _Made(None, None, None, 0, 0, 0, 0)
    if wanted.use_snapshot_schema and snapshot.schema_id not in (None, loaded.metadata.current_schema_id):
        return _Made(None, snapshot.snapshot_id, None, 0, 0, 0, 0)
    lease_s = granted_s(wanted.lease_s, app[SETTINGS])
    name = plan_name(entry, snapshot.snapshot_id, question.text, holder)
    if name is not None:
        declined = app[DECLINED].get((name, wanted.kept_max))
        if declined is not None:
            return declined
        audience = None if holder is None else holder.audience
        shared = await app[CATALOG].plan_tables.share(entry.namespace, name, lease_s, audience)
        if shared is not None:
            return _unless_more(_told(shared), wanted.kept_max)
    return await app[MAKING].run(
        (entry.namespace, name or question.text, lease_s, wanted.kept_max),
        lambda: _make(app, entry, question, name, lease_s, wanted.kept_max, holder, who),
    )


async def _make(
    app: web.Application,
    entry: Entry,
    question: BoundScan,
    name: str | None,
    lease_s: int,
    kept_max: float | None,
    holder: Holder | None,
    who: str,
) -> _Made:
    metadata, snapshot = question.metadata, question.snapshot
    assert snapshot is not None
    scan = await app[PLANNER].plan(question, entry)
    small = scan.considered <= _IN_THREAD_FILES and len(scan.view.blocks) <= _IN_THREAD_MANIFESTS
    sizes = _sizes(scan) if small else await asyncio.to_thread(_sizes, scan)
    made = _unless_more(_Made(name, snapshot.snapshot_id, None, *sizes), kept_max)
    if made.name is None:
        if name is not None and scan.complete:
            app[DECLINED].put((name, kept_max), made, _DECLINED_EACH_BYTES)
        return made
    plan_id = str(app[CLOCK].uuid7())
    if not scan.complete:  # the next plan may leave out more: a name that nobody else is given
        name = plan_name(entry, snapshot.snapshot_id, f"{question.text} {plan_id}", holder)
        made = msgspec.structs.replace(made, name=name)
    version = metadata.format_version
    kept = kept_of(scan, version) if small else await asyncio.to_thread(kept_of, scan, version)
    too_many = kept.entries > app[SETTINGS].plan_table_files_limit
    if too_many or not await app[CATALOG].plan_tables.has_room(who):
        return msgspec.structs.replace(made, name=None)
    return _told(await _stored(app, entry, question, kept, made, plan_id, lease_s, holder, who))


async def _stored(
    app: web.Application,
    entry: Entry,
    question: BoundScan,
    kept: KeptManifests,
    made: _Made,
    plan_id: str,
    lease_s: int,
    holder: Holder | None,
    who: str,
) -> PlanTable:
    metadata, snapshot, name = question.metadata, question.snapshot, made.name
    assert snapshot is not None
    assert name is not None
    location = f"{metadata_folder(metadata.location, metadata.properties)}/{PLANS_FOLDER}/{digest_of(name)}"
    written = await app[WRITER].write(kept, metadata, snapshot, location, plan_id)
    files = tuple(path for path, _ in written.files)
    plan = PlanTable(
        id=plan_id,
        namespace=entry.namespace,
        name=name,
        of_name=entry.name,
        uuid=entry.uuid,
        location=files[-1],
        files=files,
        snapshot_id=snapshot.snapshot_id,
        file_count=made.files,
        size_bytes=made.bytes,
        considered_count=made.considered_files,
        considered_bytes=made.considered_bytes,
        expires_ms=0,
    )
    if holder is not None:
        (planned,) = written.metadata.snapshots
        shown = shown_snapshot(plan_id, metadata, planned)
        text = msgspec.json.encode(shown).decode()
        plan = msgspec.structs.replace(plan, audience=holder.audience, shown_id=shown.snapshot_id, shown=text)
    return await app[CATALOG].plan_tables.keep(plan, written.metadata, written.files, lease_s, who)


def _sizes(scan: Scan) -> tuple[int, int, int, int | None]:
    """Files and bytes that the plan keeps, and that it chose from."""
    kept_bytes = int(files_at(scan.view, scan.rows).longs("file_size_in_bytes").sum())
    all_bytes = None
    if scan.view.rows == scan.considered:
        all_bytes = int(lookup(scan.view).longs("file_size_in_bytes").sum())
    return scan.files, kept_bytes, scan.considered, all_bytes


def _told(plan: PlanTable) -> _Made:
    return _Made(
        plan.name,
        plan.snapshot_id,
        plan.expires_ms,
        plan.file_count,
        plan.size_bytes,
        plan.considered_count,
        plan.considered_bytes,
        plan_snapshot_id=msgspec.UNSET if plan.shown_id is None else plan.shown_id,
    )


def _unless_more(made: _Made, kept_max: float | None) -> _Made:
    """Without a name where the plan keeps a larger share of the files."""
    if kept_max is not None and made.files > kept_max * made.considered_files:
        return msgspec.structs.replace(made, name=None, expires_at_ms=None, plan_snapshot_id=msgspec.UNSET)
    return made


async def _open(app: web.Application) -> None:
    settings = app[SETTINGS]
    budget_bytes, limit_bytes = settings.plan_table_memory_bytes, settings.plan_manifest_limit_bytes
    app[WRITER] = PlanWriter(app[OBJECTS], budget_bytes=budget_bytes, limit_bytes=limit_bytes)


def add_routes(app: web.Application) -> None:
    add_joins(app)
    app[MAKING] = SingleFlight()
    app[READ] = MemoryCache(_READ_BYTES)
    app[DECLINED] = MemoryCache(_DECLINED_BYTES)
    app.on_startup.append(_open)
    # aiohttp's own pattern for a variable leaves out braces, which names may hold.
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/plan-tables", make_plan_table)
