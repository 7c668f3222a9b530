"""Samples the gauges of a worker from its components."""

from __future__ import annotations

import asyncio

from seamark.cache.memory import measure_named_caches
from seamark.formats.runtime.errors import LogUnavailable
from seamark.metaserver.api.http.components import ServerComponents

SAMPLE_INTERVAL_S = 1.0


def _sample_streams(components: ServerComponents) -> None:
    """Update the metrics of stream tables."""
    tables, now_ms = components.streams.tables.values(), components.clock.now_ms()
    counts = components.streams.counts
    components.metrics.streams.set_totals(
        {
            "appended_rows": counts.rows,
            "appended_bytes": counts.size_bytes,
            "refused_appends": counts.refused,
            "flushes": counts.flushes,
            "flushed_rows": counts.flushed_rows,
            "failed_flushes": counts.failed_flushes,
            "topic_messages": components.streams.topic_counts.messages,
            "topic_rows": components.streams.topic_counts.rows,
            "topic_rejected": components.streams.topic_counts.rejected,
            "topic_lost": components.streams.topic_counts.lost.total(),
        }
    )
    try:
        row_count = sum(table.unflushed_rows for table in tables)
    except LogUnavailable:
        components.metrics.streams.record_log_failure()
        return
    oldest_ms = min((table.oldest_ms for table in tables if table.oldest_ms is not None), default=now_ms)
    fresh_file_count = sum(len(table.list_fresh_files()) for table in tables)
    components.metrics.streams.set_values(
        row_count, components.streams.size_bytes, now_ms - oldest_ms, fresh_file_count
    )


async def sample_gauges(components: ServerComponents) -> None:
    """Periodically update the gauges of the components, and measure the latency of the event loop."""
    metrics, clock = components.metrics, components.clock
    while True:
        start_s = clock.monotonic()
        try:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        finally:
            metrics.flush()  # Flush at the end as well, because another worker reports these metrics.
        metrics.load.set_values(
            clock.monotonic() - start_s - SAMPLE_INTERVAL_S, components.timeline.watchers, components.store.transacting
        )
        metrics.requests.set_values()
        if components.peers is not None:
            replicas, avoided_count = len(components.peers.membership.replicas), components.peers.objects.open_breakers
            metrics.peers.set_values(replicas, avoided_count, components.peers.read_counts())
        planner = components.planner.read_stats()
        metrics.plans.set_values(planner, components.catalog.plan_tables.refused)
        metrics.caches.set_values(
            {"views": planner.live_bytes + planner.added_bytes, **measure_named_caches()},
            components.catalog.documents.cache.read_stats(),
            components.indexes.read_stats().memory,
        )
        _sample_streams(components)
