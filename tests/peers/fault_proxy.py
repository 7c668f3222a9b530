"""A TCP proxy before a real server. It delays requests, counts them, and can stop forwarding."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.services.process import choose_free_port, is_port_open
from tests.waits import block_until

_REQUEST = re.compile(rb"^(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_PIECE_BYTES = 1 << 18


class FaultProxy:
    """A TCP proxy.

    `delay_s` returns the delay of each HTTP request, and `piece_delay_s` the delay of each piece of any bytes. While
    `is_cut`, the proxy forwards nothing in either direction and ends no connection, as when a network drops packets.
    """

    def __init__(
        self, host: str, port: int, local_address: str = "127.0.0.1", connect: Callable[[], socket.socket] | None = None
    ) -> None:
        self._upstream, self._own_address, self._connect = (host, port), local_address, connect
        self.port = choose_free_port()
        self.address = f"{local_address}:{self.port}"
        self.url = f"http://{self.address}"
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.piece_delay_s: Callable[[], float] = lambda: 0.0
        self.is_cut = False
        self._serving_tasks: set[asyncio.Task[object]] = set()
        self.requests: Counter[str] = Counter()
        """The number of requests by method and path, without the query: `GET /bucket/key`."""

    async def run(self) -> None:
        """Run until `stop` is called, possibly by another thread."""
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._serve, self._own_address, self.port):
            await self._stopped.wait()

    def stop(self) -> None:
        self.is_cut = False
        self._loop.call_soon_threadsafe(self._stopped.set)

    def reset_connections(self) -> None:
        """End all connections immediately. Another thread may call this."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._serving_tasks])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving_tasks.add(task)  # The event loop has only a weak reference to the task.
        try:
            await self._forward_connection(reader, writer)
        except asyncio.CancelledError:  # `reset_connections` has cancelled the task.
            pass
        finally:
            writer.transport.abort()
            self._serving_tasks.discard(task)

    async def _forward_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect to the upstream server, and copy bytes in both directions until one side ends."""
        await self._wait_until_passable()
        try:
            if self._connect is None:
                back_reader, back_writer = await asyncio.open_connection(*self._upstream)
            else:
                back_reader, back_writer = await asyncio.open_connection(sock=self._connect())
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward_bytes(reader, back_writer, is_request=True))
                group.create_task(self._forward_bytes(back_reader, writer, is_request=False))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            back_writer.transport.abort()

    async def _forward_bytes(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        while data := await source.read(_PIECE_BYTES):
            if is_request and (match := _REQUEST.match(data)):
                self.requests[f"{match[1].decode()} {match[2].decode().partition('?')[0]}"] += 1
                await asyncio.sleep(self.delay_s())
            if piece_delay_s := self.piece_delay_s():
                await asyncio.sleep(piece_delay_s)
            await self._wait_until_passable()
            target.write(data)
            await target.drain()
        with contextlib.suppress(OSError):
            target.write_eof()

    async def _wait_until_passable(self) -> None:
        while self.is_cut:
            await asyncio.sleep(0.02)


@contextmanager
def run_fault_proxy(
    host: str, port: int, local_address: str = "127.0.0.1", connect: Callable[[], socket.socket] | None = None
) -> Iterator[FaultProxy]:
    """Run a proxy in a separate thread. It listens on a free port of `local_address`, an address of this machine.

    Args:
        host: The host of the upstream server.
        port: The port of the upstream server.
        local_address: The address on which the proxy listens.
        connect: Opens a connection to the upstream server, for a `host` that is not in this machine's network.
    """
    proxy = FaultProxy(host, port, local_address, connect)
    thread = threading.Thread(target=lambda: asyncio.run(proxy.run()), daemon=True)
    thread.start()
    block_until(lambda: is_port_open(proxy.port, local_address))
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(10)
