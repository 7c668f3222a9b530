"""Serves the views of the Iceberg REST specification."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from seamark.formats.protocol.wire import format_path, is_plan_name
from seamark.formats.runtime.errors import NoSuchView
from seamark.metaserver.api.http.describe import BodySize
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.idempotency import run_idempotent
from seamark.metaserver.api.http.parameters.requests import read_page_query
from seamark.metaserver.api.http.render import make_view_answer
from seamark.metaserver.catalog.values import Caller, CreateView, LoadedView
from seamark.metaserver.store.model import VIEW

_NAMESPACE = "/v1/{prefix}/namespaces/{namespace}"
_VIEW = f"{_NAMESPACE}/views/{{view}}"


class _RegisterView(msgspec.Struct, rename="kebab"):
    """The body of a request that registers a view."""

    name: str
    metadata_location: str


class _ReplaceView(msgspec.Struct):
    """The body of a request that changes a view."""

    updates: list[dict[str, Any]]
    requirements: list[dict[str, Any]] | None = None


@Route("GET", f"{_NAMESPACE}/views", "listViews")
async def list_views(call: Call) -> dict[str, Any]:
    """Return a page of the views of a namespace."""
    page = await call.components.catalog.views.list(call.namespace, *read_page_query(call.query))
    names = await call.select_names(VIEW, page.items, "viewExists")
    identifiers = [{"namespace": call.namespace, "name": name} for name in names]
    return {"identifiers": identifiers, "next-page-token": page.next_token}


@Route("POST", f"{_NAMESPACE}/views", "createView", body_size=BodySize.MEDIUM, is_idempotent=True).takes(CreateView)
async def create_view(call: Call, body: CreateView) -> web.Response:
    """Create a view."""
    await call.allow_new_name(VIEW, call.namespace, body.name)
    return await _run_once(call, lambda caller: call.components.catalog.views.create(caller, call.namespace, body))


@Route("GET", _VIEW, "loadView")
async def load_view(call: Call) -> web.Response:
    """Return a view with its metadata. The name may be that of a plan view."""
    catalog = call.components.catalog
    if is_plan_name(call.name):
        return make_view_answer(call, await catalog.plan_views.load(call.namespace, call.name, call.audience))
    return make_view_answer(call, await catalog.views.load(call.namespace, call.name))


@Route("POST", _VIEW, "replaceView", body_size=BodySize.MEDIUM, is_idempotent=True).takes(_ReplaceView)
async def replace_view(call: Call, body: _ReplaceView) -> web.Response:
    """Commit changes to a view."""
    views, requirements = call.components.catalog.views, body.requirements or []
    return await _run_once(
        call, lambda caller: views.replace(caller, call.namespace, call.name, requirements, body.updates)
    )


@Route("DELETE", _VIEW, "dropView", is_idempotent=True)
async def drop_view(call: Call) -> web.Response:
    """Drop a view."""
    return await run_idempotent(
        call, lambda caller: call.components.catalog.views.drop(caller, call.namespace, call.name)
    )


@Route("HEAD", _VIEW, "viewExists")
async def view_exists(call: Call) -> None:
    """Answer whether a view exists.

    Raises:
        NoSuchView: The view does not exist.
    """
    if is_plan_name(call.name):
        await call.components.catalog.plan_views.load(call.namespace, call.name, call.audience)
    elif not await call.components.catalog.views.exists(call.namespace, call.name):
        raise NoSuchView(f"View does not exist: {format_path(call.namespace, call.name)}")


@Route("POST", f"{_NAMESPACE}/register-view", "registerView", is_idempotent=True).takes(_RegisterView)
async def register_view(call: Call, body: _RegisterView) -> web.Response:
    """Register a view by its metadata file."""
    await call.allow_new_name(VIEW, call.namespace, body.name)
    views = call.components.catalog.views
    return await _run_once(
        call, lambda caller: views.register(caller, call.namespace, body.name, body.metadata_location)
    )


async def _run_once(call: Call, work: Callable[[Caller], Awaitable[LoadedView]]) -> web.Response:
    """Run `work`, which creates or changes a view, and answer with the view. A repeated request changes nothing."""
    return await run_idempotent(call, work, lambda loaded: make_view_answer(call, loaded), answer_type=LoadedView)
