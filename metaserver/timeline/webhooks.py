"""Sends every instant as a CloudEvent to each configured URL: at least once, in order per URL, from the first instant.

The timeline is the queue, and the only state of a webhook is its position (a cursor). So a receiver that
was unavailable for a week gets the events of the week. By a lease, a single replica at a time delivers to a URL.
If two overlap, the cursor's compare-and-swap stops the replica that is behind. If the reply or the cursor
was lost, a receiver gets an event again. The receiver can recognise the event by `id`, which is the instant's
position and never reused.

Format: CloudEvents 1.0, structured content mode, JSON (cloudevents/spec, http-protocol-binding 3.2).
Signature, if `webhook_secret` is set: header `Seamark-Signature: t=<unix seconds>,v1=<hex>`, HMAC-SHA256
over `<t>.<body>`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import aiohttp
import msgspec
import structlog

from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.decoding import from_attributes
from seamark.formats.runtime.errors import CommitConflict, SeamarkError
from seamark.metaserver.runtime.background import run_in_background
from seamark.metaserver.settings.settings import Settings, redact_url
from seamark.metaserver.store.lease import Lease, LeaseLost
from seamark.metaserver.store.model import EntryKind, Instant, InstantState
from seamark.metaserver.store.operations import SaveCursor
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.timeline import Timeline

BATCH = 100
"""The number of instants that are read together. At most this many are delivered again after a crash."""
LEASE_S = 30.0
SEND_TIMEOUT_S = 10.0
BACKOFF_S_MAX = 60.0
_log = structlog.get_logger("seamark.webhooks")


def cloud_event(instant: Instant, source: str) -> dict[str, Any]:
    """Return the event for one state of an instant.

    `source` identifies the catalog.
    """
    at_ms = instant.requested_ms if instant.completed_ms is None else instant.completed_ms
    event: dict[str, Any] = {
        "specversion": "1.0",
        "id": instant.position,
        "source": source,
        "type": f"io.seamark.{instant.kind.value}.{instant.action}.{instant.state.value}",
        "time": datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": from_attributes(instant, InstantAnswer),
    }
    subject = "/".join(part for part in (*instant.namespace, instant.name) if part)
    return {**event, "subject": subject} if subject else event


class InstantAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """An instant in the form of answers and events.

    It has no fingerprint, which is internal.
    """

    id: Annotated[str, msgspec.Meta(extra_json_schema={"format": "uuid"})]
    position: Annotated[str, msgspec.Meta(description="Opaque; pass it as `since` to continue from here.")]
    action: Annotated[str, msgspec.Meta(examples=["create", "commit", "drop", "undrop", "purge", "rename"])]
    state: InstantState
    kind: EntryKind
    namespace: list[str]
    name: str
    uuid: str
    requested_ms: int
    completed_ms: int | None
    who: str
    snapshot_id: int | None
    metadata_location: str | None
    summary: dict[str, Any]


def signature(secret: str, at_s: int, body: bytes) -> str:
    """Return the value of the header Seamark-Signature.

    A receiver computes v1 again, and refuses an old `t`, because it may be a replay.
    """
    digest = hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"


class Deliverer:
    """Delivers to one URL.

    `on_failure` is called once for each failed delivery.
    """

    def __init__(
        self,
        url: str,
        *,
        settings: Settings,
        store: PointerStore,
        timeline: Timeline,
        clock: Clock,
        session: aiohttp.ClientSession,
        holder: str,
        on_failure: Callable[[], None],
    ) -> None:
        self._url = url
        self._settings = settings
        self._store = store
        self._timeline = timeline
        self._clock = clock
        self._session = session
        self._on_failure = on_failure
        # The URL may contain a secret, so it must not be in the database.
        self._name = "webhook:" + hashlib.sha256(url.encode()).hexdigest()[:32]
        self._lease = Lease(store, clock, self._name, holder, lasts_s=LEASE_S)
        self._source = settings.warehouse_uri()

    async def run(self) -> None:
        """Take the lease and deliver while this replica has it, until the task is cancelled.

        While another replica has the lease, this replica waits.
        """
        while True:
            try:
                await self._lease.hold()
                await self._deliver_from(await self._store.cursor(self._name))
            except LeaseLost:
                await asyncio.sleep(self._jitter_s(LEASE_S / 3))
            except SeamarkError as error:
                _log.warning("webhook waits for the store", url=redact_url(self._url), error=error.message)
                await asyncio.sleep(self._jitter_s(5.0))

    async def _deliver_from(self, position: str | None) -> None:
        while True:
            batch = await self._timeline.read(InstantFilter(since=position), BATCH)
            if not batch:
                await self._lease.hold()
                await self._wait_for_news(position)
                continue
            saved = position
            try:
                for instant in batch:
                    await self._deliver(instant)
                    position = instant.position
            except BaseException:
                # After an interruption, events that were received need not be sent again if the position can still be
                # saved.
                with suppress(SeamarkError, LeaseLost):
                    await self._save(saved, position)
                raise
            await self._save(saved, position)

    async def _wait_for_news(self, position: str | None) -> None:
        """Wait for new instants, but at most a third of the lease, so that the lease is renewed in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S / 3):
                async with self._timeline.watch_instants(InstantFilter(since=position), counted=False) as watcher:
                    while not await self._timeline.read_next(watcher, 1):
                        pass

    async def _deliver(self, instant: Instant) -> None:
        """Deliver an instant, and repeat until the receiver answers 2xx.

        Raises:
            LeaseLost: This replica can no longer be sure to hold the lease.
        """
        body = encode_json(cloud_event(instant, self._source))
        attempt = 0
        while True:
            await self._lease.hold()
            failure = await self._send(body)
            if failure is None:
                return
            attempt += 1
            self._on_failure()
            pause_s = self._jitter_s(min(BACKOFF_S_MAX, 0.25 * 2 ** min(attempt, 16)))
            _log.warning(
                "webhook not delivered",
                url=redact_url(self._url),
                instant=instant.id,
                attempt=attempt,
                reason=failure,
                pause_s=round(pause_s, 2),
            )
            await asyncio.sleep(pause_s)

    async def _send(self, body: bytes) -> str | None:
        """Send a body. Return None after success, otherwise the reason of the failure."""
        headers = {"Content-Type": "application/cloudevents+json; charset=utf-8", "User-Agent": "seamark"}
        if self._settings.webhook_secret:
            at_s = self._clock.now_ms() // 1000
            headers["Seamark-Signature"] = signature(self._settings.webhook_secret, at_s, body)
        try:
            # Redirects are not followed: they would send a signed body to a host that is not configured.
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                return None if 200 <= answer.status < 300 else f"status {answer.status}"
        except TimeoutError:
            return f"no answer within {SEND_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return type(error).__name__

    async def _save(self, expected: str | None, position: str | None) -> None:
        if position is None or position == expected:
            return
        try:
            await self._store.transact([SaveCursor(consumer=self._name, expected=expected, position=position)])
        except CommitConflict:
            self._lease.forget()
            raise LeaseLost from None

    def _jitter_s(self, seconds: float) -> float:
        """Return a time between half of `seconds` and `seconds`, so that replicas and URLs do not send together."""
        return seconds * (0.5 + self._clock.random_bytes(1)[0] / 510)


@asynccontextmanager
async def open_webhooks(
    settings: Settings,
    store: PointerStore,
    timeline: Timeline,
    clock: Clock,
    *,
    holder: str,
    on_failure: Callable[[], None],
) -> AsyncIterator[None]:
    """Deliver to all `webhook_urls` while the context is active.

    `holder` identifies this worker among all workers on the store.
    """
    if not settings.webhook_urls:
        yield
        return
    timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
        deliverers = [
            Deliverer(
                url,
                settings=settings,
                store=store,
                timeline=timeline,
                clock=clock,
                session=session,
                holder=holder,
                on_failure=on_failure,
            )
            for url in dict.fromkeys(settings.webhook_urls)
        ]
        async with AsyncExitStack() as stack:
            for deliverer in deliverers:
                await stack.enter_async_context(run_in_background("webhook", deliverer.run))
            yield
