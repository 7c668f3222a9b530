"""The paths of Iceberg routes by the templates of the REST specification, and the list of the registered endpoints.

`/v1/{prefix}/…` of the specification is served without a prefix and with the configured one. Other prefixes do not
match: a server has one catalog.
"""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web

from seamark.metaserver.api.http.describe import VARIABLE

PREFIX: web.AppKey[str] = web.AppKey("prefix", str)
"""The segment after `/v1` that the server announces to clients, or empty."""
_PREFIXED = "/v1/{prefix}/"
_UNPREFIXED = ("/v1/config", "/v1/oauth/tokens")


def served_paths(app: web.Application, template: str) -> list[str]:
    if not template.startswith(_PREFIXED):
        return [template]
    prefixes = ["/v1/", _prefixed(app)]
    return [template.replace(_PREFIXED, prefix) for prefix in prefixes if prefix]


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
        path = VARIABLE.sub(lambda match: f"{{{match[1].replace('_', '-')}}}", path)
        template = path if path in _UNPREFIXED else path.replace("/v1/", _PREFIXED, 1)
        served.add(f"{route.method} {template}")
    return sorted(served)


def _prefixed(app: web.Application) -> str | None:
    """`/v1/<prefix>/`; None without a configured prefix."""
    prefix = app.get(PREFIX)
    return f"/v1/{quote(prefix, safe='')}/" if prefix else None
