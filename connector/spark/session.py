"""How Spark is pointed at Seamark: the configuration as plain values, and a local session made from it.

The same values serve the tests, the demo, the docs and `deploy/spark/spark-defaults.conf` (a test compares them), so
that what a user copies is what was tested. A JVM holds one session; catalogs are added to it while it runs, under any
free name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import CURRENT, At, SeamarkClient, split_name
from seamark.connector.client.errors import BadRequest
from seamark.connector.plans.quotes import backquoted
from seamark.connector.plans.zones import is_utc
from seamark.connector.read.scans import bound_filter
from seamark.connector.read.tables import OpenTable, open_table
from seamark.connector.spark.reader_choice import found_by
from seamark.connector.spark.source.source import register
from seamark.metaserver.iceberg.expressions.expression import predicates_of

EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
CATALOG_CLASS = "org.apache.iceberg.spark.SparkCatalog"
SHUFFLE_FREE = {
    "spark.sql.sources.v2.bucketing.enabled": "true",
    "spark.sql.sources.v2.bucketing.pushPartValues.enabled": "true",
    "spark.sql.sources.v2.bucketing.allowCompatibleTransforms.enabled": "true",
    "spark.sql.sources.v2.bucketing.allowJoinKeysSubsetOfPartitionKeys.enabled": "true",
    "spark.sql.sources.v2.bucketing.shuffle.enabled": "true",
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    "spark.sql.iceberg.planning.preserve-data-grouping": "true",
}
"""Joins and groupings by the keys that tables are bucketed or partitioned by need no exchange; a join with a table that
is not exchanges that side alone."""
DAEMON = "seamark.connector.spark.daemon"
"""`spark.python.daemon.module`; a caller's own goes before it."""


def catalog_conf(
    name: str, uri: str, *, warehouse: str = "", token: str = "", extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Spark settings that make `name` a catalog served at `uri` (http://host:port).

    `token` is a bearer token; `extra` are catalog properties without the prefix, such as `s3.endpoint`.
    Spark's own table cache is off: a commit by anybody is then seen by the next query, and Seamark answers an
    unchanged table with 304 anyway. Spark filters rows again after Iceberg, so long residuals may be short.
    """
    properties = {"type": "rest", "uri": uri, "cache-enabled": "false", "rest-catalog-purge": "true"}
    properties["header.X-Seamark-Residuals"] = "short"
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
        "spark.python.daemon.module": DAEMON,
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


def connect(
    spark: SparkSession, name: str, uri: str, *, token: str = "", extra: Mapping[str, str] | None = None
) -> None:
    """In one line: a running session has the catalog `name`, whose scans the server plans and whose joins by bucket
    need no exchange, and knows `format("seamark")`. The rest is as in `catalog_conf`."""
    add_catalog(spark, {**catalog_conf(name, uri, token=token, extra=extra), **SHUFFLE_FREE})
    register(spark)


def read(
    spark: SparkSession,
    table: str,
    where: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    at: At = CURRENT,
) -> DataFrame:
    """A table of a catalog that `connect` made, as `sea.db.events`: the rows that a predicate in SQL is true for.

    By Iceberg's own reader, over the files that the server leaves; by ours where bitmap indexes choose rows of those,
    and these lie on few of their pages (`choosing.py`). Ours is told only by `columns` which of them are wanted.
    """
    name, *levels = split_name(table)
    uri, token = (spark.conf.get(f"spark.sql.catalog.{name}.{one}", "") for one in ("uri", "token"))
    if not uri:
        raise BadRequest(f"{name!r} is no catalog of this session: connect(spark, {name!r}, uri) makes it one")
    client = SeamarkClient(uri, token=token or None)
    opened = None if where is None and at.as_of_ms is None else open_table(client, levels, at)
    if where is not None and opened is not None and _suits_ours(spark, client, opened, where):
        options = {"uri": uri, "table": _dotted(levels), "where": where, **_ours(at)}
        options |= {"token": token} if token else {}
        options |= {} if columns is None else {"columns": ",".join(_spelt(spark, opened, columns))}
        found = spark.read.format("seamark").options(**options).load()
    else:
        version = at.snapshot_id if at.ref is None else at.ref
        if at.as_of_ms is not None and opened is not None:
            version = opened.snapshot_id
        reader = spark.read if version is None else spark.read.option("versionAsOf", version)
        found = reader.table(".".join(map(backquoted, (name, *levels))))
        found = found if where is None else found.where(where)
    return found if columns is None else found.select(*map(backquoted, columns))


def _spelt(spark: SparkSession, opened: OpenTable, columns: Sequence[str]) -> list[str]:
    """As the table spells them, where case does not matter to the session and they are no others'."""
    if spark.conf.get("spark.sql.caseSensitive") == "true":
        return list(columns)
    spelt: dict[str, str | None] = {}
    for field in opened.schema.fields:
        folded = field.name.lower()
        spelt[folded] = None if folded in spelt else field.name
    return [spelt.get(one.lower()) or one for one in columns]


def _suits_ours(spark: SparkSession, client: SeamarkClient, opened: OpenTable, where: str) -> bool:
    try:
        bound = bound_filter(where, opened)
    except BadRequest:  # which Spark may know better
        return False
    in_utc = is_utc(spark.conf.get("spark.sql.session.timeZone") or "")
    if not in_utc and any(one.kind.startswith("timestamp") for one in predicates_of(bound)):
        return False  # texts are times of another zone to Spark
    return found_by(client, opened, bound).suits_ours


def _dotted(levels: list[str]) -> str:
    return ".".join(one.replace("\\", "\\\\").replace(".", "\\.") for one in levels)


def _ours(at: At) -> dict[str, str]:
    named = {"snapshot-id": at.snapshot_id, "branch": at.ref, "as-of": at.as_of_ms}
    return {name: str(value) for name, value in named.items() if value is not None}
