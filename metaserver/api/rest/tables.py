"""Iceberg REST: tables, from create to unregister, with credentials and metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from seamark.cache.single_flight import SingleFlight
from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.idempotency import once
from seamark.metaserver.api.http.keys import CATALOG, SETTINGS, STOCK_COMMITS
from seamark.metaserver.api.http.plan_audience import audience_of
from seamark.metaserver.api.http.render import (
    GZIPS,
    access_config,
    commit_answer,
    json_answer,
    not_modified,
    plan_answer,
    snapshot_mode,
    table_answer,
    table_etag,
    unregistered_answer,
)
from seamark.metaserver.api.http.requests import (
    allow,
    boolean_query,
    caller,
    page_query,
    path_name,
    path_namespace,
    read_body,
    read_json,
)
from seamark.metaserver.catalog.documents import SnapshotMode
from seamark.metaserver.catalog.values import Caller, CreateTable, LoadedTable
from seamark.metaserver.errors import NoSuchTable, TooLarge
from seamark.metaserver.objects.vending import VENDED
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.wire import is_plan_name, show


class _CreateTable(msgspec.Struct, rename="kebab"):
    name: str
    schema: dict[str, Any]
    location: str | None = None
    partition_spec: dict[str, Any] | None = None
    write_order: dict[str, Any] | None = None
    stage_create: bool | None = None
    properties: dict[str, str] | None = None


class _RegisterTable(msgspec.Struct, rename="kebab"):
    name: str
    metadata_location: str
    overwrite: bool | None = None


class _CommitTable(msgspec.Struct):
    """`identifier` is ignored: the path names the table, and old clients put their catalog's name into it."""

    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]


async def list_tables(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    page = await request.app[CATALOG].tables.list(namespace, *page_query(request))
    identifiers = [{"namespace": namespace, "name": name} for name in page.items]
    return json_answer({"identifiers": identifiers, "next-page-token": page.next_token})


async def create_table(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    body = await read_json(request, _CreateTable)
    new = CreateTable(
        name=body.name,
        schema=body.schema,
        location=body.location,
        partition_spec=body.partition_spec,
        write_order=body.write_order,
        properties=body.properties or {},
    )
    tables = request.app[CATALOG].tables

    async def work(caller: Caller) -> LoadedTable:
        if body.stage_create:
            return await tables.stage(caller, namespace, new)
        return await tables.create(caller, namespace, new)

    async def answer(loaded: LoadedTable) -> web.Response:
        return await table_answer(request, loaded, namespace, body.name, compress=False)

    return await once(request, work, answer, replayed=LoadedTable)


async def register_table(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    body = await read_json(request, _RegisterTable)

    async def work(caller: Caller) -> LoadedTable:
        return await request.app[CATALOG].tables.register(
            caller, namespace, body.name, body.metadata_location, overwrite=bool(body.overwrite)
        )

    async def answer(loaded: LoadedTable) -> web.Response:
        return await table_answer(request, loaded, namespace, body.name, compress=False)

    return await once(request, work, answer, replayed=LoadedTable)


async def load_table(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    mode = snapshot_mode(request)
    if is_plan_name(name):
        return await _load_plan(request, namespace, name, mode)
    catalog = request.app[CATALOG]
    entry = await catalog.tables.entry(namespace, name)
    location = entry.metadata_location
    await catalog.documents.ensure_exists(location)
    audience = audience_of(request)
    shown = [] if audience is None else await catalog.plan_tables.shown(entry, audience)
    unchanged = not_modified(request, table_etag(request, location, namespace, name, mode, shown))
    if unchanged is not None:
        return unchanged
    loaded = LoadedTable(entry=entry, metadata=await catalog.documents.table(location))
    return await table_answer(request, loaded, namespace, name, mode, shown=shown)


async def _load_plan(request: web.Request, namespace: NamespacePath, name: str, mode: SnapshotMode) -> web.Response:
    catalog = request.app[CATALOG]
    plan, _ = await catalog.plan_tables.named(namespace, name)
    unchanged = not_modified(request, table_etag(request, plan.location, namespace, name, mode))
    if unchanged is not None:
        return unchanged
    return await plan_answer(request, await catalog.plan_tables.load(namespace, name), mode)


async def update_table(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    body = await read_json(request, _CommitTable)

    async def work(caller: Caller) -> LoadedTable:
        return await request.app[STOCK_COMMITS].commit_table(caller, namespace, name, body.requirements, body.updates)

    async def later() -> LoadedTable:
        return await request.app[STOCK_COMMITS].after_commit(namespace, name, body.requirements)

    async def answer(loaded: LoadedTable) -> web.Response:
        return commit_answer(request, loaded, namespace, name)

    return await once(request, work, answer, replayed=LoadedTable, later=later)


async def drop_table(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    purge = boolean_query(request, "purgeRequested")

    async def work(caller: Caller) -> None:
        await request.app[CATALOG].tables.drop(caller, namespace, name, purge=purge)

    async def answer(_: None) -> web.Response:
        return web.Response(status=204)

    return await once(request, work, answer)


async def table_exists(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    if is_plan_name(name):
        await request.app[CATALOG].plan_tables.named(namespace, name)
    elif not await request.app[CATALOG].tables.exists(namespace, name):
        raise NoSuchTable(f"Table does not exist: {show(namespace, name)}")
    return web.Response(status=204)


async def unregister_table(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)

    async def work(caller: Caller) -> LoadedTable:
        return await request.app[CATALOG].tables.unregister(caller, namespace, name)

    async def answer(loaded: LoadedTable) -> web.Response:
        return unregistered_answer(request, loaded)

    return await once(request, work, answer, replayed=LoadedTable)


async def load_credentials(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    catalog = request.app[CATALOG]
    if is_plan_name(name):  # its files belong to the table
        name = (await catalog.plan_tables.named(namespace, name))[1].name
    loaded = await catalog.tables.load(namespace, name)
    # The route itself requests credentials, so the header is not needed.
    _, credentials = access_config(request, loaded.metadata.location, namespace, name, VENDED)
    response = json_answer({"storage-credentials": credentials})
    response.headers["Cache-Control"] = "no-store"
    return response


async def report_metrics(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    size = len(await read_body(request))
    limit = request.app[SETTINGS].metrics_report_limit_bytes
    if size > limit:  # every reader may send reports, and the database stores them
        raise TooLarge(f"The report has {size:,} bytes; the limit is {limit:,}")
    report = await read_json(request, dict[str, Any])
    if is_plan_name(name):
        name = (await request.app[CATALOG].plan_tables.named(namespace, name))[1].name
    await request.app[CATALOG].metrics.report(caller(request), namespace, name, report, size)
    return web.Response(status=204)


def add_routes(app: web.Application) -> None:
    app[GZIPS] = SingleFlight()
    namespace = "/v1/{prefix}/namespaces/{namespace}"
    table = f"{namespace}/tables/{{table}}"
    add_operations(app, f"{namespace}/tables", {"GET": list_tables, "POST": create_table})
    add_operations(app, table, {"GET": load_table, "POST": update_table, "DELETE": drop_table, "HEAD": table_exists})
    add_operations(app, f"{namespace}/register", {"POST": register_table})
    add_operations(app, f"{table}/unregister", {"POST": unregister_table})
    add_operations(app, f"{table}/credentials", {"GET": load_credentials})
    add_operations(app, f"{table}/metrics", {"POST": report_metrics})
