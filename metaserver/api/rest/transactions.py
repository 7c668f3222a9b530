"""Iceberg REST: atomic commits to several tables."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.idempotency import once
from seamark.metaserver.api.http.keys import STOCK_COMMITS
from seamark.metaserver.api.http.requests import allow, allow_somewhere, read_json
from seamark.metaserver.catalog.values import Caller, TableChange
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.wire import check_namespace


class _Identifier(msgspec.Struct):
    namespace: tuple[str, ...]
    name: str


class _Change(msgspec.Struct):
    identifier: _Identifier
    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]


class _CommitTransaction(msgspec.Struct, rename="kebab"):
    table_changes: list[_Change]


async def commit_transaction(request: web.Request) -> web.Response:
    allow_somewhere(request)
    body = await read_json(request, _CommitTransaction)
    if not body.table_changes:  # without tables no right can be checked, so nothing may be recorded
        raise BadRequest("table-changes is empty; it needs at least one change")
    changes = [
        TableChange(
            namespace=check_namespace(change.identifier.namespace),
            name=change.identifier.name,
            requirements=change.requirements,
            updates=change.updates,
        )
        for change in body.table_changes
    ]
    allow(request, *dict.fromkeys(change.namespace for change in changes))

    async def work(caller: Caller) -> None:
        await request.app[STOCK_COMMITS].commit_transaction(caller, changes)

    async def answer(_: None) -> web.Response:
        return web.Response(status=204)

    return await once(request, work, answer)


def add_routes(app: web.Application) -> None:
    add_operations(app, "/v1/{prefix}/transactions/commit", {"POST": commit_transaction})
