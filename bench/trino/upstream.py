"""A simulated coordinator that speaks Trino's client protocol at the speed of a socket, without running queries.

Usage: `python -m bench.trino.upstream PORT`. The text of a statement is `<pages> <bytes of each>`. Any other text
returns one row. The answers are as long as those of Trino 483. They are chunked like Jetty's, with their end in a
separate packet. The coordinator stores nothing between requests: the id of a statement contains its text.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import uvloop

from bench.targets import BenchTarget
from tests.services.process import ManagedProcess, choose_free_port, is_http_ok

_SIZE_PATTERN = re.compile(rb"(\d+) (\d+)")
_SLUG = b"y89bc636fe67d4d541faf0383e57b2a5c88fe2427"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nVary: Accept-Encoding\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_COLUMNS = b'"columns":[{"name":"x","type":"varchar","typeSignature":{"rawType":"varchar","arguments":[]}}],'
_FIGURES = b",".join(b'"figureOfAStatement%02d":%d' % (number, 1000 * number) for number in range(22))
_PIECE_BYTES = 1 << 18


class _Exchange(asyncio.Protocol):
    """One connection, which answers one request at a time."""

    def __init__(self) -> None:
        self._received_bytes = b""
        self._writable = asyncio.Event()
        self._writable.set()
        self._request_task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The class of uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._request_task is not None:
            self._request_task.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer a request when all its bytes have arrived.

        The steps of a statement are the POST (0), the queue (1), the pages with rows, and the end. The path of a GET
        ends with the step.
        """
        self._received_bytes += data
        head, reply_end, body = self._received_bytes.partition(b"\r\n\r\n")
        if not reply_end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        if len(body) < length:
            return
        self._received_bytes = body[length:]
        path = head.split(b" ", 2)[1]
        base = b"http://" + fields.get(b"x-forwarded-host", fields[b"host"])
        if not path.startswith(b"/v1/statement"):
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        if path == b"/v1/statement":
            size_match = _SIZE_PATTERN.fullmatch(body[:length])
            id_, step = b"%s_%s" % (size_match.groups() if size_match else (b"1", b"1")), 0
        else:
            _, _, _, _, id_, _, last_part = path.split(b"/")
            step = int(last_part)
        pages, size = map(int, id_.split(b"_"))
        page_head, tail = _encode_page(base, id_, step, pages)
        has_rows = 2 <= step < 2 + pages
        if has_rows and size > _PIECE_BYTES:
            self._request_task = asyncio.get_running_loop().create_task(self._write_rows(page_head, size, tail))
        else:
            rows = b"x" * size if has_rows else b""
            # Like Jetty, send the end of the chunk and the last chunk in a separate packet.
            chunk = _encode_chunk(page_head + rows + tail).removesuffix(b"\r\n")
            self._transport.write(_HEAD + chunk)
            asyncio.get_running_loop().call_soon(self._transport.write, b"\r\n0\r\n\r\n")

    async def _write_rows(self, head: bytes, size: int, tail: bytes) -> None:
        self._transport.write(_HEAD + _encode_chunk(head))
        piece = _encode_chunk(b"x" * _PIECE_BYTES)
        for _ in range(size // _PIECE_BYTES):
            self._transport.write(piece)
            await self._writable.wait()
        self._transport.write(_encode_chunk(tail) + b"0\r\n\r\n")


def _encode_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _encode_page(base: bytes, id_: bytes, step: int, pages: int) -> tuple[bytes, bytes]:
    """Return the bytes of a page before its rows, and the bytes after them.

    The steps of a statement are the POST, the queue, the pages with rows, and the end.
    """
    head = b'{"id":"%s","infoUri":"%s/ui#/queries/%s",' % (id_, base, id_)
    if step < 2 + pages:
        head += b'"nextUri":"%s/v1/statement/executing/%s/%s/%d",' % (base, id_, _SLUG, step + 1)
    state = (b"QUEUED", b"QUEUED", b"RUNNING")[min(step, 2)] if step < 2 + pages else b"FINISHED"
    tail = b'"stats":{"state":"%s",%s},"warnings":[]}' % (state, _FIGURES)
    if step < 2:
        return head, tail
    if step < 2 + pages:
        return head + _COLUMNS + b'"data":[["', b'"]],' + tail
    return head + _COLUMNS, tail


@contextmanager
def run_upstream(folder: Path) -> Iterator[BenchTarget]:
    """Run a process that answers like a Trino coordinator, without Trino, and yield it as a target."""
    port = choose_free_port()
    process = ManagedProcess([sys.executable, "-m", "bench.trino.upstream", str(port)], log=folder / "upstream.log")
    with process:
        process.start(lambda: is_http_ok(f"http://127.0.0.1:{port}/"), timeout_s=30)
        yield BenchTarget("simulated", f"http://127.0.0.1:{port}", (process.pid,), folder)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Exchange, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
