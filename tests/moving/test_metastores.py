"""Tests of `seamark import` from a real Hive metastore, and from AWS Glue as moto emulates it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
from hive_metastore.ttypes import FieldSchema, SerDeInfo, StorageDescriptor, Table
from pyiceberg.catalog import Catalog, hive, load_catalog

from seamark.connector.client.catalog import create_namespace, load_namespace_properties
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from tests.moving.glue import run_glue
from tests.moving.hive import Hive4Client, run_hive_metastore
from tests.moving.test_import import import_all, run_import

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})
KEYS = {"glue.access-key-id": "key", "glue.secret-access-key": "secret"}


def create_tables(catalog: Catalog, lake: Path) -> None:
    """Create `shop.orders`, to which rows are appended twice, and `hr.people` without rows."""
    for namespace in ("shop", "hr"):
        catalog.create_namespace(namespace, {"owner": "ann"})
    orders = catalog.create_table("shop.orders", ROWS.schema, location=f"{lake.as_uri()}/shop/orders")
    orders.append(ROWS)
    orders.append(ROWS)
    catalog.create_table("hr.people", ROWS.schema, location=f"{lake.as_uri()}/hr/people")


def check_import(target: IndexClient, catalog: Catalog, source: str, *options: str) -> None:
    """Check the outcomes of four imports of the catalog.

    A dry run changes nothing. The first import registers all tables, and the second changes nothing. The third refuses
    a table to which a writer of the other catalog has committed in between.
    """
    names = {"shop", "hr", "shop.orders", "hr.people"}
    planned_states = import_all(target, source, "--dry-run", *options)
    assert {name: planned_states[name] for name in names} == dict.fromkeys(names, "importable")
    assert ("shop",) not in set(target.namespaces())
    imported_states = import_all(target, source, *options)
    assert {name: imported_states[name] for name in names} == dict.fromkeys(names, "imported")
    assert load_namespace_properties(target, "shop")["owner"] == "ann"
    assert sorted(scan(target, "shop.orders").to_arrow().column("id").to_pylist()) == [1, 1, 2, 2]
    repeated_states = import_all(target, source, *options)
    assert {name: repeated_states[name] for name in names} == dict.fromkeys(names, "unchanged")
    catalog.load_table("shop.orders").append(ROWS)
    assert import_all(target, source, *options)["shop.orders"] == "refused"


@pytest.fixture
def metastore(tmp_path: Path, lake: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(hive, "Client", Hive4Client)
    with run_hive_metastore(tmp_path / "hive", lake.as_uri()) as address:
        yield address


def make_hive_table(name: str, location: str, parameters: dict[str, str]) -> Table:
    serde = SerDeInfo(serializationLib="org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe", parameters={})
    storage = StorageDescriptor(
        cols=[FieldSchema("id", "bigint", None)], location=location, serdeInfo=serde, parameters={}, bucketCols=[]
    )
    return Table(
        dbName="shop",
        tableName=name,
        owner="ann",
        sd=storage,
        partitionKeys=[],
        parameters={"EXTERNAL": "TRUE", **parameters},
        tableType="EXTERNAL_TABLE",
    )


def test_tables_move_from_a_hive_metastore(metastore: str, lake: Path, target: IndexClient) -> None:
    catalog = load_catalog("hive", type="hive", uri=metastore, warehouse=lake.as_uri())
    create_tables(catalog, lake)
    outside_folder = lake.parent / "secret" / "metadata"
    outside_folder.mkdir(parents=True)
    (outside_folder / "v1.metadata.json").write_text("{}")
    refused_locations = {
        "passwd": "file:///etc/passwd",
        "outside": (outside_folder / "v1.metadata.json").as_uri(),
        "bucket": "s3a://other-tenant/t/metadata/v1.metadata.json",
        "hdfs": "hdfs://namenode/t/metadata/v1.metadata.json",
        "internal": "http://169.254.169.254/latest/metadata.json",
        "missing": f"{lake.as_uri()}/none/metadata/v1.metadata.json",
        "empty": "",
    }
    with catalog._client as client:  # type: ignore[attr-defined]
        for name, location in refused_locations.items():
            parameters = {"table_type": "iceberg", "metadata_location": location}
            client.create_table(make_hive_table(name, f"{lake.as_uri()}/{name}", parameters))
        client.create_table(make_hive_table("plain", f"{lake.as_uri()}/plain", {}))
    check_import(target, catalog, metastore)
    outcomes = import_all(target, metastore, "--namespace", "shop")
    assert {name: outcomes[f"shop.{name}"] for name in refused_locations} == dict.fromkeys(refused_locations, "refused")
    assert "shop.plain" not in outcomes
    assert "outside the warehouse" in run_import(target, metastore, "--table", "shop.passwd").output


@pytest.fixture
def glue_url() -> Iterator[str]:
    with run_glue() as url:
        yield url


@pytest.fixture
def glue_options(glue_url: str, tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "glue.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in {"glue.endpoint": glue_url, **KEYS}.items()))
    return ("--properties", str(path))


def make_glue_client(url: str) -> Any:
    return boto3.client(
        "glue", endpoint_url=url, region_name="eu-central-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )


def test_tables_move_from_glue(glue_url: str, glue_options: tuple[str, ...], lake: Path, target: IndexClient) -> None:
    properties = {"glue.endpoint": glue_url, "glue.region": "eu-central-1", **KEYS}
    catalog = load_catalog("glue", type="glue", warehouse=lake.as_uri(), **properties)
    create_tables(catalog, lake)
    client = make_glue_client(glue_url)
    for name, parameters in (
        ("passwd", {"table_type": "iceberg", "metadata_location": "file:///etc/passwd"}),
        ("empty", {"table_type": "ICEBERG"}),
        ("plain", {"classification": "parquet"}),
    ):
        client.create_table(DatabaseName="shop", TableInput={"Name": name, "Parameters": parameters})
    client.create_table(DatabaseName="shop", TableInput={"Name": "bare"})
    check_import(target, catalog, "glue://eu-central-1", *glue_options)
    outcomes = import_all(target, "glue://eu-central-1", "--namespace", "shop", *glue_options)
    assert (outcomes["shop.passwd"], outcomes["shop.empty"]) == ("refused", "refused")
    assert not {"shop.plain", "shop.bare"} & outcomes.keys()


def test_all_pages_of_a_glue_database_are_imported(
    glue_url: str, glue_options: tuple[str, ...], target: IndexClient
) -> None:
    client = make_glue_client(glue_url)
    client.create_database(DatabaseInput={"Name": "many"})
    parameters = {"table_type": "ICEBERG", "metadata_location": "file:///etc/none"}
    table_count = 250  # A page has at most 100 tables.
    for number in range(table_count):
        client.create_table(DatabaseName="many", TableInput={"Name": f"t{number}", "Parameters": parameters})
    create_namespace(target, "many", {})
    outcomes = import_all(target, "glue://eu-central-1", *glue_options)
    assert sum(outcome == "refused" for outcome in outcomes.values()) == table_count


def test_glue_without_a_login_is_an_error_that_names_glue(
    target: IndexClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run_import(target, "glue://eu-central-1")
    assert result.exit_code == 1
    assert "Glue does not answer: Unable to locate credentials" in result.output
    assert run_import(target, "glue://not a region/").exit_code == 1
