"""Tests of connections from unknown clients: silent connections, partial headers, floods, and data that is not HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web

from seamark.formats.runtime.connections import (
    Connection,
    ConnectionLimits,
    ConnectionRunner,
    Connections,
    DirectAnswers,
    raise_descriptor_limit,
)
from seamark.metaserver.api.http.errors import make_error_response
from seamark.metaserver.server import make_connection_limits
from seamark.metaserver.settings.settings import Settings
from tests.server.rig import RunningServer, run_server
from tests.waits import until

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class RawConnection:
    """A connection on which a test sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, server: RunningServer, source: str = "127.0.0.1") -> RawConnection:
        port = int(server.url.rpartition(":")[2])
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_rest(self) -> bytes:
        """Return the bytes until the server closes the connection, or no bytes if the connection fails."""
        try:
            async with asyncio.timeout(60):
                return await self.reader.read()
        except ConnectionError:
            return b""

    async def read_answer(self) -> tuple[int, bytes]:
        """Read one answer with a Content-Length. Return (status, body)."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def request_health(self) -> bool:
        """Send a request for the server's health. Return whether its status is 200."""
        await self.send(HEALTH)
        return (await self.read_answer())[0] == 200

    async def __aenter__(self) -> RawConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()


def parse_error(raw: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(raw)["error"]
    return error


@contextmanager
def capture_all_logs(capfd: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """Yield a list that has the text of all log messages of structlog and `logging` after the block."""
    lines: list[str] = []
    with structlog.testing.capture_logs() as events:
        yield lines
    out, err = capfd.readouterr()
    lines += [out, err, *(str(event) for event in events)]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("first_bytes", [b"", b"GET /healthz HT", HEALTH[:-2]])
async def test_header_that_does_not_arrive_in_time_ends_the_connection(tmp_path: Path, first_bytes: bytes) -> None:
    async with run_server(tmp_path, header_timeout_s=0.2) as server, await RawConnection.open(server) as raw_connection:
        await raw_connection.send(first_bytes)
        remaining_bytes = await raw_connection.read_rest()
        assert b"HTTP/1.1 408 " in remaining_bytes
        assert parse_error(remaining_bytes.rpartition(b"\r\n\r\n")[2])["code"] == 408


async def test_header_that_arrives_slowly_has_the_same_time_limit(tmp_path: Path) -> None:
    async with run_server(tmp_path, header_timeout_s=0.3) as server, await RawConnection.open(server) as raw_connection:
        await raw_connection.send(HEALTH[:-2] + b"x: ")
        async with asyncio.timeout(60):
            while not raw_connection.reader.at_eof():
                try:
                    await raw_connection.send(b"y")
                    await asyncio.wait_for(raw_connection.reader.read(100), 0.05)
                except TimeoutError:
                    continue
                except ConnectionError:
                    break


@pytest.mark.slow
async def test_connection_with_a_request_may_be_idle_longer_than_the_header_limit(tmp_path: Path) -> None:
    async with run_server(tmp_path, header_timeout_s=3) as server, await RawConnection.open(server) as raw_connection:
        assert await raw_connection.request_health()
        await asyncio.sleep(3.2)
        assert await raw_connection.request_health()


async def test_idle_connection_is_closed_after_its_time(tmp_path: Path) -> None:
    async with run_server(tmp_path, idle_timeout_s=3) as server, await RawConnection.open(server) as raw_connection:
        assert await raw_connection.request_health()
        assert await raw_connection.read_rest() == b""


async def test_silent_connections_are_closed_to_accept_active_connections(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_limit=8) as server, AsyncExitStack() as stack:
        old_connection = await stack.enter_async_context(await RawConnection.open(server))
        assert await old_connection.request_health()
        for number in range(30):
            await stack.enter_async_context(await RawConnection.open(server, f"127.0.0.{2 + number % 4}"))
        new_connection = await stack.enter_async_context(await RawConnection.open(server, "127.0.0.9"))
        assert await new_connection.request_health()
        assert await old_connection.request_health()


async def test_address_has_a_connection_limit_and_its_idle_connections_are_closed_first(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path, connections_limit=100, connections_per_address=3) as server,
        AsyncExitStack() as stack,
    ):
        other_connection = await stack.enter_async_context(await RawConnection.open(server, "127.0.0.2"))
        assert await other_connection.request_health()
        raw_connections = [await stack.enter_async_context(await RawConnection.open(server)) for _ in range(3)]
        for raw_connection in raw_connections:
            assert await raw_connection.request_health()
        fourth_connection = await stack.enter_async_context(await RawConnection.open(server))
        assert await fourth_connection.request_health()
        assert await raw_connections[0].read_rest() == b""
        assert await raw_connections[2].request_health()
        assert await other_connection.request_health()


async def test_accepting_a_connection_does_not_scan_all_idle_connections() -> None:
    limits = ConnectionLimits(
        connections=10_000, per_address=5_000, header_bytes=1 << 20, header_timeout_s=10, send_timeout_s=60
    )
    runner = ConnectionRunner(web.Application(), limits, DirectAnswers(make_error_response, lambda: None))
    await runner.setup()
    server_connections, loop = runner.server, asyncio.get_running_loop()
    assert isinstance(server_connections, Connections)

    def connect(number: int) -> Connection:
        connection = server_connections.create_connection()
        connection.address = "127.0.0.2"
        assert server_connections.admit(connection)
        server_connections.record_header(connection)
        # The connection has been idle since this time.
        connection._waiter, connection._next_keepalive_close_time = (
            loop.create_future(),
            float(number),
        )
        return connection

    connections = [connect(number) for number in range(5_000)]
    connections[1]._next_keepalive_close_time = 5_000.5  # This connection has sent another request.
    read_count = 0

    def count_reads(connection: Connection) -> float | None:
        nonlocal read_count
        read_count += 1
        return idle_since(connection)

    idle_since = vars(Connection)["idle_since"].fget
    assert idle_since is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "idle_since", property(count_reads))
        connections += [connect(6_000 + number) for number in range(600)]
    assert read_count < 5_000 * 4  # A scan for each of the 600 new connections would read 600 * 5,000 times.
    # 600 connections are over the limit of the address: those with the numbers 0 and 2 to 600.
    is_open = [open_connection in server_connections._open for open_connection in connections]
    assert is_open[:602] == [False, True, *[False] * 599, True], (
        "the connections that were idle for longest must be closed"
    )
    assert all(is_open[602:])
    server_connections.check_invariants()
    # The connections are closed, because other tests count the existing connections.
    for open_connection in connections:
        server_connections.release(open_connection)
    await runner.cleanup()


async def test_running_requests_are_never_ended_for_new_connections(tmp_path: Path) -> None:
    watch_request = b"GET /api/v1/timeline?since=latest&wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with (
        run_server(tmp_path, connections_limit=2, connections_per_address=2) as server,
        AsyncExitStack() as stack,
    ):
        raw_connections = [await stack.enter_async_context(await RawConnection.open(server)) for _ in range(2)]
        for raw_connection in raw_connections:
            await raw_connection.send(watch_request)
        await until(lambda: server.components.timeline.watchers == 2)
        with structlog.testing.capture_logs() as events:
            third_connection = await stack.enter_async_context(await RawConnection.open(server))
            status, body = await third_connection.read_answer()
            assert (status, parse_error(body)["type"]) == (429, "TooManyRequestsException")
            for _ in range(20):
                await (await stack.enter_async_context(await RawConnection.open(server))).read_rest()
        log_events = [event for event in events if event["event"] == "an address has too many connections"]
        assert len(log_events) == 1, "the event must be logged once, and not for each connection"
        server.components.timeline.drain()
        for raw_connection in raw_connections:
            assert (await raw_connection.read_answer())[0] == 200


async def test_body_that_arrives_while_its_request_starts_is_not_read_as_a_header() -> None:
    """aiohttp starts a task for each request from its queue, so bytes may arrive before the task begins."""

    async def answer_slowly(request: web.Request) -> web.Response:
        body = await request.read()
        await asyncio.sleep(2.5)  # This is longer than the time limit of a header.
        return web.Response(body=body)

    app = web.Application()
    app.router.add_post("/", answer_slowly)
    limits = ConnectionLimits(connections=10, per_address=10, header_bytes=1000, header_timeout_s=2, send_timeout_s=60)
    runner = ConnectionRunner(app, limits, DirectAnswers(make_error_response, lambda: None))
    await runner.setup()
    server_connections = runner.server
    assert isinstance(server_connections, Connections)
    make_request = server_connections.request_factory

    def make_request_and_receive_bytes(*arguments: Any) -> Any:
        request = make_request(*arguments)
        connection = arguments[2]
        connection.data_received(bytes(2000))
        return request

    server_connections.request_factory = make_request_and_receive_bytes
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with RawConnection(*await asyncio.open_connection("127.0.0.1", port)) as raw_connection:
        await raw_connection.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2001\r\n\r\n1")
        assert await raw_connection.read_answer() == (200, b"1" + bytes(2000))
    await runner.cleanup()


async def test_unread_answer_does_not_stay_in_memory(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path, send_timeout_s=2, log_level="error") as server,
        await RawConnection.open(server) as raw_connection,
    ):
        connections = _find_connections()
        raw_connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        raw_connection.writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)
        await until(lambda: connections.count == 1)
        await until(lambda: connections.count == 0)
        connections.check_invariants()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /v1/config HTTP/1.1\r\nHost: a\r\nAuthorization Bearer sm_verysecret\r\n\r\n", 400),
        (b"GET /v1/config HTTP/1.1\r\nHost: a\r\nAuthori zation: Bearer sm_verysecret\r\n\r\n", 400),
        (b"GET /v1/config HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sm_verysecret\x00\r\n\r\n", 400),
        (b"GET /v1/config HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sm_verysecret" + b"x" * 9000 + b"\r\n\r\n", 431),
        (b"GET /" + b"sm_verysecret" * 900 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        (b"sm_verysecret\r\n\r\n", 400),
        (b"GET http://[sm_verysecret HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/9.9 sm_verysecret\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: sm_verysecret\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nsm_verysecret", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00sm_verysecret\r\n\r\n", 400),
        (b"GET /v1/config HTTP/1.1\r\nHost: a\r\nExpect: sm_verysecret\r\n\r\n", 417),
        (b"POST /nowhere HTTP/1.1\r\nHost: a\r\nExpect: sm_verysecret\r\nContent-Length: 9\r\n\r\n", 417),
    ],
)
async def test_answer_to_invalid_http_is_a_standard_error_that_quotes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, raw: bytes, status: int
) -> None:
    with capture_all_logs(capfd) as lines:
        async with run_server(tmp_path) as server, await RawConnection.open(server) as raw_connection:
            await raw_connection.send(raw)
            answer = await raw_connection.read_rest()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert parse_error(body)["code"] == status
    assert b"server: seamark\r\n" in head.lower() + b"\r\n"
    for text in (answer.decode(), caplog.text, *lines):
        assert "verysecret" not in text
        assert "aiohttp/" not in text
        assert "Traceback" not in text


@pytest.mark.parametrize("value", ["", "100-Continue"])
async def test_empty_and_mixed_case_expect_headers_are_answered(tmp_path: Path, value: str) -> None:
    async with run_server(tmp_path) as server, await RawConnection.open(server) as raw_connection:
        await raw_connection.send(f"GET /healthz HTTP/1.1\r\nHost: a\r\nExpect: {value}\r\n\r\n".encode())
        if value:
            assert await raw_connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await raw_connection.read_answer())[0] == 200
        assert await raw_connection.request_health()  # The same connection stays usable.


async def test_requests_that_are_not_http_are_counted(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server, await RawConnection.open(server) as raw_connection:
        await raw_connection.send(b"GET / HTTP/1.1\r\nno colon\r\n\r\n")
        await raw_connection.read_rest()
        assert b'seamark_requests_total{operation="unreadable",status="400"} 1.0' in server.components.metrics.render()


def test_limit_on_open_files_is_raised_to_the_allowed_maximum() -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft_limit, 512), hard_limit))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


def test_connection_limit_leaves_file_descriptors_for_other_uses() -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard_limit))
        with structlog.testing.capture_logs() as events:
            limits = make_connection_limits(Settings())
        assert 4 <= limits.connections <= 100
        assert limits.per_address == limits.connections // 2
        assert any("ulimit" in event["event"] for event in events)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


async def test_connection_accepted_before_shutdown_is_closed() -> None:
    async def fail_if_called(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("no request was sent")

    answers = DirectAnswers(lambda status, kind, message: web.Response(status=status, text=message), lambda: None)
    limits = ConnectionLimits(connections=10, per_address=10, header_bytes=1000, header_timeout_s=60, send_timeout_s=60)
    server = Connections(web.Server(fail_if_called), limits, answers)
    await server.shutdown(1)
    client_socket, server_socket = socket.socketpair()
    with server_socket:
        server_socket.setblocking(False)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(server, client_socket)
        async with asyncio.timeout(60):
            assert await asyncio.get_running_loop().sock_recv(server_socket, 1000) == b""
        assert transport.is_closing()
        assert server.count == 0


def _find_connections() -> Connections:
    """Return the connections of this test's server. Servers of earlier tests may not be collected as garbage yet."""
    loop = asyncio.get_running_loop()
    (connections,) = (item for item in gc.get_objects() if isinstance(item, Connections) and item._loop is loop)
    return connections
