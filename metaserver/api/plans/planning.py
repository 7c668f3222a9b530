"""Iceberg REST: scan planning. A client says what it wants to read, and hears which files to open.

Plans are pure reads and nothing is kept for a client: what it brings back, plan tasks and plan ids, says it all (see
`planner/scan/tokens.py`). So a request that is repeated is answered again, from the planner's cache, and its
Idempotency-Key needs no record: an answer of megabytes has no place in the database.

Answered at once where that can be: Java's client pays a DELETE for every plan id, and waits a second before it asks
for a plan that was not ready. Only plans that have to read millions of entries of manifests first are answered later,
and never to PyIceberg, which does not come back for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from cache.memory import MemoryCache
from metaserver.api.formats.pieces import send
from metaserver.api.http import bodies
from metaserver.api.http.endpoints import add_operations
from metaserver.api.http.keys import CATALOG, CLOCK, KEYRING, PLANNER, PRINCIPAL, SETTINGS
from metaserver.api.http.metrics import METRICS
from metaserver.api.http.render import DELEGATION, access_config, json_answer
from metaserver.api.http.requests import allow, path_table, read_body, read_json
from metaserver.api.http.snapshots import by_schema
from metaserver.api.plans.pending import Pending
from metaserver.api.plans.pointers import Pointers
from metaserver.catalog.values import LoadedTable
from metaserver.errors import BadRequest, NoSuchPlanId, NoSuchPlanTask
from metaserver.iceberg.expressions.expression import TRUE, Expression
from metaserver.iceberg.expressions.expression_json import parse_expression
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.index.blocks.packing import Longs
from metaserver.planner.answer.answer import ScanTaskWriter, TaskForm
from metaserver.planner.answer.partition_text import ClientDialect, dialect_of
from metaserver.planner.scan.request import BoundScan, ScanRequest, bind_for_java, expired_ancestor
from metaserver.planner.scan.scan import Scan
from metaserver.planner.scan.tokens import ROWS_MAX, PinnedRequest, PlanTask, Tokens, pack, page_count
from metaserver.store.changes import watch
from metaserver.store.port import Entry
from metaserver.wire import decode_json, encode_json, is_plan_name, show

LONG_FILTER_BYTES = 64 << 10
"""Longer ones are parsed beside the event loop."""
STATS_FIELDS_MAX = 10_000
"""Names in one request; plan tasks carry them."""
_CLIENT_VERSION = "X-Client-Version"
RESIDUALS = "X-Seamark-Residuals"
"""`short`: the client filters rows again by its own filter, so a residual may be weaker than what is left of it.
`exact`: the client may filter rows by the residual alone. Without the header, its kind decides (`ClientDialect`)."""
POLL_S = 0.5
"""How long a question after a plan that is being made is held open for it."""
PLAN_ID_CHARACTERS_MAX = 4000
"""A plan id stands in a URL, whose length servers and proxies bound. A longer one is not given out."""


class _Own(msgspec.Struct, frozen=True, rename="kebab"):
    """What only our own client asks for (`planner.answer.TaskForm`)."""

    residuals: bool = True
    sequence_numbers: bool = False
    schema_id: int | None = None
    """By whose names the filter is, whatever the current schema is by now."""


class _PlanTableScan(msgspec.Struct, rename="kebab"):
    """`select` may be there too: which columns are read changes nothing about which files are."""

    snapshot_id: int | None = None
    start_snapshot_id: int | None = None
    end_snapshot_id: int | None = None
    filter: msgspec.Raw = msgspec.Raw()
    case_sensitive: bool | None = None
    use_snapshot_schema: bool | None = None
    stats_fields: tuple[str, ...] | None = None
    min_rows_requested: int | None = None
    seamark: _Own = _Own()


class _Kept(msgspec.Struct, frozen=True, gc=False):
    """An answer as it was sent, and what it told."""

    body: bytes
    headers: CIMultiDict[str]
    considered: int
    files: int


class _FetchScanTasks(msgspec.Struct, rename="kebab"):
    plan_task: str


ANSWERS: web.AppKey[MemoryCache[tuple[object, ...], _Kept]] = web.AppKey("plan-answers")
PENDING: web.AppKey[Pending] = web.AppKey("pending", Pending)
POINTERS: web.AppKey[Pointers] = web.AppKey("pointers", Pointers)
TOKENS: web.AppKey[Tokens] = web.AppKey("tokens", Tokens)


async def plan_table_scan(request: web.Request) -> web.StreamResponse:
    """Who asks and where the table's pointer stands is looked up each time; only what follows from there is kept."""
    app = request.app
    namespace, name = path_table(request)
    allow(request, namespace)
    if is_plan_name(name):  # whose lease may end at any time; most clients plan these by themselves
        return (await _plan(request, await app[CATALOG].plan_tables.read(namespace, name), await read_body(request)))[0]
    entry = await app[POINTERS].entry(namespace, name)
    body = await read_body(request)
    given = request.headers.get
    # Everything that an answer is made of beside the settings: metadata files never change, so nor does the answer.
    # Whether the file is still there is not looked up for a kept one: the client has just loaded the table.
    known = (
        entry.metadata_location,
        entry.uuid,
        entry.index_version,
        namespace,
        name,
        body,
        given("User-Agent"),
        given(_CLIENT_VERSION),
        given("Accept-Encoding"),
        given(DELEGATION),
        given(RESIDUALS),
    )
    kept = app[ANSWERS].get(known)
    if kept is not None:
        app[METRICS].planned(kept.considered, kept.files, 0.0)
        return web.Response(body=kept.body, headers=kept.headers)
    answer, scan = await _plan(request, await _loaded_from(request, entry), body)
    if scan is not None and scan.complete and isinstance(answer, web.Response) and isinstance(answer.body, bytes):
        sent = _Kept(answer.body, answer.headers.copy(), scan.considered, scan.files)
        app[ANSWERS].put(known, sent, len(sent.body) + len(body) + 1000)
    return answer


async def _plan(request: web.Request, loaded: LoadedTable, body: bytes) -> tuple[web.StreamResponse, Scan | None]:
    """The answer, and the plan it tells where it is one that would be told again."""
    wanted = await bodies.parse(request, body, _PlanTableScan)
    asked = _pinned(wanted, loaded.metadata)
    loaded = msgspec.structs.replace(loaded, metadata=by_schema(loaded.metadata, asked.schema_id))
    # What a request is refused for is found before anything is read, and of an empty table, too.
    bound_scan = await _bind(loaded.metadata, asked)
    if bound_scan.snapshot is None:
        return json_answer({"status": "completed", "file-scan-tasks": []}), None
    plan_id = await _postponed(request, loaded, asked, bound_scan)
    if plan_id is not None:
        return json_answer({"status": "submitted", "plan-id": plan_id}), None
    began_s = request.app[CLOCK].monotonic()
    scan = await request.app[PLANNER].plan(bound_scan, loaded.entry)
    request.app[METRICS].planned(scan.considered, scan.files, request.app[CLOCK].monotonic() - began_s)
    credentials = _credentials(request, loaded)
    answer = await _completed(request, loaded, asked, scan, wanted.min_rows_requested or 0, credentials)
    return answer, None if credentials else scan  # keys are looked up each time: they may have been exchanged since


async def fetch_planning_result(request: web.Request) -> web.StreamResponse:
    loaded = await _loaded(request)
    plan_id = request.match_info["plan_id"]
    asked = _opened_id(request, plan_id, loaded)
    metadata = _as_asked(loaded.metadata, asked)
    if metadata is None:
        raise NoSuchPlanId(f"The plan's snapshot of {_named(request)} has expired; plan again")
    task = request.app[PENDING].start(plan_id, request[PRINCIPAL].name, _making(request, loaded.entry, metadata, asked))
    done, _ = await asyncio.wait({task}, timeout=POLL_S)
    if not done:
        return json_answer({"status": "submitted"})
    if task.cancelled():  # by another client with the same plan; the next question makes it anew
        return json_answer({"status": "submitted"})
    try:
        scan = task.result()
    except BadRequest as error:  # it was good when the plan was begun: a snapshot on the way has expired since
        raise NoSuchPlanId(f"The plan can no longer be made: {error.message}; plan again") from None
    request.app[METRICS].planned(scan.considered, scan.files, 0.0)
    return await _completed(request, loaded, asked, scan, 0, _credentials(request, loaded))


async def cancel_planning(request: web.Request) -> web.Response:
    loaded = await _loaded(request)
    plan_id = request.match_info["plan_id"]
    _opened_id(request, plan_id, loaded)
    request.app[PENDING].cancel(plan_id)
    return web.Response(status=204)


async def fetch_scan_tasks(request: web.Request) -> web.StreamResponse:
    loaded = await _loaded(request)
    wanted = await read_json(request, _FetchScanTasks)
    task = request.app[TOKENS].open_plan_task(wanted.plan_task, _uuid(loaded))
    if task is None:
        raise NoSuchPlanTask(f"The plan task is not one that was given out for {_named(request)}; plan again")
    metadata = _as_asked(loaded.metadata, task.request)
    if metadata is None:
        raise NoSuchPlanTask(f"The plan task's snapshot of {_named(request)} has expired; plan again")
    try:
        scan = await request.app[PLANNER].plan(await _bind(metadata, task.request), loaded.entry)
    except BadRequest as error:  # it was good when the task was made: a snapshot on the way has expired since
        raise NoSuchPlanTask(f"The plan task can no longer be answered: {error.message}; plan again") from None
    first, end = scan.rows.searchsorted((task.first_row, task.end_row)).tolist()
    rows, answer = scan.rows[first:end], _answer(request, task.request, scan)
    head = b"{"
    tasks = _plan_tasks(request, loaded, answer, rows, task, inline_limit=len(rows))
    if tasks:
        head += b'"plan-tasks":' + encode_json(tasks) + b","
        rows = rows[:0]
    return await send(request, _body(head, answer, rows, b"}"))


async def _loaded(request: web.Request) -> LoadedTable:
    namespace, name = path_table(request)
    allow(request, namespace)
    catalog = request.app[CATALOG]
    return await (catalog.plan_tables.read if is_plan_name(name) else catalog.tables.load)(namespace, name)


async def _loaded_from(request: web.Request, entry: Entry) -> LoadedTable:
    """The table from where its pointer stands. NotFound when the metadata file is gone."""
    documents, location = request.app[CATALOG].documents, entry.metadata_location
    await documents.ensure_exists(location)
    return LoadedTable(entry=entry, metadata=await documents.table(location))


def _uuid(loaded: LoadedTable) -> str:
    assert loaded.entry is not None
    return loaded.entry.uuid


def _named(request: web.Request) -> str:
    return show(*path_table(request))


def _pinned(wanted: _PlanTableScan, metadata: TableMetadata) -> PinnedRequest:
    """The request with its snapshot named, and each of its fields once. BadRequest for too many of them."""
    fields = wanted.stats_fields or ()
    if len(fields) > STATS_FIELDS_MAX:
        raise BadRequest(f"stats-fields has {len(fields):,} names; a plan tells of at most {STATS_FIELDS_MAX:,}")
    incremental = wanted.start_snapshot_id is not None or wanted.end_snapshot_id is not None
    asked = PinnedRequest(
        snapshot_id=wanted.snapshot_id,
        start_snapshot_id=wanted.start_snapshot_id,
        end_snapshot_id=wanted.end_snapshot_id,
        schema_id=metadata.current_schema_id if wanted.seamark.schema_id is None else wanted.seamark.schema_id,
        filter=bytes(wanted.filter),
        case_sensitive=wanted.case_sensitive is not False,
        use_snapshot_schema=wanted.use_snapshot_schema is True,
        stats_fields=tuple(dict.fromkeys(fields)),
        residuals=wanted.seamark.residuals,
        sequence_numbers=wanted.seamark.sequence_numbers,
    )
    if wanted.snapshot_id is None and not incremental:
        asked = msgspec.structs.replace(asked, snapshot_id=metadata.current_snapshot_id)
    if incremental and wanted.start_snapshot_id is None:
        asked = msgspec.structs.replace(asked, start_snapshot_id=expired_ancestor(metadata, wanted.end_snapshot_id))
    return asked


def _as_asked(metadata: TableMetadata, asked: PinnedRequest) -> TableMetadata | None:
    """The metadata with the schema current that was so when the plan was made; None where what it needs is gone.

    The start of an incremental scan may be gone, it is not read. What lies between must not: rows are named by the
    place of their manifest among those of all its snapshots.
    """
    if any(
        snapshot_id is not None and metadata.snapshot(snapshot_id) is None
        for snapshot_id in (asked.snapshot_id, asked.end_snapshot_id)
    ):
        return None
    whole = asked.snapshot_id is not None or asked.start_snapshot_id is not None
    if not whole and expired_ancestor(metadata, asked.end_snapshot_id) is not None:
        return None
    return None if metadata.schema(asked.schema_id) is None else by_schema(metadata, asked.schema_id)


def _filter(asked: PinnedRequest) -> Expression:
    return parse_expression(decode_json(asked.filter, "The filter")) if asked.filter else TRUE


async def _bind(metadata: TableMetadata, asked: PinnedRequest) -> BoundScan:
    """The filter parsed and bound; a long one in a thread. BadRequest for one that makes no sense."""
    if len(asked.filter) <= LONG_FILTER_BYTES:
        return bind_for_java(metadata, _scan_request(asked))

    return await asyncio.to_thread(lambda: bind_for_java(metadata, _scan_request(asked)))


def _making(
    request: web.Request, entry: Entry | None, metadata: TableMetadata, asked: PinnedRequest
) -> Callable[[], Awaitable[Scan]]:
    """For a task that outlives the request."""
    planner = request.app[PLANNER]

    async def make() -> Scan:
        return await planner.plan(await _bind(metadata, asked), entry)

    return make


def _scan_request(asked: PinnedRequest) -> ScanRequest:
    return ScanRequest(
        snapshot_id=asked.snapshot_id,
        start_snapshot_id=asked.start_snapshot_id,
        end_snapshot_id=asked.end_snapshot_id,
        filter=_filter(asked),
        case_sensitive=asked.case_sensitive,
        use_snapshot_schema=asked.use_snapshot_schema,
    )


def _opened_id(request: web.Request, plan_id: str, loaded: LoadedTable) -> PinnedRequest:
    asked = request.app[TOKENS].open_plan_id(plan_id, _uuid(loaded))
    if asked is None:
        raise NoSuchPlanId(f"The plan id is not one that was given out for {_named(request)}; plan again")
    return asked


async def _postponed(
    request: web.Request, loaded: LoadedTable, asked: PinnedRequest, bound_scan: BoundScan
) -> str | None:
    """The id of a plan that is now being made, where it takes long; None where it is to be answered at once."""
    pending = request.app[PENDING]
    if not _dialect(request).polls or pending.is_full(request[PRINCIPAL].name):
        return None
    unread = await request.app[PLANNER].unread(bound_scan)
    if unread <= request.app[SETTINGS].plan_async_files:
        return None
    plan_id = request.app[TOKENS].plan_id(pack(asked), _uuid(loaded))
    if len(plan_id) > PLAN_ID_CHARACTERS_MAX:
        return None
    pending.start(plan_id, request[PRINCIPAL].name, _making(request, loaded.entry, loaded.metadata, asked))
    return plan_id


def _answer(request: web.Request, asked: PinnedRequest, scan: Scan) -> ScanTaskWriter:
    form = TaskForm(
        residuals=asked.residuals,
        residual_bytes=request.app[SETTINGS].plan_residual_bytes,
        exact_residuals=_wants_exact_residuals(request),
        sequence_numbers=asked.sequence_numbers,
    )
    return ScanTaskWriter(scan, stats=_columns(scan.metadata, asked), dialect=_dialect(request), form=form)


def _dialect(request: web.Request) -> ClientDialect:
    return dialect_of(request.headers.get("User-Agent", ""), request.headers.get(_CLIENT_VERSION, ""))


def _wants_exact_residuals(request: web.Request) -> bool:
    """BadRequest for a header of another value."""
    given = request.headers.get(RESIDUALS)
    if given is None:
        return _dialect(request).filters_by_residual
    if given.lower() not in ("short", "exact"):
        raise BadRequest(f"The header {RESIDUALS} is {given[:100]!r}; it may be 'short' or 'exact'")
    return given.lower() == "exact"


def _columns(metadata: TableMetadata, asked: PinnedRequest) -> list[int]:
    """Ids of the columns whose statistics are asked for. BadRequest for a name that no schema of the table has."""
    newest_first = sorted(metadata.schemas, key=lambda schema: schema.id, reverse=True)
    schemas = [metadata.current_schema, *newest_first]
    fold = (lambda name: name) if asked.case_sensitive else str.lower
    wanted = {fold(field): field for field in asked.stats_fields}
    found: dict[str, int] = {}
    for schema in schemas:
        if len(found) == len(wanted):
            break
        for name, column_id in schema.index.by_name.items():
            if fold(name) in wanted:
                found.setdefault(fold(name), column_id)
    for name, field in wanted.items():
        if name not in found:
            raise BadRequest(f"stats-fields names {field[:100]!r}, which is no column of the table")
    return [found[name] for name in wanted]


def _credentials(request: web.Request, loaded: LoadedTable) -> bytes:
    """JSON of the `storage-credentials`, empty for none."""
    entry = loaded.entry
    assert entry is not None
    _, credentials = access_config(request, loaded.metadata.location, entry.namespace, entry.name)
    return encode_json(credentials) if credentials else b""


async def _completed(
    request: web.Request, loaded: LoadedTable, asked: PinnedRequest, scan: Scan, min_rows: int, credentials: bytes
) -> web.StreamResponse:
    """A plan's whole answer, or the plan tasks that make it up."""
    settings = request.app[SETTINGS]
    answer = _answer(request, asked, scan)
    rows = _enough(scan, min_rows, settings.plan_inline_limit) if min_rows > 0 else scan.rows
    head, tail = b'{"status":"completed",', b"}"
    if credentials:
        tail = b',"storage-credentials":' + credentials + tail
    whole = PlanTask(asked, 0, ROWS_MAX)
    tasks = _plan_tasks(request, loaded, answer, rows, whole, inline_limit=settings.plan_inline_limit)
    if tasks:
        head += b'"plan-tasks":' + encode_json(tasks) + b","
        rows = rows[:0]
    return await send(request, _body(head, answer, rows, tail))


def _plan_tasks(
    request: web.Request,
    loaded: LoadedTable,
    answer: ScanTaskWriter,
    rows: Longs,
    whole: PlanTask,
    *,
    inline_limit: int,
) -> list[str]:
    """Plan tasks of equal parts of `rows`, which together cover the rows of `whole`; none where `rows` fit one answer.

    A plan task may be cut again when it is fetched: not all that are needed may fit into the first answer. BadRequest
    where exact residuals are too long for one answer, and the filter too long for plan tasks.
    """
    fit = len(rows) if answer.files_max is None else answer.files_max
    if len(rows) <= min(inline_limit, fit):
        return []
    packed = pack(whole.request)
    size = min(request.app[SETTINGS].plan_page_size, fit)
    pages = page_count(len(rows), len(packed), inline_limit=min(inline_limit, fit), page_size=size)
    if not pages and len(rows) > fit:
        raise BadRequest(
            f"The filter is too long to be repeated for each of {len(rows):,} files, and a client that may filter rows "
            f"by these residuals alone needs it whole. Send the header {RESIDUALS}: short where the engine filters "
            "rows again (Spark: spark.sql.catalog.<name>.header.X-Seamark-Residuals=short), shorten the filter, or "
            "let the client plan (table property seamark.scan-planning-mode=client)"
        )
    if not pages:
        return []
    size = -(-len(rows) // pages)
    starts = [whole.first_row, *rows[size::size].tolist()]
    return [
        request.app[TOKENS].plan_task(packed, start, end, _uuid(loaded))
        for start, end in zip(starts, [*starts[1:], whole.end_row], strict=True)
    ]


def _enough(scan: Scan, wanted: int, most: int) -> Longs:
    """The first files that surely hold `wanted` rows between them: nothing is filtered or deleted in them.

    All files where the first `most` do not: it is a hint, to be had for little or not at all.
    """
    sure = 0
    for count, row in enumerate(scan.rows[:most].tolist(), start=1):
        if scan.residual(row) == TRUE and not scan.deletes(row):
            block, local = scan.view.locate(row)
            sure += max(0, block.long("record_count", local) or 0)
            if sure >= wanted:
                return scan.rows[:count]
    return scan.rows


def _body(head: bytes, answer: ScanTaskWriter, rows: Longs, tail: bytes) -> Iterator[bytes]:
    yield head + b'"file-scan-tasks":['
    yield from answer.tasks(rows)
    # Only with items: Java's client refuses the key without tasks.
    opening = b'],"delete-files":['
    for piece in answer.delete_files():
        yield opening + piece
        opening = b""
    yield b"]" + tail


async def _opened(app: web.Application) -> AsyncIterator[None]:
    app[POINTERS] = Pointers(app[CATALOG].tables, watch(app[SETTINGS].database_url()))
    app[TOKENS] = Tokens(app[KEYRING])
    try:
        yield
    finally:
        app[POINTERS].close()


def add_routes(app: web.Application) -> None:
    app[PENDING] = Pending()
    app[ANSWERS] = MemoryCache(app[SETTINGS].plan_answers_bytes)
    app.cleanup_ctx.append(_opened)
    app.on_cleanup.append(app[PENDING].close)
    table = "/v1/{prefix}/namespaces/{namespace}/tables/{table}"
    add_operations(app, f"{table}/plan", {"POST": plan_table_scan})
    add_operations(app, f"{table}/plan/{{plan-id}}", {"GET": fetch_planning_result, "DELETE": cancel_planning})
    add_operations(app, f"{table}/tasks", {"POST": fetch_scan_tasks})
