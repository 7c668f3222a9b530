"""Signed passes for staged tables, whose files are written before the tables exist.

The database does not contain a staged table, so the server cannot look up its location when a client requests
signatures for its files. Instead, the client sends a pass: the name, location and expiry of the table, signed with a
key that all replicas share. A pass gives access only to a new location, whose path contains a UUID that was generated
at staging.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Forbidden
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.store.model import NamespacePath

if TYPE_CHECKING:
    from joserfc import errors, jwk, jwt
    from joserfc.jwk import GuestProtocol
else:
    errors, jwk, jwt = LazyModule("joserfc.errors"), LazyModule("joserfc.jwk"), LazyModule("joserfc.jwt")

TTL_S = 86_400
"""The maximum time between the staging of a CREATE TABLE AS SELECT and its last signed request."""
_PURPOSE = "staged-table"


class StagingPasses:
    """Signed tokens that give a client access to the location of a table that it has not created yet."""

    def __init__(self, clock: Clock, keyring: Keyring) -> None:
        self._clock = clock
        self._keyring = keyring

    def issue(self, namespace: NamespacePath, name: str, location: str) -> str:
        """Return a signed token for the location of a staged table. It has only characters that are valid in URLs."""
        claims = {
            "aud": _PURPOSE,
            "namespace": list(namespace),
            "name": name,
            "location": location,
            "exp": self._clock.now_ms() // 1000 + TTL_S,
        }
        key_id, key = self._keyring.find_signing_key(_PURPOSE)
        return jwt.encode({"alg": "HS256", "kid": key_id.hex()}, claims, jwk.OctKey.import_key(key))

    def read_location(self, token: str, namespace: NamespacePath, name: str) -> str:
        """Return the location of the staged table.

        Raises:
            Forbidden: The signed token is invalid, expired or for another table.
        """
        try:
            claims = jwt.decode(token, self._find_key, algorithms=["HS256"]).claims
        except (errors.JoseError, ValueError):
            raise Forbidden(
                "The staging pass in this URL was not issued by this server; create the table again"
            ) from None
        if claims.get("aud") != _PURPOSE or (claims.get("namespace"), claims.get("name")) != (list(namespace), name):
            raise Forbidden(
                f"The staging pass in this URL is not for {format_path(namespace, name)}; create the table again"
            )
        if claims.get("exp", 0) * 1000 <= self._clock.now_ms():
            raise Forbidden(f"The staging pass of {format_path(namespace, name)} has expired; create the table again")
        return str(claims["location"])

    def _find_key(self, signed_token: GuestProtocol) -> jwk.OctKey:
        """Return the key with which the signed token of a staged table is verified.

        Raises:
            ValueError: The key is unknown.
        """
        key = self._keyring.find_verification_key(_PURPOSE, bytes.fromhex(str(signed_token.headers().get("kid"))))
        if key is None:
            raise ValueError("unknown key")
        return jwk.OctKey.import_key(key)
