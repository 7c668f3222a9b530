"""`X-Seamark-Plans`: the header by which an adapter, and the engine's catalog behind it, share plans as snapshots.

The operator chooses the value and gives it to both. A request with the header works with plan snapshots: a plan that it
makes has no name, and loadTable adds the snapshots of that value's plans to its answer. No plan table resolves for such
a request. So a name that a user has seen somewhere leads nowhere in a catalog that carries the header, and the engine
applies its own access rules, which are rules for the table's name.
"""

from __future__ import annotations

import re

from aiohttp import web

from metaserver.api.http.describe import Parameter
from metaserver.errors import BadRequest

HEADER = "X-Seamark-Plans"
_VALUE = re.compile(r"[!-~]{1,100}")
AUDIENCE = Parameter(
    HEADER,
    "header",
    "The audience: a value that the proxy and the engine's catalog share. With it, plans are snapshots of"
    " the table instead of plan tables.",
    {"type": "string", "pattern": "^[!-~]{1,100}$"},
)


def audience_of(request: web.Request) -> str | None:
    """The header's value; None without the header. BadRequest for a value that nobody may choose."""
    given = request.headers.get(HEADER)
    if given is None:
        return None
    if len(request.headers.getall(HEADER)) > 1 or not _VALUE.fullmatch(given):
        raise BadRequest(f"{HEADER} must be given once, with 1 to 100 visible ASCII characters and no spaces")
    return given
