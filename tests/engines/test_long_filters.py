"""Tests of filters with thousands of values, on a server that shortens every long residual.

Spark, PyIceberg and Iceberg's Java reader filter the rows again. They return and count exactly the matching rows.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import In
from pyspark.sql import SparkSession

from tests.engines.conftest import collect_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

JAVA_HEADERS = {"X-Client-Version": "Apache Iceberg 1.12.0"}
SHORT_RESIDUALS = {"X-Seamark-Residuals": "short"}


def request_plan(server: Seamark, table: str, where: Any, headers: dict[str, str]) -> Any:
    url = f"{server.base_url}/v1/namespaces/db/tables/{table}/plan"
    request = urllib.request.Request(url, json.dumps({"filter": where}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def list_residuals(server: Seamark, table: str, where: Any, headers: dict[str, str]) -> list[Any]:
    return [task.get("residual-filter") for task in request_plan(server, table, where, headers)["file-scan-tasks"]]


def read_by_generics(spark: SparkSession, uri: str, table: str, column: str, values: list[Any]) -> list[Any]:
    """Return the ids that Java's `IcebergGenerics` reads for an IN condition with these values.

    `IcebergGenerics` filters rows only by residuals.
    """
    jvm: Any = spark._jvm
    iceberg = jvm.org.apache.iceberg
    catalog = iceberg.rest.RESTCatalog()
    properties = jvm.java.util.HashMap()
    properties.put("uri", uri)
    catalog.initialize("generics", properties)
    try:
        spark_table = catalog.loadTable(iceberg.catalog.TableIdentifier.parse(f"db.{table}"))
        # The test passes all values, and all rows, to Java as one text, because thousands of calls take seconds.
        filter_json = json.dumps({"type": "in", "term": column, "values": values})
        where = iceberg.expressions.ExpressionParser.fromJson(filter_json, spark_table.schema())
        records = iceberg.data.IcebergGenerics.read(spark_table).where(where).build()
        try:
            records_text = str(iceberg.relocated.com.google.common.collect.Lists.newArrayList(records).toString())
            return sorted(int(match) for match in re.findall(r"Record\((\d+), ", records_text))
        finally:
            records.close()
    finally:
        catalog.close()


@pytest.mark.slow
def test_rows_are_right_if_long_residuals_are_shortened(spark: SparkSession, tmp_path: Path) -> None:
    """Every fourth id matches, and the other ids are in the same files and ranges.

    A reader that filters rows only by a weaker residual therefore returns too many rows.
    """
    with (
        Seamark(tmp_path / "home", env={"SEAMARK_PLAN_RESIDUAL_BYTES": "0"}) as server,
        RestCatalog("python", uri=server.base_url) as pyiceberg_catalog,
    ):
        catalog = new_catalog(spark, server.base_url)
        spark.sql(f"CREATE NAMESPACE {catalog}.db")
        for table, partition_clause in (
            ("plain", ""),
            ("parts", "PARTITIONED BY (p)"),
            ("hashed", "PARTITIONED BY (s)"),
        ):
            spark.sql(
                f"CREATE TABLE {catalog}.db.{table} (id bigint, s string, p int) USING iceberg {partition_clause}"
            )
            spark.sql(
                f"INSERT INTO {catalog}.db.{table} "
                "SELECT id, concat('n', id % 4), int(id % 3) FROM range(0, 6000, 1, 2)"
            )
            expected = list(range(0, 6000, 4))
            where = {"type": "in", "term": "id", "values": expected}
            reported_residuals = list_residuals(server, table, where, {**JAVA_HEADERS, **SHORT_RESIDUALS})
            assert reported_residuals
            assert all(residual["type"] == "and" for residual in reported_residuals)
            assert read_by_generics(spark, server.base_url, table, "id", expected) == expected
            assert len(request_plan(server, table, where, JAVA_HEADERS).get("plan-tasks", [])) > 1
            assert set(list_residuals(server, table, where, {})) == {None}
            id_list = ", ".join(map(str, expected))
            id_frame = spark.sql(f"SELECT id FROM {catalog}.db.{table} WHERE id IN ({id_list}) ORDER BY id")
            assert [id_ for (id_,) in collect_rows(id_frame)] == expected
            count_query = spark.sql(f"SELECT count(*) FROM {catalog}.db.{table} WHERE id IN ({id_list})")
            assert collect_rows(count_query) == [(len(expected),)]
            narrowed_count = spark.sql(f"SELECT count(*) FROM {catalog}.db.{table} WHERE p = 1 AND id IN ({id_list})")
            assert collect_rows(narrowed_count) == [(len([id_ for id_ in expected if id_ % 3 == 1]),)]
            scan = pyiceberg_catalog.load_table(f"db.{table}").scan(row_filter=In("id", expected))  # type: ignore[call-arg]
            assert sorted(scan.to_arrow()["id"].to_pylist()) == expected
            assert scan.count() == len(expected)
            names = [f"n{number}" for number in range(500) if number != 1]
            name_scan = pyiceberg_catalog.load_table(f"db.{table}").scan(row_filter=In("s", names))  # type: ignore[call-arg]
            assert name_scan.count() == 4500  # A quarter of the 6000 rows has the name n1.
            literals = ", ".join(f"'{name}'" for name in names)
            assert collect_rows(spark.sql(f"SELECT count(*) FROM {catalog}.db.{table} WHERE s IN ({literals})")) == [
                (4500,)
            ]
