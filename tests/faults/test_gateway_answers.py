"""Tests of the gateway with a store that breaks its answers: truncated, reset, rejected, too long, or of another
object.

Some answers have bodies where HTTP allows none. A client gets the right bytes, or sees that its answer is incomplete.
It never gets wrong bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import struct
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.gateway.forwarding import Forwarding
from seamark.metaserver.settings.settings import Settings
from tests.gateway.test_cache import BLOCK_BYTES, Worker, open_worker
from tests.seeds import first_seed

FAULTS = ("cut", "reset", "silent", "refused", "long", "other")
"""Faults of an answer.

- cut: The answer ends early.
- reset: The answer ends early with a reset.
- silent: The answer ends before the header.
- refused: The status is 503.
- long: The answer has more bytes than the range.
- other: The answer has another ETag.
"""
DATE = "Thu, 26 Nov 2026 00:00:00 GMT"


@dataclass
class BrokenStore:
    """An S3 server for GET and HEAD whose answers have random faults.

    Attributes:
        rate: The share of answers to GET with a fault. Answers to HEAD have a forbidden body at the same rate.
        faults_left: The number of faults that may still occur. By default, there is no limit in practice.
        faults: The faults that may occur.
    """

    rng: random.Random
    objects: dict[str, bytes] = field(default_factory=dict)
    rate: float = 0.0
    faults_left: int = 1 << 30
    faults: tuple[str, ...] = FAULTS
    fault_counts: Counter[str] = field(default_factory=Counter)
    replace: dict[str, bytes] = field(default_factory=dict)
    """New content, by path, of objects that are replaced after the next fault."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer((await reader.readuntil(b"\r\n\r\n")).decode(), writer):
                pass
        writer.close()

    async def _answer(self, request: str, writer: asyncio.StreamWriter) -> bool:
        """Answer a request, and return whether the connection stays open."""
        request_line, *lines = request.split("\r\n")
        method, path, _ = request_line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        data = self.objects[path]
        etag = compute_etag(data)
        is_broken = method == "GET" and self.faults_left and self.rng.random() < self.rate
        fault = self.rng.choice(self.faults) if is_broken else ""
        self.fault_counts[fault or method] += 1
        if fault:
            self.faults_left -= 1
            self.objects |= self.replace  # A test may replace objects while the answer is sent.
        if fault == "silent":
            return False
        if fault == "refused":
            writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 8\r\n\r\n<Error/>")
            return True
        if headers.get("if-match", etag) != etag:
            writer.write(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")
            return True
        if headers.get("if-none-match") == etag:
            # HTTP forbids this body. It must not become the beginning of the next answer.
            writer.write(f"HTTP/1.1 304 Not Modified\r\nETag: {etag}\r\nContent-Length: 9\r\n\r\nforbidden".encode())
            return False
        size = len(data)
        start, end = 0, size
        status = "200 OK"
        if "range" in headers and method == "GET":
            first_byte, _, last_byte = headers["range"].removeprefix("bytes=").partition("-")
            if first_byte:
                start, end = int(first_byte), min(size, int(last_byte or size) + 1)
            else:  # The number after the hyphen is the length of a suffix.
                start = max(0, size - int(last_byte))
            status = f"206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{size}"
        length = end - start + (1000 if fault == "long" else 0)
        etag_header = '"0000"' if fault == "other" else etag
        writer.write(
            f"HTTP/1.1 {status}\r\nETag: {etag_header}\r\nLast-Modified: {DATE}\r\n"
            f"Content-Length: {length}\r\n\r\n".encode()
        )
        if method == "HEAD":
            if self.rng.random() < self.rate:
                writer.write(b"forbidden")
                return False
            return True
        sent_length = self.rng.randrange(length) if fault in ("cut", "reset") else length
        body = data[start:end] + b"x" * (length - (end - start))
        writer.write(body[:sent_length])
        await writer.drain()
        if fault == "reset":
            raw_socket: socket.socket = writer.get_extra_info("socket")
            # An abort with a linger time of zero sends a reset.
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return fault not in ("cut", "reset")


def compute_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@asynccontextmanager
async def open_gateway(
    store: BrokenStore, folder: Path, connections: int = 8, **changes: object
) -> AsyncIterator[Worker]:
    """Open a gateway worker with its cache, in front of the store."""
    async with await asyncio.start_server(store.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = Settings(
            home=folder,
            s3_endpoint=f"http://127.0.0.1:{port}",
            s3_path_style=True,
            s3_access_key_id="a",
            s3_secret_access_key="b",
        )
        clock = SimulatedClock(1)
        forwarding = Forwarding(settings, clock, connections=connections)
        async with open_worker(forwarding, folder, clock, **changes) as worker:  # type: ignore[arg-type]
            yield worker


async def read_answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: str, *, has_body: bool
) -> tuple[int, int, bytes, bool]:
    """Send a request, and read its answer.

    Returns:
        (status, declared length, bytes, True if the connection ended before that length). The status is 0 if the
        connection ended before the answer.
    """
    writer.write(request.encode())
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    except (asyncio.IncompleteReadError, OSError) as error:
        partial_body = getattr(error, "partial", b"")
        assert not partial_body, partial_body
        return 0, 0, b"", True
    status = int(head.split()[1])
    assert "transfer-encoding" not in head, head
    length_headers = [line for line in head.split("\r\n") if line.startswith("content-length:")]
    length = int(length_headers[0].partition(":")[2]) if length_headers else 0
    if not has_body or status == 304:
        return status, length, b"", False
    body = bytearray()
    while len(body) < length:
        try:
            received = await reader.read(length - len(body))
        except OSError:
            received = b""
        if not received:
            return status, length, bytes(body), True
        body += received
    return status, length, bytes(body), False


CASES: dict[str, dict[str, int]] = {
    "cached": {},
    "without a budget for the cache": {"gateway_cache_fetch_bytes": BLOCK_BYTES - 1},
    "in short parts": {"gateway_cache_fetch_bytes": BLOCK_BYTES - 1, "gateway_send_bytes": 64 << 10},
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["data/00000-0-{}.parquet", "data/plain"])
async def test_fault_of_the_store_causes_an_error_or_the_right_bytes(tmp_path: Path, case: str, name: str) -> None:
    seed = first_seed()
    rng = random.Random(f"{seed} {case} {name}")
    store = BrokenStore(rng)
    paths = [
        f"/b/t/{name.format(uuid.UUID(bytes=rng.randbytes(16), version=4))}{'' if '{' in name else index}"
        for index in range(3)
    ]
    store.objects = {path: rng.randbytes(9 * BLOCK_BYTES + index) for index, path in enumerate(paths)}
    outcomes: Counter[str] = Counter()
    async with open_gateway(store, tmp_path, gateway_cache_disk_bytes=0, **CASES[case]) as gateway:
        for path in paths:  # After this read, the records of the objects are cached.
            _, body, *_ = await gateway.send("GET", path, Range="bytes=0-0")
            assert body == store.objects[path][:1]
        store.rate = 0.3
        address = urlsplit(gateway.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for number in range(120):
            path = rng.choice(paths)
            data = store.objects[path]
            start = rng.randrange(len(data))
            end = rng.randrange(start, len(data)) + 1
            method = rng.choice(("GET", "GET", "GET", "HEAD"))
            headers = f"Host: x\r\nRange: bytes={start}-{end - 1}\r\n" if method == "GET" else "Host: x\r\n"
            is_conditional = rng.random() < 0.2
            if is_conditional:
                headers += f"If-None-Match: {compute_etag(data)}\r\n"
            status, length, body, is_short = await read_answer(
                reader, writer, f"{method} {path} HTTP/1.1\r\n{headers}\r\n", has_body=method == "GET"
            )
            context = f"seed {seed}, read {number}: {method} {start}-{end} {status} {length} {len(body)} {is_short}"
            if is_short:
                assert data[start:end].startswith(body), context
                outcomes["short"] += 1
                writer.close()
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                continue
            outcomes["whole" if status in (200, 206, 304) else "refused"] += 1
            if status == 304:
                assert is_conditional, context
            elif status == 206:
                assert (length, body) == (end - start, data[start:end]), context
            elif status == 200:
                assert (method, length) == ("HEAD", len(data)), context
            else:
                assert status in (502, 503), context
        writer.close()
    assert all(store.fault_counts[fault] for fault in ("cut", "reset", "silent", "refused")), store.fault_counts
    assert outcomes["whole"] > 60, (outcomes, store.fault_counts)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", [f"data/00000-0-{uuid.UUID(int=7, version=4)}.parquet", "data/plain"])
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_interrupted_answer_is_completed_only_from_the_same_object(
    tmp_path: Path, name: str, is_replaced: bool
) -> None:
    rng = random.Random(3)
    path, data = f"/b/t/{name}", rng.randbytes(20 * BLOCK_BYTES)
    store = BrokenStore(rng, {path: data}, faults=("cut",), faults_left=4)
    async with open_gateway(store, tmp_path, gateway_cache_fetch_bytes=BLOCK_BYTES - 1) as gateway:
        _, body, *_ = await gateway.send("GET", path, Range="bytes=0-0")
        assert body == data[:1]
        store.rate = 1.0
        if is_replaced:
            store.replace = {path: rng.randbytes(20 * BLOCK_BYTES)}
        address = urlsplit(gateway.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"
        status, length, body, is_short = await read_answer(reader, writer, request, has_body=True)
        writer.close()
        assert (status, length) == (200, len(data))
        assert data.startswith(body)
        assert is_short is is_replaced
        assert (body == data) is not is_replaced
    assert store.fault_counts["cut"] >= (1 if is_replaced else 4)


async def test_interrupted_answer_is_completed_without_a_second_connection(tmp_path: Path) -> None:
    """When a store restarts, interrupted answers may hold all connections."""
    rng = random.Random(4)
    path, data = "/b/t/data/plain", rng.randbytes(20 * BLOCK_BYTES)
    store = BrokenStore(rng, {path: data}, rate=1.0, faults=("cut",), faults_left=1)
    async with open_gateway(store, tmp_path, connections=1, gateway_cache_fetch_bytes=BLOCK_BYTES - 1) as gateway:
        address = urlsplit(gateway.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        # With a condition, the store must answer the request, and not the cache. The cache may fetch less than a block,
        # so it fetches none.
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nIf-Match: {compute_etag(data)}\r\n\r\n"
        answer = await read_answer(reader, writer, request, has_body=True)
        writer.close()
    assert answer == (200, len(data), data, False)
    assert store.fault_counts["cut"] == 1
