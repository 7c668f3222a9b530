"""Statement tokens: logins for the worker process that runs one SQL statement of a caller.

A token has the caller's name and, on the namespaces where the caller may read, the role reader: never more than the
caller's rights, and never a right to write. It is valid for the statement's time limit, on every replica. It is signed
with a key of the keyring, so nothing of it is stored. Layout, after the prefix and in base64: key id (8 bytes),
MessagePack of the claims, HMAC-SHA256 of both (32 bytes).
"""

from __future__ import annotations

import msgspec

from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.access.principal import RANKS, Principal, Role
from seamark.metaserver.access.signed_claims import opened, signed
from seamark.metaserver.clock import Clock
from seamark.metaserver.decoding import from_msgpack
from seamark.metaserver.errors import BadRequest, Unauthenticated
from seamark.metaserver.store.model import Grant, NamespacePath

PREFIX = "smq_"
_PURPOSE = "statement-token"
CHARACTERS_MAX = 6000
"""A header has at most 8 KiB; a caller with more grants needs one on a higher namespace."""


class _Claims(msgspec.Struct, frozen=True, array_like=True):
    name: str
    namespaces: tuple[NamespacePath, ...]
    expires_ms: int


class StatementTokens:
    """Issues and verifies statement tokens."""

    def __init__(self, keyring: Keyring, clock: Clock) -> None:
        self._keyring = keyring
        self._clock = clock

    def issue(self, caller: Principal, ttl_s: float) -> str:
        """BadRequest if the caller has too many grants for a token."""
        namespaces = {grant.namespace for grant in caller.grants if grant.role in RANKS}
        topmost = [path for path in namespaces if not any(path[:n] in namespaces for n in range(len(path)))]
        claims = _Claims(caller.name, tuple(sorted(topmost)), self._clock.now_ms() + int(ttl_s * 1000))
        token = PREFIX + signed(self._keyring, _PURPOSE, msgspec.msgpack.encode(claims))
        if len(token) > CHARACTERS_MAX:
            raise BadRequest(
                f"{caller.name} has grants on {len(topmost):,} namespaces, too many for a statement; an admin grants "
                "the role reader on a namespace above them"
            )
        return token

    def principal(self, token: str) -> tuple[Principal, int]:
        """(the principal, when its login ends in milliseconds). Unauthenticated for any other token."""
        try:
            claims = from_msgpack(opened(self._keyring, _PURPOSE, token.removeprefix(PREFIX)), _Claims)
        except (ValueError, msgspec.DecodeError):
            raise Unauthenticated("The statement token is not one of this server") from None
        if claims.expires_ms <= self._clock.now_ms():
            raise Unauthenticated("The statement token has expired: the statement ran longer than sql_time_s")
        grants = tuple(Grant(claims.name, Role.READER.value, path) for path in claims.namespaces)
        return Principal(claims.name, grants, "token"), claims.expires_ms
