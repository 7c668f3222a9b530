"""Serves the tables of the Iceberg REST specification, with credentials and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from seamark.cache.single_flight import SingleFlight
from seamark.formats.protocol.wire import AFTER_HEADER, format_path, is_plan_name
from seamark.formats.runtime.errors import NoSuchTable, TooLarge
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import BodySize
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.fresh_reads import check_required_rows, load_fresh
from seamark.metaserver.api.http.idempotency import run_idempotent
from seamark.metaserver.api.http.parameters.fresh import reads_fresh
from seamark.metaserver.api.http.parameters.requests import read_boolean_query, read_page_query
from seamark.metaserver.api.http.render import (
    GZIPS,
    answer_fresh_read,
    answer_not_modified,
    answer_unregistered,
    build_access_config,
    compute_table_etag,
    make_commit_answer,
    make_plan_answer,
    make_table_answer,
    read_snapshot_mode,
)
from seamark.metaserver.api.indexes.dimension_rights import check_registered_authors
from seamark.metaserver.api.plans.column_reads import count_read, find_column_usage, read_scan_report
from seamark.metaserver.api.plans.shown_plans import list_shown_plans
from seamark.metaserver.api.plans.statement_reads import count_statement, find_history, read_reported_statement
from seamark.metaserver.api.rest.stream_changes import check_may_overwrite, check_may_register_again, hold_appends
from seamark.metaserver.api.rest.stream_commits import check_named_tables, check_new_properties, prepare_stream_table
from seamark.metaserver.catalog.column_usage import ColumnRead
from seamark.metaserver.catalog.documents import SnapshotMode
from seamark.metaserver.catalog.values import Caller, CreateTable, LoadedTable, TableChange
from seamark.metaserver.history.history import StatementRead
from seamark.metaserver.objects.vending import VENDED
from seamark.metaserver.store.model import TABLE, NamespacePath

_NAMESPACE = "/v1/{prefix}/namespaces/{namespace}"
_TABLE = f"{_NAMESPACE}/tables/{{table}}"
_IN_LOOP_REPORT_BYTES_MAX = 8 << 10
"""The maximum length of a scan report that is analysed in the event loop.

A longer report is analysed in a thread, because its filter may have thousands of values.
"""


class _CreateTable(CreateTable, frozen=True, rename="kebab"):
    """The body of a request that creates a table."""

    stage_create: bool | None = None


class _RegisterTable(msgspec.Struct, rename="kebab"):
    """The body of a request that registers a table."""

    name: str
    metadata_location: str
    overwrite: bool | None = None


class _CommitTable(msgspec.Struct):
    """The body of a commit to a table.

    The field `identifier` is ignored, because the path names the table, and old clients write the name of their catalog
    into `identifier`.
    """

    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]


@Route("GET", f"{_NAMESPACE}/tables", "listTables")
async def list_tables(call: Call) -> dict[str, Any]:
    """Return a page of the tables of a namespace."""
    page = await call.components.catalog.tables.list(call.namespace, *read_page_query(call.query))
    names = await call.select_names(TABLE, page.items, "tableExists")
    identifiers = [{"namespace": call.namespace, "name": name} for name in names]
    return {"identifiers": identifiers, "next-page-token": page.next_token}


@Route("POST", f"{_NAMESPACE}/tables", "createTable", body_size=BodySize.MEDIUM, is_idempotent=True).takes(_CreateTable)
async def create_table(call: Call, body: _CreateTable) -> web.Response:
    """Create a table, or stage its creation."""
    await call.allow_new_name(TABLE, call.namespace, body.name)
    await check_named_tables(call, body.properties or {})
    tables = call.components.catalog.tables
    create = tables.stage if body.stage_create else tables.create
    return await _run_creation(call, lambda caller: create(caller, call.namespace, body), body.name)


@Route("GET", _TABLE, "loadTable")
async def load_table(call: Call) -> web.Response:
    """Return a table with its metadata, and with credentials if the client requests them.

    A stream table gets a fresh snapshot, with rows that are not in files yet, if the client requests it and there are
    such rows. If the client has the current metadata, the answer is 304.
    """
    namespace, name, mode = call.namespace, call.name, read_snapshot_mode(call)
    if is_plan_name(name):
        return await _load_plan(call, mode)
    catalog = call.components.catalog
    entry = await catalog.tables.load_entry(namespace, name)
    location = entry.metadata_location
    await catalog.documents.ensure_exists(location)
    if entry.flushed and reads_fresh(call.headers):
        fresh_table = await load_fresh(call, entry)
        if fresh_table.snapshot is not None:
            plans = await list_shown_plans(call, entry)
            return await answer_fresh_read(call, fresh_table.loaded, namespace, name, mode, plan_snapshots=plans)
        entry = fresh_table.loaded.entry or entry
        location = entry.metadata_location
    elif AFTER_HEADER in call.headers:
        check_required_rows(call.headers, entry, entry.parse_flushed_offsets())
    plan_snapshots = await list_shown_plans(call, entry)
    if "If-None-Match" in call.headers:
        not_modified_answer = answer_not_modified(
            call, await compute_table_etag(call, location, namespace, name, mode, plan_snapshots)
        )
        if not_modified_answer is not None:
            return not_modified_answer
    loaded_table = LoadedTable(entry=entry, metadata=await catalog.documents.table(location))
    return await make_table_answer(call, loaded_table, namespace, name, mode, plan_snapshots=plan_snapshots)


async def _load_plan(call: Call, mode: SnapshotMode) -> web.Response:
    """Return the metadata of a plan table, which is a read-only table with the files of one scan plan.

    `mode` states whether the metadata contain all snapshots or only those of branches and tags.
    """
    plans = call.components.catalog.plan_tables
    plan, _ = await plans.find(call.namespace, call.name)
    not_modified_answer = answer_not_modified(
        call, await compute_table_etag(call, plan.location, call.namespace, call.name, mode, of_name=plan.of_name)
    )
    if not_modified_answer is not None:
        return not_modified_answer
    return await make_plan_answer(call, await plans.load(call.namespace, call.name), mode)


@Route("POST", _TABLE, "updateTable", body_size=BodySize.MEDIUM, is_idempotent=True).takes(_CommitTable)
async def update_table(call: Call, body: _CommitTable) -> web.Response:
    """Commit changes to a table."""
    commits, namespace, name = call.components.engine_commits, call.namespace, call.name
    await check_may_create(call, namespace, name, body.requirements)
    changes = [TableChange(namespace, name, body.requirements, body.updates)]
    await check_new_properties(call, changes)
    async with hold_appends(call, changes) as stream_checks:
        fresh_snapshot = await prepare_stream_table(call, namespace, name, body.requirements, body.updates)
        return await run_idempotent(
            call,
            lambda caller: commits.commit_table(
                caller,
                namespace,
                name,
                body.requirements,
                body.updates,
                fresh_snapshot=fresh_snapshot,
                fences=stream_checks.fences,
                examined=stream_checks.examined,
            ),
            lambda loaded: make_commit_answer(call, loaded, namespace, name),
            answer_type=LoadedTable,
            recover=lambda: commits.load_committed(namespace, name, body.requirements),
        )


async def check_may_create(
    call: Call, namespace: NamespacePath, name: str, requirements: Sequence[Mapping[str, Any]]
) -> None:
    """Check that the caller may create a table with this name, if the commit requires that the table does not exist.

    Raises:
        Forbidden: The caller may not create tables in the namespace, or not with this name.
    """
    if any(requirement.get("type") == "assert-create" for requirement in requirements):
        await call.allow(Securable(namespace), operation="createTable")
        await call.allow_new_name(TABLE, namespace, name)


@Route("DELETE", _TABLE, "dropTable", is_idempotent=True)
async def drop_table(call: Call) -> web.Response:
    """Drop a table, with its files if the client requests a purge."""
    purge = read_boolean_query(call.query, "purgeRequested")
    tables = call.components.catalog.tables
    return await run_idempotent(call, lambda caller: tables.drop(caller, call.namespace, call.name, purge=purge))


@Route("HEAD", _TABLE, "tableExists")
async def table_exists(call: Call) -> None:
    """Answer whether a table exists.

    Raises:
        NoSuchTable: The table does not exist.
    """
    if is_plan_name(call.name):
        await call.components.catalog.plan_tables.find(call.namespace, call.name)
    elif not await call.components.catalog.tables.exists(call.namespace, call.name):
        raise NoSuchTable(f"Table does not exist: {format_path(call.namespace, call.name)}")


@Route("POST", f"{_NAMESPACE}/register", "registerTable", is_idempotent=True).takes(_RegisterTable)
async def register_table(call: Call, body: _RegisterTable) -> web.Response:
    """Register a table by its metadata file."""
    await call.allow_new_name(TABLE, call.namespace, body.name)
    register, overwrite = call.components.catalog.tables.register, bool(body.overwrite)
    table_arguments = call.namespace, body.name, body.metadata_location

    async def check_properties(properties: Mapping[str, str]) -> None:
        await check_named_tables(call, properties)
        await check_registered_authors(call, properties)

    async def check_drop() -> None:
        await call.allow(Securable(call.namespace, TABLE, body.name), operation="dropTable")

    async def register_and_open_stream(caller: Caller) -> LoadedTable:
        loaded_table = await register(
            caller,
            *table_arguments,
            overwrite=overwrite,
            check_properties=check_properties,
            check_drop=check_drop,
            check_overwritten=partial(check_may_overwrite, call),
            check_returning=partial(check_may_register_again, call),
        )
        assert loaded_table.entry is not None
        # The registered metadata, which may be older than the pause, state whether the table is paused.
        call.components.streams.pauses.forget(loaded_table.entry.uuid)
        # A table that was unregistered before may have a stream with rows that are not in files yet.
        await call.components.streams.openings.open_returned_table(loaded_table.entry, loaded_table.metadata)
        return loaded_table

    return await _run_creation(call, register_and_open_stream, body.name)


@Route("POST", f"{_TABLE}/unregister", "unregisterTable", is_idempotent=True)
async def unregister_table(call: Call) -> web.Response:
    """Remove a table from the catalog and keep its files."""
    return await run_idempotent(
        call,
        lambda caller: call.components.catalog.tables.unregister(caller, call.namespace, call.name),
        lambda loaded: answer_unregistered(call, loaded),
        answer_type=LoadedTable,
    )


@Route("GET", f"{_TABLE}/credentials", "loadCredentials", is_secret=True)
async def load_credentials(call: Call) -> dict[str, Any]:
    """Return credentials for the files of a table."""
    name, catalog = call.name, call.components.catalog
    if is_plan_name(name):  # The files of a plan belong to the planned table.
        name = (await catalog.plan_tables.find(call.namespace, name))[1].name
    loaded_table = await catalog.tables.load(call.namespace, name)
    # The route itself requests credentials, so the header is not needed.
    assert loaded_table.entry is not None
    _, credentials = await build_access_config(
        call, loaded_table.entry.uuid, loaded_table.metadata, call.namespace, name, VENDED
    )
    return {"storage-credentials": credentials}


@Route("POST", f"{_TABLE}/metrics", "reportMetrics").takes_bytes()
async def report_metrics(call: Call, data: bytes) -> None:
    """Store a report of an engine. For a scan report, count the columns and the statement that it names."""
    name, limit = call.name, call.components.settings.metrics_report_limit_bytes
    if len(data) > limit:  # Every reader may send reports, and the database stores them.
        raise TooLarge(f"The report has {len(data):,} bytes; the limit is {limit:,}")
    report = await call.parse(data, dict[str, Any])
    catalog = call.components.catalog
    if is_plan_name(name):
        name = (await catalog.plan_tables.find(call.namespace, name))[1].name
    entry = await catalog.metrics.report(call.caller, call.namespace, name, report, len(data))
    if entry is None or report["report-type"] != "scan-report":
        return
    metadata = await catalog.documents.table(entry.metadata_location)
    # The cache maps the ids of recent plan snapshots to the end of their oldest partition. It belongs to the event
    # loop, so it is read here and not in a thread.
    plans = catalog.column_usage.plans
    is_plan_snapshot, plan_end_ms = report["snapshot-id"] in plans, plans.get(report["snapshot-id"])

    def read_report() -> tuple[ColumnRead | None, StatementRead | None]:
        now_ms = call.components.clock.now_ms()
        column_read = (
            None
            if find_column_usage(call) is None
            else read_scan_report(
                entry.uuid, metadata, report, now_ms, is_plan_snapshot=is_plan_snapshot, plan_end_ms=plan_end_ms
            )
        )
        statement_read = None
        if find_history(call) is not None:
            statement_read = read_reported_statement(entry.uuid, metadata, report, is_planned=is_plan_snapshot)
        return column_read, statement_read

    column_read, statement_read = (
        read_report() if len(data) <= _IN_LOOP_REPORT_BYTES_MAX else await call.run_in_turn(read_report)
    )
    count_read(call, column_read)
    count_statement(call, statement_read)


async def _run_creation(call: Call, work: Callable[[Caller], Awaitable[LoadedTable]], name: str) -> web.Response:
    """Run `work`, which creates a table with this name, and answer with the table.

    The answer is not compressed, because it is requested only once.
    """

    async def answer(loaded_table: LoadedTable) -> web.Response:
        return await make_table_answer(call, loaded_table, call.namespace, name, compress=False)

    return await run_idempotent(call, work, answer, answer_type=LoadedTable)


def add_components(app: web.Application) -> None:
    app[GZIPS] = SingleFlight()
