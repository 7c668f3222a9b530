"""Scan planning of the Iceberg REST specification: a client sends a filter and receives the files to read.

Plans are read-only, and the server keeps no state for a client: plan tasks and plan ids contain the whole request (see
`planner/scan/tokens.py`). A repeated request is answered again from the planner's cache, so its Idempotency-Key needs
no record; an answer of megabytes does not belong in the database.

Plans are answered synchronously where possible: Iceberg Java's client sends a DELETE for every plan id, and waits a
second before it polls. Only plans that must first decode manifests with millions of entries are answered
asynchronously, and never to PyIceberg, which does not poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from sys import getsizeof

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import encode_json, is_plan_name, show
from seamark.formats.runtime.errors import BadRequest, NoSuchPlanId, NoSuchPlanTask
from seamark.metaserver.api.formats.pieces import Run, send
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import BodySize
from seamark.metaserver.api.http.dispatch import Answer, Call, Route
from seamark.metaserver.api.http.parameters.snapshots import by_schema
from seamark.metaserver.api.http.render import DELEGATION, access_config
from seamark.metaserver.api.plans.column_reads import count_read, read_of_plan
from seamark.metaserver.api.plans.long_filters import LongFilters, is_long
from seamark.metaserver.api.plans.pending import PendingPlans
from seamark.metaserver.api.plans.pointers import PointerCache
from seamark.metaserver.api.plans.scan_requests import PlanTableScan, pinned_request
from seamark.metaserver.catalog.column_usage import ColumnRead
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.answer.answer import ScanTaskWriter, TaskForm
from seamark.metaserver.planner.answer.partition_text import ClientDialect, PartitionTextCache, dialect_of
from seamark.metaserver.planner.scan.request import BoundScan, expired_ancestor
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.scan.tokens import ROWS_MAX, PinnedRequest, PlanTask, Tokens, pack, page_count
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.sql.changes import watch

_TABLE = "/v1/{prefix}/namespaces/{namespace}/tables/{table}"
_CLIENT_VERSION = "X-Client-Version"
RESIDUALS = "X-Seamark-Residuals"
"""`short`: the client applies its own filter to rows, so a residual may be weaker than necessary. `exact`: the client
may apply the residual alone. Without the header, the client's kind decides (`ClientDialect`)."""
POLL_S = 0.5
"""How long a poll waits for a running plan."""
PLAN_ID_CHARACTERS_MAX = 4000
"""The limit for a plan id, which is part of a URL; servers and proxies limit its length. Longer ids are not issued."""


class _CachedAnswer(msgspec.Struct, frozen=True, gc=False):
    """An answer as sent, and the counts of its plan."""

    body: bytes
    headers: CIMultiDict[str]
    considered: int
    files: int
    read: ColumnRead | None


class _FetchScanTasks(msgspec.Struct, rename="kebab"):
    plan_task: str


ANSWERS: web.AppKey[MemoryCache[tuple[object, ...], _CachedAnswer]] = web.AppKey("plan-answers")
PARTITION_TEXTS: web.AppKey[PartitionTextCache] = web.AppKey("partition-texts", PartitionTextCache)
_OWN_TEXTS_BYTES = 4 << 20
_TEXTS_SHARE, _ANSWERS_SHARE = 1 / 4, 5 / 8
"""The parts of `plan_answers_bytes` for encoded partition tuples and for answers; `lookups` uses the rest."""
PENDING: web.AppKey[PendingPlans] = web.AppKey("pending", PendingPlans)
POINTERS: web.AppKey[PointerCache] = web.AppKey("pointers", PointerCache)
TOKENS: web.AppKey[Tokens] = web.AppKey("tokens", Tokens)


@Route("POST", f"{_TABLE}/plan", "planTableScan", body_size=BodySize.MEDIUM, streams=True).takes_bytes()
async def plan_table_scan(call: Call, body: bytes) -> Answer:
    """Identity and pointer are checked for each request; only what depends on nothing else is cached."""
    app, namespace, name = call.app, call.namespace, call.names[0]
    if is_plan_name(name):  # its lease may end at any time; most clients plan scans of these tables
        return (await _plan(call, await app[COMPONENTS].catalog.plan_tables.read(namespace, name), body))[0]
    entry = await app[POINTERS].entry(namespace, name)
    given = call.headers.get
    # The key contains everything that the answer depends on besides settings; metadata files are immutable. Whether the
    # file still exists is not checked for a cached answer: the client has just loaded the table.
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
        app[COMPONENTS].metrics.plans.observe(kept.considered, kept.files, 0.0)
        count_read(call, kept.read)
        return web.Response(body=kept.body, headers=kept.headers)
    answer, scan, read = await _plan(call, await _loaded_from(call, entry), body)
    if scan is not None and scan.complete and isinstance(answer, web.Response) and isinstance(answer.body, bytes):
        sent = _CachedAnswer(answer.body, answer.headers.copy(), scan.considered, scan.files, read)
        # The key has headers, which a client may change with each request, up to 8 KiB each.
        key_bytes = sum(map(getsizeof, known)) + sum(map(getsizeof, namespace))
        app[ANSWERS].put(known, sent, len(sent.body) + key_bytes + 1000)
    return answer


async def _plan(call: Call, loaded: LoadedTable, data: bytes) -> tuple[Answer, ScanPlan | None, ColumnRead | None]:
    """The answer; the plan if the answer can be cached; and the read if it is counted."""
    body = await call.parse(data, PlanTableScan)
    pinned = pinned_request(body, loaded.metadata, _dialect(call))
    metadata = by_schema(loaded.metadata, pinned.schema_id)
    if metadata is not loaded.metadata:
        loaded = msgspec.structs.replace(loaded, metadata=metadata)
    # Validates the request before anything is read, also for an empty table.
    bound_scan = await _long_filters(call).bind(metadata, pinned)
    if bound_scan.snapshot is None:
        return {"status": "completed", "file-scan-tasks": []}, None, None
    plan_id = await _start_if_long(call, loaded, pinned, bound_scan)
    if plan_id is not None:
        return {"status": "submitted", "plan-id": plan_id}, None, None
    monotonic = call.components.clock.monotonic
    began_s = monotonic()
    scan = await call.components.planner.plan(bound_scan, loaded.entry)
    call.components.metrics.plans.observe(scan.considered, scan.files, monotonic() - began_s)
    read = None
    if body.seamark.usage:
        read = count_read(call, await read_of_plan(call, loaded.entry, scan, bound_scan.predicates, body.select))
    credentials = _credentials(call, loaded)
    answer = await _completed(call, loaded, pinned, scan, body.min_rows_requested or 0, credentials)
    return answer, None if credentials else scan, read  # credentials are not cached: they may have been rotated


@Route("GET", f"{_TABLE}/plan/{{plan-id}}", "fetchPlanningResult", streams=True)
async def fetch_planning_result(call: Call) -> Answer:
    loaded = await _loaded(call)
    plan_id = call.variables["plan_id"]
    pinned = _open_plan_id(call, plan_id, loaded)
    metadata = _metadata_at(loaded.metadata, pinned)
    if metadata is None:
        raise NoSuchPlanId(f"The plan's snapshot of {_table_name(call)} has expired; plan again")
    task = call.app[PENDING].start(plan_id, call.principal.name, _plan_task(call, loaded.entry, metadata, pinned))
    done, _ = await asyncio.wait({task}, timeout=POLL_S)
    if not done:
        return {"status": "submitted"}
    if task.cancelled():  # by another client of the principal; the next poll starts it again
        return {"status": "submitted"}
    try:
        scan = task.result()
    except BadRequest as error:  # valid when the plan was begun; a snapshot of its range has expired since
        raise NoSuchPlanId(f"The plan can no longer be computed: {error.message}; plan again") from None
    call.components.metrics.plans.observe(scan.considered, scan.files, 0.0)
    return await _completed(call, loaded, pinned, scan, 0, _credentials(call, loaded))


@Route("DELETE", f"{_TABLE}/plan/{{plan-id}}", "cancelPlanning")
async def cancel_planning(call: Call) -> None:
    loaded = await _loaded(call)
    plan_id = call.variables["plan_id"]
    _open_plan_id(call, plan_id, loaded)
    call.app[PENDING].cancel(plan_id, call.principal.name)


@Route("POST", f"{_TABLE}/tasks", "fetchScanTasks", streams=True).takes(_FetchScanTasks)
async def fetch_scan_tasks(call: Call, body: _FetchScanTasks) -> web.StreamResponse:
    loaded = await _loaded(call)
    task = call.app[TOKENS].open_plan_task(body.plan_task, _uuid(loaded))
    if task is None:
        raise NoSuchPlanTask(f"The plan task was not issued for {_table_name(call)}; plan again")
    metadata = _metadata_at(loaded.metadata, task.request)
    if metadata is None:
        raise NoSuchPlanTask(f"The plan task's snapshot of {_table_name(call)} has expired; plan again")
    try:
        bound_scan = await _long_filters(call).bind(metadata, task.request)
        scan = await call.components.planner.plan(bound_scan, loaded.entry)
    except BadRequest as error:  # valid when the task was issued; a snapshot of its range has expired since
        raise NoSuchPlanTask(f"The plan task can no longer be answered: {error.message}; plan again") from None
    first, end = scan.entry_ids.searchsorted((task.first_row, task.end_row)).tolist()
    rows, answer = scan.entry_ids[first:end], _answer(call, task.request, scan)
    tasks_of = partial(_plan_tasks, call, loaded, answer, rows, task, inline_limit=len(rows))
    return await _sent(call, task.request, answer, rows, tasks_of, b"{", b"}")


async def _loaded(call: Call) -> LoadedTable:
    catalog = call.components.catalog
    return await (catalog.plan_tables.read if is_plan_name(call.name) else catalog.tables.load)(
        call.namespace, call.name
    )


async def _loaded_from(call: Call, entry: Entry) -> LoadedTable:
    """The table at its current pointer. NotFound when the metadata file is missing."""
    documents, location = call.components.catalog.documents, entry.metadata_location
    await documents.ensure_exists(location)
    return LoadedTable(entry=entry, metadata=await documents.table(location))


def _long_filters(call: Call) -> LongFilters:
    return LongFilters(call.components.worker_limits, call.principal.name)


def _uuid(loaded: LoadedTable) -> str:
    assert loaded.entry is not None
    return loaded.entry.uuid


def _table_name(call: Call) -> str:
    return show(call.namespace, call.name)


def _metadata_at(metadata: TableMetadata, pinned: PinnedRequest) -> TableMetadata | None:
    """The metadata with the current schema of the time of the plan; None when something it needs has expired.

    The first snapshot of an incremental scan may have expired, because it is not read. Those after it must exist: rows
    are numbered by the position of their manifest among the manifests of all snapshots of the range.
    """
    if any(
        snapshot_id is not None and metadata.snapshot(snapshot_id) is None
        for snapshot_id in (pinned.snapshot_id, pinned.end_snapshot_id)
    ):
        return None
    whole = pinned.snapshot_id is not None or pinned.start_snapshot_id is not None
    if not whole and expired_ancestor(metadata, pinned.end_snapshot_id) is not None:
        return None
    return None if metadata.schema(pinned.schema_id) is None else by_schema(metadata, pinned.schema_id)


def _plan_task(
    call: Call, entry: Entry | None, metadata: TableMetadata, pinned: PinnedRequest
) -> Callable[[], Awaitable[ScanPlan]]:
    """Computes the plan in a task that outlives the request."""
    planner, filters = call.components.planner, _long_filters(call)

    async def make() -> ScanPlan:
        return await planner.plan(await filters.bind(metadata, pinned), entry)

    return make


def _open_plan_id(call: Call, plan_id: str, loaded: LoadedTable) -> PinnedRequest:
    pinned = call.app[TOKENS].open_plan_id(plan_id, _uuid(loaded))
    if pinned is None:
        raise NoSuchPlanId(f"The plan id was not issued for {_table_name(call)}; plan again")
    return pinned


async def _start_if_long(call: Call, loaded: LoadedTable, pinned: PinnedRequest, bound_scan: BoundScan) -> str | None:
    """Starts a long plan and returns its id; None when the plan should be answered synchronously."""
    if not _dialect(call).polls:
        return None
    undecoded = await call.components.planner.entries_to_decode(bound_scan)
    if undecoded <= call.components.settings.plan_async_files:
        return None
    pending = call.app[PENDING]
    if pending.is_full(call.principal.name):
        return None
    packed = await _long_filters(call).run(pinned, partial(pack, pinned))
    plan_id = call.app[TOKENS].plan_id(packed, _uuid(loaded))
    if len(plan_id) > PLAN_ID_CHARACTERS_MAX:
        return None
    pending.start(plan_id, call.principal.name, _plan_task(call, loaded.entry, loaded.metadata, pinned))
    return plan_id


def _answer(call: Call, pinned: PinnedRequest, scan: ScanPlan) -> ScanTaskWriter:
    dialect = _dialect(call)
    form = TaskForm(
        residuals=pinned.residuals,
        residual_bytes=call.components.settings.plan_residual_bytes,
        exact_residuals=_wants_exact_residuals(call, dialect),
        sequence_numbers=pinned.sequence_numbers,
        whole_files=pinned.may_rewrite_files,
    )
    return ScanTaskWriter(
        scan,
        stats=_columns(scan.metadata, pinned),
        dialect=dialect,
        form=form,
        # The shared cache belongs to the event loop; a long filter's answer is written in threads.
        texts=PartitionTextCache(_OWN_TEXTS_BYTES) if is_long(pinned) else call.app[PARTITION_TEXTS],
    )


def _dialect(call: Call) -> ClientDialect:
    return dialect_of(call.headers.get("User-Agent", ""), call.headers.get(_CLIENT_VERSION, ""))


def _wants_exact_residuals(call: Call, dialect: ClientDialect) -> bool:
    """BadRequest for another value of the header."""
    given = call.headers.get(RESIDUALS)
    if given is None:
        return dialect.filters_by_residual
    if given.lower() not in ("short", "exact"):
        raise BadRequest(f"The header {RESIDUALS} is {given[:100]!r}; it must be 'short' or 'exact'")
    return given.lower() == "exact"


def _columns(metadata: TableMetadata, pinned: PinnedRequest) -> list[int]:
    """Ids of the columns whose statistics are requested. BadRequest for a name that is in no schema of the table."""
    if not pinned.stats_fields:
        return []
    newest_first = sorted(metadata.schemas, key=lambda schema: schema.id, reverse=True)
    schemas = [metadata.current_schema, *newest_first]
    fold = (lambda name: name) if pinned.case_sensitive else str.lower
    requested = {fold(field): field for field in pinned.stats_fields}
    ids: dict[str, int] = {}
    for schema in schemas:
        if len(ids) == len(requested):
            break
        for name, column_id in schema.index.by_name.items():
            if fold(name) in requested:
                ids.setdefault(fold(name), column_id)
    for name, field in requested.items():
        if name not in ids:
            raise BadRequest(f"stats-fields contains {field[:100]!r}, which is not a column of the table")
    return [ids[name] for name in requested]


def _credentials(call: Call, loaded: LoadedTable) -> bytes:
    """JSON of the `storage-credentials`; empty for none."""
    entry = loaded.entry
    assert entry is not None
    _, credentials = access_config(call, entry.uuid, loaded.metadata, entry.namespace, entry.name)
    return encode_json(credentials) if credentials else b""


async def _completed(
    call: Call, loaded: LoadedTable, pinned: PinnedRequest, scan: ScanPlan, min_rows: int, credentials: bytes
) -> web.StreamResponse:
    """The complete answer of a plan, or the plan tasks that cover it."""
    settings = call.components.settings
    answer = _answer(call, pinned, scan)
    rows = scan.entry_ids
    if min_rows > 0:
        enough = partial(scan.first_with_rows, min_rows, settings.plan_inline_limit)
        rows = await _long_filters(call).run(pinned, enough)
    head, tail = b'{"status":"completed",', b"}"
    if credentials:
        tail = b',"storage-credentials":' + credentials + tail
    whole = PlanTask(pinned, 0, ROWS_MAX)
    tasks_of = partial(_plan_tasks, call, loaded, answer, rows, whole, inline_limit=settings.plan_inline_limit)
    return await _sent(call, pinned, answer, rows, tasks_of, head, tail)


async def _sent(
    call: Call,
    pinned: PinnedRequest,
    answer: ScanTaskWriter,
    rows: Longs,
    tasks_of: Callable[[], list[str]],
    head: bytes,
    tail: bytes,
) -> web.StreamResponse:
    """The files of `rows`, or the plan tasks that cover them."""
    run: Run | None = None
    if is_long(pinned):
        filters = _long_filters(call)
        tasks = await filters.run(pinned, tasks_of)
        run = partial(filters.run, pinned)
    else:
        tasks = tasks_of()
    if tasks:
        head += b'"plan-tasks":' + encode_json(tasks) + b","
        rows = rows[:0]
    pieces = _body(head, answer, rows, tail)
    return await send(call.request, pieces, run=run)


def _plan_tasks(
    call: Call,
    loaded: LoadedTable,
    answer: ScanTaskWriter,
    rows: Longs,
    whole: PlanTask,
    *,
    inline_limit: int,
) -> list[str]:
    """Plan tasks for equal parts of `rows`, which together cover the rows of `whole`; empty when `rows` fit one answer.

    A plan task may be split again when it is fetched, because the first answer may not have room for all tasks.
    BadRequest when exact residuals are too long for one answer and the filter is too long for plan tasks.
    """
    fit = len(rows) if answer.files_max is None else answer.files_max
    if len(rows) <= min(inline_limit, fit):
        return []
    packed = pack(whole.request)
    size = min(call.components.settings.plan_page_size, fit)
    pages = page_count(len(rows), len(packed), inline_limit=min(inline_limit, fit), page_size=size)
    if not pages and len(rows) > fit:
        raise BadRequest(
            f"The filter is too long to be repeated for each of {len(rows):,} files, and this client may apply only "
            "the "
            f"residuals, so it needs it whole. Send the header {RESIDUALS}: short if the engine filters rows again "
            "(Spark: spark.sql.catalog.<name>.header.X-Seamark-Residuals=short), shorten the filter, or let the client "
            "plan (table property seamark.scan-planning-mode=client)"
        )
    if not pages:
        return []
    size = -(-len(rows) // pages)
    starts = [whole.first_row, *rows[size::size].tolist()]
    return [
        call.app[TOKENS].plan_task(packed, start, end, _uuid(loaded))
        for start, end in zip(starts, [*starts[1:], whole.end_row], strict=True)
    ]


def _body(head: bytes, answer: ScanTaskWriter, rows: Longs, tail: bytes) -> Iterator[bytes]:
    yield head + b'"file-scan-tasks":['
    yield from answer.tasks(rows)
    # Omitted when empty: Iceberg Java's client refuses the key without tasks.
    opening = b'],"delete-files":['
    for piece in answer.delete_files():
        yield opening + piece
        opening = b""
    yield b"]" + tail


async def _opened(app: web.Application) -> AsyncIterator[None]:
    app[POINTERS] = PointerCache(app[COMPONENTS].catalog.tables, watch(app[COMPONENTS].settings.database_url()))
    app[TOKENS] = Tokens(app[COMPONENTS].keyring)
    try:
        yield
    finally:
        app[POINTERS].close()


def add_components(app: web.Application) -> None:
    app[PENDING] = PendingPlans()
    budget_bytes = app[COMPONENTS].settings.plan_answers_bytes
    app[PARTITION_TEXTS] = PartitionTextCache(int(budget_bytes * _TEXTS_SHARE))
    app[ANSWERS] = MemoryCache(int(budget_bytes * _ANSWERS_SHARE), "answers")
    app.cleanup_ctx.append(_opened)
    app.on_cleanup.append(app[PENDING].close)
