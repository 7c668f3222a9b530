"""All routes of the Iceberg REST specification that are served, except `/v1/oauth/tokens`, which handles logins."""

from __future__ import annotations

from aiohttp import web

from seamark.metaserver.api.plans import planning
from seamark.metaserver.api.rest import config, functions, namespaces, rename, sign, tables, transactions, views


def add_routes(app: web.Application) -> None:
    # aiohttp tries routes with variables in order, so the most frequent routes come first.
    for routes in (planning, tables, config, namespaces, views, functions, rename, transactions, sign):
        routes.add_routes(app)
