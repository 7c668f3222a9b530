"""Registers Iceberg routes under their templates of the REST specification, and tells which of them are served.

`/v1/{prefix}/…` of the specification is served without a prefix, and also under the configured one. Nothing else
matches `{prefix}`: a server has one catalog.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from aiohttp import web

from metaserver.api.http.describe import Handler
from metaserver.api.http.keys import SETTINGS

_PREFIXED = "/v1/{prefix}/"
_VARIABLE = re.compile(r"\{([\w-]+)\}")
_UNPREFIXED = ("/v1/config", "/v1/oauth/tokens")


def add_operations(app: web.Application, template: str, handlers: Mapping[str, Handler]) -> None:
    """`handlers` by HTTP method, under `template` as the specification spells it."""
    paths = [template.replace(_PREFIXED, "/v1/")]
    prefixed = _prefixed(app)
    if prefixed and template.startswith(_PREFIXED):
        paths.append(template.replace(_PREFIXED, prefixed))
    for path in paths:
        # aiohttp's own pattern for a variable leaves out braces, which names may hold; its variables have no hyphens.
        resource = app.router.add_resource(_VARIABLE.sub(lambda found: f"{{{found[1].replace('-', '_')}:[^/]+}}", path))
        for method, handler in handlers.items():
            resource.add_route(method, handler)


def served_endpoints(app: web.Application) -> list[str]:
    """Every Iceberg operation that `app` routes, as `METHOD template` of the specification, sorted."""
    skipped = _prefixed(app)
    served = set()
    for route in app.router.routes():
        if route.resource is None:
            continue
        path = route.resource.canonical
        if not path.startswith("/v1/") or (skipped and path.startswith(skipped)):
            continue
        path = _VARIABLE.sub(lambda found: f"{{{found[1].replace('_', '-')}}}", path)
        template = path if path in _UNPREFIXED else path.replace("/v1/", _PREFIXED, 1)
        served.add(f"{route.method} {template}")
    return sorted(served)


def _prefixed(app: web.Application) -> str | None:
    """`/v1/<prefix>/`, None where the server has no prefix."""
    prefix = app[SETTINGS].prefix
    return f"/v1/{quote(prefix, safe='')}/" if prefix else None
