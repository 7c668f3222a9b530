"""Tests of the load generator: its client finds the ends of answers, and a slice counts what it claims to count."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.measure import Worker, drive_workers, repeat_request, run_alternately
from bench.targets import BenchTarget
from bench.wire import Connection, LoadError, Request, Response, build_request


@asynccontextmanager
async def run_server(*pieces: bytes) -> AsyncIterator[int]:
    """Start a server that answers each request with `pieces`, written one by one with short pauses."""

    handlers: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()
        await asyncio.gather(*handlers)


async def send_twice(port: int, request: Request) -> Response:
    connection = await Connection.open(port)
    try:
        first_response = await connection.ask(request)
        assert (await connection.ask(request)).body == first_response.body  # The connection must have no unread data.
        return first_response
    finally:
        connection.close()


BIG_BODY = os.urandom(3_000_000)
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"], b"hello"),
        ([b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\n\r", b"\nhe", b"llo"], b"hello"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + BIG_BODY], BIG_BODY),
        ([CHUNKED_HEAD + b"5\r\nhello\r\n0\r\n\r\n"], b"hello"),
        ([CHUNKED_HEAD, b"2;x=y\r\nhe\r", b"\n3\r\nll", b"o\r\n0\r\n\r\n"], b"hello"),
        ([CHUNKED_HEAD, b"2dc6c0\r\n" + BIG_BODY + b"\r\n", b"0\r\n\r\n"], BIG_BODY),
        ([b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n"], b""),
    ],
)
async def test_answers_are_split_at_their_ends(pieces: list[bytes], body: bytes) -> None:
    async with run_server(*pieces) as port:
        answer = await send_twice(port, build_request("GET", "/"))
    assert answer.body == body


async def test_head_and_304_answers_have_no_body_despite_a_content_length() -> None:
    async with run_server(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n") as port:
        assert (await send_twice(port, build_request("HEAD", "/"))).body == b""
    async with run_server(b'HTTP/1.1 304 Not Modified\r\nContent-Length: 900\r\nETag: "x"\r\n\r\n') as port:
        answer = await send_twice(port, build_request("GET", "/"))
        assert answer.body == b""
        assert answer.get_field("etag") == '"x"'


async def test_connection_closed_before_the_answer_fails_the_measurement() -> None:
    async with run_server() as port:
        connection = await Connection.open(port)
        query = asyncio.ensure_future(connection.ask(build_request("GET", "/")))
        await asyncio.sleep(0.01)
        connection.close()
        with pytest.raises(LoadError, match="closed"):
            await query


def build_target(port: int, name: str = "it") -> BenchTarget:
    return BenchTarget(name, f"http://127.0.0.1:{port}", (os.getpid(),), Path())


async def test_rate_includes_only_counted_answers_and_failures_are_named() -> None:
    async with run_server(b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n") as port:
        tolerated_requests = repeat_request(build_request("GET", "/", tolerated_statuses=(409,)), 3)
        failing_requests = repeat_request(build_request("GET", "/", label="load"), 2)
        counted_requests = repeat_request(build_request("GET", "/", counted_statuses=(409,)), 4)
        sample = await drive_workers(build_target(port), [tolerated_requests, failing_requests, counted_requests])
    assert sample.statuses == {409: 9}
    assert len(sample.latencies_ms) == 4
    assert sample.rate == pytest.approx(4 / sample.elapsed_s)
    assert sample.failed == 2
    assert sample.failures[0].startswith("load: 409")


async def test_worker_receives_the_answers_and_stops_at_the_deadline() -> None:
    bodies: list[bytes] = []

    def request_once() -> Worker:
        while True:
            bodies.append((yield build_request("GET", "/")).body)

    async with run_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as port:
        sample = await drive_workers(build_target(port), [request_once()], seconds=0.05)
    assert set(bodies) == {b"ok"}
    assert len(sample.latencies_ms) == len(bodies)
    assert sample.elapsed_s >= 0.05


async def test_servers_are_measured_in_alternating_order() -> None:
    order: list[str] = []

    async with run_server(b"HTTP/1.1 204 No Content\r\n\r\n") as port:
        targets = [build_target(port, "a"), build_target(port, "b")]

        async def drive_one_request(target: BenchTarget) -> object:
            order.append(target.name)
            return await drive_workers(target, [repeat_request(build_request("GET", "/"), 1)])

        run: Callable[..., object] = drive_one_request
        samples = await run_alternately(targets, 3, run)  # type: ignore[arg-type]
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(samples[name]) for name in "ab"] == [3, 3]
