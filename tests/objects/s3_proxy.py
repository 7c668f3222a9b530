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
    """The faults of a proxy, which a test can change at any time.

    Attributes:
        lose_replies: The number of further PUT requests that the server executes, but whose replies are lost.
        drop_requests: The number of further PUT requests that do not reach the server.
        answer_500_after_storing: The number of further PUT requests that the server executes, but that get status 500.
        refuse_conditional_puts: Whether a PUT request with If-None-Match gets status 501.
        hang: Whether PUT requests get no answer for a minute.
        hang_all: Whether all requests get no answer for a minute.
        delay_s: The delay of every request.
        before_put: Called before a PUT request is passed on.
        requests: The method, and the status or the fault, of each received request.
    """

    lose_replies: int = 0
    drop_requests: int = 0
    answer_500_after_storing: int = 0
    refuse_conditional_puts: bool = False
    hang: bool = False
    hang_all: bool = False
    delay_s: float = 0.0
    before_put: Callable[[], None] | None = None
    requests: list[str] = field(default_factory=list)


@asynccontextmanager
async def run_misbehaving_proxy(upstream: str, port: int) -> AsyncIterator[Misbehaviour]:
    """Run a proxy on 127.0.0.1:`port` before the server at `upstream`."""
    misbehaviour = Misbehaviour()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            return await _forward(misbehaviour, session, upstream, request)

        runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield misbehaviour
        finally:
            await runner.cleanup()


async def _forward(
    misbehaviour: Misbehaviour, session: aiohttp.ClientSession, upstream: str, request: web.BaseRequest
) -> web.StreamResponse:
    """Pass the request to the S3 server, with the faults that are switched on."""
    body = await request.read()
    is_put = request.method == "PUT"
    if misbehaviour.delay_s:
        await asyncio.sleep(misbehaviour.delay_s)
    if misbehaviour.hang_all or (is_put and misbehaviour.hang):
        misbehaviour.requests.append(f"{request.method} hung")
        await asyncio.sleep(60)
    if is_put and misbehaviour.drop_requests:
        misbehaviour.drop_requests -= 1
        misbehaviour.requests.append("PUT dropped")
        return _break_connection(request)
    if is_put and misbehaviour.refuse_conditional_puts and "If-None-Match" in request.headers:
        misbehaviour.requests.append("PUT 501")
        return web.Response(status=501, text="<Error><Code>NotImplemented</Code></Error>")
    if is_put and misbehaviour.before_put is not None:
        misbehaviour.before_put()
    skip = ("Content-Type", "User-Agent", "Accept", "Accept-Encoding")
    async with session.request(
        request.method,
        URL(upstream + request.raw_path, encoded=True),
        headers=request.headers,
        data=body if body or is_put else None,
        skip_auto_headers=skip,
    ) as answer:
        content = await answer.read()
        misbehaviour.requests.append(f"{request.method} {answer.status}")
        if is_put and misbehaviour.lose_replies:
            misbehaviour.lose_replies -= 1
            return _break_connection(request)
        if is_put and misbehaviour.answer_500_after_storing:
            misbehaviour.answer_500_after_storing -= 1
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
