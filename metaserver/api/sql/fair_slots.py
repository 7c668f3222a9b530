"""Limits the statements that run at once, and shares the slots between principals.

A principal that runs many statements must not prevent other principals from running a statement. Each principal
therefore runs at most its share. After its first statement, a principal gets a slot only if some slots stay free for
principals that run nothing. When a slot becomes free, the waiting principal with the fewest statements gets it. If
several principals have the same number, the principal that has waited longest gets it. An instance belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from seamark.formats.runtime.errors import RetryLater, TooManyRequests

_WAITING_PER_SLOT = 8
"""The maximum number of waiting statements for each slot. Further statements are refused with 503 at once."""
_FREE_SLOTS_DIVISOR = 4
"""One of this many slots is reserved for principals that run nothing. At least one slot is reserved."""


@dataclass(eq=False)
class _WaitingStatement:
    """A statement that waits for a slot."""

    holder: str | None
    granted: asyncio.Future[None]


class FairSlots:
    """Shares a limited number of slots between holders. Each holder gets at most half of the `limit`.

    The holder None is a caller without a login. Its share is not limited.
    """

    def __init__(self, resource_name: str, limit: int) -> None:
        self._resource_name = resource_name
        self.limit = limit
        self.share = max(1, limit // 2)
        """The maximum number of running and waiting statements of one holder, so that no holder takes all slots."""
        self._reserved_slots = max(1, limit // _FREE_SLOTS_DIVISOR)
        """The number of slots that only holders without a running statement may take."""
        self.taken = 0
        self._slots_by_holder: Counter[str] = Counter()
        self._waiting: list[_WaitingStatement] = []

    @asynccontextmanager
    async def hold_slot(self, holder: str | None, wait_s: float) -> AsyncIterator[None]:
        """Hold a slot for as long as the context is active.

        Raises:
            TooManyRequests: The running and waiting statements of the holder use its whole share.
            RetryLater: No slot became free within `wait_s`, or too many statements wait.
        """
        await self._take_slot(holder, wait_s)
        try:
            yield
        finally:
            self._release_slot(holder)

    async def _take_slot(self, holder: str | None, wait_s: float) -> None:
        """Take a slot, or wait for one.

        Raises:
            TooManyRequests: The running and waiting statements of the holder use its whole share.
            RetryLater: No slot became free within `wait_s`, or too many statements wait.
        """
        if holder is not None:
            waiting_count = sum(entry.holder == holder for entry in self._waiting)
            if self._slots_by_holder[holder] + waiting_count >= self.share:
                raise TooManyRequests(
                    f"{holder[:100]} uses its whole share, {self.share:,} of the server's {self.limit:,} "
                    f"{self._resource_name}; wait for an answer before you send another statement"
                )
        if self._may_start(holder):
            self._grant_slot(holder)
            return
        if len(self._waiting) >= _WAITING_PER_SLOT * self.limit:
            raise self._make_limit_error()
        entry = _WaitingStatement(holder, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(wait_s):
                await entry.granted
        except BaseException as error:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry.granted.done() and not entry.granted.cancelled():  # It got a slot when it stopped waiting.
                self._release_slot(holder)
            if isinstance(error, TimeoutError):
                raise self._make_limit_error() from None
            raise

    def _make_limit_error(self) -> RetryLater:
        """Return the error for a statement that gets no slot."""
        return RetryLater(f"The server is at its limit of {self.limit:,} {self._resource_name}; try again shortly")

    def _may_start(self, holder: str | None) -> bool:
        """Return whether a statement of the holder may start now.

        The reserved slots are only for holders that run no statement. Without logins (None), all slots are usable.
        """
        if holder is None or not self._slots_by_holder[holder]:
            return self.taken < self.limit
        return self.taken < self.limit - self._reserved_slots

    def _grant_slot(self, holder: str | None) -> None:
        """Give a slot to the holder."""
        self.taken += 1
        if holder is not None:
            self._slots_by_holder[holder] += 1

    def _release_slot(self, holder: str | None) -> None:
        """Release a slot of the holder, and give free slots to waiting statements.

        Among the statements that may start, the statement of the holder with the fewest slots is first.
        """
        self.taken -= 1
        if holder is not None:
            self._slots_by_holder[holder] -= 1
            if not self._slots_by_holder[holder]:
                del self._slots_by_holder[holder]
        while startable_entries := [entry for entry in self._waiting if self._may_start(entry.holder)]:
            entry = min(
                startable_entries,
                key=lambda waiting_statement: (
                    0 if waiting_statement.holder is None else self._slots_by_holder[waiting_statement.holder]
                ),
            )
            self._waiting.remove(entry)
            if not entry.granted.done():
                self._grant_slot(entry.holder)
                entry.granted.set_result(None)

    def check_invariants(self) -> None:
        """Assert that the numbers of slots agree. Only tests call this method."""
        assert 0 <= self._slots_by_holder.total() <= self.taken <= self.limit
        assert all(0 <= held_slots <= self.share for held_slots in self._slots_by_holder.values())
        assert not any(self._may_start(entry.holder) for entry in self._waiting)
