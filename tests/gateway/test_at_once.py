"""Tests of immediate answers: the gateway sends them within the call that receives the request, without a task.

Immediate answers equal the answers of a task. They are complete, in order, and within the limits.
A task always answers a request with `Connection: close`, so the tests compare with such requests.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import SplitResult, urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from seamark.formats.runtime.connections import ConnectionLimits, Connections, DirectAnswers
from seamark.metaserver.gateway.backend import S3Call
from seamark.metaserver.gateway.caching.caching import CachingBackend
from seamark.metaserver.gateway.connection import GatewayConnection
from seamark.metaserver.server import serve_gateway
from tests.gateway.rig import SCHEMA, GatewayRig, Keys, read_keys
from tests.server.rig import run_server
from tests.services.process import choose_free_port
from tests.services.s3 import S3

_numbers = itertools.count()
SIZE_BYTES = 9 << 20


class CachedObject:
    """An object that was read once through the cache, so that all of its bytes are in memory."""

    def __init__(self, keys: Keys, client: Any, size: int = SIZE_BYTES) -> None:
        self.key, self.data = f"{keys.prefix}data/00000-0-{uuid.uuid4()}.parquet", os.urandom(size)
        object_key = {"Bucket": keys.bucket, "Key": self.key}
        client.put_object(**object_key, Body=self.data, ContentType="x/y", Metadata={"m": "1"})
        self.urls = {
            method: urlsplit(client.generate_presigned_url(f"{name}_object", Params=object_key, ExpiresIn=3600))
            for method, name in (("GET", "get"), ("HEAD", "head"))
        }
        assert client.get_object(**object_key)["Body"].read() == self.data

    @property
    def address(self) -> tuple[str, int]:
        return str(self.urls["GET"].hostname), int(self.urls["GET"].port or 0)

    def request(
        self, start: int, end: int, *, method: str = "GET", extra_headers: str = "", signature_prefix: str = ""
    ) -> bytes:
        """Return a signed request for the bytes from `start` to before `end`.

        A HEAD request has no range. A `signature_prefix` makes the signature invalid.
        """
        url: SplitResult = self.urls[method]
        query = (
            url.query
            if not signature_prefix
            else url.query.replace("X-Amz-Signature=", f"X-Amz-Signature={signature_prefix}")
        )
        range_header = f"Range: bytes={start}-{end - 1}\r\n" if method == "GET" else ""
        return (
            f"{method} {url.path}?{query} HTTP/1.1\r\nHost: {url.netloc}\r\n{range_header}{extra_headers}\r\n".encode()
        )


def receive(connection: socket.socket, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
    """Read the next answer, and no byte after it. Return (status, headers, body).

    Args:
        has_body: False for the answer to a HEAD request, which has a Content-Length but no body.
    """
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, head
        head += byte
    status, *lines = head.decode("utf-8", "surrogateescape").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    remaining_bytes, body = int(headers.get("content-length", "0")) if has_body else 0, bytearray()
    while len(body) < remaining_bytes:
        piece = connection.recv(min(1 << 20, remaining_bytes - len(body)))
        assert piece, f"the answer ended after {len(body)} bytes; {remaining_bytes} bytes are missing"
        body += piece
    return int(status.split()[1]), headers, bytes(body)


def receive_body(connection: socket.socket) -> tuple[int, bytes]:
    """Read the next answer. Return (status, body)."""
    status, _, body = receive(connection)
    return status, body


@pytest.fixture(scope="module")
def keys(store_rig: GatewayRig) -> Keys:
    return store_rig.create_table(f"once{next(_numbers)}")


@pytest.fixture(scope="module")
def cached_object(keys: Keys) -> Iterator[CachedObject]:
    with closing(keys.make_client()) as client:
        yield CachedObject(keys, client)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_immediate_answer_equals_the_answer_of_a_task(cached_object: CachedObject, method: str) -> None:
    """The gateway answers a request for a cached range immediately, without a task for this request."""
    with socket.create_connection(cached_object.address) as connection:
        for start, end in ((0, 1), (5, 300_000), (SIZE_BYTES - 10, SIZE_BYTES + 100), (SIZE_BYTES, SIZE_BYTES + 1)):
            connection.sendall(cached_object.request(start, end, method=method))
            immediate_answer = receive(connection, has_body=method == "GET")
            with socket.create_connection(cached_object.address) as other_socket:
                other_socket.sendall(
                    cached_object.request(start, end, method=method, extra_headers="Connection: close\r\n")
                )
                answer_of_task = receive(other_socket, has_body=method == "GET")
            for _, headers, _ in (immediate_answer, answer_of_task):
                assert len(headers.pop("x-amz-request-id")) == 32  # The hexadecimal digits of a UUID
                headers.pop("date"), headers.pop("connection", None)
            status, _, body = immediate_answer
            if status == 416:  # The bodies of errors contain the ids of their requests, so they differ.
                assert answer_of_task[0] == status
                continue
            assert immediate_answer == answer_of_task
            assert body == (cached_object.data[start:end] if method == "GET" else b"")


def test_requests_that_arrive_together_are_answered_in_order(cached_object: CachedObject) -> None:
    spans = [(number * 100_000, number * 100_000 + 90_000 + number) for number in range(40)]
    with socket.create_connection(cached_object.address) as connection:
        connection.sendall(b"".join(cached_object.request(*span) for span in spans))
        for start, end in spans:
            assert receive_body(connection) == (206, cached_object.data[start:end])


def test_slow_reader_gets_every_byte_and_its_next_answer(cached_object: CachedObject) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(cached_object.address)
        for start, end in ((0, SIZE_BYTES), (1, SIZE_BYTES - 1), (7, 8)):
            connection.sendall(cached_object.request(start, end))
            assert receive_body(connection) == (206, cached_object.data[start:end])


def test_rejected_request_gets_the_reason_and_the_connection_stays_usable(cached_object: CachedObject) -> None:
    with socket.create_connection(cached_object.address) as connection:
        for signature_prefix in ("", "00", ""):
            connection.sendall(cached_object.request(0, 5, signature_prefix=signature_prefix))
            status, _, body = receive(connection)
            if signature_prefix:
                assert (status, b"<Code>" in body) == (400, True)
            else:
                assert (status, body) == (206, cached_object.data[:5])


def test_clients_that_disconnect_during_an_answer_free_their_slots(cached_object: CachedObject) -> None:
    for _ in range(300):  # This exceeds gateway_requests_limit.
        with socket.socket() as connection:
            # With a small buffer, the client cannot receive the whole answer before it disconnects.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(cached_object.address)
            connection.sendall(cached_object.request(0, SIZE_BYTES))
    with socket.create_connection(cached_object.address) as connection:
        connection.sendall(cached_object.request(3, 9))
        assert receive_body(connection) == (206, cached_object.data[3:9])


async def test_reads_from_memory_need_no_task_and_their_idle_connection_is_closed(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "warehouse": f"s3://{s3.create_bucket()}/wh",
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
        "idle_timeout_s": 1.0,
        "s3_endpoint": s3.endpoint,
        "s3_region": s3.region,
        "s3_access_key_id": s3.access_key,
        "s3_secret_access_key": s3.secret_key,
    }
    async with run_server(tmp_path / "home", **settings) as server, serve_gateway(server.components):
        await server.http.post(f"{server.url}/v1/namespaces", json={"namespace": ["db"]})
        create_request = {"name": "t", "schema": SCHEMA}
        async with server.http.post(f"{server.url}/v1/namespaces/db/tables", json=create_request) as answer:
            keys = read_keys(await answer.json())

        def create_cached_object() -> CachedObject:
            with closing(keys.make_client()) as client:
                return CachedObject(keys, client, 1000)

        s3_calls: list[S3Call] = []
        answer_in_task = CachingBackend.answer

        async def answer(self: CachingBackend, call: S3Call) -> web.StreamResponse:
            s3_calls.append(call)
            return await answer_in_task(self, call)

        monkeypatch.setattr(CachingBackend, "answer", answer)

        def read_object(cached_object: CachedObject) -> bytes:
            with socket.create_connection(cached_object.address, timeout=60) as connection:
                # On a busy machine, the object is in memory only some time after its first answer.
                for _ in range(100):
                    s3_calls.clear()
                    connection.sendall(cached_object.request(0, 10))
                    assert receive(connection)[2] == cached_object.data[:10]
                    if not s3_calls:
                        break
                    time.sleep(0.1)
                for _ in range(3):
                    connection.sendall(cached_object.request(0, 10))
                    assert receive(connection)[2] == cached_object.data[:10]
                assert s3_calls == []
                return connection.recv(1)  # This waits until the server closes the idle connection.

        assert await asyncio.to_thread(read_object, await asyncio.to_thread(create_cached_object)) == b""


async def test_connection_lost_before_its_woken_task_runs_causes_no_error() -> None:
    async def handle(_: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("the handler ran for a lost connection")

    limits = ConnectionLimits(connections=4, per_address=4, header_bytes=4096, header_timeout_s=60, send_timeout_s=60)
    connections = Connections(
        web.Server(handle), limits, DirectAnswers(lambda *_: web.Response(body=b"x"), lambda: None)
    )
    connection = connections.create_connection()
    connection.connection_made(MagicMock(spec=asyncio.Transport))
    task = connection._task_handler
    assert task is not None
    await asyncio.sleep(0)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.connection_lost(None)
    await asyncio.wait([task])
    assert task.cancelled()


def test_aiohttp_has_the_private_parts_that_immediate_answers_use() -> None:
    """aiohttp has no public hook between the parser and the task of a connection.

    Without the private parts, the gateway would answer slowly or wrongly. This test fails first and names the parts
    that an aiohttp version lacks.
    """
    handler = inspect.getsource(RequestHandler)
    connection = inspect.getsource(GatewayConnection)
    used_names = set(re.findall(r"self\.(_[a-z_]+)", connection)) - set(GatewayConnection.__slots__)
    used_names -= {name for name in vars(GatewayConnection) if callable(vars(GatewayConnection)[name])}
    assert used_names >= {"_waiter", "_messages", "_force_close", "_parser", "_manager", "_keepalive_handle"}
    missing_names = [name for name in sorted(used_names) if not re.search(rf"self\.{name}\b", handler)]
    assert missing_names == [], f"aiohttp {aiohttp.__version__} has no {missing_names} in RequestHandler"
    for description, step in {
        "waits for a request by a future": r"self\._waiter = loop\.create_future\(\)\s+await self\._waiter",
        "takes requests from a queue": r"message, payload = self\._messages\.popleft\(\)",
        "tells the parser that a request was taken": r"self\._parser\.message_consumed\(\)",
        "counts requests": r"manager\.requests_count \+= 1",
        "closes idle connections by a timer": r"loop\.call_at\(\s*close_time, self\._process_keepalive\s*\)",
    }.items():
        assert re.search(step, handler), (
            f"aiohttp {aiohttp.__version__} no longer {description}: see gateway/connection.py"
        )
