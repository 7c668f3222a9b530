"""Service tokens: the server's own logins for the processes that run its table services.

A token is valid for one namespace and a short time, on every replica, with any `auth`. It is signed with a key of
the keyring, so nothing of it is stored. Layout, after the prefix and in base64: key id (8 bytes), MessagePack of the
namespace and the expiry, HMAC-SHA256 of both (32 bytes).
"""

from __future__ import annotations

import msgspec

from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.access.principal import Principal, Role
from seamark.metaserver.access.signed_claims import opened, signed
from seamark.metaserver.clock import Clock
from seamark.metaserver.decoding import from_msgpack
from seamark.metaserver.errors import Unauthenticated
from seamark.metaserver.store.model import Grant, NamespacePath

PREFIX = "sms_"
PRINCIPAL = "service:seamark"
"""No token and no OIDC subject can have this name, so no grant of an operator belongs to it."""
_PURPOSE = "service-token"


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
        claims = _Claims(namespace, self._clock.now_ms() + int(ttl_s * 1000))
        return PREFIX + signed(self._keyring, _PURPOSE, msgspec.msgpack.encode(claims))

    def principal(self, token: str) -> tuple[Principal, int]:
        """(the principal, when its login ends in milliseconds). Unauthenticated for any other token."""
        try:
            claims = from_msgpack(opened(self._keyring, _PURPOSE, token.removeprefix(PREFIX)), _Claims)
        except (ValueError, msgspec.DecodeError):
            raise Unauthenticated("The service token is not one of this server") from None
        if claims.expires_ms <= self._clock.now_ms():
            raise Unauthenticated("The service token has expired; the server issues one for each job")
        grant = Grant(PRINCIPAL, Role.WRITER.value, claims.namespace)
        return Principal(PRINCIPAL, (grant,), "token"), claims.expires_ms
