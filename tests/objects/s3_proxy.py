"""A proxy before a real S3 server that loses replies, rejects conditional writes or returns errors, on demand.

It forwards requests byte for byte, because the signature covers Host and the raw path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL


@dataclass
class Misbehaviour:
    """Faults of the proxy.

    Each of the next PUTs decreases a count. `delay_s` and `hang_all` apply to every request. `requests` has the
    received requests as `METHOD status-of-the-server`.
    """

    lose_replies: int = 0
    drop_requests: int = 0
    answer_500_after: int = 0
    conditional_501: bool = False
    hang: bool = False
    hang_all: bool = False
    delay_s: float = 0.0
    before_put: Callable[[], None] | None = None
    requests: list[str] = field(default_factory=list)


@asynccontextmanager
async def run_misbehaving_proxy(upstream: str, port: int) -> AsyncIterator[Misbehaviour]:
    """Run a proxy on 127.0.0.1:`port` before the server at `upstream`."""
    mode = Misbehaviour()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            return await _forward(mode, session, upstream, request)

        runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield mode
        finally:
            await runner.cleanup()


async def _forward(
    mode: Misbehaviour, session: aiohttp.ClientSession, upstream: str, request: web.BaseRequest
) -> web.StreamResponse:
    """Pass the request to the S3 server, with the faults that are switched on."""
    body = await request.read()
    is_put = request.method == "PUT"
    if mode.delay_s:
        await asyncio.sleep(mode.delay_s)
    if mode.hang_all or (is_put and mode.hang):
        mode.requests.append(f"{request.method} hung")
        await asyncio.sleep(60)
    if is_put and mode.drop_requests:
        mode.drop_requests -= 1
        mode.requests.append("PUT dropped")
        return _break_connection(request)
    if is_put and mode.conditional_501 and "If-None-Match" in request.headers:
        mode.requests.append("PUT 501")
        return web.Response(status=501, text="<Error><Code>NotImplemented</Code></Error>")
    if is_put and mode.before_put is not None:
        mode.before_put()
    skip = ("Content-Type", "User-Agent", "Accept", "Accept-Encoding")
    async with session.request(
        request.method,
        URL(upstream + request.raw_path, encoded=True),
        headers=request.headers,
        data=body if body or is_put else None,
        skip_auto_headers=skip,
    ) as answer:
        content = await answer.read()
        mode.requests.append(f"{request.method} {answer.status}")
        if is_put and mode.lose_replies:
            mode.lose_replies -= 1
            return _break_connection(request)
        if is_put and mode.answer_500_after:
            mode.answer_500_after -= 1
            return web.Response(status=500, text="<Error><Code>InternalError</Code></Error>")
        kept_headers = {
            k: v for k, v in answer.headers.items() if k.lower() not in ("content-length", "transfer-encoding")
        }
        if request.method == "HEAD":
            kept_headers["Content-Length"] = answer.headers.get("Content-Length", "0")
        return web.Response(
            status=answer.status, headers=kept_headers, body=content if request.method != "HEAD" else None
        )


def _break_connection(request: web.BaseRequest) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
