"""Signing keys for data that clients send back: access tokens, plan and page tokens, passes of staged tables.

All replicas share the keys through the database, where they are encrypted with a key that is not in the
database (`protectors.py`). When the newest key is old enough (`signing_key_rotation_s`), a new key is created. It is
published some minutes before it is used, so that every replica has loaded it. Older keys still verify data until
everything that they signed has expired. The same root keys are used for all purposes. The key of each purpose is
derived from a root key (HKDF, RFC 5869), so that a token of one purpose is invalid for another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.access.protectors import KeyProtector, WrongKey, open_protector
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore

SECRET_NAME = "signing-keys"  # noqa: S105  the name of the row, not a secret
REFRESH_S = 60.0
"""The interval at which a server loads the keys of other replicas."""
PUBLISHED_S = 5 * REFRESH_S
"""The time between the publication of a new key and its first use for signing."""
RETIRED_S_MIN = 86_400
"""The minimum time for which an older key still verifies. Passes of staged tables are valid for a day."""
ID_BYTES = 8
_TIME_BYTES = 6
"""The number of bytes of the time at the start of a UUIDv7."""
_KEY_BYTES = 32
_SECRET_PURPOSE = b"seamark signing keys"
_LOAD_TRIES_MAX = 8
_log = structlog.get_logger("seamark.keys")


class SigningKey(msgspec.Struct, frozen=True, array_like=True):
    id: bytes
    from_ms: int
    """The time from which on the key is used for signing."""
    root: bytes


class Keyring:
    """The root keys, newest last, and the keys derived from them.

    Each purpose has its own derived key, so that what is signed for one purpose is invalid for another.
    """

    def __init__(self, keys: Sequence[SigningKey], clock: Clock) -> None:
        self._clock = clock
        self._derived_keys: dict[tuple[str, bytes], bytes] = {}
        self.replace(keys)

    @property
    def keys(self) -> tuple[SigningKey, ...]:
        return self._keys

    def replace(self, keys: Sequence[SigningKey]) -> None:
        self._keys = tuple(keys)
        self._derived_keys.clear()

    def find_signing_key(self, purpose: str) -> tuple[bytes, bytes]:
        """Return the id of the current signing key, and the key that is derived from it for `purpose`."""
        now_ms = self._clock.now_ms()
        # Use the oldest key if no key is usable yet, as after the clock was set back.
        usable_keys = [key for key in self._keys if key.from_ms <= now_ms] or self._keys[:1]
        return usable_keys[-1].id, self._derive(purpose, usable_keys[-1])

    def find_verification_key(self, purpose: str, key_id: bytes) -> bytes | None:
        """Return the key for `purpose`, derived from the key with this id, or None if the keyring has no such key."""
        derived_key = self._derived_keys.get((purpose, key_id))
        if derived_key is not None:
            return derived_key
        return next((self._derive(purpose, key) for key in self._keys if key.id == key_id), None)

    def _derive(self, purpose: str, key: SigningKey) -> bytes:
        derived_key = self._derived_keys.get((purpose, key.id))
        if derived_key is None:
            hkdf = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=b"seamark " + purpose.encode())
            derived_key = self._derived_keys[purpose, key.id] = hkdf.derive(key.root)
        return derived_key


class StoredKeyring(Keyring):
    """A keyring in the database, which the replicas share. `open_keyring` opens it, and `refresh` updates it."""

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock) -> None:
        super().__init__((), clock)
        self._settings = settings
        self._store = store

    async def refresh(self) -> None:
        """Load the keys of other replicas. If a new key is due, create it.

        Raises:
            ConfigError: The stored keys are encrypted with a key that this server does not have, or other replicas
                replace the keys in every attempt.
        """
        for _ in range(_LOAD_TRIES_MAX):
            stored_secret = await self._store.load_secret(SECRET_NAME)
            protector = _open_protector(self._settings, self._clock, create=stored_secret is None)
            keys = () if stored_secret is None else await _decrypt_signing_keys(protector, stored_secret)
            rotated_keys = self._rotate(keys)
            if rotated_keys == keys and stored_secret is not None and protector.is_current(stored_secret):
                self.replace(keys)
                return
            new_secret = await protector.seal(msgspec.msgpack.encode(rotated_keys), _SECRET_PURPOSE)
            if await self._store.swap_secret(SECRET_NAME, stored_secret, new_secret) == new_secret:
                if keys and rotated_keys[-1] != keys[-1]:
                    _log.info("a new signing key is published", keys=len(rotated_keys))
                self.replace(rotated_keys)
                return
        raise ConfigError(
            "Other replicas replace the signing keys in the database repeatedly; check that all have the same settings"
        )

    def _rotate(self, keys: tuple[SigningKey, ...]) -> tuple[SigningKey, ...]:
        now_ms = self._clock.now_ms()
        if not keys:
            return (_make_key(self._clock, 0),)
        retired_ms = (max(RETIRED_S_MIN, self._settings.oauth_token_ttl_s) + self._settings.clock_leeway_s) * 1000
        current_keys = tuple(
            key
            for key, successor in zip(keys, (*keys[1:], None), strict=True)
            if successor is None or successor.from_ms + retired_ms > now_ms
        )
        due_ms = _read_created_ms(current_keys[-1]) + self._settings.signing_key_rotation_s * 1000
        if due_ms > now_ms:
            return current_keys
        return (*current_keys, _make_key(self._clock, now_ms + int(PUBLISHED_S * 1000)))


async def renew_keys(settings: Settings, store: PointerStore, clock: Clock) -> str:
    """Replace all keys, even if they cannot be decrypted. All data that the old keys signed become invalid.

    Returns:
        The description of the key that encrypts the new keys.

    Raises:
        ConfigError: Other replicas replace the keys in every attempt.
    """
    protector = _open_protector(settings, clock, create=True)
    new_secret = await protector.seal(msgspec.msgpack.encode((_make_key(clock, 0),)), _SECRET_PURPOSE)
    for _ in range(_LOAD_TRIES_MAX):
        stored_secret = await store.load_secret(SECRET_NAME)
        if await store.swap_secret(SECRET_NAME, stored_secret, new_secret) == new_secret:
            return protector.description
    raise ConfigError("Other replicas replace the signing keys in the database repeatedly; try again")


def _read_created_ms(key: SigningKey) -> int:
    """Return the creation time of the key, which its UUIDv7 id contains (RFC 9562, 5.7)."""
    return int.from_bytes(key.id[:_TIME_BYTES], "big")


def _make_key(clock: Clock, from_ms: int) -> SigningKey:
    return SigningKey(
        clock.uuid7().bytes[:_TIME_BYTES] + clock.draw_bytes(ID_BYTES - _TIME_BYTES),
        from_ms,
        clock.draw_bytes(_KEY_BYTES),
    )


def _open_protector(settings: Settings, clock: Clock, *, create: bool) -> KeyProtector:
    protector = open_protector(settings, clock, create=create)
    if protector is None:
        raise ConfigError(
            "The signing keys in the database are encrypted, and this server has no key for them. Copy the key file "
            "of the server that created them and name it with --encryption-key-file, or set SEAMARK_ENCRYPTION_KEY. "
            "If the key is lost, create new signing keys with: seamark keys renew"
        )
    return protector


async def _decrypt_signing_keys(protector: KeyProtector, stored_secret: bytes) -> tuple[SigningKey, ...]:
    try:
        return convert_msgpack(await protector.open(stored_secret, _SECRET_PURPOSE), tuple[SigningKey, ...])
    except WrongKey as error:
        raise ConfigError(
            f"The signing keys in the database are encrypted with the key {error}, not with the key of "
            f"{protector.description}. Give all servers of a database the same key with --encryption-key-file or "
            "SEAMARK_ENCRYPTION_KEY. If the key is lost, create new signing keys with: seamark keys renew"
        ) from None


@asynccontextmanager
async def open_keyring(settings: Settings, store: PointerStore, clock: Clock) -> AsyncIterator[StoredKeyring]:
    keyring = StoredKeyring(settings, store, clock)
    await keyring.refresh()
    yield keyring
