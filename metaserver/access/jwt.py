"""JSON Web Tokens (RFC 7519, 7515): decodes tokens, and verifies their signatures and times.

The token never chooses the algorithm: the caller passes the key and the only algorithm of the key, and a header with a
different algorithm is refused. Therefore a forged token with the algorithm `none`, or with an HMAC by the public key,
is never accepted.
"""

from __future__ import annotations

import binascii
import math
from typing import TYPE_CHECKING, Any

import msgspec

from seamark.formats.runtime.errors import Unauthenticated
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.metaserver.access import signatures
else:
    signatures = LazyModule("seamark.metaserver.access.signatures")

_SECONDS_MAX = 1e12
"""The limit of a time in seconds since the epoch. It is some 30,000 years after the epoch."""
LENGTH_MAX = 16 * 1024
"""The maximum length of a token in characters, which is twice the maximum size of a header line in aiohttp."""


class Unverified(msgspec.Struct, frozen=True):
    """The header and the claims of a token before its signature is verified."""

    header: dict[str, Any]
    claims: dict[str, Any]


def looks_like_jwt(text: str) -> bool:
    return text.count(".") == 2


def parse_token(token: str) -> Unverified:
    """Return the header and the claims of a token.

    Raises:
        Unauthenticated: A part is not a JSON object in base64url, or the token is longer than `LENGTH_MAX`.
    """
    if len(token) > LENGTH_MAX:
        raise Unauthenticated(f"The token has {len(token)} characters; the limit is {LENGTH_MAX}")
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        raise Unauthenticated("The token is not a JWT: it needs three parts separated by dots")
    header, claims = _decode_part(parts[0], "header"), _decode_part(parts[1], "claims")
    # Refuse critical extensions and unencoded payloads, which are not supported.
    if "crit" in header or "b64" in header:
        raise Unauthenticated("The token's header requires an extension that this server does not support")
    return Unverified(header, claims)


def verify_and_read_claims(token: str, parsed_token: Unverified, key: signatures.Key, algorithm: str) -> dict[str, Any]:
    """Verify the signature of a token, and return its claims.

    Raises:
        Unauthenticated: The signature is invalid, or was made with a different algorithm.
    """
    if parsed_token.header.get("alg") != algorithm:
        raise Unauthenticated(f"The token is not signed with {algorithm}, which its key requires")
    if not signatures.is_signature_valid(token, key, algorithm):
        raise Unauthenticated("The token's signature is invalid")
    return parsed_token.claims


def check_times(claims: dict[str, Any], now_ms: int, *, early_s: int, late_s: int) -> int:
    """Check that a token is valid now, and return its expiry in milliseconds since the epoch.

    Args:
        early_s: The time before the start of the token's validity at which it is already accepted.
        late_s: The time after the token's expiry at which it is still accepted.

    Raises:
        Unauthenticated: The token has no expiry, has expired, or is not valid yet.
    """
    now_s = now_ms / 1000
    expires_s = _read_seconds(claims, "exp")
    if expires_s is None:
        raise Unauthenticated("The token has no expiry (exp), which this server requires")
    if now_s >= expires_s + late_s:
        raise Unauthenticated("The token has expired; get a new token")
    for name in ("nbf", "iat"):
        since_s = _read_seconds(claims, name)
        if since_s is not None and now_s < since_s - early_s:
            raise Unauthenticated(f"The token is not valid yet ({name}); check the clocks")
    return int(expires_s * 1000)


def _decode_part(text: str, description: str) -> dict[str, Any]:
    try:
        # Make characters outside the alphabet invalid, because urlsafe_b64decode would ignore them.
        raw = binascii.a2b_base64(text.translate(_URL_SAFE).encode() + b"=" * (-len(text) % 4), strict_mode=bool(text))
        fields = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        # base64, UTF-8 and JSON raise different errors.
        raise Unauthenticated(f"The token's {description} is not JSON in base64url") from None
    if not isinstance(fields, dict):
        raise Unauthenticated(f"The token's {description} is not a JSON object")
    return fields


_URL_SAFE = str.maketrans("-_+/=", "+/!!!")


def _read_seconds(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unauthenticated(f"The token's {name} is not a number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not -_SECONDS_MAX < seconds < _SECONDS_MAX:
        raise Unauthenticated(f"The token's {name} is not a time")
    return seconds
