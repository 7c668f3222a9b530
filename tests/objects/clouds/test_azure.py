"""Tests of Azure storage with Azurite, Microsoft's emulator."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.storage import use_keys
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, ConfigError, RetryLater, StorageError
from seamark.formats.storage.locations import list_spellings, normalize_location, parse_location
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.settings.settings import Settings
from tests.connector.server_thread import ServerThread
from tests.objects.clouds.table_life import run_table_life
from tests.objects.contract import ObjectStoreContract
from tests.services.clouds.azurite import ACCOUNT, ACCOUNT_KEY, Azurite
from tests.services.process import choose_free_port


def build_settings(azurite: Azurite, warehouse: str, **changes: Any) -> Settings:
    settings = Settings(warehouse=warehouse, storage_timeout_s=5.0, storage_retries=0)
    return dataclasses.replace(settings, **{**azurite.make_settings(), **changes})


class TestAzureContract(ObjectStoreContract):
    @pytest.fixture
    def base(self, azurite: Azurite) -> str:
        return f"{azurite.create_container()}/warehouse/corner"

    @pytest.fixture
    async def store(self, azurite: Azurite, base: str) -> AsyncIterator[ObjectStore]:
        warehouse = base.removesuffix("/corner")
        async with open_objects(build_settings(azurite, warehouse), SystemClock()) as objects:
            yield objects


def test_table_on_azure_is_written_planned_and_purged(azurite: Azurite, tmp_path: Path) -> None:
    warehouse = f"{azurite.create_container()}/lake"
    server = ServerThread(
        tmp_path / "home",
        warehouse=warehouse,
        drop_retention_s=0,
        housekeeping_interval_s=0.1,
        **azurite.make_settings(),
    )
    server.start()
    try:
        # The server vends no keys, so the clients use their own keys.
        use_keys({"adls.account-key": ACCOUNT_KEY})
        run_table_life(server, warehouse, {"adls.connection-string": azurite.make_connection_string()})
    finally:
        use_keys({})
        server.stop()


async def test_errors_from_azure_name_what_to_correct(azurite: Azurite) -> None:
    container = azurite.create_container()
    host = container.partition("@")[2]
    missing_location, warehouse = f"abfss://nowhere@{host}/lake", f"{container}/lake"
    async with open_objects(build_settings(azurite, missing_location), SystemClock()) as objects:
        with pytest.raises(StorageError, match=r"The container of .*nowhere.* does not exist; create it"):
            await objects.create(f"{missing_location}/a", b"x")
        with pytest.raises(StorageError, match="does not exist; create it"):
            await objects.ping()
    wrong_key = base64.b64encode(b"another key").decode()
    async with open_objects(build_settings(azurite, warehouse, azure_account_key=wrong_key), SystemClock()) as objects:
        with pytest.raises(StorageError, match=r"Azure refused access to .*credentials and its role") as refusal:
            await objects.read(f"{warehouse}/a")
        assert wrong_key not in str(refusal.value)
        with pytest.raises(StorageError, match="Azure refused access"):
            await objects.ping()
    unreachable = build_settings(azurite, warehouse, azure_endpoint=f"http://127.0.0.1:{choose_free_port()}/{ACCOUNT}")
    async with open_objects(unreachable, SystemClock()) as objects:
        with pytest.raises(RetryLater, match=r"Azure did not answer .*try again later"):
            await objects.ping()


async def test_key_of_one_account_is_not_used_for_another(azurite: Azurite) -> None:
    settings = build_settings(
        azurite,
        "abfss://data@first.dfs.core.windows.net/lake",
        allowed_locations=("abfss://data@second.dfs.core.windows.net/lake",),
    )
    with pytest.raises(ConfigError, match=r"azure_account_key is for one storage account.*first, second"):
        async with open_objects(settings, SystemClock()):
            pass


def test_spellings_of_one_azure_location_are_equal() -> None:
    normalized_location = parse_location("abfss://data@account.dfs.core.windows.net/lake/t")
    for text in (
        "abfs://data@account.dfs.core.windows.net/lake/t",
        "wasbs://data@account.blob.core.windows.net/lake/t/",
        "WASB://data@ACCOUNT.Blob.Core.Windows.NET/lake/t",
    ):
        assert parse_location(text) == normalized_location
        assert normalize_location(text).rstrip("/") == str(normalized_location)
    assert "wasbs://data@account.blob.core.windows.net/lake/t" in list_spellings(str(normalized_location))
    assert parse_location("abfss://data@account.dfs.core.windows.net/A") != parse_location(
        "abfss://data@account.dfs.core.windows.net/a"
    )


@pytest.mark.parametrize(
    "location",
    [
        "abfss://account.dfs.core.windows.net/lake",
        "abfss:/data@account.dfs.core.windows.net/lake",
        "abfss://data@account.dfs.core.windows.net/lake/../other",
        "abfss://data@account.dfs.core.windows.net/..",
        "abfss://data@account.dfs.core.windows.net/lake/%2e%2e/other",
        "abfss://data@account.dfs.core.windows.net/lake//t",
        "abfss://data@account.dfs.core.windows.net/lake/t.",
        "abfss://data@account.dfs.core.windows.net/lake/t%2e/x",
        "abfss://data@account.dfs.core.windows.net/lake\\t",
        "abfss://data@account.dfs.core.windows.net/lake?sv=1&sig=2",
        "abfss://data@account.dfs.core.windows.net/lake#t",
        "abfss://data@account.dfs.core.windows.net:443/lake",
        "abfss://data@account.dfs.core.windows.net.evil.example/lake",
        "abfss://data@evil.example/lake",
        "abfss://data@evil.example%2f.dfs.core.windows.net/lake",
        "abfss://user:password@data@account.dfs.core.windows.net/lake",
        "abfss://Data@account.dfs.core.windows.net/lake",
        "abfss://da%74a@account.dfs.core.windows.net/lake",
        "abfss://$root@account.dfs.core.windows.net/lake",
        "abfss://da--ta@account.dfs.core.windows.net/lake",
        "abfss://data@account.queue.core.windows.net/lake",
        "abfss://data@account.dfs.core.windows.net@other.dfs.core.windows.net/lake",
    ],
)
def test_ambiguous_or_foreign_azure_location_is_refused(location: str) -> None:
    with pytest.raises(BadRequest):
        parse_location(location)


def test_locations_in_foreign_accounts_and_containers_are_outside_the_warehouse() -> None:
    warehouse = Warehouse("abfss://data@account.dfs.core.windows.net/lake")
    assert warehouse.contains("wasbs://data@account.blob.core.windows.net/lake/t")
    for location in (
        "abfss://data@other.dfs.core.windows.net/lake/t",
        "abfss://other@account.dfs.core.windows.net/lake/t",
        "abfss://data@account.dfs.core.usgovcloudapi.net/lake/t",
        "abfss://data@account.dfs.core.windows.net/lakes/t",
        "s3://data@account.dfs.core.windows.net/lake/t",
    ):
        assert not warehouse.contains(location)
