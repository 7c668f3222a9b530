"""Opens the table services of one worker of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import structlog

from seamark.metaserver.access.service_tokens import ServiceTokens
from seamark.metaserver.clock import Clock
from seamark.metaserver.objects.locations import parse_location
from seamark.metaserver.services.clustering import TableClustering
from seamark.metaserver.services.compaction import Compaction
from seamark.metaserver.services.expiration import SnapshotExpiration
from seamark.metaserver.services.indexing import Indexing
from seamark.metaserver.services.orphan_files import OrphanFileRemoval
from seamark.metaserver.services.runs import RunLog
from seamark.metaserver.services.scheduler import JobObserver, Scheduler
from seamark.metaserver.services.watch import Load, TableWatch
from seamark.metaserver.services.worker_process import JOB_S_MAX, WorkerProcess
from seamark.metaserver.settings import Settings
from seamark.metaserver.store.lease import Lease
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import Timeline

LEASE_S = 15.0
_log = structlog.get_logger("seamark.services")


@asynccontextmanager
async def open_scheduler(
    settings: Settings,
    store: PointerStore,
    timeline: Timeline,
    load: Load,
    tokens: ServiceTokens,
    clock: Clock,
    *,
    holder: str,
    url: str,
    observer: JobObserver,
) -> AsyncIterator[Scheduler | None]:
    """The scheduler, which its user runs; None when the settings permit no jobs. `url`: that of this server."""
    if settings.services_workers == 0:
        yield None
        return
    if url.startswith("https://") and not settings.services_url:
        # The certificate names the public host, and a worker must verify it like any client.
        _log.warning("table services are off: with TLS they need services_url, a URL that the certificate covers")
        yield None
        return
    issue: Callable[[NamespacePath], str] | None = None
    if settings.auth != "none":
        issue = partial(tokens.issue, ttl_s=JOB_S_MAX)
    launchers = [
        WorkerProcess(
            settings.services_url or url,
            issue,
            memory_bytes=settings.services_memory_bytes,
            umask=int(settings.warehouse_umask or "022", 8),
            folders=_local_folders(settings),
            on_s3=any(
                parse_location(location).scheme == "s3"
                for location in (settings.warehouse_uri(), *settings.allowed_locations)
            ),
            environment={"SEAMARK_LOG_LEVEL": settings.log_level, "SEAMARK_LOG_FORMAT": settings.log_format},
        )
        for _ in range(settings.services_workers)
    ]
    watch = TableWatch(store, timeline, load, clock)
    lease = Lease(store, clock, "services", holder, lasts_s=LEASE_S)
    yield Scheduler(
        [
            Indexing(),
            TableClustering(default=settings.services_clustering),
            Compaction(default=settings.services_compaction, clusters=settings.services_clustering),
            SnapshotExpiration(clock, default=settings.services_expiration),
            OrphanFileRemoval(default=settings.services_orphan_files),
        ],
        launchers,
        watch,
        timeline,
        RunLog(store, timeline, clock),
        lease,
        clock,
        observer,
    )


def _local_folders(settings: Settings) -> tuple[str, ...]:
    """The local folders in which tables may be."""
    locations = (settings.warehouse_uri(), *settings.allowed_locations)
    return tuple(location.removeprefix("file://") for location in locations if location.startswith("file://"))
