"""Lower limits of times on this machine, measured in the same run as the results that are compared with them."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from bench.measure import Sample, repeat_request
from bench.wire import Connection, build_request


def measure_sync_ms(folder: Path, size: int = 4096, times: int = 100) -> float:
    """Return the median milliseconds to append `size` bytes to a file and make them durable (fdatasync)."""
    durations = []
    path = folder / "sync-probe"
    with path.open("ab", buffering=0) as file:
        for _ in range(times):
            started_s = time.perf_counter()
            file.write(bytes(size))
            os.fdatasync(file.fileno())
            durations.append((time.perf_counter() - started_s) * 1000)
    path.unlink()
    return statistics.median(durations)


def measure_new_file_ms(folder: Path, size: int = 4096, times: int = 50) -> float:
    """Return the median milliseconds to make a new durable file: write, fsync, fsync of its folder."""
    durations = []
    probe = folder / "new-file-probe"
    probe.mkdir()
    directory = os.open(probe, os.O_RDONLY)
    for number in range(times):
        path = probe / str(number)
        started_s = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(bytes(size))
            os.fsync(file.fileno())
        os.fsync(directory)
        durations.append((time.perf_counter() - started_s) * 1000)
    os.close(directory)
    for path in probe.iterdir():
        path.unlink()
    probe.rmdir()
    return statistics.median(durations)


def measure_copy_ms(body: bytes, times: int = 50) -> float:
    """Return the median milliseconds to copy `body` once in memory."""
    durations = []
    for _ in range(times):
        started_s = time.perf_counter()
        bytearray(body)
        durations.append((time.perf_counter() - started_s) * 1000)
    return statistics.median(durations)


class _Echo(asyncio.Protocol):
    """A server that answers any bytes with the prepared `answer`, without routing or parsing."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)


@asynccontextmanager
async def _run_bare_server(body: bytes) -> AsyncIterator[int]:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    server = await asyncio.get_running_loop().create_server(lambda: _Echo(answer), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def measure_transfer_ms(body: bytes, times: int = 50) -> float:
    """Return the median milliseconds to send `body` from a plain socket to the client of the benchmarks.

    Server and client run in this process, so the result is the time of the transfer alone.
    """
    sample = Sample()
    async with _run_bare_server(body) as port:
        connection = await Connection.open(port)
        for expected in repeat_request(build_request("GET", "/"), times):
            started_s = time.perf_counter()
            await connection.ask(expected)
            sample.latencies_ms.append((time.perf_counter() - started_s) * 1000)
        connection.close()
    return sample.compute_quantile(0.5)
