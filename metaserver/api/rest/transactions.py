"""Serves atomic commits to several tables (Iceberg REST specification)."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from seamark.formats.protocol.wire import check_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.describe import BodySize
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.idempotency import run_idempotent
from seamark.metaserver.api.rest.stream_changes import hold_appends
from seamark.metaserver.api.rest.stream_commits import (
    check_new_properties,
    check_not_based_on_fresh,
    prepare_stream_table,
)
from seamark.metaserver.api.rest.tables import check_may_create
from seamark.metaserver.catalog.values import TableChange
from seamark.metaserver.store.model import TABLE


class _Identifier(msgspec.Struct):
    """The name of a table."""

    namespace: tuple[str, ...]
    name: str


class _Change(msgspec.Struct):
    """The changes of one table."""

    identifier: _Identifier
    requirements: list[dict[str, Any]]
    updates: list[dict[str, Any]]


class _CommitTransaction(msgspec.Struct, rename="kebab"):
    """The body of a commit to several tables."""

    table_changes: list[_Change]


@Route(
    "POST",
    "/v1/{prefix}/transactions/commit",
    "commitTransaction",
    check=Check.SOMEWHERE,
    body_size=BodySize.MEDIUM,
    is_idempotent=True,
).takes(_CommitTransaction)
async def commit_transaction(call: Call, body: _CommitTransaction) -> web.Response:
    """Commit changes to several tables, either all or none."""
    if not body.table_changes:  # Without a table, no right can be checked, so nothing may be recorded.
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
    await call.allow(*dict.fromkeys(Securable(change.namespace, TABLE, change.name) for change in changes))
    for change in changes:
        await check_may_create(call, change.namespace, change.name, change.requirements)
    if len(changes) > 1:
        # A fresh snapshot also has appended rows that are not in files yet. Only a commit of one table may add to it.
        for change in changes:
            await check_not_based_on_fresh(call, change.namespace, change.name, change.updates)
    fresh_snapshot = None
    commits = call.components.engine_commits
    await check_new_properties(call, changes)
    async with hold_appends(call, changes) as stream_checks:
        # DuckDB sends every commit as a transaction. So a single change may be based on a fresh snapshot, but the
        # changes of a larger transaction are not, and the result for each of them is None.
        for change in changes:
            fresh_snapshot = await prepare_stream_table(
                call, change.namespace, change.name, change.requirements, change.updates
            )
        return await run_idempotent(
            call,
            lambda caller: commits.commit_transaction(
                caller,
                changes,
                fresh_snapshot=fresh_snapshot,
                fences=stream_checks.fences,
                examined=stream_checks.examined,
            ),
        )
