"""Construction of the web application from opened components. The module neither opens nor closes components."""

from __future__ import annotations

from aiohttp import web

from seamark.metaserver.api import openapi
from seamark.metaserver.api.admin import (
    admin,
    advice,
    advice_application,
    auto_advice,
    declarations,
    declared_entries,
    health,
    imports,
    metrics,
    oauth,
    query_history,
    replicas,
    table_services,
    ttl_advice,
    warehouses,
)
from seamark.metaserver.api.commits import (
    commits,
    dropped,
    maintenance,
    rewrite_lease,
    timeline,
)
from seamark.metaserver.api.console import console
from seamark.metaserver.api.http import idempotency
from seamark.metaserver.api.http.components import COMPONENTS, ServerComponents
from seamark.metaserver.api.http.dispatch import PREFIX, Router, add_endpoints
from seamark.metaserver.api.http.forwarding import add_warehouse_routes
from seamark.metaserver.api.http.middleware import add_age, build_middleware
from seamark.metaserver.api.indexes import builds, index_audit, index_state, index_unregistered, indexes
from seamark.metaserver.api.lookups import bitmaps, cube_groups, layout, lookups, metadata
from seamark.metaserver.api.plans import cube_plans, explain, plan_leases, plan_tables, plan_views, planning
from seamark.metaserver.api.rest import config, events, functions, namespaces, rename, sign, tables, transactions, views
from seamark.metaserver.api.sql import aggregates, statements
from seamark.metaserver.api.streams import gets, listing, pausing, reads, rows, several_tables, topics
from seamark.metaserver.runtime.extensions import Extensions

_WITH_COMPONENTS = (
    health,
    idempotency,
    planning,
    tables,
    config,
    metadata,
    index_state,
    lookups,
    plan_tables,
    statements,
    aggregates,
    openapi,
)
"""The modules of routes that add components to the application."""


def build_app(components: ServerComponents) -> web.Application:
    """Build the application with all routes.

    Like each application of aiohttp, it may be started and stopped only once.
    """
    app = web.Application(middlewares=[build_middleware(components)])
    app._router = Router()  # The argument `router` of aiohttp is deprecated.
    if components.settings.stale_limit_s:
        app.on_response_prepare.append(add_age)
    app[COMPONENTS] = components
    for module in _WITH_COMPONENTS:
        module.add_components(app)
    add_routes(app, components.extensions, components.settings.prefix)
    add_warehouse_routes(app)
    return app


def add_routes(app: web.Application, extensions: Extensions, prefix: str = "") -> None:
    """Register all routes. No route needs a component before the first request.

    Args:
        app: The application.
        extensions: The extensions, which may have further modules of routes.
        prefix: The segment after `/v1` that the server announces to clients, or an empty text.
    """
    app[PREFIX] = prefix
    # aiohttp tries routes with variables in order, so the most frequent routes of the specification come first.
    iceberg_endpoints = (planning, tables, config, namespaces, views, functions, rename, transactions, sign, events)
    seamark_endpoints = (
        timeline,
        metadata,
        layout,
        explain,
        commits,
        gets,
        reads,
        pausing,
        rows,
        listing,
        several_tables,
        topics,
        maintenance,
        rewrite_lease,
        indexes,
        builds,
        lookups,
        bitmaps,
        cube_groups,
        cube_plans,
        plan_tables,
        plan_leases,
        plan_views,
        index_audit,
        index_unregistered,
        dropped,
        admin,
        advice,
        advice_application,
        auto_advice,
        replicas,
        table_services,
        declarations,
        declared_entries,
        imports,
        statements,
        query_history,
        aggregates,
        ttl_advice,
        warehouses,
    )
    add_endpoints(
        app, health, metrics, oauth, console, *iceberg_endpoints, *seamark_endpoints, *extensions.routes, openapi
    )
