"""Page tokens: encrypted positions in listings. A position may be a name that the client must not see.

The encryption is AES-256-GCM with a key of the keyring. The layout before base64 is: key id (8 bytes), nonce
(12), ciphertext and tag. The plain text is padded to a multiple of 64 bytes, because its length would
reveal the length of the name.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from seamark.formats.protocol.wire import decode_base64url, to_base64url
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.keyring import ID_BYTES, Keyring

_PURPOSE = "page-token"
_NONCE_BYTES = 12
_PADDING_BYTES = 64


class PageTokens:
    """Encrypts the positions of pages in tokens, so that clients can neither read nor choose a position."""

    def __init__(self, keyring: Keyring, clock: Clock) -> None:
        self._keyring = keyring
        self._clock = clock

    def encode(self, after: str) -> str:
        """Return an opaque token for the position `after`, which must not end with a NUL."""
        key_id, key = self._keyring.find_signing_key(_PURPOSE)
        nonce = self._clock.draw_bytes(_NONCE_BYTES)
        text = after.encode()
        # Pad the text with NULs, so that the length of the token reveals less about the position.
        padded_text = text + bytes(-len(text) % _PADDING_BYTES)
        return to_base64url(key_id + nonce + AESGCM(key).encrypt(nonce, padded_text, None))

    def decode(self, token: str) -> str | None:
        """Return the position in a token, or None for the empty token, which requests the first page.

        Raises:
            BadRequest: This server did not issue the token.
        """
        if not token:
            return None
        try:
            raw = decode_base64url(token)
            key = self._keyring.find_verification_key(_PURPOSE, raw[:ID_BYTES])
            if key is None:
                raise ValueError
            nonce, ciphertext = raw[ID_BYTES : ID_BYTES + _NONCE_BYTES], raw[ID_BYTES + _NONCE_BYTES :]
            return AESGCM(key).decrypt(nonce, ciphertext, None).rstrip(b"\x00").decode()
        except (ValueError, InvalidTag):
            raise BadRequest(
                f"pageToken is {token[:40]!r}, which this server did not issue; start again without it"
            ) from None
