"""Tests of keys and tokens that are replaced while clients work: no request fails.

Certificates are in `tests/access/certificates/`. The clients send requests without a pause, each with its current
login.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from seamark.metaserver.access.keyring import StoredKeyring
from seamark.metaserver.access.tokens import create_token, revoke_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import SaveGrant
from tests.access.issuer import AUDIENCE, get_rsa_key, run_issuer
from tests.server.rig import OffsetClock, RunningServer, run_server

Login = Callable[[], str]


class _MovedClock(OffsetClock):
    """A clock whose offset also moves the monotonic time, so that cached issuer keys become old."""

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_ms / 1000


class RequestLoad:
    """Clients that send requests until they are stopped."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.answer_counts: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, login: Login) -> None:
        self.answer_counts[name] = 0
        self._tasks[name] = asyncio.create_task(self._work(name, login))

    async def _work(self, name: str, login: Login) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                headers = {"Authorization": f"Bearer {login()}"}
                async with http.get(f"{self._server.url}/v1/namespaces", headers=headers) as answer:
                    assert answer.status == 200, (name, await answer.text())
                self.answer_counts[name] += 1

    async def wait(self, further_answers: int = 3) -> None:
        """Wait until each client has received `further_answers` more answers, all with the status 200."""
        goals = {name: count + further_answers for name, count in self.answer_counts.items()}
        while any(self.answer_counts[name] < goal for name, goal in goals.items()):
            for task in self._tasks.values():
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for result in await asyncio.gather(*self._tasks.values(), return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


@asynccontextmanager
async def run_load(server: RunningServer, **logins: Login) -> AsyncIterator[RequestLoad]:
    clients = RequestLoad(server)
    for name, login in logins.items():
        clients.start(name, login)
    await clients.wait()
    yield clients
    await clients.wait()
    await clients.stop()


async def exchange_for_access_token(server: RunningServer, secret: str) -> str:
    form = {"grant_type": "client_credentials", "client_secret": secret}
    async with server.http.post(f"{server.url}/v1/oauth/tokens", data=form) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["access_token"])


async def test_replaced_tokens_signing_keys_and_issuer_keys_fail_no_request(tmp_path: Path) -> None:
    clock = _MovedClock()
    async with run_issuer(clock) as issuer:
        issuer.publish(get_rsa_key())
        settings = {"auth": "token+oidc", "oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
        # The access token outlives the test, in which the clock advances by less than four hours.
        limits = {"signing_key_rotation_s": 3600, "oauth_token_ttl_s": 2 * 86_400}
        async with run_server(tmp_path, clock=clock, **settings, **limits) as server:
            store, keyring = server.components.store, server.components.keyring
            assert isinstance(keyring, StoredKeyring)
            for name in ("oidc:ann", "nightly", "nightly-2"):
                await store.transact([SaveGrant(Grant(name, "reader"))])
            bearer = await create_token(store, clock, "nightly", ttl_s=None, grants=None)
            access = await exchange_for_access_token(server, bearer)
            jwt = issuer.make_token(get_rsa_key(), exp=clock.now_ms() // 1000 + 3 * 86_400)
            logins = {"bearer": bearer, "access": access, "jwt": jwt}
            async with run_load(server, **{name: lambda name=name: logins[name] for name in logins}) as clients:
                # The server replaces the key that signs access tokens. Earlier access tokens stay valid.
                first_key = keyring.find_signing_key("access-token")[0]
                for _ in range(3):
                    clock.ahead_ms += 3_601_000  # A second more than the time after which a signing key is replaced
                    await keyring.refresh()
                    await clients.wait()
                assert keyring.find_signing_key("access-token")[0] != first_key
                await switch_login(logins, "access", lambda: exchange_for_access_token(server, bearer))
                await clients.wait()
                # The issuer publishes its new key beside the old key, signs with the new key, and removes the old key.
                issuer.publish(get_rsa_key(), get_rsa_key(1))
                clock.ahead_ms += 61_000  # The server requests the keys for an unknown key id once a minute.
                await clients.wait()
                logins["jwt"] = issuer.make_token(get_rsa_key(1), exp=clock.now_ms() // 1000 + 3 * 86_400)
                await clients.wait()
                issuer.publish(get_rsa_key(1))
                clock.ahead_ms += 601_000  # The server requests the issuer's keys again after 10 minutes.
                await clients.wait()
                # An operator creates a second token, the clients take it, and the operator revokes the first token.
                second_token = await create_token(store, clock, "nightly-2", ttl_s=None, grants=None)
                logins["bearer"] = second_token
                await switch_login(logins, "access", lambda: exchange_for_access_token(server, second_token))
                await clients.wait()
                await revoke_token(store, clock, "nightly")
                await clients.wait()


async def switch_login(logins: dict[str, str], name: str, create_login: Callable[[], Awaitable[str]]) -> None:
    logins[name] = await create_login()
