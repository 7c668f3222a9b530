"""Claims signed with a key of the keyring, as text: key id (8 bytes), claims, HMAC-SHA256 of both (32 bytes)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from seamark.metaserver.access.keyring import ID_BYTES, Keyring

_MAC_BYTES = 32


def signed(keyring: Keyring, purpose: str, claims: bytes) -> str:
    key_id, key = keyring.signing(purpose)
    whole = key_id + claims
    return base64.urlsafe_b64encode(whole + _mac(key, whole)).decode().rstrip("=")


def opened(keyring: Keyring, purpose: str, text: str) -> bytes:
    """The claims. ValueError if this server did not sign them for this purpose."""
    try:
        encoded = text.encode("ascii")
        raw = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeError):
        raise ValueError("not base64") from None
    whole, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    key = keyring.verifying(purpose, whole[:ID_BYTES])
    if key is None or not hmac.compare_digest(mac, _mac(key, whole)):
        raise ValueError("not signed by this server")
    return whole[ID_BYTES:]


def _mac(key: bytes, whole: bytes) -> bytes:
    return hmac.new(key, whole, hashlib.sha256).digest()
