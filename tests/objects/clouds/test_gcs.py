"""Tests of Google Cloud Storage with an emulator, which accepts every token."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest, RetryLater, StorageError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.settings.settings import Settings
from tests.connector.server_thread import ServerThread
from tests.objects.clouds.table_life import run_table_life
from tests.objects.contract import ObjectStoreContract
from tests.services.clouds.gcs import GoogleStorage
from tests.services.process import choose_free_port


def build_settings(google: GoogleStorage, warehouse: str, **changes: Any) -> Settings:
    settings = Settings(warehouse=warehouse, storage_timeout_s=5.0, storage_retries=0)
    return dataclasses.replace(settings, **{**google.make_settings(), **changes})


class TestGcsContract(ObjectStoreContract):
    @pytest.fixture
    def base(self, google_storage: GoogleStorage) -> str:
        return f"{google_storage.create_bucket()}/warehouse/corner"

    @pytest.fixture
    async def store(self, google_storage: GoogleStorage, base: str) -> AsyncIterator[ObjectStore]:
        warehouse = base.removesuffix("/corner")
        async with open_objects(build_settings(google_storage, warehouse), SystemClock()) as objects:
            yield objects


@pytest.mark.slow
def test_table_on_google_cloud_storage_is_written_planned_and_purged(
    google_storage: GoogleStorage, tmp_path: Path
) -> None:
    warehouse = f"{google_storage.create_bucket()}/lake"
    server = ServerThread(
        tmp_path / "home",
        warehouse=warehouse,
        drop_retention_s=0,
        housekeeping_interval_s=0.1,
        **google_storage.make_settings(),
    )
    server.start()
    try:
        run_table_life(server, warehouse, google_storage.make_client_properties())
    finally:
        server.stop()


async def test_errors_from_google_cloud_storage_name_what_to_correct(google_storage: GoogleStorage) -> None:
    missing_location = "gs://no-such-bucket/lake"
    async with open_objects(build_settings(google_storage, missing_location), SystemClock()) as objects:
        with pytest.raises(StorageError, match=r"The bucket of .*no-such-bucket.* does not exist; create it"):
            await objects.create(f"{missing_location}/a", b"x")
    unreachable = build_settings(
        google_storage, missing_location, gcs_endpoint=f"http://127.0.0.1:{choose_free_port()}"
    )
    async with open_objects(unreachable, SystemClock()) as objects:
        with pytest.raises(RetryLater, match=r"Google Cloud Storage did not answer .*try again later"):
            await objects.ping()


def test_ambiguous_google_location_is_refused() -> None:
    assert parse_location("GCS://lake/t/") == parse_location("gs://lake/t")
    for location in (
        "gs:/lake/t",
        "gs://Lake/t",
        "gs://user@lake/t",
        "gs://lake:443/t",
        "gs://la%6be/t",
        "gs://lake/t/../u",
        "gs://lake/%2e%2e/u",
        "gs://lake//t",
        "gs://lake/t?generation=1",
        "gs://lake/t#1",
    ):
        with pytest.raises(BadRequest):
            parse_location(location)
