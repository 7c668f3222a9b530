"""Scan planning of the Iceberg REST specification: a client sends a filter and receives the files to read.

Plans are read-only, and the server keeps no state for a client: plan tasks and plan ids contain the whole request (see
`planner/scan/tokens.py`). A repeated request is answered again from the planner's cache, so its Idempotency-Key needs
no record. An answer of megabytes does not belong in the database.

Plans are answered synchronously where possible, because Iceberg Java's client sends a DELETE for every plan id, and
waits a second before it polls. Only plans that must first decode manifests with millions of entries are answered
asynchronously. PyIceberg never gets such an answer, because it does not poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from sys import getsizeof
from typing import NamedTuple, TypeVar

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import encode_json, format_path, is_plan_name
from seamark.formats.runtime.errors import BadRequest, NoSuchPlanId, NoSuchPlanTask
from seamark.metaserver.api.formats.pieces import Run, send_pieces
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import BodySize
from seamark.metaserver.api.http.dispatch import Answer, Call, Route
from seamark.metaserver.api.http.parameters.snapshots import select_schema
from seamark.metaserver.api.http.render import DELEGATION, build_access_config
from seamark.metaserver.api.plans.attribute_columns import (
    check_attribute_rights,
    describe_attributes,
    resolve_attributes,
)
from seamark.metaserver.api.plans.column_reads import count_plan, count_read
from seamark.metaserver.api.plans.fresh import FreshPlan, add_fresh_snapshot, choose_fresh_plan
from seamark.metaserver.api.plans.pending import PendingPlans
from seamark.metaserver.api.plans.scan_requests import PlanTableScan, pin_request
from seamark.metaserver.api.plans.statement_reads import count_plan_statement, count_statement, read_engine
from seamark.metaserver.catalog.column_usage import ColumnRead
from seamark.metaserver.catalog.tables import Tables
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.history.history import StatementRead
from seamark.metaserver.planner.answer.answer import ScanTaskWriter, TaskForm
from seamark.metaserver.planner.answer.content_files import ClientDialect, PartitionTextCache, choose_dialect
from seamark.metaserver.planner.scan.attribute_columns import list_attribute_names
from seamark.metaserver.planner.scan.request import BoundScan, PinnedRequest, find_expired_ancestor
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.scan.tokens import ROWS_MAX, PlanTask, Tokens, count_plan_tasks, pack_request
from seamark.metaserver.runtime.shared_reads import SharedReads
from seamark.metaserver.store.model import Entry, NamespacePath
from seamark.metaserver.store.sql.changes import CommitCounter, open_commit_counter

T = TypeVar("T")

_TABLE_PATH = "/v1/{prefix}/namespaces/{namespace}/tables/{table}"
_CLIENT_VERSION = "X-Client-Version"
RESIDUALS = "X-Seamark-Residuals"
"""The header that says how the client uses residuals.

`short` means that the client applies its own filter to rows, so a residual may be weaker than necessary. `exact`
means that the client may apply only the residual. If the header is absent, the kind of the client decides
(`ClientDialect`).
"""
POLL_S = 0.5
"""The number of seconds for which a poll waits for a running plan."""
_ENTRIES_MAX = 10_000
"""The maximum number of cached pointers."""
PLAN_ID_CHARACTERS_MAX = 4000
"""The maximum length of a plan id. The id is a part of the URL, and servers and proxies limit the length of URLs."""


class PointerCache:
    """A cache of table pointers that is valid until the next commit.

    An instance belongs to one event loop.

    Any worker, replica or command may move a pointer at any time, and the next request must see the change. Each
    request therefore queries the database, but only for a number that changes with each commit
    (`store/sql/changes.py`).
    """

    def __init__(self, tables: Tables, changes: CommitCounter | None) -> None:
        """Create an empty cache of table entries.

        Args:
            tables: The tables of the catalog.
            changes: The counter of commits to the database. If it is None, nothing is cached, and an entry is read from
                the database once for all requests that arrive together.
        """
        self._tables = tables
        self._changes = changes
        self._change_number: int | None = None
        self._entries: dict[tuple[NamespacePath, str], Entry] = {}
        self._reads = SharedReads[tuple[NamespacePath, str], Entry](lambda key: tables.load_entry(*key))

    async def load_entry(self, namespace: NamespacePath, name: str) -> Entry:
        """Return the table's entry as `Tables.load_entry` does.

        The database has a counter that increases with each commit. The cache is cleared when this number has changed,
        or when the cache is full. Without a number, the entry is read again, once for all requests that arrive
        together.
        """
        change_number = None if self._changes is None else self._changes.read_number()
        if change_number is None:
            return await self._reads.load((namespace, name))
        if change_number != self._change_number or len(self._entries) >= _ENTRIES_MAX:
            self._entries.clear()
            self._change_number = change_number
        key = (namespace, name)
        entry = self._entries.get(key)
        if entry is None:
            entry = await self._tables.load_entry(namespace, name)
            if (
                change_number == self._change_number
            ):  # The entry was read after the number, so it is at least as new as the number.
                self._entries[key] = entry
        return entry

    def close(self) -> None:
        self._reads.close()
        if self._changes is not None:
            self._changes.close()


class _CountedReads(NamedTuple):
    """The reads that are counted each time an answer is sent, or None for reads that are not counted."""

    columns: ColumnRead | None = None
    statement: StatementRead | None = None


class _CachedAnswer(msgspec.Struct, frozen=True, gc=False):
    """An encoded answer.

    Attributes:
        considered_files: The number of data files of the snapshot.
        kept_files: The number of data files that the plan keeps.
        counted_reads: The reads that each use of the answer counts.
    """

    body: bytes
    headers: CIMultiDict[str]
    considered_files: int
    kept_files: int
    counted_reads: _CountedReads


class _FetchScanTasks(msgspec.Struct, rename="kebab"):
    """The body of a request for the files of a plan task."""

    plan_task: str


ANSWERS: web.AppKey[MemoryCache[tuple[object, ...], _CachedAnswer]] = web.AppKey("plan-answers")
PARTITION_TEXTS: web.AppKey[PartitionTextCache] = web.AppKey("partition-texts", PartitionTextCache)
_CACHED_ANSWER_BYTES = 1000
"""The approximate memory of a cached answer without its body and its key."""
_OWN_TEXTS_BYTES = 4 << 20
"""The memory for encoded partition tuples of an answer that does not use the shared cache."""
_TEXTS_SHARE, _ANSWERS_SHARE = 1 / 4, 5 / 8
"""The parts of `plan_answers_bytes` for encoded partition tuples and answers. The package `lookups` uses the rest."""
PENDING: web.AppKey[PendingPlans] = web.AppKey("pending", PendingPlans)
POINTERS: web.AppKey[PointerCache] = web.AppKey("pointers", PointerCache)
TOKENS: web.AppKey[Tokens] = web.AppKey("tokens", Tokens)


@Route("POST", f"{_TABLE_PATH}/plan", "planTableScan", body_size=BodySize.MEDIUM, streams=True).takes_bytes()
async def plan_table_scan(call: Call, body: bytes) -> Answer:
    """Plan a scan.

    The identity and the pointer are checked for each request. An answer is cached only if it depends on nothing else.
    """
    app, namespace, name = call.app, call.namespace, call.names[0]
    # The lease of a plan table may end at any time, and most clients plan scans of plan tables themselves.
    if is_plan_name(name):
        answer, _, _ = await _plan_scan(call, await app[COMPONENTS].catalog.plan_tables.read(namespace, name), body)
        return answer
    entry = await app[POINTERS].load_entry(namespace, name)
    get_header = call.headers.get
    fresh_plan: FreshPlan | None = None
    if entry.flushed:
        fresh_plan = await choose_fresh_plan(call, entry, body, _read_dialect(call))
        assert fresh_plan.loaded.entry is not None
        entry = fresh_plan.loaded.entry
    # The key contains everything that the answer depends on besides settings; metadata files are immutable. Whether the
    # file still exists is not checked for a cached answer: the client has just loaded the table.
    key = (
        entry.metadata_location,
        entry.uuid,
        entry.index_version,
        None if fresh_plan is None else (fresh_plan.is_live, fresh_plan.snapshot and fresh_plan.snapshot.snapshot_id),
        namespace,
        name,
        body,
        get_header("User-Agent"),
        get_header(_CLIENT_VERSION),
        get_header("Accept-Encoding"),
        get_header(DELEGATION),
        get_header(RESIDUALS),
        await call.may(call.securable, "loadCredentials"),
    )
    cached_value = app[ANSWERS].get(key)
    if cached_value is not None:
        app[COMPONENTS].metrics.plans.observe(cached_value.considered_files, cached_value.kept_files, seconds=0.0)
        count_read(call, cached_value.counted_reads.columns)
        count_statement(call, cached_value.counted_reads.statement)
        return web.Response(body=cached_value.body, headers=cached_value.headers)
    documents = app[COMPONENTS].catalog.documents
    await documents.ensure_exists(entry.metadata_location)
    if fresh_plan is not None:
        loaded_table = fresh_plan.loaded
    else:
        loaded_table = LoadedTable(entry=entry, metadata=await documents.table(entry.metadata_location))
    answer, scan_plan, counted_reads = await _plan_scan(call, loaded_table, body, fresh_plan)
    if (
        scan_plan is not None
        and scan_plan.complete
        and isinstance(answer, web.Response)
        and isinstance(answer.body, bytes)
    ):
        cached_answer = _CachedAnswer(
            answer.body, answer.headers.copy(), scan_plan.considered, scan_plan.files, counted_reads
        )
        # The key contains headers of up to 8 KiB each, which a client may change with each request.
        key_bytes = sum(map(getsizeof, key)) + sum(map(getsizeof, namespace))
        app[ANSWERS].put(key, cached_answer, len(cached_answer.body) + key_bytes + _CACHED_ANSWER_BYTES)
    return answer


async def _plan_scan(
    call: Call, loaded_table: LoadedTable, data: bytes, fresh_plan: FreshPlan | None = None
) -> tuple[Answer, ScanPlan | None, _CountedReads]:
    """Plan the scan that a body requests.

    Args:
        call: The request.
        loaded_table: The table.
        data: The body.
        fresh_plan: The table and the snapshot that the request reads, for a stream table.

    Returns:
        The answer; the plan if the answer can be cached; and the reads that are counted.
    """
    body = await call.parse(data, PlanTableScan)
    dialect = _read_dialect(call)
    if fresh_plan is not None and fresh_plan.is_live:
        body = msgspec.structs.replace(body, snapshot_id=None)
    pinned_request = pin_request(
        body, loaded_table.metadata, dialect, None if fresh_plan is None else fresh_plan.snapshot
    )
    if list_attribute_names(loaded_table.metadata):
        parse = pinned_request.parse_filter
        filter = await call.run_in_turn(parse) if pinned_request.has_long_filter else parse()
        attributes = await resolve_attributes(call, loaded_table.metadata, filter)
        pinned_request = msgspec.structs.replace(pinned_request, attributes=attributes)
    scan = _ClientScan(call, loaded_table, dialect, pinned_request)
    # This validates the request before anything is read, even for an empty table.
    bound_scan = await scan.bind()
    if bound_scan.snapshot is None:
        return {"status": "completed", "file-scan-tasks": []}, None, _CountedReads()
    plan_id = await scan.start_if_long(bound_scan)
    if plan_id is not None:
        return {"status": "submitted", "plan-id": plan_id}, None, _CountedReads()
    monotonic = call.components.clock.monotonic
    began_s = monotonic()
    scan_plan = await call.components.planner.plan(bound_scan, loaded_table.entry)
    plan_s = monotonic() - began_s
    call.components.metrics.plans.observe(scan_plan.considered, scan_plan.files, plan_s)
    counted_reads = _CountedReads()
    if body.seamark.usage:
        counted_reads = _CountedReads(
            await count_plan(call, loaded_table.entry, scan_plan, bound_scan.predicates, body.select),
            count_plan_statement(
                call,
                loaded_table.entry,
                bound_scan,
                scan_plan,
                read_engine(call),
                plan_s,
                select=body.select,
                use=body.seamark.use,
            ),
        )
    credentials = await _vend_credentials(call, loaded_table)
    statement = counted_reads.statement if body.seamark.use.engine else None
    answer = await scan.answer(
        call.request,
        scan_plan,
        credentials,
        min_rows=body.min_rows_requested or 0,
        fingerprint="" if statement is None else statement.shape.fingerprint,
    )
    # Answers with credentials are not cached: the credentials may have been rotated. Answers by attributes depend on
    # the caller's rights on the dimension tables, and on their snapshots.
    return answer, None if credentials or pinned_request.attributes else scan_plan, counted_reads


@Route("GET", f"{_TABLE_PATH}/plan/{{plan-id}}", "fetchPlanningResult", streams=True)
async def fetch_planning_result(call: Call) -> Answer:
    """Return the plan that was started by an earlier request, or its state if it still runs."""
    loaded_table = await _load_table_or_plan(call)
    plan_id = call.variables["plan_id"]
    request = _open_plan_id(call, plan_id, loaded_table)
    await check_attribute_rights(call, request.attributes)
    loaded_table = add_fresh_snapshot(loaded_table, request)
    if not _has_needed_snapshots(loaded_table.metadata, request):
        raise NoSuchPlanId(f"The plan's snapshot of {_format_table_name(call)} has expired; plan again")
    scan = _ClientScan(call, loaded_table, _read_dialect(call), request)
    task = call.app[PENDING].start(plan_id, call.principal.name, scan.plan)
    finished_tasks, _ = await asyncio.wait({task}, timeout=POLL_S)
    if not finished_tasks:
        return {"status": "submitted"}
    if task.cancelled():  # Another client of the principal cancelled the plan. The next poll starts it again.
        return {"status": "submitted"}
    try:
        scan_plan = task.result()
    # The request was valid when the plan began, but a snapshot of its range has expired since.
    except BadRequest as error:
        raise NoSuchPlanId(f"The plan can no longer be computed: {error.message}; plan again") from None
    # The plan ran between requests, so its duration is not measured and counts as 0 seconds.
    call.components.metrics.plans.observe(scan_plan.considered, scan_plan.files, seconds=0.0)
    count_plan_statement(call, loaded_table.entry, await scan.bind(), scan_plan, read_engine(call), plan_s=0.0)
    return await scan.answer(call.request, scan_plan, await _vend_credentials(call, loaded_table))


@Route("DELETE", f"{_TABLE_PATH}/plan/{{plan-id}}", "cancelPlanning")
async def cancel_planning(call: Call) -> None:
    """Cancel a running plan of the caller."""
    loaded_table = await _load_table_or_plan(call)
    plan_id = call.variables["plan_id"]
    _open_plan_id(call, plan_id, loaded_table)  # This checks that the plan belongs to the table.
    call.app[PENDING].cancel(plan_id, call.principal.name)


@Route("POST", f"{_TABLE_PATH}/tasks", "fetchScanTasks", streams=True).takes(_FetchScanTasks)
async def fetch_scan_tasks(call: Call, body: _FetchScanTasks) -> web.StreamResponse:
    """Return the files of a plan task."""
    loaded_table = await _load_table_or_plan(call)
    task = call.app[TOKENS].open_plan_task(body.plan_task, _get_uuid(loaded_table))
    if task is None:
        raise NoSuchPlanTask(f"The plan task was not issued for {_format_table_name(call)}; plan again")
    await check_attribute_rights(call, task.request.attributes)
    loaded_table = add_fresh_snapshot(loaded_table, task.request)
    if not _has_needed_snapshots(loaded_table.metadata, task.request):
        raise NoSuchPlanTask(f"The plan task's snapshot of {_format_table_name(call)} has expired; plan again")
    scan = _ClientScan(call, loaded_table, _read_dialect(call), task.request)
    try:
        scan_plan = await scan.plan()
    # The request was valid when the task was issued, but a snapshot of its range has expired since.
    except BadRequest as error:
        raise NoSuchPlanTask(f"The plan task can no longer be answered: {error.message}; plan again") from None
    return await scan.answer_task(call.request, scan_plan, task)


async def _load_table_or_plan(call: Call) -> LoadedTable:
    """Return the table that the request names, or the plan table, which has only the files that a plan keeps."""
    catalog = call.components.catalog
    return await (catalog.plan_tables.read if is_plan_name(call.name) else catalog.tables.load)(
        call.namespace, call.name
    )


def _get_uuid(loaded_table: LoadedTable) -> str:
    assert loaded_table.entry is not None
    return loaded_table.entry.uuid


def _format_table_name(call: Call) -> str:
    """Return the full name of the table, as messages show it."""
    return format_path(call.namespace, call.name)


def _has_needed_snapshots(metadata: TableMetadata, request: PinnedRequest) -> bool:
    """Return whether the metadata still has all snapshots that the request needs.

    The first snapshot of an incremental scan may have expired, because it is not read. The snapshots after it must
    exist: rows are numbered by the position of their manifest among the manifests of all snapshots of the range. The
    metadata must also have the schema of the request.
    """
    if any(
        snapshot_id is not None and metadata.snapshot(snapshot_id) is None
        for snapshot_id in (request.snapshot_id, request.end_snapshot_id)
    ):
        return False
    has_start = request.snapshot_id is not None or request.start_snapshot_id is not None
    if not has_start and find_expired_ancestor(metadata, request.end_snapshot_id) is not None:
        return False
    return metadata.schema(request.schema_id) is not None


def _open_plan_id(call: Call, plan_id: str, loaded_table: LoadedTable) -> PinnedRequest:
    """Return the request that a plan id contains.

    Raises:
        NoSuchPlanId: The plan id does not belong to this table or was not issued by this catalog.
    """
    request = call.app[TOKENS].open_plan_id(plan_id, _get_uuid(loaded_table))
    if request is None:
        raise NoSuchPlanId(f"The plan id was not issued for {_format_table_name(call)}; plan again")
    return request


def _read_dialect(call: Call) -> ClientDialect:
    """Return the form of answers that the client can read."""
    return choose_dialect(call.headers.get("User-Agent", ""), call.headers.get(_CLIENT_VERSION, ""))


async def _vend_credentials(call: Call, loaded_table: LoadedTable) -> bytes:
    """Return the JSON of the `storage-credentials`, which is empty if the client needs no credentials."""
    entry = loaded_table.entry
    assert entry is not None
    _, credentials = await build_access_config(call, entry.uuid, loaded_table.metadata, entry.namespace, entry.name)
    return encode_json(credentials) if credentials else b""


class _Page(NamedTuple):
    """The files of one answer."""

    entry_ids: Longs
    first_entry_id: int
    end_entry_id: int
    """The page covers the ids in [`first_entry_id`, `end_entry_id`), of which the plan keeps `entry_ids`.

    An entry id is the number of a file in the snapshot.
    """
    inline_limit: int
    """The maximum number of files in the answer itself. Further files are in plan tasks."""


class _ClientScan:
    """Binds, plans and answers a scan that a client requests.

    The longer the filter, the more work it takes: to read, bind or write a filter with two hundred thousand values
    takes up to seconds in Python. The work on a long filter therefore runs in a thread, for one filter at a time, and
    all principals get an equal share.

    An instance outlives the HTTP request if the plan is fetched later, so it does not reference the request.
    """

    __slots__ = ("_app", "_dialect", "_entry", "_headers", "_metadata", "_principal_name", "_request")

    def __init__(self, call: Call, loaded_table: LoadedTable, dialect: ClientDialect, request: PinnedRequest) -> None:
        """Store the request for `bind` and `plan`, which do the work.

        Raises:
            BadRequest: The table does not have the schema of the request.
        """
        self._app = call.app
        self._principal_name = call.principal.name
        self._headers = call.headers
        self._entry = loaded_table.entry
        self._dialect = dialect
        self._request = request
        self._metadata = loaded_table.metadata
        if request.schema_id != loaded_table.metadata.current_schema_id:
            self._metadata = select_schema(loaded_table.metadata, request.schema_id)

    async def bind(self) -> BoundScan:
        """Parse and bind the filter.

        Raises:
            BadRequest: The request is invalid.
        """
        bind = partial(self._request.bind, self._metadata)
        return await self._run_work_in_turn(bind) if self._request.has_long_filter else bind()

    async def plan(self) -> ScanPlan:
        """Bind the request and plan it."""
        return await self._app[COMPONENTS].planner.plan(await self.bind(), self._entry)

    async def start_if_long(self, bound_scan: BoundScan) -> str | None:
        """Start a long plan and return its id, or return None if the plan should be answered synchronously.

        The answer is synchronous if the client does not poll, if the plan is short, if the caller has too many running
        plans, or if the id, which contains the request, would be too long.
        """
        if not self._dialect.polls:
            return None
        entries_to_decode = await self._app[COMPONENTS].planner.estimate_entries_to_decode(bound_scan, self._entry)
        if entries_to_decode <= self._app[COMPONENTS].settings.plan_async_files:
            return None
        pending = self._app[PENDING]
        if pending.is_full(self._principal_name):
            return None
        payload = await self._run_work(partial(pack_request, self._request))
        plan_id = self._app[TOKENS].sign_plan_id(payload, self._uuid)
        if len(plan_id) > PLAN_ID_CHARACTERS_MAX:
            return None
        pending.start(plan_id, self._principal_name, self.plan)
        return plan_id

    async def answer(
        self,
        http_request: web.Request,
        scan_plan: ScanPlan,
        credentials: bytes,
        *,
        min_rows: int = 0,
        fingerprint: str = "",
    ) -> web.StreamResponse:
        """Send the complete answer of a plan, or the plan tasks that cover it.

        Args:
            http_request: The request.
            scan_plan: The plan.
            credentials: The JSON of the storage credentials, which may be empty.
            min_rows: If it is not 0, only the first files that have this many rows are sent.
            fingerprint: The fingerprint of the statement, with which the client may report its time, or an empty text.
        """
        limit = self._app[COMPONENTS].settings.plan_inline_limit
        writer = self._make_writer(scan_plan)
        entry_ids = scan_plan.entry_ids
        if min_rows > 0:
            entry_ids = await self._run_work(partial(scan_plan.find_first_files_with_rows, min_rows, limit))
        head, tail = b'{"status":"completed",', b"}"
        if fingerprint:
            head += b'"seamark-statement":"%b",' % fingerprint.encode()
        if self._request.attributes:
            head += b'"seamark-attributes":%b,' % encode_json(describe_attributes(self._request.attributes))
        if credentials:
            tail = b',"storage-credentials":' + credentials + tail
        return await self._send(http_request, writer, _Page(entry_ids, 0, ROWS_MAX, limit), head, tail)

    async def answer_task(self, http_request: web.Request, scan_plan: ScanPlan, task: PlanTask) -> web.StreamResponse:
        """Send the files of a plan task, or further plan tasks if the files do not fit into one answer.

        A task covers a range of entry ids, the numbers of the files in the snapshot. The plan keeps some of them.
        """
        start, end = scan_plan.entry_ids.searchsorted((task.first_row, task.end_row)).tolist()
        entry_ids = scan_plan.entry_ids[start:end]
        page = _Page(entry_ids, task.first_row, task.end_row, inline_limit=len(entry_ids))
        return await self._send(http_request, self._make_writer(scan_plan), page, b"{", b"}")

    async def _send(
        self, http_request: web.Request, writer: ScanTaskWriter, page: _Page, head: bytes, tail: bytes
    ) -> web.StreamResponse:
        """Send the files of the page, or the plan tasks that cover them.

        `head` and `tail` are the JSON before and after the files. The answer to a long filter is written in threads.
        """
        if self._request.has_long_filter:
            run: Run | None = self._run_work_in_turn
            plan_tasks = await self._run_work_in_turn(partial(self._make_plan_tasks, writer, page))
        else:
            run, plan_tasks = None, self._make_plan_tasks(writer, page)
        entry_ids = page.entry_ids
        if plan_tasks:
            head += b'"plan-tasks":' + encode_json(plan_tasks) + b","
            entry_ids = entry_ids[:0]
        return await send_pieces(http_request, _encode_pieces(head, writer, entry_ids, tail), run=run)

    def _make_writer(self, scan_plan: ScanPlan) -> ScanTaskWriter:
        """Return the writer of the files of the answer."""
        request = self._request
        form = TaskForm(
            residuals=request.residuals,
            residual_bytes=self._app[COMPONENTS].settings.plan_residual_bytes,
            exact_residuals=self._wants_exact_residuals,
            sequence_numbers=request.sequence_numbers,
            whole_files=request.may_rewrite_files,
        )
        return ScanTaskWriter(
            scan_plan,
            stats=_find_columns(scan_plan.metadata, request) if request.stats_fields else (),
            dialect=self._dialect,
            form=form,
            # The shared cache belongs to the event loop, but the answer to a long filter is written in threads.
            texts=PartitionTextCache(_OWN_TEXTS_BYTES) if request.has_long_filter else self._app[PARTITION_TEXTS],
        )

    @property
    def _wants_exact_residuals(self) -> bool:
        """Whether the client may filter rows only by residuals. Then each residual must be exact.

        The residual of a file is the part of the filter that its partition does not decide. The client requests exact
        residuals in a header. Without the header, the kind of the client decides.

        Raises:
            BadRequest: The header has an unknown value.
        """
        header = self._headers.get(RESIDUALS)
        if header is None:
            return self._dialect.filters_by_residual
        if header.lower() not in ("short", "exact"):
            raise BadRequest(f"The header {RESIDUALS} is {header[:100]!r}; it must be 'short' or 'exact'")
        return header.lower() == "exact"

    def _make_plan_tasks(self, writer: ScanTaskWriter, page: _Page) -> list[str]:
        """Return plan tasks for equal parts of the page, or an empty list if all its files fit into one answer.

        A plan task may be split again when it is fetched, because the first answer may not have room for all tasks.

        Raises:
            BadRequest: Exact residuals are too long for one answer, and the filter is too long for plan tasks.
        """
        files, entry_ids = len(page.entry_ids), page.entry_ids
        files_per_answer = files if writer.files_max is None else writer.files_max
        inline_limit = min(page.inline_limit, files_per_answer)
        if files <= inline_limit:
            return []
        payload = pack_request(self._request)
        page_size = min(self._app[COMPONENTS].settings.plan_page_size, files_per_answer)
        pages = count_plan_tasks(files, len(payload), inline_limit=inline_limit, page_size=page_size)
        if not pages and files > files_per_answer:
            raise BadRequest(
                f"The filter is too long to be repeated for each of {files:,} files, and this client needs the whole "
                f"filter because it may apply only the residuals. Send the header {RESIDUALS}: short if the engine "
                "filters rows again (Spark: spark.sql.catalog.<name>.header.X-Seamark-Residuals=short), shorten the "
                "filter, or let the client plan by the table property seamark.scan-planning-mode=client"
            )
        if not pages:
            return []
        files_per_task = -(-files // pages)  # The quotient is rounded up.
        starts = [page.first_entry_id, *entry_ids[files_per_task::files_per_task].tolist()]
        ends = [*starts[1:], page.end_entry_id]
        tokens, uuid = self._app[TOKENS], self._uuid
        return [tokens.sign_plan_task(payload, start, end, uuid) for start, end in zip(starts, ends, strict=True)]

    @property
    def _uuid(self) -> str:
        assert self._entry is not None
        return self._entry.uuid

    async def _run_work(self, work: Callable[[], T]) -> T:
        """Run work on the request and return its result. If the filter is long, `Call.run_in_turn` runs the work."""
        return await self._run_work_in_turn(work) if self._request.has_long_filter else work()

    async def _run_work_in_turn(self, work: Callable[[], T]) -> T:
        return await self._app[COMPONENTS].worker_limits.parsing.run(self._principal_name, work)


def _find_columns(metadata: TableMetadata, request: PinnedRequest) -> list[int]:
    """Return the ids of the columns whose statistics are requested.

    Raises:
        BadRequest: A name is not in any schema of the table.
    """
    # A name means a column of the current schema or, if this schema lacks it, of the newest schema that has it.
    newest_first = sorted(metadata.schemas, key=lambda schema: schema.id, reverse=True)
    schemas = [metadata.current_schema, *newest_first]
    normalize_name = (lambda name: name) if request.case_sensitive else str.lower
    fields_by_name = {normalize_name(field): field for field in request.stats_fields}
    ids: dict[str, int] = {}
    for schema in schemas:
        if len(ids) == len(fields_by_name):
            break
        for name, column_id in schema.index.by_name.items():
            if normalize_name(name) in fields_by_name:
                ids.setdefault(normalize_name(name), column_id)
    for name, field in fields_by_name.items():
        if name not in ids:
            raise BadRequest(f"stats-fields contains {field[:100]!r}, which is not a column of the table")
    return [ids[name] for name in fields_by_name]


def _encode_pieces(head: bytes, writer: ScanTaskWriter, entry_ids: Longs, tail: bytes) -> Iterator[bytes]:
    """Yield the parts of an answer: the start, the scan tasks and the end."""
    yield head + b'"file-scan-tasks":['
    yield from writer.write_tasks(entry_ids)
    # Leave out `delete-files` if there are no delete files. Without tasks there are none, and Iceberg Java's client
    # refuses `delete-files` in an answer without tasks.
    separator = b'],"delete-files":['
    for piece in writer.write_delete_files():
        yield separator + piece
        separator = b""
    yield b"]" + tail


async def _open_planning_components(app: web.Application) -> AsyncIterator[None]:
    """Create the components of planning, and close them when the server stops."""
    app[POINTERS] = PointerCache(
        app[COMPONENTS].catalog.tables, open_commit_counter(app[COMPONENTS].settings.make_database_url())
    )
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
    app.cleanup_ctx.append(_open_planning_components)
    app.on_cleanup.append(app[PENDING].close)
