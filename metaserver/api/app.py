"""Builds the web application from opened parts; it does not manage their lifecycle."""

from __future__ import annotations

from aiohttp import web

from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.api import openapi
from seamark.metaserver.api.admin import (
    admin,
    health,
    oauth,
    replicas,
    table_services,
    ttl_advice,
)
from seamark.metaserver.api.admin.readiness import Readiness
from seamark.metaserver.api.commits import (
    commits,
    dropped,
    maintenance,
    rewrite_lease,
    timeline,
)
from seamark.metaserver.api.console import console
from seamark.metaserver.api.http import idempotency, keys
from seamark.metaserver.api.http.components import ServerParts
from seamark.metaserver.api.http.dispatch import Router, add_endpoints
from seamark.metaserver.api.http.middleware import add_age, build_middleware
from seamark.metaserver.api.http.observability import metrics
from seamark.metaserver.api.http.slots import WorkerLimits
from seamark.metaserver.api.indexes import builds, index_audit, index_state, index_unregistered, indexes
from seamark.metaserver.api.lookups import bitmaps, layout, lookups, metadata
from seamark.metaserver.api.plans import explain, plan_leases, plan_tables, plan_views, planning
from seamark.metaserver.api.rest import config, functions, namespaces, rename, sign, tables, transactions, views
from seamark.metaserver.api.sql import statements
from seamark.metaserver.catalog.quotas import Quota
from seamark.metaserver.runtime.extensions import Extensions


def build_app(parts: ServerParts, certificate: Certificate | None = None) -> web.Application:
    """The application with all routes. It may be started and stopped once, like aiohttp's applications.
    `certificate`: that with which it is served."""
    settings = parts.settings
    bounds = WorkerLimits(
        requests=settings.requests_limit, watchers=settings.watchers_limit, body_bytes=settings.bodies_memory_bytes
    )
    app = web.Application(middlewares=[build_middleware(parts, bounds)])
    app._router = Router()  # aiohttp deprecates the argument for it
    if settings.stale_limit_s:
        app.on_response_prepare.append(add_age)
    app[keys.BOUNDS] = bounds
    app[idempotency.KEPT] = Quota(idempotency.KEPT_MAX)
    app[keys.SETTINGS] = settings
    app[health.READINESS] = Readiness(settings, parts.store, parts.clock)
    app[keys.CLOCK] = parts.clock
    app[keys.STORE] = parts.store
    app[keys.OBJECTS] = parts.objects
    app[keys.CATALOG] = parts.catalog
    app[keys.TIMELINE] = parts.timeline
    app[keys.PLANNER] = parts.planner
    app[keys.STOCK_COMMITS] = parts.stock_commits
    app[keys.COMMITS] = parts.commits
    app[keys.EXPIRATION] = parts.expiration
    app[keys.ORPHAN_REMOVAL] = parts.orphan_removal
    app[keys.MANIFEST_REWRITE] = parts.manifest_rewrite
    app[keys.REGISTRY] = parts.registry
    app[keys.INDEXES] = parts.indexes
    app[keys.USAGE] = parts.usage
    app[metrics.METRICS] = parts.metrics
    app[keys.AUTHENTICATOR] = parts.authenticator
    app[keys.AUTHORIZER] = parts.authorizer
    app[keys.KEYRING] = parts.keyring
    app[keys.GATEWAY_KEYS] = parts.gateway_keys
    app[keys.PAGES] = parts.catalog.pages
    app[keys.AUDIT] = parts.audit
    app[keys.DRAIN] = parts.drain
    app[table_services.STATUS] = parts.services_status
    if certificate is not None:
        app[keys.CERTIFICATE] = certificate
    add_routes(app, parts.extensions)
    return app


def add_routes(app: web.Application, extensions: Extensions) -> None:
    """Register all routes. Of the components they need only the settings."""
    app[keys.EXTENSIONS] = extensions
    for module in (planning, tables, config, metadata, index_state, lookups, plan_tables, statements, openapi):
        module.add_parts(app)
    # aiohttp tries routes with variables in order, so the most frequent routes of the specification come first.
    iceberg = (planning, tables, config, namespaces, views, functions, rename, transactions, sign)
    own = (
        timeline,
        metadata,
        layout,
        explain,
        commits,
        maintenance,
        rewrite_lease,
        indexes,
        builds,
        lookups,
        bitmaps,
        plan_tables,
        plan_leases,
        plan_views,
        index_audit,
        index_unregistered,
        dropped,
        admin,
        replicas,
        table_services,
        statements,
        ttl_advice,
    )
    add_endpoints(app, health, metrics, oauth, console, *iceberg, *own, *extensions.routes, openapi)
