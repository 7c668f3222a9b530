"""Access tokens that this server signs itself, for clients that insist on OAuth's client-credentials flow.

Such a token is a JWT (HS256, a secret that all replicas share through the store) which names the bearer token that it
was made from, by digest. It is believed only as long as that one is live: to revoke the bearer token is to revoke all
that was made of it. Another token of the same name has another digest and does not revive it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from metaserver.access import jwt
from metaserver.access.principal import ANONYMOUS_NAME
from metaserver.clock import Clock
from metaserver.deferred import Deferred
from metaserver.errors import Unauthenticated
from metaserver.store.port import PointerStore, Token

if TYPE_CHECKING:
    from joserfc import jwk
    from joserfc import jwt as jose
else:
    jwk, jose = Deferred("joserfc.jwk"), Deferred("joserfc.jwt")

ISSUER = "seamark"
"""Also the audience. No OIDC issuer is called so, since those are URLs."""
SECRET_NAME = "oauth-signing"  # noqa: S105  the name, not the secret
_ALGORITHM = "HS256"


class Issued(msgspec.Struct, frozen=True):
    """What a token of ours says, its signature checked."""

    name: str
    digest: str
    """Of the bearer token behind it; empty where there is none, since no login was asked for."""


class Issuer:
    """Signs and checks. Made by `open_issuer`."""

    def __init__(self, secret: bytes, clock: Clock, ttl_s: int) -> None:
        self._secret = secret
        self._clock = clock
        self._ttl_s = ttl_s

    @cached_property
    def _key(self) -> jwk.OctKey:
        return jwk.OctKey.import_key(self._secret)

    def issue(self, token: Token | None) -> tuple[str, int]:
        """(JWT, seconds that it lives) for the holder of `token`; it never outlives the token. None: for anybody."""
        now_ms = self._clock.now_ms()
        ttl_s = self._ttl_s
        if token is not None and token.expires_ms is not None:
            ttl_s = max(1, min(ttl_s, (token.expires_ms - now_ms) // 1000))
        now_s = now_ms // 1000
        claims = {
            "iss": ISSUER,
            "aud": ISSUER,
            "sub": token.name if token is not None else ANONYMOUS_NAME,
            "iat": now_s,
            "exp": now_s + ttl_s,
            "jti": str(self._clock.uuid4()),
            "token": token.digest if token is not None else "",
        }
        return jose.encode({"alg": _ALGORITHM, "typ": "JWT", "kid": ISSUER}, claims, self._key), ttl_s

    def is_ours(self, unverified: jwt.Unverified) -> bool:
        return unverified.claims.get("iss") == ISSUER

    def check(self, token: str, unverified: jwt.Unverified, *, expired_too: bool = False) -> Issued:
        """Unauthenticated unless we signed it and, but with `expired_too`, it has not expired."""
        claims = jwt.verify(token, unverified, self._key, _ALGORITHM)
        name, digest = claims.get("sub"), claims.get("token")
        if claims.get("aud") != ISSUER or not isinstance(name, str) or not isinstance(digest, str):
            raise Unauthenticated("The token is of this server, but not an access token")
        if not expired_too:
            jwt.check_times(claims, self._clock.now_ms(), 0)
        return Issued(name, digest)


async def open_issuer(store: PointerStore, clock: Clock, ttl_s: int) -> Issuer:
    """With the signing secret of the store; the first replica to ask makes it."""
    return Issuer(await store.secret(SECRET_NAME, clock.random_bytes(32)), clock, ttl_s)
