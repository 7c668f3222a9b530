"""A server in its own thread, because the client is synchronous and tests use it as users do."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp

from seamark.metaserver.api.http.components import ServerComponents
from tests.api.client import Api
from tests.server.rig import RunningServer, run_server


class ServerThread:
    """A server in its own thread: `url` is its address, and `run` executes a coroutine on its event loop.

    The server runs in a `with` block, or from `start` to `stop`.
    """

    def __init__(self, home: Path, **settings: Any) -> None:
        self.home = home
        self._settings = settings
        self._ready_event = threading.Event()
        self._end_event: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="server")
        self._running_server: RunningServer
        self._loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self._running_server.url

    @property
    def components(self) -> ServerComponents:
        return self._running_server.components

    @property
    def http(self) -> aiohttp.ClientSession:
        """An HTTP client that runs in the server's event loop."""
        return self._running_server.http

    @property
    def api(self) -> Api:
        return Api(self._running_server)

    def list_written_files(self) -> set[Path]:
        """Return the data, delete and index files in the home, except in cache folders. Tables need not name them."""
        suffixes = (".parquet", ".puffin")
        return {path for path in self.home.rglob("*") if path.suffix in suffixes and "cache" not in path.parts}

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def start(self) -> None:
        self._thread.start()
        assert self._ready_event.wait(60)

    def __enter__(self) -> ServerThread:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        assert self._end_event is not None
        self._loop.call_soon_threadsafe(self._end_event.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self._loop, self._end_event = asyncio.get_running_loop(), asyncio.Event()
        async with run_server(self.home, **self._settings) as self._running_server:
            self._ready_event.set()
            await self._end_event.wait()
