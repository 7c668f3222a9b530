"""How Spark is pointed at Seamark: the configuration as plain values, and a local session made from it.

The same values serve the tests, the demo, the docs and `deploy/spark/spark-defaults.conf` (a test compares them), so
that what a user copies is what was tested. A JVM holds one session; catalogs are added to it while it runs, under any
free name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pyspark.sql import SparkSession

EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
CATALOG_CLASS = "org.apache.iceberg.spark.SparkCatalog"


def catalog_conf(
    name: str, uri: str, *, warehouse: str = "", token: str = "", extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Spark settings that make `name` a catalog served at `uri` (http://host:port).

    `token` is a bearer token; `extra` are catalog properties without the prefix, such as `s3.endpoint`.
    Spark's own table cache is off: a commit by anybody is then seen by the next query, and Seamark answers an
    unchanged table with 304 anyway.
    """
    properties = {"type": "rest", "uri": uri, "cache-enabled": "false", "rest-catalog-purge": "true"}
    if warehouse:
        properties["warehouse"] = warehouse
    if token:
        properties |= {"token": token, "rest.auth.type": "oauth2", "oauth2-server-uri": f"{uri}/v1/oauth/tokens"}
    properties |= extra or {}
    prefix = f"spark.sql.catalog.{name}"
    return {prefix: CATALOG_CLASS} | {f"{prefix}.{key}": value for key, value in properties.items()}


def s3_properties(*, endpoint: str, access_key: str, secret_key: str, region: str) -> dict[str, str]:
    """Catalog properties with which a client reaches an S3-compatible store itself, path style, with static keys."""
    return {
        "s3.endpoint": endpoint,
        "s3.path-style-access": "true",
        "s3.access-key-id": access_key,
        "s3.secret-access-key": secret_key,
        "client.region": region,
    }


def session_conf(jars: Iterable[Path], *, cores: int = 2, shuffle_partitions: int = 4) -> dict[str, str]:
    """Settings of a small local session bound to loopback. `jars` are Iceberg's runtime and, for S3, its AWS bundle."""
    return {
        "spark.master": f"local[{cores}]",
        "spark.jars": ",".join(str(jar) for jar in jars),
        "spark.sql.extensions": EXTENSIONS,
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.shuffle.partitions": str(shuffle_partitions),
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }


def iceberg_jars(folder: Path) -> list[Path]:
    """The jars `make jars` put into `folder`; raises FileNotFoundError, naming the remedy, when there are none."""
    jars = sorted(folder.glob("iceberg-*.jar"))
    if not jars:
        raise FileNotFoundError(f"no Iceberg jars in {folder}: run `make jars`")
    return jars


def open_session(name: str, conf: Mapping[str, str]) -> SparkSession:
    """Starts the session, or returns the living one with `conf` applied as far as a running session allows.

    PySpark starts its workers with `python3` from the PATH unless told otherwise; here they run this interpreter.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName(name)
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def add_catalog(spark: SparkSession, conf: Mapping[str, str]) -> None:
    """Registers the catalog of `catalog_conf` with a running session. A name used before keeps its old catalog."""
    for key, value in conf.items():
        spark.conf.set(key, value)
