"""The route that creates plan tables, which engines without scan planning read by name.

Identical requests share one name: it is derived from the table's pointer, its indexes and the bound filter alone,
before the scan is planned. Concurrent identical requests share one plan. A reader's right suffices, as for planning:
the stored files are small, refer only to files that the reader may read, and are deleted automatically.

With `X-Seamark-Plans` the plan has no name. The answer contains the id of a snapshot, which loadTable adds for requests
with the same value (`plan_audience.py`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web

from seamark.cache.memory import MemoryCache
from seamark.cache.single_flight import SingleFlight
from seamark.cache.sizes import object_bytes
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import PLANS_FOLDER
from seamark.formats.runtime.deferred import Deferred
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.bodies import parse_now
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, OBJECTS, PLANNER, SETTINGS
from seamark.metaserver.api.http.parameters.plan_audience import AUDIENCE
from seamark.metaserver.api.http.parameters.snapshots import snapshot_of
from seamark.metaserver.api.http.sql_texts import read_in_turn
from seamark.metaserver.api.plans.joins import JoinOutcomes, Joins, add_joins, evaluate_joins, parse_filter
from seamark.metaserver.api.plans.plan_leases import check_lease, granted_s
from seamark.metaserver.catalog.plans.plan_tables import Holder, digest_of, plan_name, shown_snapshot
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.lookup.lookup import files_at, lookup
from seamark.metaserver.planner.lookup.partition_times import oldest_end_ms
from seamark.metaserver.planner.plan.plan_writer import KeptManifests, PlanWriter, kept_manifests
from seamark.metaserver.planner.plan.readers import is_misleading, misread_deletes
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.store.model import Entry, PlanTable

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    sql = Deferred("seamark.formats.iceberg.expressions.sql")

_IN_THREAD_BYTES = 4000
"""Longer requests are decoded and bound in a thread."""
_IN_THREAD_FILES, _IN_THREAD_MANIFESTS = 100_000, 200
"""Plans of larger snapshots are sized in a thread, too."""
_READ_BYTES = 1 << 20
_DECLINED_BYTES, _DECLINED_EACH_BYTES = 1 << 20, 500
"""Memory of decoded requests, and of requests that get no plan table."""


class PlanTableRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    filter: Annotated[
        msgspec.Raw,
        doc(
            "An expression of the Iceberg REST specification. Without filter and predicate: all files. A literal with "
            "a `data-type` is compared as in SQL; a comparison about which engines differ is not used. The functions "
            "`lower` and `upper` of a string are written as transforms; indexes on them leave files out."
        ),
    ] = msgspec.field(default_factory=msgspec.Raw)
    predicate: Annotated[
        str | None,
        doc("A predicate in SQL, instead of `filter`.", examples=["id = 5 AND day >= '2024-01-01'"]),
    ] = None
    case_sensitive: Annotated[bool, doc("Whether names in `filter` are case-sensitive. Names in SQL are not.")] = True
    snapshot_id: int | None = None
    ref: Annotated[str | None, doc("A branch or tag, instead of snapshot-id.")] = None
    use_snapshot_schema: Annotated[
        bool,
        doc(
            "Whether the reader uses the snapshot's schema. A plan table is read with the current schema, so none is "
            "created when the two differ."
        ),
    ] = False
    kept_max: Annotated[
        float | None,
        doc(
            "No plan table is created when the plan keeps a larger share of the snapshot's files.", minimum=0, maximum=1
        ),
    ] = None
    lease_s: Annotated[
        int | None,
        doc("The time in seconds for which the name resolves. Settings give default and limit.", minimum=1),
    ] = None
    joins: Joins = []
    hide_partitions: Annotated[
        bool,
        doc(
            "For readers that leave out files in another way than Iceberg defines, such as DuckDB 1.5.5: the plan "
            "table has no partition fields but those of columns themselves, and no bounds of columns that may have "
            "NaN. If something would mislead such a reader, a plan table is created for any kept-max."
        ),
    ] = False
    holder: Annotated[
        str,
        msgspec.Meta(
            max_length=100,
            description="With X-Seamark-Plans: a text that identifies the client process. Only requests of one holder "
            "share identical plans, so that a holder can withdraw its plans.",
        ),
    ] = ""


class PlanTableResponse(msgspec.Struct, rename="kebab"):
    name: Annotated[
        str | None,
        doc(
            "The name of the plan table in the table's namespace. Null when none was created: the table has no "
            "snapshot, the snapshot has another schema, the plan keeps more than kept-max, too many files would have "
            "to be listed again, or there are too many plan tables."
        ),
    ]
    snapshot_id: int | None
    expires_at_ms: Annotated[
        int | None,
        doc("When the name stops to resolve: at least half of lease-s from now, because plans are shared."),
    ]
    files: Annotated[int, doc("Data files that the plan keeps.")]
    bytes: int
    considered_files: Annotated[int, doc("Data files of the snapshot.")]
    considered_bytes: Annotated[int | None, doc("Null when unknown: manifests that the filter excludes are not read.")]
    joins: JoinOutcomes = msgspec.UNSET
    plan_snapshot_id: Annotated[
        int | msgspec.UnsetType,
        doc(
            "With X-Seamark-Plans, instead of the name: the id of the snapshot that loadTable adds for requests with "
            "the same value of the header."
        ),
    ] = msgspec.UNSET
    misread: Annotated[
        str | msgspec.UnsetType,
        doc(
            "With hide-partitions: why such a reader reads the table wrongly even so, or why the plan table that it "
            "needs is not created. Then there is no plan table, and such a reader must not read the table."
        ),
    ] = msgspec.UNSET


WRITER: web.AppKey[PlanWriter] = web.AppKey("plan-writer", PlanWriter)
MAKING: web.AppKey[SingleFlight[tuple[object, ...], PlanTableResponse]] = web.AppKey("plan-tables-making")
_Read = tuple[PlanTableRequest, Expression]
READ: web.AppKey[MemoryCache[tuple[str, bytes], _Read]] = web.AppKey("plan-tables-read")
"""Decoded requests by the table's metadata file, which determines what names mean, and the body."""
DECLINED: web.AppKey[MemoryCache[tuple[str, float | None], PlanTableResponse]] = web.AppKey("plan-tables-declined")
"""Requests that get no plan table, by the name it would have, which covers all that the plan depends on, and
`kept-max`."""


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/plan-tables",
    "makePlanTable",
    "Creates a plan table: the files that a plan keeps, as a table that any engine can read by its name "
    "until its lease ends",
    tags=("metadata",),
    parameters=(AUDIENCE,),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The plan, and its name", PlanTableResponse),
        ResponseSpec(400, "The filter, a join or the snapshot is invalid; the message states the reason"),
        ResponseSpec(404, "No such table, or a table of a join does not exist"),
    ),
).takes_bytes(PlanTableRequest)
async def make_plan_table(call: Call, data: bytes) -> PlanTableResponse:
    loaded = await call.app[CATALOG].tables.load(call.namespace, call.name)
    await call.app[CATALOG].check_writable(loaded)
    audience = call.audience
    body, bound_scan = await _bound_request(call, data, loaded)
    if body.hide_partitions and audience is not None:
        raise BadRequest("hide-partitions is for plan tables; with X-Seamark-Plans a plan is a snapshot of the table")
    holder = None if audience is None else Holder(audience, body.holder)
    filters, outcomes = await evaluate_joins(call, loaded.metadata, body.joins)
    bound_scan = filters.applied(bound_scan)
    made = await _made(call.app, loaded, body, bound_scan, holder, call.principal.name)
    if holder is not None:
        made = msgspec.structs.replace(made, name=None)
    return msgspec.structs.replace(made, joins=outcomes)


async def _bound_request(call: Call, data: bytes, loaded: LoadedTable) -> tuple[PlanTableRequest, BoundScan]:
    known, entry, metadata = call.app[READ], loaded.entry, loaded.metadata
    assert entry is not None
    if len(data) > _IN_THREAD_BYTES:
        return await read_in_turn(call, len(data), lambda: _bound(_read(data, metadata), metadata))
    key = (entry.metadata_location, data)
    read = known.get(key)
    if read is None:
        read = await read_in_turn(call, len(data), lambda: _read(data, metadata))
        known.put(key, read, object_bytes(read) + len(data))
    return _bound(read, metadata)


def _read(data: bytes, metadata: TableMetadata) -> _Read:
    body = parse_now(data, PlanTableRequest)
    check_lease(body.lease_s)
    if body.kept_max is not None and not 0 <= body.kept_max <= 1:
        raise BadRequest(f"kept-max is {body.kept_max}; it must be a share from 0 to 1")
    return body, _filter(body, metadata)


def _bound(read: _Read, metadata: TableMetadata) -> tuple[PlanTableRequest, BoundScan]:
    body, filter = read
    snapshot_id = snapshot_of(metadata, body.snapshot_id, body.ref, None)
    request = ScanRequest(filter=filter, snapshot_id=snapshot_id, case_sensitive=body.case_sensitive, nan_above=True)
    return body, BoundScan.bind(metadata, request)


def _filter(body: PlanTableRequest, metadata: TableMetadata) -> Expression:
    given = bytes(body.filter)
    if body.predicate is None:
        return parse_filter(given, metadata, functions=True)
    if given:
        raise BadRequest("The request has both predicate and filter; send SQL or an Iceberg expression")
    return sql.parse_sql(body.predicate, metadata.current_schema, metadata.schemas, functions=True).expression


async def _made(
    app: web.Application,
    loaded: LoadedTable,
    body: PlanTableRequest,
    bound_scan: BoundScan,
    holder: Holder | None,
    who: str,
) -> PlanTableResponse:
    entry, snapshot = loaded.entry, bound_scan.snapshot
    assert entry is not None
    if snapshot is None:
        return PlanTableResponse(None, None, None, 0, 0, 0, 0)
    if body.use_snapshot_schema and snapshot.schema_id not in (None, loaded.metadata.current_schema_id):
        return PlanTableResponse(None, snapshot.snapshot_id, None, 0, 0, 0, 0)
    lease_s = granted_s(body.lease_s, app[SETTINGS])
    question = f"{bound_scan.text} {'hidden' if body.hide_partitions else ''}".rstrip()
    name = plan_name(entry, snapshot.snapshot_id, question, holder)
    if name is not None:
        declined = app[DECLINED].get((name, body.kept_max))
        if declined is not None:
            return declined
        audience = None if holder is None else holder.audience
        shared = await app[CATALOG].plan_tables.share(entry.namespace, name, lease_s, who, audience)
        if shared is not None:
            return _unless_more(_answer(shared), None if body.hide_partitions else body.kept_max)
    return await app[MAKING].run(
        (entry.namespace, name or question, lease_s, body.kept_max),
        lambda: _make(app, entry, bound_scan, question, body, lease_s, holder, who),
    )


async def _make(
    app: web.Application,
    entry: Entry,
    bound_scan: BoundScan,
    question: str,
    body: PlanTableRequest,
    lease_s: int,
    holder: Holder | None,
    who: str,
) -> PlanTableResponse:
    metadata, snapshot, kept_max, hidden = bound_scan.metadata, bound_scan.snapshot, body.kept_max, body.hide_partitions
    assert snapshot is not None
    name = plan_name(entry, snapshot.snapshot_id, question, holder)
    scan = await app[PLANNER].plan(bound_scan, entry)
    manifests = len(scan.view.blocks) + len(scan.view.delete_blocks)
    small = scan.considered <= _IN_THREAD_FILES and manifests <= _IN_THREAD_MANIFESTS
    misleads = False
    if hidden:
        misread, misleads = _hazards(scan) if small else await asyncio.to_thread(_hazards, scan)
        if misread:
            return PlanTableResponse(None, snapshot.snapshot_id, None, 0, 0, 0, 0, misread=misread)
    kept_max = None if misleads else kept_max
    sizes = _sizes(scan) if small else await asyncio.to_thread(_sizes, scan)
    made = _unless_more(PlanTableResponse(name, snapshot.snapshot_id, None, *sizes), kept_max)
    if made.name is None:
        if name is not None and scan.complete:
            app[DECLINED].put((name, kept_max), made, _DECLINED_EACH_BYTES)
        return made
    plan_id = str(app[CLOCK].uuid7())
    if not scan.complete:  # a later plan may keep fewer files, so the name is not shared
        name = plan_name(entry, snapshot.snapshot_id, f"{question} {plan_id}", holder)
        made = msgspec.structs.replace(made, name=name)
    version = metadata.format_version
    divide = partial(kept_manifests, scan, version, hidden=hidden)
    kept = divide() if small else await asyncio.to_thread(divide)
    reason = ""
    if kept.entries > (limit := app[SETTINGS].plan_table_files_limit):
        reason = f"its plan table would list {kept.entries:,} files, and the limit plan_table_files_limit is {limit:,}"
    elif not await app[CATALOG].plan_tables.has_room(who):
        reason = "there is no room for its plan table now (plan_tables_limit, plan_tables_bytes)"
    if reason:
        return msgspec.structs.replace(made, name=None, misread=reason if misleads else msgspec.UNSET)
    plan = await _stored(app, entry, bound_scan, kept, made, plan_id, lease_s, holder, who)
    usage = app[CATALOG].column_usage
    if plan.shown_id is not None and usage.is_on:
        usage.plans.put(plan.shown_id, oldest_end_ms(scan.view, scan.entry_ids, scan.metadata), 0)
    return _answer(plan)


def _hazards(scan: ScanPlan) -> tuple[str, bool]:
    """Why DuckDB would read the snapshot wrongly with any plan table, and whether it would do so without one."""
    misread = misread_deletes(scan.view, scan.metadata)
    return misread, not misread and is_misleading(scan.view, scan.metadata)


async def _stored(
    app: web.Application,
    entry: Entry,
    bound_scan: BoundScan,
    kept: KeptManifests,
    made: PlanTableResponse,
    plan_id: str,
    lease_s: int,
    holder: Holder | None,
    who: str,
) -> PlanTable:
    metadata, snapshot, name = bound_scan.metadata, bound_scan.snapshot, made.name
    assert snapshot is not None
    assert name is not None
    location = f"{metadata.location.rstrip('/')}/{PLANS_FOLDER}/{digest_of(name)}"
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


def _sizes(scan: ScanPlan) -> tuple[int, int, int, int | None]:
    """Files and bytes that the plan keeps, and files and bytes of the snapshot."""
    kept_bytes = int(files_at(scan.view, scan.entry_ids).longs("file_size_in_bytes").sum())
    all_bytes = None
    if scan.view.file_count == scan.considered:
        all_bytes = int(lookup(scan.view).longs("file_size_in_bytes").sum())
    return scan.files, kept_bytes, scan.considered, all_bytes


def _answer(plan: PlanTable) -> PlanTableResponse:
    return PlanTableResponse(
        plan.name,
        plan.snapshot_id,
        plan.expires_ms,
        plan.file_count,
        plan.size_bytes,
        plan.considered_count,
        plan.considered_bytes,
        plan_snapshot_id=msgspec.UNSET if plan.shown_id is None else plan.shown_id,
    )


def _unless_more(made: PlanTableResponse, kept_max: float | None) -> PlanTableResponse:
    """Removes the name when the plan keeps a larger share of the files."""
    if kept_max is not None and made.files > kept_max * made.considered_files:
        return msgspec.structs.replace(made, name=None, expires_at_ms=None, plan_snapshot_id=msgspec.UNSET)
    return made


async def _open(app: web.Application) -> None:
    settings = app[SETTINGS]
    budget_bytes, limit_bytes = settings.plan_table_memory_bytes, settings.plan_manifest_limit_bytes
    app[WRITER] = PlanWriter(app[OBJECTS], budget_bytes=budget_bytes, limit_bytes=limit_bytes)


def add_parts(app: web.Application) -> None:
    add_joins(app)
    app[MAKING] = SingleFlight()
    app[READ] = MemoryCache(_READ_BYTES, "statements")
    app[DECLINED] = MemoryCache(_DECLINED_BYTES, "statements")
    app.on_startup.append(_open)
