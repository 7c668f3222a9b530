"""Tests of engines that open tables in Azure and Google Cloud Storage with the libraries of these clouds.

Spark uses Iceberg's bundles for the clouds, and Trino its own file system, from `make clouds`. The emulators check no
limits of keys, so the engines have keys of their own. `tests/warehouses/test_cloud_engines.py` tests keys for one
table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.engines import EXTENSIONS, NO_HIVE, build_catalog_conf
from tests.services.clouds.azurite import ACCOUNT, ACCOUNT_KEY, Azurite
from tests.services.clouds.gcs import GoogleStorage
from tests.services.process import CACHE, ServiceFailed
from tests.services.seamark import Seamark

pytestmark = [pytest.mark.slow]
_JARS = CACHE / "clouds"
_WRITE_STATEMENTS = """
CREATE NAMESPACE sea.db;
CREATE TABLE sea.db.t USING iceberg PARTITIONED BY (p)
  TBLPROPERTIES ('format-version'='2', 'write.delete.mode'='merge-on-read')
  AS SELECT id, concat('a b/', id % 3, 'ü') AS p FROM range(1000);
DELETE FROM sea.db.t WHERE id % 2 = 0;
INSERT INTO sea.db.t VALUES (5000, 'spark');
"""
_COUNT_QUERY = "SELECT concat_ws(':', 'rows', count(*), max(id)) FROM sea.db.t;"


def start_server(folder: Path, warehouse: str, settings: Mapping[str, str]) -> Seamark:
    env = {f"SEAMARK_{name.upper()}": value for name, value in settings.items()}
    return Seamark(folder / "home", warehouse=warehouse, env=env)


def run_spark(folder: Path, url: str, sql: str, properties: Mapping[str, str]) -> str:
    """Run statements with `spark-sql` in a new process with the libraries of the clouds, and return its output."""
    if not any(_JARS.glob("spark/*.jar")):
        raise ServiceFailed("the libraries of the clouds are not installed; run `make clouds`")
    conf = {
        **NO_HIVE,
        **build_catalog_conf("sea", url, extra=properties),
        "spark.sql.extensions": EXTENSIONS,
        "spark.master": "local[1]",
        "spark.driver.memory": "1g",
        "spark.driver.extraClassPath": f"{CACHE / 'jars'}/*:{_JARS / 'spark'}/*",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    argv = [str(Path(pyspark.__file__).parent / "bin" / "spark-sql")]
    argv += [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    completed = subprocess.run(
        [*argv, "-e", sql], env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stderr[-5000:]
    return completed.stdout


@pytest.mark.spark
def test_spark_and_pyiceberg_share_a_table_in_azure(azurite: Azurite, tmp_path: Path) -> None:
    warehouse = f"{azurite.create_container()}/lake"
    with start_server(tmp_path, warehouse, azurite.make_settings()) as server:
        # The server sends the address of the account, and Spark has its own key. Each query returns the number of rows
        # and the largest id.
        keys = {"adls.auth.shared-key.account.name": ACCOUNT, "adls.auth.shared-key.account.key": ACCOUNT_KEY}
        assert "rows:501:5000" in run_spark(tmp_path, server.base_url, _WRITE_STATEMENTS + _COUNT_QUERY, keys)
        catalog = RestCatalog(
            "cloud", uri=server.base_url, **{"adls.connection-string": azurite.make_connection_string()}
        )
        table = catalog.load_table("db.t")
        assert table.location().startswith(warehouse)
        assert len(table.scan().to_arrow()) == 501
        table.append(pa.table({"id": [6000], "p": ["pyiceberg"]}))
        assert "rows:502:6000" in run_spark(tmp_path, server.base_url, _COUNT_QUERY, keys)


@pytest.mark.spark
@pytest.mark.trino
def test_spark_trino_and_pyiceberg_share_a_table_in_google_cloud_storage(
    google_storage: GoogleStorage, tmp_path: Path
) -> None:
    from tests.services.trino import CATALOG, trino_server

    warehouse = f"{google_storage.create_bucket()}/lake"
    with start_server(tmp_path, warehouse, google_storage.make_settings()) as server:
        # The server sends the address of the emulator, and states that the emulator needs no token. Each query
        # returns the number of rows and the largest id.
        assert "rows:501:5000" in run_spark(tmp_path, server.base_url, _WRITE_STATEMENTS + _COUNT_QUERY, {})
        key_file = tmp_path / "key.json"
        key_file.write_text(json.dumps(google_storage.make_service_account()))
        properties = {
            "fs.native-gcs.enabled": "true",
            "gcs.endpoint": google_storage.endpoint,
            "gcs.auth-type": "SERVICE_ACCOUNT",
            "gcs.json-key-file-path": str(key_file),
            "gcs.project-id": "tests",
        }
        jars = sorted(_JARS.glob("trino/*.jar"))
        with trino_server(tmp_path / "trino", uri=server.base_url, catalog=properties, plugin_jars=jars) as trino:
            assert trino.rows(f"SELECT count(*), max(id) FROM {CATALOG}.db.t") == [[501, 5000]]
            trino.rows(f"INSERT INTO {CATALOG}.db.t VALUES (6000, 'trino')")
            trino.rows(f"DELETE FROM {CATALOG}.db.t WHERE id < 100")
            trino.rows(f"CREATE TABLE {CATALOG}.db.own AS SELECT 1 AS id")
            trino.rows(f"DROP TABLE {CATALOG}.db.own")
        catalog = RestCatalog("cloud", uri=server.base_url, **google_storage.make_client_properties())
        assert sorted(catalog.load_table("db.t").scan().to_arrow()["id"].to_pylist())[-2:] == [5000, 6000]
        row_count = 501 + 1 - 50  # Trino inserted a row, and deleted the 50 odd ids below 100.
        assert f"rows:{row_count}:6000" in run_spark(tmp_path, server.base_url, _COUNT_QUERY, {})
