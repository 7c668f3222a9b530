"""Reserves memory for large bodies of rows before they are decoded.

If the memory for rows is full, a large body waits some seconds for a flush, in the order of the requests. Without the
wait, each large body would be decoded and refused, and its writer would send it again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import TooManyRequests
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.streams.pauses import Pauses
from seamark.metaserver.streams.stream_counts import StreamCounts
from seamark.metaserver.streams.stream_table import StreamTable

WAIT_S = 5.0
"""The maximum time for which a large body of rows waits for memory."""
_WAITERS_MAX = 32
"""The maximum number of waiting bodies."""
_PRINCIPAL_WAITERS_MAX = 8
"""The maximum number of waiting bodies of one principal."""
_WAITING_SHARE = 1 / 4
"""The fraction of `bodies_memory_bytes` that waiting bodies may use."""
_CHECK_INTERVAL_S = 0.02
"""The interval between two checks for free memory."""


class BodyReservations:
    """Reserves memory for large bodies of rows. An instance belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        tables: Mapping[str, StreamTable],
        check_memory: Callable[[StreamTable, int, int], None],
        pauses: Pauses,
        counts: StreamCounts,
    ) -> None:
        """Create the reservations.

        Args:
            settings: The settings of the server.
            clock: The clock.
            tables: The open tables, by UUID.
            check_memory: Raises TooManyRequests if a table has no memory for a number of additional bytes, while
                another number of bytes is reserved.
            pauses: The pauses of tables.
            counts: Counts refused bodies.
        """
        self._settings = settings
        self._clock = clock
        self._tables = tables
        self._check_memory = check_memory
        self._pauses = pauses
        self._counts = counts
        self._waiters: Counter[str] = Counter()
        self._waiting_bytes = 0

    @property
    def waiter_count(self) -> int:
        """The number of waiting bodies."""
        return self._waiters.total()

    @asynccontextmanager
    async def reserve(self, loaded_table: LoadedTable, body_bytes: int, principal_name: str) -> AsyncIterator[None]:
        """Wait for memory for the rows of a large body, and reserve it while the context is active.

        The number of waiting bodies is limited, in total and for each principal. A body beyond a limit is refused
        immediately if there is no free memory, or if another body is waiting for the same table.

        Args:
            loaded_table: The table.
            body_bytes: The size of the body, which is an estimate of the size of its rows. The append checks the exact
                size.
            principal_name: The principal that sends the body.

        Raises:
            StreamPaused: The table is paused.
            TooManyRequests: The memory is full.
        """
        assert loaded_table.entry is not None
        self._check_pause(loaded_table)
        table = self._tables.get(loaded_table.entry.uuid)
        if table is None:
            yield
            return
        size_bytes = min(body_bytes, self._settings.stream_memory_bytes // 2)
        try:
            if table.admission.locked() or not self._has_room(table, size_bytes):
                await self._wait(loaded_table, table, body_bytes, size_bytes, principal_name)
        except TooManyRequests:
            self._counts.refused += 1
            raise
        table.reserved_bytes += size_bytes
        try:
            yield
        finally:
            table.reserved_bytes -= size_bytes

    def _check_pause(self, loaded_table: LoadedTable) -> None:
        entry = loaded_table.entry
        assert entry is not None
        self._pauses.check(entry.uuid, loaded_table.metadata, format_path(entry.namespace, entry.name))

    def _has_room(self, table: StreamTable, size_bytes: int) -> bool:
        try:
            self._check_memory(table, size_bytes, table.reserved_bytes)
        except TooManyRequests:
            return False
        return True

    def _may_wait(self, body_bytes: int, principal_name: str) -> bool:
        bytes_max = self._settings.bodies_memory_bytes * _WAITING_SHARE
        is_within_share = self._settings.auth == "none" or self._waiters[principal_name] < _PRINCIPAL_WAITERS_MAX
        return self.waiter_count < _WAITERS_MAX and is_within_share and self._waiting_bytes + body_bytes <= bytes_max

    async def _wait(
        self, loaded_table: LoadedTable, table: StreamTable, body_bytes: int, size_bytes: int, principal_name: str
    ) -> None:
        """Wait until there is memory for a body, after the earlier bodies for the same table.

        Raises:
            StreamPaused: The table was paused meanwhile.
            TooManyRequests: The memory is still full, or too many bodies are waiting.
        """
        if not self._may_wait(body_bytes, principal_name):
            self._check_memory(table, size_bytes, table.reserved_bytes)
            raise TooManyRequests(
                "Other large bodies wait for room in the memory for rows (stream_memory_bytes); send the rows again "
                "later",
                1,
            )
        until_s = self._clock.monotonic() + WAIT_S
        self._waiters[principal_name] += 1
        self._waiting_bytes += body_bytes
        try:
            async with table.admission:
                while not self._has_room(table, size_bytes):
                    if self._clock.monotonic() >= until_s:
                        self._check_memory(table, size_bytes, table.reserved_bytes)
                    await asyncio.sleep(_CHECK_INTERVAL_S)
                    self._check_pause(loaded_table)
                self._check_pause(loaded_table)
        finally:
            self._waiters[principal_name] -= 1
            if not self._waiters[principal_name]:
                del self._waiters[principal_name]
            self._waiting_bytes -= body_bytes
