"""The keys that sign what clients bring back: access tokens, plan and page tokens, passes of staged tables.

All replicas share them through the database, where they are encrypted by a key that is not in it (`protectors.py`). A
new one is made when the newest is old enough (`signing_key_rotation_s`). It is published some minutes before anybody
signs with it, so that every replica knows it by then; older ones still verify, until all that they signed has ended.
One list of root keys serves every purpose: each purpose derives its own (HKDF, RFC 5869), so no token of one purpose
is good for another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from metaserver.access.protectors import KeyProtector, WrongKey, open_protector
from metaserver.clock import Clock
from metaserver.errors import ConfigError
from metaserver.settings import Settings
from metaserver.store.port import PointerStore

SECRET_NAME = "signing-keys"  # noqa: S105  the name of the row, not a secret
REFRESH_S = 60.0
"""Between looks for keys that other replicas made."""
PUBLISHED_S = 5 * REFRESH_S
"""For so long a new key is known before it signs."""
RETIRED_S_MIN = 86_400
"""For at least so long a key that signs no more still verifies: passes of staged tables live a day."""
ID_BYTES = 8
_KEY_BYTES = 32
_ABOUT = b"seamark signing keys"
_TRIES = 8
_log = structlog.get_logger("seamark.keys")


class SigningKey(msgspec.Struct, frozen=True, array_like=True):
    id: bytes
    from_ms: int
    """It signs from then on."""
    root: bytes


class Keyring:
    """Root keys, newest last, and what is derived of them."""

    def __init__(self, keys: Sequence[SigningKey], clock: Clock) -> None:
        self._clock = clock
        self._derived: dict[tuple[str, bytes], bytes] = {}
        self.replace(keys)

    @property
    def keys(self) -> tuple[SigningKey, ...]:
        return self._keys

    def replace(self, keys: Sequence[SigningKey]) -> None:
        self._keys = tuple(keys)
        self._derived.clear()

    def signing(self, purpose: str) -> tuple[bytes, bytes]:
        """(id, key) to sign with now."""
        now_ms = self._clock.now_ms()
        usable = [key for key in self._keys if key.from_ms <= now_ms] or self._keys[:1]
        return usable[-1].id, self._derive(purpose, usable[-1])

    def verifying(self, purpose: str, key_id: bytes) -> bytes | None:
        """The key of this id; None for one that was never ours, or is long retired."""
        found = self._derived.get((purpose, key_id))
        if found is not None:
            return found
        return next((self._derive(purpose, key) for key in self._keys if key.id == key_id), None)

    def _derive(self, purpose: str, key: SigningKey) -> bytes:
        found = self._derived.get((purpose, key.id))
        if found is None:
            hkdf = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=b"seamark " + purpose.encode())
            found = self._derived[purpose, key.id] = hkdf.derive(key.root)
        return found


class StoredKeyring(Keyring):
    """A keyring that the replicas share. Opened by `open_keyring`; `refresh` keeps it up to date."""

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock) -> None:
        super().__init__((), clock)
        self._settings = settings
        self._store = store

    async def refresh(self) -> None:
        """Takes over what other replicas made, and makes a new key where it is time. ConfigError where the stored keys
        are encrypted with a key that this server does not have."""
        for _ in range(_TRIES):
            stored = await self._store.secret(SECRET_NAME)
            protector = _protector(self._settings, self._clock, create=stored is None)
            keys = () if stored is None else await _unseal(protector, stored)
            wanted = self._rotated(keys)
            if wanted == keys and stored is not None and protector.is_current(stored):
                self.replace(keys)
                return
            sealed = await protector.seal(msgspec.msgpack.encode(wanted), _ABOUT)
            if await self._store.swap_secret(SECRET_NAME, stored, sealed) == sealed:
                if keys and wanted[-1] != keys[-1]:
                    _log.info("a new signing key is published", keys=len(wanted))
                self.replace(wanted)
                return
        raise ConfigError("The signing keys in the database change again and again; look for replicas that disagree")

    def _rotated(self, keys: tuple[SigningKey, ...]) -> tuple[SigningKey, ...]:
        now_ms = self._clock.now_ms()
        if not keys:
            return (_new_key(self._clock, 0),)
        lives_ms = (max(RETIRED_S_MIN, self._settings.oauth_token_ttl_s) + self._settings.clock_leeway_s) * 1000
        kept = tuple(
            key
            for key, successor in zip(keys, (*keys[1:], None), strict=True)
            if successor is None or successor.from_ms + lives_ms > now_ms
        )
        due_ms = _made_ms(kept[-1]) + self._settings.signing_key_rotation_s * 1000
        if due_ms > now_ms:
            return kept
        return (*kept, _new_key(self._clock, now_ms + int(PUBLISHED_S * 1000)))


async def renew_keys(settings: Settings, store: PointerStore, clock: Clock) -> str:
    """Replaces all keys at once, also such as nobody can decrypt any more: everything that they signed ends. Returns
    what the new ones are encrypted with."""
    protector = _protector(settings, clock, create=True)
    sealed = await protector.seal(msgspec.msgpack.encode((_new_key(clock, 0),)), _ABOUT)
    for _ in range(_TRIES):
        stored = await store.secret(SECRET_NAME)
        if await store.swap_secret(SECRET_NAME, stored, sealed) == sealed:
            return protector.description
    raise ConfigError("The signing keys in the database change again and again; try again")


def _made_ms(key: SigningKey) -> int:
    """UUIDv7 ids begin with the time: RFC 9562, 5.7."""
    return int.from_bytes(key.id[:6], "big")


def _new_key(clock: Clock, from_ms: int) -> SigningKey:
    return SigningKey(clock.uuid7().bytes[:6] + clock.random_bytes(2), from_ms, clock.random_bytes(_KEY_BYTES))


def _protector(settings: Settings, clock: Clock, *, create: bool) -> KeyProtector:
    protector = open_protector(settings, clock, create=create)
    if protector is None:
        raise ConfigError(
            "The signing keys in the database are encrypted, and this server has no key for them: copy the key file "
            "of the server that made them and name it with --encryption-key-file, or set SEAMARK_ENCRYPTION_KEY. If it "
            "is lost, make new ones with: seamark keys renew"
        )
    return protector


async def _unseal(protector: KeyProtector, stored: bytes) -> tuple[SigningKey, ...]:
    try:
        return msgspec.msgpack.decode(await protector.open(stored, _ABOUT), type=tuple[SigningKey, ...])
    except WrongKey as error:
        raise ConfigError(
            f"The signing keys in the database are encrypted with the key {error}, not with that of "
            f"{protector.description}: give all servers of one database the same key, by --encryption-key-file or "
            "SEAMARK_ENCRYPTION_KEY. If it is lost, make new ones with: seamark keys renew"
        ) from None


@asynccontextmanager
async def open_keyring(settings: Settings, store: PointerStore, clock: Clock) -> AsyncIterator[StoredKeyring]:
    keyring = StoredKeyring(settings, store, clock)
    await keyring.refresh()
    yield keyring
