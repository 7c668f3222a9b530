"""Registers Iceberg routes by the path templates of the REST specification, and lists the registered endpoints.

`/v1/{prefix}/…` of the specification is served without a prefix and with the configured one. Other prefixes do not
match: a server has one catalog.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from aiohttp import web

from seamark.metaserver.api.http.describe import Handler
from seamark.metaserver.api.http.keys import SETTINGS

_PREFIXED = "/v1/{prefix}/"
_VARIABLE = re.compile(r"\{([\w-]+)\}")
_UNPREFIXED = ("/v1/config", "/v1/oauth/tokens")


def add_operations(app: web.Application, template: str, handlers: Mapping[str, Handler]) -> None:
    """Registers `handlers`, by HTTP method, for a path template of the specification."""
    paths = [template.replace(_PREFIXED, "/v1/")]
    prefixed = _prefixed(app)
    if prefixed and template.startswith(_PREFIXED):
        paths.append(template.replace(_PREFIXED, prefixed))
    for path in paths:
        # aiohttp's default pattern for a variable excludes braces, which names may contain; variables have no hyphens.
        resource = app.router.add_resource(_VARIABLE.sub(lambda match: f"{{{match[1].replace('-', '_')}:[^/]+}}", path))
        for method, handler in handlers.items():
            resource.add_route(method, handler)


def served_endpoints(app: web.Application) -> list[str]:
    """All registered Iceberg operations as `METHOD template` of the specification, sorted."""
    skipped = _prefixed(app)
    served = set()
    for route in app.router.routes():
        if route.resource is None:
            continue
        path = route.resource.canonical
        if not path.startswith("/v1/") or (skipped and path.startswith(skipped)):
            continue
        path = _VARIABLE.sub(lambda match: f"{{{match[1].replace('_', '-')}}}", path)
        template = path if path in _UNPREFIXED else path.replace("/v1/", _PREFIXED, 1)
        served.add(f"{route.method} {template}")
    return sorted(served)


def _prefixed(app: web.Application) -> str | None:
    """`/v1/<prefix>/`; None without a configured prefix."""
    prefix = app[SETTINGS].prefix
    return f"/v1/{quote(prefix, safe='')}/" if prefix else None
