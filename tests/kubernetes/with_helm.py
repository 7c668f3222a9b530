"""Tests that need helm. `make helm` builds helm and runs this file with pytest."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.kubernetes.chart import CASES, CHART, RENDERED_FOLDER, read_manifests, render_case, run_helm
from tests.services.process import CACHE

HELM = CACHE / "bin" / "helm"
MONITORING_FOLDER = CACHE / "helm" / "node_modules" / "@kubernetes-models" / "prometheus-operator"
POSTGRESQL = str(CHART / "ci" / "postgresql.yaml")
_SECRETS = ["secrets.database.name=db", "secrets.encryptionKey.name=keys", "secrets.firstToken.name=token"]
_VALIDATE = """
const [folder, ...manifests] = process.argv.slice(1);
for (const text of manifests) {
  const manifest = JSON.parse(text);
  const models = require(`${folder}/${manifest.apiVersion}`);
  new models[manifest.kind](manifest).validate();
}
"""


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_no_fault_in_the_chart(case: str) -> None:
    result = run_helm(HELM, "lint", "--strict", str(CHART), "-f", str(CHART / "ci" / f"{case}.yaml"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", CASES)
def test_committed_manifests_equal_the_manifests_that_helm_renders(case: str) -> None:
    assert (RENDERED_FOLDER / f"{case}.yaml").read_text() == render_case(HELM, case)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "The database has no place"),
        (["home.persistence.enabled=true"], "Several servers need PostgreSQL"),
        (["secrets.database.name=db"], "set secrets.encryptionKey.name"),
        (_SECRETS[:2], "set secrets.firstToken.name"),
        ([*_SECRETS, "settings.workers=1"], "Rows of stream tables"),
        ([*_SECRETS, "settings.auth=none"], "needs logins"),
        ([*_SECRETS, "home.persistence.enabled=true"], "A claim of the home folder is for one server"),
        ([*_SECRETS, "trinoProxy.enabled=true"], "trinoProxy.trino is empty"),
        (["settings.worker=2"], "additional properties 'worker' not allowed"),
        (["settings.database=sqlite:///x"], "additional properties 'database' not allowed"),
        (["settings.auth=basic"], "value must be one of"),
        (["replicas=0"], "minimum"),
        (["streamLog=kafka.example"], "does not match pattern"),
    ],
)
def test_chart_refuses_values_with_a_reason(values: list[str], message: str) -> None:
    arguments = [argument for value in values for argument in ("--set", value)]
    result = run_helm(HELM, "template", "seamark", str(CHART), *arguments)
    assert result.returncode == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("value", "is_changed"), [("settings.workers=3", True), ("podLabels.team=data", True), ("replicas=4", False)]
)
def test_servers_restart_when_their_settings_change(value: str, is_changed: bool) -> None:
    arguments = ("template", "seamark", str(CHART), "-f", POSTGRESQL, "-s", "templates/deployment.yaml")
    rendered_before, rendered_after = (
        run_helm(HELM, *arguments, *changed_value).stdout for changed_value in ((), ("--set", value))
    )
    _, pod_before = rendered_before.split("  template:", 1)
    _, pod_after = rendered_after.split("  template:", 1)
    assert (pod_before != pod_after) is is_changed


def test_monitoring_resources_follow_the_schemas_of_the_prometheus_operator() -> None:
    manifests = [
        manifest for manifest in read_manifests("fleet") if manifest["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    assert {manifest["kind"] for manifest in manifests} == {"ServiceMonitor", "PrometheusRule"}
    broken_manifest = {**manifests[0], "spec": {"groups": "none", "endpoints": "none"}}

    def validate(*documents: dict[str, object]) -> int:
        texts = [json.dumps(document) for document in documents]
        command = ["node", "-e", _VALIDATE, str(MONITORING_FOLDER), *texts]
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode

    assert validate(*manifests) == 0
    assert validate(broken_manifest) != 0
