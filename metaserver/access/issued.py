"""Access tokens that this server signs, for clients that require OAuth's client-credentials flow.

An access token is a JWT, signed by HS256 with a key of the keyring that all replicas share. It contains the
digest of the bearer token from which it was made. It is valid only while the bearer token is live, so
revoking the bearer token revokes all access tokens made from it. A new bearer token with the same name
has a different digest, so the revoked access tokens stay invalid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Unauthenticated
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.access import jwt
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.store.model import AccessToken

if TYPE_CHECKING:
    from joserfc import jwk
    from joserfc import jwt as jose
else:
    jwk, jose = LazyModule("joserfc.jwk"), LazyModule("joserfc.jwt")

ISSUER = "seamark"
"""The issuer and the audience of the access tokens. It cannot be an OIDC issuer, because these are URLs."""
PURPOSE = "access-token"
_ALGORITHM = "HS256"


class AccessTokenClaims(msgspec.Struct, frozen=True):
    """The claims of an access token of this server whose signature was verified."""

    name: str
    digest: str
    """The digest of the bearer token from which the access token was made, or empty if no login was required."""
    expires_ms: int | None
    """The expiry of the token, or None if it was not checked."""


class Issuer:
    """Issues and verifies access tokens."""

    def __init__(self, keyring: Keyring, clock: Clock, *, ttl_s: int, leeway_s: int) -> None:
        self._keyring = keyring
        self._clock = clock
        self._ttl_s = ttl_s
        self._leeway_s = leeway_s

    @property
    def ttl_s(self) -> int:
        return self._ttl_s

    def issue(self, token: AccessToken | None, until_ms: int | None = None) -> tuple[str, int]:
        """Return a JWT, and its lifetime in seconds.

        The JWT expires at the latest with `token`, and at `until_ms`. Its lifetime is at least 1 s.

        Args:
            token: The bearer token from which the JWT is made, or None for a client of a server without logins.
            until_ms: The expiry of the login that the JWT replaces, or None.
        """
        now_ms = self._clock.now_ms()
        ends_ms = [end for end in (None if token is None else token.expires_ms, until_ms) if end is not None]
        ttl_s = min([self._ttl_s, *(max(1, (end - now_ms) // 1000) for end in ends_ms)])
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
        key_id, key = self._keyring.find_signing_key(PURPOSE)
        header = {"alg": _ALGORITHM, "typ": "JWT", "kid": key_id.hex()}
        return jose.encode(header, claims, jwk.OctKey.import_key(key)), ttl_s

    def is_ours(self, parsed_token: jwt.Unverified) -> bool:
        return parsed_token.claims.get("iss") == ISSUER

    def check(self, token: str, parsed_token: jwt.Unverified, *, accepts_expired: bool = False) -> AccessTokenClaims:
        """Check that this server signed the token, and return its claims.

        Args:
            accepts_expired: Whether to accept an expired token.

        Raises:
            Unauthenticated: This server did not sign the token, the token is not an access token, or it has expired.
        """
        claims = jwt.verify_and_read_claims(token, parsed_token, self._find_key(parsed_token), _ALGORITHM)
        name, digest = claims.get("sub"), claims.get("token")
        if claims.get("aud") != ISSUER or not isinstance(name, str) or not isinstance(digest, str):
            raise Unauthenticated("The token is from this server but is not an access token")
        if accepts_expired:
            return AccessTokenClaims(name, digest, None)
        return AccessTokenClaims(
            name, digest, jwt.check_times(claims, self._clock.now_ms(), early_s=self._leeway_s, late_s=0)
        )

    def _find_key(self, parsed_token: jwt.Unverified) -> jwk.OctKey:
        if parsed_token.header.get("alg") != _ALGORITHM:
            raise Unauthenticated(f"The token is not signed with {_ALGORITHM}, which its key requires")
        try:
            key = self._keyring.find_verification_key(PURPOSE, bytes.fromhex(str(parsed_token.header.get("kid"))))
        except ValueError:
            key = None
        if key is None:
            raise Unauthenticated("The token is signed with a key that this server does not have; get a new token")
        return jwk.OctKey.import_key(key)
