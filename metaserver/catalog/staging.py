"""Passes for tables that are staged: their files are written before any name points at them.

A staged table is stored nowhere, so nothing can be looked up when a client asks to have a request inside it signed.
What it was told at staging is therefore carried by the client, signed with a key that all replicas share: which
table, where, until when. A pass opens one fresh location (its UUID was drawn at staging) and nothing of anybody else's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metaserver.access.keyring import Keyring
from metaserver.clock import Clock
from metaserver.deferred import Deferred
from metaserver.errors import Forbidden
from metaserver.store.port import NamespacePath
from metaserver.wire import show

if TYPE_CHECKING:
    from joserfc import errors, jwk, jwt
    from joserfc.jwk import GuestProtocol
else:
    errors, jwk, jwt = Deferred("joserfc.errors"), Deferred("joserfc.jwk"), Deferred("joserfc.jwt")

TTL_S = 86_400
"""The longest that a CREATE TABLE AS SELECT may run between two signed requests' pass and its end."""
_PURPOSE = "staged-table"


class Staging:
    def __init__(self, clock: Clock, keyring: Keyring) -> None:
        self._clock = clock
        self._keyring = keyring

    def issue(self, namespace: NamespacePath, name: str, location: str) -> str:
        """A pass, as text that stands in a URL."""
        claims = {
            "aud": _PURPOSE,
            "namespace": list(namespace),
            "name": name,
            "location": location,
            "exp": self._clock.now_ms() // 1000 + TTL_S,
        }
        key_id, key = self._keyring.signing(_PURPOSE)
        return jwt.encode({"alg": "HS256", "kid": key_id.hex()}, claims, jwk.OctKey.import_key(key))

    def location(self, token: str, namespace: NamespacePath, name: str) -> str:
        """Where the staged table lies. Forbidden for a pass that is forged, expired or another table's."""
        try:
            claims = jwt.decode(token, self._key_of, algorithms=["HS256"]).claims
        except (errors.JoseError, ValueError):
            raise Forbidden(
                "The staging pass in this URL is not one this server gave out; create the table again"
            ) from None
        if (
            claims.get("aud") != _PURPOSE
            or claims.get("exp", 0) * 1000 <= self._clock.now_ms()
            or (claims.get("namespace"), claims.get("name")) != (list(namespace), name)
        ):
            raise Forbidden(f"The staging pass in this URL has expired or is not {show(namespace, name)}'s")
        return str(claims["location"])

    def _key_of(self, signed: GuestProtocol) -> jwk.OctKey:
        """ValueError for a pass that names none of our keys."""
        key = self._keyring.verifying(_PURPOSE, bytes.fromhex(str(signed.headers().get("kid"))))
        if key is None:
            raise ValueError("unknown key")
        return jwk.OctKey.import_key(key)
