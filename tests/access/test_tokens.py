"""Tests of this server's tokens: what is stored, how tokens end, and a new token with an old name."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, NotFound
from seamark.metaserver.access.tokens import compute_digest, create_token, list_live_tokens, revoke_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import SaveGrant
from seamark.metaserver.store.port import PointerStore


async def test_only_the_digest_of_a_token_is_stored(store: PointerStore, clock: SimulatedClock, tmp_path: Path) -> None:
    secret = await create_token(store, clock, "ann", ttl_s=60, grants=[Grant("ann", "reader", ("a",))])
    assert secret.startswith("smk_")
    assert len(secret) == len("smk_") + 43  # 43 characters of base64 are 256 bits.
    [token] = await store.list_tokens()
    assert token.digest == hashlib.sha256(secret.encode()).hexdigest() == compute_digest(secret)
    assert (token.name, token.expires_ms) == ("ann", clock.now_ms() + 60_000)
    assert await store.grants("ann") == [Grant("ann", "reader", ("a",))]
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()
        assert secret.removeprefix("smk_").encode() not in file.read_bytes()


async def test_each_new_token_has_a_unique_secret(store: PointerStore) -> None:
    secrets = [await create_token(store, SystemClock(), f"t{number}", None, None) for number in range(50)]
    assert len(set(secrets)) == 50


async def test_name_has_at_most_one_live_token(store: PointerStore, clock: SimulatedClock) -> None:
    await create_token(store, clock, "ann", ttl_s=60, grants=None)
    with pytest.raises(AlreadyExists):
        await create_token(store, clock, "ann", ttl_s=None, grants=[Grant("ann", "admin")])
    assert await store.grants("ann") == []  # Nothing of the rejected token is left.
    clock.advance(60_000)
    await create_token(store, clock, "ann", ttl_s=None, grants=None)
    assert [token.name for token in await list_live_tokens(store, clock)] == ["ann"]


async def test_only_one_of_many_concurrent_creations_of_a_name_succeeds(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async def attempt() -> bool:
        try:
            await create_token(store, clock, "ann", None, [])
        except AlreadyExists:
            return False
        return True

    assert sum(await asyncio.gather(*(attempt() for _ in range(20)))) == 1


async def test_new_token_replaces_the_grants_of_its_name_only_if_it_states_grants(
    store: PointerStore, clock: SimulatedClock
) -> None:
    await store.transact([SaveGrant(Grant("ann", "admin")), SaveGrant(Grant("bob", "admin"))])
    await create_token(store, clock, "ann", None, [Grant("ann", "reader", ("a",)), Grant("ann", "reader", ("b",))])
    assert await store.grants("ann") == [Grant("ann", "reader", ("a",)), Grant("ann", "reader", ("b",))]
    await revoke_token(store, clock, "ann")
    await create_token(store, clock, "ann", None, None)
    assert len(await store.grants("ann")) == 2
    await revoke_token(store, clock, "ann")
    await create_token(store, clock, "ann", None, [])
    assert await store.grants("ann") == []
    assert await store.grants("bob") == [Grant("bob", "admin")]


async def test_grants_of_a_new_token_keep_their_object_and_their_denial(
    store: PointerStore, clock: SimulatedClock
) -> None:
    grants = [
        Grant("ann", "read", ("a",), "table", "t"),
        Grant("ann", "plan", ("a",), "view", "v", True),
        Grant("ann", "browse", (), "server"),
    ]
    await create_token(store, clock, "ann", None, grants)
    assert set(await store.grants("ann")) == set(grants)


async def test_token_that_cannot_be_revoked_is_reported(store: PointerStore, clock: SimulatedClock) -> None:
    with pytest.raises(NotFound, match="ann"):
        await revoke_token(store, clock, "ann")
    await create_token(store, clock, "ann", 1, None)
    clock.advance(1000)
    with pytest.raises(NotFound):
        await revoke_token(store, clock, "ann")


@pytest.mark.parametrize("ttl_s", [0, -1, 10**18])
async def test_impossible_lifetime_is_rejected(store: PointerStore, clock: SimulatedClock, ttl_s: int) -> None:
    with pytest.raises(BadRequest, match="seconds"):
        await create_token(store, clock, "ann", ttl_s, None)
    assert await store.list_tokens() == []


@pytest.mark.parametrize(
    "grant", [Grant("ann", "root"), Grant("ann", "reader", ("",)), Grant("ann", "reader", ("\x00",))]
)
async def test_impossible_grant_leaves_no_token(store: PointerStore, clock: SimulatedClock, grant: Grant) -> None:
    with pytest.raises(BadRequest):
        await create_token(store, clock, "ann", None, [grant])
    assert await store.list_tokens() == []


async def test_new_token_has_exactly_its_grants_and_the_denials_of_its_name(store: PointerStore) -> None:
    clock = SystemClock()
    owner, denial = Grant("ann", "owner", ("a",), "table", "t"), Grant("ann", "read", ("a",), "table", "u", deny=True)
    await store.transact([SaveGrant(owner), SaveGrant(denial), SaveGrant(Grant("ann", "admin"))])
    grants = [Grant("ann", "read", ("a",), "table", "v"), Grant("ann", "plan", ("b",), "view", "w", deny=True)]
    await create_token(store, clock, "ann", None, grants)
    assert set(await store.grants(None)) == {denial, *grants}
