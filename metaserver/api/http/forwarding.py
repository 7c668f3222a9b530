"""Forwards requests to the further warehouses of a server.

The server serves a warehouse at two places. `/v1/{warehouse}/…` has the routes of the Iceberg REST specification: the
name of the warehouse is the prefix that `/v1/config` announces. `/warehouses/{warehouse}/…` has all routes, so a client
of Seamark's own API uses it as the URL of its server.

The middleware forwards such a request before it does anything else, to the application of the warehouse, which has its
own middleware. So no component of the server's own warehouse sees the request.
"""

from __future__ import annotations

from aiohttp import web
from yarl import URL

from seamark.formats.runtime.errors import NoSuchWarehouse, RetryLater
from seamark.metaserver.api.http.components import COMPONENTS, make_warehouse_path
from seamark.metaserver.api.http.describe import Description, attach_description
from seamark.metaserver.api.http.errors import from_seamark_error
from seamark.metaserver.api.http.keys import STALENESS
from seamark.metaserver.warehouses.definitions import NAME_PATTERN, RESERVED_NAMES
from seamark.metaserver.warehouses.warehouses import Warehouses

FORWARDED = Description("", "", "unrouted")
"""The description of the routes of further warehouses."""
_VARIABLE = f"{{warehouse:(?!(?:{'|'.join(sorted(RESERVED_NAMES))})(?:/|$)){NAME_PATTERN}}}"
_MOUNT = "/warehouses/"


async def forward(request: web.Request, warehouses: Warehouses) -> web.StreamResponse | None:
    """Return the answer of the warehouse that the path names, or None if the warehouse does not exist.

    The warehouse gets a path below its mount path without the mount path. A path `/v1/{name}/…` stays unchanged,
    because the name is the prefix of the warehouse in the REST specification.
    """
    name = request.match_info["warehouse"]
    try:
        async with warehouses.use(name) as warehouse:
            if warehouse is None:
                return None
            # The application of the warehouse needs its own request: a request keeps the route that matched it.
            url = request.rel_url
            if url.raw_path.startswith(_MOUNT):
                url = URL(url.raw_path_qs.removeprefix(make_warehouse_path(name)) or "/", encoded=True)
            inner_request = request.clone(rel_url=url)
            response = await warehouse.answer(inner_request)
            if STALENESS in inner_request:
                request[STALENESS] = inner_request[STALENESS]
            return response
    except RetryLater as error:
        return from_seamark_error(error, head=request.method == "HEAD")


async def _refuse_unknown_warehouse(request: web.Request) -> web.StreamResponse:
    """Answer a request for a warehouse that does not exist."""
    raise NoSuchWarehouse(f"Warehouse does not exist: {request.match_info['warehouse']}")


async def _leave_expectation(request: web.Request) -> None:
    """Leave the header `Expect: 100-continue` to the application of the warehouse, which answers it."""


attach_description(_refuse_unknown_warehouse, FORWARDED)


def add_warehouse_routes(app: web.Application) -> None:
    """Register the paths of further warehouses, after all other routes.

    The middleware forwards a request for an existing warehouse before its handler runs. So the handler of these paths
    only refuses requests for warehouses that do not exist.
    """
    if app[COMPONENTS].warehouses is None:
        return
    for path in (f"/v1/{_VARIABLE}/{{tail:.*}}", f"{_MOUNT}{_VARIABLE}/{{tail:(?!/).*}}"):
        # By default, aiohttp answers `Expect: 100-continue` before the middleware runs. Here, the application that gets
        # the forwarded request answers it, so that the client does not receive two answers.
        app.router.add_resource(path).add_route("*", _refuse_unknown_warehouse, expect_handler=_leave_expectation)
