"""The attacks. Each attack is an endless coroutine of a malicious client on 127.0.0.2; the caller ends it.

The attacks run in a separate process (`python -m bench.attacks.attackers URL TOKEN ATTACK SECONDS`), so they
take no time from the event loop of the good client. They connect to loopback addresses only, and end after
SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp

SOURCE = ("127.0.0.2", 0)
TABLE = "/v1/namespaces/db/tables/t"
_REPORT = {"report-type": "commit-report", "table-name": "t", "snapshot-id": 1, "sequence-number": 1, "metrics": {}}

_IDLE_CONNECTIONS, _IDLE_SECONDS = 2000, 2
"""The number of connections without a request that are open at a time, and how long each stays open."""


class Attacker:
    """A malicious client of the server at `url`, with one method for each attack."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.hostname != "127.0.0.1" or parts.port is None:
            raise SystemExit("attacks are for servers on 127.0.0.1 only")
        self._url, self._port = url, parts.port
        self._login = {"Authorization": f"Bearer {token}"}

    def _open_session(self, **headers: str) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, local_addr=SOURCE)
        return aiohttp.ClientSession(connector=connector, headers=headers or self._login)

    async def _open_wire(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port, local_addr=SOURCE)

    async def _send_slowly(self, head: str) -> None:
        """Send `head`, and then one byte at a time, until the server closes the connection; then connect again.

        Each connection stays open as long as the server waits for the rest of the request.
        """
        while True:
            with contextlib.suppress(OSError):
                _, writer = await self._open_wire()
                writer.write(head.encode())
                while not writer.transport.is_closing():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.5)
            await asyncio.sleep(0.05)

    async def send_slow_headers(self) -> None:
        await _run_many(300, lambda: self._send_slowly("GET /v1/config HTTP/1.1\r\nHost: 127.0.0.1\r\nx: "))

    async def send_slow_bodies(self) -> None:
        head = f"POST {TABLE}/plan HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"
        login = "".join(f"{name}: {value}\r\n" for name, value in self._login.items())
        await _run_many(600, lambda: self._send_slowly(f"{head}{login}\r\n"))

    async def send_chunked_logins(self) -> None:
        async def send_once() -> None:
            reader, writer = await self._open_wire()
            head = "POST /v1/oauth/tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
            writer.write(f"{head}Content-Type: application/x-www-form-urlencoded\r\n\r\n".encode())
            for _ in range(1024):
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
            await reader.read(1000)
            writer.close()

        await _run_many(20, lambda: _repeat(send_once))

    async def send_gzip_bombs(self) -> None:
        bomb = gzip.compress(b" " * (512 << 20))
        async with self._open_session(**self._login, **{"Content-Encoding": "gzip"}) as http:
            await _run_many(8, lambda: self._post_repeatedly(http, f"{TABLE}/plan", lambda: bomb))

    async def open_connections(self) -> None:
        async def hold_connection() -> None:
            _, writer = await self._open_wire()
            try:
                await asyncio.sleep(_IDLE_SECONDS)
            finally:
                writer.transport.abort()

        await _run_many(_IDLE_CONNECTIONS, lambda: _repeat(hold_connection))

    async def send_bad_logins(self) -> None:
        async with self._open_session(Authorization="Bearer sm_wrong") as http:

            async def send_once() -> None:
                async with http.get(self._url + TABLE) as answer:
                    await answer.read()

            await _run_many(8, lambda: _repeat(send_once))

    async def open_watchers(self) -> None:
        async with self._open_session() as http:

            async def send_once() -> None:
                path = "/api/v1/tables/db/t/timeline?since=latest&wait=30"
                async with http.get(self._url + path) as answer:
                    await answer.read()
                    if answer.status >= 400:
                        await asyncio.sleep(0.5)

            await _run_many(400, lambda: _repeat(send_once))

    async def plan_tables(self) -> None:
        numbers = itertools.count()
        async with self._open_session() as http:
            path = "/api/v1/tables/db/t/plan-tables"
            await _run_many(
                4, lambda: self._post_repeatedly(http, path, lambda: {"predicate": f"id < {1000 + next(numbers)}"})
            )

    async def send_reports(self) -> None:
        async with self._open_session() as http:
            body = {**_REPORT, "metadata": {"x": "y" * 100_000}}
            await _run_many(4, lambda: self._post_repeatedly(http, f"{TABLE}/metrics", lambda: body))

    async def send_large_sign_requests(self) -> None:
        body = b"[" + b"[]," * (20 << 20) + b"[]]"
        async with self._open_session() as http:
            await _run_many(3, lambda: self._post_repeatedly(http, f"{TABLE}/sign", lambda: body))

    async def send_huge_filters(self) -> None:
        numbers = itertools.count()

        def build_body() -> bytes:
            first = next(numbers)
            values = list(range(first, first + 200_000))
            return json.dumps({"filter": {"type": "in", "term": "id", "values": values}}).encode()

        async with self._open_session() as http:
            await _run_many(2, lambda: self._post_repeatedly(http, f"{TABLE}/plan", build_body))

    async def _post_repeatedly(self, http: aiohttp.ClientSession, path: str, body: Callable[[], object]) -> None:
        """Send POST requests one after another, each with a new body from `body`."""

        async def send_once() -> None:
            chunk = body()
            data = chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()
            async with http.post(self._url + path, data=_yield_pieces(data)) as answer:
                await answer.read()

        await _repeat(send_once)


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "slow_headers": Attacker.send_slow_headers,
    "slow_bodies": Attacker.send_slow_bodies,
    "chunked_logins": Attacker.send_chunked_logins,
    "gzip_bombs": Attacker.send_gzip_bombs,
    "connections": Attacker.open_connections,
    "bad_logins": Attacker.send_bad_logins,
    "watchers": Attacker.open_watchers,
    "plan_tables": Attacker.plan_tables,
    "reports": Attacker.send_reports,
    "large_signs": Attacker.send_large_sign_requests,
    "huge_filters": Attacker.send_huge_filters,
}


async def _yield_pieces(data: bytes) -> object:  # type: ignore[misc]
    for offset in range(0, len(data), 1 << 18):
        yield data[offset : offset + (1 << 18)]


async def _run_many(count: int, work: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*(work() for _ in range(count)))


async def _repeat(send_once: Callable[[], Awaitable[None]]) -> None:
    """Repeat `send_once` without end.

    The server may answer or refuse the client in any way; the attack continues.
    """
    while True:
        try:
            await send_once()
        except (OSError, aiohttp.ClientError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.01)


async def attack(url: str, token: str, name: str, seconds: float) -> None:
    """Run the attack `name` (one of `ATTACKS`) for `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ATTACKS[name](Attacker(url, token))


if __name__ == "__main__":
    given_url, given_token, given_name, given_seconds = sys.argv[1:]
    asyncio.run(attack(given_url, given_token, given_name, float(given_seconds)))
