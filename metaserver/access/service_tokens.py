"""Service tokens: the server's own logins for the processes that run its table services.

A token is valid for one namespace and a short time, on every replica, whatever `auth` is. It is signed with a key of
the keyring, so nothing of it is stored. Layout, after the prefix and in base64: key id (8 bytes), MessagePack of the
namespace and the expiry, HMAC-SHA256 of both (32 bytes).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

import msgspec

from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.access.principal import Principal, Role
from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import Unauthenticated
from seamark.metaserver.store.model import Grant, NamespacePath

PREFIX = "sms_"
PRINCIPAL = "service:seamark"
"""No token and no OIDC subject can have this name, so no grant of an operator belongs to it."""
_PURPOSE = "service-token"
_MAC_BYTES = 32


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    namespace: NamespacePath
    expires_ms: int


class ServiceTokens:
    """Issues and verifies service tokens."""

    def __init__(self, keyring: Keyring, clock: Clock) -> None:
        self._keyring = keyring
        self._clock = clock

    def issue(self, namespace: NamespacePath, ttl_s: float) -> str:
        """A login with the role writer in `namespace`."""
        key_id, key = self._keyring.signing(_PURPOSE)
        claims = _Claims(namespace, self._clock.now_ms() + int(ttl_s * 1000))
        signed = key_id + msgspec.msgpack.encode(claims)
        return PREFIX + base64.urlsafe_b64encode(signed + _mac(key, signed)).decode().rstrip("=")

    def principal(self, token: str) -> tuple[Principal, int]:
        """(the principal, when its login ends in milliseconds). Unauthenticated for any other token."""
        try:
            text = token.removeprefix(PREFIX).encode("ascii")
            raw = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
            signed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
            key = self._keyring.verifying(_PURPOSE, signed[:ID_BYTES])
            if key is None or not hmac.compare_digest(mac, _mac(key, signed)):
                raise ValueError
            claims = msgspec.msgpack.decode(signed[ID_BYTES:], type=_Claims)
        except (binascii.Error, UnicodeError, ValueError, msgspec.DecodeError):
            raise Unauthenticated("The service token is not one of this server") from None
        if claims.expires_ms <= self._clock.now_ms():
            raise Unauthenticated("The service token has expired; the server issues one for each job")
        grant = Grant(PRINCIPAL, Role.WRITER.value, claims.namespace)
        return Principal(PRINCIPAL, (grant,), "token"), claims.expires_ms


def _mac(key: bytes, signed: bytes) -> bytes:
    return hmac.new(key, signed, hashlib.sha256).digest()
