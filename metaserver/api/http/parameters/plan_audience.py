"""The header `X-Seamark-Plans`, which makes plans visible as snapshots to an adapter and the engine's catalog.

The operator chooses the value of the header, and configures it in the adapter and in the catalog. Requests with the
header use plan snapshots instead of plan tables: a plan that they create has no name, and loadTable adds the snapshots
of the plans with the same value to its answer. For these requests, the name of a plan table does not resolve. So a user
of the catalog cannot use the name of a plan, and the engine's access rules for the table apply.
"""

from __future__ import annotations

import re

from aiohttp import web

from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import Parameter

HEADER = "X-Seamark-Plans"
_VALUE = re.compile(r"[!-~]{1,100}")
AUDIENCE = Parameter(
    HEADER,
    "header",
    "The audience: a value that the proxy and the engine's catalog share. With this header, plans are snapshots of the"
    " table instead of plan tables.",
    {"type": "string", "pattern": "^[!-~]{1,100}$"},
)


def read_audience(request: web.Request) -> str | None:
    """Return the value of the header that names the audience of plans, or None if the request has no such header.

    The audience of a plan is the group of clients that see it: the clients that send the same value.

    Raises:
        BadRequest: The value is invalid.
    """
    audience = request.headers.get(HEADER)
    if audience is None:
        return None
    if len(request.headers.getall(HEADER)) > 1 or not _VALUE.fullmatch(audience):
        raise BadRequest(f"{HEADER} must occur once, with 1 to 100 visible ASCII characters and no spaces")
    return audience
