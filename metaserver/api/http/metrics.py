"""Prometheus metrics of the server, and GET /metrics.

Each application has its own registry, so that two servers in one process (tests) do not share counts. With several
workers a scrape reaches any of them: the supervisor then sets PROMETHEUS_MULTIPROC_DIR (`<home>/metrics`) before it
starts them, values are stored in memory-mapped files, and any worker reports for all. Each gauge declares how the
values of workers are combined: most are sums over live workers, lag is the maximum. The supervisor removes the files of
a worker that has died.

Counts of requests and plans are accumulated in plain numbers, and `flush` adds them to the metrics: at a scrape, and
every second for scrapes of other workers.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping

import prometheus_client as prometheus
from aiohttp import web
from prometheus_client import multiprocess

from seamark.metaserver.api.http.dispatch import Call, Check, Route, add_endpoints
from seamark.metaserver.errors import CommitConflict, CommitUnknown

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The creation time of each series doubles the answer and adds nothing to the start time of the process.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
COMMIT_OPERATIONS = frozenset({"updateTable", "commitTransaction", "replaceView", "commitChange"})
"""Operation ids that move a pointer by compare-and-swap, of the Iceberg REST specification and of Seamark."""


class _PendingTimes:
    """Observations for a histogram since the last flush."""

    def __init__(self, histogram: prometheus.Histogram) -> None:
        self._histogram = histogram
        self._sum = 0.0
        self._counts = [0] * (len(_BUCKETS) + 1)

    def add(self, seconds: float) -> None:
        self._sum += seconds
        self._counts[bisect_left(_BUCKETS, seconds)] += 1

    def flush(self) -> None:
        if not any(self._counts):
            return
        # The library's API takes single observations only. Its exposition adds the buckets up.
        self._histogram._sum.inc(self._sum)
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            bucket.inc(count)
        self._sum = 0.0
        self._counts = [0] * (len(_BUCKETS) + 1)


class ServerMetrics:
    """Counters, gauges and histograms of one worker. The server's sampler sets the values that others know."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        own = self.registry
        self._requests = prometheus.Counter(
            "seamark_requests", "Requests answered.", ("operation", "status"), registry=own
        )
        self._seconds = prometheus.Histogram(
            "seamark_request_seconds", "Time to answer.", ("operation",), buckets=_BUCKETS, registry=own
        )
        self._commits = prometheus.Counter(
            "seamark_commits", "Commits by outcome: committed, conflict, unknown.", ("outcome",), registry=own
        )
        self.commit_groups = prometheus.Counter(
            "seamark_commit_groups", "Metadata files written for the changes that waited for a table.", registry=own
        )
        self.commit_changes = prometheus.Counter(
            "seamark_commit_changes", "Changes committed in them, each its own snapshot.", registry=own
        )
        self._collisions = prometheus.Counter(
            "seamark_commit_collisions",
            "Changes refused for what was committed before them.",
            ("reason",),
            registry=own,
        )
        self.answering = 0
        """All requests in flight, which a drain waits for. The gauge follows it."""
        self.in_flight = self._gauge("seamark_requests_in_flight", "Requests being answered now.")
        self.store_queue = self._gauge("seamark_store_queue_depth", "Transactions that wait for the store's writer.")
        self.cache_bytes = self._gauge("seamark_metadata_cache_bytes", "Bytes of cached metadata and answers.")
        self.cache_hits = self._gauge(
            "seamark_metadata_cache_hits", "Lookups the metadata cache answered, since start."
        )
        self.cache_misses = self._gauge("seamark_metadata_cache_misses", "Lookups it had to load, since start.")
        self.watchers = self._gauge("seamark_timeline_watchers", "Long-polls and event streams held open.")
        self.loop_lag = self._gauge("seamark_event_loop_lag_seconds", "How late the event loop runs.", mode="livemax")
        self.webhook_failures = prometheus.Counter(
            "seamark_webhook_failures", "Deliveries that failed and will be tried again.", registry=own
        )
        self.plans = prometheus.Counter(
            "seamark_plans", "Scans planned, those answered from kept plans included.", registry=own
        )
        self.plan_files_considered = prometheus.Counter(
            "seamark_plan_files_considered", "Live files of the snapshots that scans were planned on.", registry=own
        )
        self.plan_files_kept = prometheus.Counter(
            "seamark_plan_files_kept", "Files that those plans left for the reader to open.", registry=own
        )
        self.plan_seconds = prometheus.Counter(
            "seamark_plan_seconds", "Time spent planning, reading of manifests included.", registry=own
        )
        self.plan_views = self._gauge("seamark_plan_views", "Snapshots whose manifests are in memory.")
        self.plan_blocks = self._gauge("seamark_plan_blocks", "Decoded manifests in memory.")
        self.plan_bytes = self._gauge(
            "seamark_plan_memory_bytes",
            "Bytes of decoded manifests, mapped files, views and plans.",
        )
        self.plan_decoded = self._gauge("seamark_plan_manifests_decoded", "Manifests decoded since start.")
        self.plan_hits = self._gauge("seamark_plan_hits", "Plans that were kept from before, since start.")
        self.index_bytes = self._gauge("seamark_index_memory_bytes", "What opened index files count for.")
        self.index_evictions = self._gauge(
            "seamark_index_evictions", "Opened index files that were let go for others, since start."
        )
        self._plans_refused = prometheus.Counter(
            "seamark_plan_tables_refused",
            "Plan tables that were not made, or renewed, by what there was no room in; statements read whole tables.",
            ("exhausted",),
            registry=own,
        )
        self._jobs = prometheus.Counter(
            "seamark_service_jobs", "Jobs of table services that ended.", ("service", "outcome"), registry=own
        )
        self._job_seconds = prometheus.Counter(
            "seamark_service_job_seconds", "Time that jobs of table services took.", ("service",), registry=own
        )
        self._jobs_queued = self._gauge("seamark_service_queue", "Jobs of table services that wait or run.")
        self._refused_until_now: dict[str, int] = {}
        self._answered: dict[tuple[str, int], int] = {}
        self._took: dict[str, _PendingTimes] = {}
        self._planned = [0, 0, 0, 0.0]
        """Since the last flush: plans, files considered, files kept, seconds."""
        self._commit_children = {
            outcome: self._commits.labels(outcome) for outcome in ("committed", "conflict", "unknown")
        }

    def _gauge(self, name: str, text: str, mode: str = "livesum") -> prometheus.Gauge:
        return prometheus.Gauge(name, text, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def observe(self, operation: str, status: int, seconds: float, error: BaseException | None) -> None:
        """Counts an answered request. `operation` must be from a bounded set: route names, never paths."""
        key = (operation, status)
        self._answered[key] = self._answered.get(key, 0) + 1
        times = self._took.get(operation)
        if times is None:
            times = self._took[operation] = _PendingTimes(self._seconds.labels(operation))
        times.add(seconds)
        if operation in COMMIT_OPERATIONS:
            if isinstance(error, CommitConflict):
                self._commit_children["conflict"].inc()
            elif isinstance(error, CommitUnknown):
                self._commit_children["unknown"].inc()
            elif status < 300:
                self._commit_children["committed"].inc()

    def observe_group(self, changes: int) -> None:
        """Counts a group of changes of one table that were committed in one transaction."""
        self.commit_groups.inc()
        self.commit_changes.inc(changes)

    def observe_conflict(self, reason: str) -> None:
        """Counts a refused change. `reason` must be from a bounded set."""
        self._collisions.labels(reason).inc()

    def job_ended(self, service: str, outcome: str, seconds: float) -> None:
        """Counts a job of a table service."""
        self._jobs.labels(service, outcome).inc()
        self._job_seconds.labels(service).inc(seconds)

    def jobs_queued(self, count: int) -> None:
        """The jobs that wait or run now."""
        self._jobs_queued.set(count)

    def observe_refused_plan(self, since_start: Mapping[str, int]) -> None:
        """How many there were by now, by what was exhausted: names of a bounded set."""
        for exhausted, count in since_start.items():
            self._plans_refused.labels(exhausted).inc(count - self._refused_until_now.get(exhausted, 0))
        self._refused_until_now = dict(since_start)

    def planned(self, considered: int, kept: int, seconds: float) -> None:
        """Counts a finished plan."""
        planned = self._planned
        planned[0] += 1
        planned[1] += considered
        planned[2] += kept
        planned[3] += seconds

    def flush(self) -> None:
        """Adds the counts since the last flush to the metrics."""
        for key, count in self._answered.items():
            self._requests.labels(*key).inc(count)
        self._answered.clear()
        for times in self._took.values():
            times.flush()
        counters = (self.plans, self.plan_files_considered, self.plan_files_kept, self.plan_seconds)
        for counter, amount in zip(counters, self._planned, strict=True):
            counter.inc(amount)
        self._planned = [0, 0, 0, 0.0]

    def render(self) -> bytes:
        """The text exposition format, for all workers."""
        self.flush()
        folder = os.environ.get(MULTIPROCESS_VARIABLE)
        if folder is None:
            return prometheus.generate_latest(self.registry)
        together = prometheus.CollectorRegistry()
        multiprocess.MultiProcessCollector(together, path=folder)  # type: ignore[no-untyped-call]
        return prometheus.generate_latest(together)


METRICS: web.AppKey[ServerMetrics] = web.AppKey("metrics", ServerMetrics)


@Route("GET", "/metrics", "metrics", "Metrics in the text exposition format", check=Check.LOGIN)
async def metrics(call: Call) -> web.Response:
    return web.Response(body=call.app[METRICS].render(), headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})


def add_routes(app: web.Application) -> None:
    add_endpoints(app, metrics)
