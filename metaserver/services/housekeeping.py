"""Housekeeping: short tasks in the server's own process that limit the size of the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.ownership.claims import create_remaining_claims
from seamark.metaserver.commit.expiration.expiration import Expiration
from seamark.metaserver.history.history import QueryHistory
from seamark.metaserver.index.files.cleaning import Cleaner
from seamark.metaserver.runtime.background import log_safely
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.lease import Lease, LeaseLost
from seamark.metaserver.store.passed_time import Gap, read_passed_time
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import Timeline

_PRUNED_ROWS_PER_BATCH = 1000
_log = structlog.get_logger("seamark.server")


class Housekeeping:
    """Archives instants, deletes expired records, and removes unused files."""

    def __init__(
        self,
        settings: Settings,
        store: PointerStore,
        catalog: Catalog,
        timeline: Timeline,
        cleaner: Cleaner,
        expiration: Expiration,
        history: QueryHistory,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._gaps: tuple[Gap, ...] | None = None
        """The clock gaps that were recorded at the last round, or None before the first round."""
        self._tasks: dict[str, Callable[[], Awaitable[int]]] = {
            "clock_jumps": self._compare_clock,
            "archived": timeline.archive,
            "pruned": self._delete_expired_records,
            "column_reads_pruned": catalog.column_usage.prune,
            "query_history_pruned": history.prune,
            "claims_filled": lambda: create_remaining_claims(catalog.context),
            "purged": catalog.dropped.purge_expired,
            "locations_released": catalog.dropped.release_unused,
            "expirations_resumed": expiration.resume,
            "index_files_cleaned": cleaner.clean,
            "plan_tables_cleaned": catalog.plan_tables.clean,
        }

    async def run(self, holder: str) -> None:
        """Run rounds while this worker or replica holds the lease. The method runs until the task is cancelled."""
        interval_s = self._settings.housekeeping_interval_s
        # The lease is longer than the time between two rounds, so that its holder can renew it in each round.
        lease = Lease(self._store, self._clock, "housekeeping", holder, lasts_s=3 * interval_s)
        while True:
            # Sleep between 75 % and 125 % of the interval. With this jitter, replicas that start together do not
            # always try to take the lease at the same time.
            jitter = self._clock.draw_bytes(1)[0] / 255
            await asyncio.sleep(interval_s * (0.75 + 0.5 * jitter))
            try:
                await lease.hold()
            except LeaseLost:
                continue
            await self.run_round()

    async def run_round(self) -> dict[str, int]:
        """Run all tasks once, and return the count of each task, by name.

        If a task fails, it has no count, and the other tasks still run.
        """
        counts: dict[str, int] = {}
        for name, task in self._tasks.items():
            try:
                counts[name] = await task()
            except SeamarkError as error:
                log_safely(_log.warning, "housekeeping failed", part=name, error=error.message)
            except Exception:  # noqa: BLE001  an error about one table must not stop the tasks for the other tables
                log_safely(_log.exception, "housekeeping failed unexpectedly", part=name)
        if any(counts.values()):
            _log.info("housekeeping", **counts)
        return counts

    async def _compare_clock(self) -> int:
        """Compare the clock with the recorded time, and return the number of new gaps.

        The comparison is part of each round, so that the time between two comparisons is short. The first comparison
        has no new gaps.
        """
        gaps = (await read_passed_time(self._store, self._clock)).gaps
        new_gap_count = len(set(gaps).difference(gaps if self._gaps is None else self._gaps))
        self._gaps = gaps
        if new_gap_count:
            start_ms, end_ms = gaps[-1]
            _log.warning(
                "the clock has jumped, or no server ran: retentions do not count this time",
                seconds=(end_ms - start_ms) // 1000,
            )
        return new_gap_count

    async def _delete_expired_records(self) -> int:
        """Delete expired records in batches, and return their number."""
        passed_time, settings = await read_passed_time(self._store, self._clock), self._settings
        idempotency_ms = settings.idempotency_ttl_s * 1000
        total = 0
        while True:
            removed_rows = await self._store.prune(
                # A record stores when it expires, which is `idempotency_ttl_s` after it was written.
                passed_time.find_time_ago(idempotency_ms) + idempotency_ms,
                audit_before_ms=passed_time.find_time_ago(settings.audit_retention_s * 1000),
                metrics_before_ms=passed_time.find_time_ago(settings.metrics_retention_s * 1000),
                limit=_PRUNED_ROWS_PER_BATCH,
            )
            total += removed_rows
            if removed_rows < _PRUNED_ROWS_PER_BATCH:
                return total
