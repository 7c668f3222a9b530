"""Wakes the readers that wait for rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from seamark.metaserver.log.port import Shard


class Waiters:
    """The tasks that wait for rows of shards. Each waits until one of its shards has a row at or after a position."""

    def __init__(self, read_watermark: Callable[[Shard], int]) -> None:
        self._read_watermark = read_watermark
        self._waiters: dict[Shard, dict[asyncio.Event, None]] = {}
        # Use dicts instead of sets, so that tasks wake up in the order of their arrival, as a simulation needs.
        self._is_closed = False

    async def wait(self, positions: Mapping[Shard, int], timeout_s: float) -> bool:
        """Wait until one of the shards has a row at or after its position.

        Return False after `timeout_s`, or if the log is closed first.
        """
        if self._is_reached(positions):
            return True
        event = asyncio.Event()
        for shard in positions:
            self._waiters.setdefault(shard, {})[event] = None
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_reached(positions) and not self._is_closed:
                    event.clear()
                    await event.wait()
        except TimeoutError:
            return False
        finally:
            for shard in positions:
                waiters = self._waiters[shard]
                waiters.pop(event, None)
                if not waiters:
                    del self._waiters[shard]
        return self._is_reached(positions)

    def wake(self, shards: Iterable[Shard]) -> None:
        """Wake the tasks that wait for one of the shards."""
        if self._waiters:
            for shard in shards:
                for event in self._waiters.get(shard, ()):
                    event.set()

    def wake_all(self) -> None:
        """Wake the tasks of all shards."""
        self.wake(list(self._waiters))

    def close(self) -> None:
        """Wake all tasks. No task can wait after this."""
        self._is_closed = True
        self.wake_all()

    def _is_reached(self, positions: Mapping[Shard, int]) -> bool:
        return any(self._read_watermark(shard) > position for shard, position in positions.items())
