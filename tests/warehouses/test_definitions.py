"""Tests of the settings with which the server opens a warehouse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.metaserver.objects.storages import list_storages
from seamark.metaserver.services.launching.worker_process import list_job_variables
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.warehouses.definitions import (
    check_definition,
    check_services,
    load_settings,
    make_settings,
    seal_credentials,
)
from tests.server.rig import build_settings

KEYS = {"s3_access_key_id": "AKIA-SALES", "s3_secret_access_key": "secret-of-sales"}


def build_warehouse(settings: dict[str, Any]) -> StoredWarehouse:
    return StoredWarehouse("sales", "0" * 32, "s3://lake/sales", "s3://lake/sales", settings, None, 0, "ann")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return the settings of a server that gives clients temporary keys of its role."""
    role = "arn:aws:iam::123456789012:role/lake"
    return dataclasses.replace(build_settings(tmp_path), s3_client_access="sts", s3_sts_role=role)


async def test_warehouse_with_a_stored_region_but_without_keys_is_not_opened(settings: Settings) -> None:
    for name, value in (("s3_path_style", False), ("s3_region", "eu-west-1")):
        with pytest.raises(ConfigError, match=name):
            await load_settings(settings, SystemClock(), build_warehouse({name: value}))


async def test_warehouse_is_opened_without_receivers_and_workers_that_the_operator_withdraws(
    settings: Settings,
) -> None:
    targets = ("http://hooks.example/a", "http://hooks.example/b", "nats://nats.example:4222/sales")
    kafka = "kafka://broker:9092/sales"
    server = dataclasses.replace(settings, warehouse_event_targets=(*targets, kafka), services_workers=1)
    clock, own_settings = SystemClock(), {"event_kafka": kafka, "services_workers": 1}
    credentials = {"webhook_urls": targets[:2], "event_nats": targets[2], "webhook_secret": "secret"}
    sealed_credentials = await seal_credentials(server, clock, "0" * 32, credentials)
    warehouse = msgspec.structs.replace(build_warehouse(own_settings), credentials=sealed_credentials)
    opened_settings = await load_settings(server, clock, warehouse)
    assert (opened_settings.webhook_urls, opened_settings.event_nats) == (targets[:2], targets[2])
    assert (opened_settings.event_kafka, opened_settings.services_workers) == (kafka, 1)

    smaller_server = dataclasses.replace(server, warehouse_event_targets=targets[:1], services_workers=0)
    with capture_logs() as logs:
        opened_settings = await load_settings(smaller_server, clock, warehouse)
    assert (opened_settings.webhook_urls, opened_settings.event_nats) == (targets[:1], "")
    assert (opened_settings.event_kafka, opened_settings.services_workers) == ("", 0)
    assert opened_settings.webhook_secret == "secret"
    errors = {entry["setting"] for entry in logs if entry["log_level"] == "error"}
    assert errors == {"webhook_urls", "event_nats", "event_kafka"}
    with pytest.raises(BadRequest, match="services_workers"):
        check_services(smaller_server, own_settings)


@pytest.mark.parametrize(
    ("location", "access", "keys", "expected"),
    [
        ("s3://lake/sales", "signing", {}, {"AWS_CA_BUNDLE", "AWS_REGION", "AWS_ROLE_ARN"}),
        ("s3://lake/sales", "signing", KEYS, {"AWS_CA_BUNDLE", "AWS_REGION"}),
        ("s3://lake/sales", "gateway", {}, {"AWS_CA_BUNDLE", "AWS_REGION"}),
        ("s3://lake/sales", "signing", {"azure_account_key": "a2V5"}, {"AWS_CA_BUNDLE", "AWS_REGION", "AWS_ROLE_ARN"}),
        ("gs://lake/sales", "gateway", KEYS, {"GOOGLE_APPLICATION_CREDENTIALS"}),
        ("abfss://lake@account.dfs.core.windows.net/sales", "gateway", KEYS, {"AZURE_CLIENT_ID"}),
        ("abfss://lake@account.dfs.core.windows.net/sales", "signing", {"azure_account_key": "a2V5"}, set()),
        ("hdfs://namenode:8020/sales", "gateway", KEYS, {"KRB5CCNAME"}),
        ("file:///sales", "gateway", {}, set()),
    ],
)
def test_jobs_have_the_login_to_the_cloud_of_their_warehouse_unless_they_have_other_keys(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    location: str,
    access: str,
    keys: dict[str, str],
    expected: set[str],
) -> None:
    variable_names = (
        *("AWS_CA_BUNDLE", "AWS_REGION", "AWS_ROLE_ARN", "AZURE_CLIENT_ID", "GOOGLE_APPLICATION_CREDENTIALS"),
        "KRB5CCNAME",
    )
    for variable_name in variable_names:
        monkeypatch.setenv(variable_name, "value")
    warehouse = dataclasses.replace(settings, warehouse=location, s3_client_access=access, **keys)
    assert set(list_job_variables(list_storages(warehouse), warehouse)) & set(variable_names) == expected
    own_warehouse_variables = list_job_variables(list_storages(warehouse))
    assert expected <= set(own_warehouse_variables)


def test_role_of_the_server_is_not_assumed_for_a_warehouse_with_own_keys(settings: Settings) -> None:
    check_definition(settings, {}, KEYS)
    warehouse_settings = make_settings(settings, build_warehouse({}), {}, KEYS)
    assert (warehouse_settings.s3_client_access, warehouse_settings.s3_sts_role) == ("signing", "")
    assert make_settings(settings, build_warehouse({}), {}, {}).s3_client_access == "sts"
    with pytest.raises(BadRequest, match="s3_sts_role"):
        check_definition(settings, {"s3_client_access": "sts"}, KEYS)


def test_federated_warehouse_gives_no_keys_of_the_gateway(settings: Settings) -> None:
    server = dataclasses.replace(settings, s3_client_access="gateway", gateway_port=8182)
    federation_settings = {"federation_uri": "http://other.example"}
    assert make_settings(server, build_warehouse({}), {}, {}).s3_client_access == "gateway"
    assert (
        make_settings(server, build_warehouse(federation_settings), federation_settings, {}).s3_client_access
        == "signing"
    )
    with pytest.raises(BadRequest, match="federated"):
        check_definition(server, {**federation_settings, "s3_client_access": "gateway"}, {})


def test_federated_warehouse_runs_no_table_services(settings: Settings) -> None:
    server = dataclasses.replace(settings, services_workers=1)
    federation_settings = {"federation_uri": "http://other.example"}
    assert make_settings(server, build_warehouse({}), {}, {}).services_workers == 1
    for own_settings in (federation_settings, {**federation_settings, "services_workers": 1}):
        assert make_settings(server, build_warehouse(own_settings), own_settings, {}).services_workers == 0
    with pytest.raises(BadRequest, match="federated"):
        check_services(server, {**federation_settings, "services_workers": 1})


def test_warehouses_share_the_memory_and_the_disk_of_stream_tables(settings: Settings) -> None:
    warehouse_settings = make_settings(dataclasses.replace(settings, warehouses_limit=4), build_warehouse({}), {}, {})
    assert warehouse_settings.stream_memory_bytes == settings.stream_memory_bytes // 4
    assert warehouse_settings.stream_log_retention_bytes == settings.stream_log_retention_bytes // 4
    small_settings = dataclasses.replace(settings, stream_log_waiting_bytes=2 << 20, warehouses_limit=4)
    assert make_settings(small_settings, build_warehouse({}), {}, {}).stream_log_waiting_bytes == 1 << 20
