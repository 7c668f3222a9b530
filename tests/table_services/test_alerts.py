"""Tests that the alert rules use metrics and labels of the server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from seamark.metaserver.api.http.observability.metrics import ServerMetrics

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
_METRIC = re.compile(r"seamark_[a-z_]+")


def test_each_alert_rule_uses_metrics_of_the_server() -> None:
    metrics = ServerMetrics()
    metrics.jobs.job_ended("compaction", "completed", 1.0, {"bytes_before": 2, "bytes_after": 1, "bytes_wasted": 3})
    metrics.jobs.jobs_lag("compaction", 4.0, 5)
    text = metrics.render().decode()
    document: Any = yaml.safe_load(RULES.read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) == 5
    for rule in rules:
        names = _METRIC.findall(rule["expr"])
        assert names
        assert all(re.search(rf"^{name}[ {{]", text, re.M) for name in names), names
        assert {"summary", "description"} <= rule["annotations"].keys()
    for line in (
        'seamark_service_lag_seconds{service="compaction"} 4.0',
        'seamark_service_failing_tables{service="compaction"} 5.0',
        'seamark_service_bytes_total{kind="wasted",service="compaction"} 3.0',
    ):
        assert line in text
