"""Tests of the signing keys: a copy of the database cannot sign, replicas share the keys, and old keys are replaced."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.metaserver.access import jwt
from seamark.metaserver.access.issued import Issuer
from seamark.metaserver.access.keyring import PUBLISHED_S, RETIRED_S_MIN, SECRET_NAME, open_keyring, renew_keys
from seamark.metaserver.access.page_tokens import PageTokens
from seamark.metaserver.access.protectors import KEY_FILE_NAME, make_encryption_key
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.store.sql.migrations import MIGRATIONS
from tests.access.keyrings import make_fixed_keyring

DAY_S = 86_400


def build_settings(home: Path, **options: Any) -> Settings:
    home.mkdir(exist_ok=True)
    return Settings(home=home, auth="token", **options)


def read_stored_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.glob("seamark.db*"))


async def test_copy_of_database_and_log_has_no_usable_key(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    settings = build_settings(tmp_path)
    async with open_keyring(settings, store, clock) as keyring:
        used_keys = [key.root for key in keyring.keys]
        used_keys += [
            keyring.find_signing_key(purpose)[1] for purpose in ("access-token", "scan-planning", "staged-table")
        ]
    await create_token(store, clock, "ann", None, [Grant("ann", "admin")])
    stored_bytes = read_stored_bytes(tmp_path)
    assert b"ann" in stored_bytes
    for key in used_keys:
        assert key not in stored_bytes
        assert key.hex().encode() not in stored_bytes


async def test_server_with_a_stolen_database_and_no_key_file_cannot_sign(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_keyring(build_settings(tmp_path), store, clock):
        pass
    thief_home = tmp_path / "thief"
    thief_home.mkdir()
    for path in tmp_path.glob("seamark.db*"):
        shutil.copy(path, thief_home / path.name)
    async with open_store(f"sqlite:///{thief_home / 'seamark.db'}", clock=clock) as stolen_store:
        with pytest.raises(ConfigError, match=r"has no key for them.*seamark keys renew"):
            async with open_keyring(build_settings(thief_home), stolen_store, clock):
                pass
        assert not (thief_home / KEY_FILE_NAME).exists()
        other_settings = build_settings(thief_home, encryption_key=make_encryption_key(clock))
        with pytest.raises(ConfigError, match=r"encrypted with the key [0-9a-f]{16}, not with the key of"):
            async with open_keyring(other_settings, stolen_store, clock):
                pass


async def test_replicas_with_the_same_key_accept_signatures_of_each_other(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    key = make_encryption_key(clock)
    settings_of_replicas = [build_settings(tmp_path / name, encryption_key=key) for name in ("one", "two")]
    async with (
        open_keyring(settings_of_replicas[0], store, clock) as keyring,
        open_keyring(settings_of_replicas[1], store, clock) as second_keyring,
    ):
        key_id, signing_key = keyring.find_signing_key("access-token")
        assert second_keyring.find_verification_key("access-token", key_id) == signing_key
        assert second_keyring.find_verification_key("scan-planning", key_id) not in (None, signing_key)
    assert not any((settings.home / KEY_FILE_NAME).exists() for settings in settings_of_replicas)


async def test_new_key_is_published_before_it_signs_and_the_old_key_outlives_its_tokens(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    settings = build_settings(tmp_path, signing_key_rotation_s=7 * DAY_S)
    async with open_keyring(settings, store, clock) as keyring, open_keyring(settings, store, clock) as second_keyring:
        first_key_id, _ = keyring.find_signing_key("x")
        clock.advance(7 * DAY_S * 1000)
        await keyring.refresh()
        assert keyring.find_signing_key("x")[0] == first_key_id  # Published, not yet used
        await second_keyring.refresh()
        assert len(second_keyring.keys) == len(keyring.keys) == 2
        clock.advance(int(PUBLISHED_S * 1000))
        second_key_id, key = keyring.find_signing_key("x")
        assert second_key_id != first_key_id
        assert second_keyring.find_verification_key("x", second_key_id) == key
        assert keyring.find_verification_key("x", first_key_id) is not None
        clock.advance((RETIRED_S_MIN - 1) * 1000)  # The time after which a key is removed has not passed.
        await keyring.refresh()
        assert keyring.find_verification_key("x", first_key_id) is not None
        clock.advance(60_000)  # This exceeds the time by 59 seconds.
        await keyring.refresh()
        assert keyring.find_verification_key("x", first_key_id) is None
        assert keyring.find_verification_key("x", second_key_id) == key


async def test_access_token_outlives_the_rotation_of_its_key(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    settings = build_settings(tmp_path, signing_key_rotation_s=3600, oauth_token_ttl_s=3 * DAY_S)
    token = (await _list_tokens(store, clock))[0]
    async with open_keyring(settings, store, clock) as keyring:
        issuer = Issuer(keyring, clock, ttl_s=settings.oauth_token_ttl_s, leeway_s=0)
        issued_token, _ = issuer.issue(token)
        for _ in range(3 * 24 - 1):  # One hour less than the lifetime of the token
            clock.advance(3600_000)
            await keyring.refresh()
            assert issuer.check(issued_token, jwt.parse_token(issued_token)).name == "ann"
        # Each of the 72 hours adds a key. The few further keys are removed in a later round.
        assert len(keyring.keys) < 3 * 24 + 5


async def test_renewing_keys_invalidates_all_signatures_even_without_the_encryption_key(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    settings = build_settings(tmp_path)
    async with open_keyring(settings, store, clock) as keyring:
        first_key, _ = keyring.find_signing_key("x")
        (tmp_path / KEY_FILE_NAME).unlink()
        await renew_keys(settings, store, clock)
        await keyring.refresh()
        assert keyring.find_verification_key("x", first_key) is None
        assert keyring.find_signing_key("x")[0] != first_key


async def test_encryption_key_is_replaced_by_listing_the_new_one_first(
    tmp_path: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    old_key, new_key = make_encryption_key(clock), make_encryption_key(clock)
    used_keys = []
    for keys in (old_key, f"{old_key},{new_key}", f"{new_key},{old_key}", new_key):
        async with open_keyring(build_settings(tmp_path, encryption_key=keys), store, clock) as keyring:
            used_keys.append(keyring.find_signing_key("x"))
    assert len(set(used_keys)) == 1


@pytest.fixture
def key_file(tmp_path: Path, clock: SimulatedClock) -> Path:
    path = tmp_path / "shared.key"
    path.write_text(make_encryption_key(clock))
    path.chmod(0o600)
    return path


async def test_key_file_readable_by_other_accounts_is_rejected(
    tmp_path: Path, key_file: Path, store: PointerStore, clock: SimulatedClock
) -> None:
    key_file.chmod(0o644)
    with pytest.raises(ConfigError, match=f"{key_file} .mode 0644.*chmod 600"):
        async with open_keyring(build_settings(tmp_path, encryption_key_file=str(key_file)), store, clock):
            pass


@pytest.mark.parametrize("content", ["", "# nothing\n", "not base64!", "c2hvcnQ=", "\x00\xff"])
async def test_error_of_a_key_file_without_a_key_names_the_file(
    tmp_path: Path, key_file: Path, store: PointerStore, clock: SimulatedClock, content: str
) -> None:
    key_file.write_text(content)
    with pytest.raises(ConfigError, match=str(key_file)):
        async with open_keyring(build_settings(tmp_path, encryption_key_file=str(key_file)), store, clock):
            pass


async def test_unencrypted_keys_of_an_older_database_sign_nothing(tmp_path: Path, clock: SimulatedClock) -> None:
    url = f"sqlite:///{tmp_path / 'seamark.db'}"
    async with open_store(url, clock=clock):
        pass
    with sqlite3.connect(tmp_path / "seamark.db") as old_database:
        (migration_number,) = (
            number for number, migration in enumerate(MIGRATIONS) if "DELETE FROM secrets" in migration.get("", ())
        )
        # The database becomes as old as before this migration: later tables, indexes and columns are removed.
        later_tables = ("replicas", "column_reads", "retained", "stream_offsets", "removal_flushes")
        later_tables += (
            "query_shapes",
            "query_sums",
            "applied_advice",
            "warehouses",
            "catalog_state",
            "dropped_grants",
        )
        for table in later_tables:
            old_database.execute(f"DROP TABLE {table}")
        old_database.execute("DROP INDEX grants_by_object")
        old_database.execute("ALTER TABLE leases DROP COLUMN state")
        old_database.execute("ALTER TABLE plan_tables DROP COLUMN joined")
        old_database.execute("ALTER TABLE claims DROP COLUMN spelled")
        old_database.execute(f"UPDATE schema_version SET version = {migration_number}")
        old_database.execute("INSERT INTO secrets (name, value) VALUES ('oauth-signing', ?)", (b"k" * 32,))
    old_database.close()
    async with open_store(url, clock=clock) as store:
        assert await store.load_secret("oauth-signing") is None
        async with open_keyring(build_settings(tmp_path), store, clock) as keyring:
            assert keyring.find_signing_key("x")
        assert await store.load_secret(SECRET_NAME) is not None


def test_page_token_does_not_reveal_the_name_that_it_encodes() -> None:
    pages = PageTokens(make_fixed_keyring(), SimulatedClock(1))
    tokens = [pages.encode(name) for name in ("secret-project", "a", "b" * 60)]
    assert len({len(token) for token in tokens}) == 1
    assert [pages.decode(token) for token in tokens] == ["secret-project", "a", "b" * 60]
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("token", ["AA", "c2VjcmV0", "!", "A" * 200, "ÿ", "%00"])
def test_invented_page_token_is_rejected(token: str) -> None:
    with pytest.raises(BadRequest, match="start again without it"):
        PageTokens(make_fixed_keyring(), SimulatedClock(1)).decode(token)


def test_page_token_that_is_changed_or_from_another_server_is_rejected() -> None:
    pages = PageTokens(make_fixed_keyring(), SimulatedClock(1))
    token = pages.encode("name")
    changed_token = token[:-2] + ("AA" if token[-2:] != "AA" else "BB")
    with pytest.raises(BadRequest):
        pages.decode(changed_token)
    with pytest.raises(BadRequest):
        PageTokens(make_fixed_keyring(b"o"), SimulatedClock(1)).decode(token)


async def _list_tokens(store: PointerStore, clock: SimulatedClock) -> list[Any]:
    await create_token(store, clock, "ann", None, None)
    return await store.list_tokens()
