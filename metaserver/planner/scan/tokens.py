"""Plan tasks and plan ids: stateless, signed tokens that contain the plan request.

A token contains the request (snapshot, filter, schema) and, for a plan task, a range of entry ids. So any worker or
replica can serve the token, even after a restart. The range counts *entries of the view*, not files of the plan: a
view is the same on every replica, but a plan with less time may keep a file that a plan with more time leaves out. If
pages counted kept files, they could overlap or miss files.

Layout, before base64: version (1 byte), id of the signing key (8), HMAC-SHA256 truncated to 16 bytes (RFC 2104, section
5), first row and end row (8 bytes each, big-endian), deflated msgpack of `PinnedRequest`. The MAC also covers the
purpose and the table's UUID, which are not part of the token. So a modified token, or a token for a different table or
purpose, is invalid. Nothing is unpacked before the MAC is verified.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
import zlib

import msgspec

from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.planner.scan.request import PinnedRequest

VERSION = 3
_PURPOSE = "scan-planning"
TOKENS_BYTES_MAX = 1 << 20
"""The maximum total size of the plan tasks of one answer."""
ROWS_MAX = 2**63 - 1
"""The end of the last page, which includes all remaining rows."""

_MAC_BYTES = 16
_ROWS = struct.Struct(">qq")
_HEAD_BYTES = 1 + ID_BYTES + _MAC_BYTES + _ROWS.size
_TASK, _PLAN = b"plan-task", b"plan-id"


class PlanTask(msgspec.Struct, frozen=True):
    """A part of a plan: the files in a range of entry ids, which number the manifest entries of a snapshot.

    Attributes:
        request: The plan request.
        first_row: The first entry id of the range.
        end_row: The entry id after the last entry id of the range.
    """

    request: PinnedRequest
    first_row: int
    end_row: int


class Tokens:
    """Signs and verifies tokens.

    All replicas share the keyring.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def sign_plan_task(self, packed_request: bytes, first_row: int, end_row: int, table_uuid: str) -> str:
        """Return a signed token of a plan task as URL-safe text.

        Args:
            packed_request: The result of `pack_request`, which is the same for all tasks of a plan.
            first_row: The first entry id of the task.
            end_row: The entry id after the last entry id of the task.
            table_uuid: The UUID of the table. The token is valid only for this table.
        """
        return self._sign_token(_TASK, _ROWS.pack(first_row, end_row) + packed_request, table_uuid)

    def sign_plan_id(self, packed_request: bytes, table_uuid: str) -> str:
        """Return a signed plan id as URL-safe text.

        A plan id has the form of a plan task whose range covers all entry ids of the snapshot.

        Args:
            packed_request: The result of `pack_request`.
            table_uuid: The UUID of the table. The id is valid only for this table.
        """
        return self._sign_token(_PLAN, _ROWS.pack(0, ROWS_MAX) + packed_request, table_uuid)

    def open_plan_task(self, token: str, table_uuid: str) -> PlanTask | None:
        """Verify a token, and return its plan task.

        The result is None if `sign_plan_task` did not make the token, or made it for another table.
        """
        body = self._open_token(_TASK, token, table_uuid)
        return None if body is None else PlanTask(_unpack_request(body[_ROWS.size :]), *_ROWS.unpack_from(body))

    def open_plan_id(self, token: str, table_uuid: str) -> PinnedRequest | None:
        """Verify a plan id, and return its request.

        The result is None if `sign_plan_id` did not make the id, or made it for another table.
        """
        body = self._open_token(_PLAN, token, table_uuid)
        return None if body is None else _unpack_request(body[_ROWS.size :])

    def _sign_token(self, purpose: bytes, body: bytes, table_uuid: str) -> str:
        """Return the token with this body, signed for a purpose and a table.

        It consists of the version, the id of the key, the signature and the body. The purpose, a plan task or a plan
        id, is part of the signature, so that a plan task is not accepted as a plan id.
        """
        key_id, key = self._keyring.find_signing_key(_PURPOSE)
        return to_base64url(bytes((VERSION,)) + key_id + _compute_mac(key, purpose, table_uuid, body) + body)

    def _open_token(self, purpose: bytes, token: str, table_uuid: str) -> bytes | None:
        """Return the body of a token, or None if the token is not valid for this purpose and table."""
        try:
            raw = decode_base64url(token)
        except ValueError:
            return None
        mac_start = 1 + ID_BYTES  # The version has one byte.
        mac, body = raw[mac_start : mac_start + _MAC_BYTES], raw[mac_start + _MAC_BYTES :]
        key = self._keyring.find_verification_key(_PURPOSE, raw[1:mac_start])
        if raw[:1] != bytes((VERSION,)) or key is None:
            return None
        return body if hmac.compare_digest(mac, _compute_mac(key, purpose, table_uuid, body)) else None


def _compute_mac(key: bytes, purpose: bytes, table_uuid: str, body: bytes) -> bytes:
    description = b"%d\n%s\n%s\n" % (VERSION, purpose, table_uuid.encode())
    return hmac.digest(key, description + body, hashlib.sha256)[:_MAC_BYTES]


def pack_request(request: PinnedRequest) -> bytes:
    """Encode and compress a request that tokens contain. A filter may be long, and each token contains it."""
    return zlib.compress(msgspec.msgpack.encode(request))


def _unpack_request(packed_request: bytes) -> PinnedRequest:
    return convert_msgpack(zlib.decompress(packed_request), PinnedRequest)


def count_plan_tasks(files: int, packed_bytes: int, *, inline_limit: int, page_size: int) -> int:
    """Return the number of plan tasks for a plan of `files` files, or 0 if the answer contains all files itself.

    A plan with more files than `inline_limit` has at least two tasks, so that a client can fetch them in parallel. The
    token of each task contains the filter. If the filter is long (an IN list of thousands of values), there are fewer
    and larger tasks, so that the tokens have at most `TOKENS_BYTES_MAX` bytes in total. If this limit permits only one
    task or none, the result is 0.

    Args:
        files: The number of files of the plan.
        packed_bytes: The size of the packed request, which each token contains.
        inline_limit: The maximum number of files in an answer without plan tasks.
        page_size: The number of files that each task should have.
    """
    if files <= inline_limit:
        return 0
    token_bytes = (_HEAD_BYTES + packed_bytes) * 4 // 3 + 4  # base64 encodes three bytes as four characters.
    tasks = min(max(2, math.ceil(files / page_size)), TOKENS_BYTES_MAX // token_bytes)
    return tasks if tasks > 1 else 0
