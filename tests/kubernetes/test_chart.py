"""Tests of the manifests that the Helm chart renders: Kubernetes and the server accept them."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from seamark.commands import reference
from seamark.commands.main import cli
from seamark.connector.trino.protocol.coordinators import PROXY_PATH
from seamark.metaserver.settings.settings import FIELDS
from seamark.metaserver.settings.sources import resolve_settings
from tests.docs.commands import list_subcommands
from tests.kubernetes.chart import CASES, CHART, RENDERED_FOLDER, compute_chart_digest, find_manifest, read_manifests
from tests.server.rig import run_server
from tests.services.process import REPO
from tests.services.seamark import SHARED_KEY

OLDEST, NEWEST = "1.29", "1.37"
SECRETS = {
    "SEAMARK_DATABASE": "postgresql://seamark:secret@db.example/seamark",
    "SEAMARK_ENCRYPTION_KEY": SHARED_KEY,
    "SEAMARK_S3_ACCESS_KEY_ID": "access",
    "SEAMARK_S3_SECRET_ACCESS_KEY": "secret",
    "SEAMARK_WEBHOOK_URLS": "https://hooks.example",
    "SEAMARK_WEBHOOK_SECRET": "secret",
    "SEAMARK_EVENT_NATS": "nats://nats.example:4222/seamark",
}
POD_IP = "10.0.0.5"


def list_core_manifests(case: str) -> list[dict[str, Any]]:
    """Return the manifests of Kubernetes' own kinds."""
    return [manifest for manifest in read_manifests(case) if "coreos.com" not in manifest["apiVersion"]]


def read_environment(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of a container, with a valid value for each secret."""
    return {
        variable["name"]: variable.get("value", SECRETS.get(variable["name"], POD_IP)).replace("$(POD_IP)", POD_IP)
        for variable in container["env"]
    }


def read_server_container(case: str) -> dict[str, Any]:
    """Return the container of the server."""
    (container,) = find_manifest(case, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def write_settings(case: str, folder: Path) -> Path:
    """Write the settings file of a case into a folder."""
    path = folder / "seamark.toml"
    path.write_text(find_manifest(case, "ConfigMap")["data"]["seamark.toml"])
    return path


@pytest.mark.parametrize("case", CASES)
def test_rendered_manifests_are_up_to_date(case: str) -> None:
    assert compute_chart_digest() in (RENDERED_FOLDER / f"{case}.yaml").read_text().splitlines()[0], "run `make helm`"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_follow_the_schemas_of_kubernetes(version: str) -> None:
    for case in CASES:
        for manifest in list_core_manifests(case):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_schemas_refuse_a_misspelt_field() -> None:
    broken_manifest = copy.deepcopy(find_manifest("postgresql", "Deployment"))
    broken_manifest["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(broken_manifest, NEWEST, strict=True)


def test_chart_names_the_oldest_version_of_kubernetes_that_is_checked() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


def test_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])


def test_schema_of_the_values_has_the_settings_of_the_server() -> None:
    text = reference.CHART_SCHEMA.read_text()
    assert text == reference.write_chart_schema(text), "run python -m seamark.commands.reference"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_server_accepts_its_settings_file_and_variables(case: str, tmp_path: Path) -> None:
    environment = read_environment(read_server_container(case))
    settings = resolve_settings({}, environment, write_settings(case, tmp_path))
    assert str(settings.home) == "/var/lib/seamark/home"
    assert settings.auth == "token"
    unknown_settings = {name for name in environment if name.startswith("SEAMARK_")} - {
        "SEAMARK_CONFIG",
        *(f"SEAMARK_{name.upper()}" for name in FIELDS),
    }
    assert not unknown_settings
    mounted_paths = {mount["mountPath"] for mount in read_server_container(case)["volumeMounts"]}
    files = [environment["SEAMARK_CONFIG"], settings.tls_cert, settings.tls_key, settings.stream_log_client_properties]
    files.append(settings.event_kafka_client_properties)
    assert all(str(Path(file).parent) in mounted_paths for file in files if file)


def test_manifests_of_a_fleet_have_the_settings_of_its_values(tmp_path: Path) -> None:
    settings = resolve_settings({}, read_environment(read_server_container("fleet")), write_settings("fleet", tmp_path))
    values = yaml.safe_load((CHART / "ci" / "fleet.yaml").read_text())
    for name, value in values["settings"].items():
        setting = getattr(settings, name)
        assert (list(setting) if isinstance(setting, tuple) else setting) == value
    assert settings.stream_log == values["streamLog"]
    assert settings.peer_address == f"{POD_IP}:8183"
    assert settings.database == SECRETS["SEAMARK_DATABASE"]
    assert settings.encryption_key == SHARED_KEY


async def test_probes_and_metrics_are_routes_of_the_server(tmp_path: Path) -> None:
    container = read_server_container("sqlite")
    probes = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert probes == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    (endpoint,) = find_manifest("fleet", "ServiceMonitor")["spec"]["endpoints"]
    async with run_server(tmp_path) as server:
        for path in (*probes.values(), endpoint["path"]):
            async with server.http.get(server.url + path) as answer:
                assert answer.status == 200, path


def test_ports_of_services_policies_and_probes_exist() -> None:
    for manifest in read_manifests("fleet"):
        if manifest["kind"] != "Deployment":
            continue
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {container[name]["httpGet"]["port"] for name in container if name.endswith("Probe")} <= ports
        service = find_manifest("fleet", "Service", manifest["metadata"]["name"])
        assert service["spec"]["selector"] == manifest["spec"]["selector"]["matchLabels"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    ports = {port["name"] for port in read_server_container("fleet")["ports"]}
    policy = find_manifest("fleet", "NetworkPolicy")["spec"]
    assert ports == {"http", "gateway", "peers"}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports


def test_proxy_accepts_its_arguments() -> None:
    deployment = find_manifest("fleet", "Deployment", "seamark-trino-proxy")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    name, *arguments = container["args"]
    # The certificates exist only in the container.
    arguments = [argument for argument in arguments if not argument.startswith("--tls-")]
    parsed_arguments = list_subcommands(cli)[name].make_context(name, arguments).params
    assert parsed_arguments["coordinators"] == ("https://trino.engines.svc:8443",)
    assert parsed_arguments["catalogs"] == ("lake",)
    assert parsed_arguments["url"] == "https://seamark.lake.svc:8181"
    assert container["readinessProbe"]["httpGet"]["path"] == f"{PROXY_PATH}/healthz"


def test_init_container_creates_the_first_token() -> None:
    pod = find_manifest("postgresql", "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["initContainers"]
    group, command, *arguments = container["args"]
    assert group == "token"
    token = list_subcommands(cli)[group]
    assert isinstance(token, click.Group)
    parsed_arguments = token.commands[command].make_context(command, arguments).params
    assert (parsed_arguments["name"], parsed_arguments["role"]) == ("admin", "admin")
    assert str(parsed_arguments["from_file"].parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "token")
    assert volume["secret"]["items"] == [{"key": "token", "path": parsed_arguments["from_file"].name}]


def test_pods_follow_the_restricted_standard_with_a_read_only_root() -> None:
    for case in CASES:
        for manifest in read_manifests(case):
            if manifest["kind"] != "Deployment":
                continue
            pod = manifest["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not pod["automountServiceAccountToken"]
            assert not pod["enableServiceLinks"]
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"]
                assert not security["allowPrivilegeEscalation"]
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_image_and_chart_use_the_same_user_id() -> None:
    account = re.search(r"--uid (\d+)", (REPO / "deploy" / "seamark" / "Dockerfile").read_text())
    assert account
    for case in CASES:
        security = find_manifest(case, "Deployment")["spec"]["template"]["spec"]["securityContext"]
        assert security["runAsUser"] == security["fsGroup"] == int(account[1])


def test_secrets_are_only_referenced() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    secret_settings = {name for name, field in FIELDS.items() if field.metadata["secret"]}
    assert not secret_settings & values["settings"].keys()
    for case in CASES:
        assert "Secret" not in {manifest["kind"] for manifest in read_manifests(case)}
        for variable in read_server_container(case)["env"]:
            if variable["name"].removeprefix("SEAMARK_").lower() in secret_settings:
                assert variable["valueFrom"]["secretKeyRef"]["name"]


def test_fleet_restarts_without_a_gap_but_a_single_server_stops_before_its_successor_starts() -> None:
    spec = find_manifest("fleet", "Deployment")["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    (container,) = spec["template"]["spec"]["containers"]
    probe = container["readinessProbe"]
    settings = tomllib.loads(find_manifest("fleet", "ConfigMap")["data"]["seamark.toml"])
    assert settings["drain_delay_s"] >= probe["periodSeconds"] * probe["failureThreshold"]
    grace_s = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > settings["drain_delay_s"] + settings["drain_timeout_s"]
    assert find_manifest("sqlite", "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
