"""Plan tasks and plan ids: what a client brings back is the plan itself, signed; the server keeps nothing.

A token says what was asked (snapshot, filter, schema) and, for a plan task, which rows of the view it is to answer.
So any worker and any replica can answer it, after any restart. The rule it keeps: a range of *rows of the view*, not of
files found. The view of a snapshot is the same everywhere, while one plan may keep a file that another, with more time,
could leave out; pages counted in files found would then overlap, or lose files between them.

Layout, before base64: version (1 byte), id of the signing key (8), HMAC-SHA256 cut to 16 bytes (RFC 2104, 5), first row
and end row (8 bytes each, big-endian), deflated msgpack of `PinnedRequest`. The MAC covers the purpose and the table's
UUID, too, which therefore need not be in the token: one for another table, of another purpose, changed or made up is
none of ours. Nothing is unpacked before the MAC fits.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
import zlib

import msgspec

from metaserver.access.keyring import ID_BYTES, Keyring

VERSION = 2
_PURPOSE = "scan-planning"
TOKENS_BYTES_MAX = 1 << 20
"""What all plan tasks of one answer may take together."""
ROWS_MAX = 2**63 - 1
"""End of the last page: whatever is left."""

_MAC_BYTES = 16
_ROWS = struct.Struct(">qq")
_HEAD_BYTES = 1 + ID_BYTES + _MAC_BYTES + _ROWS.size
_TASK, _PLAN = b"plan-task", b"plan-id"


class PinnedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A plan request, with everything pinned that could move before the client comes back."""

    snapshot_id: int | None
    """None for an incremental scan."""
    start_snapshot_id: int | None
    """Exclusive; None for a point in time."""
    end_snapshot_id: int | None
    schema_id: int
    """The table's current schema when the plan was made: a rename since then must not change what names mean."""
    filter: bytes
    """JSON as it was sent; empty for none."""
    case_sensitive: bool
    use_snapshot_schema: bool
    stats_fields: tuple[str, ...]
    residuals: bool = True
    sequence_numbers: bool = False


class PlanTask(msgspec.Struct, frozen=True):
    """Those files of the plan whose row in the view is from `first_row` up to, not including, `end_row`."""

    asked: PinnedRequest
    first_row: int
    end_row: int


class Tokens:
    """Seals and opens. The keyring is shared by all replicas."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def plan_task(self, packed: bytes, first_row: int, end_row: int, table_uuid: str) -> str:
        """`packed` is what `pack` made of the request, once for all pages. URL-safe text."""
        return self._seal(_TASK, _ROWS.pack(first_row, end_row) + packed, table_uuid)

    def plan_id(self, packed: bytes, table_uuid: str) -> str:
        return self._seal(_PLAN, _ROWS.pack(0, ROWS_MAX) + packed, table_uuid)

    def open_plan_task(self, token: str, table_uuid: str) -> PlanTask | None:
        """None for anything that `plan_task` did not make for this table."""
        body = self._open(_TASK, token, table_uuid)
        return None if body is None else PlanTask(_unpack(body[_ROWS.size :]), *_ROWS.unpack_from(body))

    def open_plan_id(self, token: str, table_uuid: str) -> PinnedRequest | None:
        """None for anything that `plan_id` did not make for this table."""
        body = self._open(_PLAN, token, table_uuid)
        return None if body is None else _unpack(body[_ROWS.size :])

    def _seal(self, purpose: bytes, body: bytes, table_uuid: str) -> str:
        key_id, key = self._keyring.signing(_PURPOSE)
        sealed = bytes((VERSION,)) + key_id + _mac(key, purpose, table_uuid, body) + body
        return base64.urlsafe_b64encode(sealed).decode().rstrip("=")

    def _open(self, purpose: bytes, token: str, table_uuid: str) -> bytes | None:
        try:
            raw = base64.b64decode(token.encode() + b"=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        signed = 1 + ID_BYTES
        mac, body = raw[signed : signed + _MAC_BYTES], raw[signed + _MAC_BYTES :]
        key = self._keyring.verifying(_PURPOSE, raw[1:signed])
        if raw[:1] != bytes((VERSION,)) or key is None:
            return None
        return body if hmac.compare_digest(mac, _mac(key, purpose, table_uuid, body)) else None


def _mac(key: bytes, purpose: bytes, table_uuid: str, body: bytes) -> bytes:
    about = b"%d\n%s\n%s\n" % (VERSION, purpose, table_uuid.encode())
    return hmac.digest(key, about + body, hashlib.sha256)[:_MAC_BYTES]


def pack(asked: PinnedRequest) -> bytes:
    """For `Tokens.plan_task` and `plan_id`."""
    return zlib.compress(msgspec.msgpack.encode(asked), 6)


def _unpack(packed: bytes) -> PinnedRequest:
    return msgspec.msgpack.decode(zlib.decompress(packed), type=PinnedRequest)


def page_count(files: int, packed_bytes: int, *, inline_limit: int, page_size: int) -> int:
    """Into how many plan tasks an answer of `files` is cut; 0 means that it is not cut, but answered at once.

    A plan past `inline_limit` has two pages at least, so that a client has something to do in parallel. Each token
    carries the filter: where that is long (an IN list of thousands), pages grow rather than the sum of the tokens.
    """
    if files <= inline_limit:
        return 0
    token_bytes = (_HEAD_BYTES + packed_bytes) * 4 // 3 + 4
    pages = min(max(2, -(-files // page_size)), TOKENS_BYTES_MAX // token_bytes)
    return pages if pages > 1 else 0
