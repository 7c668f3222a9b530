"""Defines the Prometheus metrics of the proxy (`GET /seamark/metrics`). Each proxy has its own registry."""

from __future__ import annotations

import prometheus_client as prometheus

_PLAN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ProxyMetrics:
    """The metrics of one proxy."""

    def __init__(self) -> None:
        """Register the metrics.

        A plan table is a version of a table that has only the data files that a statement needs.
        """
        self.registry = registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "seamark_trino_requests",
            "Answered requests by the first digit of the status.",
            ("status",),
            registry=registry,
        )
        self.statements = prometheus.Counter(
            "seamark_trino_statements",
            "Statements by outcome: rewritten, unchanged, original (the rewritten statement failed).",
            ("outcome",),
            registry=registry,
        )
        self.plan_seconds = prometheus.Histogram(
            "seamark_trino_plan_seconds",
            "Time that statements waited for their plan tables (tables with only the needed files).",
            buckets=_PLAN_SECONDS,
            registry=registry,
        )
        self.files = prometheus.Counter(
            "seamark_trino_files",
            "Data files of scans with a plan table: which=considered, or which=kept in the plan.",
            ("which",),
            registry=registry,
        )
        self.answering = prometheus.Gauge(
            "seamark_trino_requests_in_flight", "Requests being answered.", registry=registry
        )
        self.breaker_open = prometheus.Gauge(
            "seamark_trino_breaker_open",
            "1 while no plan tables are requested, because seamark failed to make them or trino failed to read them.",
            ("which",),
            registry=registry,
        )

    def render_text(self) -> bytes:
        return prometheus.generate_latest(self.registry)
