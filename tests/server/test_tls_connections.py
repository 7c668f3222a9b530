"""Tests of connections without a TLS handshake. They count for the limit, and are closed first when space is needed."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from tests.server.rig import run_server
from tests.server.test_connections import HEALTH, RawConnection
from tests.server.test_few_files import OPEN_FILES_MAX
from tests.services.authority import Authority
from tests.services.process import choose_free_port
from tests.waits import until

SILENT_COUNT = 30


def create_authority(folder: Path) -> tuple[Authority, dict[str, str]]:
    """Create a certificate authority. Return it, and the settings of a server that has a certificate of it."""
    new_authority = Authority(folder)
    new_authority.issue("server")
    return new_authority, {"tls_cert": str(new_authority.certificate), "tls_key": str(new_authority.key)}


async def connect_and_request(stack: AsyncExitStack, port: int, authority: Authority) -> RawConnection:
    """Open a TLS connection, which closes with `stack`, and return it after it has received an answer."""
    context = ssl.create_default_context(cafile=str(authority.file))
    async with asyncio.timeout(60):
        raw_connection = RawConnection(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
    await stack.enter_async_context(raw_connection)
    assert await raw_connection.request_health()
    return raw_connection


async def test_connections_count_before_their_tls_handshake(tmp_path: Path) -> None:
    authority, tls = create_authority(tmp_path)
    async with run_server(tmp_path / "home", connections_limit=8, **tls) as server, AsyncExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        old_connection = await connect_and_request(stack, port, authority)
        silent_connections = [
            await stack.enter_async_context(await RawConnection.open(server, f"127.0.0.{2 + n}"))
            for n in range(SILENT_COUNT)
        ]
        new_connection = await connect_and_request(stack, port, authority)
        # A task ends when the server closes its connection.
        read_tasks = [asyncio.create_task(raw_connection.reader.read()) for raw_connection in silent_connections]
        try:
            await until(lambda: sum(task.done() for task in read_tasks) >= SILENT_COUNT - 8)
        finally:
            for task in read_tasks:
                task.cancel()
            await asyncio.gather(*read_tasks, return_exceptions=True)
        assert await old_connection.request_health()
        assert await new_connection.request_health()


async def test_tls_handshake_that_does_not_end_in_time_closes_the_connection(tmp_path: Path) -> None:
    _, tls = create_authority(tmp_path)
    async with run_server(tmp_path / "home", header_timeout_s=0.3, **tls) as server:
        for first_bytes in (b"", b"\x16\x03\x01", HEALTH):
            async with await RawConnection.open(server) as raw_connection:
                await raw_connection.send(first_bytes)
                await raw_connection.read_rest()


async def test_request_sent_with_the_end_of_the_handshake_is_answered(tmp_path: Path) -> None:
    authority, tls = create_authority(tmp_path)
    async with run_server(tmp_path / "home", **tls) as server, AsyncExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        raw_connections = await asyncio.gather(*(connect_and_request(stack, port, authority) for _ in range(50)))
        assert all(await asyncio.gather(*(raw_connection.request_health() for raw_connection in raw_connections)))


async def test_server_with_64_open_files_answers_during_a_flood_without_handshakes(tmp_path: Path) -> None:
    authority, tls = create_authority(tmp_path)
    port = choose_free_port()
    command = [str(Path(sys.executable).parent / "seamark"), "serve", "--home", str(tmp_path / "home")]
    command += ["--port", str(port), "--tls-cert", tls["tls_cert"], "--tls-key", tls["tls_key"]]
    limited_command = ["/bin/sh", "-c", f'ulimit -n {OPEN_FILES_MAX}; exec "$@"', "sh", *command]
    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen(limited_command, stdout=output, stderr=output, env={**os.environ})
    try:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(60):
                while True:
                    try:
                        good_connection = await connect_and_request(stack, port, authority)
                        break
                    except OSError:
                        await asyncio.sleep(0.2)
            for _ in range(300):  # Far more connections than the server may have open files
                await stack.enter_async_context(RawConnection(*await asyncio.open_connection("127.0.0.1", port)))
            assert await good_connection.request_health()
            await connect_and_request(stack, port, authority)
        await asyncio.sleep(0.1)  # The transports need time to close.
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 30)
    assert "Traceback" not in (tmp_path / "log").read_text()
