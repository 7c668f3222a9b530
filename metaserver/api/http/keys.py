"""Typed keys for the values that the middleware adds to a request: `request[PRINCIPAL]`."""

from __future__ import annotations

from aiohttp import web

from seamark.metaserver.access.principal import Principal
from seamark.metaserver.runtime.staleness import Staleness

PRINCIPAL: web.RequestKey[Principal] = web.RequestKey("principal", Principal)
"""The principal of the request. The middleware sets it before each handler, except on public routes."""
STALENESS: web.RequestKey[Staleness] = web.RequestKey("staleness", Staleness)
"""The maximum age of an answer. It is set only for requests that allow stale answers."""
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""The client's X-Request-Id if it is valid, otherwise a UUIDv7.

It is part of the answer, the logs and the audit.
"""
