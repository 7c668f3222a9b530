"""JSON Web Tokens (RFC 7519, 7515): reading one without belief, checking its signature, checking its times.

The algorithm is never the token's to choose: whoever verifies passes the key and the one algorithm that goes with it,
and a header that names another is refused. So `none`, and HMAC keyed with a public key, have no path through here.
"""

from __future__ import annotations

import binascii
import math
from typing import TYPE_CHECKING, Any

import msgspec

from metaserver.deferred import Deferred
from metaserver.errors import Unauthenticated

if TYPE_CHECKING:
    from metaserver.access import signatures
else:
    signatures = Deferred("metaserver.access.signatures")

LENGTH_MAX = 16 * 1024
"""Characters of a token; twice what fits into one header line as aiohttp reads it."""


class Unverified(msgspec.Struct, frozen=True):
    """What a token says of itself; nothing of it is true yet."""

    header: dict[str, Any]
    claims: dict[str, Any]


def looks_like_jwt(text: str) -> bool:
    return text.count(".") == 2


def read(token: str) -> Unverified:
    """Header and claims. Unauthenticated unless both are JSON objects in base64url, within `LENGTH_MAX`."""
    if len(token) > LENGTH_MAX:
        raise Unauthenticated(f"The token has {len(token)} characters; at most {LENGTH_MAX} are looked at")
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        raise Unauthenticated("The token is not a JWT: it needs three parts with dots between them")
    header, claims = _part(parts[0], "header"), _part(parts[1], "claims")
    # An extension that must be understood, and payloads that are not encoded: we know no such thing.
    if "crit" in header or "b64" in header:
        raise Unauthenticated("The token's header asks for an extension that this server does not know")
    return Unverified(header, claims)


def verify(token: str, unverified: Unverified, key: signatures.Key, algorithm: str) -> dict[str, Any]:
    """The claims, once the signature is good. Unauthenticated if it is not, or was made by another algorithm."""
    if unverified.header.get("alg") != algorithm:
        raise Unauthenticated(f"The token is not signed with {algorithm}, as its key is for")
    if not signatures.fits(token, key, algorithm):
        raise Unauthenticated("The token's signature does not fit")
    return unverified.claims


def check_times(claims: dict[str, Any], now_ms: int, *, early_s: int, late_s: int) -> int:
    """When it expires, in milliseconds since the epoch. Unauthenticated more than `early_s` before
    its time or `late_s` after it, or where it names none."""
    now_s = now_ms / 1000
    expires_s = _seconds(claims, "exp")
    if expires_s is None:
        raise Unauthenticated("The token never expires (it has no exp); such tokens are refused")
    if now_s >= expires_s + late_s:
        raise Unauthenticated("The token has expired; get a new one")
    for name in ("nbf", "iat"):
        since_s = _seconds(claims, name)
        if since_s is not None and now_s < since_s - early_s:
            raise Unauthenticated(f"The token is not valid yet ({name}); check the clocks")
    return int(expires_s * 1000)


def _part(text: str, what: str) -> dict[str, Any]:
    try:
        # urlsafe_b64decode would skip what is not in the alphabet; a token with such characters is no token.
        raw = binascii.a2b_base64(text.translate(_URL_SAFE).encode() + b"=" * (-len(text) % 4), strict_mode=bool(text))
        found = msgspec.json.decode(raw)
    except (ValueError, RecursionError):  # of base64, UTF-8 and JSON alike
        raise Unauthenticated(f"The token's {what} is not JSON in base64url") from None
    if not isinstance(found, dict):
        raise Unauthenticated(f"The token's {what} is not a JSON object")
    return found


_URL_SAFE = str.maketrans("-_+/=", "+/!!!")


def _seconds(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unauthenticated(f"The token's {name} is not a number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not -1e12 < seconds < 1e12:
        raise Unauthenticated(f"The token's {name} is not a time")
    return seconds
