"""Files removed in the background: what a commit has written for nothing, or has left behind.

Past the bound they stay: an orphan costs space, a wait costs writers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from metaserver.errors import SeamarkError
from metaserver.objects.port import ObjectStore

_AT_ONCE_MAX = 64


class Cleanup:
    """Belongs to one event loop."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._tasks: set[asyncio.Task[None]] = set()

    def remove(self, locations: Sequence[str], unless: Callable[[], Awaitable[bool]] | None = None) -> None:
        """As far as storage lets it; nothing where `unless` turns out to be so, or cannot be told."""
        if not locations or len(self._tasks) >= _AT_ONCE_MAX:
            return
        task = asyncio.create_task(self._remove(locations, unless), name="cleanup")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Waits for what is being removed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _remove(self, locations: Sequence[str], unless: Callable[[], Awaitable[bool]] | None) -> None:
        with contextlib.suppress(SeamarkError):
            if unless is not None and await unless():
                return
            for location in locations:
                with contextlib.suppress(SeamarkError):
                    await self._objects.delete(location)
