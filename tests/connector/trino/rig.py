"""The proxy over coordinators and a Seamark that do what a test says, all in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from seamark.connector.trino.proxy import Proxy, ProxySettings, open_proxy
from seamark.connector.trino.rewriter import RewriteLimits
from seamark.connector.trino.server import bind, serving

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
CATALOG = "lake"


@dataclass
class Fake:
    """A server that a test plays.

    `seen` has each request's method, target, headers and body.
    """

    url: str = ""
    seen: list[tuple[str, str, Any, bytes]] = field(default_factory=list)

    def bodies(self, method: str = "POST") -> list[str]:
        return [body.decode() for one, _, _, body in self.seen if one == method]


@asynccontextmanager
async def faked(answer: Callable[[Fake, web.BaseRequest, bytes], Awaitable[web.StreamResponse]]) -> AsyncIterator[Fake]:
    """`answer` gets each request after it was read and seen."""
    fake = Fake()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        fake.seen.append((request.method, request.rel_url.raw_path_qs, request.headers, body))
        return await answer(fake, request, body)

    async with listening(handle) as fake.url:
        yield fake


@asynccontextmanager
async def listening(handle: Handler) -> AsyncIterator[str]:
    server = web.Server(
        handle, handler_cancellation=True, auto_decompress=False, access_log=None, max_field_size=1 << 20
    )
    runner = web.ServerRunner(server, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def nowhere() -> str:
    """Return an address at which nobody listens, now or later: a port that was free may be taken meanwhile, and who
    connects to one of those that connections get may even meet himself.
    """
    return "http://127.0.0.1:1"


@dataclass
class Rig:
    url: str
    http: aiohttp.ClientSession
    proxy: Proxy

    def at(self, target: str) -> URL:
        return URL(self.url + target, encoded=True)

    async def ask(self, method: str, target: str, **options: Any) -> tuple[int, Any, bytes]:
        async with self.http.request(method, self.at(target), allow_redirects=False, **options) as answer:
            return answer.status, answer.headers, await answer.read()


@asynccontextmanager
async def proxied(*trino: str, seamark: str = "", tls: Any = None, **settings: Any) -> AsyncIterator[Rig]:
    """`http` unpacks nothing and follows nothing: what it sees is what came."""
    given = {"catalogs": frozenset([CATALOG]), "drain_s": 1.0, "limits": RewriteLimits(budget_s=10.0), **settings}
    sock = bind("127.0.0.1", 0)
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        of_proxy = ProxySettings(trino=trino, seamark=seamark or nowhere(), **given)
        proxy = await stack.enter_async_context(open_proxy(of_proxy))
        await stack.enter_async_context(serving(proxy, of_proxy, sock, tls))
        http = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(ssl=False),
            max_field_size=1 << 20,
            max_line_size=1 << 20,
        )
        await stack.enter_async_context(http)
        yield Rig(f"{'https' if tls else 'http'}://127.0.0.1:{sock.getsockname()[1]}", http, proxy)
