"""Reading of the timeline, waiting for new instants, and archiving of old instants.

All watchers share one poller, which runs only while there are watchers. The poller reads new instants once per
`watch_poll_s` (with jitter, so that replicas do not poll together) and immediately after a commit of this replica
(`notify`). The poller wakes a watcher only for instants that match its filter. The watcher then reads from its own
position. A lost or duplicate wake-up therefore costs a read but never an instant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater, SeamarkError
from seamark.metaserver.runtime.background import log_safely
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Instant
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.instants import matches_filter

_RETRY_AFTER_S = 5
_INSTANTS_PER_BATCH = 500
_ARCHIVED_INSTANTS_PER_BATCH = 1000
_log = structlog.get_logger("seamark.timeline")


class Watcher:
    """A client that waits for new instants.

    Attributes:
        where: The filter of the client. `where.since` is its position; None means the beginning.
        counted: Whether the client counts towards the limit of watchers.
    """

    def __init__(self, where: InstantFilter, counted: bool) -> None:
        self.where = where
        self.counted = counted
        self.woken = asyncio.Event()


class Timeline:
    """The timeline, which can be read, watched and archived.

    It is opened by `open_timeline`, and belongs to one event loop.
    """

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._watchers: set[Watcher] = set()
        self._new_instants_event = asyncio.Event()
        """Set when this replica has recorded an instant, so that the poller reads new instants immediately."""
        self._poller: asyncio.Task[None] | None = None
        self._head: str | None = None
        """The position of the newest instant that the poller has read."""
        self._ready_event: asyncio.Event = asyncio.Event()
        self._is_draining = False

    @property
    def watchers(self) -> int:
        """The number of waiting clients that count towards the limit `watchers_limit`."""
        return sum(watcher.counted for watcher in self._watchers)

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping, so that nothing may wait."""
        return self._is_draining

    def notify(self) -> None:
        """Wake watchers immediately, because this replica has recorded an instant.

        The call is cheap, and never blocks or fails.
        """
        self._new_instants_event.set()

    def drain(self) -> None:
        """Make every call of `watch` return because the server is stopping. Later calls do not wait."""
        self._is_draining = True
        for watcher in self._watchers:
            watcher.woken.set()

    async def read(self, where: InstantFilter, limit: int) -> list[Instant]:
        """Return at most `limit` instants in the order of position. To continue, use the last position as `since`."""
        return await self._store.list_instants(where, limit)

    async def load_head(self) -> str | None:
        """Return the position of the newest instant, or None if there are no instants."""
        newest = await self._store.list_instants(InstantFilter(newest_first=True), 1)
        return newest[0].position if newest else None

    async def watch(self, where: InstantFilter, limit: int, timeout_s: float) -> list[Instant]:
        """Return matching instants after `where.since`.

        If there are none, wait up to `timeout_s` for the first instant. After the timeout, the result is empty. `where`
        must request the oldest instants first.

        Raises:
            RetryLater: `watchers_limit` clients are already waiting.
        """
        instants = await self.read(where, limit)
        if instants or timeout_s <= 0 or self._is_draining:
            return instants
        async with self.watch_instants(where) as watcher:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while True:
                        instants = await self.read_next(watcher, limit)
                        if instants or self._is_draining:
                            return instants
        # This read also finds instants that became visible without a wake-up, for example after a slow transaction of
        # another replica.
        return await self.read(where, limit)

    @asynccontextmanager
    async def watch_instants(self, where: InstantFilter, *, counted: bool = True) -> AsyncIterator[Watcher]:
        """Register a watcher while the context is active.

        Raises:
            RetryLater: The limit of watchers is reached.
        """
        if counted and self.watchers >= self._settings.watchers_limit:
            raise RetryLater(
                f"{self.watchers} clients already watch the timeline; read it with `since` instead", _RETRY_AFTER_S
            )
        watcher = Watcher(where, counted)
        watcher.woken.set()  # The first read follows the registration, so no instant is missed.
        self._watchers.add(watcher)
        # The poller reads the timeline for all watchers. The watcher waits until the poller knows the newest instant.
        if self._poller is None:
            self._ready_event.clear()
            self._poller = asyncio.create_task(self._poll(), name="timeline-poller")
        try:
            await self._ready_event.wait()
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def read_next(self, watcher: Watcher, limit: int) -> list[Instant]:
        """Wait for a wake-up. Then read the next instants, and advance the watcher's position past them.

        The result can be empty, because a wake-up is only a hint.
        """
        await watcher.woken.wait()
        watcher.woken.clear()
        try:
            instants = await self._store.list_instants(watcher.where, limit)
        except BaseException:
            watcher.woken.set()  # An interrupted read must not lose the wake-up that caused it.
            raise
        if instants:
            watcher.where = msgspec.structs.replace(watcher.where, since=instants[-1].position)
            if len(instants) == limit:  # There may be more instants, so the next call must not wait.
                watcher.woken.set()
        return instants

    async def archive(self) -> int:
        """Archive finished instants except the newest `timeline_keep` of each table. Housekeeping calls this.

        Returns:
            The number of archived instants.
        """
        total_count = 0
        while True:
            count = await self._store.archive_instants(self._settings.timeline_keep, _ARCHIVED_INSTANTS_PER_BATCH)
            total_count += count
            if count < _ARCHIVED_INSTANTS_PER_BATCH:
                return total_count

    async def close(self) -> None:
        self.drain()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None

    def check_invariants(self) -> None:
        """Check that the poller runs exactly while there are watchers. Tests call this after every step."""
        assert (self._poller is not None) == bool(self._watchers), (self._poller, len(self._watchers))
        assert self.watchers <= self._settings.watchers_limit

    async def _poll(self) -> None:
        """Read new instants periodically and after each commit, until the task is cancelled."""
        has_head = False
        while True:
            self._new_instants_event.clear()
            try:
                if not has_head:
                    self._head = await self.load_head()
                    has_head = True
                else:
                    await self._read_new_instants()
            except SeamarkError as error:
                # The store is unavailable. Watchers keep waiting, and their next request receives the error.
                log_safely(_log.warning, "the timeline cannot be read", error=error.message)
            except Exception:  # noqa: BLE001  only the poller wakes the watchers
                log_safely(_log.exception, "the timeline cannot be read")
            self._ready_event.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._draw_pause_s()):
                    await self._new_instants_event.wait()

    async def _read_new_instants(self) -> None:
        """Read the new instants, and wake the watchers whose filter they match."""
        while True:
            batch = await self._store.list_instants(
                InstantFilter(since=self._head, archived=False), _INSTANTS_PER_BATCH
            )
            for watcher in self._watchers:
                if not watcher.woken.is_set() and any(matches_filter(watcher.where, instant) for instant in batch):
                    watcher.woken.set()
            if batch:
                self._head = batch[-1].position
            if len(batch) < _INSTANTS_PER_BATCH:
                return

    def _draw_pause_s(self) -> float:
        """Return a random time in seconds between 0.75 and 1.25 times the setting `watch_poll_s`.

        So the replicas do not all read the store at the same time.
        """
        (random_byte,) = self._clock.draw_bytes(1)
        return self._settings.watch_poll_s * (0.75 + random_byte / 255 / 2)


@asynccontextmanager
async def open_timeline(settings: Settings, store: PointerStore, clock: Clock) -> AsyncIterator[Timeline]:
    timeline = Timeline(settings, store, clock)
    try:
        yield timeline
    finally:
        await timeline.close()
