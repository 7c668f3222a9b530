"""Tests that a server with a low limit on open files keeps running during a flood of connections, and logs it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.services.process import choose_free_port, is_http_ok

OPEN_FILES_MAX = 64


@pytest.mark.slow
async def test_server_with_64_open_files_answers_connected_clients_and_logs_a_line(tmp_path: Path) -> None:
    port = choose_free_port()
    command = [
        str(Path(sys.executable).parent / "seamark"),
        "serve",
        "--home",
        str(tmp_path / "home"),
        "--port",
        str(port),
    ]
    quoted_command = " ".join(f"'{part}'" for part in command)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"ulimit -n {OPEN_FILES_MAX}; exec {quoted_command}"],
            stdout=output,
            stderr=output,
            env={**os.environ},
        )
    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(is_http_ok, f"http://127.0.0.1:{port}/readyz"):
                await asyncio.sleep(0.2)
        async with AsyncExitStack() as stack:
            good_connection = await open_connection(stack, port)
            assert await _get_status(good_connection, b"/v1/config") == 200
            for _ in range(300):  # Far more connections than the server may have open files
                await open_connection(stack, port)
            assert await _get_status(good_connection, b"/v1/config") == 200
            assert await _get_status(await open_connection(stack, port), b"/readyz") == 200
        await asyncio.sleep(0.1)  # The transports need time to close.
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)
    log_text = log.read_text()
    assert "ulimit -n" in log_text
    assert "has too many connections" in log_text
    assert log_text.count("too many connections") < 10  # The server does not log each of the 300 connections.
    assert "Traceback" not in log_text


async def open_connection(stack: AsyncExitStack, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(lambda: writer.transport.abort())
    return reader, writer


async def _get_status(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: bytes) -> int:
    reader, writer = connection
    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    return int(head.split()[1])
