"""Defines the port to key management services, and a service whose master keys come from a file.

A key management service wraps and unwraps keys with master keys that never leave the service. The port has the
interface of parquet's key tools, so an instance of `pyarrow.parquet.encryption.KmsClient` can be used as the port.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from seamark.connector.parquet.encryption.modules import KEY_BYTES, NONCE_BYTES


class KeyUnavailable(Exception):
    """Raised if a key cannot be unwrapped or wrapped. The message contains no key and no text from the key service."""


class Kms(Protocol):
    """The port to a key management service."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str | bytes:
        """Encrypt a key with a master key, and return it as text."""

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> str | bytes:
        """Decrypt a wrapped key with a master key."""


class MasterKeyFile:
    """A key service that has the master keys of a file in memory.

    A key is wrapped with AES-GCM, with the name of the master key as additional authenticated data, and encoded in
    base64. The format is that of the in-memory service in the tests of parquet-java and Arrow.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """Create the service.

        Raises:
            ValueError: A key has an invalid length.
        """
        for name, key in keys.items():
            if len(key) not in KEY_BYTES:
                raise ValueError(f"the master key {name!r} has {len(key)} bytes; AES keys have 16, 24 or 32")
        self._keys = {name: AESGCM(key) for name, key in keys.items()}

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        nonce, aad = os.urandom(NONCE_BYTES), master_key_identifier.encode()
        return base64.b64encode(nonce + self._read_key(master_key_identifier).encrypt(nonce, key_bytes, aad)).decode()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        key = self._read_key(master_key_identifier)
        try:
            wrapped_bytes = base64.b64decode(wrapped_key, validate=True)
            return key.decrypt(wrapped_bytes[:NONCE_BYTES], wrapped_bytes[NONCE_BYTES:], master_key_identifier.encode())
        except (InvalidTag, ValueError):
            raise KeyUnavailable(f"the key was not wrapped by the master key {master_key_identifier!r}") from None

    def _read_key(self, name: str) -> AESGCM:
        key = self._keys.get(name)
        if key is None:
            raise KeyUnavailable(f"there is no master key {name!r}")
        return key


class KeyWrapper:
    """Wraps and unwraps keys with a key service, and hides the messages of its errors. It does not store keys."""

    def __init__(self, kms: Kms) -> None:
        self._kms = kms

    def wrap(self, key: bytes, master_key_id: str) -> str:
        """Wrap a key with a master key of the key service.

        Raises:
            KeyUnavailable: The service has failed.
        """
        wrapped_key = self._call_kms("wrap", self._kms.wrap_key, key, master_key_id)
        return wrapped_key if isinstance(wrapped_key, str) else bytes(wrapped_key).decode()

    def unwrap(self, wrapped_key: str, master_key_id: str) -> bytes:
        """Unwrap a key that was wrapped with a master key of the key service.

        Raises:
            KeyUnavailable: The service has failed.
        """
        key = self._call_kms("unwrap", self._kms.unwrap_key, wrapped_key, master_key_id)
        return key.encode() if isinstance(key, str) else bytes(key)

    def _call_kms(self, action: str, call: Any, key: str | bytes, master_key_id: str) -> Any:
        try:
            return call(key, master_key_id)
        except KeyUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  the client may raise any exception
            kind = type(error).__name__
        raise KeyUnavailable(f"the key service failed to {action} a key with the master key {master_key_id!r}: {kind}")
