"""Prometheus metrics of the server.

Each application has its own registry, so that two servers in one process (in tests) do not share counts. With several
workers, a scrape reaches only one of them. So the supervisor sets PROMETHEUS_MULTIPROC_DIR (`<home>/metrics`) before it
starts the workers. Then values are stored in memory-mapped files, and each worker reports the values of all workers.
The supervisor removes the files of a worker that has ended.

Counts of requests and plans are accumulated in plain numbers. `flush` adds them to the metrics at each scrape. It also
runs every second, for scrapes that reach other workers.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Literal

import prometheus_client as prometheus
from prometheus_client import multiprocess

from seamark.cache.memory import CacheStats
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown
from seamark.metaserver.planner.plan.planner import PlannerStats

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The upper limits of the buckets of histograms, in seconds."""
COMMIT_OPERATIONS = frozenset({"updateTable", "commitTransaction", "replaceView", "commitChange"})
"""The ids of the operations of Iceberg REST and of Seamark that move a pointer by compare-and-swap."""


class MetricFactory:
    """Creates metrics in one registry."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()

    def create_counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(name, text, labels, registry=self.registry)

    def create_gauge(
        self, name: str, text: str, *labels: str, mode: Literal["livesum", "livemax"] = "livesum"
    ) -> prometheus.Gauge:
        return prometheus.Gauge(name, text, labels, registry=self.registry, multiprocess_mode=mode)

    def create_histogram(self, name: str, text: str, *labels: str) -> prometheus.Histogram:
        return prometheus.Histogram(name, text, labels, buckets=_BUCKETS, registry=self.registry)


class _PendingTimes:
    """The observations for a histogram since the last flush."""

    def __init__(self, histogram: prometheus.Histogram) -> None:
        self._histogram = histogram
        self.sum = 0.0
        self.counts = [0] * (len(_BUCKETS) + 1)

    def flush(self) -> None:
        """Add the pending times to the histogram."""
        if not any(self.counts):
            return
        # The library's API takes only single observations. The library adds up the buckets when it renders the metrics.
        self._histogram._sum.inc(self.sum)
        for bucket, count in zip(self._histogram._buckets, self.counts, strict=True):
            bucket.inc(count)
        self.sum = 0.0
        self.counts = [0] * (len(_BUCKETS) + 1)


class _Totals:
    """A counter whose value is the total that another component counts since its start, by label.

    `update` adds the difference from the last total.
    """

    def __init__(self, counter: prometheus.Counter) -> None:
        self._counter = counter
        self._last_totals: dict[str, int] = {}

    def update(self, since_start: Mapping[str, int]) -> None:
        for label, count in since_start.items():
            self._counter.labels(label).inc(count - self._last_totals.get(label, 0))
        self._last_totals = dict(since_start)


class RequestMetrics:
    """The metrics of requests, accumulated in plain numbers until `flush`."""

    def __init__(self, factory: MetricFactory) -> None:
        self._requests = factory.create_counter("seamark_requests", "Requests answered.", "operation", "status")
        self._seconds = factory.create_histogram("seamark_request_seconds", "Time to answer.", "operation")
        self._in_flight = factory.create_gauge("seamark_requests_in_flight", "Requests being answered now.")
        self.answering = 0
        """All requests in flight, which a drain waits for."""
        self._answer_counts: dict[tuple[str, int], int] = {}
        self._times_by_operation: dict[str, _PendingTimes] = {}

    def observe(self, operation: str, status: int, seconds: float) -> None:
        """Count an answered request and its duration."""
        key = (operation, status)
        self._answer_counts[key] = self._answer_counts.get(key, 0) + 1
        times = self._times_by_operation.get(operation)
        if times is None:
            times = self._times_by_operation[operation] = _PendingTimes(self._seconds.labels(operation))
        times.sum += seconds
        times.counts[bisect_left(_BUCKETS, seconds)] += 1

    def flush(self) -> None:
        """Add the pending counts to the metrics."""
        for key, count in self._answer_counts.items():
            self._requests.labels(*key).inc(count)
        self._answer_counts.clear()
        for times in self._times_by_operation.values():
            times.flush()

    def set_values(self) -> None:
        self._in_flight.set(self.answering)


class CommitMetrics:
    """The metrics of commits: their outcomes, and the groups of changes that were committed together."""

    def __init__(self, factory: MetricFactory) -> None:
        commits = factory.create_counter(
            "seamark_commits", "Commits by outcome: committed, conflict, unknown.", "outcome"
        )
        self._commits_by_outcome = {
            outcome: commits.labels(outcome) for outcome in ("committed", "conflict", "unknown")
        }
        self._groups = factory.create_counter(
            "seamark_commit_groups", "Metadata files written for the changes that waited for a table."
        )
        self._changes = factory.create_counter(
            "seamark_commit_changes", "Committed changes. Each change has its own snapshot."
        )
        self._conflicts_by_reason = factory.create_counter(
            "seamark_commit_collisions", "Changes refused because of conflicts with earlier commits.", "reason"
        )

    def observe(self, status: int, error: BaseException | None) -> None:
        """Count an answered commit.

        A commit that failed for another reason than a conflict is counted only if its outcome is unknown.
        """
        if isinstance(error, CommitConflict):
            self._commits_by_outcome["conflict"].inc()
        elif isinstance(error, CommitUnknown):
            self._commits_by_outcome["unknown"].inc()
        elif status < 300:
            self._commits_by_outcome["committed"].inc()

    def observe_group(self, changes: int) -> None:
        """Count a group of changes of one table that were committed in one transaction."""
        self._groups.inc()
        self._changes.inc(changes)

    def observe_conflict(self, reason: str) -> None:
        """Count a change that was refused because of a conflict with an earlier commit."""
        self._conflicts_by_reason.labels(reason).inc()


class PlanMetrics:
    """The metrics of finished plans, accumulated in plain numbers until `flush`, and of the planner's memory."""

    def __init__(self, factory: MetricFactory) -> None:
        self._counters = (
            factory.create_counter("seamark_plans", "Planned scans, including scans with cached plans."),
            factory.create_counter(
                "seamark_plan_files_considered", "Live files of the snapshots for which scans were planned."
            ),
            factory.create_counter("seamark_plan_files_kept", "Files that the plans keep for readers to open."),
            factory.create_counter("seamark_plan_seconds", "Time of planning, including the time to read manifests."),
        )
        self._since_flush = [0, 0, 0, 0.0]
        """The amounts that the next flush adds to `_counters`, in the same order."""
        self._views = factory.create_gauge("seamark_plan_views", "Snapshots whose manifests are in memory.")
        self._blocks = factory.create_gauge("seamark_plan_blocks", "Decoded manifests in memory.")
        self._bytes = factory.create_gauge(
            "seamark_plan_memory_bytes", "Bytes of decoded manifests, mapped files, views and plans."
        )
        self._decoded_manifests = factory.create_gauge(
            "seamark_plan_manifests_decoded", "Manifests decoded since start."
        )
        self._hits = factory.create_gauge("seamark_plan_hits", "Plans that were returned from the cache, since start.")
        self._prepared_views = factory.create_gauge(
            "seamark_plan_views_prepared", "Snapshots whose manifests were decoded before a plan, since start."
        )
        refusal_counter = factory.create_counter(
            "seamark_plan_tables_refused",
            "Plan tables that were refused, by the exhausted resource. Their statements read whole tables.",
            "exhausted",
        )
        self._refusal_totals = _Totals(refusal_counter)

    def observe(self, considered_files: int, kept_files: int, seconds: float) -> None:
        """Count a finished plan."""
        for position, amount in enumerate((1, considered_files, kept_files, seconds)):
            self._since_flush[position] += amount

    def flush(self) -> None:
        for counter, amount in zip(self._counters, self._since_flush, strict=True):
            counter.inc(amount)
        self._since_flush = [0, 0, 0, 0.0]

    def set_values(self, planner: PlannerStats, refused_tables: Mapping[str, int]) -> None:
        """Set the gauges and counters to the current values of the planner.

        `refused_tables` contains the numbers of refused plan tables since the start, by the exhausted resource.
        """
        self._refusal_totals.update(refused_tables)
        self._views.set(planner.views)
        self._blocks.set(planner.blocks)
        self._bytes.set(planner.live_bytes + planner.added_bytes + planner.lists_bytes)
        self._decoded_manifests.set(planner.decoded)
        self._hits.set(planner.plan_hits)
        self._prepared_views.set(planner.prepared)


class CacheMetrics:
    """The memory of all caches, and the hits and misses of the caches of metadata and of index files."""

    def __init__(self, factory: MetricFactory) -> None:
        self._memory = factory.create_gauge("seamark_cache_memory_bytes", "Memory of each cache.", "cache")
        self._bytes = factory.create_gauge("seamark_metadata_cache_bytes", "Bytes of cached metadata and answers.")
        self._hits = factory.create_gauge(
            "seamark_metadata_cache_hits", "Lookups that the metadata cache answered, since start."
        )
        self._misses = factory.create_gauge(
            "seamark_metadata_cache_misses", "Lookups that the metadata cache did not answer, since start."
        )
        self._index_bytes = factory.create_gauge(
            "seamark_index_memory_bytes", "Bytes that open index files count for in the memory limit."
        )
        self._index_evictions = factory.create_gauge(
            "seamark_index_evictions", "Open index files that were evicted from memory, since start."
        )
        self._names: set[str] = set()

    def set_values(self, used_bytes: Mapping[str, int], metadata: CacheStats, indexes: CacheStats) -> None:
        """Set the metrics to the current values.

        `used_bytes` has the bytes of each cache. If a cache of an earlier call is missing in it, its value becomes 0.
        """
        for cache in self._names - used_bytes.keys():
            self._memory.labels(cache).set(0)
        for cache, size_bytes in used_bytes.items():
            self._memory.labels(cache).set(size_bytes)
        self._names |= used_bytes.keys()
        self._bytes.set(metadata.used_bytes)
        self._hits.set(metadata.hits)
        self._misses.set(metadata.misses)
        self._index_bytes.set(indexes.used_bytes)
        self._index_evictions.set(indexes.evictions)


class PeerMetrics:
    """The replicas, and the files that they read for each other."""

    def __init__(self, factory: MetricFactory) -> None:
        reads = factory.create_counter(
            "seamark_peer_reads",
            "Reads of immutable files, by the source of the content, and failures of replicas.",
            "source",
        )
        self._reads = _Totals(reads)
        self._replicas = factory.create_gauge("seamark_peer_replicas", "Replicas with live leases.", mode="livemax")
        self._avoided_peers = factory.create_gauge(
            "seamark_peers_avoided", "Replicas that are skipped because they failed.", mode="livemax"
        )

    def set_values(self, replicas: int, avoided_count: int, reads: Mapping[str, int]) -> None:
        """Set the metrics to the current values. `reads` has the reads since the start, by source."""
        self._replicas.set(replicas)
        self._avoided_peers.set(avoided_count)
        self._reads.update(reads)


class JobMetrics:
    """The jobs of table services that ended, wait or run."""

    def __init__(self, factory: MetricFactory) -> None:
        self._jobs = factory.create_counter(
            "seamark_service_jobs", "Jobs of table services that ended.", "service", "outcome"
        )
        self._seconds = factory.create_counter(
            "seamark_service_job_seconds", "Time that jobs of table services took.", "service"
        )
        self._bytes = factory.create_counter(
            "seamark_service_bytes",
            "Bytes of data files that jobs of table services replaced or wrote, or read before a commit conflict.",
            "service",
            "kind",
        )
        self._lag = factory.create_gauge(
            "seamark_service_lag_seconds",
            "Seconds for which the oldest job of a table service has been due.",
            "service",
        )
        self._failing = factory.create_gauge(
            "seamark_service_failing_tables", "Tables whose last job of a table service failed.", "service"
        )
        self._is_leader = factory.create_gauge(
            "seamark_services_leading", "Whether this server runs the table services."
        )
        self._blocked_gauge = factory.create_gauge(
            "seamark_services_blocked",
            "Whether this server cannot run table services: its worker processes do not reach it or the storage.",
            mode="livemax",
        )
        self._queued_jobs = factory.create_gauge("seamark_service_queue", "Jobs of table services that wait or run.")
        self._running_jobs = factory.create_gauge(
            "seamark_service_running_jobs", "Jobs of a table service that run.", "service"
        )
        self._running_bytes = factory.create_gauge(
            "seamark_service_running_bytes",
            "Bytes of data files that the running jobs have read, and that they will read in total.",
            "service",
            "kind",
        )

    def count_ended_job(self, service: str, outcome: str, seconds: float, totals: Mapping[str, Any]) -> None:
        """Count a job, and the bytes of a rewrite.

        `totals` are the numbers that the job reports. Only rewrites report bytes.
        """
        for kind, name in (("replaced", "bytes_before"), ("written", "bytes_after"), ("wasted", "bytes_wasted")):
            if isinstance(size_bytes := totals.get(name), int):
                self._bytes.labels(service, kind).inc(size_bytes)
        self._jobs.labels(service, outcome).inc()
        self._seconds.labels(service).inc(seconds)

    def set_queued_jobs(self, count: int) -> None:
        """Set the number of jobs that wait or run now."""
        self._queued_jobs.set(count)

    def set_job_lag(self, service: str, lag_s: float, failing_tables: int) -> None:
        """Set for how many seconds the oldest job has been due, and the number of tables whose last job failed."""
        self._lag.labels(service).set(lag_s)
        self._failing.labels(service).set(failing_tables)

    def set_services_state(self, *, leading: bool, blocked: bool) -> None:
        """Set whether this server runs table services, and whether its jobs cannot reach the server or the storage."""
        self._is_leader.set(leading)
        self._blocked_gauge.set(blocked)

    def set_running_jobs(self, service: str, count: int, bytes_done: int, bytes_total: int) -> None:
        """Set the number of running jobs of a service, and the bytes that they have read and will read in total."""
        self._running_jobs.labels(service).set(count)
        self._running_bytes.labels(service, "done").set(bytes_done)
        self._running_bytes.labels(service, "total").set(bytes_total)


class GatewayCacheMetrics:
    """The cache of the objects gateway.

    Several workers share its disk.
    """

    def __init__(self, factory: MetricFactory) -> None:
        self._memory = factory.create_gauge(
            "seamark_gateway_cache_bytes", "Bytes that the gateway's cache uses in memory.", "tier"
        )
        self._disk = factory.create_gauge(
            "seamark_gateway_cache_disk_bytes", "Bytes that the gateway's cache uses on disk.", "tier", mode="livemax"
        )
        self._served_bytes = factory.create_gauge(
            "seamark_gateway_cache_served_bytes", "Bytes of reads by their source, since start.", "source"
        )
        self._events = factory.create_gauge(
            "seamark_gateway_cache_events", "Events in the gateway's cache, since start.", "event"
        )
        self._values: dict[str, tuple[Mapping[str, int], ...]] = {}
        """The last values of the cache of each warehouse."""

    def set_values(
        self,
        *,
        warehouse: str = "",
        memory: Mapping[str, int],
        disk: Mapping[str, int],
        served_bytes: Mapping[str, int],
        events: Mapping[str, int],
    ) -> None:
        """Set the current values of one warehouse: bytes by tier, bytes by source, and counts by event.

        The gauges show the sums of all warehouses.
        """
        self._values[warehouse] = memory, disk, served_bytes, events
        self._set_sums(self._values[warehouse])

    def forget(self, warehouse: str) -> None:
        """Remove the values of a closed warehouse from the sums."""
        if (last_values := self._values.pop(warehouse, None)) is not None:
            self._set_sums(last_values)

    def _set_sums(self, samples: tuple[Mapping[str, int], ...]) -> None:
        """Set each gauge to the sums over all warehouses, for the names in `samples`.

        `samples` has values by name for each gauge: memory, disk, served bytes and events.
        """
        for position, gauge in enumerate((self._memory, self._disk, self._served_bytes, self._events)):
            for name in samples[position]:
                gauge.labels(name).set(sum(values[position].get(name, 0) for values in self._values.values()))


class StreamMetrics:
    """The rows of stream tables that wait for a flush on this server."""

    def __init__(self, factory: MetricFactory) -> None:
        self._rows = factory.create_gauge("seamark_stream_waiting_rows", "Rows of stream tables that wait for a flush.")
        self._bytes = factory.create_gauge("seamark_stream_waiting_bytes", "Memory of rows that wait for a flush.")
        self._age = factory.create_gauge(
            "seamark_stream_oldest_seconds",
            "Seconds for which the oldest row in memory has waited for a flush.",
            mode="livemax",
        )
        self._fresh_files = factory.create_gauge(
            "seamark_stream_fresh_files", "Files with rows that wait for a flush, which the next plans may list."
        )
        self._log_failed = factory.create_gauge(
            "seamark_stream_log_failed", "Whether the log refuses all rows.", mode="livemax"
        )
        self._totals = {
            name: factory.create_counter(f"seamark_stream_{name}", text)
            for name, text in (
                ("appended_rows", "Rows that were appended to stream tables."),
                ("appended_bytes", "Bytes in the log of the rows that were appended to stream tables."),
                ("refused_appends", "Appends that were refused for now, because of memory, a pause, or the log."),
                ("flushes", "Flushes that added rows to tables."),
                ("flushed_rows", "Rows that flushes added to tables."),
                ("failed_flushes", "Flushes that failed, and that are tried again."),
                ("topic_messages", "Messages of input topics that were read."),
                ("topic_rows", "Rows of the messages of input topics that were appended."),
                ("topic_rejected", "Rows and messages of input topics that are not valid for their table."),
                ("topic_lost", "Messages that were not appended because Kafka has used their offsets before."),
            )
        }
        self._counted_totals = dict.fromkeys(self._totals, 0)

    def set_values(self, rows: int, size_bytes: int, age_ms: int, fresh_files: int) -> None:
        """Set the current values while the log of stream rows works.

        Args:
            rows: The rows that are not in files of the table yet.
            size_bytes: The bytes of these rows.
            age_ms: The age of the oldest of these rows.
            fresh_files: The number of files that serve these rows to readers.
        """
        self._rows.set(rows)
        self._bytes.set(size_bytes)
        self._age.set(max(0, age_ms) / 1000)
        self._fresh_files.set(fresh_files)
        self._log_failed.set(0)

    def set_totals(self, totals: Mapping[str, int]) -> None:
        """Increase the counters to these totals since the start of the server, by the name of the counter."""
        for name, total in totals.items():
            self._totals[name].inc(total - self._counted_totals[name])
            self._counted_totals[name] = total

    def record_log_failure(self) -> None:
        """Record that the log refuses all rows. The other values do not change."""
        self._log_failed.set(1)


class LoadMetrics:
    """The waiting work of the worker: the delay of its event loop, waiting transactions, and watchers."""

    def __init__(self, factory: MetricFactory) -> None:
        self._queue = factory.create_gauge(
            "seamark_store_queue_depth", "Transactions that wait for the store's writer."
        )
        self._watchers = factory.create_gauge(
            "seamark_timeline_watchers", "Long-polls and event streams that are open."
        )
        self._lag = factory.create_gauge(
            "seamark_event_loop_lag_seconds", "Delay with which the event loop runs tasks.", mode="livemax"
        )

    def set_values(self, lag_s: float, watchers: int, transacting: int) -> None:
        self._lag.set(max(0.0, lag_s))
        self._watchers.set(watchers)
        self._queue.set(transacting)


class EventMetrics:
    """The delivery of events to webhooks, Kafka and NATS. The class implements `DeliveryObserver`."""

    def __init__(self, factory: MetricFactory) -> None:
        self._webhook_failures = factory.create_counter(
            "seamark_webhook_failures", "Deliveries to webhooks that failed and will be tried again."
        )
        self._failures = factory.create_counter(
            "seamark_event_failures", "Deliveries of events that failed and will be tried again.", "target"
        )
        self._lag = factory.create_gauge(
            "seamark_event_lag_seconds",
            "Age of the oldest event that a target has not received.",
            "target",
            mode="livemax",
        )
        self._lags: dict[str, dict[str, float]] = {}

    def count_failed_delivery(self, kind: str) -> None:
        self._failures.labels(kind).inc()
        if kind == "webhook":
            self._webhook_failures.inc()

    def set_delivery_lag(self, kind: str, name: str, seconds: float) -> None:
        lags = self._lags.setdefault(kind, {})
        lags[name] = seconds
        self._lag.labels(kind).set(max(lags.values()))


MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# The creation time of each series would double the size of the answer. It is about the same as the start time of the
# process, which the answer has.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]


class WarehouseMetrics:
    """The requests, jobs and events of each further warehouse.

    The other metrics of requests and ended jobs count all warehouses together. Gauges of the same kind show only the
    server's own warehouse.
    """

    def __init__(self, factory: MetricFactory) -> None:
        """Create the metrics. Further warehouses are those that admins create, besides the server's own warehouse."""
        self.requests = factory.create_counter(
            "seamark_warehouse_requests", "Requests for further warehouses that were answered.", "warehouse", "status"
        )
        self.jobs = factory.create_counter(
            "seamark_warehouse_jobs",
            "Jobs of table services in further warehouses that ended.",
            "warehouse",
            "service",
            "outcome",
        )
        self.queue = factory.create_gauge(
            "seamark_warehouse_job_queue", "Jobs of table services that wait or run in further warehouses.", "warehouse"
        )
        self.blocked = factory.create_gauge(
            "seamark_warehouse_services_blocked",
            "Whether this server cannot run table services of a further warehouse.",
            "warehouse",
            mode="livemax",
        )
        self.event_lag = factory.create_gauge(
            "seamark_warehouse_event_lag_seconds",
            "Age of the oldest event of a further warehouse that a target has not received.",
            "warehouse",
            "target",
            mode="livemax",
        )

        self._labels: dict[str, set[tuple[prometheus.Gauge, tuple[str, ...]]]] = {}
        """The labels of the samples in gauges, by the warehouse."""

    def set_gauge(self, gauge: prometheus.Gauge, value: float, warehouse: str, *labels: str) -> None:
        """Set a gauge of this object. `labels` are the values of the labels after the warehouse."""
        self._labels.setdefault(warehouse, set()).add((gauge, (warehouse, *labels)))
        gauge.labels(warehouse, *labels).set(value)

    def forget(self, warehouse: str) -> None:
        """Remove the samples of a warehouse from all gauges.

        The library cannot remove samples that workers share, so these become 0.
        """
        for gauge, labels in self._labels.pop(warehouse, ()):
            gauge.labels(*labels).set(0)
            if MULTIPROCESS_VARIABLE not in os.environ:
                gauge.remove(*labels)

    def count_request(self, warehouse: str, status: int) -> None:
        """Count an answered request for a further warehouse, which must exist."""
        self.requests.labels(warehouse, status).inc()


def select_warehouse(metrics: bytes, name: str) -> bytes:
    """Return metrics in the text format, without the samples `seamark_warehouse_…` of warehouses except `name`."""
    label = f'warehouse="{name}"'.encode()
    lines = metrics.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"seamark_warehouse_") or label in line)


class WarehouseJobs:
    """Receives the metrics of jobs of a further warehouse. The class implements `JobObserver`."""

    def __init__(self, jobs: JobMetrics, warehouses: WarehouseMetrics, name: str) -> None:
        self._jobs = jobs
        self._warehouses = warehouses
        self._name = name

    def count_ended_job(self, service: str, outcome: str, seconds: float, totals: Mapping[str, Any]) -> None:
        self._jobs.count_ended_job(service, outcome, seconds, totals)
        self._warehouses.jobs.labels(self._name, service, outcome).inc()

    def set_queued_jobs(self, count: int) -> None:
        self._warehouses.set_gauge(self._warehouses.queue, count, self._name)

    def set_job_lag(self, service: str, lag_s: float, failing: int) -> None:
        """Do nothing. The gauges of each service show the server's own warehouse."""

    def set_services_state(self, *, leading: bool, blocked: bool) -> None:
        self._warehouses.set_gauge(self._warehouses.blocked, blocked, self._name)

    def set_running_jobs(self, service: str, count: int, bytes_done: int, bytes_total: int) -> None:
        """Do nothing. The gauges of each service show the server's own warehouse."""


class WarehouseEvents:
    """Receives the metrics of events of a further warehouse. The class implements `DeliveryObserver`."""

    def __init__(self, events: EventMetrics, warehouses: WarehouseMetrics, name: str) -> None:
        self._events = events
        self._warehouses = warehouses
        self._name = name
        self._lags: dict[tuple[str, str], float] = {}

    def count_failed_delivery(self, kind: str) -> None:
        self._events.count_failed_delivery(kind)

    def set_delivery_lag(self, kind: str, name: str, seconds: float) -> None:
        self._lags[kind, name] = seconds
        lag_s = max(lag_s for (lag_kind, _), lag_s in self._lags.items() if lag_kind == kind)
        self._warehouses.set_gauge(self._warehouses.event_lag, lag_s, self._name, kind)


class ServerMetrics:
    """The metrics of one worker.

    The server's sampler sets the values that come from other components.
    """

    def __init__(self) -> None:
        factory = MetricFactory()
        self.registry = factory.registry
        self.requests = RequestMetrics(factory)
        self.commits = CommitMetrics(factory)
        self.plans = PlanMetrics(factory)
        self.caches = CacheMetrics(factory)
        self.peers = PeerMetrics(factory)
        self.jobs = JobMetrics(factory)
        self.gateway_cache = GatewayCacheMetrics(factory)
        self.streams = StreamMetrics(factory)
        self.load = LoadMetrics(factory)
        self.events = EventMetrics(factory)
        self.warehouses = WarehouseMetrics(factory)

    def observe(self, operation: str, status: int, seconds: float, error: BaseException | None) -> None:
        """Count an answered request.

        `operation` must be from a bounded set: route names, never paths.
        """
        self.requests.observe(operation, status, seconds)
        if operation in COMMIT_OPERATIONS:
            self.commits.observe(status, error)

    def observe_jobs(self, warehouse: str) -> JobMetrics | WarehouseJobs:
        """Return the object that records the job metrics of a warehouse.

        An empty name is the server's own warehouse.
        """
        return WarehouseJobs(self.jobs, self.warehouses, warehouse) if warehouse else self.jobs

    def observe_events(self, warehouse: str) -> EventMetrics | WarehouseEvents:
        """Return the object that records the event metrics of a warehouse.

        An empty name is the server's own warehouse.
        """
        return WarehouseEvents(self.events, self.warehouses, warehouse) if warehouse else self.events

    def forget_warehouse(self, warehouse: str) -> None:
        """Remove the current values of a further warehouse, which is closed."""
        self.warehouses.forget(warehouse)
        self.gateway_cache.forget(warehouse)

    def flush(self) -> None:
        """Add the counts since the last flush to the metrics."""
        self.requests.flush()
        self.plans.flush()

    def render(self) -> bytes:
        """Return the metrics of all workers in the text exposition format."""
        self.flush()
        folder = os.environ.get(MULTIPROCESS_VARIABLE)
        if folder is None:
            return prometheus.generate_latest(self.registry)
        registry = prometheus.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
        return prometheus.generate_latest(registry)
