"""Tests that the alert rules and the dashboard use only metrics, labels and values that a server's `/metrics` has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from seamark.cache.memory import CacheStats
from seamark.metaserver.api.http.observability.metrics import ServerMetrics
from tests.kubernetes.chart import CHART
from tests.server.rig import run_server
from tests.services.process import DEPLOY

ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PROMETHEUS_LABELS = {"job", "instance"}
"""Labels that Prometheus adds to all samples."""
Labels = dict[str, set[str]]


def list_dashboard_expressions() -> list[str]:
    """Return the expressions of all panels, with values for Grafana's variables."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [target["expr"].replace("$__rate_interval", "5m").replace("$job", "seamark") for target in targets]


def record_labelled_values(metrics: ServerMetrics) -> None:
    """Record a value of each metric that a new server does not show, because its labels have no values yet."""
    metrics.jobs.count_ended_job(
        "compaction", "completed", seconds=1.0, totals={"bytes_before": 2, "bytes_after": 1, "bytes_wasted": 3}
    )
    metrics.jobs.set_job_lag("compaction", lag_s=4.0, failing_tables=5)
    metrics.commits.observe_conflict("same-files")
    metrics.peers.set_values(1, 0, {"own": 1})
    metrics.gateway_cache.set_values(memory={}, disk={}, served_bytes={"disk": 1}, events={})
    stats = CacheStats(hits=0, misses=0, evictions=0, refused=0, entries=0, used_bytes=0, budget_bytes=0)
    metrics.caches.set_values({"views": 1}, stats, stats)
    metrics.events.count_failed_delivery("kafka")
    metrics.events.set_delivery_lag("kafka", "events:kafka:t", seconds=1.0)


async def read_metrics(folder: Path) -> dict[str, Labels]:
    """Return the samples of a real server: the values of each label, by the name of the metric."""
    async with run_server(folder) as server:
        async with server.http.post(f"{server.url}/v1/namespaces", json={"namespace": ["shop"]}) as answer:
            assert answer.status == 200
        async with server.http.get(f"{server.url}/v1/namespaces/absent") as answer:
            assert answer.status == 404
        record_labelled_values(server.components.metrics)
        async with server.http.get(f"{server.url}/metrics") as answer:
            text = await answer.text()
    label_values_by_metric: dict[str, Labels] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = label_values_by_metric.setdefault(sample.name, defaultdict(set))
            for label, value in sample.labels.items():
                labels[label].add(value)
    return label_values_by_metric


def parse_selectors(expression: promql.Expr) -> Iterator[tuple[str, set[str], dict[str, str]]]:
    """Yield (metric, labels by which the expression groups its samples, matchers) of each selector.

    Raises:
        AssertionError: The expression has a part that this function does not support.
    """
    if isinstance(expression, promql.AggregateExpr):
        modifier = expression.modifier
        groups = set(modifier.labels) if modifier is not None else set()
        for metric, labels, matchers in parse_selectors(expression.expr):
            yield metric, labels | groups, matchers
    elif isinstance(expression, promql.BinaryExpr):
        yield from parse_selectors(expression.lhs)
        yield from parse_selectors(expression.rhs)
    elif isinstance(expression, promql.Call):
        for argument in expression.args:
            yield from parse_selectors(argument)
    elif isinstance(expression, promql.ParenExpr):
        yield from parse_selectors(expression.expr)
    elif isinstance(expression, promql.MatrixSelector):
        yield from parse_selectors(expression.vector_selector)
    elif isinstance(expression, promql.VectorSelector):
        matchers = {matcher.name: matcher.value for matcher in expression.matchers.matchers}
        assert expression.name
        yield expression.name, set(), matchers
    else:
        assert isinstance(expression, promql.NumberLiteral), expression


async def test_expressions_use_metrics_labels_and_values_of_a_server(tmp_path: Path) -> None:
    label_values_by_metric = await read_metrics(tmp_path)
    checked_metrics = set()
    for expression in (*(rule["expr"] for rule in RULES), *list_dashboard_expressions()):
        for metric, labels, matchers in parse_selectors(promql.parse(expression)):
            assert metric in label_values_by_metric, expression
            values_by_label = label_values_by_metric[metric]
            for label in labels | matchers.keys():
                assert label in values_by_label or label in PROMETHEUS_LABELS, (expression, label)
            for label, value in matchers.items():
                # A pattern, such as 5.., stands for values that a healthy server does not have.
                assert label in PROMETHEUS_LABELS or "." in value or value in values_by_label[label], (
                    expression,
                    value,
                )
            checked_metrics.add(metric)
    assert len(checked_metrics) > 25  # With a broken parser, the test would check nothing.


@pytest.mark.parametrize("text", ["seamark_absent > 0", "sum by (operation) (seamark_requests_in_flight)"])
async def test_unknown_metric_or_label_in_an_expression_is_reported(text: str, tmp_path: Path) -> None:
    label_values_by_metric = await read_metrics(tmp_path)
    ((metric, labels, _),) = parse_selectors(promql.parse(text))
    assert metric not in label_values_by_metric or not labels <= label_values_by_metric[metric].keys()


def test_alerts_have_names_texts_and_a_severity() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 12
    for rule in RULES:
        assert {"summary", "description"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_panels_have_unique_titles_and_positions() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["type"], panel["title"]) for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_chart_has_the_alerts_and_the_dashboard_of_the_deploy_folder() -> None:
    for name, file in (("alerts.yaml", "prometheus/alerts.yaml"), ("dashboard.json", "grafana/dashboard.json")):
        assert (CHART / "files" / name).resolve() == DEPLOY / file
