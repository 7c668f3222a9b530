"""Delivery of every instant as a CloudEvent to each target: at least once, in order, from the first instant.

The timeline is the queue, and the only state of a target is its position (a cursor). So a target that was unavailable
for a week gets the events of the week. A lease ensures that a single replica at a time delivers to a target. If two
overlap, the cursor's compare-and-swap stops the replica that is behind. If an answer or the cursor was lost, a target
gets an event again. A receiver can recognise the event by `id`, which is the instant's position. An id is not reused,
unless an older state of a SQLite database is restored. Then new events get the ids of the events after that state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitConflict, SeamarkError
from seamark.metaserver.store.lease import Lease, LeaseLost
from seamark.metaserver.store.operations import SaveCursor
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.events import Event, make_event
from seamark.metaserver.timeline.timeline import Timeline

INSTANTS_PER_BATCH = 100
"""The number of instants that are read together, which is the maximum that is delivered again after a crash."""
LEASE_S = 30.0
"""The time for which a replica has the lease of a target without renewing it."""
SEND_TIMEOUT_S = 10.0
BACKOFF_S_MAX = 60.0
_BACKOFF_S_MIN = 0.25
"""The half of the first pause after a failed delivery. The pause doubles with each further failure."""
_DOUBLINGS_MAX = 16
_STORE_PAUSE_S = 5.0
"""The pause after the store has failed."""
_log = structlog.get_logger("seamark.events")


class NotDelivered(Exception):
    """A target did not confirm events. It may have received some of them."""


class EventTarget(Protocol):
    """The interface to a receiver of events.

    Attributes:
        kind: The kind of the target, for metrics.
        name: The name of its cursor and its lease in the database.
        place: The address for logs, without secrets.
        events_max: The maximum number of events in a call of `send`.
    """

    kind: str
    name: str
    place: str
    events_max: int

    async def send(self, events: Sequence[Event]) -> None:
        """Send events in order, and return when the target has confirmed all of them.

        With Kafka, a call takes at most `SEND_TIMEOUT_S`. With the other targets, it takes at most this time for each
        event.

        Raises:
            NotDelivered: The target did not confirm all events. They are sent again, from the first event.
        """

    async def close(self) -> None:
        """Close the connection."""


class DeliveryObserver(Protocol):
    """The interface to the object that counts deliveries for metrics."""

    def count_failed_delivery(self, kind: str) -> None:
        """Count a failed call of a target's `send`."""

    def set_delivery_lag(self, kind: str, name: str, seconds: float) -> None:
        """Record the age of the oldest event that the target `name` has not confirmed, or 0 if all are confirmed."""


class Deliverer:
    """The delivery of events to one target."""

    def __init__(
        self,
        target: EventTarget,
        *,
        source: str,
        store: PointerStore,
        timeline: Timeline,
        clock: Clock,
        holder: str,
        observer: DeliveryObserver,
        warehouse_id: str = "",
    ) -> None:
        self._warehouse_id = warehouse_id
        self._target = target
        self._source = source
        self._store = store
        self._timeline = timeline
        self._clock = clock
        self._observer = observer
        self._lease = Lease(store, clock, target.name, holder, lasts_s=LEASE_S)

    async def run(self) -> None:
        """Take the lease and deliver events while this replica has it, until the task is cancelled.

        While another replica has the lease, this replica waits.
        """
        try:
            while True:
                await self._run_once()
        finally:
            await self._lease.release()

    async def _run_once(self) -> None:
        """Deliver events until this replica loses the lease or the store fails, and then pause.

        The lease lets only one replica deliver to a target. Without the lease, this replica reports no lag.
        """
        try:
            await self._lease.hold()
            await self._deliver_after_position(await self._store.load_cursor(self._target.name))
        except LeaseLost:
            self._report_lag(0.0)
            await asyncio.sleep(self._draw_jitter_s(LEASE_S / 3))
        except SeamarkError as error:
            _log.warning("events wait for the store", target=self._target.place, error=error.message)
            await asyncio.sleep(self._draw_jitter_s(_STORE_PAUSE_S))

    async def _deliver_after_position(self, position: str | None) -> None:
        """Deliver the events after a position, and save the position after each batch, without an end."""
        while True:
            batch = await self._timeline.read(InstantFilter(since=position), INSTANTS_PER_BATCH)
            if not batch:
                self._report_lag(0.0)
                await self._lease.hold()
                await self._wait_for_news(position)
                continue
            saved_position = position
            events = [make_event(instant, self._source, self._warehouse_id) for instant in batch]
            try:
                for start in range(0, len(events), self._target.events_max):
                    delivered_events = events[start : start + self._target.events_max]
                    await self._deliver(delivered_events)
                    position = delivered_events[-1].id
            except BaseException:
                # If the position can still be saved after an interruption, events that were received are not sent
                # again.
                with suppress(SeamarkError, LeaseLost):
                    await self._save(saved_position, position)
                raise
            await self._save(saved_position, position)

    async def _wait_for_news(self, position: str | None) -> None:
        """Wait for new instants, but at most a third of the lease, so that the lease is renewed in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S / 3):
                async with self._timeline.watch_instants(InstantFilter(since=position), counted=False) as watcher:
                    while not await self._timeline.read_next(watcher, 1):
                        pass

    async def _deliver(self, events: Sequence[Event]) -> None:
        """Deliver events, and repeat until the target confirms them.

        The pause doubles with each attempt, up to a limit.

        Raises:
            LeaseLost: This replica may no longer hold the lease.
        """
        attempt = 0
        while True:
            await self._lease.hold()
            self._report_lag((self._clock.now_ms() - events[0].instant.requested_ms) / 1000)
            try:
                await self._target.send(events)
            except NotDelivered as error:
                reason = str(error)
            else:
                return
            attempt += 1
            self._observer.count_failed_delivery(self._target.kind)
            pause_s = self._draw_jitter_s(min(BACKOFF_S_MAX, _BACKOFF_S_MIN * 2 ** min(attempt, _DOUBLINGS_MAX)))
            _log.warning(
                "event not delivered",
                target=self._target.place,
                instant=events[0].instant.id,
                attempt=attempt,
                reason=reason,
                pause_s=round(pause_s, 2),
            )
            await asyncio.sleep(pause_s)

    async def _save(self, expected: str | None, position: str | None) -> None:
        """Save the position of the target if the stored position is `expected`.

        Raises:
            LeaseLost: Another replica has saved a position.
        """
        if position is None or position == expected:
            return
        try:
            await self._store.transact([SaveCursor(consumer=self._target.name, expected=expected, position=position)])
        except CommitConflict:
            self._lease.forget()
            raise LeaseLost from None

    def _report_lag(self, seconds: float) -> None:
        self._observer.set_delivery_lag(self._target.kind, self._target.name, max(0.0, seconds))

    def _draw_jitter_s(self, seconds: float) -> float:
        """Return a time between half of `seconds` and `seconds`, so that replicas and targets do not send at the same
        time.
        """
        (random_byte,) = self._clock.draw_bytes(1)
        return seconds * (0.5 + random_byte / 255 / 2)
