"""Defines the Spark configuration for Seamark as plain values, and opens a local session with it.

Tests, the demo, the docs and `deploy/spark/spark-defaults.conf` use the same values, so users copy tested settings. A
test compares the values. A JVM has one session. Catalogs can be added to a running session under any unused name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.engines import EXTENSIONS, build_catalog_conf
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import join_name, split_name
from seamark.connector.client.values import CURRENT, At
from seamark.connector.plans.quotes import backquote
from seamark.connector.plans.zones import is_utc
from seamark.connector.read.scans import bind_filter
from seamark.connector.read.tables import OpenTable, open_table
from seamark.connector.spark.reader_choice import estimate_remaining_rows
from seamark.connector.spark.source.source import register
from seamark.formats.iceberg.expressions.expression import collect_predicates
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.protocol.wire import STREAM_ENABLED

SHUFFLE_FREE = {
    "spark.sql.sources.v2.bucketing.enabled": "true",
    "spark.sql.sources.v2.bucketing.pushPartValues.enabled": "true",
    "spark.sql.sources.v2.bucketing.allowCompatibleTransforms.enabled": "true",
    "spark.sql.sources.v2.bucketing.allowJoinKeysSubsetOfPartitionKeys.enabled": "true",
    "spark.sql.sources.v2.bucketing.shuffle.enabled": "true",
    "spark.sql.requireAllClusterKeysForCoPartition": "false",
    "spark.sql.iceberg.planning.preserve-data-grouping": "true",
}
"""The settings with which joins and groupings by bucket or partition keys need no exchange.

If only one table of a join is partitioned in this way, only the other table is exchanged.
"""
DAEMON = "seamark.connector.spark.daemon"
"""The value of `spark.python.daemon.module`, unless the caller sets this property."""


def session_conf(jars: Iterable[Path], *, cores: int = 2, shuffle_partitions: int = 4) -> dict[str, str]:
    """Return the settings of a small local session that listens only on loopback.

    Args:
        jars: Iceberg's runtime and, for S3, its AWS bundle.
        cores: The number of threads that run tasks.
        shuffle_partitions: The number of tasks after an exchange of rows. Spark's default of 200 is slow for small
            tables.
    """
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
    """Return the jars that `make jars` has put into `folder`.

    Raises:
        FileNotFoundError: There are no jars.
    """
    jars = sorted(folder.glob("iceberg-*.jar"))
    if not jars:
        raise FileNotFoundError(f"there are no Iceberg jars in {folder}; run `make jars`")
    return jars


def open_session(name: str, conf: Mapping[str, str]) -> SparkSession:
    """Start a session. If a session is already running, set the values of `conf` that can be changed, and return it.

    By default, PySpark starts workers with `python3` from the PATH. This function makes the workers run this
    interpreter.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName(name)
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def add_catalog(spark: SparkSession, conf: Mapping[str, str]) -> None:
    """Add the catalog of `build_catalog_conf` to a running session.

    A name that is already in use keeps its catalog.
    """
    for key, value in conf.items():
        spark.conf.set(key, value)


def connect(
    spark: SparkSession, name: str, uri: str, *, token: str = "", extra: Mapping[str, str] | None = None
) -> None:
    """Add the catalog `name` to a running session. The server plans scans, and joins by bucket need no exchange.

    `SHUFFLE_FREE` has the session's settings for such joins of tables that are bucketed by the join key.
    The function also registers `format("seamark")`. The docstring of `build_catalog_conf` describes the parameters.
    """
    add_catalog(spark, {**build_catalog_conf(name, uri, token=token, extra=extra), **SHUFFLE_FREE})
    register(spark)


def read(
    spark: SparkSession,
    table: str,
    where: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    at: At = CURRENT,
) -> DataFrame:
    """Return the rows of a table that match an SQL predicate.

    The table is in a catalog that was added with `connect`, for example `sea.db.events`. Iceberg's reader reads the
    planned files. Seamark's reader is used if bitmap indexes select rows on only a few pages (`reader_choice.py`), or
    if Iceberg's reader would miss rows of a stream table that wait for a flush. Seamark's reader reads all columns
    unless `columns` is set. It also reads all columns if Spark evaluates the predicate.

    Raises:
        InvalidRequest: The catalog is not in the session.
    """
    name, *levels = split_name(table)
    uri, token = (spark.conf.get(f"spark.sql.catalog.{name}.{key}", "") for key in ("uri", "token"))
    if not uri:
        raise InvalidRequest(f"{name!r} is not a catalog of this session; add it with connect(spark, {name!r}, uri)")
    client = SeamarkClient(uri, token=token or None)
    source_table = open_table(client, levels, at)
    suits_seamark = where is not None and _suits_seamark_reader(spark, client, source_table, where)
    if suits_seamark or (at == CURRENT and _misses_rows(source_table)):
        options = {"uri": uri, "table": join_name(levels), **_make_snapshot_options(at)}
        options |= {"where": where} if where is not None and suits_seamark else {}
        options |= {"token": token} if token else {}
        if columns is not None and (where is None or suits_seamark):
            options["columns"] = ",".join(_resolve_column_names(spark, source_table, columns))
        frame = spark.read.format("seamark").options(**options).load()
        frame = frame if where is None or suits_seamark else frame.where(where)
    else:
        version = at.snapshot_id if at.ref is None else at.ref
        if at.as_of_ms is not None:
            version = source_table.snapshot_id
        reader = spark.read if version is None else spark.read.option("versionAsOf", version)
        frame = reader.table(".".join(map(backquote, (name, *levels))))
        frame = frame if where is None else frame.where(where)
    return frame if columns is None else frame.select(*map(backquote, columns))


def _misses_rows(source_table: OpenTable) -> bool:
    """Return whether Iceberg's reader misses rows that wait for a flush.

    For stream tables from format version 3 on, Spark itself chooses the files from a snapshot, and the snapshot does
    not contain these rows.
    """
    metadata = source_table.metadata
    is_stream = parse_bool(metadata.properties, STREAM_ENABLED, False)
    return is_stream and metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION


def _resolve_column_names(spark: SparkSession, source_table: OpenTable, columns: Sequence[str]) -> list[str]:
    """Return the column names as the table writes them if the session ignores case and the names are unambiguous.

    Names that are ambiguous or unknown stay unchanged. If the session distinguishes case, all names stay unchanged.
    """
    if spark.conf.get("spark.sql.caseSensitive") == "true":
        return list(columns)
    names: dict[str, str | None] = {}
    for field in source_table.schema.fields:
        lower_name = field.name.lower()
        names[lower_name] = None if lower_name in names else field.name
    return [names.get(column.lower()) or column for column in columns]


def _suits_seamark_reader(spark: SparkSession, client: SeamarkClient, source_table: OpenTable, where: str) -> bool:
    """Return whether Seamark's reader gives the same rows as Spark's predicate, and probably takes less time."""
    try:
        bound = bind_filter(where, source_table)
    except InvalidRequest:  # Spark may support a predicate that Seamark cannot parse.
        return False
    in_utc = is_utc(spark.conf.get("spark.sql.session.timeZone") or "")
    if not in_utc and any(predicate.kind.startswith("timestamp") for predicate in collect_predicates(bound)):
        return False  # In a predicate, Spark interprets strings as times in the session's zone.
    return estimate_remaining_rows(client, source_table, bound).suits_seamark


def _make_snapshot_options(at: At) -> dict[str, str]:
    options = {"snapshot-id": at.snapshot_id, "branch": at.ref, "as-of": at.as_of_ms}
    return {name: str(value) for name, value in options.items() if value is not None}
