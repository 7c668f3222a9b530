"""Pages of our own listings: always bounded, unlike the standard's, which answer everything where nobody pages."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from metaserver.api.describe import Parameter
from metaserver.api.keys import SETTINGS
from metaserver.errors import BadRequest

PAGING = (
    Parameter("pageToken", "query", "As in the last answer's next-page-token.", {"type": "string"}),
    Parameter("pageSize", "query", "Most items answered.", {"type": "integer", "minimum": 1}),
)


def page_schema(items: str, name: str) -> dict[str, Any]:
    """JSON schema of a page whose list is called `items`, of the component `name`."""
    return {
        "type": "object",
        "required": [items, "next-page-token"],
        "properties": {
            items: {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}},
            "next-page-token": {"type": ["string", "null"]},
        },
    }


def page_size(text: str, name: str, most: int) -> int:
    """A count from 1, at most `most`. BadRequest for anything that is no such number."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        raise BadRequest(f"{name} {text[:40]!r} must be a whole number of at least 1")
    return min(int(text), most)


def paging(request: web.Request) -> tuple[str | None, int]:
    """(token as it came, size)."""
    most = request.app[SETTINGS].page_limit
    return request.query.get("pageToken"), page_size(request.query.get("pageSize", str(most)), "pageSize", most)
