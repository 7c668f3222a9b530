"""Prometheus metrics of the server.

Each application has its own registry, so that two servers in one process (tests) do not share counts. With several
workers a scrape reaches any of them: the supervisor then sets PROMETHEUS_MULTIPROC_DIR (`<home>/metrics`) before it
starts them, values are stored in memory-mapped files, and any worker reports for all. The supervisor removes the files
of a worker that has died.

Counts of requests and plans are accumulated in plain numbers, and `flush` adds them to the metrics: at a scrape, and
every second for scrapes of other workers.
"""

from __future__ import annotations

import os

import prometheus_client as prometheus
from prometheus_client import multiprocess

from seamark.metaserver.api.http.observability.metric_groups import (
    COMMIT_OPERATIONS,
    CacheMetrics,
    CommitMetrics,
    GatewayCacheMetrics,
    JobMetrics,
    LoadMetrics,
    MetricFactory,
    PeerMetrics,
    PlanMetrics,
    RequestMetrics,
)

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# The creation time of each series doubles the answer and adds nothing to the start time of the process.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]


class ServerMetrics:
    """The metrics of one worker. The server's sampler sets the values that other components know."""

    def __init__(self) -> None:
        make = MetricFactory()
        self.registry = make.registry
        self.requests = RequestMetrics(make)
        self.commits = CommitMetrics(make)
        self.plans = PlanMetrics(make)
        self.caches = CacheMetrics(make)
        self.peers = PeerMetrics(make)
        self.jobs = JobMetrics(make)
        self.gateway_cache = GatewayCacheMetrics(make)
        self.load = LoadMetrics(make)

    def observe(self, operation: str, status: int, seconds: float, error: BaseException | None) -> None:
        """Counts an answered request. `operation` must be from a bounded set: route names, never paths."""
        self.requests.observe(operation, status, seconds)
        if operation in COMMIT_OPERATIONS:
            self.commits.observe(status, error)

    def flush(self) -> None:
        """Adds the counts since the last flush to the metrics."""
        self.requests.flush()
        self.plans.flush()

    def render(self) -> bytes:
        """The text exposition format, for all workers."""
        self.flush()
        folder = os.environ.get(MULTIPROCESS_VARIABLE)
        if folder is None:
            return prometheus.generate_latest(self.registry)
        together = prometheus.CollectorRegistry()
        multiprocess.MultiProcessCollector(together, path=folder)  # type: ignore[no-untyped-call]
        return prometheus.generate_latest(together)
