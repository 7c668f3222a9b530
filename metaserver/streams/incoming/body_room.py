"""Reserves memory for large bodies of rows before they are decoded.

If the memory for rows is full, a large body waits some seconds for a flush, in the order of the requests. Without the
wait, each large body would be decoded and refused, and its writer would send it again.

A large body for one table waits before the server receives it, so it takes no memory of the server. If there is no room
after the wait, it is received, because an answer before the body would break the connection of many clients.

A body with rows of several tables waits until all of them have memory, and reserves nothing before. It delays later
bodies only at tables that have no memory for it. So a full table does not delay bodies for other tables.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import TooManyRequests
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.streams.pauses import Pauses, StreamPaused
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
_RETRY_AFTER_S = 1
"""The time after which the client of a refused body may send it again."""
_CHECK_INTERVAL_S = 0.02
"""The interval between two checks for free memory."""


class CheckMemory(Protocol):
    """Checks that there is memory for rows of a table."""

    def __call__(self, table: StreamTable, size_bytes: int, reserved_bytes: int, other_bytes: int, /) -> None:
        """Check that there is memory for rows.

        Args:
            table: The table to which the rows are appended.
            size_bytes: The size of the rows.
            reserved_bytes: The memory that earlier bodies for this table already use or have reserved.
            other_bytes: The size of the rows of the same request for other tables.

        Raises:
            TooManyRequests: There is not enough memory.
        """


class _Share(NamedTuple):
    """The part of a body for one open table.

    Attributes:
        table: The open table.
        size_bytes: The bytes to reserve.
        other_bytes: The bytes to reserve for the other tables of the body.
    """

    table: StreamTable
    size_bytes: int
    other_bytes: int


@dataclass(eq=False, slots=True)
class _WaitingBody:
    """A body that waits for memory.

    Attributes:
        shares: The parts of the body.
        is_admitted: Whether memory is reserved for the body.
    """

    shares: Sequence[_Share]
    is_admitted: bool = False


class BodyReservations:
    """Reserves memory for large bodies of rows. An instance belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        tables: Mapping[str, StreamTable],
        check_memory: CheckMemory,
        pauses: Pauses,
        counts: StreamCounts,
    ) -> None:
        """Create an object without reservations.

        Args:
            settings: The settings of the server.
            clock: The clock.
            tables: The open tables, by UUID.
            check_memory: Raises TooManyRequests if a table has no memory for a number of additional bytes, while
                other bytes are reserved for the table, or for other tables of the body.
            pauses: The tables that take no rows at present.
            counts: Counts refused bodies.
        """
        self._settings = settings
        self._clock = clock
        self._tables = tables
        self._check_memory = check_memory
        self._pauses = pauses
        self._counts = counts
        self._unreceived_by_principal: Counter[str] = Counter()
        """The number of bodies that wait to be received, by principal."""
        self._waiters: Counter[str] = Counter()
        self._waiting_bytes = 0
        self._queue: list[_WaitingBody] = []
        """The bodies that wait for memory, in the order of their arrival."""

    @property
    def unreceived_body_count(self) -> int:
        """The number of bodies that wait to be received."""
        return self._unreceived_by_principal.total()

    @property
    def waiter_count(self) -> int:
        """The number of received bodies that wait."""
        return self._waiters.total()

    @asynccontextmanager
    async def await_arrival(self, loaded: LoadedTable, body_bytes: int, principal_name: str) -> AsyncIterator[None]:
        """Wait until a table has memory for a large request body, at most `WAIT_S`.

        The caller receives the body while the context is active. During this time, the body counts only when other
        large bodies for the table wait here. So a client that sends slowly delays only these bodies, for at most
        `WAIT_S`.

        Args:
            loaded: The table.
            body_bytes: The announced size of the body.
            principal_name: The principal that sends the body.
        """
        assert loaded.entry is not None
        table = self._tables.get(loaded.entry.uuid)
        # The table is not open, so none of its rows are in memory, and the body need not wait.
        if table is None:
            yield
            return
        # A body that is larger than half of the memory would wait until the memory is nearly empty.
        size_bytes = min(body_bytes, self._settings.stream_memory_bytes // 2)
        is_full = table.arrivals.locked() or not self._has_memory_for_body(table, size_bytes)
        if is_full and self._is_within_limits(self._unreceived_by_principal, principal_name):
            until_s = self._clock.monotonic() + WAIT_S
            self._unreceived_by_principal[principal_name] += 1
            try:
                async with table.arrivals:
                    while not self._has_memory_for_body(table, size_bytes):
                        if self._clock.monotonic() >= until_s:
                            break
                        await asyncio.sleep(_CHECK_INTERVAL_S)
                        self._check_pauses([(loaded, body_bytes)])
            except StreamPaused:  # The body is received and then refused.
                pass
            finally:
                _count_down(self._unreceived_by_principal, principal_name)
        table.arriving_bytes += size_bytes
        try:
            yield
        finally:
            table.arriving_bytes -= size_bytes

    def _has_memory_for_body(self, table: StreamTable, size_bytes: int) -> bool:
        """Return whether a table has memory for one more body, in addition to the bodies that are being received."""
        try:
            self._check_memory(table, size_bytes, table.reserved_bytes + table.arriving_bytes, 0)
        except TooManyRequests:
            return False
        return True

    def _is_within_limits(self, waiters: Counter[str], principal_name: str) -> bool:
        """Return whether one more request body of this principal may wait for memory.

        Without authentication, all clients are one principal, so only the total number is limited.
        """
        is_within_share = self._settings.auth == "none" or waiters[principal_name] < _PRINCIPAL_WAITERS_MAX
        return waiters.total() < _WAITERS_MAX and is_within_share

    @asynccontextmanager
    async def reserve(self, parts: Sequence[tuple[LoadedTable, int]], principal_name: str) -> AsyncIterator[None]:
        """Wait for memory for the rows of a large body, and reserve it while the context is active.

        The number of waiting bodies is limited, in total and for each principal. A body beyond a limit is refused
        immediately if there is no free memory, or if another body is waiting for one of the tables.

        Args:
            parts: The distinct tables of the body, each with the size of its part. The size is an estimate of the size
                of its rows. The append checks the exact size.
            principal_name: The principal that sends the body.

        Raises:
            StreamPaused: A table is paused.
            TooManyRequests: The memory is full.
        """
        self._check_pauses(parts)
        body = _WaitingBody(self._make_shares(parts))
        self._queue.append(body)
        try:
            self._admit_bodies()
            if not body.is_admitted:
                await self._await_memory(parts, body, principal_name)
            yield
        finally:
            if body.is_admitted:
                for share in body.shares:
                    share.table.reserved_bytes -= share.size_bytes
            else:
                self._queue.remove(body)

    async def _await_memory(
        self, parts: Sequence[tuple[LoadedTable, int]], body: _WaitingBody, principal_name: str
    ) -> None:
        """Wait until a body is admitted, and count it if it is refused. See `_wait` for errors."""
        try:
            await self._wait(parts, body, sum(size_bytes for _, size_bytes in parts), principal_name)
        except TooManyRequests:
            self._counts.refused += 1
            raise

    def _admit_bodies(self) -> None:
        """Reserve memory for the waiting bodies for which there is memory, in the order of their arrival.

        If a table has no memory for a body, later bodies for this table also wait.
        """
        full_tables: set[StreamTable] = set()
        for body in list(self._queue):
            lacking_tables = {share.table for share in body.shares if not self._has_room(share)}
            if not lacking_tables and full_tables.isdisjoint(share.table for share in body.shares):
                self._admit(body)
            full_tables |= lacking_tables

    def _admit(self, body: _WaitingBody) -> None:
        """Reserve memory for a body, which leaves the queue."""
        self._queue.remove(body)
        body.is_admitted = True
        for share in body.shares:
            share.table.reserved_bytes += share.size_bytes

    def _make_shares(self, parts: Sequence[tuple[LoadedTable, int]]) -> list[_Share]:
        """Return the parts for tables that are open, in the order of their UUIDs.

        The size of a part is limited, so that even a large body for many tables fits if no other rows are in memory.
        """
        part_bytes_max = self._settings.stream_memory_bytes // (len(parts) + 1)
        sizes = {
            loaded.entry.uuid: min(size_bytes, part_bytes_max)
            for loaded, size_bytes in parts
            if loaded.entry is not None
        }
        body_bytes = sum(sizes.values())
        return [
            _Share(self._tables[uuid], size_bytes, body_bytes - size_bytes)
            for uuid, size_bytes in sorted(sizes.items())
            if uuid in self._tables
        ]

    def _check_pauses(self, parts: Sequence[tuple[LoadedTable, int]]) -> None:
        for loaded, _ in parts:
            entry = loaded.entry
            assert entry is not None
            self._pauses.check(entry.uuid, loaded.metadata, format_path(entry.namespace, entry.name))

    def _check_shares(self, shares: Sequence[_Share]) -> None:
        for share in shares:
            self._check_memory(share.table, share.size_bytes, share.table.reserved_bytes, share.other_bytes)

    def _has_room(self, share: _Share) -> bool:
        try:
            self._check_shares([share])
        except TooManyRequests:
            return False
        return True

    def _may_wait(self, body_bytes: int, principal_name: str) -> bool:
        bytes_max = self._settings.bodies_memory_bytes * _WAITING_SHARE
        is_within_limits = self._is_within_limits(self._waiters, principal_name)
        return is_within_limits and self._waiting_bytes + body_bytes <= bytes_max

    async def _wait(
        self, parts: Sequence[tuple[LoadedTable, int]], body: _WaitingBody, body_bytes: int, principal_name: str
    ) -> None:
        """Wait at most `WAIT_S` until a body is admitted.

        After this time, the body is admitted if there is memory, even if an earlier body waits for the same memory.

        Args:
            parts: The tables of the body, each with the size of its part.
            body: The body, which is in the queue.
            body_bytes: The size of all parts.
            principal_name: The principal that sends the body.

        Raises:
            StreamPaused: A table was paused meanwhile.
            TooManyRequests: The memory is still full, or too many bodies are waiting.
        """
        if not self._may_wait(body_bytes, principal_name):
            self._check_shares(body.shares)
            raise TooManyRequests(
                "Other large bodies wait for room in the memory for rows (stream_memory_bytes); send the rows again "
                "later",
                _RETRY_AFTER_S,
            )
        until_s = self._clock.monotonic() + WAIT_S
        self._waiters[principal_name] += 1
        self._waiting_bytes += body_bytes
        try:
            while not body.is_admitted and self._clock.monotonic() < until_s:
                await asyncio.sleep(_CHECK_INTERVAL_S)
                self._check_pauses(parts)
                if self._queue and self._queue[0] is body:  # One body checks the memory for all.
                    self._admit_bodies()
        finally:
            _count_down(self._waiters, principal_name)
            self._waiting_bytes -= body_bytes
        if not body.is_admitted:
            self._check_shares(body.shares)
            self._admit(body)


def _count_down(waiters: Counter[str], principal_name: str) -> None:
    """Subtract one from the number of a principal, and remove the principal if the number is 0."""
    waiters[principal_name] -= 1
    if not waiters[principal_name]:
        del waiters[principal_name]
