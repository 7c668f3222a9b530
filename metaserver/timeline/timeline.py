"""Reading the timeline, waiting for what comes next, and moving what is old to the archive.

Everybody who waits shares one poller, which runs only while somebody waits: it reads what is new since its own head
once per `watch_poll_s` (jittered, so that replicas do not ask in step) and at once when this replica committed
(`notify`). It wakes a watcher only when something matches the watcher's filter; the watcher then reads for itself, from
its own position. So a lost or doubled wake-up costs a read and never an instant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from metaserver.clock import Clock
from metaserver.errors import RetryLater, SeamarkError
from metaserver.settings import Settings
from metaserver.store.port import Instant, InstantFilter, PointerStore
from metaserver.timeline.instants import matches

_BATCH = 500
_ARCHIVE_BATCH = 1000
_log = structlog.get_logger("seamark.timeline")


class Watcher:
    """One who waits. `where.since` is where it reads on; None: from the beginning. `counted`: against the bound."""

    def __init__(self, where: InstantFilter, counted: bool) -> None:
        self.where = where
        self.counted = counted
        self.woken = asyncio.Event()


class Timeline:
    """Opened by `open_timeline`; belongs to one event loop."""

    def __init__(self, settings: Settings, store: PointerStore, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._watchers: set[Watcher] = set()
        self._news = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._head: str | None = None
        self._ready: asyncio.Event = asyncio.Event()
        self._draining = False

    @property
    def watchers(self) -> int:
        """How many clients wait now."""
        return sum(watcher.counted for watcher in self._watchers)

    def notify(self) -> None:
        """This replica has just recorded an instant: whoever watches hears at once. Cheap; never blocks or fails."""
        self._news.set()

    def drain(self) -> None:
        """The server stops: every watch answers with what it has, and later ones do not wait."""
        self._draining = True
        for watcher in self._watchers:
            watcher.woken.set()

    async def read(self, where: InstantFilter, limit: int) -> list[Instant]:
        """At most `limit` instants in order of position; continue with the last one's position as `since`."""
        return await self._store.instants(where, limit)

    async def head(self) -> str | None:
        """Position of the newest instant; None while there is none."""
        newest = await self._store.instants(InstantFilter(newest_first=True), 1)
        return newest[0].position if newest else None

    async def watch(self, where: InstantFilter, limit: int, timeout_s: float) -> list[Instant]:
        """What matches after `where.since`, waiting up to `timeout_s` for the first; empty when nothing came.

        RetryLater when `watchers_limit` already wait. `where` must be oldest first.
        """
        found = await self.read(where, limit)
        if found or timeout_s <= 0 or self._draining:
            return found
        async with self.watching(where) as watcher:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while True:
                        found = await self.next(watcher, limit)
                        if found or self._draining:
                            return found
        # What became visible without a wake-up (a slow transaction elsewhere) is still found here.
        return await self.read(where, limit)

    @asynccontextmanager
    async def watching(self, where: InstantFilter, *, counted: bool = True) -> AsyncIterator[Watcher]:
        """A place among the watchers while the block runs. RetryLater when there is none left for one that counts."""
        if counted and self.watchers >= self._settings.watchers_limit:
            raise RetryLater(f"{self.watchers} clients watch the timeline already; read it with `since` instead", 5)
        watcher = Watcher(where, counted)
        watcher.woken.set()  # the first look happens after registration: nothing falls between
        self._watchers.add(watcher)
        if self._poller is None:
            self._ready.clear()
            self._poller = asyncio.create_task(self._poll(), name="timeline-poller")
        try:
            await self._ready.wait()
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def next(self, watcher: Watcher, limit: int) -> list[Instant]:
        """Waits for a wake-up, then reads and moves the watcher on. May be empty: a wake-up is only a hint."""
        await watcher.woken.wait()
        watcher.woken.clear()
        try:
            found = await self._store.instants(watcher.where, limit)
        except BaseException:
            watcher.woken.set()  # whoever interrupts a read must not lose the wake-up that led to it
            raise
        if found:
            watcher.where = msgspec.structs.replace(watcher.where, since=found[-1].position)
            if len(found) == limit:
                watcher.woken.set()
        return found

    async def archive(self) -> int:
        """A round of housekeeping: each table keeps its newest `timeline_keep` finished instants. Returns the count."""
        moved = 0
        while True:
            count = await self._store.archive_instants(self._settings.timeline_keep, _ARCHIVE_BATCH)
            moved += count
            if count < _ARCHIVE_BATCH:
                return moved

    async def close(self) -> None:
        self.drain()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None

    def check_invariants(self) -> None:
        """A poller runs exactly while somebody watches; run by tests after every step."""
        assert (self._poller is not None) == bool(self._watchers), (self._poller, len(self._watchers))
        assert self.watchers <= self._settings.watchers_limit

    async def _poll(self) -> None:
        started = False
        while True:
            self._news.clear()
            try:
                if not started:
                    self._head = await self.head()
                    started = True
                else:
                    await self._look()
            except SeamarkError as error:
                # The store is away: those who wait go on waiting, and the next request of theirs will be told.
                _log.warning("the timeline cannot be read", error=error.message)
            self._ready.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._news.wait()

    async def _look(self) -> None:
        while True:
            batch = await self._store.instants(InstantFilter(since=self._head, archived=False), _BATCH)
            for watcher in self._watchers:
                if not watcher.woken.is_set() and any(matches(watcher.where, instant) for instant in batch):
                    watcher.woken.set()
            if batch:
                self._head = batch[-1].position
            if len(batch) < _BATCH:
                return

    def _pause_s(self) -> float:
        """Between 0.75 and 1.25 of the setting."""
        jitter = self._clock.random_bytes(1)[0] / 255
        return self._settings.watch_poll_s * (0.75 + jitter / 2)


@asynccontextmanager
async def open_timeline(settings: Settings, store: PointerStore, clock: Clock) -> AsyncIterator[Timeline]:
    timeline = Timeline(settings, store, clock)
    try:
        yield timeline
    finally:
        await timeline.close()
