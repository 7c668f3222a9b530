"""Tests that open answers end when their login ends, or when the principal loses the right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token, revoke_token
from seamark.metaserver.store.model import Entry, EntryKind, Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, RemoveGrant
from seamark.metaserver.store.port import PointerStore
from tests.server.rig import OffsetClock, RunningServer, build_settings, run_server

GRANT = Grant("ann", "reader", ("db",))
STREAM_HEADERS = {"Accept": "text/event-stream"}
TABLE_TIMELINE = "/api/v1/tables/db/t/timeline"


@pytest.fixture
async def secret(tmp_path: Path) -> str:
    clock = SystemClock()
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        return await create_token(store, clock, "ann", 3600, [GRANT])


@pytest.fixture
async def server(tmp_path: Path, secret: str) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path, auth="token", rights_recheck_s=0.2) as running_server:
        await running_server.record()
        yield running_server


async def revoke_ann(store: PointerStore) -> None:
    await revoke_token(store, SystemClock(), "ann")


async def remove_grant(store: PointerStore) -> None:
    await store.transact([RemoveGrant(GRANT)])


async def read_until_end(answer: aiohttp.ClientResponse) -> bytes:
    """Read an answer until the server ends it, and return its remaining bytes."""
    return await asyncio.wait_for(answer.content.read(), timeout=60)


@pytest.mark.parametrize(
    ("end_login", "message"), [(revoke_ann, b"was revoked"), (remove_grant, b"may not listTableTimeline")]
)
@pytest.mark.parametrize("is_quiet", [True, False])
async def test_event_stream_ends_when_the_token_or_the_right_is_removed(
    server: RunningServer, secret: str, end_login: object, message: bytes, is_quiet: bool
) -> None:
    assert callable(end_login)
    headers = {**STREAM_HEADERS, "Authorization": f"Bearer {secret}"}
    async with server.http.get(server.url + TABLE_TIMELINE, headers=headers) as answer:
        assert answer.status == 200
        assert b"retry" in await answer.content.readuntil(b"\n\n")
        assert b"event: instant" in await answer.content.readuntil(b"\n\n")
        await end_login(server.components.store)
        if not is_quiet:
            await server.record(action="secret-action")
        remaining_bytes = await read_until_end(answer)
    assert b"secret-action" not in remaining_bytes
    assert b"event: error" in remaining_bytes
    assert message in remaining_bytes


async def test_event_stream_ends_when_its_access_token_expires(tmp_path: Path, secret: str) -> None:
    clock = OffsetClock()
    async with run_server(tmp_path, clock=clock, auth="token", rights_recheck_s=0.2, oauth_token_ttl_s=60) as server:
        await server.record()
        login = await server.components.authenticator.find_login(secret)
        issued_token, _ = server.components.authenticator.issuer.issue(login.token)
        headers = {**STREAM_HEADERS, "Authorization": f"Bearer {issued_token}"}
        async with server.http.get(server.url + TABLE_TIMELINE, headers=headers) as answer:
            assert answer.status == 200
            clock.ahead_ms = 61_000
            assert b"has expired" in await read_until_end(answer)


async def test_long_poll_reveals_nothing_once_its_token_is_revoked(server: RunningServer, secret: str) -> None:
    headers = {"Authorization": f"Bearer {secret}"}

    async def poll() -> tuple[int, bytes]:
        async with server.http.get(f"{server.url}{TABLE_TIMELINE}?wait=20&since=latest", headers=headers) as answer:
            return answer.status, await answer.read()

    poll_task = asyncio.create_task(poll())
    while not server.components.timeline.watchers:
        await asyncio.sleep(0.02)
    await revoke_ann(server.components.store)
    await server.record(action="secret-action")
    status, body = await poll_task
    assert status == 401
    assert b"secret-action" not in body


async def test_events_of_a_table_in_a_hidden_namespace_are_not_sent(server: RunningServer, secret: str) -> None:
    entry = Entry(EntryKind.TABLE, ("db",), "t", "uuid-of-t", "file:///m", None, 1, 0, 0)
    await server.components.store.transact([CreateNamespace(path=("hidden",), properties={}), CreateEntry(entry)])
    await server.record(namespace=("hidden",), action="moved-here")
    await server.record(action="last")
    headers = {"Authorization": f"Bearer {secret}"}
    status, timeline = await server.get(TABLE_TIMELINE, headers=headers)
    assert status == 200
    assert [instant["action"] for instant in timeline["instants"]] == ["commit", "last"]
