"""Tests that every engine returns the rows of the model after very many changes of a stream table with a key.

KEYED_CHANGES is the number of changes. `python -m bench.streams.run keyed` sends ten million changes, and measures.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from bench.streams import keyed
from tests.seeds import first_seed
from tests.services.needs import NEEDS_TRINO
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog
from tests.services.trino import trino_server

pytestmark = [*NEEDS_TRINO, pytest.mark.slow]

CHANGES = int(os.environ.get("KEYED_CHANGES", "1000000"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", [2, 3])
def test_engines_read_the_model_after_updates_deletes_and_corrections_by_batch_writers(
    spark: SparkSession, tmp_path: Path, version: int
) -> None:
    env = {"SEAMARK_STREAM_FLUSH_INTERVAL_MS": "5000"}
    with Seamark(tmp_path / "home", env=env) as server:
        catalog = RestCatalog("keyed", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
        keyed.create_keyed_table(catalog, version)
        expected = keyed.to_expected_rows(keyed.send_changes(server.base_url, CHANGES, seed=first_seed()))
        assert np.array_equal(keyed.read_by_pyiceberg(catalog), expected), "PyIceberg"
        fresh_catalog = new_catalog(spark, server.base_url, extra={"header.X-Seamark-Fresh": "true"})
        statement = "SELECT id, value FROM {}." + keyed.TABLE
        assert np.array_equal(keyed.to_values(spark.sql(statement.format(fresh_catalog)).toArrow()), expected), "Spark"
        headers = {"iceberg.rest-catalog.http-headers": "X-Seamark-Fresh:true"}
        with trino_server(tmp_path / "trino", uri=server.base_url, catalog=headers) as trino:
            ids, values = zip(*trino.rows(statement.format("seamark")), strict=True)
            assert np.array_equal(keyed.to_values(pa.table({"id": ids, "value": values})), expected), "Trino"
        keyed.flush_table(server.base_url)
        assert np.array_equal(keyed.read_by_duckdb(server.base_url), expected), "DuckDB"
        assert np.array_equal(keyed.read_by_pyiceberg(catalog), expected), "PyIceberg after the flush"
