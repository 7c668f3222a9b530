"""Pages of our own listings: always bounded, unlike the standard's, which answer everything where nobody pages.

Tokens of pages of a snapshot say which snapshot and which question they are of, so that a listing goes on with what it
began with, whatever is committed meanwhile, and no answer is put together of two.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from aiohttp import web

from metaserver.api.http.describe import Parameter
from metaserver.api.http.keys import SETTINGS
from metaserver.errors import BadRequest
from metaserver.iceberg.metadata.metadata import TableMetadata

_TOKEN_VERSION = 1
_PLACE_MAX = 2**63 - 1

PAGING = (
    Parameter("pageToken", "query", "The next-page-token of the previous answer.", {"type": "string"}),
    Parameter("pageSize", "query", "Maximum number of items.", {"type": "integer", "minimum": 1}),
)


class _Token(msgspec.Struct, frozen=True, array_like=True):
    version: int
    question: int
    snapshot_id: int | None
    place: int


def write_token(question: int, snapshot_id: int | None, place: int) -> str:
    """`question`: CRC-32 of all else that the pages depend on; `place` is where the next one goes on, from 0."""
    packed = msgspec.msgpack.encode(_Token(_TOKEN_VERSION, question, snapshot_id, place))
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def read_token(text: str, question: int, metadata: TableMetadata) -> tuple[int | None, int]:
    """(snapshot, place). BadRequest unless it was given out for this question, and while the snapshot is there."""
    try:
        packed = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        token = msgspec.msgpack.decode(packed, type=_Token)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        token = None
    if (
        token is None
        or (token.version, token.question) != (_TOKEN_VERSION, question)
        or not 0 <= token.place <= _PLACE_MAX
    ):
        raise BadRequest("page-token is not one that was given out for this question; start again without it")
    if token.snapshot_id is not None and metadata.snapshot(token.snapshot_id) is None:
        raise BadRequest(
            f"Snapshot {token.snapshot_id}, which page-token is about, has expired; start again without it"
        )
    return token.snapshot_id, token.place


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
