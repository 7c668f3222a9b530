"""Builds the web application from parts that somebody else opened; knows no lifecycle."""

from __future__ import annotations

from aiohttp import web

from metaserver.api import (
    admin,
    bitmaps,
    builds,
    commits,
    dropped,
    explain,
    functions,
    health,
    idempotency,
    index_audit,
    index_unheld,
    indexes,
    keys,
    lookups,
    metadata,
    metrics,
    oauth,
    openapi,
    plan_leases,
    plan_tables,
    plan_views,
    rest,
    timeline,
)
from metaserver.api.middleware import build_middleware
from metaserver.api.parts import Parts
from metaserver.api.readiness import Readiness
from metaserver.api.slots import Bounds
from metaserver.catalog.quotas import Quota


def build_app(parts: Parts) -> web.Application:
    """All routes over `parts`. The application may be started and stopped once, as aiohttp's are."""
    settings = parts.settings
    bounds = Bounds(
        requests=settings.requests_limit, watchers=settings.watchers_limit, body_bytes=settings.bodies_memory_bytes
    )
    app = web.Application(middlewares=[build_middleware(parts, bounds)])
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
    app[keys.COMMITS] = parts.commits
    app[keys.REGISTRY] = parts.registry
    app[keys.INDEXES] = parts.indexes
    app[keys.USAGE] = parts.usage
    app[metrics.METRICS] = parts.metrics
    app[keys.AUTHENTICATOR] = parts.authenticator
    app[keys.AUTHORIZER] = parts.authorizer
    app[keys.KEYRING] = parts.keyring
    app[keys.PAGES] = parts.catalog.pages
    app[keys.AUDIT] = parts.audit
    app[keys.DRAIN] = parts.drain
    add_routes(app)
    return app


def add_routes(app: web.Application) -> None:
    """All routes; the document that describes them last. Needs no parts but the settings."""
    own = (
        timeline,
        metadata,
        explain,
        commits,
        indexes,
        builds,
        lookups,
        bitmaps,
        plan_tables,
        plan_leases,
        plan_views,
        index_audit,
        index_unheld,
        dropped,
        admin,
    )
    for routes in (health, metrics, oauth, rest, *own):
        routes.add_routes(app)
    functions.add_own_routes(app)
    openapi.add_routes(app)
