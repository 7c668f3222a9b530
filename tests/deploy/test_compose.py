"""Tests that the compose file is valid, and that the tests run the configuration that it mounts.

The machine of these tests has no container engine. So they validate the file with the Compose Specification's schema,
find every mounted file, and check that each service's configuration is the one that its starter in `tests/services`
uses, not an edited copy.
"""

from __future__ import annotations

import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from seamark.commands.main import cli
from seamark.connector.client.engines import build_catalog_conf
from seamark.metaserver.settings.settings import Settings
from tests.docs.commands import list_subcommands
from tests.services import postgres, s3, trino
from tests.services.process import DEPLOY, REPO

COMPOSE: dict[str, Any] = yaml.safe_load((REPO / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def list_mounted_files(service: str) -> dict[str, Path]:
    """Return the files that a service mounts: the path in the checkout by the path in the container."""
    binds = (volume.split(":") for volume in SERVICES[service].get("volumes", []) if volume.startswith("."))
    return {bind[1]: REPO / bind[0] for bind in binds}


def read_image_version(service: str) -> str:
    match = re.search(r":v?(\d+(?:\.\d+)*)", SERVICES[service]["image"])
    assert match, SERVICES[service]["image"]
    return match[1]


def read_pom_property(pom: Path, name: str) -> str:
    namespace = {"m": "http://maven.apache.org/POM/4.0.0"}
    value = ElementTree.parse(pom).getroot().findtext(f"m:properties/m:{name}", namespaces=namespace)
    assert value, f"{pom} has no {name}"
    return value


def find_locked_version(package: str) -> str:
    lock = (REPO / "requirements.lock").read_text()
    match = re.search(rf"^{package}==(\S+)$", lock, re.MULTILINE)
    assert match, package
    return match[1]


def read_spark_defaults() -> dict[str, str]:
    lines = (DEPLOY / "spark" / "spark-defaults.conf").read_text().splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def test_compose_file_follows_the_compose_specification() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(COMPOSE)


def test_schema_rejects_a_misspelt_key() -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
    broken_compose = {**COMPOSE, "services": {"s3": {**SERVICES["s3"], "healthchek": {}}}}
    with pytest.raises(jsonschema.ValidationError, match="healthchek"):
        jsonschema.Draft202012Validator(schema).validate(broken_compose)


def test_compose_has_its_services_with_health_checks() -> None:
    assert set(SERVICES) == {"seamark", "indexer", "postgres", "s3", "trino", "spark", "kafka"}
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["kafka"]
    assert all(service["healthcheck"]["test"] for service in SERVICES.values())


def test_every_mounted_file_and_every_named_volume_exists() -> None:
    for service, description in SERVICES.items():
        for container_path, source_path in list_mounted_files(service).items():
            assert source_path.exists(), (
                f"{service} mounts {source_path} at {container_path}; run `make jars` if it is a jar folder"
            )
        for volume in description.get("volumes", []):
            assert volume.startswith(".") or volume.split(":")[0] in COMPOSE["volumes"]
        for path in description.get("env_file", []):
            assert (REPO / path).exists()


def test_published_ports_are_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_mounted_configurations_equal_the_configurations_of_the_tests() -> None:
    assert list_mounted_files("postgres")["/etc/postgresql/postgresql.conf"] == postgres.CONFIG
    assert list_mounted_files("trino")["/etc/trino"] == trino.ETC
    assert [REPO / path for path in SERVICES["s3"]["env_file"]] == [s3.CONFIG]


def test_images_have_the_tested_versions() -> None:
    resolve_folder = DEPLOY / "trino" / "resolve"
    assert read_image_version("trino") == read_pom_property(resolve_folder / "server" / "pom.xml", "trino.version")
    assert read_image_version("trino") == read_pom_property(resolve_folder / "plugin" / "pom.xml", "trino.version")
    assert read_image_version("trino") == read_pom_property(resolve_folder / "clients" / "pom.xml", "trino.version")
    assert f'start("{read_image_version("trino")}")' in trino.MAIN_SOURCE.read_text()
    assert read_image_version("spark") == find_locked_version("pyspark")
    assert f"@v{read_image_version('s3')}\n" in (REPO / "Makefile").read_text()


def test_spark_defaults_equal_the_output_of_the_connect_command() -> None:
    store = {"s3.endpoint": "http://s3:7070", "s3.path-style-access": "true"}
    spark_settings = {
        key: value for key, value in read_spark_defaults().items() if key.startswith("spark.sql.catalog.")
    }
    assert spark_settings == build_catalog_conf("seamark", "http://seamark:8181", extra=store)


def test_server_settings_are_known_and_agree_with_other_services() -> None:
    settings = tomllib.loads(list_mounted_files("seamark")["/etc/seamark/seamark.toml"].read_text())
    setting_names = {field.name for field in fields(Settings)}
    assert set(settings) <= setting_names
    assert SERVICES["seamark"]["environment"]["SEAMARK_CONFIG"] == "/etc/seamark/seamark.toml"
    variables = {name.removeprefix("SEAMARK_").lower() for name in SERVICES["seamark"]["environment"]}
    assert variables - {"config"} <= setting_names
    keys = s3.read_env_file(s3.CONFIG)
    environment = SERVICES["seamark"]["environment"]
    assert environment["SEAMARK_S3_ACCESS_KEY_ID"] == f"${{S3_ACCESS_KEY:-{keys['ROOT_ACCESS_KEY']}}}"
    assert environment["SEAMARK_S3_SECRET_ACCESS_KEY"] == f"${{S3_SECRET_KEY:-{keys['ROOT_SECRET_KEY']}}}"
    assert settings["s3_region"] == keys["VGW_REGION"] == SERVICES["trino"]["environment"]["S3_REGION"]
    bucket = settings["warehouse"].removeprefix("s3://").split("/")[0]
    assert f"mkdir -p /data/{bucket} " in SERVICES["s3"]["entrypoint"][2]
    assert settings["host"] != "127.0.0.1"
    assert settings["auth"] != "none"


def test_indexer_has_the_image_of_the_server_and_the_token_and_keys_of_engines() -> None:
    service, spark = SERVICES["indexer"], SERVICES["spark"]["environment"]
    assert service["image"] == SERVICES["seamark"]["image"]
    name, *arguments = service["command"]
    command = list_subcommands(cli)[name]
    parameters = command.make_context(name, list(arguments)).params
    assert parameters["url"] == "http://seamark:8181"
    assert not parameters["once"]
    config = {"SEAMARK_CONFIG": "/etc/seamark/seamark.toml"}
    assert service["environment"].items() <= (spark | config).items()
    assert list_mounted_files("indexer") == list_mounted_files("seamark")


def test_compose_sets_every_variable_that_trino_reads() -> None:
    files = (path for path in trino.ETC.rglob("*") if path.is_file())
    expected = {name for path in files for name in re.findall(r"\$\{ENV:(\w+)\}", path.read_text())}
    assert expected == set(SERVICES["trino"]["environment"])


def test_image_copies_only_existing_files_that_the_ignore_file_allows() -> None:
    unignored_names = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    dockerfile = (DEPLOY / "seamark" / "Dockerfile").read_text()
    sources = {name for copy in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for name in copy.split()}
    assert sources == unignored_names
    assert all((REPO / source).exists() for source in sources)
