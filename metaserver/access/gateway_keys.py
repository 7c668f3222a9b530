"""S3 keys that the catalog vends for one table: an access key, its secret, and a session token.

The token contains the grant (table, location, rights, expiry), and an HMAC of the grant by a key of the keyring.
The access key and the secret are also HMACs of the grant. So nothing is stored, every replica can verify the keys that
another replica issued, and a client cannot change its grant. The layout of a token before base64 is: key id (8 bytes),
grant (msgpack), HMAC (32 bytes).

Keys of a further warehouse are verified by the keyring of this warehouse. Their token begins with the id of the
warehouse and a dot, so that the gateway finds the keyring, and the HMACs cover the id.

The expiry of a grant is rounded to a multiple of half the lifetime, so keys are valid for at least half of the
lifetime. Within this time, all answers contain equal keys, so that a client may reuse its first answer (HTTP 304).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

import msgspec

from seamark.cache.memory import MemoryCache
from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.objects.credentials import VendedKeys

TOKEN_CHARS_MAX = 12_288
"""The maximum number of characters of a token. Longer tokens are refused without decoding them."""
_PURPOSE = "gateway-keys"
_MAC_BYTES = 32
_ACCESS_KEY_BYTES = 10
"""The number of bytes of the HMAC in an access key id, which are 16 characters in base32."""
_CACHE_BYTES = 4 << 20
_WAREHOUSE = re.compile(r"([0-9a-f]{32})\.")


class ObjectGrant(msgspec.Struct, frozen=True, array_like=True):
    """The right to read, or also write, the objects below `location` until `expires_ms`."""

    table_uuid: str
    location: str
    writable: bool
    principal_name: str
    """The principal to which the keys were issued.

    The gateway checks the principal's login and rights again while the keys are in use. Objects that the keys read
    count towards the principal's share of the cache.
    """
    expires_ms: int
    pinned: bool = False
    """Whether the gateway pins the table's objects in its cache."""
    staged: bool = False
    """Whether the table had no name when the keys were issued."""
    namespace: tuple[str, ...] = ()
    """The namespace on which the principal had rights, which is empty in keys of earlier versions."""


class GatewayKeys:
    """Issues and verifies the keys of one warehouse.

    Args:
        keyring: The signing keys of the warehouse.
        clock: The clock.
        lifetime_s: The longest lifetime of keys.
        warehouse_id: The id of a further warehouse, or an empty text for the server's own warehouse.
    """

    def __init__(self, keyring: Keyring, clock: Clock, *, lifetime_s: int, warehouse_id: str = "") -> None:
        self._keyring = keyring
        self._prefix = f"{warehouse_id}." if warehouse_id else ""
        self._clock = clock
        self._lifetime_ms = lifetime_s * 1000
        self._grants_by_token: MemoryCache[tuple[str, str], tuple[ObjectGrant, str]] = MemoryCache(
            _CACHE_BYTES, "gateway-keys"
        )
        """A cache of verified tokens with their access keys, because clients use the same keys for many requests."""

    def issue(
        self,
        table_uuid: str,
        location: str,
        *,
        writable: bool,
        principal_name: str,
        pinned: bool = False,
        staged: bool = False,
        namespace: tuple[str, ...] = (),
    ) -> VendedKeys:
        """Return keys with which a client can read, or also write, the files of a table through the gateway.

        The session token contains the grant and a signature, so the server stores nothing.

        Args:
            table_uuid: The UUID of the table.
            location: The location of the table. The keys are valid for the objects below it.
            writable: Whether the client may also write files.
            principal_name: The principal that receives the keys.
            pinned: Whether the gateway pins the table's objects in its cache.
            staged: Whether the table has no name yet.
            namespace: The namespace on which the principal has rights.
        """
        grant = ObjectGrant(
            table_uuid, location, writable, principal_name, self._get_expiry_ms(), pinned, staged, namespace
        )
        key_id, key = self._keyring.find_signing_key(_PURPOSE)
        payload = key_id + msgspec.msgpack.encode(grant)
        token = payload + self._compute_mac(key, b"token", payload)
        access_key, secret = self._derive_key_pair(key, payload)
        return VendedKeys(access_key, secret, f"{self._prefix}{to_base64url(token)}", grant.expires_ms)

    def stamp(self) -> str:
        """Return a text that identifies the expiry and the signing key of keys that are issued now.

        While the text stays the same, `issue` returns equal keys for equal grants.
        """
        return f"{self._get_expiry_ms()}-{self._keyring.find_signing_key(_PURPOSE)[0].hex()}"

    def verify(self, token: str, access_key_id: str) -> tuple[ObjectGrant, str]:
        """Verify a token, and return its grant and the secret of its access key. Cache both for later requests.

        Raises:
            Forbidden: The catalog did not issue the token, it has expired, or it belongs to a different access key.
        """
        grant_and_secret = self._grants_by_token.get((token, access_key_id))
        if grant_and_secret is None:
            grant_and_secret = self._verify(token, access_key_id)
            # The decoded grant takes about as much memory as the token, which is the key of the cache.
            self._grants_by_token.put((token, access_key_id), grant_and_secret, 2 * len(token))
        grant, _ = grant_and_secret
        if grant.expires_ms <= self._clock.now_ms():
            raise ExpiredGrant("The keys have expired; load the table again")
        return grant_and_secret

    def _verify(self, token: str, access_key_id: str) -> tuple[ObjectGrant, str]:
        """Check the signature of a token and its access key, without the cache. The expiry is not checked.

        Raises:
            Forbidden: The catalog did not issue the token, or it belongs to a different access key.
        """
        try:
            if len(token) > TOKEN_CHARS_MAX:
                raise ValueError
            if not token.startswith(self._prefix):
                raise ValueError
            raw = decode_base64url(token.removeprefix(self._prefix))
            payload, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
            key = self._keyring.find_verification_key(_PURPOSE, payload[:ID_BYTES])
            if key is None or not hmac.compare_digest(mac, self._compute_mac(key, b"token", payload)):
                raise ValueError
            grant = convert_msgpack(payload[ID_BYTES:], ObjectGrant)
        except (ValueError, msgspec.MsgspecError):
            raise Forbidden("The session token was not issued by this catalog; load the table again") from None
        expected_access_key_id, secret = self._derive_key_pair(key, payload)
        if not hmac.compare_digest(expected_access_key_id.encode(), access_key_id.encode("utf-8", "surrogatepass")):
            raise Forbidden("The session token belongs to a different access key; use both from one answer")
        return grant, secret

    def _get_expiry_ms(self) -> int:
        half_lifetime_ms = max(1, self._lifetime_ms // 2)
        return (self._clock.now_ms() // half_lifetime_ms + 2) * half_lifetime_ms

    def _derive_key_pair(self, key: bytes, payload: bytes) -> tuple[str, str]:
        """Return the access key id, which has 20 characters, and the secret."""
        access_key_suffix = base64.b32encode(
            self._compute_mac(key, b"access key", payload)[:_ACCESS_KEY_BYTES]
        ).decode()
        secret = to_base64url(self._compute_mac(key, b"secret", payload))
        return f"SMKA{access_key_suffix}", secret

    def _compute_mac(self, key: bytes, key_purpose: bytes, payload: bytes) -> bytes:
        return hmac.digest(key, b"".join((self._prefix.encode(), key_purpose, b"\x00", payload)), hashlib.sha256)


class ExpiredGrant(Forbidden):
    """Raised if keys have expired. The client must load the table again."""

    kind = "expired_grant"


def find_warehouse_id(token: str) -> str:
    """Return the id of the further warehouse in a token, or an empty text for the server's own warehouse.

    The token is not verified.
    """
    matched = _WAREHOUSE.match(token)
    return "" if matched is None else matched[1]
