"""The proxy as a process: a socket, TLS, signals, and an end that waits for what is under way."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog
import uvloop
from aiohttp import web

from connector.trino.protocol.forwarder import HEADER_BYTES_MAX, HEADERS_MAX
from connector.trino.proxy import Proxy, ProxySettings, open_proxy
from metaserver.tls import Certificate

_BACKLOG = 1024
_KEEPALIVE_S = 300.0
"""Of clients' idle connections."""
_log = structlog.get_logger("seamark.trino-proxy")


def bind(host: str, port: int) -> socket.socket:
    """Bound, not yet listening. OSError where the address is taken, or none of this machine's."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def upstream_tls(authorities: Path | None, *, verify: bool) -> ssl.SSLContext | None:
    """For connections to coordinators; None is what the system trusts."""
    if authorities is None and verify:
        return None
    context = ssl.create_default_context(cafile=authorities)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@asynccontextmanager
async def serving(proxy: Proxy, sock: socket.socket, tls: ssl.SSLContext | None, drain_s: float) -> AsyncIterator[None]:
    """Answers requests on `sock` for as long as the block runs, then those that are under way, for `drain_s`."""
    server = web.Server(
        proxy.handle,
        handler_cancellation=True,  # a client that leaves takes its request along
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_S,
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
        max_headers=HEADERS_MAX,
    )
    runner = web.ServerRunner(server, handle_signals=False)
    await runner.setup()
    try:
        site = web.SockSite(runner, sock, backlog=_BACKLOG, ssl_context=tls)
        await site.start()
        yield
        proxy.draining = True
        await site.stop()
        deadline_s = time.monotonic() + drain_s
        while proxy.answering and time.monotonic() < deadline_s:  # noqa: ASYNC110  an event would cost every request
            await asyncio.sleep(0.02)
        if proxy.answering:
            _log.warning("requests are cut off", count=proxy.answering)
        server.pre_shutdown()
        await server.shutdown(max(1.0, deadline_s - time.monotonic()))
    finally:
        await runner.cleanup()


async def serve(
    settings: ProxySettings, sock: socket.socket, tls: Certificate | None, on_ready: Callable[[], None]
) -> None:
    """Until SIGTERM or SIGINT, then drains."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watching, context = None, None if tls is None else tls.context
    if tls is not None:
        loop.add_signal_handler(signal.SIGHUP, tls.reload)
        watching = asyncio.create_task(tls.watch(), name="certificate")
    async with open_proxy(settings) as proxy, serving(proxy, sock, context, settings.drain_s):
        # Modules are there for good; the collector's rounds through them would hold up everybody.
        gc.collect()
        gc.freeze()
        on_ready()
        await stop.wait()
        _log.info("draining", timeout_s=settings.drain_s)
    if watching is not None:
        watching.cancel()
    _log.info("stopped")


def run(settings: ProxySettings, sock: socket.socket, tls: Certificate | None, on_ready: Callable[[], None]) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # two for each client: the usual 1,024 are few
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, sock, tls, on_ready))
