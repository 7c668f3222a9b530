"""Builds the web application from parts that somebody else opened; knows no lifecycle."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.trace import Tracer

from metaserver.api import dropped, health, keys, metrics, openapi, rest, timeline
from metaserver.api.metrics import Metrics
from metaserver.api.middleware import build_middleware
from metaserver.catalog.catalog import Catalog
from metaserver.clock import Clock
from metaserver.objects.port import ObjectStore
from metaserver.settings import Settings
from metaserver.store.port import PointerStore
from metaserver.timeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the routes use, opened by the composition root and closed after the application."""

    settings: Settings
    clock: Clock
    store: PointerStore
    objects: ObjectStore
    catalog: Catalog
    timeline: Timeline
    metrics: Metrics
    tracer: Tracer | None
    """None where no traces are wanted."""
    drain: asyncio.Event
    """Set when the server stops: readiness fails, long-polls answer, connections are not kept."""


def build_app(parts: Parts) -> web.Application:
    """All routes over `parts`. The application may be started and stopped once, as aiohttp's are."""
    middleware = build_middleware(parts.settings, parts.clock, parts.metrics, parts.tracer)
    app = web.Application(middlewares=[middleware], client_max_size=parts.settings.body_limit_bytes)
    app[keys.SETTINGS] = parts.settings
    app[keys.CLOCK] = parts.clock
    app[keys.STORE] = parts.store
    app[keys.OBJECTS] = parts.objects
    app[keys.CATALOG] = parts.catalog
    app[keys.TIMELINE] = parts.timeline
    app[keys.METRICS] = parts.metrics
    app[keys.DRAIN] = parts.drain
    add_routes(app)
    return app


def add_routes(app: web.Application) -> None:
    """All routes; the document that describes them last. Needs no parts, so that the document can be built without."""
    for routes in (health, metrics, rest, timeline, dropped, openapi):
        routes.add_routes(app)
