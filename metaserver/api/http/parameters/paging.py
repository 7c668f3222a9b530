"""Paging of Seamark's listings. In contrast to the Iceberg specification, the size of a page is always limited.

The token of a page contains the snapshot and a checksum of the request. So all pages of a listing refer to the same
snapshot, even if there are commits between the requests.
"""

from __future__ import annotations

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import Parameter

_TOKEN_VERSION = 1
_POSITION_MAX = 2**63 - 1
_SIZE_DIGITS_MAX = 9

PAGING = (
    Parameter("pageToken", "query", "The next-page-token of the previous answer.", {"type": "string"}),
    Parameter("pageSize", "query", "The maximum number of items.", {"type": "integer", "minimum": 1}),
)


class _Token(msgspec.Struct, frozen=True, array_like=True):
    """The content of a page token."""

    version: int
    checksum: int
    snapshot_id: int | None
    position: int


def encode_page_token(checksum: int, snapshot_id: int | None, position: int) -> str:
    """Return the token of the next page.

    Args:
        checksum: The CRC-32 of all other values on which the pages depend.
        snapshot_id: The snapshot of the listing.
        position: The position of the next item, from 0.
    """
    payload = msgspec.msgpack.encode(_Token(_TOKEN_VERSION, checksum, snapshot_id, position))
    return to_base64url(payload)


def decode_page_token(text: str, checksum: int, metadata: TableMetadata) -> tuple[int | None, int]:
    """Return the snapshot and the position in a page token.

    Args:
        text: The token.
        checksum: The CRC-32 of all other values on which the pages depend. It must equal the checksum in the token.
        metadata: The metadata of the table.

    Raises:
        BadRequest: The token belongs to a different request, or the snapshot has expired.
    """
    try:
        payload = decode_base64url(text)
        token = convert_msgpack(payload, _Token)
    except (ValueError, msgspec.DecodeError):
        token = None
    if (
        token is None
        or (token.version, token.checksum) != (_TOKEN_VERSION, checksum)
        or not 0 <= token.position <= _POSITION_MAX
    ):
        raise BadRequest("page-token was not issued for this request; start again without it")
    if token.snapshot_id is not None and metadata.snapshot(token.snapshot_id) is None:
        raise BadRequest(
            f"Snapshot {token.snapshot_id}, which page-token refers to, has expired; start again without it"
        )
    return token.snapshot_id, token.position


def parse_page_size(text: str, name: str, maximum: int) -> int:
    """Return a number of at least 1, limited to `maximum`.

    Raises:
        BadRequest: The text is not such a number.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _SIZE_DIGITS_MAX and int(text) > 0):
        raise BadRequest(f"{name} is {text[:40]!r}; it must be a whole number of at least 1")
    return min(int(text), maximum)
