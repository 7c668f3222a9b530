"""Tests of imports, exports and federated warehouses with servers that are not Seamark: Iceberg's own, and Nessie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog

from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.errors import Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.warehouses import create_warehouse, make_warehouse_url
from seamark.connector.read.scans import scan
from tests.moving.test_export import export_all
from tests.moving.test_import import COLUMNS, append_ids, import_all
from tests.services.java import run_java_fixture
from tests.services.nessie import run_nessie_server
from tests.services.s3 import S3
from tests.services.seamark import Seamark

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def create_tables(catalog: Catalog) -> None:
    """Create `shop.orders` and `shop.eu.orders` with three rows in each."""
    for namespace in (("shop",), ("shop", "eu")):
        catalog.create_namespace(namespace, {"owner": "ann"})
        catalog.create_table((*namespace, "orders"), ROWS.schema).append(ROWS)


def read_ids(client: IndexClient, table: str) -> list[int]:
    return sorted(scan(client, table).to_arrow().column("id").to_pylist())


def check_moves(federating_client: IndexClient, client: IndexClient, uri: str, lake: str, catalog: Catalog) -> None:
    """Show the tables of a catalog in a federated warehouse, import them, and export a table to the catalog.

    Args:
        federating_client: A client of a server that may have warehouses at `lake`.
        client: A client of a server that may read `lake`.
        uri: The URI of the other catalog.
        lake: The location of the other catalog's tables.
        catalog: The other catalog.
    """
    create_warehouse(federating_client, "other", lake, {"federation_uri": uri, "federation_fresh_s": 0}, {})
    warehouse_client = IndexClient(make_warehouse_url(federating_client.url, "other"))
    assert sorted(warehouse_client.namespaces()) == [("shop",), ("shop", "eu")]
    assert read_ids(warehouse_client, "shop.eu.orders") == [1, 2, 3]
    catalog.load_table(("shop", "orders")).append(ROWS)
    assert read_ids(warehouse_client, "shop.orders") == [1, 1, 2, 2, 3, 3]
    with pytest.raises(Refused, match="is read-only"):
        create_namespace(warehouse_client, "new", {})
    warehouse_client.close()
    outcomes = import_all(client, uri)
    assert outcomes == dict.fromkeys(("shop", "shop.eu", "shop.orders", "shop.eu.orders"), "imported")
    assert read_ids(client, "shop.orders") == [1, 1, 2, 2, 3, 3]
    assert set(import_all(client, uri).values()) == {"unchanged"}
    create_namespace(client, "mine", {"owner": "bob"})
    create_table(client, "mine.t", COLUMNS, location=f"{lake}/mine/t", properties={})
    append_ids(client, "mine.t", 7)
    assert export_all(client, uri, "--namespace", "mine") == {"mine": "exported", "mine.t": "exported"}
    assert catalog.load_table(("mine", "t")).scan().to_arrow().column("id").to_pylist() == [7]
    assert set(export_all(client, uri, "--namespace", "mine").values()) == {"unchanged"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tables_move_from_and_to_the_java_server(start_seamark: Callable[..., Seamark], tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    with run_java_fixture(lake, log=tmp_path / "java.log") as uri:
        catalog = load_catalog("java", type="rest", uri=uri)
        create_tables(catalog)
        # The first server may have federated warehouses in the lake. The second server may import tables from it.
        roots = {"SEAMARK_WAREHOUSE_ROOTS": lake.as_uri(), "SEAMARK_WAREHOUSE_ENDPOINTS": uri}
        federating_client = IndexClient(start_seamark("federating", env=roots).base_url)
        client = IndexClient(start_seamark("importing", env={"SEAMARK_ALLOWED_LOCATIONS": lake.as_uri()}).base_url)
        check_moves(federating_client, client, uri, lake.as_uri(), catalog)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tables_move_from_and_to_nessie(
    start_seamark: Callable[..., Seamark], s3: S3, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clients use their own keys for the store.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    lake = f"s3://{s3_bucket}/nessie"
    with run_nessie_server(s3, lake, log=tmp_path / "nessie.log") as uri:
        storage_properties = {
            "s3.endpoint": s3.endpoint,
            "s3.access-key-id": s3.access_key,
            "s3.secret-access-key": s3.secret_key,
            "s3.region": s3.region,
        }
        catalog = load_catalog("nessie", type="rest", uri=uri, **storage_properties)
        create_tables(catalog)
        storage_env = s3.build_seamark_env()
        roots = {**storage_env, "SEAMARK_WAREHOUSE_ROOTS": lake, "SEAMARK_WAREHOUSE_ENDPOINTS": uri}
        server_env = {**storage_env, "SEAMARK_ALLOWED_LOCATIONS": lake}
        showing_server = start_seamark("showing", warehouse=f"s3://{s3_bucket}/showing", env=roots)
        importing_server = start_seamark("importing", warehouse=f"s3://{s3_bucket}/importing", env=server_env)
        client = IndexClient(importing_server.base_url)
        check_moves(IndexClient(showing_server.base_url), client, uri, lake, catalog)
        assert set(import_all(client, f"{uri}/main").values()) == {"unchanged"}
