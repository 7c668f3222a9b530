"""Serves renames of tables and views, also between namespaces (Iceberg REST specification).

The caller needs the right to drop and to write the entry, and the right to create in the namespace of the new name.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from seamark.formats.protocol.wire import check_name, check_namespace
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.idempotency import run_idempotent
from seamark.metaserver.catalog.tables import Tables
from seamark.metaserver.catalog.values import TableIdentifier
from seamark.metaserver.catalog.views import Views
from seamark.metaserver.store.model import TABLE, VIEW


class _Rename(msgspec.Struct):
    """The body of a rename."""

    source: TableIdentifier
    destination: TableIdentifier


@Route("POST", "/v1/{prefix}/tables/rename", "renameTable", check=Check.SOMEWHERE, is_idempotent=True).takes(_Rename)
async def rename_table(call: Call, body: _Rename) -> web.Response:
    """Rename a table."""
    return await _rename_entry(call, body, call.components.catalog.tables, TABLE)


@Route("POST", "/v1/{prefix}/views/rename", "renameView", check=Check.SOMEWHERE, is_idempotent=True).takes(_Rename)
async def rename_view(call: Call, body: _Rename) -> web.Response:
    """Rename a view."""
    return await _rename_entry(call, body, call.components.catalog.views, VIEW)


async def _rename_entry(call: Call, body: _Rename, entries: Tables | Views, kind: str) -> web.Response:
    """Rename a table or a view, whose kind is `kind`.

    The caller needs the right to rename the entry, and the right to create entries in the new namespace.
    """
    for role, identifier in (("source", body.source), ("destination", body.destination)):
        check_namespace(identifier.namespace)
        check_name(identifier.name, f"{role} name")
    await call.allow(Securable(body.source.namespace, kind, body.source.name))
    await call.allow(Securable(body.destination.namespace), operation="createTable")
    await call.allow_new_name(kind, body.destination.namespace, body.destination.name)
    return await run_idempotent(call, lambda caller: entries.rename(caller, body.source, body.destination))
