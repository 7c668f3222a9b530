"""Tests of an outage of PostgreSQL or the storage.

Clients that allow stale answers get known metadata and plans, with their age. The server asks clients to retry writes
and all other requests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from seamark.formats.runtime.errors import RetryLater, Unauthenticated
from seamark.metaserver.access.authenticator import open_authenticator
from seamark.metaserver.access.keyring import open_keyring
from seamark.metaserver.access.tokens import create_token, revoke_token
from seamark.metaserver.runtime.staleness import Staleness, allow_staleness
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.faults.rigs.http import HttpClient
from tests.peers.fleet import NAMESPACE, TABLE, Fleet, open_fleet, request_plan
from tests.server.rig import OffsetClock, build_settings
from tests.services.postgres import Postgres, postgres_server
from tests.services.s3 import S3
from tests.waits import block_until

TABLE_PATH = f"/v1/namespaces/{NAMESPACE}/tables/{TABLE}"
STALE_HEADERS = {"Cache-Control": "stale-if-error=600"}
STALE_LIMIT_S = 600
SET_PROPERTY = {"action": "set-properties", "updates": {"a": "b"}}


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, own_postgres: Postgres, s3: S3) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("degraded")
    env = {"SEAMARK_STALE_LIMIT_S": str(STALE_LIMIT_S), "SEAMARK_STALE_WAIT_S": "0.2", "SEAMARK_STORAGE_TIMEOUT_S": "3"}
    with open_fleet(folder, own_postgres, s3, 1, env=env, is_linked=False) as fleet:
        fleet.write(2)
        yield fleet


@contextmanager
def pause_postgres(postgres: Postgres) -> Iterator[None]:
    """Pause PostgreSQL. It then accepts connections, but does not answer."""
    parent = psutil.Process(postgres.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


def load_table(client: HttpClient, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    return client.call("GET", TABLE_PATH, None, headers or {})


def test_known_tables_and_plans_are_served_with_their_age_while_postgresql_hangs(
    fleet: Fleet, own_postgres: Postgres
) -> None:
    (client,) = fleet.build_clients(timeout_s=120)
    status, fresh_table = load_table(client)
    assert status == 200
    _, files = request_plan(client)
    assert len(files) == 2  # The fixture has appended twice.
    status, body = load_table(client, STALE_HEADERS)
    assert (status, body["metadata-location"]) == (200, fresh_table["metadata-location"])
    assert "Age" not in client.headers  # The database answers, so the answer is not stale.
    with pause_postgres(own_postgres):
        for _ in range(3):
            status, body = load_table(client, STALE_HEADERS)
            assert (status, body["metadata-location"]) == (200, fresh_table["metadata-location"])
            assert 1 <= int(client.headers["Age"]) <= STALE_LIMIT_S
            status, stale_plan = request_plan(client, STALE_HEADERS)
            assert (status, stale_plan) == (200, files)
            assert int(client.headers["Age"]) >= 1
    block_until(lambda: load_table(client)[0] == 200)
    assert "Age" not in client.headers


def test_other_requests_get_503_with_retry_after_while_postgresql_is_down(fleet: Fleet, own_postgres: Postgres) -> None:
    (client,) = fleet.build_clients(timeout_s=120)
    assert load_table(client)[0] == 200
    location = load_table(client)[1]["metadata-location"]
    own_postgres.process.stop(first=signal.SIGINT)
    try:
        assert load_table(client, STALE_HEADERS)[0] == 200
        assert load_table(client, {"Cache-Control": "no-cache, Max-Stale=600"})[0] == 200
        assert int(client.headers["Age"]) >= 1
        status, _ = client.call("GET", f"/v1/namespaces/{NAMESPACE}/tables/other", None, STALE_HEADERS)
        assert status == 503  # The server has no earlier result of this request.
        for headers in ({}, {"Cache-Control": "stale-if-error=0"}, {"Cache-Control": "max-age=5"}):
            status, body = load_table(client, headers)
            assert (status, body["error"]["type"]) == (503, "ServiceUnavailableException")
            assert int(client.headers["Retry-After"]) >= 1
        for method, path, request_body in (
            ("POST", TABLE_PATH, {"requirements": [], "updates": [SET_PROPERTY]}),
            ("POST", "/v1/namespaces", {"namespace": ["new"]}),
            ("DELETE", TABLE_PATH, None),
        ):
            status, body = client.call(method, path, request_body, STALE_HEADERS)
            assert status == 503, body
            assert int(client.headers["Retry-After"]) >= 1
    finally:
        own_postgres.process.start(lambda: _is_answering(own_postgres), timeout_s=60)
    block_until(lambda: load_table(client)[0] == 200)
    assert load_table(client)[1]["metadata-location"] == location


def _is_answering(postgres: Postgres) -> bool:
    try:
        return postgres.run_sql("SELECT 1") == "1"
    except Exception:  # noqa: BLE001  PostgreSQL is starting
        return False


def test_known_plan_is_served_while_the_storage_is_down(fleet: Fleet) -> None:
    (client,) = fleet.build_clients(timeout_s=120)
    assert load_table(client)[0] == 200
    files = request_plan(client)[1]
    fleet.storage.is_cut = True
    try:
        assert request_plan(client) == (200, files)
        assert load_table(client, STALE_HEADERS)[0] == 200
        with urllib.request.urlopen(f"{fleet.replicas[0].base_url}/healthz", timeout=30) as answer:
            assert answer.status == 200
    finally:
        fleet.storage.is_cut = False


async def test_stale_rights_are_used_only_as_long_as_allowed_and_never_for_a_revoked_or_expired_token(
    tmp_path: Path, own_postgres: Postgres
) -> None:
    clock = OffsetClock()
    settings = build_settings(tmp_path, auth="token", database=own_postgres.create_database())
    async with (
        open_store(settings.make_database_url(), clock=clock, keeps_reads=True) as store,
        open_keyring(settings, store, clock) as keyring,
        open_authenticator(settings, store, keyring, clock) as authenticator,
    ):
        grants = [Grant("ann", "reader", ("db",))]
        secrets = {
            name: await create_token(store, clock, name, ttl_s, grants)
            for name, ttl_s in (("ann", None), ("bob", None), ("cat", 3600))
        }
        headers = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
        for name in secrets:
            assert (await authenticator.authenticate(headers[name], remote=None)).name == name
        await revoke_token(store, clock, "bob")
        await authenticator.authenticate(headers["ann"], remote=None)
        await authenticator.authenticate(headers["cat"], remote=None)
        await asyncio.to_thread(own_postgres.process.stop, first=signal.SIGINT)
        try:
            with allow_staleness(Staleness(limit_s=60, wait_s=5)):
                assert (await authenticator.authenticate(headers["ann"], remote=None)).name == "ann"
                with pytest.raises(RetryLater):  # The revocation removed the token from the cache.
                    await authenticator.authenticate(headers["bob"], remote=None)
                clock.ahead_ms = 3600_000  # Cat's token is valid for an hour.
                with pytest.raises(Unauthenticated, match="expired"):
                    await authenticator.authenticate(headers["cat"], remote=None)
            for staleness in (None, Staleness(limit_s=0, wait_s=5)):
                with allow_staleness(staleness), pytest.raises(RetryLater):
                    await authenticator.authenticate(headers["ann"], remote=None)
        finally:
            await asyncio.to_thread(own_postgres.process.start, lambda: _is_answering(own_postgres), timeout_s=60)
