"""Encrypts the signing keys, so that a copy of the database alone does not reveal them.

`KeyProtector` is the port. A key management service can implement it with its wrap and unwrap calls. The
local implementation is AES-256-GCM (NIST SP 800-38D) with a key from the setting `encryption_key` or from
a file outside the database. So that the key can be replaced, several keys may be set: the first key encrypts, and all
keys decrypt.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.runtime.home import create_private
from seamark.metaserver.settings.settings import Settings

KEY_BYTES = 32
KEY_FILE_NAME = "encryption.key"
_VERSION = b"\x01"
_ID_BYTES, _NONCE_BYTES = 8, 12


class WrongKey(Exception):
    """Raised if data are encrypted with a key that this protector does not have. The message is the id of the key."""


class KeyProtector(Protocol):
    """Encrypts small secrets.

    The argument `associated_data` names the purpose of a secret. It is authenticated, so a secret that is sealed for
    one purpose cannot be opened for another.
    """

    @property
    def description(self) -> str:
        """The source and the id of the current key, for messages. The description never contains the key itself."""

    async def seal(self, data: bytes, associated_data: bytes) -> bytes: ...

    async def open(self, ciphertext: bytes, associated_data: bytes) -> bytes:
        """Decrypt the data.

        Raises:
            WrongKey: The data were encrypted with a different key, or were changed.
        """

    def is_current(self, ciphertext: bytes) -> bool:
        """Return whether the data are encrypted with the current key."""


class LocalProtector:
    """A protector that uses AES-256-GCM.

    The layout of sealed data is: version (1 byte), key id (8), nonce (12), ciphertext and tag.

    Args:
        keys: The keys. The first key is the current key, which seals. The others only open older data.
        source: The setting or file that contains the keys, for messages.
        clock: The clock, which gives the random nonces.
    """

    def __init__(self, keys: list[bytes], source: str, clock: Clock) -> None:
        self._keys = {_compute_key_id(key): AESGCM(key) for key in reversed(keys)}
        self._current = _compute_key_id(keys[0])
        self._source = source
        self._clock = clock

    @property
    def description(self) -> str:
        return f"{self._source} (key {self._current.hex()})"

    async def seal(self, data: bytes, associated_data: bytes) -> bytes:
        nonce = self._clock.draw_bytes(_NONCE_BYTES)
        return _VERSION + self._current + nonce + self._keys[self._current].encrypt(nonce, data, associated_data)

    async def open(self, ciphertext: bytes, associated_data: bytes) -> bytes:
        key_id, nonce = ciphertext[1 : 1 + _ID_BYTES], ciphertext[1 + _ID_BYTES : 1 + _ID_BYTES + _NONCE_BYTES]
        key = self._keys.get(key_id) if ciphertext[:1] == _VERSION else None
        if key is None:
            raise WrongKey(key_id.hex())
        try:
            return key.decrypt(nonce, ciphertext[1 + _ID_BYTES + _NONCE_BYTES :], associated_data)
        except (InvalidTag, ValueError):
            raise WrongKey(key_id.hex()) from None

    def is_current(self, ciphertext: bytes) -> bool:
        return ciphertext[1 : 1 + _ID_BYTES] == self._current


def _compute_key_id(key: bytes) -> bytes:
    """Return the id of a key: a hash, which does not reveal the key because it has 256 random bits."""
    return hashlib.sha256(b"seamark key id\n" + key).digest()[:_ID_BYTES]


def open_protector(settings: Settings, clock: Clock, *, create: bool) -> KeyProtector | None:
    """Open the protector that the settings encryption_key and encryption_key_file configure.

    Args:
        create: Whether to create a missing key file.

    Returns:
        The protector. None if the key file is missing and `create` is false.

    Raises:
        ConfigError: A key or the file is invalid.
    """
    if settings.encryption_key:
        keys = [_parse_key(text, "the setting encryption_key") for text in settings.encryption_key.split(",")]
        return LocalProtector(keys, "the setting encryption_key", clock)
    path = find_key_file(settings)
    if not os.path.lexists(path):
        if not create:
            return None
        _create_key_file(path, clock)
    return LocalProtector(_read_key_file(path, settings), str(path), clock)


def find_key_file(settings: Settings) -> Path:
    return Path(settings.encryption_key_file or settings.home / KEY_FILE_NAME).expanduser()


def make_encryption_key(clock: Clock) -> str:
    """Return a new random key in base64, the format of the key file and of the setting `encryption_key`."""
    return base64.b64encode(clock.draw_bytes(KEY_BYTES)).decode()


def _create_key_file(path: Path, clock: Clock) -> None:
    """Create the file atomically, because other workers and replicas may read or create it at the same time.

    A file that another process has created stays.

    Raises:
        ConfigError: The file cannot be created.
    """
    text = "# Encrypts the signing keys in Seamark's database. Keep it secret, and apart from copies of the database.\n"
    temporary_path = path.with_name(f".{path.name}-{clock.draw_bytes(8).hex()}")
    try:
        create_private(temporary_path, (text + make_encryption_key(clock) + "\n").encode())
        try:
            os.link(temporary_path, path)
        except FileExistsError:
            pass
        finally:
            temporary_path.unlink()
    except OSError as error:
        raise ConfigError(
            f"Cannot create the key file {path}: {error.strerror}; name another with --encryption-key-file"
        ) from None


def _read_key_file(path: Path, settings: Settings) -> list[bytes]:
    """Return the keys in the key file, in the order of its lines.

    Raises:
        ConfigError: The file cannot be read, other accounts can access it, or it contains no valid key.
    """
    try:
        status = path.stat()
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not text"
        raise ConfigError(f"Cannot read the key file {path}: {reason}") from None
    # Allow a secret that Kubernetes mounts: a link to a file of root that the group may read.
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(
            f"Other accounts can access the key file {path} (mode {stat.S_IMODE(status.st_mode):04o}), so the key is "
            "not secret: run chmod 600 on it, and replace the keys with: seamark keys renew"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"The key file {path} belongs to another account (uid {status.st_uid}), which knows the key")
    lines = [line.strip() for line in text.splitlines()]
    keys = [_parse_key(line, str(path)) for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"The key file {path} contains no key; write 32 random bytes into it, in base64")
    return keys


def _parse_key(text: str, source: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"A key in {source} is not {KEY_BYTES} bytes in base64; create one with: openssl rand -base64 {KEY_BYTES}"
        )
    return key
