"""Tests of the limits on clients of the proxy.

They cover idle and too many connections, large and slow headers and bodies, and unread answers.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from seamark.connector.trino.proxy import ProxySettings
from seamark.connector.trino.server import make_connection_limits
from tests.connector.trino.rig import FakeServer, ProxyRig, run_fake_server, run_proxy, serve_requests
from tests.server.test_connections import RawConnection
from tests.services.authority import Authority
from tests.waits import until

INFO_REQUEST = b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def echo(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
    return web.Response(body=b"%d bytes" % len(body))


async def connect_to_proxy(
    stack: AsyncExitStack, rig: ProxyRig, source: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> RawConnection:
    port = int(rig.url.rpartition(":")[2])
    streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), ssl=tls)
    return await stack.enter_async_context(RawConnection(*streams))


async def is_answered(connection: RawConnection) -> bool:
    await connection.send(INFO_REQUEST)
    return (await connection.read_answer())[0] == 200


def build_head(path: str, *headers: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


@pytest.mark.parametrize("first_bytes", [b"", b"GET /v1/in", INFO_REQUEST[:-2] + b"x: "])
async def test_header_that_does_not_arrive_in_time_ends_the_connection(first_bytes: bytes) -> None:
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, header_timeout_s=0.2) as rig,
        AsyncExitStack() as stack,
    ):
        connection = await connect_to_proxy(stack, rig)
        await connection.send(first_bytes)
        assert b"HTTP/1.1 408 " in await connection.read_rest()


async def test_idle_connection_is_closed_after_its_time() -> None:
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, idle_timeout_s=3) as rig,
        AsyncExitStack() as stack,
    ):
        connection = await connect_to_proxy(stack, rig)
        assert await is_answered(connection)
        assert await connection.read_rest() == b""


async def test_silent_connections_are_closed_in_favour_of_active_ones() -> None:
    async with run_fake_server(echo) as trino, run_proxy(trino.url, connections=8) as rig, AsyncExitStack() as stack:
        old_connection = await connect_to_proxy(stack, rig)
        assert await is_answered(old_connection)
        for number in range(30):
            await connect_to_proxy(stack, rig, f"127.0.0.{2 + number % 4}")
        new_connection = await connect_to_proxy(stack, rig, "127.0.0.9")
        assert await is_answered(new_connection)
        assert await is_answered(old_connection)


async def test_address_has_a_connection_limit_that_interrupts_no_request() -> None:
    may_answer = asyncio.Event()

    async def answer_late(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        await may_answer.wait()
        return web.Response(text="late")

    async with (
        run_fake_server(answer_late) as trino,
        run_proxy(trino.url, connections_per_address=2) as rig,
        AsyncExitStack() as stack,
    ):
        connections = [await connect_to_proxy(stack, rig) for _ in range(2)]
        for connection in connections:
            await connection.send(INFO_REQUEST)
        async with asyncio.timeout(60):
            while len(trino.requests) < 2:
                await asyncio.sleep(0.01)
        third_connection = await connect_to_proxy(stack, rig)
        assert (await third_connection.read_answer())[0] == 429
        other_client = await connect_to_proxy(stack, rig, "127.0.0.2")
        await other_client.send(INFO_REQUEST)
        may_answer.set()
        for connection in (*connections, other_client):
            assert await connection.read_answer() == (200, b"late")


@pytest.mark.parametrize(("fields", "size"), [(1, 20_000), (40, 1_000), (1000, 10)])
async def test_header_above_the_size_limit_is_refused(fields: int, size: int) -> None:
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, header_bytes=16_384) as rig,
        AsyncExitStack() as stack,
    ):
        connection = await connect_to_proxy(stack, rig)
        await connection.send(INFO_REQUEST[:-2])
        for number in range(fields):
            connection.writer.write(f"x-{number}: {'y' * size}\r\n".encode())
            await asyncio.sleep(0)
        assert b" 431 " in await connection.read_rest()
        assert trino.requests == []


async def test_body_and_answer_do_not_count_towards_the_header_limit() -> None:
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, header_bytes=16_384) as rig,
        AsyncExitStack() as stack,
    ):
        connection = await connect_to_proxy(stack, rig)
        for _ in range(3):
            await connection.send(build_head("/v1/x", "Content-Length: 100000"))
            for _ in range(10):
                await connection.send(b"x" * 10_000)
                await asyncio.sleep(0)
            assert await connection.read_answer() == (200, b"100000 bytes")


@pytest.mark.parametrize("path", ["/v1/statement", "/v1/other"])
@pytest.mark.parametrize("has_content_length", [True, False])
async def test_large_body_is_refused(path: str, has_content_length: bool) -> None:
    limits = {"body_bytes": 10_000, "statement_bytes": 1_000}
    async with run_fake_server(echo) as trino, run_proxy(trino.url, **limits) as rig, AsyncExitStack() as stack:
        connection = await connect_to_proxy(stack, rig)
        if has_content_length:
            await connection.send(build_head(path, "Content-Length: 10001"))
        else:
            await connection.send(build_head(path, "Transfer-Encoding: chunked"))
            for _ in range(11):
                await connection.send(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        status, body = await connection.read_answer()
        assert (status, b"10,000 bytes" in body) == (413, True)
        assert trino.requests == []
        second_connection = await connect_to_proxy(stack, rig)
        await second_connection.send(build_head(path, "Content-Length: 10000") + b"x" * 10_000)
        assert await second_connection.read_answer() == (200, b"10000 bytes")


@pytest.mark.parametrize("path", ["/v1/statement", "/v1/other"])
async def test_body_that_stops_or_arrives_slowly_is_refused(path: str) -> None:
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, body_timeout_s=0.3) as rig,
        AsyncExitStack() as stack,
    ):
        stopped_connection, slow_connection = await connect_to_proxy(stack, rig), await connect_to_proxy(stack, rig)
        for connection in (stopped_connection, slow_connection):
            await connection.send(build_head(path, "Content-Length: 1000") + b"x")

        async def send_slowly() -> None:
            while True:
                await slow_connection.send(b"x")
                await asyncio.sleep(0.02)

        slow_client = asyncio.create_task(send_slowly())
        try:
            for connection in (stopped_connection, slow_connection):
                assert (await connection.read_answer())[0] == 408
        finally:
            slow_client.cancel()
        assert trino.requests == []


async def test_slow_coordinator_does_not_cause_a_body_timeout() -> None:
    body_bytes = 12 << 20  # More than the buffers of the sockets hold, so the proxy must wait for the coordinator.

    async def read_body_late(request: web.BaseRequest) -> web.Response:
        size = 0
        await asyncio.sleep(4.5)  # Longer than the body timeout.
        async for chunk in request.content.iter_any():
            size += len(chunk)
        return web.Response(body=b"%d bytes" % size)

    # A busy machine may delay the client, which is in this process, and the proxy counts this time as waiting
    # for the client.
    async with serve_requests(read_body_late) as trino, run_proxy(trino, body_timeout_s=4) as rig:
        status, _, body = await rig.ask("POST", "/v1/x", data=io.BytesIO(b"x" * body_bytes))
        assert (status, body) == (200, b"%d bytes" % body_bytes)


async def test_connection_of_a_client_that_does_not_read_its_answer_is_closed() -> None:
    async def send_endlessly(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * (1 << 20))
        finally:
            end_event.set()

    end_event = asyncio.Event()
    async with (
        serve_requests(send_endlessly) as trino,
        run_proxy(trino, send_timeout_s=0.3) as rig,
        AsyncExitStack() as stack,
    ):
        connection = await connect_to_proxy(stack, rig)
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(INFO_REQUEST)
        async with asyncio.timeout(60):
            await end_event.wait()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization Bearer verysecret\r\n\r\n", 400),
        (b"verysecret\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: verysecret\r\n\r\n", 400),
    ],
)
async def test_invalid_http_requests_are_counted_and_not_quoted(request_bytes: bytes, status: int) -> None:
    async with run_fake_server(echo) as trino, run_proxy(trino.url) as rig, AsyncExitStack() as stack:
        connection = await connect_to_proxy(stack, rig)
        with structlog.testing.capture_logs() as events:
            await connection.send(request_bytes)
            answer = await connection.read_rest()
        assert int(answer.split()[1]) == status
        assert "verysecret" not in answer.decode() + str(events)
        assert b"aiohttp/" not in answer
        assert (
            'seamark_trino_requests_total{status="4xx"} 1.0' in (await rig.ask("GET", "/seamark/metrics"))[2].decode()
        )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    new_authority = Authority(tmp_path)
    new_authority.issue("proxy")
    return new_authority


async def test_connections_count_before_their_tls_handshake(authority: Authority) -> None:
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(authority.certificate, authority.key)
    tls_context = ssl.create_default_context(cafile=str(authority.file))
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, tls=server_context, connections=8) as rig,
        AsyncExitStack() as stack,
    ):
        old_connection = await connect_to_proxy(stack, rig, tls=tls_context)
        assert await is_answered(old_connection)
        silent_connections = [await connect_to_proxy(stack, rig, f"127.0.0.{2 + number}") for number in range(30)]
        new_connection = await connect_to_proxy(stack, rig, tls=tls_context)
        read_tasks = [asyncio.create_task(connection.read_rest()) for connection in silent_connections]
        # The proxy keeps at most 8 of the 30 connections.
        await until(lambda: sum(task.done() for task in read_tasks) >= 30 - 8)
        assert {task.result() for task in read_tasks if task.done()} == {b""}
        assert await is_answered(old_connection)
        assert await is_answered(new_connection)
        for task in read_tasks:
            task.cancel()
        await asyncio.gather(*read_tasks, return_exceptions=True)


async def test_tls_handshake_that_does_not_end_in_time_closes_the_connection(authority: Authority) -> None:
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(authority.certificate, authority.key)
    limits = {"header_timeout_s": 0.3}
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, tls=server_context, **limits) as rig,
        AsyncExitStack() as stack,
    ):
        for first_bytes in (b"", b"\x16\x03\x01", INFO_REQUEST):
            connection = await connect_to_proxy(stack, rig)
            await connection.send(first_bytes)
            assert b"HTTP" not in await connection.read_rest()


def test_limit_per_address_does_not_apply_behind_another_proxy() -> None:
    def read_limit_per_address(**arguments: bool) -> int:
        settings = ProxySettings(
            trino=("http://a",), catalogs=frozenset(), seamark="http://b", connections=100, **arguments
        )
        return make_connection_limits(settings).per_address

    assert (read_limit_per_address(), read_limit_per_address(trust_forwarded=True)) == (50, 100)
