"""The protocol of replicas, version 1: a request for one immutable file, and the answer. The module does no I/O.

    GET /peers/v1/file
    Seamark-Peer-Location: <location, percent-encoded>
    Seamark-Peer-Ticket: <base64url of key id (8 bytes), expiry in ms (8), nonce (16), HMAC-SHA256 (32)>
    Seamark-Peer-Check: 1   (only after an answer whose content was damaged: compare the digest before it is sent)

    200, Seamark-Peer-Source: cache | storage
    <head: 80 bytes> <content>

The answer's status line and headers are sent at once, and show that the replica is alive. With `storage`,
the replica then reads the file. The numbers in the head are big-endian:

    bytes  0–7   0: the content follows; 1: not in the storage; 2: too large; 3: failed
    bytes  8–15  length of the content
    bytes 16–47  SHA-256 of the content, computed when it was read from the storage
    bytes 48–79  HMAC-SHA256 of bytes 0–47 and the request's HMAC

Both HMACs use a key of the keyring. The request's HMAC covers the address of the receiving replica and
the location, so that a ticket is useless elsewhere. A replica accepts a ticket once (`used_tickets.py`),
so that no request can be repeated. The answer's HMAC covers the nonce, so that no earlier answer can be
repeated. An attacker who can write to the network between replicas can therefore neither read files by
requests nor change answers; TLS also keeps the content secret. The version is part of the path: a replica
of another version answers 404, and the storage is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import struct
from enum import IntEnum
from urllib.parse import quote, unquote

import msgspec

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Unauthenticated
from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.peers.used_tickets import NONCE_BYTES, TicketRecord

VERSION = 1
FILE_PATH = f"/peers/v{VERSION}/file"
LOCATION_HEADER, TICKET_HEADER, SOURCE_HEADER = "Seamark-Peer-Location", "Seamark-Peer-Ticket", "Seamark-Peer-Source"
CHECK_HEADER = "Seamark-Peer-Check"
FROM_CACHE, FROM_STORAGE = "cache", "storage"
TICKET_S = 10.0
"""The time in seconds for which a request is valid, in addition to the allowed clock difference."""
HEAD_BYTES = 80
_PURPOSE = "peer"
_MAC_BYTES = 32
_HEAD = struct.Struct(">QQ32s")
_TICKET = struct.Struct(f">{ID_BYTES}sQ{NONCE_BYTES}s{_MAC_BYTES}s")
_TICKET_CHARS = -(-_TICKET.size // 3) * 4
"""The length of a ticket in base64, which has 4 characters for each 3 bytes."""
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


class Outcome(IntEnum):
    FOUND = 0
    MISSING = 1
    TOO_LARGE = 2
    FAILED = 3


class AnswerHead(msgspec.Struct, frozen=True):
    outcome: Outcome
    length: int
    sha256: bytes


class BadAnswer(Exception):
    """The answer does not come from a replica: it is truncated, changed, or belongs to another request."""


def is_immutable(location: str) -> bool:
    """Return whether no other file can ever have this location, because its name contains a UUID.

    Replicas keep immutable files across restarts, and do not check whether they have changed.
    """
    return _UUID.search(location.rpartition("/")[2]) is not None


class PeerTickets:
    """A signer and verifier of requests and answers with the keyring of all replicas."""

    def __init__(self, keyring: Keyring, clock: Clock, ticket_record: TicketRecord, *, leeway_s: int) -> None:
        """Create the signer of a replica. A ticket authenticates one request to another replica.

        Args:
            keyring: The keyring of all replicas.
            clock: The clock of this replica.
            ticket_record: The tickets that this replica has already accepted.
            leeway_s: The allowed difference between the clocks of two replicas in seconds.
        """
        self._keyring = keyring
        self._clock = clock
        self._ticket_record = ticket_record
        self._leeway_ms = leeway_s * 1000

    def issue(self, address: str, location: str) -> tuple[dict[str, str], bytes]:
        """Return the headers of a request to the replica at `address`, and the id of the key followed by the HMAC.

        The HMAC authenticates the request. The answer must contain a second HMAC that covers it.
        """
        key_id, key = self._keyring.find_signing_key(_PURPOSE)
        expires_ms = self._clock.now_ms() + int(TICKET_S * 1000)
        nonce = self._clock.draw_bytes(NONCE_BYTES)
        mac = _compute_request_mac(key, expires_ms, nonce, address, location)
        ticket = base64.urlsafe_b64encode(_TICKET.pack(key_id, expires_ms, nonce, mac)).decode()
        return {LOCATION_HEADER: quote(location, safe="/:"), TICKET_HEADER: ticket}, key_id + mac

    def verify_request(self, address: str, location: str, ticket: str) -> tuple[str, bytes]:
        """Verify a request to this replica, and record that its ticket is used.

        Args:
            address: The address of this replica.
            location: The header with the requested location.
            ticket: The header with the ticket.

        Returns:
            The decoded location, and the id of the key followed by the HMAC of the request.

        Raises:
            Unauthenticated: The ticket is invalid, has expired, was already accepted, or is older than this replica.
        """
        try:
            if len(ticket) != _TICKET_CHARS:
                raise ValueError
            ticket_bytes = base64.b64decode(ticket.encode("ascii"), altchars=b"-_", validate=True)
            key_id, expires_ms, nonce, mac = _TICKET.unpack(ticket_bytes)
            key = self._keyring.find_verification_key(_PURPOSE, key_id)
            decoded_location = unquote(location, errors="strict")
            if key is None or not hmac.compare_digest(
                mac, _compute_request_mac(key, expires_ms, nonce, address, decoded_location)
            ):
                raise ValueError
        except (binascii.Error, UnicodeError, struct.error, ValueError):
            raise Unauthenticated("The request is not from a replica of this catalog") from None
        now_ms = self._clock.now_ms()
        remaining_ms = expires_ms - now_ms
        if not -self._leeway_ms < remaining_ms <= TICKET_S * 1000 + self._leeway_ms:
            raise Unauthenticated("The request of the replica has expired; compare the clocks of the machines")
        issued_ms, until_ms = expires_ms - int(TICKET_S * 1000), expires_ms + self._leeway_ms
        if not self._ticket_record.accept(nonce, issued_ms, until_ms, now_ms):
            raise Unauthenticated("This request of the replica was sent before, or is older than this replica")
        return decoded_location, key_id + mac

    def seal(self, request_mac: bytes, head: AnswerHead) -> bytes:
        """Return the head of an answer to a request with this HMAC. It has `HEAD_BYTES` bytes."""
        head_bytes = _HEAD.pack(head.outcome, head.length, head.sha256)
        return head_bytes + self._compute_answer_mac(request_mac, head_bytes)

    def unseal(self, request_mac: bytes, data: bytes) -> AnswerHead:
        """Return the head of an answer to this request: the outcome, and the length and hash of the content.

        Raises:
            BadAnswer: The data are not the head of an answer to this request.
        """
        if len(data) != HEAD_BYTES:
            raise BadAnswer(f"the head of the answer has {len(data)} bytes instead of {HEAD_BYTES}")
        head_bytes, mac = data[: _HEAD.size], data[_HEAD.size :]
        if not hmac.compare_digest(mac, self._compute_answer_mac(request_mac, head_bytes)):
            raise BadAnswer("the signature of the answer's head does not match")
        outcome, length, sha256 = _HEAD.unpack(head_bytes)
        try:
            return AnswerHead(Outcome(outcome), length, sha256)
        except ValueError:
            raise BadAnswer(f"the outcome {outcome} of the answer is unknown") from None

    def _compute_answer_mac(self, request_mac: bytes, head_bytes: bytes) -> bytes:
        key = self._keyring.find_verification_key(_PURPOSE, request_mac[:ID_BYTES])
        if key is None:
            raise BadAnswer("the key of the request was retired before the answer")
        return hmac.digest(key, b"answer\x00" + head_bytes + request_mac, hashlib.sha256)


def _compute_request_mac(key: bytes, expires_ms: int, nonce: bytes, address: str, location: str) -> bytes:
    request_text = "\x00".join((f"v{VERSION}", address, location)).encode("utf-8", "surrogatepass")
    return hmac.digest(key, b"request\x00" + struct.pack(">Q", expires_ms) + nonce + request_text, hashlib.sha256)
