"""Leases, by which at most one worker of all replicas performs a background task at a time."""

from __future__ import annotations

from contextlib import suppress

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitConflict, SeamarkError
from seamark.metaserver.store.operations import TakeLease
from seamark.metaserver.store.port import PointerStore

SERVICES = "services"
"""The name of the lease of the replica that runs the table services. Commits of jobs contain its fencing number."""


class LeaseLost(Exception):
    """Raised if another holder has the lease."""


class Lease:
    """A named lease of one holder. `holder` identifies a worker among all workers that use the store."""

    def __init__(self, store: PointerStore, clock: Clock, name: str, holder: str, *, lasts_s: float) -> None:
        self._store = store
        self._clock = clock
        self._name = name
        self._holder = holder
        self._until_s = 0.0
        self.lasts_s = lasts_s
        self.fence = 0
        """The fencing number, which `hold` sets, and which rises each time the holder changes."""

    async def hold(self, state: str = "") -> None:
        """Take the lease, or renew it if a third of its time has passed.

        Otherwise do nothing, so that a holder can call this method often without a query of the database.

        Args:
            state: A text that other workers may read while the lease is held (`PointerStore.lease_state`).

        Raises:
            LeaseLost: Another holder has the lease.
        """
        now_s = self._clock.monotonic()
        if now_s < self._until_s - self.lasts_s * 2 / 3:
            return
        now_ms = self._clock.now_ms()
        until_ms = now_ms + int(self.lasts_s * 1000)
        try:
            (self.fence,) = await self._store.transact(
                [TakeLease(name=self._name, holder=self._holder, now_ms=now_ms, until_ms=until_ms, state=state)]
            )
        except CommitConflict:
            self.forget()
            raise LeaseLost from None
        self._until_s = now_s + self.lasts_s

    async def release(self) -> None:
        """End the lease now, so that another holder can take it before it expires. The method never raises an error."""
        now_ms = self._clock.now_ms()
        with suppress(SeamarkError):
            await self._store.transact(
                [TakeLease(name=self._name, holder=self._holder, now_ms=now_ms, until_ms=now_ms)]
            )
        self.forget()

    def forget(self) -> None:
        """Forget the state of the lease, so that the next `hold` reads it from the store."""
        self._until_s = 0.0
