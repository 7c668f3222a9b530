"""Open the event targets in the settings, and deliver events to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.runtime.background import run_in_background
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.addresses import parse_subject, parse_topic
from seamark.metaserver.timeline.delivery import SEND_TIMEOUT_S, Deliverer, DeliveryObserver, EventTarget
from seamark.metaserver.timeline.lineage import CatalogName
from seamark.metaserver.timeline.lineage_target import LineageTarget, LoadMetadata
from seamark.metaserver.timeline.statement_lineage import StatementRuns
from seamark.metaserver.timeline.timeline import Timeline
from seamark.metaserver.timeline.webhooks import Webhook

if TYPE_CHECKING:
    from seamark.metaserver.timeline import kafka_target, nats_target
else:
    # Servers without these targets do not need their libraries.
    kafka_target = LazyModule("seamark.metaserver.timeline.kafka_target")
    nats_target = LazyModule("seamark.metaserver.timeline.nats_target")


@asynccontextmanager
async def open_delivery(
    settings: Settings,
    store: PointerStore,
    timeline: Timeline,
    clock: Clock,
    *,
    load_metadata: LoadMetadata,
    holder: str,
    observer: DeliveryObserver,
    warehouse_id: str = "",
) -> AsyncIterator[None]:
    """Deliver events to all targets in the settings while the context is active.

    `load_metadata` reads the metadata of a table. `holder` identifies this worker among all workers of the store.
    `warehouse_id` is the id of a further warehouse, or an empty text for the server's own warehouse.

    Raises:
        ConfigError: A setting of a target is invalid.
    """
    async with AsyncExitStack() as stack:
        for target in await _open_targets(settings, store, clock, load_metadata, stack):
            stack.push_async_callback(target.close)
            deliverer = Deliverer(
                target,
                source=settings.make_warehouse_uri(),
                store=store,
                timeline=timeline,
                clock=clock,
                holder=holder,
                observer=observer,
                warehouse_id=warehouse_id,
            )
            await stack.enter_async_context(run_in_background(f"events to {target.kind}", deliverer.run))
        yield


@asynccontextmanager
async def deliver_statement_events(
    settings: Settings, store: PointerStore, runs: StatementRuns, *, load_metadata: LoadMetadata
) -> AsyncIterator[None]:
    """Send the OpenLineage events of statements while the context is active."""
    timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
        catalog = CatalogName(settings.openlineage_namespace, settings.make_warehouse_uri())
        target = LineageTarget(
            settings.openlineage_url, settings.openlineage_api_key, catalog, store, load_metadata, session
        )
        send = partial(runs.send_all, target, store, load_metadata, catalog)
        async with run_in_background("lineage of statements", send):
            yield


async def _open_targets(
    settings: Settings, store: PointerStore, clock: Clock, load_metadata: LoadMetadata, stack: AsyncExitStack
) -> list[EventTarget]:
    """Open the targets of events in the settings. Webhooks and OpenLineage share an HTTP session, which `stack` closes.

    Cookies are ignored, so that receivers cannot affect each other's requests.
    """
    targets: list[EventTarget] = []
    if settings.event_kafka:
        address = parse_topic(settings.event_kafka, settings.event_kafka_client_properties)
        targets.append(kafka_target.KafkaTarget(address, clock))
    if settings.event_nats:
        targets.append(nats_target.NatsTarget(parse_subject(settings.event_nats)))
    if settings.webhook_urls or settings.openlineage_url:
        timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
        )
        if settings.openlineage_url:
            catalog = CatalogName(settings.openlineage_namespace, settings.make_warehouse_uri())
            url, api_key = settings.openlineage_url, settings.openlineage_api_key
            targets.append(LineageTarget(url, api_key, catalog, store, load_metadata, session))
        urls = dict.fromkeys(settings.webhook_urls)
        targets += [Webhook(url, settings.webhook_secret, clock, session) for url in urls]
    return targets
