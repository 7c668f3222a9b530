"""Claims signed with a key of the keyring, as text: key id (8 bytes), claims, HMAC-SHA256 of both (32 bytes)."""

from __future__ import annotations

import hashlib
import hmac

from seamark.metaserver.access.keyring import ID_BYTES, Keyring
from seamark.metaserver.wire import from_base64url, to_base64url

_MAC_BYTES = 32


def signed(keyring: Keyring, purpose: str, claims: bytes) -> str:
    key_id, key = keyring.signing(purpose)
    whole = key_id + claims
    return to_base64url(whole + _mac(key, whole))


def opened(keyring: Keyring, purpose: str, text: str) -> bytes:
    """The claims. ValueError if this server did not sign them for this purpose."""
    raw = from_base64url(text)
    whole, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    key = keyring.verifying(purpose, whole[:ID_BYTES])
    if key is None or not hmac.compare_digest(mac, _mac(key, whole)):
        raise ValueError("not signed by this server")
    return whole[ID_BYTES:]


def _mac(key: bytes, whole: bytes) -> bytes:
    return hmac.new(key, whole, hashlib.sha256).digest()
