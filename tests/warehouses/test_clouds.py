"""Tests of one server with warehouses in S3, Azure and Google Cloud Storage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from tests.objects.test_s3 import build_settings
from tests.services.clouds.azurite import ACCOUNT_KEY, Azurite
from tests.services.clouds.gcs import GoogleStorage
from tests.services.s3 import S3
from tests.warehouses.world import run_server_with_warehouses


def write_and_read(url: str, name: str, location: str, properties: dict[str, Any]) -> list[int]:
    """Write a table in a warehouse with PyIceberg, and return its ids above 1, which a scan reads.

    The table has the id 1 and the length of `location`, which differs between the warehouses.
    """
    warehouse = {"warehouse": name} if name else {}
    catalog = load_catalog(f"cloud {name}", type="rest", uri=url, **warehouse, **properties)
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table("db.t", pa.schema([("id", pa.int64())]))
    assert table.location().startswith(f"{location}/db/t-")
    table.append(pa.table({"id": [len(location), 1]}))
    return sorted(catalog.load_table("db.t").scan(row_filter="id > 1").to_arrow()["id"].to_pylist())


@pytest.mark.slow
async def test_one_server_has_warehouses_in_three_clouds(
    s3: S3, s3_bucket: str, azurite: Azurite, google_storage: GoogleStorage, tmp_path: Path
) -> None:
    server_settings = build_settings(s3, s3_bucket)
    azure, google = azurite.create_container(), google_storage.create_bucket()
    options: dict[str, Any] = {
        name: getattr(server_settings, name)
        for name in ("warehouse", "s3_endpoint", "s3_region", "s3_access_key_id", "s3_secret_access_key")
    }
    options |= {**azurite.make_settings(), **google_storage.make_settings(), "warehouse_roots": (azure, google)}
    # The server's own key is wrong, so the key of the warehouse must open the container.
    options["azure_account_key"] = "d3Jvbmc="
    clients: dict[str, dict[str, Any]] = {
        "": s3.build_client_properties(),
        "azure": {"adls.connection-string": azurite.make_connection_string()},
        "google": google_storage.make_client_properties(),
    }
    locations = {"": server_settings.warehouse, "azure": f"{azure}/lake", "google": f"{google}/lake"}
    async with run_server_with_warehouses(tmp_path, **options) as world:
        await world.create_warehouse(
            "azure", location=locations["azure"], credentials={"azure_account_key": ACCOUNT_KEY}
        )
        await world.create_warehouse("google", location=locations["google"])
        _, shown_warehouses = await world.send("GET", "/api/v1/warehouses")
        assert ACCOUNT_KEY not in str(shown_warehouses)
        for name, location in locations.items():
            rows = await asyncio.to_thread(write_and_read, world.url, name, location, clients[name])
            # `write_and_read` writes this id, which differs between the warehouses.
            assert rows == [len(location)]
