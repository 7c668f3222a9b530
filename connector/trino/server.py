"""Runs the proxy as a process with its socket, connection limits, TLS and signals, and stops it gracefully."""

from __future__ import annotations

import asyncio
import gc
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

from seamark.connector.trino.protocol.forwarder import HEADER_BYTES_MAX, HEADERS_MAX, make_error_response
from seamark.connector.trino.proxy import Proxy, ProxySettings, open_proxy
from seamark.formats.runtime.connections import (
    ConnectionLimits,
    Connections,
    DirectAnswers,
    compute_connections_max,
    raise_descriptor_limit,
)
from seamark.formats.runtime.tls import Certificate

_BACKLOG_CONNECTIONS = 1024
_DRAIN_POLL_S = 0.02
"""The time in seconds between two checks whether all requests have ended."""
_SHUTDOWN_S_MIN = 1.0
"""The minimum time in seconds for closing the connections, even if the time for requests is over."""
_log = structlog.get_logger("seamark.trino-proxy")


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not yet listen.

    Raises:
        OSError: The address is taken, or is not an address of this machine.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def make_upstream_tls(authorities: Path | None, *, verify: bool) -> ssl.SSLContext | None:
    """Return the TLS context for connections to coordinators, or None to use the system's certificate authorities."""
    if authorities is None and verify:
        return None
    context = ssl.create_default_context(cafile=authorities)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def make_connection_limits(settings: ProxySettings) -> ConnectionLimits:
    """Return the connection limits that the settings define.

    A limit that is not set is derived from the number of files that the process may open, because each client also
    needs a connection to a coordinator. Behind a further proxy, all clients have the same address, so the limit per
    address is then the limit of all connections.
    """
    limit = compute_connections_max(settings.connections, files_each=2, minimum=0)
    share = limit if settings.trust_forwarded else max(1, limit // 2)
    return ConnectionLimits(
        connections=limit,
        per_address=settings.connections_per_address or share,
        header_bytes=settings.header_bytes,
        header_timeout_s=settings.header_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )


@asynccontextmanager
async def serve_proxy(
    proxy: Proxy, settings: ProxySettings, sock: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Answer requests on `sock` while the block runs. Then wait at most `drain_s` for the requests in flight.

    At the end, the proxy accepts no new connections, and its health check fails, so that clients change to another
    proxy.
    """
    inner = web.Server(
        proxy.handle,
        handler_cancellation=True,  # The request of a disconnected client is cancelled.
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=settings.idle_timeout_s,
        max_line_size=min(HEADER_BYTES_MAX, settings.header_bytes),
        max_field_size=min(HEADER_BYTES_MAX, settings.header_bytes),
        max_headers=HEADERS_MAX,
    )
    answers = DirectAnswers(lambda status, _, message: make_error_response(status, message), proxy.count_unreadable)
    server = Connections(inner, make_connection_limits(settings), answers, tls)
    runner = web.ServerRunner(server, handle_signals=False)
    await runner.setup()
    try:
        site = web.SockSite(runner, sock, backlog=_BACKLOG_CONNECTIONS)
        await site.start()
        yield
        proxy.draining = True
        await site.stop()
        deadline_s = time.monotonic() + settings.drain_s
        while proxy.answering and time.monotonic() < deadline_s:  # noqa: ASYNC110  an event would cost every request
            await asyncio.sleep(_DRAIN_POLL_S)
        if proxy.answering:
            _log.warning("requests in flight are interrupted", count=proxy.answering)
        server.pre_shutdown()
        await server.shutdown(max(_SHUTDOWN_S_MIN, deadline_s - time.monotonic()))
    finally:
        await runner.cleanup()


async def serve(
    settings: ProxySettings, sock: socket.socket, tls: Certificate | None, on_ready: Callable[[], None]
) -> None:
    """Answer requests until SIGTERM or SIGINT. Then wait for the requests in flight, and stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch_task, context = None, None if tls is None else tls.context
    if tls is not None:
        loop.add_signal_handler(signal.SIGHUP, tls.request_reload)
        watch_task = asyncio.create_task(tls.watch(), name="certificate")
    async with open_proxy(settings) as proxy, serve_proxy(proxy, settings, sock, context):
        # The loaded modules are frozen, because garbage collections that traverse them would delay all requests.
        gc.collect()
        gc.freeze()
        on_ready()
        await stop.wait()
        _log.info("draining", timeout_s=settings.drain_s)
    if watch_task is not None:
        watch_task.cancel()
    _log.info("stopped")


def run(settings: ProxySettings, sock: socket.socket, tls: Certificate | None, on_ready: Callable[[], None]) -> None:
    with suppress(ValueError, OSError):
        raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, sock, tls, on_ready))
