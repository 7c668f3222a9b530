"""Deletes files in the background: files of failed commits, and files that a commit replaced.

If too many deletions are running, a request is dropped. Its files become orphan files, which cost space, but waiting
would delay writers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.objects.port import ObjectStore

_AT_ONCE_MAX = 64


class Cleanup:
    """Deletes files in the background. An instance belongs to one event loop."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._tasks: set[asyncio.Task[None]] = set()

    def remove(self, locations: Sequence[str], is_in_use: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Delete the files, ignoring storage errors. Delete nothing if `is_in_use` returns True or fails.

        If `_AT_ONCE_MAX` deletions are running, the files are not deleted, so that tasks do not accumulate.
        """
        if not locations or len(self._tasks) >= _AT_ONCE_MAX:
            return
        task = asyncio.create_task(self._remove(locations, is_in_use), name="cleanup")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for running deletions."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _remove(self, locations: Sequence[str], is_in_use: Callable[[], Awaitable[bool]] | None) -> None:
        with contextlib.suppress(SeamarkError):
            if is_in_use is not None and await is_in_use():
                return
            for location in locations:
                with contextlib.suppress(SeamarkError):
                    await self._objects.delete(location)
