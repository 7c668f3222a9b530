"""Runs the proxy between scripted coordinators and a scripted Seamark, all in the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from seamark.connector.trino.proxy import Proxy, ProxySettings, open_proxy
from seamark.connector.trino.rewriter import RewriteLimits
from seamark.connector.trino.server import bind, serve_proxy

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
CATALOG = "lake"


class ReceivedRequest(NamedTuple):
    method: str
    target: str
    headers: Any
    body: bytes


@dataclass
class FakeServer:
    """A server whose answers a test writes, and the requests that it has received."""

    url: str = ""
    requests: list[ReceivedRequest] = field(default_factory=list)

    def list_bodies(self, method: str = "POST") -> list[str]:
        return [request.body.decode() for request in self.requests if request.method == method]


@asynccontextmanager
async def run_fake_server(
    answer: Callable[[FakeServer, web.BaseRequest, bytes], Awaitable[web.StreamResponse]],
) -> AsyncIterator[FakeServer]:
    """Yield a server. `answer` receives each request after its body was read and recorded in `requests`."""
    fake_server = FakeServer()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        received_request = ReceivedRequest(request.method, request.rel_url.raw_path_qs, request.headers, body)
        fake_server.requests.append(received_request)
        return await answer(fake_server, request, body)

    async with serve_requests(handle) as fake_server.url:
        yield fake_server


@asynccontextmanager
async def serve_requests(handle: Handler) -> AsyncIterator[str]:
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


def reserve_dead_address() -> str:
    """Return an address at which no server ever listens.

    Programs do not use port 1. Another free port could be used later, and a connection to an ephemeral port can even
    connect to itself.
    """
    return "http://127.0.0.1:1"


@dataclass
class ProxyRig:
    url: str
    http: aiohttp.ClientSession
    proxy: Proxy

    def make_url(self, target: str) -> URL:
        return URL(self.url + target, encoded=True)

    async def ask(self, method: str, target: str, **options: Any) -> tuple[int, Any, bytes]:
        """Send a request, and return the status, the headers and the body of the answer."""
        async with self.http.request(method, self.make_url(target), allow_redirects=False, **options) as answer:
            return answer.status, answer.headers, await answer.read()


@asynccontextmanager
async def run_proxy(*trino: str, seamark: str = "", tls: Any = None, **settings: Any) -> AsyncIterator[ProxyRig]:
    """Yield a running proxy of the coordinators `trino`. Without `seamark`, no Seamark server answers the proxy.

    Its client `http` does not decompress bodies and follows no redirects, so tests see the answers as they were sent.
    """
    # The budget is so long that a busy machine does not exceed it.
    arguments = {"catalogs": frozenset([CATALOG]), "drain_s": 1.0, "limits": RewriteLimits(budget_s=10.0), **settings}
    sock = bind("127.0.0.1", 0)
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        proxy_settings = ProxySettings(trino=trino, seamark=seamark or reserve_dead_address(), **arguments)
        proxy = await stack.enter_async_context(open_proxy(proxy_settings))
        await stack.enter_async_context(serve_proxy(proxy, proxy_settings, sock, tls))
        http = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(ssl=False),
            max_field_size=1 << 20,
            max_line_size=1 << 20,
        )
        await stack.enter_async_context(http)
        yield ProxyRig(f"{'https' if tls else 'http'}://127.0.0.1:{sock.getsockname()[1]}", http, proxy)
