"""A server that kills itself with SIGKILL at a chosen step of a chosen commit.

    python -m tests.faults.dying_server STEP NTH HOME PORT

The parts are the real ones; each step is a wrapper around one of them, put in at the composition root.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from metaserver import server
from metaserver.catalog.commit import Committer
from metaserver.settings import Settings
from metaserver.store.port import CreateEntry, SwapPointer

STEPS = ("before-metadata-write", "after-metadata-write", "before-swap", "after-swap", "before-reply")


class Fuse:
    """Burns down by one at each pass of its step, and takes the process with it at the end."""

    def __init__(self, step: str, passes: int) -> None:
        self._step = step
        self._left = passes

    def passes(self, step: str) -> None:
        if step != self._step:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Wrapped:
    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Store(Wrapped):
    async def transact(self, operations: Any) -> Any:
        commits = any(isinstance(operation, SwapPointer | CreateEntry) for operation in operations)
        if commits:
            self._fuse.passes("before-swap")
        result = await self._inner.transact(operations)
        if commits:
            self._fuse.passes("after-swap")
        return result


class Objects(Wrapped):
    async def create(self, location: str, data: bytes) -> None:
        self._fuse.passes("before-metadata-write")
        await self._inner.create(location, data)
        self._fuse.passes("after-metadata-write")


def main(step: str, nth: int, home: Path, port: int) -> None:
    fuse = Fuse(step, nth)
    open_store, open_objects, commit = server.open_store, server.open_objects, Committer.commit

    @asynccontextmanager
    async def store(*args: Any, **more: Any) -> Any:
        async with open_store(*args, **more) as inner:
            yield Store(inner, fuse)

    @asynccontextmanager
    async def objects(*args: Any, **more: Any) -> Any:
        async with open_objects(*args, **more) as inner:
            yield Objects(inner, fuse)

    async def replies(self: Committer, *args: Any, **more: Any) -> Any:
        result = await commit(self, *args, **more)
        fuse.passes("before-reply")
        return result

    server.open_store = store  # type: ignore[assignment]
    server.open_objects = objects  # type: ignore[assignment]
    Committer.commit = replies  # type: ignore[method-assign]
    settings = Settings(home=home, port=port)
    server.run(settings, server.bind(settings, shared=False), lambda: None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
